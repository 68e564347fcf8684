"""Products with packed experts as they are stored: kernels for the CPU and for GPUs, and the plain way beside them."""
