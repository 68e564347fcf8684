"""The sizes of a Mixture-of-Experts model that its speed depends on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moeq.bounded import read_yaml
from moeq.errors import EstimateError, nearest
from moeq.estimator.attention import Attention, attention_of, usual
from moeq_kernels.iq_types import SETS, stored_bits
from moeq_kernels.widths import FLOAT_BITS, FLOAT_GROUPS, NESTED_BITS, Encoding

SCALE_BITS = 16
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts", "top_k")
HEADS = ("num_attention_heads", "num_heads", "n_head", "decoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
POSITIONS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_positions")
HIDDEN = ("hidden_size", "d_model", "n_embd")
CONFIG_KEYS = (*TOP_K, *HEADS, *KV_HEADS, *HIDDEN, *POSITIONS, "head_dim")
TOY_BYTES = 1 << 30
HUB = "hub"  # of a preset: models of the hub with these sizes
NESTED = "nested"  # in place of a codebook: grids of several widths with the zero points of the widest


def codebook_of(encoding: Encoding) -> str:
    """What tells codes from plain grids, as functions here take it."""
    return encoding.codebook or (NESTED if encoding.nested else "")


def effective_bits(
    bits: ArrayLike, group_size: int | None, zero_points: bool = False, codebook: str = ""
) -> NDArray[np.float64]:
    """Bits that are stored and read per weight: b' = b + 16/group (+ b/group with zero points, from 2 bits up).

    16 bits and more are stored as they are, of 0 nothing is; `group_size` None leaves the scales out. A fraction
    between 1 and 2 bits stands for matrices of both, of which only those of 2 bits have zero points. codebook: see
    `codebook_of`; codes whose scales are no FP16 ones take what their blocks do, widths between in straight lines.
    Shape: that of `bits`.
    """
    plain = np.asarray(bits, dtype=np.float64)
    if group_size is None:
        return plain
    if blocks := _blocks(codebook):
        return np.where((plain < 16) & (plain > 0), np.interp(plain, list(blocks), list(blocks.values())), plain)
    zeros = np.interp(plain, *_zero_bits(codebook)) / group_size if zero_points else 0.0
    return np.where((plain < 16) & (plain > 0), plain + SCALE_BITS / group_size + zeros, plain)


def _zero_bits(codebook: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Widths, rising, and the bits of a grid's zero point at each: as many, none at 1; between in straight lines."""
    widths = np.array([1.0, NESTED_BITS[0], NESTED_BITS[-1], 16.0])
    zeros = np.where(widths > 1, widths, 0.0)
    return widths, np.where(widths == NESTED_BITS[0], NESTED_BITS[-1], zeros) if codebook == NESTED else zeros


def _blocks(codebook: str) -> dict[float, float]:
    """{width: stored bits} of codes in blocks, rising; none for those of FP16 scales.

    Of floating-point numbers those of 4 bits have a scale of a byte for a group, of those of 8 bits FP16 ones of whole
    rows do not count.
    """
    if codebook in SETS:
        return {**{float(bits): stored_bits(bits, codebook) for bits in SETS[codebook]}, 16.0: 16.0}
    if codebook in FLOAT_GROUPS:
        narrow, wide = FLOAT_BITS
        scale = 8 / FLOAT_GROUPS[codebook]
        return {1.0: 1 + scale, float(narrow): narrow + scale, float(wide): float(wide), 16.0: 16.0}
    return {}


