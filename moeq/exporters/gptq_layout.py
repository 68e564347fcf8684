"""Linears in GPTQ's layout and the names of modules that are not packed: what the formats auto-round and gptq share.

What is declared for all modules is the narrowest width and the largest group of any, the rest by rules: a runtime that
asks for no rule then makes room for less than a tensor holds and says so. vLLM copies a smaller tensor into a part of
its buffer and computes garbage. Rules name modules as they are in memory and on disk, and those that runtimes fuse,
where all parts of one have the same grid.

N output rows, K inputs, G groups of inputs, b bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moeq.artifacts.targets import ANY_GRID
from moeq.errors import FormatError
from moeq.exporters.foreign import OTHERS_FILE, Draft, Tensors
from moeq.exporters.schemes import Scheme, common_width, refuse_others
from moeq.models.disk_names import DiskNames
from moeq.models.experts import ExpertLayer
from moeq.numerics.layouts import column_words, zero_words
from moeq_kernels.grids import SCALE_DTYPE
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import unpack

PARTS = ("qweight", "qzeros", "scales", "g_idx")
RENAMED = "block_sparse_moe."  # of Mixtral's kin, on disk; in memory transformers calls it mlp
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # by vLLM and SGLang
Naming = Literal["memory", "renamed", "family"]


class ZeroPoints(Exception):
    """A matrix has zero points of its own, which AutoGPTQ's first format cannot hold where they are 0."""


@dataclass(frozen=True, kw_only=True)
class Modules:
    """What a configuration says of the modules. first: whether it is AutoGPTQ's first format, of symmetric grids alone;
    bits, group_size: the narrowest width and the largest group; others: every other grid with patterns of the names
    that have it; plain: patterns of the names of what is not packed; blocks: the lists of decoder layers that hold
    packed modules, such as model.layers."""

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
    naming: Naming = "renamed",
) -> None:
    """Write a checkpoint in the first format or, where it cannot hold the zero points, in the second.

    configuration: its quantization_config; ordered: every module has a g_idx; naming: whether tensors are called as in
    memory, as in memory below the family's names of modules, or as the family has them. FormatError for what the
    target cannot load.
    """
    refuse_others(draft)
    first = True
    try:
        _write_linears(draft, partial(_tensors, first, ordered), naming)
    except ZeroPoints:
        first = False
        draft.restart()
        _write_linears(draft, partial(_tensors, first, ordered), naming)
    renamed = {key: draft.names.in_memory(key) for key in draft.source.rest()} if naming == "memory" else None
    draft.finish(configuration(modules_of(draft, first, naming)), renamed)


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


def _expert_keys(draft: Draft, layer: ExpertLayer, naming: Naming) -> dict[tuple[int, str], str]:
    """{(expert, projection): key of its weight}; FormatError where the family keeps them in other tensors."""
    keys = draft.expert_keys(layer)
    if naming == "family":
        return keys
    return {(expert, name): _key(draft, f"{layer.name}.{expert}.{name}.weight", naming) for expert, name in keys}


def _key(draft: Draft, name: str, naming: Naming) -> str:
    """What a tensor outside of the experts is called on disk."""
    return name if naming == "memory" else draft.names.renamed(name)


def _write_linears(draft: Draft, tensors: Tensors, naming: Naming) -> None:
    """Convert and write all packed modules of a draft.

    Raises FormatError for what the target cannot load, ZeroPoints as `linear_tensors` does.
    """
    parts, shared = ("weight", *PARTS), draft.target.granularity == "layer"
    for layer in draft.source.layers:
        bits = common_width(draft, [layer]) if shared and draft.options.widen else None
        write = partial(_alike, Scheme(draft), tensors) if shared else tensors
        draft.write_experts(layer, _expert_keys(draft, layer, naming), parts, write, bits)
    others = draft.source.other_names()
    if others:
        stems = {name: _key(draft, f"{name}.weight", naming).removesuffix("weight") for name in others}
        with draft.file(OTHERS_FILE, (f"{stem}{part}" for stem in stems.values() for part in parts)) as add:
            for name, weight in draft.source.others():
                for part, tensor in tensors(name, draft.other(name, weight)).items():
                    add(f"{stems[name]}{part}", tensor)


def _alike(scheme: Scheme, tensors: Tensors, name: str, matrix: PackedWeight | Tensor) -> Mapping[str, Tensor]:
    """The parts of a matrix of a layer whose experts share a grid."""
    scheme.check(name, matrix)
    return tensors(name, matrix)


