"""What nvfp4 and mxfp4 have in common: codes that are floating-point numbers, of 4 bits in groups and of 8 in rows.

After GPTQ (Frantar et al., arXiv 2210.17323), see numerics/float_sweep.py. Gate and up share one Hessian, and at NVFP4
what their scales are counted in, since runtimes have one number for both.

Letters: E experts of a batch, N output rows, K inputs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from moeq.quantizers.quantizer import BatchSizes, Quantizer
from moeq_kernels.widths import FLOAT_BITS, Encoding

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.quantizers.statistics import Statistics
    from moeq.recipe import LossesSection
    from moeq_kernels.packed import PackedWeight

SEARCH_OPERATIONS = 100  # of a weight: the scales that are tried


def quantize(
    weights: dict[str, Tensor], statistics: Statistics, settings: LossesSection, codebook: str
) -> dict[str, dict[int, PackedWeight]]:
    """Codes of a batch of experts, {projection: [E, N, K]}; fallbacks of factorizations are noted of the expert."""
    import torch

    from moeq.numerics.factor import factorize
    from moeq.numerics.float_sweep import quantize as swept

    made: dict[str, dict[int, PackedWeight]] = {}
    for names, hessians in statistics.hessians_by_input(weights):
        factor = factorize(torch.stack(hessians), settings.damping)
        hessians.clear()
        statistics.note_fallbacks(factor)
        stack = torch.cat([weights[name] for name in names], 1)
        rows = stack.shape[1] // len(names)
        found = {bits: swept(stack, factor, bits, codebook) for bits in settings.bits}
        for place, name in enumerate(names):
            own = slice(place * rows, (place + 1) * rows)
            made[name] = {bits: _some_rows(one, own) for bits, one in found.items()}
    return made


def _some_rows(stack: PackedWeight, rows: slice) -> PackedWeight:
    """Some rows of a stack [E, N, K]."""
    from dataclasses import replace

    return replace(stack, codes=stack.codes[:, rows].contiguous(), scales=stack.scales[:, rows].contiguous())


def memory(sizes: BatchSizes) -> list[int]:
    """Hessians while they are summed up, then those of the first matrices and those of down, factored one after the
    other, with columns, residuals and codes of all rows, and what is stored."""
    hidden, inner, widths = sizes.layer.hidden_size, sizes.layer.intermediate_size, len(sizes.settings.bits)
    wide = sizes.experts * (len(sizes.layer.projections) - 1) * inner * hidden
    narrow = sizes.experts * hidden * inner
    first, second = 4 * sizes.experts * hidden**2, 4 * sizes.experts * inner**2
    lists = sizes.hessian_bytes
    columns = 4 + 4 + 4 + 1 + 1
    return [
        sizes.summing_bytes,
        lists + 2 * first + wide * (columns + widths),
        lists + 2 * second + wide * widths + narrow * (columns + widths),
    ]


def operations(sizes: BatchSizes) -> float:
    """Hessians and intermediate states, two Cholesky factors, and the feedback and search of every width."""
    searches = SEARCH_OPERATIONS * sizes.layer.parameters_per_expert
    return sizes.factor_operations + sizes.feedback_operations + searches


def declared(codebook: str, help: str) -> Quantizer:
    """The quantizer of one kind of codes."""
    return Quantizer(
        name=codebook,
        label=codebook.upper(),
        help=help,
        quantize=partial(quantize, codebook=codebook),
        memory=memory,
        operations=operations,
        widths=FLOAT_BITS,
        grids=("asymmetric", "even"),
        nested=False,
        trained=False,
        needs="hessians",
        encoding=lambda settings: Encoding.floating(codebook),
    )
