"""Codes that are floating-point numbers, made up for by columns: NVFP4 and MXFP4 with scales of groups, FP8 of rows.

The feedback is that of numerics/gptq.py (Frantar et al., arXiv 2210.17323); the numbers and what is stored are those of
moeq_kernels/floats.py. A group's scale is looked for, when its turn comes, among the numbers of 8 bits about that of
its largest weight, by the squared errors of plain rounding, weighted by what an input's error counts once later ones
have made up for it. All rows of all experts go at once.

Letters: E experts, N output rows, K inputs, G groups, g inputs of one group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moeq.numerics.factor import Factor, feedback
from moeq.numerics.gptq_device import unit_inverse
from moeq_kernels import floats
from moeq_kernels.floats import E4M3, E8M0_BIAS, FP4_MOST, FP8_MOST
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import pack
from moeq_kernels.widths import FLOAT_GROUPS, Encoding

BLOCK = 128  # columns that feedback from all before is computed for at once
RUN = 16  # of FP8, columns that give feedback to the rest of a block at once
ROOM = 2.0  # how much more than its largest weight a matrix may come to want, of what feedback makes larger
NEARBY = {"nvfp4": range(-3, 7), "mxfp4": range(-1, 2)}  # numbers about the least without clipping that are tried
LARGEST = {"nvfp4": 126, "mxfp4": 254}  # bytes of scales; the least is 1
POWERS = (-60, 60)  # of units
EXPONENT, ONE = 0x7F800000, 0x3F800000  # of float32: its bits of exponent, and 1
COARSE = (
    22 << 23 | 1 << 22
)  # added to the bits of 2**e, it makes 1.5 * 2**(e + 22), whose neighbours are 2**(e - 1) off
ROW_POWERS = (-24, 15)  # of float16


def quantize(weight: Tensor, factor: Factor, bits: int, codebook: str, unit: Tensor | None = None) -> PackedWeight:
    """The packed stack of weights [E, N, K] at 4 or 8 bits; unit: [E], of NVFP4, see `units`."""
    made = _Columns(weight, factor, bits, codebook, unit)
    made.sweep()
    parts = {"codes": pack(made.codes.mT.contiguous(), bits), "scales": made.scales.mT.contiguous()}
    if made.unit is not None:
        parts["unit"] = made.unit
    return PackedWeight.of(parts, bits, weight.shape[-1], Encoding.floating(codebook))


def units(weight: Tensor) -> Tensor:
    """What the scales of NVFP4 of weights [E, N, K] are counted in, float32 [E]: powers of two."""
    return _power(weight.abs().amax((1, 2)) * ROOM / (FP4_MOST * FP8_MOST), POWERS)


def row_scales(weight: Tensor) -> Tensor:
    """Scales of FP8 of weights [E, N, K], float16 [E, N, 1]: powers of two."""
    return _power(weight.abs().amax(-1, keepdim=True) * ROOM / FP8_MOST, ROW_POWERS).half()


def _power(least: Tensor, within: tuple[int, int]) -> Tensor:
    """The power of two at or above [...], within two exponents, float32."""
    exponent = least.clamp(min=2.0 ** within[0]).log2().ceil().nan_to_num(0.0).clamp(*within)
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent.int())


def nearest_fp4(weight: Tensor) -> Tensor:
    """The nearest numbers of 4 bits [...] to float32 ones; of two as near the one with an even code.

    A large number is added and taken off again, beside which only what a number of 4 bits has is left.
    """
    within = weight.clamp(-FP4_MOST, FP4_MOST)
    coarse = (within.view(torch.int32) & EXPONENT).clamp_(min=ONE).add_(COARSE).view(torch.float32)
    return within.add_(coarse).sub_(coarse)


def nearest_fp8(weight: Tensor) -> Tensor:
    """The nearest numbers of 8 bits [...]."""
    return weight.clamp(-FP8_MOST, FP8_MOST).to(E4M3).to(weight.dtype)


def fp4_codes(numbers: Tensor) -> Tensor:
    """Codes uint8 [...] of numbers of 4 bits."""
    place = torch.zeros(int(2 * FP4_MOST) + 1, dtype=torch.uint8, device=numbers.device)
    for code, value in enumerate(floats.HALVES):
        place[int(2 * value)] = code
    return place[(2 * numbers.abs()).nan_to_num(0.0).long()] | (numbers < 0).to(torch.uint8) << 3


def fp8_codes(numbers: Tensor) -> Tensor:
    """Codes uint8 [...] of numbers of 8 bits; that of 0 has no sign."""
    return (numbers + 0.0).to(E4M3).view(torch.uint8)


def searched_scales(weight: Tensor, importance: Tensor, codebook: str, unit: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scales of one group, uint8 [E, N] and what they stand for, [E, N]; weight [E, g, N], importance [E, g]."""
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for stored in _candidates(weight.abs().amax(1), codebook, unit):
        scale = floats.scale_values(stored.unsqueeze(-1), codebook, unit).squeeze(-1)
        size = scale.unsqueeze(1)
        error = nearest_fp4(weight * (1 / size)).mul_(size).sub_(weight).square_().mul_(importance.unsqueeze(-1)).sum(1)
        if best is None:
            best = error, stored, scale
            continue
        better = error < best[0]
        least, kept, size = best
        best = torch.where(better, error, least), torch.where(better, stored, kept), torch.where(better, scale, size)
    assert best is not None
    return best[1], best[2]


