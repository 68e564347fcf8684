"""Divergences against plain sums in float64, and bounds of those of which not all is kept."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from moeq.numerics.divergence import Kept, keep_likeliest, kl_bounds, kl_divergence


def logprobs(tokens: int, vocabulary: int, seed: int, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1)


def plain(first: Tensor, second: Tensor) -> list[float]:
    """Sums one token after the other."""
    sums = []
    for p, q in zip(first.exp().numpy(), second.exp().numpy(), strict=True):
        there = p > 0
        sums.append(float(np.sum(p[there] * np.log(p[there] / q[there]))))
    return sums


def test_the_divergence_is_the_plain_sum() -> None:
    first, second = logprobs(20, 300, 0), logprobs(20, 300, 1)
    assert kl_divergence(first, second).tolist() == pytest.approx(plain(first, second), rel=1e-12)
    assert torch.equal(kl_divergence(first, first), torch.zeros(20, dtype=torch.float64))


def test_a_token_that_is_ruled_out_adds_nothing() -> None:
    first, second = (part[:, :7].log_softmax(-1) for part in (logprobs(3, 8, 2), logprobs(3, 8, 3)))
    out = torch.full((3, 1), -torch.inf, dtype=torch.float64)
    both = torch.cat([first, out], 1), torch.cat([second, out], 1)
    assert kl_divergence(*both).tolist() == pytest.approx(plain(first, second), rel=1e-12)
    least, most = kl_bounds(keep_likeliest(both[0], 2), both[1])
    known = keep_likeliest(first, 2)
    for found, wanted in zip((least, most), kl_bounds(known, second), strict=True):
        assert found.tolist() == pytest.approx(wanted.tolist(), rel=1e-12)
    most_kept = keep_likeliest(both[0], 7)  # what is beyond has no probability at all
    assert [part.tolist() for part in kl_bounds(most_kept, both[1])] == [pytest.approx(plain(first, second))] * 2


@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("kept", [1, 10, 200, 2999])
def test_the_true_divergence_lies_between_its_bounds(kept: int, noise: float) -> None:
    first = logprobs(30, 3000, 4)
    second = (first + noise * logprobs(30, 3000, 5, 1.0)).log_softmax(-1)
    true = torch.tensor(plain(first, second), dtype=torch.float64)
    least, most = kl_bounds(keep_likeliest(first, kept), second)
    assert bool((least <= true + 1e-12).all())
    assert bool((true <= most + 1e-12).all())
    if kept == 2999:
        assert torch.allclose(least, true, rtol=1e-9, atol=1e-12)
        assert torch.allclose(most, true, rtol=1e-9, atol=1e-12)


def test_more_that_is_kept_gives_narrower_bounds() -> None:
    first, second = logprobs(5, 2000, 6), logprobs(5, 2000, 7)
    found = [kl_bounds(keep_likeliest(first, kept), second) for kept in (10, 100, 1000)]
    for (least, most), (more, fewer) in pairwise(found):
        assert bool((least < more).all())
        assert bool((fewer < most).all())


def test_both_bounds_are_reached() -> None:
    """Below where the rest is spread alike in both; above where it all lies on what the second finds least likely."""
    second = torch.tensor([[0.3, 0.2, 0.2, 0.15, 0.1, 0.05]], dtype=torch.float64).log()
    alike = torch.tensor([[0.6, 0.2 * 0.4 / 0.7, 0.2 * 0.4 / 0.7, 0.06 / 0.7, 0.04 / 0.7, 0.02 / 0.7]]).double().log()
    least, most = kl_bounds(keep_likeliest(alike, 1), second)
    assert float(least) == pytest.approx(plain(alike, second)[0], rel=1e-6)
    assert float(most) > float(least) + 0.01
    spent = torch.tensor([[0.6, 0.0, 0.0, 0.05, 0.175, 0.175]], dtype=torch.float64).log()
    least, most = kl_bounds(keep_likeliest(spent, 1), second)
    assert float(most) == pytest.approx(plain(spent, second)[0], rel=1e-9)
    assert float(least) < float(most) - 0.01


def test_what_is_kept_is_what_there_is() -> None:
    first = logprobs(4, 50, 8)
    found = keep_likeliest(first, 6)
    assert isinstance(found, Kept)
    for row, p in enumerate(first.exp()):
        order = p.argsort(descending=True)
        assert found.ids[row].tolist() == order[:6].tolist()
        rest = p[order[6:]]
        assert float(found.rest[row]) == pytest.approx(float(rest.sum()))
        assert float(found.entropy[row]) == pytest.approx(-float((rest * rest.log()).sum()))
        assert float(found.largest[row]) == pytest.approx(float(rest[0]))
