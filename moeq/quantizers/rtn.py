"""rtn: rounding to nearest, without calibration: the same codes whenever they are needed.

Letters: E experts, N output rows, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.quantizers.quantizer import BatchSizes, Quantizer

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.numerics.gptq import Quantized
    from moeq.quantizers.non_experts import Grid
    from moeq.recipe import LossesSection

LARGEST_IN_HEAP = 32 << 20  # glibc maps what is larger by itself, and gives it back at once


def quantize(weights: dict[str, Tensor], statistics: object, settings: LossesSection) -> dict[str, Quantized]:
    """Codes of the values nearest to {projection: [E, N, K]}; with clip mse every weight's error counts alike."""
    from moeq.quantizers.rounding import rounded

    made = {}
    for projection, weight in weights.items():
        importance = weight.new_ones(len(weight), weight.shape[2]) if settings.clip == "mse" else None
        made[projection] = rounded(weight, None, settings, settings.bits, importance)
    return made


def linear(weight: Tensor, factor: object, grid: Grid) -> Quantized:
    """Codes of the nearest values of some rows [N, K] of a module that is no expert."""
    from moeq.numerics import gptq

    return gptq.quantize(weight[None], None, bits=[grid.bits], group_size=grid.group_size, symmetric=grid.symmetric)


def memory(sizes: BatchSizes) -> list[int]:
    """The matrices before as codes, one input-major, its codes, and a group of them in float32 and 8 bits; blocks that
    lie in the heap of a CPU leave gaps there."""
    from moeq.models.experts import DOWN
    from moeq_kernels.widths import resolved_group_size

    rows, inputs = sizes.layer.shape(DOWN)
    stack = sizes.experts * rows * inputs
    codes = stack * len(sizes.settings.bits)
    share = resolved_group_size(inputs, sizes.settings.group_size) / inputs
    before = (len(sizes.layer.projections) - 1) * codes
    packing = 20 * stack if sizes.gpu else stack
    gaps = 0 if sizes.gpu else min(codes, LARGEST_IN_HEAP) + min(int(4 * share * codes), LARGEST_IN_HEAP)
    return [before + 4 * stack + int((1 + 5 * share) * codes) + gaps, before + codes + packing]


QUANTIZER = Quantizer(
    name="rtn",
    label="RTN",
    help="rounding to nearest, without calibration",
    quantize=quantize,
    memory=memory,
    clip=True,
    linear=linear,
    stored=False,
)
