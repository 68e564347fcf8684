"""iq: llama.cpp's i-quants, entries of its tables with steps of a scale, errors made up for by the columns after them.

What llama.cpp's own quantizer fills by rounding, weighted by mean squares of inputs, is filled by error feedback here,
see numerics/iq_ldlq.py. Gate and up share one Hessian. Needs the package gguf, which has the tables; on a CPU wherever
the model is.

Letters: E experts of a batch, N output rows, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field

from moeq.quantizers.quantizer import BatchSizes, Quantizer
from moeq_kernels.iq_types import BLOCK, BLOCKS, SETS, WIDTHS
from moeq_kernels.widths import Encoding

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.quantizers.statistics import Statistics
    from moeq.recipe import LossesSection
    from moeq_kernels.packed import PackedWeight

SEARCH_OPERATIONS = {1: 6300, 2: 4500, 3: 5000, 4: 2500, 8: 400}  # of a weight: steps and entries that are tried
EXACT = 3 * 4  # bytes of a weight as columns, residuals and what is moved


class IqSettings(BaseModel):
    iq_set: Literal["s", "xs", "xxs"] = Field(
        "s", description="iq: which types 2 and 3 bits are: IQ2_S and IQ3_S, IQ2_XS and IQ3_XXS, IQ2_XXS and IQ3_XXS"
    )


def codebook(settings: LossesSection) -> str:
    """The set's name as an `Encoding` has it."""
    found = f"iq-{settings.iq_set}"  # type: ignore[attr-defined]
    assert found in SETS, found
    return found


def quantize(
    weights: dict[str, Tensor], statistics: Statistics, settings: LossesSection
) -> dict[str, dict[int, PackedWeight]]:
    """i-quants of a batch of experts, {projection: [E, N, K]}; what a factorization fell back to is noted of the
    expert."""
    from moeq.numerics import iq_ldlq
    from moeq.numerics.factor import factorize

    made: dict[str, dict[int, PackedWeight]] = {}
    for names, hessian, factor in statistics.factors(weights, factorize):
        for name in names:
            found = iq_ldlq.quantize(weights[name], factor, hessian, settings.bits, codebook(settings))
            made[name] = {one.bits: one for one in found}
    return made


def memory(sizes: BatchSizes) -> list[int]:
    """Hessians while they are summed up, their factors, and of one matrix after the other what one width takes."""
    hidden, inner, widths = sizes.layer.hidden_size, sizes.layer.intermediate_size, sizes.settings.bits
    matrix = sizes.experts * inner * hidden
    factors = 3 * 4 * sizes.experts * max(hidden, inner) ** 2
    stored = sum(matrix * BLOCKS[name][1] // BLOCKS[name][0] for name in map(SETS["iq-s"].__getitem__, widths))
    return [sizes.summing_bytes, sizes.hessian_bytes + factors + matrix * EXACT + stored * len(sizes.layer.projections)]


def operations(sizes: BatchSizes) -> float:
    """Hessians and intermediate states, two Cholesky factors, feedback, and the searches of every width."""
    searches = sum(SEARCH_OPERATIONS[bits] for bits in sizes.settings.bits)
    return sizes.factor_operations + sizes.feedback_operations + searches * sizes.layer.parameters_per_expert


QUANTIZER = Quantizer(
    name="iq",
    label="i-quants",
    help="llama.cpp's i-quants with errors made up for: the least error in what llama.cpp reads",
    quantize=quantize,
    memory=memory,
    operations=operations,
    settings=IqSettings,
    widths=WIDTHS,
    grids=("asymmetric", "even"),
    nested=False,
    sides=BLOCK,
    needs="hessians",
    encoding=lambda settings: Encoding.iq(codebook(settings)),
    packages={"gguf": "pip install 'moeq[gguf]'"},
)
