"""budget: paper 001, section 3.5: how many experts of a layer can be hot in GPU memory, and which.

n_hot * S_hot + n_cold * S_cold <= M of every layer, with M its share of the budget less `transient_bytes`. Warm-up
hotness picks them: S <- ema * S + (1 - ema) * g after each calibration sequence, g the mean routing weight that a token
of it gave the expert. Hot experts have `hot_bits`, cold ones `cold_bits`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pydantic import Field, model_validator

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.profile import PHASES
from moeq.assigners.allocator import Allocator
from moeq.assigners.inputs import AssignInputs, build, hot_masks, ranking
from moeq.assigners.limits import Limit, limit_of
from moeq.errors import BudgetError
from moeq.recipe import Bits, BitsOrFull, Bytes, MethodSettings


class HotColdSettings(MethodSettings):
    """Two widths, and how the hot experts are found."""

    hot_bits: BitsOrFull = Field(4, description="width of hot experts")
    cold_bits: Bits = Field(2, description="width of cold experts")
    transient_bytes: Bytes | None = Field(None, description="kept free for experts that change their width; none: 0")
    ema: float = Field(0.9, ge=0, lt=1, description="what warm-up hotness keeps a sequence")
    warmup_sequences: int | None = Field(None, ge=1, description="sequences of the warm-up; none: all")

    @model_validator(mode="after")
    def _check(self) -> HotColdSettings:
        if self.hot_bits < self.cold_bits:
            raise ValueError("hot_bits must not be below cold_bits")
        return self

    def named(self) -> set[int]:
        """Both widths."""
        return {self.hot_bits, self.cold_bits}


def assign(inputs: AssignInputs) -> Assignment:
    """Assign hot and cold widths; AssignmentError for a budget that even all-cold experts exceed."""
    settings, hot = inputs.settings(HotColdSettings), hot_masks(inputs)
    limit = limit_of(inputs, (settings.cold_bits, settings.hot_bits), hot)
    bits = []
    for layer, share in enumerate(_shares(inputs, limit)):
        count, (cold, high) = int(limit.counts[layer]), limit.costs[layer].tolist()
        number = count if high == cold else min(count, (share - count * cold) // (high - cold))
        order = [expert for expert in ranking(hotness(inputs, layer)) if not hot[layer][expert]]
        widths = np.full(len(hot[layer]), settings.cold_bits)
        widths[order[:number]] = settings.hot_bits
        bits.append(widths)
    return build(inputs, bits, hot)


def refuse(inputs: AssignInputs, limit: Limit) -> None:
    """BudgetError for a layer's share that even cold experts exceed."""
    _shares(inputs, limit)


def _shares(inputs: AssignInputs, limit: Limit) -> list[int]:
    """What the experts of every layer may take; BudgetError for a share that even all-cold ones exceed."""
    transient = inputs.settings(HotColdSettings).transient_bytes or 0
    shares = replace(limit, total=limit.total - transient).by_layer()
    for layer, (share, count, costs) in enumerate(zip(shares, limit.counts, limit.costs, strict=True)):
        cold = int(count * costs[0])
        if share < cold:
            raise BudgetError(
                f"{count} cold experts take {cold} bytes, its share of the budget is {share}",
                where=inputs.profile.layers[layer],
                do="raise the budget, or lower cold_bits or transient_bytes",
            )
    return shares


def hotness(inputs: AssignInputs, layer: int) -> np.ndarray:
    """S of every expert of a layer after the warm-up, [E]."""
    settings, phase = inputs.settings(HotColdSettings), inputs.phase()
    pick = slice(None) if phase is None else slice(PHASES.index(phase), PHASES.index(phase) + 1)
    scores = inputs.profile.scores[layer][: settings.warmup_sequences, pick].sum(1)
    tokens = inputs.profile.tokens[: settings.warmup_sequences, pick].sum(1)
    state = np.zeros(scores.shape[1])
    for given, count in zip(scores, tokens, strict=True):
        state = settings.ema * state + (1 - settings.ema) * given / max(1, int(count))
    return state


ALLOCATOR = Allocator(
    name="budget",
    label="hot and cold",
    help="two widths: as many experts of a layer hot as its share of the bytes pays for, by warm-up hotness",
    assign=assign,
    settings=HotColdSettings,
    budgets=("bits_per_weight", "expert_bytes", "size"),
    weighs=("statistics",),
    refuse=refuse,
)
