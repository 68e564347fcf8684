"""What MOEQ_KERNEL may say beside the forms of the CPU's kernel."""

VARIABLE = "MOEQ_KERNEL"
REFERENCE, CPU, TRITON = "reference", "cpu", "triton"
