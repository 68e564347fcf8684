"""Experts whose replica differs from row to row of a batch: tokens go together by expert and replica.

A model's experts modules are replaced by ones that compute with replicas of any width, taken from a `ReplicaSource`.
Which one a token's row uses stands in `Rows`, which all layers share. Replicas go by their width; the placed one of an
expert whose matrices differ goes by MIXED.

Letters: B rows of a batch, L MoE layers, E experts of a layer, T tokens of a call (B rows of equal length), H hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moeq.artifacts.assignment import FULL
from moeq.errors import ModelError
from moeq.models.experts import DOWN, ExpertLayer, ExpertMath
from moeq.models.kinds.base import Matrices
from moeq.runtime.arranged import COMPUTED
from moeq.runtime.packed_experts import PACKED, PackedExperts
from moeq_kernels import choice
from moeq_kernels.description import LayerOfExperts, Matrix, PreparedLayer
from moeq_kernels.names import REFERENCE
from moeq_kernels.packed import PackedWeight

CACHE_BYTES = 4 << 30  # of dequantized replicas that are kept
OVERHEAD = 0.2  # of scales and zero points on codes, at most, where replicas are counted beforehand


class LastUsed:
    """What was asked for last, kept up to a number of bytes, which `size` counts; the very last is always kept."""

    def __init__(self, limit: int, size: Callable[[Any], int]) -> None:
        self.limit, self._size = limit, size
        self._kept: OrderedDict[Any, Any] = OrderedDict()
        self._bytes = 0

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """What is kept under a key, or what `make` gives."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        self._kept[key] = made = make()
        self._bytes += self._size(made)
        while self._bytes > self.limit and len(self._kept) > 1:
            self._bytes -= self._size(self._kept.popitem(last=False)[1])
        return made


class ReplicaSource(Protocol):
    """Where replicas come from."""

    def widths(self) -> frozenset[int]:
        """The widths that every expert has a replica of, 16 for full precision."""

    def expert(self, layer: ExpertLayer, expert: int, key: int) -> tuple[dict[str, PackedWeight | Tensor], Matrices]:
        """Matrices {projection: [rows, inputs]}, as they are stored, and biases {projection: [rows]} of one replica."""


