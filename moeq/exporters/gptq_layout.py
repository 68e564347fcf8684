"""Linears in GPTQ's layout and the names of modules that are not packed: what the formats auto-round and gptq share.

N output rows, K inputs, G groups of inputs, b bits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.targets import ANY_GRID
from moeq.errors import FormatError
from moeq.exporters.foreign import OTHERS_FILE, Draft, Tensors
from moeq.numerics.layouts import column_words, zero_words
from moeq_kernels.grids import SCALE_DTYPE
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import unpack

PARTS = ("qweight", "qzeros", "scales", "g_idx")


class ZeroPoints(Exception):
    """A matrix has zero points of its own, which AutoGPTQ's first format cannot hold where they are 0."""


@dataclass(frozen=True, kw_only=True)
class Modules:
    """What a configuration says of the modules. first: whether it is AutoGPTQ's first format, of symmetric grids alone;
    bits, group_size: of most; others: those of the rest with patterns of their names; plain: patterns of the names of
    what is not packed; blocks: the lists of decoder layers that hold packed modules, such as model.layers."""

    first: bool
    bits: int
    group_size: int
    others: list[tuple[int, int, list[str]]]
    plain: list[str]
    blocks: list[str]


def write_gptq(
    draft: Draft,
    configuration: Callable[[Modules], Mapping[str, Any]],
    *,
    ordered: bool = False,
    as_in_memory: bool = False,
) -> None:
    """Write a checkpoint in the first format or, where it cannot hold the zero points, in the second.

    configuration: its quantization_config; ordered: every module has a g_idx; as_in_memory: tensors are called as they
    are in memory, not as the family has them. FormatError for what the target cannot load.
    """
    key_of = str if as_in_memory else draft.names.renamed
    first = True
    try:
        _write_linears(draft, partial(_tensors, first, ordered), key_of)
    except ZeroPoints:
        first = False
        draft.restart()
        _write_linears(draft, partial(_tensors, first, ordered), key_of)
    renamed = {key: draft.names.in_memory(key) for key in draft.source.rest()} if as_in_memory else None
    draft.finish(configuration(modules_of(draft, first)), renamed)


def linear_tensors(weight: PackedWeight, *, less_one: bool, ordered: bool) -> dict[str, Tensor]:
    """qweight int32 [K*b/32, N], qzeros int32 [G, N*b/32], scales float16 [G, N] and, if ordered, g_idx int32 [K].

    less_one: zero points are stored less one, as AutoGPTQ's first format has them; ZeroPoints when they are not all
    in the middle. ValueError when a scale is no float16. qweight and scales are transposed views.
    """
    if less_one and weight.zeros is not None:
        raise ZeroPoints
    rows, groups = weight.scales.shape
    scales = weight.scales.to(SCALE_DTYPE)
    if scales is not weight.scales and not torch.equal(scales.to(weight.scales.dtype), weight.scales):
        raise ValueError("a scale that float16 does not hold")
    if weight.zeros is None:
        zeros = _middle_words(rows, groups, weight.bits, less_one)
    else:
        zeros = zero_words(unpack(weight.zeros, weight.bits, groups), weight.bits, less_one=less_one)
    parts = {
        "qweight": column_words(weight.codes, weight.bits, weight.inputs),
        "qzeros": zeros,
        "scales": scales.mT,
    }
    if ordered:
        parts["g_idx"] = _group_of(weight.inputs, weight.inputs if weight.group_size == -1 else weight.group_size)
    return parts


@cache
def _middle_words(rows: int, groups: int, bits: int, less_one: bool) -> Tensor:
    """qzeros of a symmetric grid."""
    middle = torch.full((rows, 1), 2 ** (bits - 1), dtype=torch.uint8)
    return zero_words(middle, bits, less_one=less_one).repeat(groups, 1)


