"""Linears in GPTQ's layout and the names of modules that are not packed: what the formats auto-round and gptq share.

N output rows, K inputs, G groups of inputs, b bits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.targets import Grid
from moeq.errors import PlanError
from moeq.exporters.foreign import OTHERS_FILE, Draft, layer_file
from moeq.numerics.grids import SCALE_DTYPE
from moeq.numerics.layouts import column_words, zero_words
from moeq.numerics.packed import PackedWeight
from moeq.numerics.packing import unpack

PARTS = ("qweight", "qzeros", "scales", "g_idx")


class ZeroPoints(Exception):
    """A matrix has zero points of its own, which AutoGPTQ's first format cannot hold where they are 0."""


def in_one_of(write: Callable[[str], None], first: str, second: str) -> None:
    """Write in the first format or, where it cannot hold the zero points, in the second."""
    try:
        write(first)
    except ZeroPoints:
        write(second)


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
    found = {
        "qweight": column_words(weight.codes, weight.bits, weight.inputs),
        "qzeros": zeros,
        "scales": scales.mT,
    }
    if ordered:
        found["g_idx"] = _group_of(weight.inputs, weight.inputs if weight.group_size == -1 else weight.group_size)
    return found


@cache
def _middle_words(rows: int, groups: int, bits: int, less_one: bool) -> Tensor:
    """qzeros of a symmetric grid."""
    middle = torch.full((rows, 1), 2 ** (bits - 1), dtype=torch.uint8)
    return zero_words(middle, bits, less_one=less_one).repeat(groups, 1)


@cache
def _group_of(inputs: int, group_size: int) -> Tensor:
    return (torch.arange(inputs) // group_size).to(torch.int32)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """less_one: zero points are stored less one; ordered: every module has a g_idx; key_of: what the tensor called so
    in memory is called on disk."""

    less_one: bool
    ordered: bool
    key_of: Callable[[str], str]


def write_linears(draft: Draft, layout: Layout) -> None:
    """Convert and write all packed modules of a draft.

    Raises PlanError for what the target cannot load, ZeroPoints as `linear_tensors` does.
    """
    for layer in draft.source.layers:
        draft.expert_keys(layer)
        modules = draft.expert_modules(layer)
        with draft.file(layer_file(layer.index), _names(modules.values(), layout)) as add:
            for expert, projection, matrix in draft.matrices(layer):
                for key, tensor in _tensors(modules[expert, projection], matrix, layout).items():
                    add(key, tensor)
    others = draft.source.other_names()
    if others:
        with draft.file(OTHERS_FILE, _names(others, layout)) as add:
            for name, weight in draft.source.others():
                refuse_tables(draft, name)
                for key, tensor in _tensors(name, draft.loadable(name, weight), layout).items():
                    add(key, tensor)


def _names(modules: Iterable[str], layout: Layout) -> Iterator[str]:
    """Of all tensors that modules may have."""
    for module in modules:
        key = layout.key_of(f"{module}.weight")
        yield key
        yield from (f"{key.removesuffix('weight')}{part}" for part in PARTS)


def _tensors(module: str, matrix: PackedWeight | Tensor, layout: Layout) -> dict[str, Tensor]:
    key = layout.key_of(f"{module}.weight")
    if isinstance(matrix, Tensor):
        return {key: matrix}
    try:
        parts = linear_tensors(matrix, less_one=layout.less_one, ordered=layout.ordered)
    except ValueError as error:
        raise PlanError(str(error), where=module, do="use the formats moeq or dequantized") from None
    return {f"{key.removesuffix('weight')}{name}": tensor for name, tensor in parts.items()}


def refuse_tables(draft: Draft, name: str) -> None:
    """PlanError for packed embeddings and heads, which runtimes load in full precision only."""
    model: Any = draft.model
    module = model.get_submodule(name)
    heads = [model.get_output_embeddings()] if hasattr(model, "get_output_embeddings") else []
    if isinstance(module, nn.Embedding) or any(module is head for head in heads):
        raise PlanError(
            "packed embeddings and heads are not loaded",
            where=f"{name}, target {draft.target.name if draft.target else ''}",
            do="leave embeddings and head out of `others`, or use the formats moeq or dequantized",
        )


def common_grid(grids: Mapping[str, Grid]) -> Grid:
    """The grid that most packed modules have: what a configuration says of all."""
    counts = Counter((grid.bits, grid.group_size, grid.symmetric) for grid in grids.values())
    bits, group_size, symmetric = max(sorted(counts), key=lambda which: counts[which]) if counts else (4, 128, True)
    return Grid(rows=0, inputs=0, bits=bits, group_size=group_size, symmetric=symmetric)


def beside(draft: Draft, common: Grid) -> Iterator[tuple[int, int, list[str]]]:
    """Width, group size and patterns of the names of the modules that differ from the common grid."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, grid in draft.grids.items():
        found.setdefault((grid.bits, grid.group_size), []).append(name)
    for (bits, group_size), names in found.items():
        if (bits, group_size) != (common.bits, common.group_size):
            yield bits, group_size, patterns(names)


def blocks(draft: Draft) -> list[str]:
    """The lists of decoder layers that hold packed modules, such as model.layers."""
    names = [*draft.grids, *draft.plain]
    return sorted({match[1] for match in (re.match(r"(.+?)\.\d+\.", name) for name in names) if match})


def left_patterns(draft: Draft) -> list[str]:
    """Patterns of the names of all matrices below `blocks` that are not packed, one for every decoder layer."""
    below = tuple(f"{block}." for block in blocks(draft))
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
    return [f"^{re.escape(block)}(?:{'|'.join(_short(mine))})$" for block, mine in by_block.items()]


def _short(names: list[str]) -> list[str]:
    """Alternatives for names below a block: those that share a stem are joined, and numbers that share their leaves."""
    leaves: dict[str, list[str]] = {}
    for name in names:
        stem, _, leaf = name.rpartition(".")
        leaves.setdefault(stem, []).append(re.escape(leaf))
    stems: dict[tuple[str, str], list[str]] = {}
    for stem, found in leaves.items():
        parent, _, number = stem.rpartition(".")
        stems.setdefault((parent, "|".join(found)), []).append(re.escape(number))
    return [
        (f"{re.escape(parent)}\\." if parent else "")
        + (f"(?:{'|'.join(numbers)})\\." if numbers != [""] else "")
        + f"(?:{alternatives})"
        for (parent, alternatives), numbers in stems.items()
    ]
