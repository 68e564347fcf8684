"""The replicas and losses of a run, for a model whose experts follow the context."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from moeq.artifacts.assignment import FULL, Assignment
from moeq.models.experts import ExpertLayer
from moeq.recipe import DEFAULT_QUANTIZER
from moeq.stages.context import Context
from moeq.stages.replicas import Replicas, load_losses
from moeq_kernels.packed import PackedWeight


def run_widths(run: Context) -> frozenset[int]:
    """The widths of a run's replicas: those of its recipe, and full precision."""
    return frozenset({*run.recipe.losses.bits, FULL})


class RunReplicas:
    """A ReplicaSource over a run's store; full precision is taken from the loaded model, whose experts must be its own.

    Whose replica is taken at a width is what the run's assignment says. Refined replicas are trained for one mix and
    stay out.
    """

    def __init__(self, run: Context, assignment: Assignment, model: nn.Module, layers: Sequence[ExpertLayer]) -> None:
        self.run, self.assignment = run, assignment
        self._modules = [model.get_submodule(layer.name) for layer in layers]
        self._replicas = [Replicas(run, assignment, layer) for layer in layers]

    def widths(self) -> frozenset[int]:
        """The widths that every expert has a replica of."""
        return run_widths(self.run)

    def expert(
        self, layer: ExpertLayer, expert: int, key: int
    ) -> tuple[dict[str, PackedWeight | Tensor], dict[str, Tensor]]:
        """Matrices and biases of one replica."""
        module, which = self._modules[layer.index], slice(expert, expert + 1)
        exact = {name: stack[0] for name, stack in layer.kind.weights(module, which).items()}
        biases = {name: stack[0] for name, stack in layer.kind.biases(module, which).items()}
        packed = {} if key == FULL else self._replicas[layer.index].packed(expert, key)
        return {name: packed.get(name, matrix) for name, matrix in exact.items()}, biases

    def placed(self) -> list[np.ndarray]:
        """The key of every expert's placed replica, [E] a layer."""
        return [np.array([choice.key for choice in layer.experts]) for layer in self.assignment.layers]

    def losses(self, widths: Sequence[int]) -> np.ndarray | None:
        """[L, E, W] by the method that the assignment takes; None where a width was not measured."""
        layers = load_losses(self.run).matrix(str(self.assignment.parameters.get("quantizer", DEFAULT_QUANTIZER)))
        if any(width not in layer for layer in layers for width in widths):
            return None
        return np.array([np.stack([layer[width] for width in widths], 1) for layer in layers], float)
