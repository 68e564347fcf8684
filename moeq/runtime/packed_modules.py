"""Linears and embeddings of a packed checkpoint outside of its experts, dequantized as they are used.

State: codes, scales and zeros; bias where there is one; and under `weight` a guard of a shape that no real module has,
so that whoever loads the checkpoint without moeq gets an error. A head that shares the embeddings' tensor has no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moeq.runtime.arranged import (
    COMPUTED,
    OFFLOADED,
    arranging,
    is_offloaded,
    leave_files,
    note_reason,
    reason_at_call,
    refuse_traced,
    wants_gradients,
    with_gradients,
)
from moeq.runtime.graph_operator import in_graphs, number_for
from moeq.runtime.packed_experts import GUARD_DTYPE, PackedExperts, PackedLinear
from moeq_kernels import choice
from moeq_kernels.checkpoint import Others, wrong_config
from moeq_kernels.description import PreparedLinear
from moeq_kernels.reference import some_rows, values
from moeq_kernels.widths import Encoding

GUARD_SHAPE = (1, 1)


def guard_name(module: str) -> str:
    """Name of a module's guard tensor."""
    return f"{module}.weight"


def _products(module: Any, rows: Tensor) -> tuple[Sequence[int], torch.dtype]:
    """Size and dtype of a linear's output for rows [..., K]."""
    return (*rows.shape[:-1], module.out_features), rows.dtype


def _rows_of(module: Any, ids: Tensor) -> tuple[Sequence[int], torch.dtype]:
    """Size and dtype of the embeddings of ids [...]."""
    return (*ids.shape, module.inputs), module.dtype


def _as_cast(rows: Tensor) -> Tensor:
    """Rows in the type that torch.autocast computes products in, as they reach an nn.Linear; themselves without it."""
    kind = rows.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or rows.dtype not in COMPUTED:
        return rows
    return rows.to(torch.get_autocast_dtype(kind))


class PackedModule(PackedLinear):
    """A linear in its stored form; called as an nn.Linear is.

    prepared, refused, reason: as of PackedExperts.
    """

    prepared: PreparedLinear | None = None
    refused: str | None = None
    reason: str | None = None

    def __init__(self, original: nn.Module, bits: int, encoding: Encoding) -> None:
        weight = original.get_parameter("weight")
        biased = getattr(original, "bias", None) is not None
        rows, inputs = weight.shape
        super().__init__(rows, inputs, bits, encoding, weight.dtype, biased)
        self.number = number_for(self)
        self.policy = choice.policy()
        self.out_features, self.in_features = rows, inputs
        if not biased:
            self.register_buffer("bias", None)
        self.register_buffer("weight", torch.zeros(GUARD_SHAPE, dtype=GUARD_DTYPE))

    def prepare(self) -> PreparedLinear | None:
        """Have a kernel take the stored tensors, if one can; `refused` says why not."""
        with arranging():
            if self.prepared is None:
                self._prepare()
            return self.prepared

    def _prepare(self) -> None:
        if self.device.type == "meta" or is_offloaded(self):
            self.refused = OFFLOADED
            return
        made = choice.prepared_linear(self.stored(), self.offset(), self.device, self.policy)
        self.prepared, self.refused = made
        if self.prepared is not None:
            self.hand_over(self.prepared.matrix, self.put_back)
            leave_files(self)

    def put_back(self) -> None:
        with arranging():
            self.refused = None
            if self.prepared is not None:
                self.take_back()
                self.prepared = None

    def through(self, rows: Tensor) -> PreparedLinear | None:
        """The prepared matrix that computes a call, None where the stored one does; `reason` says why."""
        reason, prepared = reason_at_call(self, rows), self.prepared  # read once: another thread may have it put back
        if reason is None and prepared is None and self.refused is None:
            prepared = self.prepare()
        arranged = self.arranged
        if reason is None and arranged is not None and arranged.device != rows.device:
            reason = f"its weights lie on {arranged.device}, its inputs on {rows.device}"
        if prepared is None:
            reason = reason or self.refused
        note_reason(self, reason)
        return prepared if reason is None else None

    @in_graphs(_products)
    def product(self, rows: Tensor) -> Tensor:
        """rows [..., K] -> [..., N]."""
        prepared = self.through(rows)
        if prepared is None:
            return super().forward(rows)
        whole = rows if rows.dim() == 2 else rows.reshape(-1, rows.shape[-1])
        output = with_gradients(prepared, super().forward, whole) if wants_gradients(rows) else prepared(whole)
        return output if rows.dim() == 2 else output.view(*rows.shape[:-1], self.out_features)

    def forward(self, rows: Tensor) -> Tensor:
        return self.product(_as_cast(rows))


