"""How fast a checkpoint runs on this machine, beside its dense model and other libraries' kernels: `moeq bench`."""
