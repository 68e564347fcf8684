"""The experts module of a packed checkpoint: every expert in its own width or widths, dequantized as it is used.

Stands in for a family's experts module and is called as that one is. State: `{expert}.{projection}.` codes, scales and
zeros for packed experts, dense for those left as in the checkpoint, bias where the family has biases, nothing for those
that are dropped, which add nothing to what they are given; and a guard under
the original parameters' names, of shapes that no real model has: whoever loads the checkpoint without moeq gets an
error instead of random experts.

Letters: E experts, T tokens, H hidden size, I intermediate size, k experts a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.assignment import FULL, Width, width_of
from moeq.models.experts import DOWN, ExpertLayer, ExpertMath
from moeq.models.kinds import jetmoe, numbered
from moeq.runtime import shown
from moeq.runtime.arranged import (
    GRADIENTS,
    OFFLOADED,
    SEVERAL,
    Arranged,
    Puts,
    arranging,
    is_offloaded,
    leave_files,
    note_reason,
    reason_at_call,
    wants_gradients,
    with_gradients,
)
from moeq.runtime.graph_operator import in_graphs, number_for
from moeq_kernels import choice
from moeq_kernels.checkpoint import DENSE
from moeq_kernels.description import LayerOfExperts, Matrix, PreparedLayer
from moeq_kernels.freed import return_memory
from moeq_kernels.packed import PackedWeight, packed_shapes
from moeq_kernels.reference import routed_sum, values
from moeq_kernels.widths import DROPPED, PARTS, Encoding

GUARD_DTYPE = torch.float16
HELD = (*PARTS, DENSE, "bias")


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


def as_given(module: nn.Module, hidden: Tensor) -> tuple[Sequence[int], torch.dtype]:
    """Size and dtype of what experts make of hidden states [..., H]."""
    return hidden.shape, hidden.dtype


class PackedLinear(Puts):
    """One matrix of one expert, packed or dense, and its bias where there is one.

    arranged: where a kernel holds them, instead of the buffers.
    """

    def __init__(
        self,
        rows: int,
        inputs: int,
        bits: int,
        encoding: Encoding,
        dense_dtype: torch.dtype,
        biased: bool,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.bits, self.encoding = inputs, rows, bits, encoding
        self.biased = biased
        self.arranged: Arranged | None = None
        if biased:
            self.register_buffer("bias", torch.empty(rows, dtype=dense_dtype))
        if bits == FULL:
            self.register_buffer(DENSE, torch.empty(rows, inputs, dtype=dense_dtype))
            return
        for part, (shape, dtype) in packed_shapes(rows, inputs, bits, encoding).items():
            self.register_buffer(part, torch.empty(shape, dtype=dtype))

    def extra_repr(self) -> str:
        return shown.of_linear(self.inputs, self.outputs, self.bits, self.encoding, self.biased)

    @property
    def device(self) -> torch.device:
        """Where it lies; `meta` where accelerate brings it in when it is called."""
        with arranging():
            return next(self.buffers()).device if self.arranged is None else self.arranged.device

    def stored(self) -> Matrix:
        """The matrix [N, K] as it is stored, wherever it lies."""
        with arranging():
            if self.arranged is not None:
                return self.arranged.matrix()
            if self.bits == FULL:
                return self.get_buffer(DENSE)
            parts = {part: held for part in PARTS if (held := self._buffers.get(part)) is not None}
        return PackedWeight.of(parts, self.bits, self.inputs, self.encoding)

    def offset(self) -> Tensor | None:
        """The bias [N], None without."""
        if not self.biased:
            return None
        with arranging():
            return self.get_buffer("bias") if self.arranged is None else self.arranged.bias

    def values(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] in `dtype`."""
        return values(self.stored(), dtype)

    def hand_over(self, matrix: Callable[[], Matrix], put_back: Callable[[], None]) -> None:
        """Give up the buffers: a kernel has them."""
        held = {name: tensor for name, tensor in self._buffers.items() if name in HELD and tensor is not None}
        following = [tensor.dtype for name, tensor in held.items() if name not in PARTS]
        self.arranged = Arranged(
            matrix=matrix,
            bias=held["bias"].clone() if "bias" in held else None,
            put_back=put_back,
            device=next(iter(held.values())).device,
            dtype=following[0] if following else torch.uint8,
        )
        self._buffers.update(dict.fromkeys(held))  # None, which keeps their order; others ask `arranged` by now

    def take_back(self) -> None:
        """Have the buffers again."""
        if self.arranged is None:
            return
        matrix, bias = self.arranged.matrix(), self.arranged.bias
        self._buffers.update({DENSE: matrix} if isinstance(matrix, Tensor) else matrix.parts())
        if bias is not None:
            self._buffers["bias"] = bias
        self.arranged = None

    def put_back(self) -> None:
        with arranging():
            if self.arranged is not None:
                self.arranged.put_back()

    def _moved(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> PackedLinear:
        """Move, but never convert what is stored: scales in another type would be other scales."""
        if self.arranged is not None and self.arranged.stays(fn):
            return self
        self.put_back()
        stored = {part: held for part in PARTS if (held := self._buffers.get(part)) is not None}
        super()._moved(fn, recurse)
        for part, held in stored.items():
            if (changed := self.get_buffer(part)).dtype != held.dtype:
                self._buffers[part] = held.to(changed.device)
        return self

    def forward(self, rows: Tensor) -> Tensor:
        """rows [T, K] -> [T, N]."""
        bias = self.offset()
        return nn.functional.linear(rows, self.values(rows.dtype), None if bias is None else bias.to(rows.dtype))


class PackedExperts(Puts):
    """All experts of one layer, each in its own width or widths; called with hidden [T, H], indices and weights [T, k].

    bits: of every expert one width, or {projection: bits}; encoding: of packed matrices; dtype: of dense
    matrices and biases. What of the original module is not an expert's weight (a norm, a router) is taken over under
    its name.

    prepared: the layer in a kernel's arrangement, None where the stored tensors are computed with; refused: why no
    kernel takes the layer; reason: why the last call did not go through a kernel, None if it did.
    """

    prepared: PreparedLayer | None = None
    refused: str | None = None
    reason: str | None = None

    def __init__(
        self,
        layer: ExpertLayer,
        bits: Sequence[Width],
        *,
        encoding: Encoding,
        original: nn.Module,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.policy, self.encoding = choice.policy(), encoding
        self.take_over(layer, original)
        for expert, widths in enumerate(bits):
            linears = nn.ModuleDict()
            for projection in () if widths == DROPPED else layer.projections:
                size, width = layer.shape(projection), width_of(widths, projection)
                linears[projection] = PackedLinear(*size, width, encoding, dtype, layer.biased)
            self.add_module(str(expert), linears)
        for name, shape in guard_shapes(layer).items():
            _register(self, name, torch.zeros(shape, dtype=GUARD_DTYPE))

    def __repr__(self) -> str:
        """Its experts summed up, which would be a line for every matrix of every expert."""
        children = dict(self.named_children())
        experts = [children.pop(name) for name in list(children) if name.isdigit()]
        if not experts:  # its weights are elsewhere
            return super().__repr__()
        widths = [
            {name: linear.bits for name, linear in one.named_children() if isinstance(linear, PackedLinear)}
            for one in experts
        ]
        return shown.within(type(self).__name__, shown.of_experts(widths, self.encoding), children.items())

    def take_over(self, layer: ExpertLayer, original: nn.Module) -> None:
        """What the original module computes and holds beside its experts' weights."""
        self.number = number_for(self)
        self.num_experts = layer.num_experts
        self.math = ExpertMath.of(layer.kind, original)
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
        if not linears:  # dropped
            return torch.zeros_like(rows)
        products = {name: linear(rows) for name, linear in linears.items() if name != DOWN}
        output: Tensor = linears[DOWN](self.math.gate(products))
        return output if self.math.finish is None else self.math.finish(output)

    def linears(self) -> list[tuple[int, str, PackedLinear]]:
        """Expert, projection and module of every matrix that is stored."""
        found = []
        for expert in range(self.num_experts):
            children: dict[str, Any] = dict(self.get_submodule(str(expert)).named_children())
            found += [(expert, projection, linear) for projection, linear in children.items()]
        return found

    def prepare(self) -> PreparedLayer | None:
        """Have a kernel take the stored tensors, if one can; `refused` says why not. It needs their bytes once more."""
        with arranging():
            if self.prepared is None:
                self._prepare()
            return self.prepared

    def _prepare(self) -> None:
        linears = self.linears()
        devices = {tensor.device for *_, linear in linears for tensor in linear.buffers()}
        if torch.device("meta") in devices or any(is_offloaded(linear) for *_, linear in linears):
            self.refused = OFFLOADED
        elif len(devices) > 1:
            self.refused = SEVERAL
        else:
            self.home = next(iter(devices), next(self.buffers()).device)  # the guard's where all are dropped
            self.prepared, self.refused = choice.prepared_layer(self._layer(), self.home, self.policy)
        if self.prepared is not None:
            for expert, projection, linear in linears:
                linear.hand_over(partial(self.prepared.matrix, expert, projection), self.put_back)
            for module in self.modules():
                leave_files(module)
            return_memory()

    def _layer(self) -> LayerOfExperts:
        """What a kernel is given."""
        matrices: list[dict[str, Matrix]] = [{} for _ in range(self.num_experts)]
        biases: list[dict[str, Tensor]] = [{} for _ in range(self.num_experts)]
        for expert, projection, linear in self.linears():
            matrices[expert][projection] = linear.stored()
            if (bias := linear.offset()) is not None:
                biases[expert][projection] = bias
        return LayerOfExperts(
            matrices=matrices,
            biases=biases,
            gate=self.math.gate,
            activation=self.math.activation,
            finish=self.math.finish,
        )

    def put_back(self) -> None:
        with arranging():
            self.refused = None
            if self.prepared is not None:
                self.prepared = None
                for *_, linear in self.linears():
                    linear.take_back()

    def _moved(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> PackedExperts:
        """What was refused where it lay may be taken where it goes."""
        self.refused = None
        super()._moved(fn, recurse)
        return self

    def through(self, hidden: Tensor, weights: Tensor) -> PreparedLayer | None:
        """The prepared layer that computes a call, None where the stored tensors do; `reason` says why."""
        reason, prepared = reason_at_call(self, hidden), None
        if reason is None and (self.math.activation is None or self.math.finish is not None):
            reason = GRADIENTS if wants_gradients(hidden, weights) else None
        if reason is None:
            prepared = self.prepared  # read once: another thread may have it put back
            if prepared is None and self.refused is None:
                prepared = self.prepare()
            if prepared is None:
                reason = self.refused
            elif self.home != hidden.device:
                reason = f"its experts lie on {self.home}, its inputs on {hidden.device}"
        note_reason(self, reason)
        return prepared if reason is None else None

    def by_device(self, experts: Sequence[int], home: torch.device) -> dict[torch.device, list[int]]:
        """Experts, in order, by the device that holds them; `home` is that of experts without a place of their own."""
        places: dict[torch.device, list[int]] = {}
        for expert in experts:
            place = self._place(expert) if 0 <= expert < self.num_experts else None
            places.setdefault(home if place is None else place, []).append(expert)
        return places

    def _place(self, expert: int) -> torch.device | None:
        """Where an expert lies, None for one that accelerate brings in when it is called, and for one dropped."""
        linear: Any = next(self.get_submodule(str(expert)).children(), None)
        device: torch.device | None = None if linear is None else linear.device
        return None if device is None or device.type == "meta" else device

    def weighted_sum(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Sum over each token's experts of routing weight times expert output, [T, H].

        To experts on another device go the tokens that need them, once, before those at home are computed; their
        weighted sum comes back once.
        """
        prepared = self.through(hidden, weights)
        if prepared is not None:
            result = with_gradients(prepared, self._stored_sum, hidden, experts, weights)
            return self._with_identity(result, hidden, experts, weights) if self.identity_beyond else result
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

    def _stored_sum(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum with the stored tensors, without experts beyond the last one."""
        numbers = [number for number in torch.unique(experts).tolist() if number < self.num_experts]
        return self._sum_here(numbers, hidden, experts, weights)

    def _with_identity(self, result: Tensor, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The sum with what experts beyond the last one hand through."""
        share = weights.masked_fill(experts < self.num_experts, 0).sum(-1, keepdim=True)
        return result + (hidden * share).to(result.dtype)

    def _sum_here(self, numbers: list[int], hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of some experts alone, all on the device of their inputs."""
        last = math.inf if self.identity_beyond else self.num_experts  # others: no expert, or a token over capacity
        numbers = [number for number in numbers if 0 <= number < last]
        return routed_sum(numbers, hidden, experts, weights, self._output_or_identity)

    def _output_or_identity(self, number: int, rows: Tensor, tokens: Tensor) -> Tensor:
        return rows if number >= self.num_experts else self.expert(number, rows, tokens)

    @in_graphs(as_given)
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the family's own module is called; [..., H]."""
        flat = (part.flatten(0, -2) for part in (hidden_states, top_k_index, top_k_weights))
        return self.weighted_sum(*flat).view_as(hidden_states)


class PackedLlama4(PackedExperts):
    """Called with every token for every expert, multiplied by its score: rows of zeros come out as zeros."""

    @in_graphs(as_given)
    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """[E*T, H] -> [E*T, H]."""
        result = torch.zeros_like(hidden_states)
        rows = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
        prepared = self.through(hidden_states, hidden_states)
        if prepared is not None:
            at, token = rows.any(-1).nonzero().T
            given = rows[at, token], at[:, None], rows.new_ones(len(at), 1)
            result.view_as(rows)[at, token] = with_gradients(prepared, self._stored_sum, *given)
            return result
        chosen = [tokens.any(1).nonzero().squeeze(1) for tokens in rows]
        used = [expert for expert, tokens in enumerate(chosen) if len(tokens)]
        for device, numbers in self.by_device(used, rows.device).items():
            counts = [len(chosen[expert]) for expert in numbers]
            sent = torch.cat([rows[expert, chosen[expert]] for expert in numbers]).to(device).split(counts)
            outputs = [self.expert(expert, part, chosen[expert]) for expert, part in zip(numbers, sent, strict=True)]
            back = torch.cat(outputs).to(rows.device).split(counts)
            for expert, output in zip(numbers, back, strict=True):
                result.view_as(rows)[expert, chosen[expert]] = output.to(result.dtype)  # autocast's is another
        return result


class PackedNumbered(PackedExperts):
    """Called with a one-hot choice [T, 1, E], all zero for a token over its expert's capacity."""

    @in_graphs(as_given)
    def forward(self, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:  # type: ignore[override]
        """[T, H]."""
        return self.weighted_sum(*numbered.routing(hidden_states, selected_experts, routing_weights))


class PackedJetMoe(PackedExperts):
    """The block itself: its router and its bias are taken over."""

    @in_graphs(as_given)
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
