"""Blocks of ggml back to codes, scales and zero points: exactly their values, or refused."""

from __future__ import annotations

from contextlib import suppress

import peers
import pytest
import torch
from made_sources import rounded

from moeq.numerics import ggml
from moeq.numerics.ggml_types import HOLDS, TYPES
from moeq_kernels.packed import PackedWeight

PACKED = sorted(set(HOLDS.values()))


@pytest.mark.parametrize(("bits", "symmetric"), HOLDS)
@pytest.mark.parametrize("group_size", [256, 512, -1])
def test_what_moeq_packed_comes_back_bit_for_bit(bits: int, symmetric: bool, group_size: int) -> None:
    weight = rounded(torch.randn(5, 1024, generator=torch.Generator().manual_seed(bits)), bits, group_size, symmetric)
    found = ggml.packed(HOLDS[bits, symmetric], ggml.encode(weight), 1024)
    found.check()
    assert (found.bits, found.group_size) == (bits, group_size)
    assert all(torch.equal(part, found.parts()[name]) for name, part in weight.parts().items())
    assert set(found.parts()) == set(weight.parts())


@pytest.mark.parametrize("name", PACKED)
def test_any_bytes_are_their_values_or_refused(name: str) -> None:
    """Scales of every kind; those of blocks with multipliers are products that float16 mostly lacks."""
    generator = torch.Generator().manual_seed(7)
    block = TYPES[name]
    held = 0
    for _ in range(20):
        data = torch.randint(0, 256, (2, 2 * block.bytes), generator=generator, dtype=torch.uint8)
        values = ggml.decode(name, data, 2 * block.length)
        found = None
        with suppress(ValueError):
            found = ggml.packed(name, data, 2 * block.length)
            held += 1
        if found is not None and bool(torch.isfinite(values).all()):
            assert torch.equal(found.dequantize(), values)
    assert (held > 0) == (name in ("Q1_0", "Q4_0", "Q5_0", "Q8_0"))


def test_what_no_grid_holds_is_said() -> None:
    weight = rounded(torch.randn(1, 256, generator=torch.Generator().manual_seed(1)), 4, 256, False)
    data = ggml.encode(weight)
    halves = data[:, :2].clone().view(torch.float16) * 1.001
    turned = torch.cat([data[:, :2], halves.view(torch.uint8), data[:, 4:]], 1)
    with pytest.raises(ValueError, match="a zero point that is no whole number from 0 to 15"):
        ggml.packed("Q4_K", turned, 256)
    data[0, 4] = 37
    with pytest.raises(ValueError, match="a scale that float16 does not hold"):
        ggml.packed("Q4_K", data, 256)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0"])
def test_what_its_own_quantizer_makes_is_held(name: str) -> None:
    """By gguf's copy of llama.cpp's: scales of either sign."""
    quants = peers.module("gguf.quants")
    kinds = peers.module("gguf").GGMLQuantizationType
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(4))
    data = torch.from_numpy(quants.quantize(weight.numpy(), kinds[name]))
    found = ggml.packed(name, data, 128)
    assert isinstance(found, PackedWeight)
    assert torch.equal(found.dequantize(), torch.from_numpy(quants.dequantize(data.numpy(), kinds[name])))
    assert float((found.dequantize() - weight).norm() / weight.norm()) < 0.12
    assert found.zeros is None
