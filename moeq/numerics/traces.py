"""Traces of the Hessian of the Frobenius norm of a matrix, MoPEQ's sensitivity (paper 003, section 3.3, Algorithm 1).

Letters: N output rows, K inputs of a matrix.

L(W) = ||W||_F has the gradient W/||W|| and the Hessian (I - u u^T)/||W|| with u = vec(W)/||W||, whose trace is
(n - 1)/||W|| for n weights: the sampling of Algorithm 1 estimates what is known exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Distribution = Literal["rademacher", "gaussian"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """mean: of the samples; error: standard error of the mean (infinite for one sample)."""

    mean: float
    error: float


def closed_form(weight: Tensor) -> float:
    """(n - 1)/||W||_F of a matrix [N, K], in float64; 0 for one of zeros, whose norm has no Hessian."""
    norm = float(torch.linalg.vector_norm(weight, dtype=torch.float64))
    return (weight.numel() - 1) / norm if norm > 0 else 0.0


def hutchinson(weight: Tensor, samples: int, distribution: Distribution, generator: torch.Generator) -> Estimate:
    """Algorithm 1 on a matrix [N, K]: the mean of v^T H v over random v, in float64, with Hessian-vector products from
    automatic differentiation.

    v is drawn from {-1, 1} or from the normal distribution by a generator on the CPU. 0 for a matrix of zeros.
    """
    point = weight.detach().double().requires_grad_()
    if not bool(point.any()):
        return Estimate(mean=0.0, error=0.0)
    products = []
    for _ in range(samples):
        if distribution == "rademacher":
            vector = torch.randint(0, 2, point.shape, generator=generator, dtype=torch.float64) * 2 - 1
        else:
            vector = torch.randn(point.shape, generator=generator, dtype=torch.float64)
        vector = vector.to(point.device)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(point.norm(), point, create_graph=True)
            (product,) = torch.autograd.grad((gradient * vector).sum(), point)
        products.append(float((vector * product).sum()))
    values = torch.tensor(products, dtype=torch.float64)
    error = float(values.std()) / math.sqrt(samples) if samples > 1 else math.inf
    return Estimate(mean=float(values.mean()), error=error)
