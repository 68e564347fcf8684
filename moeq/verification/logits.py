"""How far a target's logits are from the reference's, by measures that a near-tied router does not decide."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.numerics.divergence import kl_divergence

SLICE = 1 << 20  # logits that are float64 at once


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
    rows = max(1, SLICE // wanted.shape[-1])
    parts = zip(*(part.flatten(0, -2).split(rows) for part in (logits, wanted)), strict=True)
    columns = zip(*(_compared(positions.double(), exact.double()) for positions, exact in parts), strict=True)
    differences, sizes, divergences, largest = map(torch.cat, columns)
    errors, bounds = differences / torch.where(sizes > 0, sizes, 1.0), (tolerance * largest) ** 2 / 2
    chosen = torch.ones(len(sizes), dtype=torch.bool) if clean is None else _positions(clean, len(sizes))
    if clean is None or not bool(chosen.any()):
        error, kl, most = (float(part.median()) for part in (errors, divergences, bounds))
    else:
        error = max(float(differences[chosen].norm()) / (float(sizes[chosen].norm()) or 1.0), float(errors.median()))
        kl, most = (float(part[chosen].mean()) for part in (divergences, bounds))
    return Logits(error=_finite(error), kl=_finite(kl), most=most)


def _compared(positions: Tensor, exact: Tensor) -> tuple[Tensor, ...]:
    """Of logits [T, V]: the size of their differences, that of the exact ones, the divergence, the largest logit."""
    divergences = kl_divergence(exact.log_softmax(-1), positions.log_softmax(-1))
    return (positions - exact).norm(dim=-1), exact.norm(dim=-1), divergences, exact.abs().amax(-1)


def _positions(clean: Tensor, count: int) -> Tensor:
    """Positions [count] to be equal; of a model that gives one row of logits for all positions, its rows."""
    return clean.flatten() if clean.numel() == count else clean.all(-1)


def _finite(figure: float) -> float:
    return figure if math.isfinite(figure) else math.inf
