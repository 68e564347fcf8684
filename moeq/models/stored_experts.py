"""The routed experts of a checkpoint by the names and shapes of its tensors alone: no model is made of it.

Families store experts one by one (`experts.3.down_proj.weight`), in stacks [E, ...] (`experts.down_proj`,
`block_sparse_moe.output_linear.weight`), or one below the other (`experts.mlp.w2` [E*I, H], dbrx). What a family's own
rules say is asked where a model is made (`experts.find_expert_layers`); both agree on every family of the record.

Letters: E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeq.errors import ModelError

Shape = tuple[int, ...]
LEFT_ALONE = ("vision", "visual", "audio")  # experts below modules called so see no token of a text
DRAFTS = ("mtp",)  # and below these are of layers that draft later tokens, which transformers leaves out
STACKS = {"input_linear", "output_linear", "gate_proj", "up_proj", "down_proj"}  # in a block without a module `experts`
DOWN = {"down_proj", "w2", "wo", "fc2", "output_linear", "mlp.w2", "w2_weight"}
NUMBERED = re.compile(r"(?:expert_)?(\d+)")
LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|block|h)\.(\d+)\.")
SCALES = re.compile(r"scale|bias|zero|g_idx")  # what lies beside a matrix
BLOCK = 32  # weights of a block of MXFP4, in 16 bytes
COUNTS = (
    "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts",
)  # fmt: skip
WIDTHS = ("hidden_size", "d_model", "n_embd"), ("moe_latent_size", "moe_hidden_size")  # a model's; its experts'
LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
EMBEDDINGS, VOCABULARY = "embed_tokens.weight", ("vocab_size",)
INNER, DENSE_TOO = ("moe_intermediate_size",), ("intermediate_size",)  # within experts; or within dense layers
OF_EXPERTS = {  # families that know no other: intermediate_size is of their experts
    "aria_text", "flex_olmo", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "hunyuan_v1_moe", "jamba", "jetmoe", "llama4_text", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral",
    "olmoe", "openai_privacy_filter", "phimoe",
}  # fmt: skip
DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")  # of encoder-decoders
REMEDY = "check that the directory is a complete transformers checkpoint"


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """The experts of one MoE layer: the module that holds them, as its tensors are called; its sizes; all its keys.

    matrices: of one expert, 3 with a gate, 2 without.
    """

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    matrices: int
    keys: tuple[str, ...]


@dataclass(kw_only=True)
class _Found:
    """Tensors of one module's experts. one_by_one: {expert: {matrix: shape}}; stacks: {matrix: shape}."""

    keys: list[str] = field(default_factory=list)
    one_by_one: dict[int, dict[str, Shape]] = field(default_factory=dict)
    stacks: dict[str, Shape] = field(default_factory=dict)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that is of the language model; the whole where it has no such part."""
    parts = (config.get(name) for name in ("text_config", "language_config", "llm_config"))
    return next((part for part in parts if isinstance(part, dict)), config)


def stated(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """A number that a configuration states under one of some keys, for its language model or the whole."""
    for part in (text_config(config), config):
        for key in keys:
            value = part.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def expert_counts(config: Mapping[str, Any]) -> list[int]:
    """How many experts a layer has, as a configuration states it under any of the names that families use."""
    text = text_config(config)
    parts = [text, *(part for part in text.values() if isinstance(part, dict))]
    return [part[key] for part in parts for key in COUNTS if isinstance(part.get(key), int)]


def stored_layers(shapes: Mapping[str, Shape], config: Mapping[str, Any], where: str) -> list[StoredLayer]:
    """The MoE layers among tensors {key: shape}, in their order; packed ones as MODULE.weight [rows, inputs].

    Layers beyond those of the configuration (drafts of later tokens) are not among them. Raises ModelError where an
    expert is missing or is not as the others.
    """
    found: dict[str, _Found] = {}
    for key, shape in without_drafts(shapes, config).items():
        place = _place(key, shape)
        if place is None:
            continue
        module, matrix = place
        number = NUMBERED.fullmatch(matrix.split(".")[0])
        if number is None and len(shape) < 2:
            continue  # a norm after all experts, a router's correction
        one = found.setdefault(module, _Found())
        one.keys.append(key)
        if number is not None:
            one.one_by_one.setdefault(int(number[1]), {})[_plain(matrix.partition(".")[2])] = shape
        else:
            one.stacks[_plain(matrix)] = shape
    counts, widths = expert_counts(config), [stated(config, keys) for keys in WIDTHS]
    layers = [_layer(module, found[module], counts, where) for module in sorted(found, key=_order)]
    for layer in layers:
        if any(widths) and layer.hidden_size not in widths:
            what = f"{layer.name} holds experts of {layer.hidden_size} inputs, the configuration wants {widths[0]}"
            raise ModelError(what, where=where, do=REMEDY)
    return layers


def checked_layers(shapes: Mapping[str, Shape], config: Mapping[str, Any], where: str) -> list[StoredLayer]:
    """As `stored_layers`; ModelError also where a configuration states another vocabulary, another size within experts
    or more layers than there are: sizes that names and shapes tell of every family."""
    layers = stored_layers(shapes, config, where)
    words, inner = stated(config, VOCABULARY), stated(config, INNER)
    if inner is None and text_config(config).get("model_type") in OF_EXPERTS:
        inner = stated(config, DENSE_TOO)
    counts = [count for key in LAYERS if (count := stated(config, (key,))) is not None]
    numbers = [int(number[1]) for key in shapes if (number := LAYER.search(key)) is not None and not _left_alone(key)]
    wrong = [
        f"{key} is {list(shape)}, the configuration wants {words} rows"
        for key, shape in shapes.items()
        if words is not None and key.endswith(EMBEDDINGS) and not _left_alone(key) and shape[0] != words
    ]
    wrong += [
        f"{layer.name} holds experts of {layer.intermediate_size} inner rows, the configuration wants {inner}"
        for layer in layers
        if inner not in (None, layer.intermediate_size)
    ]
    if counts and numbers and max(numbers) + 1 < min(counts):
        wrong.append(f"the layers end with {max(numbers)}, the configuration wants {min(counts)} of them")
    if wrong:
        raise ModelError(wrong[0], where=where, do=REMEDY)
    return layers


def _left_alone(key: str) -> bool:
    return any(part.startswith(LEFT_ALONE) for part in key.split("."))


def without_drafts(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, Shape]:
    """Tensors without those of layers beyond the configuration's, which transformers leaves out."""
    counts = [count for keys in (LAYERS, DECODER_LAYERS) if (count := stated(config, keys)) is not None]
    most = max(counts, default=None)
    return {key: shape for key, shape in shapes.items() if not _is_draft(key, most)}


