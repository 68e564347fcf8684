"""Products with packed experts on a CPU: compiled at first use by numba, with vectors of any instruction set."""
