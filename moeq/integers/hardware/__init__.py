"""Hardware of the integer forward: widths of its datapaths, and cycles, multipliers and memories of two kernels."""
