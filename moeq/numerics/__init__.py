"""Pure tensor functions: grids, packing, GPTQ."""