@cache
def _group_of(inputs: int, group_size: int) -> Tensor:
    return (torch.arange(inputs) // group_size).to(torch.int32)


def _write_linears(draft: Draft, tensors: Tensors, key_of: Callable[[str], str]) -> None:
    """Convert and write all packed modules of a draft; key_of: what a tensor called so in memory is called on disk.

    Raises FormatError for what the target cannot load, ZeroPoints as `linear_tensors` does.
    """
    parts = ("weight", *PARTS)
    for layer in draft.source.layers:
        places = draft.expert_keys(layer)
        weights = {(expert, name): key_of(f"{layer.name}.{expert}.{name}.weight") for expert, name in places}
        draft.write_experts(layer, weights, parts, tensors)
    others = draft.source.other_names()
    if others:
        stems = {name: key_of(f"{name}.weight").removesuffix("weight") for name in others}
        with draft.file(OTHERS_FILE, (f"{stem}{part}" for stem in stems.values() for part in parts)) as add:
            for name, weight in draft.source.others():
                refuse_tables(draft, name)
                for part, tensor in tensors(name, draft.loadable(name, weight)).items():
                    add(f"{stems[name]}{part}", tensor)


def _tensors(less_one: bool, ordered: bool, name: str, matrix: PackedWeight | Tensor) -> dict[str, Tensor]:
    if isinstance(matrix, Tensor):
        return {"weight": matrix}
    try:
        return linear_tensors(matrix, less_one=less_one, ordered=ordered)
    except ValueError as error:
        raise FormatError(str(error), where=name, do=ANY_GRID) from None


def refuse_tables(draft: Draft, name: str) -> None:
    """FormatError for packed embeddings and heads, which runtimes load in full precision only."""
    model: Any = draft.model
    module = model.get_submodule(name)
    heads = [model.get_output_embeddings()] if hasattr(model, "get_output_embeddings") else []
    if isinstance(module, nn.Embedding) or any(module is head for head in heads):
        raise FormatError(
            "packed embeddings and heads are not loaded",
            where=f"{name}, target {draft.target.name}",
            do=f"leave embeddings and head out of `others`, or {ANY_GRID}",
        )


def modules_of(draft: Draft, first: bool) -> Modules:
    """What a configuration says of the modules of a draft, all of whose packed ones are written."""
    counts = Counter((grid.bits, grid.group_size, grid.symmetric) for grid in draft.grids.values())
    bits, group_size, _ = max(sorted(counts), key=counts.__getitem__) if counts else (4, 128, True)
    sized: dict[tuple[int, int], list[str]] = {}
    for name, grid in draft.grids.items():
        sized.setdefault((grid.bits, grid.group_size), []).append(name)
    numbered = (re.match(r"(.+?)\.\d+\.", name) for name in [*draft.grids, *draft.plain])
    blocks = sorted({match[1] for match in numbered if match})
    return Modules(
        first=first,
        bits=bits,
        group_size=group_size,
        others=[(*which, patterns(names)) for which, names in sized.items() if which != (bits, group_size)],
        plain=_plain_patterns(draft, blocks),
        blocks=blocks,
    )


def _plain_patterns(draft: Draft, blocks: list[str]) -> list[str]:
    """Patterns of the names of all matrices below `blocks` that are not packed, one for every decoder layer."""
    below = tuple(f"{block}." for block in blocks)
    experts = tuple(f"{layer.name}." for layer in draft.source.layers)
    names = [
        name.removesuffix(".weight")
        for name, parameter in draft.model.named_parameters()
        if name.startswith(below) and name.endswith(".weight") and parameter.dim() == 2
        if not name.startswith(experts) and name.removesuffix(".weight") not in draft.grids
    ]
    return patterns([*names, *draft.plain])


def patterns(names: Iterable[str]) -> list[str]:
    """Patterns that match exactly these names of modules, one for every numbered block that they lie in.

    An expert all of whose matrices are named is named by its number.
    """
    by_block: dict[str, list[str]] = {}
    for name in names:
        match = re.match(r".+?\.\d+\.", name)
        block = match[0] if match else ""
        by_block.setdefault(block, []).append(name.removeprefix(block))
    return [f"^{re.escape(block)}(?:{'|'.join(_short(below))})$" for block, below in by_block.items()]


def _short(names: list[str]) -> list[str]:
    """Alternatives for names below a block: those that share a stem are joined, and numbers that share their leaves."""
    leaves: dict[str, list[str]] = {}
    for name in names:
        stem, _, leaf = name.rpartition(".")
        leaves.setdefault(stem, []).append(re.escape(leaf))
    stems: dict[tuple[str, str], list[str]] = {}
    for stem, alternatives in leaves.items():
        parent, _, number = stem.rpartition(".")
        stems.setdefault((parent, "|".join(alternatives)), []).append(re.escape(number))
    return [
        (f"{re.escape(parent)}\\." if parent else "")
        + (f"(?:{'|'.join(numbers)})\\." if numbers != [""] else "")
        + f"(?:{joined})"
        for (parent, joined), numbers in stems.items()
    ]
