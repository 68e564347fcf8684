"""Errors of quantized matrices: the same figure wherever they are taken, and what a width allows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeq.numerics import gptq, matrix_error
from moeq.numerics.matrix_error import (
    NEIGHBOURS,
    is_equal,
    is_recorded,
    most_error,
    recorded,
    relative_error,
    rounding_error,
    row_blocks,
    unlike_rows,
)
from moeq.numerics.storing import packed_of
from moeq_kernels.packed import PackedWeight, packed_shapes
from moeq_kernels.widths import Encoding


def weights(rows: int = 48, inputs: int = 72) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(3))


def packed(weight: Tensor, bits: int, symmetric: bool, group_size: int = 32) -> PackedWeight:
    """Rounded to nearest."""
    made = gptq.quantize(weight[None], None, bits=[bits], group_size=group_size, symmetric=symmetric)
    return packed_of(made, bits, symmetric).map(lambda part: part[0])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_rounding_is_within_half_of_what_its_width_allows(bits: int, symmetric: bool) -> None:
    weight = weights()
    made = packed(weight, bits, symmetric)
    error = relative_error(made.dequantize(), weight)
    assert error == pytest.approx(rounding_error(weight, bits, 32, symmetric), rel=1e-6)
    assert error <= most_error(weight, made) <= 1


def test_neighbours_at_random_are_twice_as_far() -> None:
    weight, step = weights(400, 256), 0.1
    places = weight / step
    nearest = places.round()
    either = places.floor() + torch.rand(places.shape, generator=torch.Generator().manual_seed(4)).round()
    ratio = relative_error(either * step, weight) / relative_error(nearest * step, weight)
    assert ratio == pytest.approx(NEIGHBOURS, rel=0.01)


def test_one_code_of_millions_is_not_what_was_recorded() -> None:
    weight = weights(2048, 2048)
    values = packed(weight, 4, symmetric=True).dequantize()
    stated = recorded(relative_error(values, weight))
    assert is_recorded(relative_error(values.T, weight.T), stated, weight.numel())  # sums in another order
    values[1000, 77] += 0.3
    assert not is_recorded(relative_error(values, weight), stated, weight.numel())


def test_rows_that_have_nothing_to_do_with_their_weights() -> None:
    weight = weights(inputs=512)
    values = packed(weight, 4, symmetric=False).dequantize()
    assert unlike_rows(values, weight) == []
    values[[4, 30]] = values[[30, 4]]
    assert unlike_rows(values, weight) == [4, 30]
    values[7, 0] = torch.nan
    assert unlike_rows(values, weight) == [4, 7, 30]
    assert relative_error(values, weight) == float("inf")


def test_nothing_is_no_far_from_nothing() -> None:
    nothing = torch.zeros(4, 8)
    assert relative_error(nothing, nothing) == 0
    assert is_recorded(0.0, 0.0, 32)
    assert relative_error(nothing + 1, nothing) > 0
    assert unlike_rows(nothing, nothing) == []


def test_an_error_is_that_of_all_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    exact, values = torch.randn(2, 41, 7, generator=generator)
    wanted = float((values.double() - exact.double()).norm() / exact.double().norm())
    for block in (1, 7, 30, 41 * 7, 1 << 20):
        monkeypatch.setattr(matrix_error, "BLOCK", block)
        assert relative_error(values, exact) == pytest.approx(wanted, rel=1e-7)
    monkeypatch.setattr(matrix_error, "BLOCK", 30)
    assert relative_error(values.index_fill(0, torch.tensor([40]), float("nan")), exact) == float("inf")
    assert relative_error(values[:0], exact[:0]) == 0.0


def made_of(codes: str) -> PackedWeight:
    """Some weights of every kind that lies otherwise: row by row, in tiles, in tiles of whole rows, nothing."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(1, 300, 256, generator=generator)
    if codes == "dropped":
        return PackedWeight.dropped(300, 256, Encoding.trellis(8))
    if codes == "grid":
        return packed(weight[0], 3, symmetric=False)
    encoding = Encoding.trellis(8) if codes == "trellis" else Encoding.exl3("mcg")
    shapes = packed_shapes(300 if codes == "trellis" else 384, 256, 3, encoding)
    parts = {
        name: torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        if name == "codes"
        else torch.rand(shape, generator=generator).to(dtype)
        for name, (shape, dtype) in shapes.items()
    }
    return PackedWeight.of(parts, 3, 256, encoding)


@pytest.mark.parametrize("codes", ["grid", "trellis", "exl3", "dropped"])
def test_blocks_of_packed_rows_have_the_values_of_the_whole(codes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = made_of(codes)
    values = weight.dequantize()
    for block in (256 * 33, 1 << 20):
        monkeypatch.setattr(matrix_error, "BLOCK", block)
        found = [rows for rows, _ in row_blocks(weight, values)]
        assert torch.equal(torch.cat(found), values)
        assert is_equal(weight, values)
        assert is_equal(values.bfloat16(), weight, torch.bfloat16)
        other = values.clone()
        other[-1, -1] += 1
        assert not is_equal(weight, other)
        assert relative_error(weight, other) > 0
    assert not is_equal(weight, values[:-1])
    assert is_equal(values[0, 0], values[0, 0])  # other tensors too
