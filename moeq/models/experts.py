"""Finding the routed experts of a transformers model by structure, and computing one expert.

Letters: E experts, T tokens, H hidden size, I intermediate size, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeq.errors import ModelError, RecipeError
from moeq.models.kinds import GATED, KINDS, Gate, Kind, Stacked, reason_to_refuse
from moeq.models.stored_experts import LEFT_ALONE
from moeq.models.support import NO_EXPERTS, USE_ANOTHER
from moeq.models.visits import visits

DOWN = "down_proj"
STACKED = Stacked()
SUPPORTED = "`moeq families` lists what is supported"


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """One MoE layer: its place among the MoE layers, the experts module's path, its sizes and its kind.

    projections: the matrices of one expert; biased: whether they have biases; parameters: names of the experts'
    parameters below the module, as transformers has them; visits: how many times a token goes through the layer.
    """

    index: int
    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    projections: tuple[str, ...] = GATED
    biased: bool = False
    kind: Kind = STACKED
    parameters: tuple[str, ...] = ("gate_up_proj", "down_proj")
    visits: int = 1

    def shape(self, projection: str) -> tuple[int, int]:
        """Rows (outputs) and inputs of one expert's matrix."""
        if projection == DOWN:
            return self.hidden_size, self.intermediate_size
        return self.intermediate_size, self.hidden_size

    @property
    def parameters_per_expert(self) -> int:
        """Weights of one expert's matrices, biases apart."""
        return len(self.projections) * self.hidden_size * self.intermediate_size

    @property
    def biases_per_expert(self) -> int:
        return sum(self.shape(projection)[0] for projection in self.projections) if self.biased else 0

    @property
    def weights_per_expert(self) -> int:
        """Weights of one expert, biases among them: what bits a weight are counted over."""
        return self.parameters_per_expert + self.biases_per_expert


def find_expert_layers(model: nn.Module, *, needed: bool = True) -> list[ExpertLayer]:
    """All routed-expert layers in order of execution.

    Raises ModelError when one is of a kind that is not supported, and, where they are needed, when there are none.
    """
    layers: list[ExpertLayer] = []
    model_name = type(model).__name__
    for name, module in model.named_modules():
        if any(part.startswith(LEFT_ALONE) for part in name.split(".")):
            continue
        kind = next((kind for kind in KINDS if kind.holds(module)), None)
        reason = reason_to_refuse(module) or (None if kind is None else kind.refusal(module))
        if reason is not None:
            what = f"experts of this kind ({type(module).__name__}) are not supported: {reason}"
            raise ModelError(what, where=f"{model_name}, {name}", do=SUPPORTED)
        if kind is None:
            continue
        experts, hidden, intermediate = kind.sizes(module)
        layers.append(
            ExpertLayer(
                index=len(layers),
                name=name,
                num_experts=experts,
                hidden_size=hidden,
                intermediate_size=intermediate,
                projections=kind.projections(module),
                biased=bool(kind.biases(module, slice(0, 1))),
                kind=kind,
                parameters=kind.parameters(module),
                visits=visits(model, name),
            )
        )
    if needed and not layers:
        raise ModelError(NO_EXPERTS, where=model_name, do=USE_ANOTHER)
    return layers


def refuse_loops(layers: Sequence[ExpertLayer], what: str, *, where: str, do: str) -> None:
    """RecipeError where a token goes through one of the layers several times, of which `what` cannot be."""
    for layer in layers:
        if layer.visits > 1:
            raise RecipeError(f"a token goes through {layer.name} {layer.visits} times: {what}", where=where, do=do)


@dataclass(frozen=True, kw_only=True)
class ExpertMath:
    """What an expert computes beside its matrices: the gate, and what follows down_proj (None: nothing).

    activation: see `Kind.gate_activation`.
    """

    gate: Gate
    finish: Callable[[Tensor], Tensor] | None = None
    activation: str | None = None

    @classmethod
    def of(cls, kind: Kind, module: nn.Module) -> ExpertMath:
        """That of an experts module."""
        return cls(gate=kind.gate(module), finish=kind.finish(module), activation=kind.gate_activation(module))

    def intermediate(self, hidden: Tensor, weights: dict[str, Tensor], biases: dict[str, Tensor]) -> Tensor:
        """hidden [T, H] through the first matrices [I, H] (with biases [I], where there are) and the gate, [T, I]."""
        return self.gate(first_products(hidden, weights, biases))

    def output(self, intermediate: Tensor, down: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, I] through down_proj [H, I] (bias [H] or None) and what follows it, [T, H]."""
        output = intermediate @ down.mT
        output = output if bias is None else output + bias
        return output if self.finish is None else self.finish(output)


def first_products(hidden: Tensor, weights: dict[str, Tensor], biases: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the gate is given: {projection: [T, I]} of all matrices but down_proj."""
    products = {name: hidden @ matrix.mT for name, matrix in weights.items() if name != DOWN}
    return {name: value + biases[name] if name in biases else value for name, value in products.items()}


def expert_math(model: nn.Module, layer: ExpertLayer) -> ExpertMath:
    """The layer's gate and what follows down_proj."""
    return ExpertMath.of(layer.kind, model.get_submodule(layer.name))


def stacked_weights(model: nn.Module, layer: ExpertLayer, experts: slice) -> dict[str, Tensor]:
    """The matrices of some experts, {projection: [e, rows, inputs]}, as views where memory allows."""
    return layer.kind.weights(model.get_submodule(layer.name), experts)


def stacked_biases(model: nn.Module, layer: ExpertLayer, experts: slice) -> dict[str, Tensor]:
    """The biases of some experts, {projection: [e, rows]}; empty where the family has none."""
    return layer.kind.biases(model.get_submodule(layer.name), experts)


def set_expert_weights(model: nn.Module, layer: ExpertLayer, expert: int, weights: dict[str, Tensor]) -> None:
    """Overwrite some of one expert's matrices, {projection: [rows, inputs]}, in place, cast to the model's dtype."""
    views = layer.kind.views(model.get_submodule(layer.name), expert)
    with torch.no_grad():
        for projection, matrix in weights.items():
            views[projection].copy_(matrix)


def set_expert_biases(model: nn.Module, layer: ExpertLayer, expert: int, biases: dict[str, Tensor]) -> None:
    """Overwrite some of one expert's biases, {projection: [rows]}, in place, cast to the model's dtype."""
    stacks = layer.kind.biases(model.get_submodule(layer.name), slice(expert, expert + 1))
    with torch.no_grad():
        for projection, bias in biases.items():
            stacks[projection][0].copy_(bias)