def _is_draft(key: str, layers: int | None) -> bool:
    if _left_alone(key):
        return False
    number = LAYER.search(key)
    beyond = layers is not None and number is not None and int(number[1]) >= layers
    return beyond or is_named_draft(key)


def is_named_draft(key: str) -> bool:
    """Whether a tensor lies below a module that is named as one that drafts later tokens."""
    return any(part.startswith(DRAFTS) for part in key.split(".")) and not _left_alone(key)


def _place(key: str, shape: Shape) -> tuple[str, str] | None:
    """The experts' module and what the tensor is called below it; None for a tensor that is of no routed expert."""
    parts = key.split(".")
    if _left_alone(key):
        return None
    if "experts" in parts:
        end = parts.index("experts") + 1
        below = ".".join(parts[end:])
        attention = any("attention" in part or "attn" in part for part in parts[:end])  # jetmoe's are left alone
        return None if attention or not below else (".".join(parts[:end]), below)
    if len(shape) == 3 and len(parts) > 2 and parts[-1] == "weight" and parts[-2] in STACKS:
        return ".".join(parts[:-2]), ".".join(parts[-2:])
    return None


def _plain(matrix: str) -> str:
    return matrix.removesuffix(".weight")


def _order(name: str) -> list[tuple[int, str]]:
    """The order of layers: numbers in a name by their size."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _layer(name: str, found: _Found, counts: Sequence[int], where: str) -> StoredLayer:
    if found.one_by_one:
        experts, hidden, inner = _numbered(name, found.one_by_one, where)
        matrices = sum(1 for _ in _weights(found.one_by_one[0]))
    else:
        experts, hidden, inner = _stacked(name, found.stacks, counts, where)
        weights = sum(math.prod(_unblocked(shape)) for _, shape in _weights(found.stacks))
        matrices = weights // (experts * hidden * inner)
    if counts and experts not in counts:
        what = f"{name} holds {experts} experts, the configuration wants {' or '.join(map(str, sorted(set(counts))))}"
        raise ModelError(what, where=where, do=REMEDY)
    return StoredLayer(
        name=name,
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=inner,
        matrices=matrices,
        keys=tuple(sorted(found.keys)),
    )


def _numbered(name: str, experts: Mapping[int, Mapping[str, Shape]], where: str) -> tuple[int, int, int]:
    """E, H, I of experts that are stored one by one."""
    whole = {number: each for number, each in experts.items() if DOWN & set(each)}  # those that hand on have none
    count = max(whole, default=-1) + 1
    missing = next((number for number in range(count or 1) if number not in whole), None)
    if missing is not None:
        raise ModelError(f"{name}: expert {missing} is missing, or a part of it", where=where, do=REMEDY)
    usual = whole[0]
    for number, matrices in whole.items():
        for matrix in {*usual, *matrices}:
            if _is_weight(matrix) and usual.get(matrix) != matrices.get(matrix):
                here = matrices.get(matrix)
                what = f"{name}.{number}.{matrix} is {'missing' if here is None else list(here)}, the first expert's is"
                raise ModelError(f"{what} {list(usual.get(matrix, ()))}", where=where, do=REMEDY)
    down = _down(name, usual, where)
    return count, down[0], down[1]


def _stacked(name: str, stacks: Mapping[str, Shape], counts: Sequence[int], where: str) -> tuple[int, int, int]:
    """E, H, I of experts in stacks, whichever way their matrices lie."""
    down = _down(name, stacks, where)
    first = next((shape for matrix, shape in _weights(stacks) if matrix.removesuffix("_blocks") not in DOWN), down)
    if len(down) == 2:  # one below the other
        experts = next((count for count in counts if count and down[0] % count == 0), 0)
        if not experts:
            raise ModelError(f"{name}: the configuration does not say how many experts it has", where=where, do=REMEDY)
        return experts, down[1], down[0] // experts
    down, first = _unblocked(down), _unblocked(first)
    if sorted(down[1:]) != sorted(first[1:]):  # the first holds two matrices, one way or the other
        for hidden, inner in (down[1:3], down[2:0:-1]):
            if sorted(first[1:]) == sorted((hidden, 2 * inner)):
                return down[0], hidden, inner
        raise ModelError(f"{name}: stacks of {list(first)} and {list(down)}", where=where, do=REMEDY)
    return down[0], down[1], down[2]


def _down(name: str, matrices: Mapping[str, Shape], where: str) -> Shape:
    """The shape of the last matrix of an expert, or of a stack of them."""
    for matrix, shape in _weights(matrices):
        if matrix.removesuffix("_blocks") in DOWN and len(shape) > 1:
            return shape
    raise ModelError(f"{name}: no matrix that ends an expert", where=where, do=REMEDY)


def _weights(matrices: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    return ((matrix, shape) for matrix, shape in matrices.items() if _is_weight(matrix))


def _is_weight(matrix: str) -> bool:
    return SCALES.search(matrix) is None


def _unblocked(shape: Shape) -> Shape:
    """A stack of MXFP4 blocks [E, rows, blocks, 16] as the matrices that it stands for."""
    return (shape[0], shape[1], shape[2] * BLOCK) if len(shape) == 4 else shape
