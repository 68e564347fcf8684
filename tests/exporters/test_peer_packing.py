"""Packing is bit for bit that of auto-round's and compressed-tensors' own code."""

from __future__ import annotations

from pathlib import Path

import peers
import pytest
import torch
from cases import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import FULL
from torch import Tensor

from moeq.numerics.layouts import column_stream, column_words, row_stream, row_words, zero_words, zeros_of
from moeq_kernels.packing import SUPPORTED_BITS, pack, unpack

SCRIPT = Path(__file__).parent / "peer_pack.py"
CASES = 400 if FULL else 60
OF_LINEARS = (2, 3, 4, 8)  # what auto-round's own linear packs by routines of their own


def shapes(multiple: int, deep: bool) -> st.SearchStrategy[tuple[int, ...]]:
    """[N, K] or, if deep, also [E, N, K]; K a multiple."""
    inputs = st.integers(1, 96 // multiple).map(lambda count: count * multiple)
    flat = st.tuples(st.integers(1, 9), inputs)
    return st.one_of(flat, st.tuples(st.integers(1, 3), st.integers(1, 5), inputs)) if deep else flat


def packed_by(package: str, packer: str, cases: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    save_file(cases, folder / "codes.safetensors")
    peers.run(package, SCRIPT, packer, folder / "codes.safetensors", folder / "words.safetensors")
    found: dict[str, Tensor] = load_file(folder / "words.safetensors")
    return found


@st.composite
def many(draw: st.DrawFn, multiple: int, deep: bool, widths: tuple[int, ...]) -> dict[str, Tensor]:
    """Codes of many shapes and widths, every width among them."""
    found = {}
    for number in range(CASES):
        bits = widths[number % len(widths)]
        shape = draw(shapes(multiple, deep))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        found[f"{bits}.{number}"] = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.int32)
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("package", "packer", "multiple", "deep", "widths"),
    [
        ("auto-round", "auto-round", 32, True, SUPPORTED_BITS),
        ("auto-round", "auto-round-linear", 32, False, OF_LINEARS),
        ("compressed-tensors", "compressed-tensors", 1, True, SUPPORTED_BITS),
    ],
)
def test_words_are_those_of_the_peers(
    tmp_path: Path, package: str, packer: str, multiple: int, deep: bool, widths: tuple[int, ...]
) -> None:
    peers.interpreter(package)

    @given(many(multiple, deep, widths))
    @settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
    def check(cases: dict[str, Tensor]) -> None:
        theirs = packed_by(package, packer, cases, tmp_path)
        for name, codes in cases.items():
            words = row_words(pack(codes, int(name.split(".")[0])))
            assert torch.equal(words, theirs[name]), (name, codes.shape)

    check()


@given(st.sampled_from(SUPPORTED_BITS), shapes(1, True), st.integers(0, 2**31))
@settings(max_examples=examples(200), deadline=None)
def test_words_and_streams_are_inverse(bits: int, shape: tuple[int, ...], seed: int) -> None:
    codes = torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    stream, length = pack(codes, bits), shape[-1]
    words = row_words(stream)
    assert words.shape == (*shape[:-1], -(-length * bits // 32))
    assert torch.equal(row_stream(words, bits, length), stream)
    if length * bits % 32:
        with pytest.raises(ValueError, match="no whole number of 32-bit words"):
            column_words(stream, bits, length)
    else:
        assert torch.equal(column_stream(column_words(stream, bits, length), bits, length), stream)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("less_one", [True, False])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_zero_points_come_back(bits: int, less_one: bool, groups: int) -> None:
    zeros = torch.arange(groups * 64).reshape(64, groups).remainder(2**bits).to(torch.uint8)
    words = zero_words(zeros, bits, less_one=less_one)
    assert words.shape == (groups, 2 * bits)
    assert torch.equal(zeros_of(words, bits, 64, less_one=less_one), zeros)
    stored = unpack(row_stream(words, bits, 64), bits, 64)
    assert torch.equal(stored, (zeros.mT.int() - int(less_one)).remainder(2**bits).to(torch.uint8))
