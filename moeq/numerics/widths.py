"""Widths, limits and the names of formats: what is known of packed codes and whole numbers without any tensor."""

from __future__ import annotations

from typing import Literal

FULL = 16  # stands for an expert or a matrix as the checkpoint has it
SUPPORTED_BITS = (1, 2, 3, 4, 5, 6, 7, 8)
NESTED_BITS = (2, 3, 4)  # widths whose codes can be one code's leading bits, the widest last
METHOD = "moeq"  # quant_method of checkpoints in the native format
LAYOUT = "moeq-bitstream"
LAYOUT_VERSION = 1
NESTED_VERSION = 2  # where weights are nested
ROUNDING: Literal["half_up"] = "half_up"
MULTIPLIER_BITS = 16
EXACT_BITS = 52  # whole numbers up to 2**52, and half of one more, are exact in float64
MAX_SHIFT = 62
