"""Which code of a log softmax should count as 0, judged by the output of attention.

A code of b bits ends at 2**b - 1: whatever is smaller saturates there and counts as much (4 bits of log-sqrt2: as
2**-7.5), and hundreds of keys out of range outweigh the few within. Where codes from `dropped_from` on count as 0,
they do not. Paper 004 prints no such code; it measures few keys more closely than many.

Letters: Q queries, K keys, d values a head, b bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.integers.arithmetic.log_sqrt2 import STEPS, Logarithm, quantized


@dataclass(frozen=True, kw_only=True)
class DropErrors:
    """Squared distances of attention outputs from exact ones, summed, and those outputs' squares.

    dropped[c - 1]: where codes from c on count as 0, for c from 1 to the printed form's last code; printed: of the
    printed form. float64. Errors of more keys or images add up.
    """

    dropped: Tensor
    printed: Tensor
    total: Tensor

    def __add__(self, other: DropErrors) -> DropErrors:
        return DropErrors(
            dropped=self.dropped + other.dropped,
            printed=self.printed + other.printed,
            total=self.total + other.total,
        )

    def best(self) -> int | None:
        """The code to count as 0 from; None where no choice beats the printed form."""
        least = int(self.dropped.argmin())
        return least + 1 if float(self.dropped[least]) < float(self.printed) else None

    def relative(self, code: int | None) -> float:
        """Relative error of the outputs with codes from `code` on at 0; None: of the printed form."""
        error = self.printed if code is None else self.dropped[code - 1]
        return float((error / self.total).sqrt()) if float(self.total) else 0.0


def drop_errors(
    scores: Tensor, values: Tensor, bits: int, kind: Logarithm, printed: int | None, *, exact: bool
) -> DropErrors:
    """The errors of real scores [..., Q, K] (scaled) and values [..., K, d].

    printed: the first code that the printed form has no room for, None for none (`widths`); exact: whether the
    denominator is the exact sum of numerators rather than that of the quantized ones.
    """
    scores = scores - scores.amax(-1, keepdim=True)
    numerators = scores.exp()
    sums = numerators.sum(-1, keepdim=True)
    wanted = numerators @ values / sums
    codes = quantized(numerators, bits, kind)
    end = 2**bits if printed is None else printed
    numerator, denominator = torch.zeros_like(wanted), torch.zeros_like(sums)
    errors = []
    for code in range(end):
        weights = (codes == code).to(values.dtype) * 2.0 ** (-code / STEPS[kind])
        numerator = numerator + weights @ values
        denominator = denominator + weights.sum(-1, keepdim=True)
        made = numerator / (sums if exact else denominator)
        errors.append((made - wanted).double().square().sum())
    return DropErrors(
        dropped=torch.stack(errors[:-1]) if end > 1 else wanted.new_full((1,), float("inf"), dtype=torch.float64),
        printed=errors[-1],
        total=wanted.double().square().sum(),
    )
