"""Bit packing against a reference that writes one bit at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FULL

from moeq_kernels.packing import SUPPORTED_BITS, pack, packed_row_bytes, unpack


def pack_bit_by_bit(row: list[int], bits: int) -> list[int]:
    out = [0] * -(-len(row) * bits // 8)
    for index, code in enumerate(row):
        for bit in range(bits):
            place = index * bits + bit
            out[place // 8] |= ((code >> bit) & 1) << (place % 8)
    return out


@given(st.data())
@settings(max_examples=100_000 if FULL else 300, deadline=None)
def test_pack_equals_bit_by_bit_and_inverts(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from(SUPPORTED_BITS))
    length = data.draw(st.integers(1, 41))
    rows = data.draw(st.integers(1, 3))
    seed = data.draw(st.integers(0, 2**32 - 1))
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, length))
    packed = pack(torch.from_numpy(codes), bits)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [pack_bit_by_bit(row, bits) for row in codes.tolist()]
    assert unpack(packed, bits, length).tolist() == codes.tolist()


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_row_bytes_and_leading_axes(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (2, 3, 5, 19), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (2, 3, 5, packed_row_bytes(19, bits))
    assert torch.equal(unpack(packed, bits, 19), codes)


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\[0, 4\)"):
        pack(torch.tensor([4]), 2)
    with pytest.raises(ValueError, match="cannot pack 9"):
        pack(torch.tensor([1]), 9)
    with pytest.raises(ValueError, match="take 2 bytes"):
        unpack(torch.zeros(3, dtype=torch.uint8), 3, 5)
