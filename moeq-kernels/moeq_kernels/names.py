"""What MOEQ_KERNEL may say beside the forms of the CPU's kernel."""

VARIABLE = "MOEQ_KERNEL"
REFERENCE, CPU, CPU_INT8, TRITON = "reference", "cpu", "cpu-int8", "triton"
