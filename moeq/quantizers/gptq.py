"""gptq: every column's error is made up for by the columns after it, weighed by what the expert is given.

After Frantar et al., arXiv 2210.17323, Algorithm 1, in the form of numerics/gptq.py. Gate and up share one Hessian.

Letters: E experts of a batch, N output rows, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.quantizers.quantizer import BatchSizes, Quantizer

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.numerics.factor import Factor
    from moeq.numerics.gptq import Quantized
    from moeq.quantizers.non_experts import Grid
    from moeq.quantizers.statistics import Statistics
    from moeq.recipe import LossesSection

LOOP_BYTES = 16 << 20  # a thread's columns, residuals and feedback in the column loop on a CPU


def quantize(weights: dict[str, Tensor], statistics: Statistics, settings: LossesSection) -> dict[str, Quantized]:
    """GPTQ of a batch of experts, {projection: [E, N, K]}; what a factorization fell back to is noted of the expert."""
    import torch

    from moeq.models.experts import DOWN
    from moeq.quantizers.trained_grid import select

    first, second = statistics.hessians()
    names = [name for name in weights if name != DOWN]
    stack = torch.cat([weights[name] for name in names], 1)
    both = _quantized(stack, torch.stack(first), statistics, settings)
    down = _quantized(weights[DOWN], torch.stack(second), statistics, settings)
    rows = stack.shape[1] // len(names)
    every = slice(None)
    parts = {name: select(both, (every, every, slice(i * rows, (i + 1) * rows))) for i, name in enumerate(names)}
    return parts | {DOWN: down}


def _quantized(weight: Tensor, hessian: Tensor, statistics: Statistics, settings: LossesSection) -> Quantized:
    """GPTQ of weights [E, N, K] that share Hessians [E, K, K], at all widths.

    With act_order, 1 bit keeps the order of the columns: its scale is worth much less when it is not taken from what
    earlier columns made of the group.
    """
    from moeq.numerics.factor import act_order, factorize
    from moeq.quantizers.rounding import by_width, rounded

    ordered = [bits for bits in settings.bits if settings.act_order and bits > 1]
    plain = [bits for bits in settings.bits if bits not in ordered]
    parts = []
    for widths in (ordered, plain):
        if widths:
            order, work = act_order(hessian) if widths is ordered else (None, hessian)
            factor = factorize(work, settings.damping)
            statistics.note_fallbacks(factor)
            importance = None
            if settings.clip == "mse":  # columns as they lie
                importance = factor.pivots if order is None else factor.pivots.gather(1, order.argsort(-1))
            parts.append(rounded(weight, factor.unit_upper, settings, widths, importance, order))
    return parts[0] if len(parts) == 1 else by_width(parts, settings.bits)


def linear(weight: Tensor, factor: Factor, grid: Grid) -> Quantized:
    """GPTQ of some rows [N, K] of a module that is no expert."""
    from moeq.numerics import gptq

    upper, size = factor.unit_upper, grid.group_size
    return gptq.quantize(weight[None], upper, bits=[grid.bits], group_size=size, symmetric=grid.symmetric)


def memory(sizes: BatchSizes) -> list[int]:
    """Hessians while they are summed up, then those of the first matrices and those of down, factored one after the
    other; the lists that Hessians were summed up in stay, and so does what the first matrices became.

    A CPU's column loop rounds a few rows at a time and packs blocks, so that what counts there are the batch's weights,
    Hessians, factors and codes. A GPU works on all rows of the batch at once, in tensors of float32 and 64-bit words.
    """
    import torch

    from moeq_kernels.widths import resolved_group_size

    hidden, inner, widths = sizes.layer.hidden_size, sizes.layer.intermediate_size, len(sizes.settings.bits)
    wide = sizes.experts * (len(sizes.layer.projections) - 1) * inner * hidden
    narrow = sizes.experts * hidden * inner
    first, second = 4 * sizes.experts * hidden**2, 4 * sizes.experts * inner**2
    copies = 2 if sizes.settings.act_order else 1
    ordered = 2 if sizes.settings.act_order else 0  # in the order of rounding, and halfway there
    lists = sizes.hessian_bytes
    if sizes.gpu:
        group = resolved_group_size(max(hidden, inner), sizes.settings.group_size)
        step = 16 * sizes.experts * widths * max(group * 2 * inner, group * hidden)
        factor, codes = max(first, second), widths * (wide + narrow)
        rounding = lists + 2 * factor + wide * (8 + 6 * widths) + step + codes
        return [sizes.summing_bytes, lists + 5 * factor + codes, rounding, codes + 20 * narrow]
    stack, loop = 4 * wide, LOOP_BYTES * torch.get_num_threads()
    return [
        sizes.summing_bytes,
        lists + stack + (2 + ordered) * first + widths * wide * copies + loop,
        lists + stack + (2 + ordered) * second + widths * (wide + narrow * copies) + loop,
    ]


def operations(sizes: BatchSizes) -> float:
    """Hessians and intermediate states, two Cholesky factors, and the feedback of every width."""
    return sizes.factor_operations + sizes.feedback_operations


QUANTIZER = Quantizer(
    name="gptq",
    label="GPTQ",
    help="columns make up for the errors of those before them, weighed by calibration tokens",
    quantize=quantize,
    memory=memory,
    operations=operations,
    act_order=True,
    clip=True,
    needs="hessians",
    linear=linear,
)
