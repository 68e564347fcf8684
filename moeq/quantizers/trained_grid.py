"""Rounding that can be trained: an offset for every weight, and a clip for each end of every group's grid.

A weight w gets the code clamp(round(w/s + z + v), 0, top) with s = (high*a - low*b)/top and z = round(-low*b/s): v is
its offset, a and b are its group's clips, low and high the ends of the grid that training starts from (Cheng et al.,
arXiv 2309.05516, equations 3 and 4). Rounding is straight-through in the gradients, which are written by hand: a few
passes over the weights, nothing kept between steps but v, a and b. Deviations: a grid with a fixed zero point
(symmetric, and the sign grid of 1 bit) has one clip, s = scale*a; scales are rounded to float16 in every step, as they
will be stored.

Letters: E experts, N output rows, G groups, g inputs of a group; K inputs, G*g - K of them padding (zeros).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from moeq.numerics.gptq import Quantized
from moeq_kernels.grids import inverse_scale, storable
from moeq_kernels.widths import group_count, resolved_group_size

MAX_OFFSET = 0.5
START_MARGIN = 0.1  # of a code: nearer the edges of their cells, weights would leave the start in the first steps
CLIP_RANGE = (0.0, 1.0)  # of the ends that the start has


State = tuple[Tensor, Tensor, Tensor]  # codes uint8 [E, N, K], scale and zero [E, N, G]


class TrainedGrid:
    """The rounding of one matrix of E experts at one width, trained a step at a time."""

    def __init__(self, weight: Tensor, start: Quantized, bits: int, symmetric: bool) -> None:
        """weight: [E, N, K] float32; start: codes and grids (`bits` among its widths) that the first rounding gives.

        Offsets stay within half a code of zero, or of where they begin if that is further.
        """
        width = start.bits.index(bits)
        self.top = 2.0**bits - 1
        self.inputs = weight.shape[-1]
        self.weight = grouped(weight, start.group_size)
        scale, zero = (part[:, width].unsqueeze(-1).float() for part in (start.scale, start.zero))  # [E, N, G, 1]
        self.fixed_zero = symmetric or bits == 1
        self.base = scale
        self.zero = zero
        self.low, self.high = -zero * scale, (self.top - zero) * scale
        self.low_clip, self.high_clip = torch.ones_like(scale), torch.ones_like(scale)
        self._fit()
        self.offset = self._first_offset(grouped(start.codes[:, width].float(), start.group_size))
        self._least = (self.offset - MAX_OFFSET).clamp_(max=-MAX_OFFSET)
        self._most = (self.offset + MAX_OFFSET).clamp_(min=MAX_OFFSET)
        self._codes = self._distance = self._outside = torch.empty(0)
        self.round()

    def _fit(self) -> None:
        """Scale and zero point of the clips as they are."""
        if self.fixed_zero:
            self.scale = storable(self.base * self.high_clip)
        else:
            low, high = self.low * self.low_clip, self.high * self.high_clip
            self.scale = storable((high - low) / self.top)
            self.zero = (-low * inverse_scale(self.scale)).round_().clamp_(0, self.top)
        self.inverse = inverse_scale(self.scale)

    def _first_offset(self, codes: Tensor) -> Tensor:
        """The smallest offsets that put every weight into the cell of its code, START_MARGIN from the edge at least."""
        exact = torch.addcmul(self.zero, self.weight, self.inverse)
        inside = 0.5 - START_MARGIN
        least = torch.where(codes > 0, codes - inside, -torch.inf)
        most = torch.where(codes < self.top, codes + inside, torch.inf)
        return torch.minimum(torch.maximum(exact, least), most).sub_(exact)

    def round(self) -> Tensor:
        """The values [E, N, K] that the offsets and clips give; also what `step` and `state` are about."""
        self._fit()
        rounded = torch.addcmul(self.offset, self.weight, self.inverse).add_(self.zero).round_()
        self._codes = rounded.clamp(0, self.top)
        self._outside = rounded != self._codes
        self._distance = torch.sub(self._codes, self.zero, out=rounded)
        return (self._distance * self.scale).flatten(-2)[..., : self.inputs]

    def step(self, gradient: Tensor, rate: float, clip_rate: float) -> None:
        """Move offsets and clips against the sign of the loss's gradient in the rounded values, [E, N, K]."""
        gradient = grouped(gradient, self.weight.shape[-1])
        scale_gradient = (gradient * self._distance).sum(-1, keepdim=True)
        total = gradient.sum(-1, keepdim=True)
        inside = gradient.masked_fill(self._outside, 0.0)
        scale_gradient -= (inside * self.weight).sum(-1, keepdim=True) * self.inverse
        zero_gradient = (inside.sum(-1, keepdim=True) - total) * self.scale  # where clamped: the value is (end - z)*s
        self._step_clips(scale_gradient, zero_gradient, clip_rate)
        if self.fixed_zero:
            inside *= self.scale  # may be negative
        self.offset.sub_(inside.sign_(), alpha=rate)
        torch.minimum(torch.maximum(self.offset, self._least, out=self.offset), self._most, out=self.offset)

    def _step_clips(self, scale_gradient: Tensor, zero_gradient: Tensor, rate: float) -> None:
        if self.fixed_zero:
            self.high_clip.sub_((scale_gradient * self.base).sign_(), alpha=rate).clamp_(*CLIP_RANGE)
            return
        low = self.low * self.low_clip
        scale_gradient = scale_gradient + zero_gradient * low * self.inverse.square()  # z = -low/s
        low_gradient = -scale_gradient / self.top - zero_gradient * self.inverse
        self.high_clip.sub_((scale_gradient * self.high).sign_(), alpha=rate).clamp_(*CLIP_RANGE)
        self.low_clip.sub_((low_gradient * self.low).sign_(), alpha=rate).clamp_(*CLIP_RANGE)

    def state(self) -> State:
        """What the last `round` gave."""
        codes = self._codes.flatten(-2)[..., : self.inputs].to(torch.uint8)
        return codes, self.scale.squeeze(-1), self.zero.expand_as(self.scale).squeeze(-1)


def grouped(matrix: Tensor, group_size: int) -> Tensor:
    """[E, N, K] as [E, N, G, g], zeros behind the last inputs."""
    inputs = matrix.shape[-1]
    group, groups = resolved_group_size(inputs, group_size), group_count(inputs, group_size)
    missing = groups * group - inputs
    whole: Tensor = pad(matrix, (0, missing)) if missing else matrix
    return whole.unflatten(-1, (groups, group))  # type: ignore[no-any-return]


def quantized(states: Sequence[State], bits: Sequence[int], group_size: int) -> Quantized:
    """One matrix's states at some widths as one batch."""
    codes, scale, zero = (torch.stack(parts, 1) for parts in zip(*states, strict=True))
    return Quantized(codes=codes, scale=scale, zero=zero, bits=tuple(bits), group_size=group_size)


def select(batch: Quantized, which: slice | list[int] | tuple[slice, ...]) -> Quantized:
    """Some of a batch's experts, or of their widths and rows."""
    return replace(batch, codes=batch.codes[which], scale=batch.scale[which], zero=batch.zero[which])


def join(parts: Sequence[Quantized]) -> Quantized:
    """Batches of experts one after the other."""
    codes, scale, zero = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scale", "zero"))
    return replace(parts[0], codes=codes, scale=scale, zero=zero)
