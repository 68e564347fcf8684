"""The order of codes in the GPU's words, and that it can be undone."""

import pytest
import torch
from kernels.gpu.packed_matrices import Maker, same

from moeq_kernels.gpu.stored import Stored
from moeq_kernels.gpu.swizzle import code_bytes, place, swizzle, unswizzle


def test_the_nibbles_of_a_word_are_in_paper_002s_order() -> None:
    """Section 3.4.3: [e0, e1, e2, e3, e4, e5, e6, e7] -> [e0, e2, e4, e6, e1, e3, e5, e7], the lowest bits first."""
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16)  # one column: plane p is input p
    first, second = swizzle(codes, 4).view(torch.int32).tolist()
    assert first == 0x75316420
    assert second & 0xFFFFFFFF == 0xFDB9ECA8
    pair = (first >> 4) & 0x000F000F | 0x64006400  # what one AND and one OR make of it: two float16
    assert torch.tensor([pair], dtype=torch.int32).view(torch.float16).tolist() == [1024 + 2, 1024 + 3]


def test_a_worked_example_of_two_tiles() -> None:
    """2 bits, 130 inputs: 8 columns in the first tile, one in the second; plane 2j + h, column c is 16j + 2c + h."""
    codes = torch.zeros((1, 130), dtype=torch.uint8)
    codes[0, 16 * 3 + 2 * 5 + 1] = 2  # plane 7 of column 5
    codes[0, 129] = 3  # plane 1 of the second tile's only column
    words = swizzle(codes, 2).view(torch.int32).tolist()
    assert words == [0, 0, 0, 0, 0, 2 << (16 + 2 * 3), 0, 0, 3 << 16]


@pytest.mark.parametrize("bits", range(1, 9))
def test_it_can_be_undone_and_takes_no_room(bits: int) -> None:
    maker = Maker(bits)
    for rows, inputs in ((1, 1), (3, 16), (5, 48), (7, 125), (4, 128), (6, 257), (2, 512)):
        codes = torch.randint(0, 2**bits, (rows, inputs), generator=maker.generator, dtype=torch.uint8)
        stored = swizzle(codes, bits)
        assert len(stored) == code_bytes(rows, inputs, bits) == rows * -(-inputs // 16) * 2 * bits
        assert torch.equal(unswizzle(stored, rows, inputs, bits), codes)


@pytest.mark.parametrize("part", [1, 2, 4, 8])
def test_no_two_planes_share_a_bit(part: int) -> None:
    taken = [word * 32 + shift + bit for word, shift in map(place, range(16), [part] * 16) for bit in range(part)]
    assert sorted(taken) == list(range(16 * part))


def test_a_layer_is_undone_bit_for_bit_in_no_more_bytes() -> None:
    maker = Maker(1)
    kinds = [(1, 128, False), (2, 32, False), (3, 64, True), (4, -1, True), (8, 128, False), (4, 24, False)]
    nested = [maker.packed(256, 384, bits, 32, nested=True) for bits in (2, 3, 4)]
    matrices = [[maker.packed(256, 384, *kind)] for kind in kinds] + [[one] for one in nested]
    dense = maker.rows(256, 384, dtype=torch.bfloat16)
    stored = Stored([*matrices, [dense]], [[maker.rows(256)], *[[None]] * len(matrices)])
    for expert, (matrix,) in enumerate(matrices):
        assert same(stored.matrix(expert, 0), matrix)
    assert same(stored.matrix(len(matrices), 0), dense)
    assert stored.nbytes <= 1.1 * (sum(one.nbytes for (one,) in matrices) + dense.nbytes)


def test_some_rows_in_any_order() -> None:
    maker, index = Maker(3), torch.tensor([6, 0, 6, 3])
    kinds = [(1, 128, False), (3, 32, False), (7, 64, True), (8, -1, False)]
    matrices = [maker.packed(7, 200, *kind) for kind in kinds] + [maker.packed(7, 200, 2, 32, nested=True)]
    dense = maker.rows(7, 200)
    stored = Stored([[one] for one in (*matrices, dense)], [[None]] * 6)
    for expert, matrix in enumerate(matrices):
        whole = matrix.map(lambda part: part[index])
        assert same(stored.matrix(expert, 0, index), whole)
    assert same(stored.matrix(5, 0, index), dense[index])


def test_experts_of_other_shapes_are_refused() -> None:
    maker = Maker(2)
    with pytest.raises(ValueError, match="shapes"):
        Stored([[maker.packed(8, 16, 4, -1)], [maker.packed(8, 32, 4, -1)]], [[None], [None]])
    with pytest.raises(ValueError, match="2 types"):
        Stored([[maker.rows(8, 16)], [maker.rows(8, 16, dtype=torch.float16)]], [[None], [None]])
