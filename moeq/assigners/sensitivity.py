"""What an expert is worth: one table of sensitivities of every layer and expert, and the objective made of them.

The objective of an assignment is the sum over experts of

    none     loss
    mass     share of the layer's routing weight * loss
    squared  tokens a layer's token sends to the expert * mean of (routing weight * error)^2
    effect   what the expert alone did to the output at one width, in nats a token, times its mean of (routing weight *
             error)^2 over that at this width

at the expert's width, times a weight of its layer: 1, or (measured) what makes the layer's sum at the measured width
the divergence that quantizing this layer alone caused, so that the objective is a divergence in nats a token.

With granularity projection the objective of an expert, mixed or not, is the sum of its matrices': of each one alone at
its width, the others exact. This is an approximation, since errors of several matrices do not add up (at 2 bits the sum
is about a tenth below what the whole expert loses). Scaling the terms to the whole expert's loss at equal widths gave
perplexities 0.2 % higher at 2 bits (tiny-mixtral, mean of eight settings).

Letters: E experts of a layer, P matrices of an expert, W widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moeq.artifacts.assignment import DROPPED, FULL, MIXED, Assignment, Width, matrix_widths
from moeq.assigners.inputs import AssignInputs, activation_rate, importance, routing_mass
from moeq.assigners.mopeq import hybrid
from moeq.errors import AssignmentError

if TYPE_CHECKING:  # recipes are checked without what reads it
    from moeq.artifacts.losses import LossTable

AGAIN = "run `moeq losses` again"


@dataclass(frozen=True, kw_only=True)
class LayerTable:
    """One layer: {width: objective [E]}; 16 bits lose nothing; DROPPED: what a dropped one loses, if that is known."""

    name: str
    losses: dict[int, np.ndarray]


def tables(inputs: AssignInputs) -> list[LayerTable]:
    """The objective of every layer, expert and width; AssignmentError naming layer and expert where one is missing."""
    key = ("tables", inputs.config.granularity == "projection", *_weighting(inputs))
    return inputs.once(key, lambda: _tables(inputs))


def _weighting(inputs: AssignInputs) -> tuple[str | None, ...]:
    """The options that decide what an expert's losses count."""
    config = inputs.config
    return config.quantizer, config.loss_weighting, config.layer_weighting, config.statistics


def _tables(inputs: AssignInputs) -> list[LayerTable]:
    names = inputs.profile.layers
    if inputs.config.granularity == "projection":
        parts = [list(matrices.values()) for matrices in matrix_tables(inputs)]
        counted = [{bits: np.asarray(sum(losses[bits] for losses in of)) for bits in of[0]} for of in parts]
    else:
        plain = checked(inputs, _known_losses(inputs), _column(inputs))
        counted = [_counted(widths, factor) for widths, factor in zip(plain, _factors(inputs), strict=True)]
    for widths, dropped in zip(counted, _dropped(inputs) or (), strict=False):
        widths[DROPPED] = dropped
    return [LayerTable(name=name, losses=losses) for name, losses in zip(names, counted, strict=True)]


def _dropped(inputs: AssignInputs) -> list[np.ndarray] | None:
    """The objective of every expert when it is dropped: all that it answers is lost, [E] a layer.

    Experts that calibration hardly reached may be reached more often later: of n tokens, as many are counted as could
    well have been behind them, (sqrt(n + 1) + 1)^2, about the upper end of a 95 % interval. None where the table, of an
    earlier version of moeq, does not say what experts answer.
    """
    energies = _known_losses(inputs).energies(_column(inputs))
    if energies is None:
        return None
    objectives = []
    for layer, (energy, factor) in enumerate(zip(energies, _factors(inputs), strict=True)):
        tokens = inputs.profile.total(layer, inputs.phase())[0].astype(float)
        seen = tokens > 0
        each = np.divide(factor, tokens, out=np.zeros_like(factor), where=seen)  # what a token counts
        each[~seen] = each[seen].mean() if seen.any() else 1.0
        objectives.append(energy * each * np.square(np.sqrt(tokens + 1) + 1))
    return objectives


def _known_losses(inputs: AssignInputs) -> LossTable:
    if inputs.losses is None:
        raise AssignmentError(f"{inputs.config.method} needs the loss table", do="run `moeq losses` first")
    return inputs.losses


def _column(inputs: AssignInputs) -> str:
    """The column of the loss table that the objective is made of."""
    return "weighted_loss" if inputs.config.loss_weighting in ("squared", "effect") else "loss"