class PackedEmbedding(PackedModule):
    """An embedding in its stored form; only the rows that are looked up are dequantized.

    A kernel takes it only where it is a head, too.
    """

    def __init__(self, original: nn.Module, bits: int, encoding: Encoding) -> None:
        super().__init__(original, bits, encoding)
        self.num_embeddings, self.embedding_dim = self.out_features, self.in_features
        self.padding_idx = getattr(original, "padding_idx", None)
        self.dtype = original.get_parameter("weight").dtype

    def _moved(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> PackedEmbedding:
        super()._moved(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def forward(self, ids: Tensor, *, as_head: bool = False, bias: Tensor | None = None) -> Tensor:
        """ids [...] -> [..., K] in the model's dtype; as_head: rows [..., K] -> [..., N], as a linear's.

        IndexError on a CPU for ids that there are not, as nn.Embedding gives; a GPU is not waited for."""
        if as_head:
            output = self.product(_as_cast(ids))
            return output if bias is None else output + bias
        return self.look_up(ids)

    @in_graphs(_rows_of)
    def look_up(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., K]."""
        refuse_traced(ids)
        if not ids.numel():
            return torch.zeros(*ids.shape, self.inputs, dtype=self.dtype, device=ids.device)
        which = ids.reshape(-1)
        if which.device.type == "cpu" and not 0 <= int(which.min()) <= int(which.max()) < self.num_embeddings:
            raise IndexError(f"tokens {int(which.min())} to {int(which.max())}, of {self.num_embeddings} embeddings")
        prepared = self.prepared
        found = some_rows(self.stored(), which) if prepared is None else prepared.some(which)
        return values(found, self.dtype).view(*ids.shape, self.inputs)


class TiedHead(nn.Module):
    """A head that uses the embeddings' packed tensor; its own state is a bias, where it has one."""

    def __init__(self, original: nn.Module, embeddings: PackedEmbedding) -> None:
        super().__init__()
        self.out_features, self.in_features = embeddings.out_features, embeddings.in_features
        self._embeddings = (embeddings,)  # in a tuple: no child, so that its state is not there twice
        bias = getattr(original, "bias", None)
        self.register_buffer("bias", None if bias is None else torch.empty_like(bias, requires_grad=False))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    @property
    def embeddings(self) -> PackedEmbedding:
        return self._embeddings[0]

    def forward(self, rows: Tensor) -> Tensor:
        """rows [..., K] -> [..., N]."""
        bias = self._buffers["bias"]
        bias = None if bias is None else bias.to(rows.dtype)
        output: Tensor = self.embeddings(rows, as_head=True, bias=bias)
        return output


def prepare(model: nn.Module, *, experts: bool = True) -> None:
    """Have kernels take what is packed, one layer after the other; what none takes computes as it is stored.

    experts: or only what lies beside the experts.
    """
    for module in model.modules():
        if type(module) is PackedModule or (experts and isinstance(module, PackedExperts)):
            module.prepare()
        elif isinstance(module, TiedHead):
            module.embeddings.prepare()


def replace_modules(model: Any, widths: Others) -> None:
    """Put packed modules, without weights, into a model's place of linears and embeddings.

    Raises ArtifactError when the model has no such module.
    """
    for name, bits in widths.bits.items():
        original = _original(model, name)
        kind = PackedEmbedding if isinstance(original, nn.Embedding) else PackedModule
        with torch.device("meta"):
            packed = kind(original, bits, widths.encoding)
        model.set_submodule(name, packed)
    for embeddings, head in widths.tied.items():
        with torch.device("meta"):
            tied = TiedHead(_original(model, head), model.get_submodule(embeddings))
        model.set_submodule(head, tied)
    gone = {guard_name(name) for name in (*widths.bits, *widths.tied.values())}
    model.all_tied_weights_keys = {
        target: source for target, source in model.all_tied_weights_keys.items() if not gone & {target, source}
    }


def _original(model: nn.Module, name: str) -> nn.Module:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = nn.Module()
    if type(module) not in (nn.Linear, nn.Embedding):
        raise wrong_config("quantization_config names a module that is no linear and no embedding of this model", name)
    return module
