"""Codes and grids of one matrix of a batch of experts, at all widths of a recipe, nested ones included.

Letters: E experts, N output rows, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moeq.numerics import gptq, nested
from moeq.numerics.gptq import Quantized
from moeq.recipe import LossesSection
from moeq_kernels.widths import NESTED_BITS


def rounded(
    weight: Tensor,
    factor: Tensor | None,
    settings: LossesSection,
    bits: Sequence[int],
    importance: Tensor | None,
    order: Tensor | None = None,
) -> Quantized:
    """Codes and grids of weights [E, N, K] at some widths, arguments as of `gptq.quantize`; nested ones share their
    codes where the recipe says so."""
    group, symmetric = settings.group_size, settings.symmetry()

    def alone(widths: Sequence[int]) -> Quantized:
        return gptq.quantize(
            weight, factor, bits=widths, group_size=group, symmetric=symmetric, order=order, importance=importance
        )

    if not settings.nested or not set(bits) & set(NESTED_BITS):
        return alone(bits)
    parts = [nested.quantize(weight, factor, group_size=group, symmetric=symmetric, importance=importance)]
    others = [width for width in bits if width not in NESTED_BITS]
    if others:
        parts.append(alone(others))
    return by_width(parts, bits)


def by_width(parts: Sequence[Quantized], bits: Sequence[int]) -> Quantized:
    """Results at some widths each, as one at `bits`."""
    places = [(part, part.bits.index(width)) for width in bits for part in parts if width in part.bits]
    codes, scale, zero = (
        torch.stack([getattr(part, name)[:, index] for part, index in places], 1) for name in ("codes", "scale", "zero")
    )
    return replace(parts[0], codes=codes, scale=scale, zero=zero, bits=tuple(bits))
