"""The arrangement of packed matrices: back bit for bit, and hardly more bytes than are stored."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as some
from packed_layers import layer_of, matrix_of

from moeq_kernels.cpu.arrangement import Shape, arrange, undo
from moeq_kernels.cpu.codes import CODES, PLANES, field, slot_of
from moeq_kernels.cpu.kernel import CpuKernel
from moeq_kernels.description import DOWN, Matrix
from moeq_kernels.packed import PackedWeight


def same(one: Matrix, other: Matrix) -> bool:
    if isinstance(one, PackedWeight):
        assert isinstance(other, PackedWeight)
        parts = one.parts()
        assert replace(one, **dict.fromkeys(("codes", "scales", "zeros"))) == replace(  # type: ignore[arg-type]
            other,
            **dict.fromkeys(("codes", "scales", "zeros")),  # type: ignore[arg-type]
        )
        return parts.keys() == other.parts().keys() and all(torch.equal(parts[n], other.parts()[n]) for n in parts)
    assert isinstance(other, torch.Tensor)
    return torch.equal(one, other) and one.dtype == other.dtype


@pytest.mark.full
@settings(max_examples=examples(60), deadline=None)
@given(
    rows=some.integers(1, 40),
    inputs=some.integers(1, 140),
    bits=some.sampled_from([*range(1, 9), 16]),
    group_size=some.sampled_from([-1, 1, 5, 8, 16, 24, 32, 64, 128]),
    symmetric=some.booleans(),
    nested=some.booleans(),
    dtype=some.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=some.integers(0, 9),
)
def test_any_matrix_comes_back_bit_for_bit(
    rows: int, inputs: int, bits: int, group_size: int, symmetric: bool, nested: bool, dtype: torch.dtype, seed: int
) -> None:
    matrix = matrix_of(
        rows, inputs, bits, group_size, symmetric=symmetric, nested=nested, dtype=dtype, seed=seed
    )  # fmt: skip
    shape = Shape.of(matrix)
    held = torch.zeros(shape.nbytes, dtype=torch.uint8)
    arrange(matrix, shape, held)
    assert same(undo(shape, held), matrix)


def test_a_layer_gives_its_matrices_back() -> None:
    layer = layer_of([1, 3, {"gate_proj": 8, "up_proj": 16, DOWN: 4}], 96, 40, nested=True)
    prepared = CpuKernel().layer(layer)
    for expert, matrices in enumerate(layer.matrices):
        for name, matrix in matrices.items():
            assert same(prepared.matrix(expert, name), matrix)
    matrix = matrix_of(20, 50, 3)
    assert same(CpuKernel().linear(matrix).matrix(), matrix)


@pytest.mark.parametrize("bits", [*range(1, 9), 16])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_hardly_more_bytes_than_are_stored(bits: int, group_size: int) -> None:
    layer = layer_of([bits] * 2, 512, 256, group_size)
    stored = sum(matrix.nbytes for matrices in layer.matrices for matrix in matrices.values())
    assert stored <= CpuKernel().layer(layer).nbytes <= 1.1 * stored


def test_pairs_lie_as_drawn() -> None:
    """The picture in codes.py: plane 4, inputs 0 and 1 lowest in the two halves."""
    shape = Shape.of(matrix := matrix_of(16, 32, 4))
    held = torch.zeros(shape.nbytes, dtype=torch.uint8)
    arrange(matrix, shape, held)
    first = int(held.view(torch.int32)[0]) & 0xFFFFFFFF
    codes = [int(byte) >> 4 * half & 15 for byte in matrix.codes[0, :4].tolist() for half in (0, 1)]  # type: ignore[union-attr]
    places = [(field(4, 4, k // 2)[1] + 16 * (k % 2)) for k in range(8)]
    assert places == [0, 16, 8, 24, 4, 20, 12, 28]
    assert [first >> place & 15 for place in places] == codes
    assert CODES["3"].planes == (2, 1)


@pytest.mark.parametrize("bits", PLANES)
def test_one_shift_a_plane_puts_a_word_of_codes_together(bits: int) -> None:
    """Planes fill their words, and all codes of a word have those of a plane at one distance in one word."""
    slot, pairs = slot_of(bits), 16
    for plane in PLANES[bits]:
        found = [field(plane, slot, pair) for pair in range(pairs)]
        filled = [(word, low + bit) for word, low in found for bit in range(plane)]
        assert sorted(filled) == [(word, bit) for word in range(plane) for bit in range(16)]
        for first in range(0, pairs, 16 // slot):
            of_word = found[first : first + 16 // slot]
            assert len({(word, low % slot) for word, low in of_word}) == 1
            assert [low // slot * slot for _, low in of_word] == [field(slot, slot, k)[1] for k in range(16 // slot)]


@pytest.mark.full
def test_the_description_needs_no_compiler() -> None:
    program = "import sys, moeq_kernels.description; print('numba' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
