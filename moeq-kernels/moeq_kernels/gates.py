"""Gates that runtimes know by their numbers, and kernels do not compute in the same pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moeq_kernels.parts import GATE, UP


def clamped(limit: float, alpha: float, beta: float, parts: Mapping[str, Tensor]) -> Tensor:
    """(up + beta) * gate * sigmoid(alpha * gate) of gate and up [P, I], neither beyond the limit -> [P, I]."""
    gate, up = parts[GATE].clamp(max=limit), parts[UP].clamp(-limit, limit)
    return (up + beta) * gate * torch.sigmoid(alpha * gate)
