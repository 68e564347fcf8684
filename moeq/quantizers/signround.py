"""signround: an expert's matrices trained together on its output, from GPTQ's codes (signround_expert.py).

Letters: E experts, N output rows, K inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from moeq.quantizers.quantizer import WEIGHT_OPERATIONS, BatchSizes, Quantizer

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.numerics.gptq import Quantized
    from moeq.quantizers.statistics import Statistics
    from moeq.recipe import LossesSection


class Settings(BaseModel):
    signround_iterations: int = Field(200, ge=1, description="signround: steps of training, an expert and width")


def quantize(weights: dict[str, Tensor], statistics: Statistics, settings: LossesSection) -> dict[str, Quantized]:
    """SignRound of a batch of experts, {projection: [E, N, K]}, each of which draws its own rows whatever the batch."""
    from moeq.quantizers.memory import working_memory
    from moeq.quantizers.signround_expert import Training, sign_round

    assert statistics.start is not None  # starts_from
    return sign_round(
        statistics.rows,
        statistics.lent,
        replace(statistics.batch, weights=weights),
        bits=settings.bits,
        group_size=settings.group_size,
        symmetric=settings.symmetric,
        training=Training(
            iterations=_iterations(settings),
            lend=settings.borrow_tokens,
            seed=statistics.seed,
            working_memory=working_memory(settings.working_memory, statistics.lent.device),
        ),
        start=statistics.start,
        counts=statistics.row_weights,
    )


def _iterations(settings: LossesSection) -> int:
    return Settings.model_validate(settings, from_attributes=True).signround_iterations


def memory(sizes: BatchSizes) -> list[int]:
    """The codes that it starts from, and what is in training at once."""
    from moeq.quantizers.memory import working_memory

    start = sizes.experts * len(sizes.settings.bits) * sizes.layer.parameters_per_expert
    return [start + working_memory(sizes.settings.working_memory)]


def operations(sizes: BatchSizes) -> float:
    """Forward and backward products of every step, and its roundings."""
    from moeq.quantizers.signround_expert import Training

    steps = _iterations(sizes.settings) * len(sizes.settings.bits)
    return steps * sizes.layer.parameters_per_expert * (6 * Training().batch_rows + WEIGHT_OPERATIONS)


QUANTIZER = Quantizer(
    name="signround",
    label="SignRound",
    help="roundings trained on the expert's output, from GPTQ's codes",
    quantize=quantize,
    memory=memory,
    operations=operations,
    settings=Settings,
    grids=("asymmetric", "even"),
    nested=False,
    act_order=True,
    clip=True,
    needs="tokens",
    starts_from="gptq",
    draws=True,
)