def _factors(inputs: AssignInputs) -> list[np.ndarray]:
    """What the losses of every layer's experts are multiplied by, its weight counted, [E] a layer."""
    layers = range(len(inputs.profile.layers))
    weights = np.ones(len(layers))
    if inputs.config.layer_weighting == "measured":
        weights = _layer_weights(inputs, _known_losses(inputs), _column(inputs))
    return [weights[layer] * usage(inputs, layer) for layer in layers]


def _counted(widths: dict[int, np.ndarray], factor: np.ndarray) -> dict[int, np.ndarray]:
    """Losses {width: [E]} as they count; 16 bits lose nothing."""
    return {bits: factor * values for bits, values in widths.items()} | {FULL: np.zeros(len(factor))}


def matrix_tables(inputs: AssignInputs) -> list[dict[str, dict[int, np.ndarray]]]:
    """{projection: {width: objective [E]}} of every layer: of that matrix alone at the width, the others exact.

    Raises AssignmentError where the loss table has no rows of projections, or naming layer and expert where one is
    missing.
    """
    return inputs.once(("matrices", *_weighting(inputs)), lambda: _matrix_tables(inputs))


def _matrix_tables(inputs: AssignInputs) -> list[dict[str, dict[int, np.ndarray]]]:
    losses = _known_losses(inputs)
    names = [list(inputs.matrix_bytes_of(layer)) for layer in range(len(inputs.profile.layers))]
    every = dict.fromkeys(name for of in names for name in of)
    if not losses.has(every):
        raise AssignmentError(
            "granularity projection needs the losses of every projection alone",
            where=inputs.name,
            do="set losses.per_projection: true and run `moeq losses` again",
        )
    plain = {name: checked(inputs, losses, _column(inputs), name) for name in every}
    return [
        {name: _counted(plain[name][layer], factor) for name in of}
        for layer, (of, factor) in enumerate(zip(names, _factors(inputs), strict=True))
    ]


def usage(inputs: AssignInputs, layer: int) -> np.ndarray:
    """What the losses of a layer's experts are multiplied by, [E]."""
    weighting = inputs.config.loss_weighting
    if weighting == "none":
        return np.ones(inputs.profile.counts[layer].shape[-1])
    if weighting == "mass":
        return routing_mass(inputs, layer)
    if weighting == "effect":
        return inputs.once("nats", lambda: _nats_a_loss(inputs))[layer]
    return activation_rate(inputs, layer)


def _nats_a_loss(inputs: AssignInputs) -> list[np.ndarray]:
    """The effect of every expert over its weighted loss at the width that was measured, [E] a layer.

    Experts without a loss have no effect. Raises AssignmentError when effects were not measured.
    """
    effects, losses = inputs.expert_effects, inputs.losses
    if effects is None or losses is None:
        raise AssignmentError(
            "loss_weighting effect needs the effect of single experts",
            do="set losses.expert_effects and run `moeq losses` again",
        )
    ratios = []
    for divergence, table in zip(effects.divergence, losses.matrix(effects.method, "weighted_loss"), strict=True):
        loss, effect = table[effects.bits].astype(float), np.maximum(divergence, 0.0)
        ratios.append(np.divide(effect, loss, out=np.zeros_like(effect), where=loss > 0))
    return ratios


def _layer_weights(inputs: AssignInputs, losses: LossTable, column: str) -> np.ndarray:
    """What makes every layer's sum its measured divergence, [L]."""
    effects = inputs.effects
    if effects is None:
        raise AssignmentError(
            "layer_weighting measured needs the effect of every layer",
            do="set losses.layer_effects and run `moeq losses` again",
        )
    measured = losses.matrix(effects.method, column)
    weights = []
    for layer, divergence in enumerate(effects.divergence):
        total = float((usage(inputs, layer) * measured[layer][effects.bits]).sum())
        weights.append(max(divergence, 0.0) / total if total > 0 else 0.0)
    return np.array(weights)