def _tensors(less_one: bool, ordered: bool, name: str, matrix: PackedWeight | Tensor) -> dict[str, Tensor]:
    if isinstance(matrix, Tensor):
        return {"weight": matrix}
    try:
        return linear_tensors(matrix, less_one=less_one, ordered=ordered)
    except ValueError as error:
        raise FormatError(str(error), where=name, do=ANY_GRID) from None


def refuse_table(names: DiskNames, name: str, shape: tuple[int, int]) -> tuple[str, str] | None:
    """Why packed embeddings and heads cannot be written: runtimes load them in full precision only."""
    module = names.model.get_submodule(name)
    heads = [names.model.get_output_embeddings()] if hasattr(names.model, "get_output_embeddings") else []
    if not isinstance(module, nn.Embedding) and not any(module is head for head in heads):
        return None
    do = f"leave embeddings and head out of `others`, or {ANY_GRID}"
    return "packed embeddings and heads are not loaded", do


def modules_of(draft: Draft, first: bool, naming: Naming) -> Modules:
    """What a configuration says of the modules of a draft, all of whose packed ones are written."""
    sized: dict[tuple[int, int], list[str]] = {}
    for name, grid in draft.grids.items():
        sized.setdefault((grid.bits, grid.group_size), []).append(name)
    common = _common(sized)
    numbered = (re.match(r"(.+?)\.\d+\.", name) for name in [*draft.grids, *draft.plain])
    blocks = sorted({match[1] for match in numbered if match})
    named = partial(_named, draft, naming)
    return Modules(
        first=first,
        bits=common[0],
        group_size=common[1],
        others=[(*which, patterns(named(names))) for which, names in sized.items() if which != common],
        plain=patterns(named([*_plain_names(draft, blocks), *draft.plain])),
        blocks=blocks,
    )


def _common(grids: Collection[tuple[int, int]]) -> tuple[int, int]:
    """The narrowest width and the largest group of (bits, group size), -1 being a whole row."""
    if not grids:
        return 4, 128
    sizes = {size for _, size in grids}
    return min(bits for bits, _ in grids), -1 if -1 in sizes else max(sizes)


def _plain_names(draft: Draft, blocks: list[str]) -> list[str]:
    """Names of all matrices below `blocks` that are not packed, but for experts."""
    below = tuple(f"{block}." for block in blocks)
    experts = tuple(f"{layer.name}." for layer in draft.source.layers)
    names = [
        name.removesuffix(".weight")
        for name, parameter in draft.model.named_parameters()
        if name.startswith(below) and name.endswith(".weight") and parameter.dim() == 2
    ]
    return [name for name in names if not name.startswith(experts) and name not in draft.grids]


def _named(draft: Draft, naming: Naming, names: list[str]) -> list[str]:
    """All names that runtimes ask by of modules that share a grid: in memory, as written, and fused."""
    among, found = set(names), list(names)
    for layer in draft.source.layers:
        keys = {f"{layer.name}.{place[0]}.{place[1]}": key for place, key in _expert_keys(draft, layer, naming).items()}
        found += [keys[name].removesuffix(".weight") for name in names if name in keys]
        if among.issuperset(keys):
            found.append(layer.name)
    experts = tuple(f"{layer.name}." for layer in draft.source.layers)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in names if not name.startswith(experts)):
        whole = [one for one, parts in FUSED.items() if among.issuperset(f"{parent}.{part}" for part in parts)]
        found += [f"{parent}.{one}" for one in whole]
    found += [_key(draft, f"{name}.weight", naming).removesuffix(".weight") for name in found]
    return list(dict.fromkeys(found))


def patterns(names: Iterable[str]) -> list[str]:
    """Patterns that match exactly these names of modules, one for every numbered block that they lie in.

    An expert all of whose matrices are named is named by its number. A name on disk that transformers changes stands in
    its pattern as it is: auto-round changes it there, too, by replacing ".block_sparse_moe.", dots being any character.
    """
    by_block: dict[tuple[str, str], list[str]] = {}
    for name in names:
        match = re.match(r".+?\.\d+\.", name)
        block = match[0] if match else ""
        renamed = f"{block}{RENAMED}" if name.startswith(f"{block}{RENAMED}") else ""
        by_block.setdefault((block, renamed), []).append(name.removeprefix(renamed or block))
    return [
        f"^{renamed or re.escape(block)}(?:{'|'.join(_short(below))})$" for (block, renamed), below in by_block.items()
    ]


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
