"""Linears and embeddings of a packed checkpoint outside of its experts, dequantized as they are used.

State: codes, scales and zeros; bias where there is one; and under `weight` a guard of a shape that no real module has,
so that whoever loads the checkpoint without moeq gets an error. A head that shares the embeddings' tensor has no state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from moeq.artifacts.manifest import REMEDY
from moeq.errors import ArtifactError
from moeq.recipe.wording import refusal_of
from moeq.runtime.packed_experts import GUARD_DTYPE, PackedLinear

GUARD_SHAPE = (1, 1)


def guard_name(module: str) -> str:
    """Name of a module's guard tensor."""
    return f"{module}.weight"


def wrong_config(what: str, place: str) -> ArtifactError:
    """The error for a config.json that does not go with its model."""
    return ArtifactError(what, where=f"config.json, {place}", do=REMEDY)


class OtherWidths(BaseModel):
    """What config.json says of packed modules outside of the experts.

    bits: {module: width}; tied: {embeddings: the head that uses the same tensor}.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    bits: dict[str, Literal[2, 3, 4, 8]]
    group_size: int
    symmetric: bool
    tied: dict[str, str] = {}

    @classmethod
    def of(cls, block: Any) -> OtherWidths:
        """Read the block; ArtifactError naming what is wrong with it."""
        try:
            return cls.model_validate(block)
        except ValidationError as error:
            raise wrong_config(refusal_of(error, block).sentence(), "others") from None


class PackedModule(PackedLinear):
    """A linear in its stored form; called as an nn.Linear is."""

    def __init__(self, original: nn.Module, bits: int, group_size: int, symmetric: bool) -> None:
        weight = original.get_parameter("weight")
        biased = getattr(original, "bias", None) is not None
        rows, inputs = weight.shape
        super().__init__(rows, inputs, bits, group_size, symmetric, weight.dtype, biased)
        self.out_features, self.in_features = rows, inputs
        if not biased:
            self.register_buffer("bias", None)
        self.register_buffer("weight", torch.zeros(GUARD_SHAPE, dtype=GUARD_DTYPE))


class PackedEmbedding(PackedModule):
    """An embedding in its stored form; only the rows that are looked up are dequantized."""

    def __init__(self, original: nn.Module, bits: int, group_size: int, symmetric: bool) -> None:
        super().__init__(original, bits, group_size, symmetric)
        self.num_embeddings, self.embedding_dim = self.out_features, self.in_features
        self.padding_idx = getattr(original, "padding_idx", None)
        self.dtype = original.get_parameter("weight").dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedEmbedding:
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def forward(self, ids: Tensor, *, as_head: bool = False, bias: Tensor | None = None) -> Tensor:
        """ids [...] -> [..., K] in the model's dtype; as_head: rows [..., K] -> [..., N], as a linear's."""
        if as_head:
            return nn.functional.linear(ids, self.values(ids.dtype), bias)
        rows = self.stored().map(lambda part: part[ids.reshape(-1)])
        return rows.dequantize(self.dtype).view(*ids.shape, self.inputs)


class TiedHead(nn.Module):
    """A head that uses the embeddings' packed tensor; its own state is a bias, where it has one."""

    def __init__(self, original: nn.Module, embeddings: PackedEmbedding) -> None:
        super().__init__()
        self.out_features, self.in_features = embeddings.out_features, embeddings.in_features
        self._embeddings = (embeddings,)  # in a tuple: no child, so that its state is not there twice
        bias = getattr(original, "bias", None)
        self.register_buffer("bias", None if bias is None else torch.empty_like(bias, requires_grad=False))

    def forward(self, rows: Tensor) -> Tensor:
        """rows [..., K] -> [..., N]."""
        bias = self._buffers["bias"]
        bias = None if bias is None else bias.to(rows.dtype)
        output: Tensor = self._embeddings[0](rows, as_head=True, bias=bias)
        return output


def replace_modules(model: Any, widths: OtherWidths) -> None:
    """Put packed modules, without weights, into a model's place of linears and embeddings.

    Raises ArtifactError when the model has no such module.
    """
    for name, bits in widths.bits.items():
        original = _original(model, name)
        kind = PackedEmbedding if isinstance(original, nn.Embedding) else PackedModule
        with torch.device("meta"):
            packed = kind(original, bits, widths.group_size, widths.symmetric)
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
