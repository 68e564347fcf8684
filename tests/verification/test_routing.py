"""A near-tied router that chooses otherwise is no fault of a checkpoint; one that is loaded wrongly is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny
from torch import Tensor
from verification.tampering import edit

from moeq.numerics.divergence import kl_divergence
from moeq.progress import Reporter
from moeq.verification import logits as compared
from moeq.verification import probe
from moeq.verification.logits import compare_logits
from moeq.verification.verify import Options, Verdict, verify

ROUTER = "model.layers.{}.mlp.gate"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which every layer's router scores two experts alike."""
    model = save_tiny(tmp_path_factory.mktemp("tied") / "qwen", "qwen3_moe")

    def tie(tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            tensors[f"{ROUTER.format(layer)}.weight"][4] = tensors[f"{ROUTER.format(layer)}.weight"][2]

    edit(model / "model.safetensors", tie)
    return model


def check(model: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], object], layer: int = 0) -> Verdict:
    """Verify with a target whose router of one layer [E, H] is changed."""
    honest = probe.load

    def load(request: dict[str, Any]) -> Any:
        loaded, said = honest(request)
        with torch.no_grad():
            change(loaded.get_submodule(ROUTER.format(layer)).weight)
        return loaded, said

    monkeypatch.setattr(probe, "load", load)
    return verify(model, Options(), Reporter(quiet=True))


@pytest.mark.cases(1)
@pytest.mark.parametrize("layer", [0, 1])
def test_the_other_of_two_equals(tied: Path, monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
    """Whichever of the two the processor's rounding chooses, a nudge up or one down makes it the other."""
    ties = 0
    for nudge in (1 + 1e-6, 1 - 1e-6):
        verdict = check(tied, monkeypatch, lambda router, nudge=nudge: router[4].mul_(nudge), layer)
        assert not verdict.problems
        assert verdict.logits_error < verdict.tolerance
        assert verdict.kl <= verdict.most_kl
        ties += verdict.ties
    assert ties > 0
    plain = check(tied, monkeypatch, lambda router: None)
    assert plain.logits_error < 1e-5


def test_a_router_that_is_another(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = check(tied, monkeypatch, lambda router: router[0].mul_(1.5))
    assert verdict.problems[0].startswith("model.layers.0.mlp.experts: its router chooses other experts for ")


def test_a_router_that_is_off_by_little(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of the same experts: the positions that no tie touched are off."""
    verdict = check(tied, monkeypatch, lambda router: router.mul_(1.05))
    assert any(problem.startswith("logits are off") for problem in verdict.problems)


def logits(seed: int) -> Tensor:
    return torch.randn(2, 24, 500, generator=torch.Generator().manual_seed(seed))


def test_logits_of_touched_positions_are_left_out() -> None:
    wanted, clean = logits(0), torch.ones(2, 24, dtype=torch.bool)
    off = wanted * (1 + 1e-4)
    off[1, 20:] = logits(1)[1, 20:]
    assert compare_logits(off, wanted, clean, 2e-3).error > 0.1
    assert compare_logits(off, wanted, clean, 2e-3).kl > compare_logits(off, wanted, clean, 2e-3).most
    clean[1, 20:] = False
    found = compare_logits(off, wanted, clean, 2e-3)
    assert found.error == pytest.approx(1e-4, rel=1e-2)
    assert found.kl <= found.most


def test_logits_whose_routers_are_not_known_are_judged_by_half() -> None:
    wanted = logits(0)
    off = wanted.clone()
    off[0, :20] = logits(1)[0, :20]
    assert compare_logits(off, wanted, None, 2e-3).error == 0
    off[1, :20] = logits(1)[1, :20]
    assert compare_logits(off, wanted, None, 2e-3).error > 0.1


def test_one_logit_that_is_far_off_moves_the_probabilities() -> None:
    """Of a large vocabulary it is little of the norm."""
    wanted = torch.zeros(1, 1, 1 << 20).uniform_(-1, 1, generator=torch.Generator().manual_seed(2))
    wanted[0, 0, 5] = 8
    off = wanted.clone()
    off[0, 0, 5] -= 1.1
    found = compare_logits(off, wanted, torch.ones(1, 1, dtype=torch.bool), 2e-3)
    assert found.error < 2e-3
    assert found.kl > found.most


def test_few_logits_are_float64_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export of 1.5 million words took 4.7 GB for it."""
    wanted, clean = logits(0), torch.rand(2, 24, generator=torch.Generator().manual_seed(3)) > 0.4
    found = compare_logits(logits(1), wanted, clean, 2e-3)
    seen: list[int] = []

    def divergence(first: Tensor, second: Tensor) -> Tensor:
        seen.append(first.numel())
        return kl_divergence(first, second)

    monkeypatch.setattr(compared, "kl_divergence", divergence)
    monkeypatch.setattr(compared, "SLICE", 3500)
    assert compare_logits(logits(1), wanted, clean, 2e-3) == found
    assert (max(seen), sum(seen)) == (3500, wanted.numel())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(value: float) -> None:
    wanted, clean = logits(0), torch.ones(2, 24, dtype=torch.bool)
    off = wanted.clone()
    off[0, 3, 7] = value
    assert compare_logits(off, wanted, clean, 2e-3).error == float("inf")
