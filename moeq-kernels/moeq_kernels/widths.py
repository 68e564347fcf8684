"""Widths, limits and the names of formats: what is known of packed codes and whole numbers without any tensor."""

from __future__ import annotations

from typing import Literal

FULL = 16  # stands for an expert or a matrix as the checkpoint has it
SUPPORTED_BITS = (1, 2, 3, 4, 5, 6, 7, 8)
NESTED_BITS = (2, 3, 4)  # widths whose codes can be one code's leading bits, the widest last
WORD = 32
PARTS = ("codes", "scales", "zeros")  # tensors of a packed weight
METHOD = "moeq"  # quant_method of checkpoints in the native format
LAYOUT = "moeq-bitstream"
LAYOUT_VERSION = 1
NESTED_VERSION = 2  # where weights are nested
ROUNDING: Literal["half_up"] = "half_up"
MULTIPLIER_BITS = 16
EXACT_BITS = 52  # whole numbers up to 2**52, and half of one more, are exact in float64
MAX_SHIFT = 62


def group_count(num_inputs: int, group_size: int) -> int:
    """Groups along the inputs; the last may be shorter; group_size -1 means one group for the whole row."""
    return 1 if group_size == -1 else -(-num_inputs // group_size)


def resolved_group_size(num_inputs: int, group_size: int) -> int:
    """The number of inputs in a full group (group_size, or the whole row for -1 and for shorter rows)."""
    return num_inputs if group_size == -1 else min(group_size, num_inputs)
