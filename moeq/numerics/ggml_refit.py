"""Grids in short groups in the blocks of llama.cpp's k-quants, whose scales are whole multiples of one float16 a block.

Where `ggml.encode` holds a grid exactly, groups are as long as a block. Here a block of 256 weights has several groups:
the multiples of its scales (and of what is taken off) nearest to the grid's are sought, and the grid's values rounded
to nearest on what comes out. Zero points where the type has none (3, 6 and 8 bits) widen the step as far as the codes
need; a group that lies one code to the other side is turned by a negative scale. How far the values are moved is for
the caller to measure (`ggml.decode`, `matrix_error.relative_error`).

The blocks: ggml/src/ggml-common.h of llama.cpp. Letters: N output rows, K inputs, B blocks a row, R groups of g weights
a block, L bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.numerics.ggml import across, halves, quarters
from moeq.numerics.ggml_types import NEAREST, RUNS, TYPES
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import unpack
from moeq_kernels.widths import resolved_group_size

AFFINE = {"Q2_K": 15, "Q4_K": 63, "Q5_K": 63}  # the largest multiple of a scale, and of what is taken off
SIGNED = {"Q3_K": 31, "Q6_K": 127, "Q8_0": 1}  # the same, of either sign
RUN = {name: RUNS[grid] for grid, name in NEAREST.items()}  # weights that share a multiple
TRIED = 16  # divisors of a block's largest scale, beside powers of two


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """A weight in groups that divide blocks: codes [N, B, R, g], scales and zero points [N, B, R, 1], float32."""

    name: str
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    top: int

    @property
    def values(self) -> Tensor:
        """Float32 [N, B, R, g]."""
        return (self.codes - self.zeros) * self.scales


def refit(weight: PackedWeight) -> tuple[str, Tensor]:
    """The type that comes nearest to one weight [N, K] at its width, and its blocks, uint8 [N, L].

    ValueError where there is none, or where rows or groups are no multiples of its blocks and runs (`RUNS`).
    """
    grouped = _grouped(weight)
    encode = _affine if grouped.name in AFFINE else _signed
    return grouped.name, torch.cat([part.to(torch.uint8) for part in encode(grouped)], -1).flatten(1)


def _grouped(weight: PackedWeight) -> Grouped:
    grid = (weight.bits, weight.zeros is None)
    name = NEAREST.get(grid)
    if (name not in AFFINE and name not in SIGNED) or (weight.nested and weight.bits < 4):
        more = "" if weight.zeros is None else " with zero points"
        raise ValueError(f"no type of ggml comes near {'nested ' * weight.nested}{weight.bits} bits{more}")
    length, run, rows = TYPES[name].length, RUNS[grid], weight.codes.shape[-2]
    group = resolved_group_size(weight.inputs, weight.group_size)
    if weight.inputs % length or group % run:
        raise ValueError(
            f"{weight.inputs} inputs in groups of {group} are no multiples of the {length} and {run} of {name}"
        )
    size = group if length % group == 0 else run
    codes = unpack(weight.codes, weight.bits, weight.inputs).view(rows, -1, length // size, size).float()
    of_group = torch.arange(weight.inputs // size) * size // group
    scales = weight.scales.float()[:, of_group].view(*codes.shape[:-1], 1)
    zeros = torch.full_like(scales, 2 ** (weight.bits - 1))
    if weight.zeros is not None:
        zeros = unpack(weight.zeros, weight.bits, weight.scales.shape[-1])[:, of_group].view_as(scales).float()
    return Grouped(name=name, codes=codes, scales=scales, zeros=zeros, top=2**weight.bits - 1)


def _affine(grid: Grouped) -> list[Tensor]:
    """The parts of blocks whose values are d * s * q - m * t, with s and t of few bits."""
    turned = grid.scales < 0
    codes = torch.where(turned, grid.top - grid.codes, grid.codes)
    scales = grid.scales.abs()[..., 0]
    zeros = torch.where(turned, grid.top - grid.zeros, grid.zeros)[..., 0]
    count, sums, squares = float(codes.shape[-1]), codes.sum(-1), codes.square().sum(-1)
    limit = AFFINE[grid.name]

    def error(d: Tensor, up: Tensor, m: Tensor, down: Tensor) -> Tensor:
        """What a block's values are off, squared, codes as they are."""
        off, least = d * up - scales, m * down - scales * zeros
        return (off.square() * squares - 2 * off * least * sums + count * least.square()).sum(-1, keepdim=True)

    spread = squares - sums.square() / count  # which what is taken off cannot make good
    free_d, free_up = multiples(scales, spread, limit)
    taken = (scales * zeros + (free_d * free_up - scales) * sums / count).clamp(min=0)  # its multiples have no sign
    free_m, free_down = multiples(taken, torch.ones(()), limit)
    tied_d, tied_up = multiples(scales, squares - 2 * zeros * sums + count * zeros.square(), limit)
    tied_m = (tied_d * zeros[..., :1]).half().float()  # exact where the groups of a block have one zero point
    tied = error(tied_d, tied_up, tied_m, tied_up) <= error(free_d, free_up, free_m, free_down)
    d, up = torch.where(tied, tied_d, free_d), torch.where(tied, tied_up, free_up)
    m, down = torch.where(tied, tied_m, free_m), torch.where(tied, tied_up, free_down)
    step, least = (d * up).unsqueeze(-1), (m * down).unsqueeze(-1)
    rounded = ((grid.values + least) / step).round().clamp(0, grid.top)
    codes = torch.where(step > 0, rounded, codes).flatten(2).to(torch.uint8)
    runs = TYPES[grid.name].length // RUN[grid.name] // up.shape[-1]
    up, down = (part.to(torch.uint8).repeat_interleave(runs, -1) for part in (up, down))
    halved = [_bytes(part) for part in (d, m)]
    if grid.name == "Q2_K":
        return [down << 4 | up, quarters(codes), *halved]
    high = [] if grid.name == "Q4_K" else [across(codes >> 4)]
    return [*halved, _of_eight(up, down), *high, halves(codes, 32)]


