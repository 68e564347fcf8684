"""nvfp4: numbers of 4 bits, 16 to a scale of 8 bits (NVFP4), and FP8 at 8 bits, see quantizers/floating.py.

Letters: E experts of a batch, N output rows, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.quantizers import floating

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.quantizers.statistics import Statistics
    from moeq.recipe import LossesSection
    from moeq_kernels.packed import PackedWeight


def quantize(
    weights: dict[str, Tensor], statistics: Statistics, settings: LossesSection
) -> dict[str, dict[int, PackedWeight]]:
    """NVFP4 and FP8 of a batch of experts, {projection: [E, N, K]}."""
    return floating.quantize(weights, statistics, settings, "nvfp4")


QUANTIZER = floating.declared(
    "nvfp4",
    "4 bits as NVFP4 (a scale of 8 bits for 16 inputs), 8 bits as FP8 (a scale a row); GPTQ's feedback",
    quantize,
)
