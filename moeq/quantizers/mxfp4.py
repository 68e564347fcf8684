"""mxfp4: numbers of 4 bits, 32 to a power of two (MXFP4), and FP8 at 8 bits, see quantizers/floating.py.

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
    """MXFP4 and FP8 of a batch of experts, {projection: [E, N, K]}."""
    return floating.quantize(weights, statistics, settings, "mxfp4")


QUANTIZER = floating.declared(
    "mxfp4", "4 bits as MXFP4 (a power of two for 32 inputs), 8 bits as FP8 (a scale a row); GPTQ's feedback", quantize
)
