"""compressed-tensors: formats pack-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized and float-quantized.

weight_packed int32 [N, ceil(K*b/32)], a row's codes (the signed value plus 2**(b-1)) as one bit stream; weight_scale
[N, G]; weight_zero_point int32 [ceil(N*b/32), G] packed alike along the rows, absent where the grid is symmetric;
weight_shape int64 [2]; weight_g_idx int32 [K] where activations were ordered.

Floating-point codes: weight_packed uint8 [N, K/2], the first of two in the lower half; weight_scale of NVFP4 e4m3 [N,
K/16] with weight_global_scale float32 [1], by which it is divided, of MXFP4 uint8 [N, K/32]. float-quantized: weight
e4m3 [N, K], weight_scale [N, 1]. What PackedWeight does not hold to the bit is read as values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moeq.artifacts.tensor_files import stored_chunks
from moeq.bounded import shown
from moeq.exporters.readers.layout import (
    FLOATS,
    Grid,
    Parts,
    Pattern,
    Stored,
    checked_grid,
    expect,
    group_length,
    read_back,
)
from moeq.models.source import TensorHeader
from moeq_kernels.widths import FLOAT_BITS, FLOAT_GROUPS, SUPPORTED_BITS, WORD, Encoding, group_count

FORMAT, FLOAT8 = "pack-quantized", "float-quantized"
FP4 = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
FORMATS = (FORMAT, FLOAT8, *FP4)
STRATEGIES = {"nvfp4": "tensor_group", "mxfp4": "group"}
CLASSES = ("Linear", "Module")  # names of the classes that every packed module is of
LEFT_OUT: Mapping[str, Any] = {  # what a configuration that does not say them means
    "num_bits": 8, "type": "int", "symmetric": True,
}  # fmt: skip
WIDTHS = SUPPORTED_BITS[1:]  # its one bit has another zero point than moeq's


class CompressedTensors:
    """config_groups, each with the modules that it is for: names, `re:` patterns, or the class Linear.

    Where several are for a module, a name goes before patterns, these before classes, each by the alphabet, as
    compressed-tensors has it; of two that are the same, the last one holds.
    """

    anchor = "weight_packed"
    parts: tuple[str, ...] = (
        "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
    )  # fmt: skip

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """ValueError for groups whose weights lie in another format, and for transforms beside those of weights."""
        _refuse_transforms(declared.get("transform_config"))
        self.ignored = [_matcher(name) for name in declared.get("ignore") or ()]
        grids: dict[str, Grid] = {}
        groups = declared.get("config_groups") or {}
        forms = {name: _form(name, group, declared) for name, group in groups.items()}
        four = sorted({FP4[form] for form in forms.values() if form in FP4})
        if len(four) > 1:
            raise ValueError(f"{' and '.join(four)} in one checkpoint")
        if FLOAT8 in forms.values():  # whose matrix is called weight
            self.anchor, self.parts = "weight_scale", (*self.parts, "weight")
        for name, group in groups.items():
            grid = _grid(name, group.get("weights"), forms[name], four[0] if four else "nvfp4")
            if "targets" not in group:
                raise ValueError(f"no targets ({name})")
            grids |= dict.fromkeys(group["targets"], grid)
        ordered = sorted(grids, key=lambda target: ("re:" in target, target))
        self.targets = [(_matcher(target), grids[target]) for target in ordered]

    def grid(self, names: Sequence[str]) -> Grid | None:
        if any(matcher is None or _matches(matcher, names) for matcher in self.ignored):
            return None
        named = [grid for matcher, grid in self.targets if _matches(matcher, names)]
        whole = [grid for matcher, grid in self.targets if matcher is None]
        return next(iter([*named, *whole]), None)

    def shape(self, headers: Mapping[str, TensorHeader], grid: Grid) -> tuple[int, int]:
        if grid.codebook:
            stored = headers["weight" if grid.bits == FLOAT_BITS[-1] else "weight_packed"].shape
            return (*stored[:-1], stored[-1] * 8 // grid.bits) if len(stored) == 2 else (0, 0)
        stated = headers.get("weight_shape")
        if stated is None or stated.shape != (2,) or stated.dtype not in ("I64", "I32"):
            raise ValueError("weight_shape is missing, or no two numbers")
        data, size = b"".join(stored_chunks(stated)), stated.bytes // 2
        return int.from_bytes(data[:size], "little"), int.from_bytes(data[size:], "little")

    def check(self, headers: Mapping[str, TensorHeader], grid: Grid, rows: int, inputs: int) -> None:
        if grid.codebook:
            return _check_floats(headers, grid, rows, inputs)
        if grid.bits not in WIDTHS:
            raise ValueError(f"moeq reads {WIDTHS[0]} to {WIDTHS[-1]} bits of compressed-tensors")
        groups = group_count(inputs, group_length(grid, inputs))
        expect(headers, "weight_packed", ("I32",), (rows, -(-inputs * grid.bits // WORD)))
        expect(headers, "weight_scale", FLOATS, (rows, groups))
        expect(headers, "weight_shape", ("I64", "I32"), (2,))
        if not grid.symmetric:
            expect(headers, "weight_zero_point", ("I32",), (-(-rows * grid.bits // WORD), groups))
        if "weight_g_idx" in headers:
            expect(headers, "weight_g_idx", ("I32",), (inputs,))

    def read(self, parts: Parts, grid: Grid, rows: int, inputs: int) -> Stored:
        if grid.codebook:
            return _read_floats(parts, grid, inputs)
        if parts["weight_shape"].tolist() != [rows, inputs]:
            raise ValueError(f"weight_shape says {parts['weight_shape'].tolist()}, the matrix is {[rows, inputs]}")
        from moeq.numerics.layouts import row_stream
        from moeq_kernels.packing import unpack

        zeros = None
        if "weight_zero_point" in parts:
            words = parts["weight_zero_point"].mT.contiguous()
            zeros = unpack(row_stream(words, grid.bits, rows), grid.bits, rows).mT.contiguous()
        codes = row_stream(parts["weight_packed"], grid.bits, inputs)
        index = parts.get("weight_g_idx")
        unset = index is None or bool((index < 0).all())
        return read_back(codes, parts["weight_scale"], zeros, grid, inputs, None if unset else index)


def _check_floats(headers: Mapping[str, TensorHeader], grid: Grid, rows: int, inputs: int) -> None:
    """ValueError when a part of floating-point codes [rows, inputs] is absent, or of another type or shape."""
    if grid.bits == FLOAT_BITS[-1]:
        expect(headers, "weight", ("F8_E4M3",), (rows, inputs))
        return expect(headers, "weight_scale", FLOATS, (rows, 1))
    if inputs % grid.group_size:
        raise ValueError(f"{inputs} inputs are no whole groups of {grid.group_size}")
    expect(headers, "weight_packed", ("U8",), (rows, inputs // 2))
    expect(
        headers,
        "weight_scale",
        ("F8_E4M3",) if grid.codebook == "nvfp4" else ("U8",),
        (rows, inputs // grid.group_size),
    )
    if grid.codebook == "nvfp4":
        expect(headers, "weight_global_scale", ("F32",), (1,))


def _read_floats(parts: Parts, grid: Grid, inputs: int) -> Stored:
    """A matrix of floating-point codes; as values where moeq's own form of them does not hold its scales."""
    import torch

    from moeq_kernels import floats
    from moeq_kernels.packed import PackedWeight

    scales, own = parts["weight_scale"], Encoding.floating(grid.codebook)
    if grid.bits == FLOAT_BITS[-1]:
        stored = {"codes": parts["weight"].view(torch.uint8), "scales": scales.half()}
        kept = torch.equal(stored["scales"].double(), scales.double())
    elif grid.codebook == "mxfp4":
        stored, kept = {"codes": parts["weight_packed"], "scales": scales}, True
    else:
        divisor = parts["weight_global_scale"].view(1, 1)
        if not bool((torch.isfinite(divisor) & (divisor > 0)).all()):
            raise ValueError("weight_global_scale is no number above 0")
        unit = 1 / divisor
        stored = {"codes": parts["weight_packed"], "scales": scales.view(torch.uint8), "unit": unit}
        kept = bool(torch.frexp(divisor)[0] == 0.5) and bool(torch.isfinite(unit).all())
    weight = PackedWeight.of({name: part.contiguous() for name, part in stored.items()}, grid.bits, inputs, own)
    if kept:
        return Stored(weight=weight)
    if grid.bits == FLOAT_BITS[-1]:
        exact = replace(weight, scales=scales.float())
    else:  # as compressed-tensors has it: a scale is divided, once rounded
        divided = floats.fp8_values()[weight.scales.long()] / parts["weight_global_scale"]
        exact = replace(weight, bits=FLOAT_BITS[0], scales=divided)
    values = floats.dequantize(exact.codes, exact.scales, None, grid.bits, inputs, grid.codebook)
    if not bool(torch.isfinite(values).all()):
        raise ValueError("has values that are not finite")
    return Stored(weight=None, of=values)


