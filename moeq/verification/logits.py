"""How far a target's logits are from the reference's, by measures that a near-tied router does not decide."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.numerics.divergence import kl_divergence
from moeq.verification.reference import relative


@dataclass(frozen=True, kw_only=True)
class Logits:
    """error: relative, of the positions that no tie touched, or of the median position where that is larger; kl, most:
    mean divergence of the same positions' probabilities, nats, and what it is at most within the tolerance."""

    error: float
    kl: float
    most: float


def compare_logits(logits: Tensor, wanted: Tensor, clean: Tensor | None, tolerance: float) -> Logits:
    """Compare logits [B, S, V], or [B, V]; clean: positions [B, S] to be equal; None: half of all, whichever they are.

    Errors of at most a = tolerance * max|z| in every logit z move the divergence by at most a**2 / 2: it is a Bregman
    divergence of the log-sum-exp, whose second derivative along the errors is a variance within a range of 2 a.
    """
    positions, exact = (part.double().flatten(0, -2) for part in (logits, wanted))
    sizes = exact.norm(dim=-1)
    errors = (positions - exact).norm(dim=-1) / torch.where(sizes > 0, sizes, 1.0)
    divergences = kl_divergence(exact.log_softmax(-1), positions.log_softmax(-1))
    bounds = (tolerance * exact.abs().amax(-1)) ** 2 / 2
    chosen = torch.ones(len(exact), dtype=torch.bool) if clean is None else _positions(clean, len(exact))
    if clean is None or not bool(chosen.any()):
        error, kl, most = (float(part.median()) for part in (errors, divergences, bounds))
    else:
        error = max(relative(positions[chosen], exact[chosen]), float(errors.median()))
        kl, most = (float(part[chosen].mean()) for part in (divergences, bounds))
    return Logits(error=_finite(error), kl=_finite(kl), most=most)


def typical(logits: Tensor, wanted: Tensor) -> float:
    """The median of the positions' relative errors [B, S, V]: what is loaded wrongly changes all."""
    return compare_logits(logits, wanted, None, 1.0).error


def _positions(clean: Tensor, count: int) -> Tensor:
    """Positions [count] to be equal; of a model that gives one row of logits for all positions, its rows."""
    return clean.flatten() if clean.numel() == count else clean.all(-1)


def _finite(figure: float) -> float:
    return figure if math.isfinite(figure) else math.inf
