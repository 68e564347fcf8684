"""What MOEQ_KERNEL may say beside the forms of the CPU's kernel, and whether Triton's programs are interpreted."""

import os

VARIABLE = "MOEQ_KERNEL"
REFERENCE, CPU, CPU_INT8, TRITON = "reference", "cpu", "cpu-int8", "triton"


def interpreted() -> bool:
    """Whether Triton's programs run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
