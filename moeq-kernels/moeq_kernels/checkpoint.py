"""What a checkpoint says of its packed weights: `quantization_config` of config.json, as moeq's FORMAT.md describes it.

Whoever reads a checkpoint reads it by this: transformers through moeq, and the plug-ins of other runtimes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeq_kernels.errors import ArtifactError
from moeq_kernels.widths import (
    CODEBOOKS,
    DROPPED,
    FLOAT_BITS,
    FLOAT_GROUPS,
    FULL,
    LAYOUT,
    LAYOUT_VERSION,
    STATE_BITS,
    TRELLIS_BITS,
    WIDTHS,
    Encoding,
    Width,
)

FORMAT_VERSION = 1
MIXED_VERSION = 2  # of checkpoints in which the matrices of some expert differ in width
DROPPED_VERSION = 3  # of checkpoints in which some expert is dropped
VERSIONS = (FORMAT_VERSION, MIXED_VERSION, DROPPED_VERSION)
OTHER_WIDTHS = (2, 3, 4, 8)  # of a packed module outside of the experts
DENSE = "dense"  # the part of a matrix of 16 bits
REMEDY = "export the checkpoint again"


def wrong_config(what: str, place: str) -> ArtifactError:
    """The error for a config.json that does not go with its model."""
    return ArtifactError(what, where=f"config.json, {place}", do=REMEDY)


@dataclass(frozen=True, kw_only=True)
class Others:
    """Packed modules outside of the experts. bits: {module: width}; tied: {embeddings: the head with its tensors}."""

    bits: Mapping[str, int]
    encoding: Encoding
    tied: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, block: Any) -> Others:
        """Of the block `others`; ArtifactError naming what is wrong with it."""
        known = {"bits": dict, "group_size": int, "symmetric": bool, "tied": dict}
        if not isinstance(block, dict):
            raise wrong_config(f"a mapping is wanted, not {type(block).__name__}", "others")
        for name in block:
            if name not in known:
                raise wrong_config(f"unknown key {name!r}", "others")
        for name, kind in known.items():
            if name not in block and name != "tied":
                raise wrong_config(f"{name} is missing", "others")
            if name in block and type(block[name]) is not kind:
                raise wrong_config(f"{name} is {type(block[name]).__name__}, not {kind.__name__}", "others")
        for name, bits in block["bits"].items():
            if type(bits) is not int or bits not in OTHER_WIDTHS:
                raise wrong_config(f"a width must be of {OTHER_WIDTHS}", f"others: {name}")
        tied = block.get("tied", {})
        if not all(isinstance(name, str) for name in tied.values()):
            raise wrong_config("tied names no modules", "others")
        _check_group_size(block["group_size"], "others")
        encoding = Encoding(group_size=block["group_size"], symmetric=block["symmetric"])
        return cls(bits=block["bits"], encoding=encoding, tied=tied)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A checkpoint's packed weights. experts: {path of an experts module: the width of every expert}."""

    experts: Mapping[str, Sequence[Width]]
    encoding: Encoding
    others: Others | None = None

    @classmethod
    def of(cls, block: Mapping[str, Any]) -> Stored:
        """Of the block `quantization_config`; ArtifactError for a later format, and for wrong widths or groups."""
        nested, symmetric = block.get("nested", False), block.get("symmetric", False)
        if type(nested) is not bool or type(symmetric) is not bool:
            raise wrong_config("nested and symmetric are true or false", "quantization_config")
        state_bits = block.get("state_bits", 0)
        if type(state_bits) is not int or state_bits not in (0, *STATE_BITS) or (state_bits and nested):
            raise wrong_config("no trellis code has so many states", "quantization_config.state_bits")
        codebook = block.get("codebook", "")
        if not isinstance(codebook, str) or codebook not in CODEBOOKS:
            raise wrong_config("no code has this codebook", "quantization_config.codebook")
        group_size, experts = block.get("group_size", 128), block.get("experts") or {}
        _check_group_size(group_size, "quantization_config")
        own = Encoding(
            group_size=group_size, symmetric=symmetric, nested=nested, state_bits=state_bits, codebook=codebook
        )
        check_version(block, own)
        if own.floats and own != Encoding.floating(codebook):
            what = f"{codebook} has groups of {FLOAT_GROUPS[codebook]}, no zero points and no states"
            raise wrong_config(what, "quantization_config")
        if own.codes == "iq" and own != Encoding.iq(codebook):
            raise wrong_config("i-quants have blocks of 256, no zero points and no states", "quantization_config")
        if own.codes == "exl3" and own != Encoding.exl3(codebook):
            raise wrong_config("EXL3's codes have 2^16 states, a scale a row and no zero points", "quantization_config")
        if state_bits and not codebook and own != Encoding.trellis(state_bits):
            raise wrong_config("trellis codes have a scale a row and no zero points", "quantization_config")
        if not isinstance(experts, dict) or not all(isinstance(each, list) for each in experts.values()):
            raise wrong_config("experts is not a list of widths of every layer", "quantization_config")
        every = (
            width
            for layer in experts.values()
            for widths in layer
            for width in (widths.values() if isinstance(widths, dict) else () if widths == DROPPED else [widths])
        )
        widths = (
            (*TRELLIS_BITS, FULL) if state_bits or own.codes == "iq" else (*FLOAT_BITS, FULL) if own.floats else WIDTHS
        )
        if any(type(width) is not int or width not in widths for width in every):
            raise wrong_config(f"widths of experts must be of {widths}", "quantization_config")
        return cls(
            experts=experts,
            encoding=own,
            others=Others.of(block["others"]) if block.get("others") else None,
        )


def check_version(block: Mapping[str, Any], encoding: Encoding) -> None:
    """ArtifactError unless this package reads the block's format."""
    version, layout = block.get("format_version", FORMAT_VERSION), block.get("layout", LAYOUT)
    wanted, layout_version = encoding.layout_version, block.get("layout_version", LAYOUT_VERSION)
    if version not in VERSIONS or (layout, layout_version) != (LAYOUT, wanted):
        raise ArtifactError(
            f"checkpoint format {version}, layout {layout} {layout_version}; "
            f"this moeq reads {VERSIONS[0]} to {VERSIONS[-1]}, {LAYOUT} {wanted}",
            where="config.json",
            do="install the moeq that wrote it, or export again",
        )


def _check_group_size(group_size: Any, place: str) -> None:
    if type(group_size) is not int or group_size == 0 or group_size < -1:
        raise wrong_config("group_size is no size of a group", place)
