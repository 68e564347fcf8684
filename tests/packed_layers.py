"""Layers of packed experts at random, and what they give in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from moeq_kernels.description import DOWN, LayerOfExperts, Matrix
from moeq_kernels.packed import PackedWeight, packed_shapes
from moeq_kernels.packing import pack
from moeq_kernels.widths import Encoding, group_count


def matrix_of(
    rows: int,
    inputs: int,
    bits: int,
    group_size: int = 32,
    *,
    symmetric: bool = False,
    nested: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    state_bits: int = 0,
) -> Matrix:
    """A packed matrix of any codes, scales and zero points, trellis codes where they have states; dense in a dtype for
    16 bits."""
    random = torch.Generator().manual_seed(seed)
    if bits == 16:
        return torch.randn(rows, inputs, generator=random).to(dtype)
    if state_bits:
        return trellis_of(rows, inputs, bits, state_bits, seed=seed)
    groups = group_count(inputs, group_size)
    zeros = None
    encoding = Encoding(group_size=group_size, symmetric=symmetric, nested=nested)
    if encoding.has_zeros(bits):
        width = encoding.grid_bits(bits)
        zeros = pack(torch.randint(0, 2**width, (rows, groups), generator=random), width)
    return PackedWeight(
        codes=pack(torch.randint(0, 2**bits, (rows, inputs), generator=random), bits),
        scales=(torch.randn(rows, groups, generator=random) * 2.0**-bits).half(),
        zeros=zeros,
        bits=bits,
        group_size=group_size,
        inputs=inputs,
        symmetric=symmetric,
        nested=nested and bits in (2, 3, 4),
    )


def trellis_of(rows: int, inputs: int, bits: int, state_bits: int, *, seed: int = 0) -> PackedWeight:
    """A packed matrix of any trellis codes of 2**L states and scales."""
    return any_codes(rows, inputs, bits, Encoding.trellis(state_bits), seed=seed)


def any_codes(rows: int, inputs: int, bits: int, encoding: Encoding, *, seed: int = 0) -> PackedWeight:
    """A packed matrix of any codes that are no grid's, and scales; units are the same whatever the seed."""
    random = torch.Generator().manual_seed(seed)
    if encoding.floats:
        return _any_floats(rows, inputs, bits, encoding, random)
    shapes = packed_shapes(rows, inputs, bits, encoding)
    (codes, dtype), (scales, _) = shapes["codes"], shapes["scales"]
    size = 0.001 if encoding.codes == "iq" else 0.02
    parts = {
        "codes": torch.randint(0, 256, codes, generator=random).to(dtype),
        "scales": (torch.randn(scales, generator=random) * size).half(),
    }
    if encoding.codebook:
        parts["scales"] = parts["scales"].abs()
    return PackedWeight.of(parts, bits, inputs, encoding)


def _any_floats(rows: int, inputs: int, bits: int, encoding: Encoding, random: torch.Generator) -> PackedWeight:
    parts = {
        name: torch.randint(100, 126, shape, generator=random).to(dtype)
        for name, (shape, dtype) in packed_shapes(rows, inputs, bits, encoding).items()
    }
    parts["codes"] = torch.randint(0, 256, parts["codes"].shape, generator=random).to(torch.uint8)
    if bits == 8:
        parts["codes"] = torch.where(parts["codes"] % 128 == 127, 0, parts["codes"])  # which is no number
        parts["scales"] = torch.ldexp(torch.ones(rows, 1), torch.randint(-14, -10, (rows, 1), generator=random)).half()
    if "unit" in parts:
        parts["unit"].fill_(2.0**-12)
    return PackedWeight.of(parts, bits, inputs, encoding)


def silu_gate(parts: dict[str, Tensor]) -> Tensor:
    return nn.functional.silu(parts["gate_proj"]) * parts["up_proj"]


def layer_of(
    bits: Sequence[Mapping[str, int] | int],
    hidden: int,
    intermediate: int,
    group_size: int = 32,
    *,
    biased: bool = False,
    activation: str | None = "silu",
    **options: object,
) -> LayerOfExperts:
    """A gated layer with one expert for each of `bits`, a width or {projection: width}."""
    sizes = {"gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden), DOWN: (hidden, intermediate)}
    random, matrices, biases = torch.Generator().manual_seed(5), [], []
    for expert, width in enumerate(bits):
        widths = dict.fromkeys(sizes, width) if isinstance(width, int) else width
        matrices.append(
            {
                name: matrix_of(*size, widths[name], group_size, seed=3 * expert + place, **options)  # type: ignore[arg-type]
                for place, (name, size) in enumerate(sizes.items())
            }
        )
        own = {name: torch.randn(rows, generator=random) for name, (rows, _) in sizes.items()}
        biases.append(own if biased else {})
    return LayerOfExperts(matrices=matrices, biases=biases, gate=silu_gate, activation=activation)


def values(matrix: Matrix) -> Tensor:
    """In float64."""
    return matrix.double() if isinstance(matrix, Tensor) else matrix.dequantize().double()


def reference(layer: LayerOfExperts, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """As `PreparedLayer.__call__`, in float64 throughout."""
    rows = hidden.double()
    out = torch.zeros(len(rows), values(layer.matrices[0][DOWN]).shape[0], dtype=torch.float64)
    for expert, (matrices, biases) in enumerate(zip(layer.matrices, layer.biases, strict=True)):
        tokens, places = (index == expert).nonzero(as_tuple=True)
        bias = {name: part.double() for name, part in biases.items()}
        products = {
            name: nn.functional.linear(rows[tokens], values(matrix), bias.get(name))
            for name, matrix in matrices.items()
            if name != DOWN
        }
        result = nn.functional.linear(layer.gate(products), values(matrices[DOWN]), bias.get(DOWN))
        result = result if layer.finish is None else layer.finish(result)
        out.index_add_(0, tokens, result * weights[tokens, places, None].double())
    return out


def routed(tokens: int, experts: int, top_k: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """hidden, index, which has one expert too many, and weights."""
    random = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(experts + 1, generator=random)[:top_k] for _ in range(tokens)]) if tokens else (
        torch.zeros(0, top_k, dtype=torch.long)
    )  # fmt: skip
    return [
        torch.randn(tokens, hidden, generator=random).to(dtype),
        index,
        torch.rand(tokens, top_k, generator=random).to(dtype),
    ]
