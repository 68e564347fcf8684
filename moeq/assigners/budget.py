"""budget: paper 001, section 3.5: how many experts of a layer can be hot in GPU memory, and which.

n_hot * S_hot + n_cold * S_cold <= M of every layer, with M its share of the budget less `transient_bytes`. Warm-up
hotness picks them: S <- ema * S + (1 - ema) * g after each calibration sequence, g the mean routing weight that a token
of it gave the expert. Hot experts have `hot_bits`, cold ones `cold_bits`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.profile import PHASES
from moeq.assigners.inputs import AssignInputs, build, hot_masks, ranking
from moeq.assigners.limits import limit_of
from moeq.errors import AssignmentError

HOT_BITS, COLD_BITS, EMA = 4, 2, 0.9


def assign(inputs: AssignInputs) -> Assignment:
    """Assign hot and cold widths; AssignmentError for a budget that even all-cold experts exceed."""
    config = inputs.config
    hot = hot_masks(inputs)
    cold_bits, hot_bits = config.cold_bits or COLD_BITS, config.hot_bits or HOT_BITS
    limit = limit_of(inputs, (cold_bits, hot_bits), hot)
    left = replace(limit, total=limit.total - (config.transient_bytes or 0))
    bits = []
    for layer, share in enumerate(left.by_layer()):
        count, (cold, high) = int(limit.counts[layer]), limit.costs[layer].tolist()
        if share < count * cold:
            raise AssignmentError(
                f"{count} cold experts take {count * cold} bytes, its share of the budget is {share}",
                where=inputs.profile.layers[layer],
                do="raise the budget, or lower cold_bits or transient_bytes",
            )
        number = count if high == cold else min(count, (share - count * cold) // (high - cold))
        order = [expert for expert in ranking(hotness(inputs, layer)) if not hot[layer][expert]]
        widths = np.full(len(hot[layer]), cold_bits)
        widths[order[:number]] = hot_bits
        bits.append(widths)
    return build(inputs, bits, hot)


def hotness(inputs: AssignInputs, layer: int) -> np.ndarray:
    """S of every expert of a layer after the warm-up, [E]."""
    config, phase = inputs.config, inputs.phase()
    pick = slice(None) if phase is None else slice(PHASES.index(phase), PHASES.index(phase) + 1)
    scores = inputs.profile.scores[layer][: config.warmup_sequences, pick].sum(1)
    tokens = inputs.profile.tokens[: config.warmup_sequences, pick].sum(1)
    ema = EMA if config.ema is None else config.ema
    state = np.zeros(scores.shape[1])
    for given, count in zip(scores, tokens, strict=True):
        state = ema * state + (1 - ema) * given / max(1, int(count))
    return state
