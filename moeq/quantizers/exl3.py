"""exl3: the codes that exllamav3 runs, walks over 2**16 states between Hadamard transforms, made up for by columns.

exllamav3's converter is QTIP (Tseng et al., arXiv 2406.11235) with rotations; here the same stored form is filled by
numerics/exl3_ldlq.py: signs are always the same, and a row's scale is fitted to its weights. Gate and up share one
Hessian. Slow on a CPU.

Letters: E experts of a batch, N output rows, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.quantizers.quantizer import BatchSizes, Quantizer
from moeq_kernels.widths import EXL3_SIDE, EXL3_STATE_BITS, TRELLIS_BITS, Encoding

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.quantizers.statistics import Statistics
    from moeq.recipe import LossesSection
    from moeq_kernels.packed import PackedWeight

STEP_OPERATIONS = 9  # of a state of a weight, the walk around the seam included
LOOP_BYTES = 144 << 20  # a thread's ways back at 1 bit, and costs


def quantize(
    weights: dict[str, Tensor], statistics: Statistics, settings: LossesSection
) -> dict[str, dict[int, PackedWeight]]:
    """EXL3's codes of a batch of experts, {projection: [E, N, K]}; what a factorization fell back to is noted of the
    expert."""
    from moeq.numerics import exl3_ldlq

    made: dict[str, dict[int, PackedWeight]] = {}
    for names, hessian, factor in statistics.factors(weights, exl3_ldlq.factorize_turned):
        for name in names:
            found = exl3_ldlq.quantize(weights[name], factor, hessian, settings.bits)
            made[name] = {one.bits: one for one in found}
    return made


def memory(sizes: BatchSizes) -> list[int]:
    """Hessians while they are summed up, their factors, weights between the transforms, what the threads work on."""
    import torch

    hidden, inner, widths = sizes.layer.hidden_size, sizes.layer.intermediate_size, len(sizes.settings.bits)
    matrix = 4 * sizes.experts * inner * hidden
    at_once = matrix * (2 + widths) if sizes.gpu else LOOP_BYTES * torch.get_num_threads()
    factors = 3 * 4 * sizes.experts * max(hidden, inner) ** 2
    codes = matrix // 4 * widths * len(sizes.layer.projections)
    return [sizes.summing_bytes, sizes.hessian_bytes + factors + 2 * matrix + at_once + codes]


def operations(sizes: BatchSizes) -> float:
    """Hessians and intermediate states, two Cholesky factors, and the steps of every width."""
    steps = STEP_OPERATIONS * (1 << EXL3_STATE_BITS) * sizes.layer.parameters_per_expert
    return sizes.factor_operations + len(sizes.settings.bits) * steps


QUANTIZER = Quantizer(
    name="exl3",
    label="EXL3",
    help="the codes of exllamav3: walks over 65,536 states between Hadamard transforms; slow without a GPU",
    quantize=quantize,
    memory=memory,
    operations=operations,
    widths=TRELLIS_BITS,
    grids=("asymmetric",),
    nested=False,
    sides=EXL3_SIDE,
    needs="hessians",
    encoding=lambda settings: Encoding.exl3(),
)
