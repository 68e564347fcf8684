"""The Hessian traces of paper 003, from the weights of a run's experts."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from moeq.artifacts.sensitivities import NAME as SENSITIVITIES
from moeq.artifacts.sensitivities import read_sensitivities
from moeq.errors import ArtifactError
from moeq.models.experts import ExpertLayer
from moeq.numerics.traces import closed_form, hutchinson
from moeq.recipe import AssignSection
from moeq.stages.context import Context
from moeq.stages.model import RunModel
from moeq_kernels.freed import return_memory

SAMPLES = 32
_MADE: WeakKeyDictionary[RunModel, dict[tuple[str, int | None], list[np.ndarray]]] = WeakKeyDictionary()


def traces(context: Context, config: AssignSection) -> list[np.ndarray]:
    """The Hessian trace of the Frobenius norm, summed over every expert's matrices, [E] a layer (paper 003).

    Experts are read from the checkpoint one by one; the same traces are not computed twice in a run, and the closed
    form not again where the run's table of sensitivities has it.
    """
    how = config.trace or "closed"
    key = (how, None if how == "closed" else config.trace_samples or SAMPLES)
    made = _MADE.setdefault(context.model, {})
    if key not in made:
        known = _known_traces(context) if how == "closed" else None
        made[key] = _computed_traces(context, key) if known is None else known
    return made[key]


def _known_traces(context: Context) -> list[np.ndarray] | None:
    """The closed form as an earlier command found it for this model; None where none did."""
    try:
        table = read_sensitivities(context.finished("assign") / SENSITIVITIES)
    except ArtifactError:
        return None
    experts = [layer.num_experts for layer in context.model.layers]
    same = table.model == context.model.stamp.digest and table.experts() == experts
    return table.column("frobenius_hessian_trace") if same else None


def _computed_traces(context: Context, how: tuple[str, int | None]) -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(context.recipe.seed)
    by_layer = []
    with context.reporter.bar("traces", len(context.model.layers)) as advance:
        for layer in context.model.layers:
            by_layer.append(np.array([_trace(context, layer, e, how, generator) for e in range(layer.num_experts)]))
            return_memory()
            advance()
    return by_layer


def _trace(
    context: Context, layer: ExpertLayer, expert: int, how: tuple[str, int | None], generator: torch.Generator
) -> float:
    weights, _ = context.model.expert_reader.read(layer, expert)
    name, samples = how
    if samples is None:
        return sum(closed_form(weight) for weight in weights.values())
    distribution: Any = name
    return sum(hutchinson(weight, samples, distribution, generator).mean for weight in weights.values())