@dataclass
class Rows:
    """The replica of every expert that each row of the next forward pass uses.

    keys: [B, L, E]; start: [L, E] of the first token of every row, None for those of its row.
    """

    keys: Tensor
    start: Tensor | None = None

    def of(self, layer: int, expert: int, tokens: Tensor, length: int) -> Tensor:
        """Keys [T] of one expert for tokens [T] of rows of `length` tokens."""
        at = tokens.to(self.keys.device)
        keys = self.keys[at // length, layer, expert]
        return keys if self.start is None else torch.where(at % length == 0, self.start[layer, expert], keys)

    def of_choices(self, layer: int, experts: Tensor, length: int) -> Tensor:
        """Keys [T, k] of the experts [T, k] that tokens of rows of `length` chose."""
        token = torch.arange(len(experts), device=self.keys.device)[:, None]
        chosen = experts.to(self.keys.device)
        keys = self.keys[token // length, layer, chosen]
        keys = keys if self.start is None else torch.where(token % length == 0, self.start[layer][chosen], keys)
        return keys.to(experts.device)


class Dequantized:
    """Replicas as they are computed with: the last used ones dequantized, up to a number of bytes, or packed ones of a
    whole layer with a kernel, where all of them fit into as many bytes.

    policy: by which kernels are chosen; results are recorded, so it is no measurement.
    """

    def __init__(
        self,
        source: ReplicaSource,
        dtype: torch.dtype,
        device: torch.device,
        limit: int = CACHE_BYTES,
        policy: choice.Policy = "fixed",
    ) -> None:
        self.source, self.dtype, self.device, self.limit, self.policy = source, dtype, device, limit, policy
        self._kept = LastUsed(limit, lambda parts: sum(tensor.nbytes for part in parts for tensor in part.values()))
        self.prepared: dict[tuple[int, int], PreparedLayer | None] = {}

    @cached_property
    def packed_widths(self) -> frozenset[int]:
        """The widths below full precision that every expert has a replica of."""
        return frozenset(width for width in self.source.widths() if width < FULL)

    def fit(self, layers: Sequence[ExpertLayer]) -> bool:
        """Whether kernels may hold all packed replicas of these layers; MOEQ_KERNEL=reference: they may not."""
        bits = sum(self.packed_widths)
        weights = sum(layer.num_experts * layer.parameters_per_expert for layer in layers)
        plain = REFERENCE in (self.policy, choice.named()) or self.dtype not in COMPUTED
        return not plain and weights * bits * (1 + OVERHEAD) / 8 <= self.limit

    def layer(self, layer: ExpertLayer, key: int, math: ExpertMath) -> PreparedLayer | None:
        """All experts of a layer at a packed width with a kernel; None for other replicas, or where none takes them."""
        if key not in self.packed_widths:
            return None
        if (layer.index, key) not in self.prepared:
            experts = [self.source.expert(layer, expert, key) for expert in range(layer.num_experts)]
            described = LayerOfExperts(
                matrices=[{name: moved(one, self.device) for name, one in parts.items()} for parts, _ in experts],
                biases=[{name: self._values(bias) for name, bias in biases.items()} for _, biases in experts],
                gate=math.gate,
                activation=math.activation,
                finish=math.finish,
            )
            self.prepared[layer.index, key] = choice.prepared_layer(described, self.device, self.policy)[0]
        return self.prepared[layer.index, key]

    def __call__(self, layer: ExpertLayer, expert: int, key: int) -> tuple[Matrices, Matrices]:
        """Matrices and biases of one replica, in `dtype`."""
        place, make = (layer.index, expert, key), partial(self._made, layer, expert, key)
        replica: tuple[Matrices, Matrices] = self._kept.get(place, make)
        return replica

    def _made(self, layer: ExpertLayer, expert: int, key: int) -> tuple[Matrices, Matrices]:
        matrices, biases = self.source.expert(layer, expert, key)
        return (
            {name: self._values(matrix) for name, matrix in matrices.items()},
            {name: self._values(bias) for name, bias in biases.items()},
        )

    def _values(self, stored: PackedWeight | Tensor) -> Tensor:
        if isinstance(stored, Tensor):
            return stored.to(self.device, self.dtype)
        return stored.map(lambda part: part.to(self.device)).dequantize(self.dtype)


def moved(stored: Matrix, device: torch.device) -> Matrix:
    """A matrix on a device."""
    return stored.to(device) if isinstance(stored, Tensor) else stored.map(lambda part: part.to(device))


def without_weights(done: str) -> ModelError:
    """What is said where a model that computes with a `ReplicaSource` is to be saved, copied or the like."""
    what = f"a model whose experts' precision is chosen as it runs does not hold their weights, and cannot be {done}"
    return ModelError(what, do="take the checkpoint that it was loaded from")


class TakenOver(PackedExperts):
    """A packed module without weights of its own, in the place of any experts module."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """ModelError: transformers would load what is saved, with experts at random."""
        raise without_weights("saved")

    def __getstate__(self) -> dict[str, Any]:
        """ModelError for `copy` and `pickle`, too: locks and a kernel's memory are no state."""
        raise without_weights("copied or pickled")

    def take_over(self, layer: ExpertLayer, original: nn.Module) -> None:
        """As a packed module does; of a packed module, what it took over."""
        if not isinstance(original, PackedExperts):
            super().take_over(layer, original)
            return
        self.num_experts, self.math = original.num_experts, original.math
        self.identity_beyond = original.identity_beyond
        for name, child in original.named_children():
            if not name.isdigit():
                self.add_module(name, child)
        for name, parameter in original.named_parameters(recurse=False):
            self.register_parameter(name, parameter)


class ExpertsByRow(TakenOver):
    """Mixed into the packed module of a family's kind, which says how the module is called."""

    def __init__(
        self, layer: ExpertLayer, original: nn.Module, replicas: Dequantized, rows: Callable[[], Rows]
    ) -> None:
        nn.Module.__init__(self)
        self.layer, self.replicas, self.rows = layer, replicas, rows
        self.length = 0
        self.kernels = False
        self.take_over(layer, original)

    def through(self, hidden: Tensor, weights: Tensor) -> None:
        """None: what is left for `expert` is computed one by one."""

    def by_device(self, experts: Sequence[int], home: torch.device) -> dict[torch.device, list[int]]:
        """All where the tokens are."""
        return {home: list(experts)}

    def expert(self, number: int, rows: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Output [T, H] of one expert, each token's with the replica of its row."""
        assert tokens is not None, "rows without their places"
        keys = self.rows().of(self.layer.index, number, tokens, self.length)
        present = torch.unique(keys).tolist()
        if len(present) == 1:
            return self._output(number, present[0], rows)
        outputs = torch.empty_like(rows)
        for key in present:
            tokens_of_key = (keys == key).nonzero().squeeze(1).to(rows.device)
            outputs[tokens_of_key] = self._output(number, key, rows[tokens_of_key]).to(outputs.dtype)
        return outputs

    def _output(self, number: int, key: int, rows: Tensor) -> Tensor:
        weights, biases = self.replicas(self.layer, number, key)
        return self.math.output(self.math.intermediate(rows, weights, biases), weights[DOWN], biases.get(DOWN))

    def _measure(self, tokens: int) -> None:
        self.length = tokens // len(self.rows().keys)

    def weighted_sum(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """By replica: packed ones of all experts in one call, the others one expert after the other."""
        self._measure(len(hidden))
        result, left = torch.zeros_like(hidden), experts
        if self.kernels and not self.identity_beyond:
            known = experts < self.num_experts
            keys = self.rows().of_choices(self.layer.index, experts.where(known, 0), self.length)
            for key in torch.unique(keys[known]).tolist():
                prepared = self.replicas.layer(self.layer, key, self.math)
                if prepared is not None:
                    mine = known & (keys == key)
                    result += prepared(hidden, experts.where(mine, self.num_experts), weights)
                    left = left.where(~mine, self.num_experts)
        return result + super().weighted_sum(hidden, left, weights)


class Llama4ByRow(ExpertsByRow):
    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        self._measure(len(hidden_states) // self.num_experts)
        return super().forward(hidden_states)  # type: ignore[call-arg]


BY_ROW: dict[str, type[ExpertsByRow]] = {
    name: type(f"{kind.__name__}ByRow", (Llama4ByRow if name == "llama4" else ExpertsByRow, kind), {})
    for name, kind in PACKED.items()
}


@contextmanager
def by_row(
    model: nn.Module, layers: Sequence[ExpertLayer], replicas: Dequantized, rows: Callable[[], Rows]
) -> Iterator[None]:
    """The model with experts by row; the modules that it had are back at the end."""
    before: dict[str, nn.Module] = {}
    kernels = replicas.fit(layers)
    try:
        for layer in layers:
            original = model.get_submodule(layer.name)
            module = BY_ROW[layer.kind.name](layer, original, replicas, rows)
            module.kernels = kernels
            before[layer.name] = original
            model.set_submodule(layer.name, module.train(original.training))
        yield
    finally:
        for name, original in before.items():
            model.set_submodule(name, original)