def _signed(grid: Grouped) -> list[Tensor]:
    """The parts of blocks whose values are d * s * (q - half of the codes)."""
    half = (grid.top + 1) // 2
    exact, values = grid.codes - grid.zeros, grid.values
    least, most = exact.amin(-1, keepdim=True), exact.amax(-1, keepdim=True)
    upright = torch.maximum(most / (half - 1), -least / half)
    turned = torch.maximum(-least / (half - 1), most / half)
    wider = torch.minimum(upright, turned).clamp(min=1)  # how much wider steps must be for no code to be cut off
    steps = torch.where(turned < upright.clamp(min=1), -grid.scales, grid.scales)
    tried = [steps * factor for factor in (wider, (1 + wider) / 2, torch.ones(()))]
    errors = [(_rounded(values, step, half) * step - values).square().sum(-1, keepdim=True) for step in tried]
    best = torch.stack(errors).argmin(0, keepdim=True)
    wanted = torch.stack(tried).gather(0, best)[0, ..., 0]
    d, up = multiples(wanted, torch.ones(()), SIGNED[grid.name])
    codes = (_rounded(values, (d * up).unsqueeze(-1), half) + half).flatten(2).to(torch.uint8)
    if grid.name == "Q8_0":
        return [_bytes(d * up), codes ^ 128]
    up = up.to(torch.int16).repeat_interleave(16 // up.shape[-1], -1)
    if grid.name == "Q3_K":
        return [across(codes >> 2), quarters(codes), _of_sixteen((up + 32).to(torch.uint8)), _bytes(d)]
    return [halves(codes, 64), quarters(codes >> 4), up.to(torch.int8).view(torch.uint8), _bytes(d)]


def _rounded(values: Tensor, step: Tensor, half: int) -> Tensor:
    """The nearest codes, from -half to half - 1; 0 of a step of 0."""
    return torch.where(step == 0, 0.0, (values / step).round().clamp(-half, half - 1))


def multiples(wanted: Tensor, weights: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """A float16 number d [N, B, 1], and whole numbers up to a limit [N, B, R] whose products with it come nearest to
    what is wanted [N, B, R], by weighted squares; both in float32."""
    largest = wanted.abs().amax(-1, keepdim=True)
    least = -limit if bool((wanted < 0).any()) else 0
    best_d, best = torch.zeros_like(largest), torch.zeros_like(wanted)
    best_error = (weights * wanted.square()).sum(-1, keepdim=True)
    for divisor in _divisors(limit):
        first = (largest / divisor).half().float()
        whole = torch.where(first > 0, (wanted / first).round(), 0.0).clamp(least, limit)
        norm = (weights * whole.square()).sum(-1, keepdim=True)
        fitted = (weights * whole * wanted).sum(-1, keepdim=True) / norm
        for d in (first, torch.where(norm > 0, fitted, first).half().float()):
            error = (weights * (d * whole - wanted).square()).sum(-1, keepdim=True)
            better = error < best_error
            best_d, best = torch.where(better, d, best_d), torch.where(better, whole, best)
            best_error = torch.where(better, error, best_error)
    return best_d, best


def _divisors(limit: int) -> list[int]:
    """What the largest number may be a multiple by: of the upper half of those up to a limit, and powers of two."""
    upper = range(limit, limit // 2, -max(1, limit // 2 // TRIED))
    return [*upper, *(1 << shift for shift in range(limit.bit_length()) if 1 << shift not in upper)]


def _bytes(number: Tensor) -> Tensor:
    """A float16 number a block, as two bytes."""
    return number.half().contiguous().view(torch.uint8)


def _of_eight(up: Tensor, down: Tensor) -> Tensor:
    """Eight multiples of 6 bits and eight more: [N, B, 12], as `ggml._eight` reads them."""
    low, high = up.split(4, -1), down.split(4, -1)
    third = low[1] & 15 | (high[1] & 15) << 4
    return torch.cat([low[0] | low[1] >> 4 << 6, high[0] | high[1] >> 4 << 6, third], -1)


def _of_sixteen(steps: Tensor) -> Tensor:
    """Sixteen multiples of 6 bits: [N, B, 12], as `ggml._sixteen` reads them."""
    low = steps[..., :8] & 15 | (steps[..., 8:] & 15) << 4
    first, second, third, fourth = (steps >> 4).split(4, -1)
    return torch.cat([low, first | second << 2 | third << 4 | fourth << 6], -1)
