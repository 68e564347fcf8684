"""Codes, scales and zero points of a grid that are learned together.

A weight has a position u on its grid, its group a scale s and a zero point z, both stored ones in every step: its value
is (round(u) - z)*s. Rounding is straight-through (Bengio et al., arXiv 1308.3432): u is a code's relaxed choice among
all codes. Unlike in SignRound's rounding (`trained_grid.py`) a code does not hang on the scale nor on the weight that
it began with, so that scales grow as well as shrink, and codes go as far as the loss asks. Every step is Adam's (Kingma
and Ba, arXiv 1412.6980). Deviation: the second moment of positions is the mean over a group, so that weights that
hardly count stay where they are; and nothing is kept between steps but u and its first moment.

As in GSQ (arXiv 2604.18556) codes and scales are learned together, from GPTQ's. Its relaxation, values softened
between neighbouring codes at a falling temperature, is worse in as many steps (benchmarks/RESULTS.md).

Letters: E experts, N output rows, G groups, g inputs of a group; K inputs, G*g - K of them padding (zeros).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moeq.numerics.gptq import Quantized
from moeq.quantizers.trained_grid import START_MARGIN, State, grouped
from moeq_kernels.grids import inverse_scale, storable

FIRST, SECOND = 0.9, 0.99  # what the moments keep of themselves in a step
TINY = 1e-20  # gradients have no unit
REACH = 2.0  # codes that a position would come at the first step's rate; it falls as a cosine does, to zero
SCALE_REACH = 1.0  # the same of a scale's logarithm, up to 2 bits; then less, since a scale moves all its codes
SCALE_TOP = 3.0  # the largest code of 2 bits
MAX_RATE = 0.05  # of short trainings


class LearnedCodes:
    """One matrix of E experts at one width, trained a step at a time."""

    def __init__(self, weight: Tensor, start: Quantized, bits: int, symmetric: bool, iterations: int) -> None:
        """weight: [E, N, K] float32; start: codes and grids (`bits` among its widths) that the first rounding gives."""
        width = start.bits.index(bits)
        self.top = 2.0**bits - 1
        self.inputs = weight.shape[-1]
        self._iterations, self._step = iterations, 0
        self._base = start.scale[:, width].unsqueeze(-1).float()  # [E, N, G, 1]
        self._zero_at = start.zero[:, width].unsqueeze(-1).float().clone()
        codes = grouped(start.codes[:, width].float(), start.group_size)
        self.at = grouped(weight, start.group_size).mul(inverse_scale(self._base)).add_(self._zero_at)
        inside = 0.5 - START_MARGIN  # in its code's cell, as near to the weight as it may be
        torch.minimum(torch.maximum(self.at, codes - inside, out=self.at), codes + inside, out=self.at)
        self.at.clamp_(0, self.top)
        self.log_scale = torch.zeros_like(self._base)
        self._fixed_zero = symmetric or bits == 1
        self._moments = _Moments(self.at), _Moments(self.log_scale), _Moments(self._zero_at)
        self.scale = self._base
        self.zero = self._zero_at
        self._distance = torch.empty(0)

    def round(self) -> Tensor:
        """The values [E, N, K] that the positions, scales and zero points give; also what `step` is about."""
        self.scale = storable(self._base * self.log_scale.exp()) if self._step else self._base
        self.zero = self._zero_at if self._fixed_zero else self._zero_at.round()
        self._distance = self.at.round().sub_(self.zero)
        return (self._distance * self.scale).flatten(-2)[..., : self.inputs]

    def step(self, gradient: Tensor) -> None:
        """Move everything against the loss's gradient in the rounded values, [E, N, K]."""
        gradient = grouped(gradient, self._distance.shape[-1])
        left = 0.5 * (1 + math.cos(math.pi * min(1, self._step / self._iterations)))
        self._step += 1
        at, scale, zero = self._moments
        of_scale = (gradient * self._distance).sum(-1, keepdim=True) * self.scale
        of_codes = gradient * self.scale
        of_zero = -of_codes.sum(-1, keepdim=True)
        rate = self._rate(REACH) * left
        at.step(of_codes, rate).clamp_(0, self.top)
        scale.step(of_scale, self._rate(SCALE_REACH) * min(1, SCALE_TOP / self.top) * left)
        if not self._fixed_zero:
            zero.step(of_zero, rate).clamp_(0, self.top)

    def _rate(self, reach: float) -> float:
        return min(MAX_RATE, reach / self._iterations)

    def state(self) -> State:
        """Codes and grids that the last `round` gave."""
        codes = (self._distance + self.zero).flatten(-2)[..., : self.inputs].to(torch.uint8)
        return codes, self.scale.squeeze(-1), self.zero.expand_as(self.scale).squeeze(-1)


class LearnedScales:
    """As `LearnedCodes`, but codes and zero points stay: scales alone are trained, of grids or of what stands for
    values at scale 1, such as trellis codes."""

    def __init__(self, weight: Tensor, start: Quantized, bits: int, symmetric: bool, iterations: int) -> None:
        """weight: [E, N, K], which tells the shape alone; start: `bits` among its widths."""
        width = start.bits.index(bits)
        self.inputs = weight.shape[-1]
        self._iterations, self._step = iterations, 0
        self._codes, self._zero = start.codes[:, width], start.zero[:, width].float()
        self._base = start.scale[:, width].unsqueeze(-1).float()  # [E, N, G, 1]
        self._distance = grouped(self._codes.float(), start.group_size) - self._zero.unsqueeze(-1)
        self.log_scale = torch.zeros_like(self._base)
        self._moments = _Moments(self.log_scale)
        self.scale = self._base

    def round(self) -> Tensor:
        """The values [E, N, K] that the scales give; also what `step` is about."""
        self.scale = storable(self._base * self.log_scale.exp()) if self._step else self._base
        return (self._distance * self.scale).flatten(-2)[..., : self.inputs]

    def step(self, gradient: Tensor) -> None:
        """Move the scales against the loss's gradient in the rounded values, [E, N, K]."""
        gradient = grouped(gradient, self._distance.shape[-1])
        left = 0.5 * (1 + math.cos(math.pi * min(1, self._step / self._iterations)))
        self._step += 1
        of_scale = (gradient * self._distance).sum(-1, keepdim=True) * self.scale
        self._moments.step(of_scale, min(MAX_RATE, SCALE_REACH / self._iterations) * left)

    def state(self) -> State:
        """Codes as they were, and the grids that the last `round` gave."""
        return self._codes, self.scale.squeeze(-1), self._zero


class _Moments:
    """Adam's two moments of what it moves, [E, N, G, g]: the second one for a group, [E, N, G, 1]."""

    def __init__(self, moved: Tensor) -> None:
        self._moved, self._steps = moved, 0
        self._mean, self._square = torch.zeros_like(moved), torch.zeros_like(moved[..., :1])

    def step(self, gradient: Tensor, rate: float) -> Tensor:
        """Move against the gradient; what was moved."""
        self._steps += 1
        self._mean.lerp_(gradient, 1 - FIRST)
        self._square.lerp_(gradient.square().mean(-1, keepdim=True), 1 - SECOND)
        size = (self._square / (1 - SECOND**self._steps)).sqrt_().add_(TINY)
        return self._moved.addcdiv_(self._mean, size, value=-rate / (1 - FIRST**self._steps))