def _matches(matcher: Pattern | None, names: Sequence[str]) -> bool:
    return matcher is not None and any(matcher.match(name) for name in names)


def _matcher(target: str) -> Pattern | None:
    """What a target matches; None: every linear."""
    if target in CLASSES:
        return None
    return Pattern(target.removeprefix("re:") if target.startswith("re:") else f"{re.escape(target)}$")


def _refuse_transforms(transforms: Mapping[str, Any] | None) -> None:
    """ValueError for transforms that are computed as a model runs; those of weights are in their values already."""
    for name, scheme in ((transforms or {}).get("config_groups") or {}).items():
        for place in scheme.get("apply") or ():
            if not str(place.get("location")).startswith("weight_"):
                raise ValueError(f"transform_config ({name}: {shown(place.get('location'))})")


def _form(name: str, group: Mapping[str, Any], declared: Mapping[str, Any]) -> str:
    """The format of a group; ValueError for one that is not read."""
    form = group.get("format") or declared.get("format")
    if form not in FORMATS:
        raise ValueError(f"format {shown(form)} ({name})")
    return str(form)


def _grid(name: str, weights: Mapping[str, Any] | None, form: str, codebook: str) -> Grid:
    """codebook: of floating-point codes; ValueError for what is not an integer grid by groups or rows, or such."""
    if weights is None:
        raise ValueError(f"no weights ({name})")
    weights = {**LEFT_OUT} | {key: value for key, value in weights.items() if value is not None}
    by_size = {None: "tensor", -1: "channel"}.get(weights.get("group_size"), "group")
    strategy = weights.get("strategy", by_size)
    if form != FORMAT:
        bits = FLOAT_BITS[form == FLOAT8]
        size = weights.get("group_size") if bits == FLOAT_BITS[0] else -1
        wanted = "channel" if size == -1 else STRATEGIES[codebook]
        stated = (weights.get("type"), strategy, weights.get("num_bits"), size, weights.get("symmetric"))
        if stated != ("float", wanted, bits, FLOAT_GROUPS[codebook] if size != -1 else -1, True):
            raise ValueError(f"{weights.get('type')} weights by {strategy} ({name})")
        own = Encoding.floating(codebook).at(bits)
        return Grid(bits=bits, group_size=own.group_size, symmetric=True, codebook=codebook)
    if weights.get("type") != "int" or strategy not in ("group", "channel"):
        raise ValueError(f"{weights.get('type')} weights by {strategy} ({name})")
    size = weights.get("group_size") if strategy == "group" else -1
    return checked_grid(weights["num_bits"], size or -1, weights["symmetric"])
