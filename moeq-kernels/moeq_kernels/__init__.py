"""Packed weights as they are stored, and products with them: kernels for the CPU and GPUs, the plain way beside them.

It needs torch and numba, on a GPU Triton, and knows nothing of moeq, of transformers or of files.
"""