def equal_bits(widths: Sequence[int], group_size: int, zero_points: bool = False, codebook: str = "") -> float:
    """The width at which an expert is as large as with matrices of these widths, all of as many weights.

    A fraction, unless all are equal: `effective_bits` of it is the mean of theirs.
    """
    if len(set(widths)) == 1:
        return float(widths[0])
    stored = float(effective_bits(widths, group_size, zero_points, codebook).mean())
    if blocks := _blocks(codebook):
        return float(np.interp(stored, list(blocks.values()), list(blocks)))
    codes = stored - SCALE_BITS / group_size
    if not zero_points:
        return codes
    bits, zeros = _zero_bits(codebook)
    return float(np.interp(codes, bits + zeros / group_size, bits))


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """Sizes of a model: `num_layers` counts MoE layers, `intermediate_size` is that of one expert.

    `non_expert_parameters` (attention, routers, norms, embeddings, and shared or dense feed-forward parts) are spread
    evenly over the MoE layers. max_positions: tokens of the longest text that the model was made for, None: not known.
    attention: what all its layers keep of a text, dense ones too; None: grouped queries in every MoE layer.
    expert_hidden_size: of what an expert is given and answers, where that is none of the model's; None: hidden_size.
    encoder_layers: how many of the MoE layers, the first, are an encoder's: prompts go through them, decode steps
    through the others.
    visits: how many times a token goes through each of the MoE layers, None: once through all; visited_parameters: how
    many of the non_expert_parameters are read again for that, as often as they are.
    cache_bits: of a key's or value's element, 16 for FP16; states stay as they are. other_bits: stored for one of the
    non_expert_parameters, scales and zero points counted.
    Raises EstimateError for sizes that no model has.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    non_expert_parameters: int
    matrices_per_expert: int = 3
    max_positions: int | None = None
    attention: tuple[Attention, ...] | None = None
    expert_hidden_size: int | None = None
    encoder_layers: int = 0
    cache_bits: float = 16.0
    other_bits: float = 16.0
    visits: tuple[int, ...] | None = None
    visited_parameters: int = 0

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if (
                field not in ("name", "attention", "visits")
                and value is not None
                and value < (0 if field in ("non_expert_parameters", "encoder_layers", "visited_parameters") else 1)
            ):
                raise EstimateError(f"{field} is {value}", where=self.name, do="give a positive number")
        if self.top_k > self.num_experts:
            text = f"top_k is {self.top_k} of {self.num_experts} experts"
            raise EstimateError(text, where=self.name, do="give top_k <= num_experts")

    @property
    def expert_inputs(self) -> int:
        """Numbers that an expert is given of a token, and answers."""
        return self.expert_hidden_size or self.hidden_size

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert, P = matrices * hidden * intermediate."""
        return self.matrices_per_expert * self.expert_inputs * self.intermediate_size

    def sizes(self) -> dict[str, Any]:
        """All of it as a mapping; attention, what experts are given, an encoder's layers, visits and the bits of the
        cache and of all but the experts only where they are not the usual ones."""
        usual = {
            "attention": None, "expert_hidden_size": None, "encoder_layers": 0, "cache_bits": 16.0, "other_bits": 16.0,
            "visits": None, "visited_parameters": 0,
        }  # fmt: skip
        found = {name: value for name, value in asdict(self).items() if name not in usual or value != usual[name]}
        for kind in found.get("attention", ()):
            for name in [name for name in ("parts", "chunked", "selected", "beside", "shared") if not kind[name]]:
                del kind[name]
        return found

    def check_layers(self, experts: Sequence[int], *, where: str, do: str, what: str = "") -> None:
        """EstimateError unless a file's MoE layers, each with so many experts, are as this model's."""
        if len(experts) != self.num_layers:
            text = f"{what}{len(experts)} MoE layers, {self.name} has {self.num_layers}"
            raise EstimateError(text, where=where, do=do)
        if other := sorted(set(experts) - {self.num_experts}):
            text = f"{what}{other[0]} experts a layer, {self.name} has {self.num_experts}"
            raise EstimateError(text, where=where, do=do)

    @property
    def non_expert_bytes(self) -> float:
        """Bytes of all but the experts, as it is stored."""
        return self.other_bits / 8 * self.non_expert_parameters

    def with_others_packed(self, weights: int, stored_bytes: int, *, of: int) -> ModelGeometry:
        """With the non-expert parameters as a checkpoint stores its own: some weights, of so many, in some bytes, the
        others in FP16."""
        return replace(self, other_bits=16 + (8 * stored_bytes - 16 * weights) / of) if weights else self

    @property
    def kept(self) -> tuple[Attention, ...]:
        """What the layers keep of a text, by their kinds."""
        each = self.attention
        if each is None:
            each = usual(self.num_layers, self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        if self.cache_bits == 16:
            return each
        return tuple(replace(kind, token_bytes=kind.token_bytes * self.cache_bits / 16) for kind in each)

    @property
    def times(self) -> tuple[int, ...]:
        """How many times a token goes through each of the MoE layers."""
        return self.visits or (1,) * self.num_layers

    def in_turn(self, first: int = 0) -> list[int]:
        """The MoE layers from one on in the order in which a token goes through them: those of a loop, then again."""
        order: list[int] = []
        for count, run in groupby(range(first, self.num_layers), lambda layer: self.times[layer]):
            order += [*run] * count
        return order

    @property
    def all_layers(self) -> int:
        """MoE layers and dense ones, as far as the kinds of attention tell, as often as a token goes through them."""
        return max(self.num_layers, sum(kind.layers for kind in self.kept if not kind.beside))

    def across(self, gpus: int) -> ModelGeometry:
        """With keys, values and states as often as so many GPUs hold them together, which share out their heads."""
        if gpus == 1:
            return self

        def held(kind: Attention) -> Attention:
            times = max(1.0, gpus / (kind.parts or self.num_key_value_heads))
            return replace(kind, token_bytes=kind.token_bytes * times, state_bytes=kind.state_bytes * times)

        kinds = replace(self, cache_bits=16.0).kept
        return replace(self, attention=tuple(map(held, kinds)))

    def kv_bytes(self, context: ArrayLike, sequences: int = 1) -> NDArray[np.float64]:
        """Bytes of keys, values and states of sequences of `context` tokens each, all layers. Shape: `context`'s."""
        own = (kind for kind in self.kept if not kind.shared)
        each = (kind.layers * (kind.token_bytes * kind.tokens(context) + kind.state_bytes) for kind in own)
        return np.asarray(sequences * sum(each), dtype=np.float64)

    def kv_bytes_per_layer(self, context: ArrayLike, *, prompt: bool = False) -> NDArray[np.float64]:
        """Bytes of keys, values and states that a token after `context` others reads, a share for each MoE layer.

        prompt: that one of the `context` tokens of a prompt reads, on average.
        """
        each = (
            kind.layers * (kind.token_bytes * seen + kind.state_bytes) for kind, seen in self._seen(context, prompt)
        )
        return np.asarray(sum(each) / self.num_layers, dtype=np.float64)

    def attention_macs(self, context: ArrayLike, *, prompt: bool = False) -> NDArray[np.float64]:
        """Multiply-adds of a token with the `context` tokens before it, a share for each MoE layer.

        prompt: of one of the `context` tokens of a prompt with those before it, on average.
        """
        each = (kind.layers * kind.token_macs * seen for kind, seen in self._seen(context, prompt))
        return np.asarray(sum(each) / self.num_layers, dtype=np.float64)

    def _seen(self, context: ArrayLike, prompt: bool) -> Iterator[tuple[Attention, NDArray[np.float64]]]:
        """Every kind of layers with the tokens that one attends to there."""
        for kind in self.kept:
            yield kind, kind.tokens_before(context) if prompt else kind.tokens_seen(context)

    def longest_context(self, room_bytes: float, sequences: int) -> int:
        """The most tokens of each of some sequences whose keys and values fit; at most 2^30."""
        few, many = 0, 1 << 30
        while few < many:
            middle = (few + many + 1) // 2
            if self.kv_bytes(middle, sequences) <= room_bytes:
                few = middle
            else:
                many = middle - 1
        return few

    def expert_bytes(self, bits: float, group_size: int | None, zero_points: bool = False, codebook: str = "") -> float:
        """Bytes of one expert at `bits`, scales (and zero points) included: P * b'/8."""
        return self.expert_parameters * float(effective_bits(bits, group_size, zero_points, codebook)) / 8


def is_toy(sizes: Mapping[str, Any]) -> bool:
    """Whether a geometry's experts are so few bytes in FP16 that times are of starting work, not of doing it."""
    matrix = (sizes.get("expert_hidden_size") or sizes["hidden_size"]) * sizes["intermediate_size"]
    experts = sizes["num_layers"] * sizes["num_experts"] * sizes.get("matrices_per_expert", 3)
    return bool(2 * experts * matrix < TOY_BYTES)


@cache
def _written() -> dict[str, dict[str, Any]]:
    """The file of presets, as it is written."""
    return dict(read_yaml(Path(__file__).with_name("geometries.yaml")).value)


@cache
def _presets() -> dict[str, ModelGeometry]:
    return {name: _geometry(name, sizes) for name, sizes in _written().items()}


@cache
def _hub_ids() -> dict[str, str]:
    """{id of a model on the hub, in small letters: the preset that has its sizes}"""
    return {hub.lower(): name for name, sizes in _written().items() for hub in sizes.get(HUB, ())}


def preset_of(name: str) -> str | None:
    """The preset geometry that a name, or the id of a model on the hub, stands for; None where there is none."""
    return name if name in _presets() else _hub_ids().get(name.lower())


def _geometry(name: str, sizes: Mapping[str, Any]) -> ModelGeometry:
    """Sizes as they are written in a file."""
    kinds = sizes.get("attention")
    kept = None if kinds is None else tuple(Attention(**kind) for kind in kinds)
    others = {key: value for key, value in sizes.items() if key != HUB}
    return ModelGeometry(name=name, **{**others, "attention": kept})


def known_geometries() -> list[str]:
    """Names of the preset geometries, sorted."""
    return sorted(_presets())


def load_geometry(name: str) -> ModelGeometry:
    """A preset geometry by name; raises EstimateError with the nearest known name."""
    if name in _presets():
        return _presets()[name]
    close = nearest(name, _presets())
    hint = f"did you mean {close!r}? known: " if close else "known: "
    raise EstimateError(f"unknown geometry {name!r}", do=f"{hint}{', '.join(known_geometries())}")


def geometry_from_config(
    config: Mapping[str, Any],
    *,
    num_moe_layers: int,
    num_experts: int,
    expert_intermediate_size: int,
    non_expert_parameters: int,
    matrices_per_expert: int = 3,
    expert_hidden_size: int | None = None,
    layer_names: Sequence[str] = (),
    visits: Sequence[int] = (),
    visited_parameters: int = 0,
) -> ModelGeometry:
    """The geometry of a Hugging Face config.json (or its nested text_config) and of what only the weights tell.

    Keys and values are those of all its layers, by their kinds (`attention`), where it says how many there are. Raises
    EstimateError for a missing key. layer_names: of the MoE layers, which tell an encoder's; visits and
    visited_parameters: of a looped model, as ModelGeometry has them.
    """
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, Mapping) else config
    name = str(config.get("_name_or_path") or config.get("model_type") or "model")
    hidden_size = _integer(text, HIDDEN, name)
    heads = _integer(text, HEADS, name)
    kv_heads = _integer(text, KV_HEADS, name, default=heads)
    head_dim = _integer(text, ("head_dim",), name, default=max(hidden_size // heads, 1))
    found = attention_of(text, heads, kv_heads, head_dim)
    return ModelGeometry(
        name=name,
        num_layers=num_moe_layers,
        hidden_size=hidden_size,
        intermediate_size=expert_intermediate_size,
        num_experts=num_experts,
        top_k=_integer(text, TOP_K, name),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        non_expert_parameters=non_expert_parameters,
        matrices_per_expert=matrices_per_expert,
        max_positions=_integer(text, POSITIONS, name, default=0) or None,
        attention=None if found == usual(num_moe_layers, heads, kv_heads, head_dim) else found,
        expert_hidden_size=None if expert_hidden_size == hidden_size else expert_hidden_size,
        encoder_layers=_of_encoder(layer_names) if text.get("is_encoder_decoder") else 0,
        visits=tuple(visits) if max(visits, default=1) > 1 else None,
        visited_parameters=visited_parameters,
    )


def _of_encoder(names: Sequence[str]) -> int:
    """How many of the MoE layers, in their order, are an encoder's before those of a decoder; 0 where none follow."""
    count = next((index for index, name in enumerate(names) if "encoder" not in name.split(".")), 0)
    return count if all("decoder" in name.split(".") for name in names[count:]) else 0


def _integer(config: Mapping[str, Any], keys: tuple[str, ...], name: str, default: int | None = None) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    if default is not None:
        return default
    text = f"config.json has none of {', '.join(keys)}"
    raise EstimateError(text, where=name, do="add the key or build a ModelGeometry yourself")
