"""Trellis codes against references that go bit by bit and walk by walk; LDLQ against its own loss."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FULL

from moeq.numerics import trellis, trellis_device, trellis_ldlq
from moeq.numerics.factor import factorize
from moeq_kernels.trellis import (
    BITS,
    STEPS,
    TILE,
    WALKED,
    TrellisWeight,
    from_tiles,
    integer_values,
    pack,
    states,
    tiles_along,
    unpack,
    values,
)


def bit_by_bit(stream: bytes, bits: int, state_bits: int) -> list[int]:
    """The state of each step of one tile, read bit by bit from its bytes."""
    every = [stream[place // 8] >> (place % 8) & 1 for place in range(8 * len(stream))]
    found = []
    for step in range(STEPS):
        window = [every[place % len(every)] for place in range((step + 1) * bits - state_bits, (step + 1) * bits)]
        found.append(sum(bit << place for place, bit in enumerate(window)))
    return found


@given(st.data())
@settings(max_examples=1000 if FULL else 15, deadline=None)
def test_dequantize_equals_bit_by_bit(data: st.DataObject) -> None:
    bits, state_bits = data.draw(st.sampled_from(BITS)), data.draw(st.integers(8, 16))
    rows, inputs = data.draw(st.integers(1, 35)), data.draw(st.integers(1, 35))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    size = 32 * bits
    codes = random.integers(0, 256, (-(-rows // 16), -(-inputs // 16) * size), np.uint8)
    scales = random.random(rows).astype(np.float16)
    wanted = np.zeros((rows, inputs), np.float32)
    value = integer_values(bits, state_bits).numpy()
    for top, line in enumerate(codes):
        for left in range(len(line) // size):
            for step, state in enumerate(bit_by_bit(line[left * size : (left + 1) * size].tobytes(), bits, state_bits)):
                row, column = 16 * top + step // 16, 16 * left + step % 16
                if row < rows and column < inputs:
                    wanted[row, column] = np.float32(value[state] / 32) * np.float32(scales[row])
    weight = TrellisWeight(
        codes=torch.from_numpy(codes), scales=torch.from_numpy(scales), bits=bits, state_bits=state_bits, inputs=inputs
    )
    assert np.array_equal(weight.dequantize().numpy(), wanted)
    assert weight.nbytes == codes.nbytes + 2 * rows
    steps = unpack(weight.codes, bits)
    assert torch.equal(pack(steps, bits), weight.codes)
    assert states(steps, bits, state_bits).flatten(0, 1)[0].tolist() == bit_by_bit(
        codes[0, :size].tobytes(), bits, state_bits
    )


def test_computed_values_follow_the_rule() -> None:
    value = integer_values(2, 13)
    for state in (0, 1, 4095, 8191):
        hashed = (state * 3229014335 + 2605480817) % 2**32
        assert int(value[state]) == (sum(hashed.to_bytes(4, "little")) + 2) // 4 - 128


@pytest.mark.parametrize("shape", [(16, 16), (17, 3), (2, 40, 31)])
def test_tiles_and_back(shape: tuple[int, ...]) -> None:
    *stacked, rows, inputs = shape
    steps = torch.randn(*stacked, tiles_along(rows), tiles_along(inputs), STEPS)
    matrix = from_tiles(steps, rows, inputs)
    for row, column in product(range(rows), range(inputs)):
        place = row // TILE, column // TILE, TILE * (row % TILE) + column % TILE
        assert torch.equal(matrix[..., row, column], steps[(..., *place)])


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="no trellis code has 5 bits"):
        values(5, 10)
    with pytest.raises(ValueError, match=r"2\*\*7 states"):
        values(2, 7)
    with pytest.raises(ValueError, match="not rows of tiles of 64 bytes"):
        unpack(torch.zeros(2, 65, dtype=torch.uint8), 2)
    with pytest.raises(ValueError, match="codes of a trellis weight are"):
        TrellisWeight(
            codes=torch.zeros(1, 64, dtype=torch.uint8), scales=torch.ones(17).half(), bits=2, state_bits=8, inputs=16
        ).dequantize()


def cost(tile: np.ndarray, counts: np.ndarray, value: np.ndarray, bits: int, shared: int) -> float:
    """Least cost of the walks of one tile whose last state and first share `shared`, state by state."""
    points = len(value) >> bits
    costs = np.full(points, np.inf)
    costs[shared] = 0
    every = np.arange(len(value))
    for wanted, count in zip(tile, counts, strict=True):
        reached = costs[every % points] + count * (wanted - value) ** 2
        costs = np.array([reached[every >> bits == point].min() for point in range(points)])
    return float(costs[shared])


@pytest.mark.parametrize("bits", WALKED)
def test_walks_cost_the_least_of_those_that_close_where_they_do(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    tiles = torch.randn(18, STEPS, generator=generator)
    counts = torch.rand(2, STEPS, generator=generator) + 0.3
    value = values(bits, 8)
    codes, nearest = trellis.walks(tiles, value, bits, counts)
    found = states(codes, bits, 8)
    assert torch.equal(nearest, value[found.long()])
    for tile in (0, 17):  # of two groups of 16, and counts of their own
        weights = counts[tile // 9].double().numpy()
        own = float((weights * (tiles[tile] - nearest[tile]).double().numpy() ** 2).sum())
        shared = int(found[tile, -1]) >> bits
        least = cost(tiles[tile].double().numpy(), weights, value.double().numpy(), bits, shared)
        assert own == pytest.approx(least, rel=1e-5)


@pytest.mark.parametrize(("bits", "state_bits"), [(1, 9), (2, 8), (2, 11), (3, 10), (4, 8)])
def test_plain_torch_finds_the_same_walks(bits: int, state_bits: int) -> None:
    tiles = torch.randn(6, STEPS, generator=torch.Generator().manual_seed(bits))
    counts = torch.rand(3, STEPS, generator=torch.Generator().manual_seed(7)) + 0.3
    value = values(bits, state_bits)
    one, other = (form.walks(tiles, value, bits, counts)[1] for form in (trellis, trellis_device))
    weights = counts.repeat_interleave(2, 0)
    losses = [(weights * (tiles - nearest) ** 2).sum(1) for nearest in (one, other)]
    assert torch.allclose(*losses, rtol=1e-4)


@pytest.mark.parametrize(("bits", "most"), [(1, 0.30), (2, 0.082), (3, 0.0225), (4, 0.0062)])
def test_normal_weights_lose_less_than_on_any_scalar_grid(bits: int, most: float) -> None:
    """Lloyd-Max: .363, .1175, .0345, .0095; the bound 4^-k: .25, .0625, .0156, .0039."""
    tiles = torch.randn(256, STEPS, generator=torch.Generator().manual_seed(2)) * 1.125
    nearest = trellis.walks(tiles, values(bits, 8), bits)[1]
    assert float((tiles - nearest).square().mean()) / 1.125**2 < most


def problem(rows: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2, rows, inputs, generator=generator) * 0.02
    mixed = torch.randn(2, inputs, inputs, generator=generator) * torch.linspace(0.1, 2, inputs)
    return weight, mixed.mT @ mixed / inputs


def loss(weight: torch.Tensor, rounded: torch.Tensor, hessian: torch.Tensor) -> float:
    left = weight - rounded
    return float(((left @ hessian) * left).sum() / ((weight @ hessian) * weight).sum())


def test_feedback_pays_and_widths_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = problem(40, 300)  # neither is whole tiles
    factor = factorize(hessian)
    found = trellis_ldlq.quantize(weight, factor, hessian, [1, 2, 4, 8], 9)
    losses = [loss(weight, part.dequantize(), hessian) for part in found]
    assert all(part.nbytes == 2 * (3 * 19 * 32 * part.bits + 2 * 40) for part in found)
    flat = torch.eye(300).expand(2, -1, -1)
    plain = trellis_ldlq.quantize(weight, factorize(flat), flat, [1, 2, 4, 8], 9)
    for own, other in zip(losses, plain, strict=True):
        assert own < 0.85 * loss(weight, other.dequantize(), hessian)
    assert losses[0] > 3 * losses[1] > 20 * losses[2] > 2000 * losses[3]
    monkeypatch.setattr(trellis_ldlq, "ROWS_AT_ONCE", 16)  # a row of tiles of one expert at a time
    alone = trellis_ldlq.quantize(weight, factor, hessian, [2], 9)[0]
    assert torch.equal(alone.codes, found[1].codes)
    assert torch.equal(alone.scales, found[1].scales)


def test_blocks_prepared_at_once_give_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: by inverses of all whole blocks, here of a factor that is part of another one; but for rounding."""
    weight, hessian = problem(32, 72)
    factor = factorize(torch.cat([hessian.flip(0), hessian]))
    kept = {name: getattr(factor, name)[2:] for name in ("unit_upper", "pivots", "damping")}
    factor = replace(factor, **kept)
    wanted = trellis_ldlq.quantize(weight, factor, hessian, [2, 4], 8)
    monkeypatch.setattr(trellis_ldlq, "by_launches", lambda _device: True)
    for one, other in zip(wanted, trellis_ldlq.quantize(weight, factor, hessian, [2, 4], 8), strict=True):
        losses = [loss(weight, part.dequantize(), hessian) for part in (one, other)]
        assert losses[0] == pytest.approx(losses[1], rel=0.02)
        assert (one.codes == other.codes).float().mean() > 0.8


def test_fitted_scales_are_least_squares() -> None:
    weight, hessian = problem(8, 24)
    rounded = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(4)) * 0.02 + weight
    scale = torch.full((2, 8), 0.5).half()
    fitted = trellis_ldlq.fitted_scale(weight, rounded, scale, hessian, torch.zeros(2)).float()
    own = loss(weight, rounded * (fitted / 0.5).unsqueeze(-1), hessian)
    for change in (0.99, 1.01):
        assert own < loss(weight, rounded * (change * fitted / 0.5).unsqueeze(-1), hessian)


def test_one_token_does_not_make_the_scales_of_rows() -> None:
    weight = torch.randn(1, 512, 128, generator=torch.Generator().manual_seed(5)) * 0.02
    token = torch.randn(128, 1, generator=torch.Generator().manual_seed(6))
    hessian = (token @ token.T)[None]
    (one,) = trellis_ldlq.quantize(weight, factorize(hessian), hessian, [2], 8)
    left = one.dequantize() - weight
    assert float((left.square().sum(-1) / weight.square().sum(-1)).max()) < 1
