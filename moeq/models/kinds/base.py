"""What moeq must know of an experts module, whatever its family.

Every matrix is shown as [rows (outputs), inputs], whichever way it lies in memory, under one set of names: gate_proj,
up_proj [I, H] and down_proj [H, I]; experts without a gate have up_proj and down_proj.

Letters: E experts, e some of them, T tokens, H hidden size, I intermediate size, k experts a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from moeq.models.kinds.activations import activation_name

GATED = ("gate_proj", "up_proj", "down_proj")
NON_GATED = ("up_proj", "down_proj")

Matrices = dict[str, Tensor]  # {projection: [rows, inputs]}; of biases {projection: [rows]}
Gate = Callable[[Matrices], Tensor]  # {gate_proj, up_proj: [T, I]} -> what goes into down_proj, [T, I]
Routing = tuple[Tensor, Tensor, Tensor]  # hidden [T, H], experts [T, k] (E and more: none), routing weights [T, k]
Experts = Any  # an nn.Module, whose attributes would be tensors or modules to a type checker


@dataclass(frozen=True, kw_only=True)
class Tap:
    """Where a layer's routing is seen: a module, before or after it runs, and what its call says.

    read(module, arguments, output) gives the routing; `output` is None before the module runs.
    """

    path: str
    after: bool
    read: Callable[[nn.Module, tuple[Any, ...], Any], Routing]


class ReadsParts(Protocol):
    """Reads parts of a model's parameters from disk, by their names."""

    def read_expert(self, name: str, expert: int) -> Tensor:
        """One expert's part of a parameter whose first dimension is E."""

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of a parameter that is on disk as it is in memory."""


class Kind(ABC):
    """How one sort of experts module lies in memory, is called, and computes.

    activation: dotted name of the activation function below the module; remark: what sets the kind apart from the usual
    stack, in a word; scales_inputs: the routing weight multiplies an expert's input instead of its output; top_k:
    experts a token, where the kind alone decides it.
    """

    name: ClassVar[str]
    activation: ClassVar[str]
    remark: ClassVar[str]
    scales_inputs: ClassVar[bool] = False
    top_k: ClassVar[int | None] = None

    @abstractmethod
    def holds(self, module: Experts) -> bool:
        """Whether this module's experts are of this kind."""

    def refusal(self, module: Experts) -> str | None:
        """Why a module of this kind cannot be quantized, None when it can."""
        return None

    @abstractmethod
    def sizes(self, module: Experts) -> tuple[int, int, int]:
        """E, H, I."""

    def projections(self, module: Experts) -> tuple[str, ...]:
        """The matrices of one expert, in the order in which they are used."""
        return GATED

    @abstractmethod
    def parameters(self, module: Experts) -> tuple[str, ...]:
        """Names of the parameters that hold the routed experts, below the module."""

    @abstractmethod
    def weights(self, module: Experts, experts: slice) -> dict[str, Tensor]:
        """The matrices of some experts, {projection: [e, rows, inputs]}."""

    def biases(self, module: Experts, experts: slice) -> dict[str, Tensor]:
        """Their biases, {projection: [e, rows]}; empty without."""
        return {}

    def views(self, module: Experts, expert: int) -> dict[str, Tensor]:
        """One expert's matrices, {projection: [rows, inputs]}, as views of the module's memory, to be overwritten."""
        return {name: stack[0] for name, stack in self.weights(module, slice(expert, expert + 1)).items()}

    def alone(self, module: Experts, path: str, expert: int, reader: ReadsParts) -> tuple[Matrices, Matrices]:
        """Matrices and biases of one expert, without the others'.

        `module`, at `path` in its model, may lie on the meta device.
        """
        parts = {name: reader.read_expert(f"{path}.{name}", expert).unsqueeze(0) for name in self.parameters(module)}
        return self.first(with_parameters(module, parts))

    def first(self, module: Experts) -> tuple[Matrices, Matrices]:
        """Matrices and biases of the first expert."""
        return self.views(module, 0), {name: stack[0] for name, stack in self.biases(module, slice(0, 1)).items()}

    def gate(self, module: Experts) -> Gate:
        """What lies between the first matrices and down_proj; works on a module whose weights are elsewhere."""
        act_fn = attrgetter(self.activation)(module)
        return ActThenMultiply(act_fn) if self.projections(module) == GATED else ActAlone(act_fn)

    def gate_activation(self, module: Experts) -> str | None:
        """The name of `act` where the gate is exactly act(gate_proj) * up_proj, or act(up_proj) without a gate_proj.

        None for a gate of another kind, and for a function without a name in `activations`.
        """
        return activation_name(attrgetter(self.activation)(module))

    def finish(self, module: Experts) -> Callable[[Tensor], Tensor] | None:
        """What is done to an expert's output [T, H] before it is weighted, None for nothing."""
        return None

    def identity_beyond(self, module: Experts) -> bool:
        """Whether indices from E on stand for experts that hand their input through, rather than for none."""
        return False

    def remarks(self, module: Experts) -> tuple[str, ...]:
        """What sets the module apart from the usual stack, in a word each."""
        return (self.remark,)

    def tap(self, path: str) -> Tap:
        """By default the experts module is called with hidden, indices and weights, in this order."""
        return Tap(path=path, after=False, read=lambda _, arguments, __: _three(*arguments[:3]))


def _three(hidden: Tensor, experts: Tensor, weights: Tensor) -> Routing:
    return hidden.flatten(0, -2), experts.flatten(0, -2), weights.flatten(0, -2)


def with_parameters(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """A copy of a module with other parameters under some (dotted) names; everything else is shared."""
    shell = copy(module)
    shell._parameters, shell._modules = dict(module._parameters), dict(module._modules)
    below: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        head, dot, rest = name.partition(".")
        if dot:
            below.setdefault(head, {})[rest] = tensor
        else:
            shell._parameters[head] = nn.Parameter(tensor, requires_grad=False)
    for head, inner in below.items():
        shell._modules[head] = with_parameters(module.get_submodule(head), inner)
    return shell


@dataclass(frozen=True)
class ActThenMultiply:
    """act(gate) * up, [T, I]; an object, not a closure, so that it can be handed to another process."""

    act_fn: Callable[[Tensor], Tensor]

    def __call__(self, parts: dict[str, Tensor]) -> Tensor:
        return self.act_fn(parts["gate_proj"]) * parts["up_proj"]


@dataclass(frozen=True)
class ActAlone:
    """act(up), [T, I], for experts without a gate."""

    act_fn: Callable[[Tensor], Tensor]

    def __call__(self, parts: dict[str, Tensor]) -> Tensor:
        return self.act_fn(parts["up_proj"])


def without_weights_of(module: nn.Module, names: Iterable[str]) -> nn.Module:
    """A copy of a module whose parameters of these names lie on the meta device, without hooks; the rest is shared."""
    shell = copy(module)
    gone = set(names)
    shell._parameters = dict(module._parameters)
    for name in gone & {name for name, parameter in module._parameters.items() if parameter is not None}:
        shell._parameters[name] = nn.Parameter(module._parameters[name].to("meta"), requires_grad=False)  # type: ignore[union-attr]
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        setattr(shell, hooks, OrderedDict())
    return shell
