"""The experts module of a packed checkpoint: every expert in its own width or widths, dequantized as it is used.

Stands in for a family's experts module and is called as that one is. State: `{expert}.{projection}.` codes, scales and
zeros for packed experts, dense for those left as in the checkpoint, bias where the family has biases; and a guard under
the original parameters' names, of shapes that no real model has: whoever loads the checkpoint without moeq gets an
error instead of random experts.

Letters: E experts, T tokens, H hidden size, I intermediate size, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.assignment import FULL, Width, width_of
from moeq.models.experts import DOWN, ExpertLayer, ExpertMath
from moeq.models.kinds import jetmoe, numbered
from moeq.numerics.packed import PackedWeight, packed_shapes
from moeq.numerics.widths import NESTED_BITS

GUARD_DTYPE = torch.float16


def guard_shapes(layer: ExpertLayer) -> dict[str, tuple[int, ...]]:
    """Names below the experts module and shapes of the guard tensors: one for each parameter of a stack, one in all
    where experts are numbered. An even second axis lets transformers halve it when it writes a checkpoint again."""
    if layer.kind.name == "numbered":
        return {layer.parameters[0]: (1, 1)}
    if layer.kind.name == "dbrx":
        return dict.fromkeys(layer.parameters, (1, 1))
    return {
        name: (1, 2) if name.endswith("_bias") else (1, 2, 1) if name.startswith("gate_up") else (1, 1, 1)
        for name in layer.parameters
    }


class PackedLinear(nn.Module):
    """One matrix of one expert, packed or dense, and its bias where there is one."""

    def __init__(
        self,
        rows: int,
        inputs: int,
        bits: int,
        group_size: int,
        symmetric: bool,
        dense_dtype: torch.dtype,
        biased: bool,
        nested: bool = False,
    ) -> None:
        super().__init__()
        self.inputs, self.bits, self.group_size, self.symmetric = inputs, bits, group_size, symmetric
        self.nested = nested and bits in NESTED_BITS
        self.biased = biased
        if biased:
            self.register_buffer("bias", torch.empty(rows, dtype=dense_dtype))
        if bits == FULL:
            self.register_buffer("dense", torch.empty(rows, inputs, dtype=dense_dtype))
            return
        for part, (shape, dtype) in packed_shapes(rows, inputs, bits, group_size, symmetric, nested).items():
            self.register_buffer(part, torch.empty(shape, dtype=dtype))

    def stored(self) -> PackedWeight:
        """The matrix [N, K] of a width below 16 as it is stored."""
        return PackedWeight(
            codes=self.get_buffer("codes"),
            scales=self.get_buffer("scales"),
            zeros=self.get_buffer("zeros") if "zeros" in self._buffers else None,
            bits=self.bits,
            group_size=self.group_size,
            inputs=self.inputs,
            symmetric=self.symmetric,
            nested=self.nested,
        )

    def values(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] in `dtype`."""
        return self.get_buffer("dense").to(dtype) if self.bits == FULL else self.stored().dequantize(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        """Move, but never convert what is stored: scales in another type would be other scales."""
        stored = self._buffers.get("scales")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if stored is not None and (changed := self.get_buffer("scales")).dtype != stored.dtype:
            self._buffers["scales"] = stored.to(changed.device)
        return self

    def forward(self, rows: Tensor) -> Tensor:
        """rows [T, K] -> [T, N]."""
        bias = self.get_buffer("bias").to(rows.dtype) if self.biased else None
        return nn.functional.linear(rows, self.values(rows.dtype), bias)


class PackedExperts(nn.Module):
    """All experts of one layer, each in its own width or widths; called with hidden [T, H], indices and weights [T, k].

    bits: of every expert one width, or {projection: bits}; group_size and symmetric: of the grids; nested: see
    `numerics.packed`; dtype: of dense matrices and biases. What of the original module is not an expert's weight (a
    norm, a router) is taken over under its name.
    """

    def __init__(
        self,
        layer: ExpertLayer,
        bits: Sequence[Width],
        *,
        group_size: int,
        symmetric: bool,
        original: nn.Module,
        dtype: torch.dtype,
        nested: bool = False,
    ) -> None:
        super().__init__()
        self.take_over(layer, original)
        for expert, widths in enumerate(bits):
            linears = nn.ModuleDict()
            for projection in layer.projections:
                size, width = layer.shape(projection), width_of(widths, projection)
                linears[projection] = PackedLinear(*size, width, group_size, symmetric, dtype, layer.biased, nested)
            self.add_module(str(expert), linears)
        for name, shape in guard_shapes(layer).items():
            _register(self, name, torch.zeros(shape, dtype=GUARD_DTYPE))

    def take_over(self, layer: ExpertLayer, original: nn.Module) -> None:
        """What the original module computes and holds beside its experts' weights."""
        self.num_experts = layer.num_experts
        self.math = ExpertMath(gate=layer.kind.gate(original), finish=layer.kind.finish(original))
        self.identity_beyond = layer.kind.identity_beyond(original)
        experts = {name.split(".")[0] for name in layer.parameters}
        for name, child in original.named_children():
            if name not in experts:
                self.add_module(name, child)
        for name, parameter in original.named_parameters(recurse=False):
            if name not in experts:
                self.register_parameter(name, parameter)

    def expert(self, number: int, rows: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Output [T, H] of one expert for rows [T, H]; tokens: [T] which of the device's tokens they are."""
        linears: dict[str, Any] = dict(self.get_submodule(str(number)).named_children())
        products = {name: linear(rows) for name, linear in linears.items() if name != DOWN}
        output: Tensor = linears[DOWN](self.math.gate(products))
        return output if self.math.finish is None else self.math.finish(output)

    def by_device(self, experts: Sequence[int], home: torch.device) -> dict[torch.device, list[int]]:
        """Experts, in order, by the device that holds them; `home` is that of experts without a place of their own."""
        places: dict[torch.device, list[int]] = {}
        for expert in experts:
            state = None if expert >= self.num_experts else next(self.get_submodule(str(expert)).buffers())
            offloaded = state is None or state.device.type == "meta"  # accelerate brings it in when it is called
            places.setdefault(home if offloaded or state is None else state.device, []).append(expert)
        return places

    def weighted_sum(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Sum over each token's experts of routing weight times expert output, [T, H].

        To experts on another device go the tokens that need them, once, before those at home are computed; their
        weighted sum comes back once.
        """
        home = hidden.device
        groups = self.by_device(torch.unique(experts).tolist(), home)
        away = {}
        for device, numbers in groups.items():
            if device == home:
                continue
            tokens = torch.isin(experts, torch.tensor(numbers).to(home)).any(1).nonzero().squeeze(1)
            away[device] = tokens, [part[tokens].to(device) for part in (hidden, experts, weights)]
        result = self._sum_here(groups.get(home, []), hidden, experts, weights)
        for device, (tokens, parts) in away.items():
            result.index_add_(0, tokens, self._sum_here(groups[device], *parts).to(home))
        return result

    def _sum_here(self, numbers: list[int], hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of some experts alone, all on the device of their inputs."""
        result = torch.zeros_like(hidden)
        for expert in numbers:
            beyond = expert >= self.num_experts
            if beyond and not self.identity_beyond:
                continue  # the sentinel of expert parallelism, or a token over capacity
            token, place = torch.where(experts == expert)
            output = hidden[token] if beyond else self.expert(expert, hidden[token], token)
            result.index_add_(0, token, (output * weights[token, place, None]).to(result.dtype))
        return result

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the family's own module is called; [..., H]."""
        flat = (part.flatten(0, -2) for part in (hidden_states, top_k_index, top_k_weights))
        return self.weighted_sum(*flat).view_as(hidden_states)


class PackedLlama4(PackedExperts):
    """Called with every token for every expert, multiplied by its score: rows of zeros come out as zeros."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """[E*T, H] -> [E*T, H]."""
        result = torch.zeros_like(hidden_states)
        rows = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
        chosen = [tokens.any(1).nonzero().squeeze(1) for tokens in rows]
        used = [expert for expert, tokens in enumerate(chosen) if len(tokens)]
        for device, numbers in self.by_device(used, rows.device).items():
            counts = [len(chosen[expert]) for expert in numbers]
            sent = torch.cat([rows[expert, chosen[expert]] for expert in numbers]).to(device).split(counts)
            outputs = [self.expert(expert, part, chosen[expert]) for expert, part in zip(numbers, sent, strict=True)]
            back = torch.cat(outputs).to(rows.device).split(counts)
            for expert, output in zip(numbers, back, strict=True):
                result.view_as(rows)[expert, chosen[expert]] = output
        return result


class PackedNumbered(PackedExperts):
    """Called with a one-hot choice [T, 1, E], all zero for a token over its expert's capacity."""

    def forward(self, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:  # type: ignore[override]
        """[T, H]."""
        return self.weighted_sum(*numbered.routing(hidden_states, selected_experts, routing_weights))


class PackedJetMoe(PackedExperts):
    """The block itself: its router and its bias are taken over."""

    def forward(self, layer_input: Tensor) -> Tensor:  # type: ignore[override]
        """[B, S, H] -> [B, S, H]."""
        hidden = layer_input.flatten(0, -2)
        of: Any = self
        output = self.weighted_sum(*jetmoe.routing(hidden, of.router(hidden)))
        result: Tensor = output.view_as(layer_input) + of.bias
        return result


PACKED: dict[str, type[PackedExperts]] = {
    "stacked": PackedExperts,
    "dbrx": PackedExperts,
    "llama4": PackedLlama4,
    "numbered": PackedNumbered,
    "jetmoe": PackedJetMoe,
}


def _register(module: nn.Module, name: str, tensor: Tensor) -> None:
    """A buffer under a dotted name, with empty modules on the way."""
    path, _dot, leaf = name.rpartition(".")
    for part in path.split(".") if path else ():
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_buffer(leaf, tensor)
