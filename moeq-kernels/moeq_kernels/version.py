"""The version of moeq-kernels, read by the build; kernels that were measured belong to it."""

__version__ = "0.1.0"
