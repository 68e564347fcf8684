"""trellis: weights in tiles of 16 x 16 as walks over 2**L states, errors made up for by the columns after them.

QTIP (Tseng et al., arXiv 2406.11235) without its rotations, in the form of numerics/trellis_ldlq.py. Gate and up share
one Hessian. A scale a row is all that is stored beside the codes, whatever losses.group_size says.

Letters: E experts of a batch, N output rows, K inputs, L bits of a state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, field_validator

from moeq.quantizers.quantizer import BatchSizes, Quantizer
from moeq_kernels.widths import TRELLIS_BITS, Encoding

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.quantizers.statistics import Statistics
    from moeq.recipe import LossesSection
    from moeq_kernels.packed import PackedWeight

STEP_OPERATIONS = 9  # of a state of a weight, the walk around the seam included
LOOP_BYTES = 96 << 20  # a thread's ways back and columns


class TrellisSettings(BaseModel):
    trellis_states: int = Field(
        1024, ge=256, le=65536, description="trellis: states of a walk, a power of 2; more are better and slower"
    )

    @field_validator("trellis_states")
    @classmethod
    def _is_a_power(cls, states: int) -> int:
        if states & (states - 1):
            raise ValueError(f"{states} is no power of 2")
        return states


def state_bits(settings: LossesSection) -> int:
    """L."""
    states: int = settings.trellis_states  # type: ignore[attr-defined]
    return states.bit_length() - 1


def quantize(
    weights: dict[str, Tensor], statistics: Statistics, settings: LossesSection
) -> dict[str, dict[int, PackedWeight]]:
    """Trellis codes of a batch of experts, {projection: [E, N, K]}; what a factorization fell back to is noted of the
    expert."""
    from moeq.numerics import trellis_ldlq
    from moeq.numerics.factor import factorize
    from moeq_kernels.packed import PackedWeight

    encoding = Encoding.trellis(state_bits(settings))
    made: dict[str, dict[int, PackedWeight]] = {}
    for names, hessian, factor in statistics.factors(weights, factorize):
        for name in names:
            walks = trellis_ldlq.quantize(weights[name], factor, hessian, settings.bits, encoding.state_bits)
            made[name] = {
                one.bits: PackedWeight.of(
                    {"codes": one.codes, "scales": one.scales.unsqueeze(-1)}, one.bits, one.inputs, encoding
                )
                for one in walks
            }
    return made


def memory(sizes: BatchSizes) -> list[int]:
    """Hessians while they are summed up, their factors, and residuals of what the threads work on."""
    import torch

    hidden, inner, widths = sizes.layer.hidden_size, sizes.layer.intermediate_size, len(sizes.settings.bits)
    weights = sizes.experts * len(sizes.layer.projections) * inner * hidden
    at_once = 4 * weights * (2 + widths) if sizes.gpu else LOOP_BYTES * torch.get_num_threads()
    factors = 3 * 4 * sizes.experts * max(hidden, inner) ** 2
    return [sizes.summing_bytes, sizes.hessian_bytes + factors + at_once + weights * widths]


def operations(sizes: BatchSizes) -> float:
    """Hessians and intermediate states, two Cholesky factors, and the steps of every width."""
    walked = sum(bits < 8 for bits in sizes.settings.bits)
    steps = STEP_OPERATIONS * (1 << state_bits(sizes.settings)) * sizes.layer.parameters_per_expert
    return sizes.factor_operations + walked * steps


QUANTIZER = Quantizer(
    name="trellis",
    label="Trellis",
    help="walks over tiles of 16 x 16 weights instead of grids: the least error a byte",
    quantize=quantize,
    memory=memory,
    operations=operations,
    settings=TrellisSettings,
    widths=TRELLIS_BITS,
    grids=("asymmetric",),
    nested=False,
    needs="hessians",
    encoding=lambda settings: Encoding.trellis(state_bits(settings)),
)