def checked(
    inputs: AssignInputs, losses: LossTable, column: str = "loss", projection: str | None = None
) -> list[dict[int, np.ndarray]]:
    """{width: column [E]} of every layer of the profile, by the recipe's quantizer; of experts, or of one projection.

    Raises AssignmentError naming the layer and expert whose figure is missing, not finite or negative.
    """
    table = losses.matrix(inputs.config.quantizer, column, *([projection] if projection else []))
    if len(table) != len(inputs.profile.layers):
        raise AssignmentError(
            f"the loss table has {len(table)} layers, the profile {len(inputs.profile.layers)}", do=AGAIN
        )
    for name, widths, counts in zip(inputs.profile.layers, table, inputs.profile.counts, strict=True):
        experts = counts.shape[-1]
        if not widths:
            raise AssignmentError(f"no {column.replace('_', ' ')} of expert 0", where=name, do=AGAIN)
        for bits, values in widths.items():
            here = values.astype(float)
            if len(here) > experts:
                raise AssignmentError(
                    f"the loss table has {len(here)} experts, the profile {experts}", where=name, do=AGAIN
                )
            bad = [*np.flatnonzero(~np.isfinite(here) | (here < 0)).tolist(), *range(len(here), experts)]
            if bad:
                known = here[bad[0]] if bad[0] < len(here) else np.nan
                what = "is missing or not a number" if np.isnan(known) else f"is {known:g}"
                raise AssignmentError(
                    f"the {column.replace('_', ' ')} at {bits} bits {what}",
                    where=f"{name}, expert {bad[0]}",
                    do=AGAIN,
                )
    return table


def objective(inputs: AssignInputs, assignment: Assignment) -> float:
    """The objective of an assignment; AssignmentError when the loss table lacks one of its widths."""
    return objective_of(inputs, assignment.expert_widths())


def objective_of(inputs: AssignInputs, choices: Sequence[Sequence[Width]]) -> float:
    """As `objective`, of the width or widths of every expert of every layer."""
    total = 0.0
    for table, widths in zip(tables(inputs), choices, strict=True):
        missing = sorted({bits for width in widths for bits in matrix_widths(width)} - set(table.losses))
        if missing:
            raise AssignmentError(
                f"the loss table lacks {missing[0]} bits", where=table.name, do="add them to losses.bits"
            )
        bits = np.array([width if isinstance(width, int) else MIXED for width in widths], int)
        total += sum(
            float(table.losses[width][bits == width].sum()) for width in np.unique(bits[bits != MIXED]).tolist()
        )
    if any(not isinstance(width, int) for widths in choices for width in widths):
        for matrices, widths in zip(matrix_tables(inputs), choices, strict=True):
            for expert, width in enumerate(widths):
                if not isinstance(width, int):
                    total += sum(float(matrices[name][bits][expert]) for name, bits in width.items())
    return total


def columns(
    inputs: AssignInputs, traces: Sequence[np.ndarray], sampled: Sequence[np.ndarray] | None = None
) -> dict[str, list[Any]]:
    """The table of sensitivities: a row for every layer and expert, as columns; see artifacts/sensitivities.py.

    traces: the Frobenius norm's in closed form, [E] a layer; sampled: as the assignment sampled them, where it did;
    effect and effect_measured where the recipe had effects of experts measured.
    """
    if inputs.losses is None:
        raise AssignmentError("sensitivities need the loss table", do="run `moeq losses` first")
    plain = checked(inputs, inputs.losses)
    hessian = inputs.losses.matrix(inputs.losses.listed_methods()[0], "hessian_trace")
    totals = [inputs.profile.total(layer, inputs.phase())[0] for layer in range(len(plain))]
    both = hybrid(np.concatenate(totals), np.concatenate(list(traces)))
    hybrids = np.split(both, np.cumsum([len(counts) for counts in totals])[:-1])
    by_name: dict[str, list[Any]] = {}

    def add(name: str, values: Sequence[Any]) -> None:
        by_name.setdefault(name, []).extend(values)

    for layer, table in enumerate(tables(inputs)):
        counts = totals[layer]
        experts = len(counts)
        add("layer", [layer] * experts)
        add("layer_name", [table.name] * experts)
        add("expert", range(experts))
        add("activations", counts.tolist())
        add("activation_frequency", (counts / max(1, counts.sum())).tolist())
        add("routing_mass", routing_mass(inputs, layer).tolist())
        add("importance", importance(inputs, layer).tolist())
        calibration = next(iter(hessian[layer].values())).astype(float)
        add("calibration_hessian_trace", [None if np.isnan(value) else value for value in calibration.tolist()])
        add("frobenius_hessian_trace", traces[layer].tolist())
        if sampled is not None:
            add("sampled_hessian_trace", sampled[layer].tolist())
        add("hybrid_importance", hybrids[layer].tolist())
        if inputs.expert_effects is not None:
            add("effect", inputs.expert_effects.divergence[layer])
            add("effect_measured", inputs.expert_effects.is_measured[layer])
        for bits in sorted(plain[layer]):
            add(f"loss_{bits}", plain[layer][bits].tolist())
            add(f"objective_{bits}", table.losses[bits].tolist())
            add(f"bytes_{bits}", [inputs.bytes_of(layer)[bits]] * experts)
    return by_name
