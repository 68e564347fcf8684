"""Codes and grids learned together: the start, gradients, how far codes and scales go, what is stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeq.numerics import gptq
from moeq.numerics.gptq import Quantized
from moeq.numerics.storing import packed_of
from moeq.quantizers import learned_codes
from moeq.quantizers.learned_codes import LearnedCodes
from moeq.quantizers.trained_grid import quantized
from moeq_kernels.grids import decode

EXPERTS, ROWS, INPUTS, GROUP = 2, 6, 40, 16
STEPS = 200


def matrix(seed: int = 0) -> Tensor:
    return 0.3 * torch.randn(EXPERTS, ROWS, INPUTS, generator=torch.Generator().manual_seed(seed))


def rounded(weight: Tensor, bits: int, symmetric: bool = False) -> Quantized:
    return gptq.quantize(weight, None, bits=[bits], group_size=GROUP, symmetric=symmetric)


def fitted(learned: LearnedCodes, wanted: Tensor, steps: int = STEPS) -> Tensor:
    """Trained on the squared distance to other values; what comes of it."""
    for _ in range(steps):
        learned.step(2 * (learned.round() - wanted))
    return learned.round()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_first_rounding_is_the_start_and_the_start_stays_as_it_is(bits: int, symmetric: bool) -> None:
    weight = matrix()
    start = rounded(weight, bits, symmetric)
    start.codes[:] = (start.codes.float() + 2 * torch.rand(start.codes.shape) - 1).round().clamp(0, 2**bits - 1)
    kept = [part.clone() for part in (start.codes, start.scale, start.zero)]
    learned = LearnedCodes(weight, start, bits, symmetric, STEPS)
    values = learned.round()
    assert torch.equal(values, decode(kept[0][:, 0], kept[1][:, 0], kept[2][:, 0], GROUP))
    for found, part in zip(learned.state(), kept, strict=True):
        assert torch.equal(found, part[:, 0])
    fitted(learned, matrix(1), 5)
    assert all(torch.equal(a, b) for a, b in zip(kept, (start.codes, start.scale, start.zero), strict=True))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_what_is_learned_can_be_stored(bits: int, symmetric: bool) -> None:
    start = rounded(matrix(), bits, symmetric)
    learned = LearnedCodes(matrix(), start, bits, symmetric, STEPS)
    before = learned.round()
    wanted = 1.5 * matrix(1)
    values = fitted(learned, wanted)
    assert float((values - wanted).square().mean()) < 0.6 * float((before - wanted).square().mean())
    stored = packed_of(quantized([learned.state()], [bits], GROUP), bits, symmetric)
    assert torch.equal(stored.dequantize(), values)
    if symmetric or bits == 1:
        assert torch.equal(learned.state()[2], start.zero[:, 0])


def test_a_scale_grows_and_its_codes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As clips cannot."""
    monkeypatch.setattr(learned_codes, "REACH", 0)
    start = rounded(matrix(), 2)
    learned = LearnedCodes(matrix(), start, 2, False, STEPS)
    fitted(learned, 1.4 * learned.round())
    codes, scale, zero = learned.state()
    assert torch.equal(codes, start.codes[:, 0])
    assert torch.equal(zero, start.zero[:, 0])
    torch.testing.assert_close(scale, 1.4 * start.scale[:, 0], rtol=0.02, atol=0)


def test_codes_go_further_than_their_neighbours_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every code to the one beside it, the grid as it is."""
    monkeypatch.setattr(learned_codes, "SCALE_REACH", 0)
    start = rounded(matrix(), 2, symmetric=True)
    learned = LearnedCodes(matrix(), start, 2, True, STEPS)
    beside = (start.codes[:, 0].float() + 1).where(start.codes[:, 0] < 3, start.codes[:, 0].float() - 1)
    fitted(learned, decode(beside.to(torch.uint8), start.scale[:, 0], start.zero[:, 0], GROUP))
    right = learned.state()[0] == beside.to(torch.uint8)
    assert float(right.float().mean()) > 0.95
    assert torch.equal(learned.state()[1], start.scale[:, 0])


@pytest.mark.parametrize("symmetric", [False, True])
def test_gradients_by_hand_are_those_of_straight_through_rounding(symmetric: bool) -> None:
    learned = LearnedCodes(matrix(), rounded(matrix(), 3, symmetric), 3, symmetric, STEPS)
    fitted(learned, matrix(1), 20)
    learned.round()
    at, log_scale = (part.double().clone().requires_grad_() for part in (learned.at, learned.log_scale))
    zero = learned.zero.double().clone().requires_grad_()
    base = learned.scale.double() / log_scale.detach().exp()
    values = ((at + (at.round() - at).detach()) - zero) * base * log_scale.exp()
    gradient = torch.randn(EXPERTS, ROWS, INPUTS, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad((values.flatten(-2)[..., :INPUTS] * gradient).sum(), (at, log_scale, zero))
    asked: list[Tensor] = []
    for moments in learned._moments:
        moments.step = lambda found, rate, moved=moments._moved: (asked.append(found), moved.clone())[1]  # type: ignore
    learned.step(gradient)
    assert len(asked) == (2 if symmetric else 3)
    for found, of in zip(asked, wanted, strict=False):
        torch.testing.assert_close(found.double(), of, rtol=1e-4, atol=1e-5)


def test_no_gradient_moves_nothing() -> None:
    start = rounded(matrix(), 2)
    learned = LearnedCodes(matrix(), start, 2, False, STEPS)
    before = learned.round().clone()
    for _ in range(5):
        learned.step(torch.zeros_like(before))
        assert torch.equal(learned.round(), before)