def _candidates(most: Tensor, codebook: str, unit: Tensor | None) -> Iterator[Tensor]:
    """Scales that are tried for groups whose largest weights are these [E, N], uint8 [E, N] each."""
    least = most / FP4_MOST
    if unit is None:
        place = least.clamp(min=2.0**-126).log2().ceil().nan_to_num(0.0).int() + E8M0_BIAS
    else:
        place = (least / unit.squeeze(-1)).nan_to_num(0.0).clamp_(max=FP8_MOST).to(E4M3).view(torch.uint8).int()
    for moved in NEARBY[codebook]:
        yield (place + moved).clamp_(1, LARGEST[codebook]).to(torch.uint8)


class _Columns:
    """Weights [E, N, K] whose codes [E, K, N] and scales [E, G, N] are filled."""

    def __init__(self, weight: Tensor, factor: Factor, bits: int, codebook: str, unit: Tensor | None) -> None:
        self.columns = weight.float().transpose(1, 2).contiguous()
        self.upper, self.importance = factor.unit_upper.float(), factor.pivots.float()
        self.bits, self.codebook = bits, codebook
        experts, inputs, rows = self.columns.shape
        self.residual = torch.empty_like(self.columns)
        self.codes = torch.empty_like(self.columns, dtype=torch.uint8)
        self.unit: Tensor | None = None
        if bits == 8:
            self.scales = row_scales(weight).mT
            self.size = RUN
            return
        self.size = FLOAT_GROUPS[codebook]
        self.scales = self.codes.new_empty(experts, -(-inputs // self.size), rows)
        if codebook == "nvfp4":
            self.unit = (units(weight) if unit is None else unit).view(-1, 1, 1).to(weight.device)

    def sweep(self) -> None:
        """Round the columns in order."""
        inputs = self.columns.shape[1]
        for begin in range(0, inputs, BLOCK):
            end = min(begin + BLOCK, inputs)
            given = feedback(self.upper, self.residual, 0, begin, end)
            for start in range(begin, end, self.size):
                stop = min(start + self.size, end)
                self._group(slice(start, stop), given[:, start - begin : stop - begin])
                if stop < end:
                    ahead = self.upper[:, start:stop, stop:end].mT
                    given[:, stop - begin :].baddbmm_(ahead, self.residual[:, start:stop])

    def _group(self, part: slice, given: Tensor) -> None:
        """Round one group, to which the columns before it give [E, g, N]."""
        columns, block = self.columns[:, part], self.upper[:, part, part]
        if self.bits == 8:
            scale, nearest, coded = self.scales[:, 0].float(), nearest_fp8, fp8_codes
        else:
            moved = torch.baddbmm(columns, unit_inverse(block.mT), given)
            stored, scale = searched_scales(moved, self.importance[:, part], self.codebook, self.unit)
            self.scales[:, part.start // self.size] = stored
            nearest, coded = nearest_fp4, fp4_codes
        target, numbers, count = columns + given, torch.empty_like(columns), columns.shape[1]
        inverse, residual = 1 / scale, self.residual[:, part]
        for column in range(count):
            numbers[:, column] = found = nearest(target[:, column] * inverse)
            left = torch.addcmul(columns[:, column], found, scale, value=-1)
            residual[:, column] = left
            if column + 1 < count:
                target[:, column + 1 :].addcmul_(block[:, column, column + 1 :].unsqueeze(-1), left.unsqueeze(1))
        self.codes[:, part] = coded(numbers)
