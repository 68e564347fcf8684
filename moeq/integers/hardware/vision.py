"""Sizes of a vision transformer, as the two kernels see it: linears, attention and norms of one image.

Letters: N positions, D hidden size, h heads, I intermediate size, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moeq.bounded import shown
from moeq.errors import ModelError, nearest

CLASSES = 1000
MOST = 1 << 20  # of any size
PREFIX = {"vit": 1, "deit": 2, "moe_vit": 1}  # tokens before the patches, by model_type


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """num_experts of `inner` intermediate channels in `blocks` of the blocks, top_k of them for a position."""

    num_experts: int
    top_k: int
    inner: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class VisionSizes:
    """A vision transformer; positions: patches and `prefix` tokens before them; patch_inputs: values of a patch."""

    name: str
    hidden: int
    blocks: int
    heads: int
    intermediate: int
    positions: int
    patch_inputs: int
    prefix: int = 1
    classes: int = CLASSES
    mixture: Mixture | None = None

    @property
    def head(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads

    @property
    def macs(self) -> int:
        """Multiply-accumulates of an image: linears, scores, and values by weights; without the routers."""
        n, d = self.positions, self.hidden
        attention = self.blocks * (4 * n * d * d + 2 * n * n * d)
        dense = self.blocks - (0 if self.mixture is None else self.mixture.blocks)
        update = dense * 2 * n * d * self.intermediate
        if self.mixture is not None:
            update += self.mixture.blocks * 2 * n * d * self.mixture.inner * self.mixture.top_k
        return attention + update + (n - self.prefix) * self.patch_inputs * d + d * self.classes


def _vit(name: str, hidden: int, heads: int, mixture: Mixture | None = None) -> VisionSizes:
    return VisionSizes(
        name=name,
        hidden=hidden,
        blocks=12,
        heads=heads,
        intermediate=4 * hidden,
        positions=197,
        patch_inputs=768,
        mixture=mixture,
    )


def _m3vit(hidden: int) -> Mixture:
    """16 experts, 4 at a time, in every other block; 4 together are the MLP. Paper 004 does not state its experts."""
    return Mixture(num_experts=16, top_k=4, inner=hidden, blocks=6)


KNOWN = {
    sizes.name: sizes
    for sizes in (
        _vit("vit-tiny", 192, 3),
        _vit("vit-small", 384, 6),
        _vit("vit-base", 768, 12),
        _vit("m3vit-tiny", 192, 3, _m3vit(192)),
        _vit("m3vit-small", 384, 6, _m3vit(384)),
    )
}  # ViT/16 as published, at 224 x 224


def known(name: str) -> VisionSizes:
    """The sizes of a name; ModelError with the nearest."""
    if name not in KNOWN:
        close = nearest(name, KNOWN)
        do = f"did you mean {close!r}?" if close else f"known: {', '.join(KNOWN)}, or a vision model's config.json"
        raise ModelError(f"no vision transformer {name!r}", where="--model", do=do)
    return KNOWN[name]


def _number(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if isinstance(value, (list, tuple)) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    if type(value) is not int or not 1 <= value <= MOST:
        raise ModelError(f"{key} is {shown(value)}, a whole number from 1 is wanted", where=where)
    return value


def from_config(config: Mapping[str, Any], name: str) -> VisionSizes:
    """The sizes that a config.json states; ModelError where it is of no ViT, DeiT or moe_vit, or lacks one."""
    kind = config.get("model_type")
    if kind not in PREFIX:
        raise ModelError(
            f"model_type is {shown(kind)}, no vision transformer with an integer forward",
            where=name,
            do=f"known are {', '.join(PREFIX)}",
        )
    hidden, heads, patch = (_number(config, key, name) for key in ("hidden_size", "num_attention_heads", "patch_size"))
    blocks, side = _number(config, "num_hidden_layers", name), _number(config, "image_size", name)
    if hidden % heads or side % patch:
        raise ModelError("sizes of heads or patches do not divide", where=name, do="check config.json")
    sparse = config.get("moe_layers") or [] if kind == "moe_vit" else []
    mixture = None
    if sparse:
        if not isinstance(sparse, list) or len(sparse) > blocks:
            raise ModelError(f"moe_layers is {shown(sparse)}", where=name, do="check config.json")
        experts, top_k, inner = (
            _number(config, key, name) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        )
        if top_k > experts:
            raise ModelError(f"{top_k} experts of {experts} for a position", where=name, do="check config.json")
        mixture = Mixture(num_experts=experts, top_k=top_k, inner=inner, blocks=len(sparse))
    return VisionSizes(
        name=name,
        hidden=hidden,
        blocks=blocks,
        heads=heads,
        intermediate=_number(config, "intermediate_size", name),
        positions=(side // patch) ** 2 + PREFIX[kind],
        patch_inputs=_number(config, "num_channels", name) * patch**2,
        prefix=PREFIX[kind],
        classes=_classes(config, name),
        mixture=mixture,
    )


def _classes(config: Mapping[str, Any], where: str) -> int:
    """Outputs of the head: of the first, where there is one a task; 2 where the config.json says nothing."""
    labels, number = config.get("id2label"), config.get("num_labels")
    if isinstance(labels, dict) and labels:
        return len(labels)
    first = number[0] if isinstance(number, list) and number else number
    return 2 if first is None else _number({"num_labels": first}, "num_labels", where)
