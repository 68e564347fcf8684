"""Blocks of ggml's types: exactly the values of the grids, and what the gguf package reads of any bytes."""

from __future__ import annotations

import peers
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from made_sources import rounded
from torch import Tensor

from moeq.numerics import ggml
from moeq.numerics.ggml_types import BY_NUMBER, FLOATS, HOLDS, TYPES
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import pack, unpack

PACKED = [name for name in TYPES if name not in FLOATS]
NOT_READ_BY_GGUF = {"Q1_0"}  # by the package; llama.cpp reads it


def weight(bits: int, symmetric: bool, rows: int, inputs: int, group_size: int, seed: int) -> PackedWeight:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, inputs, generator=generator) + 0.3
    if bits not in (5, 6):
        return rounded(values, bits, group_size, symmetric)
    groups = 1 if group_size == -1 else inputs // group_size
    zeros = torch.randint(2**bits, (rows, groups), generator=generator, dtype=torch.uint8)
    return PackedWeight(
        codes=pack(torch.randint(2**bits, (rows, inputs), generator=generator, dtype=torch.uint8), bits),
        scales=torch.rand(rows, groups, generator=generator).half(),
        zeros=None if symmetric else pack(zeros, bits),
        bits=bits,
        group_size=group_size,
        inputs=inputs,
        symmetric=symmetric,
    )


def read_by_gguf(name: str, blocks: Tensor) -> Tensor:
    gguf = peers.module("gguf")
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name]))


@given(st.sampled_from(sorted(HOLDS)), st.data())
@settings(max_examples=examples(150), deadline=None)
def test_values_come_back_exactly(grid: tuple[int, bool], data: st.DataObject) -> None:
    bits, symmetric = grid
    name = HOLDS[grid]
    length = TYPES[name].length
    blocks = data.draw(st.integers(1, 4))
    multiple = data.draw(st.sampled_from([size for size in range(1, blocks + 1) if blocks % size == 0]))
    group = data.draw(st.sampled_from([-1, multiple * length]))
    made = weight(bits, symmetric, data.draw(st.integers(1, 5)), blocks * length, group, data.draw(st.integers(0, 999)))
    encoded = ggml.encode(made)
    assert encoded.shape[-1] == TYPES[name].row_bytes(made.inputs)
    assert torch.equal(ggml.decode(name, encoded, made.inputs), made.dequantize())


@pytest.mark.parametrize("grid", sorted(HOLDS))
def test_gguf_reads_what_is_written(grid: tuple[int, bool]) -> None:
    name = HOLDS[grid]
    if name in NOT_READ_BY_GGUF:
        pytest.skip("gguf 0.19 does not read this type; tests/exporters/test_gguf.py has llama.cpp read it")
    made = weight(*grid, 6, 1024, 512, 7)
    assert torch.equal(read_by_gguf(name, ggml.encode(made)), made.dequantize())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [name for name in TYPES if name not in NOT_READ_BY_GGUF])
def test_any_bytes_are_read_as_gguf_reads_them(name: str) -> None:
    kind = TYPES[name]
    inputs = 2 * kind.length * (64 if name in FLOATS else 1)
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(256, (40, kind.row_bytes(inputs)), generator=generator, dtype=torch.uint8)
    found, wanted = ggml.decode(name, blocks, inputs), read_by_gguf(name, blocks)
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert bool(wanted.isfinite().any())


def test_types_are_those_of_gguf() -> None:
    gguf = peers.module("gguf")
    for kind in TYPES.values():
        number = gguf.GGMLQuantizationType[kind.name]
        assert int(number) == kind.number
        assert gguf.GGML_QUANT_SIZES[number] == (kind.length, kind.bytes)
        assert BY_NUMBER[kind.number] is kind


def test_q1_0_as_llama_cpp_has_it() -> None:
    """d, then bit i % 8 of byte i // 8, 0 for -d and 1 for d."""
    made = weight(1, True, 3, 256, 128, 1)
    blocks = ggml.encode(made).view(3, 2, 18)
    codes = unpack(made.codes, 1, 256).view(3, 2, 128)
    scales = blocks[..., :2].contiguous().view(torch.float16).float()
    for place in (0, 1, 9, 127):
        bit = blocks[..., 2 + place // 8] >> (place % 8) & 1
        assert torch.equal(bit, codes[..., place])
        assert torch.equal((2 * bit.float() - 1) * scales[..., 0], made.dequantize().view(3, 2, 128)[..., place])


@pytest.mark.parametrize(
    ("bits", "symmetric", "inputs", "group", "why"),
    [
        (3, False, 256, 256, "no type of ggml holds 3 bits with zero points"),
        (8, False, 256, 256, "no type of ggml holds 8 bits with zero points"),
        (3, True, 256, 128, "256 inputs in groups of 128 are no multiples of the 256 of Q3_K"),
        (4, True, 48, -1, "48 inputs in groups of 48 are no multiples of the 32 of Q4_0"),
        (1, True, 256, 64, "256 inputs in groups of 64 are no multiples of the 128 of Q1_0"),
    ],
)
def test_what_no_type_holds_is_refused(bits: int, symmetric: bool, inputs: int, group: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ggml.encode(weight(bits, symmetric, 2, inputs, group, 0))


def test_scales_that_float16_does_not_hold_are_refused() -> None:
    made = weight(4, True, 2, 64, 32, 0)
    wide = made.scales.float() * (1 + 2**-12)
    with pytest.raises(ValueError, match="float16"):
        ggml.encode(PackedWeight(**{**vars(made), "scales": wide}))
    tiny = weight(1, True, 2, 128, 128, 0)
    smallest = torch.full_like(tiny.scales, 2**-24)
    with pytest.raises(ValueError, match="float16"):
        ggml.encode(PackedWeight(**{**vars(tiny), "scales": smallest}))
