"""Ranges of activations, measured on calibration images."""

from __future__ import annotations

import torch
from torch import Tensor

from moeq.errors import QuantizationError
from moeq.integers.forward.description import ViT
from moeq.integers.forward.reference import forward

BATCH = 64  # images at once where only the largest magnitude counts
WHOLE = ("pixels", "residual", "logits", ".router", ".attention_weights")  # never clipped by a percentile


def measured(vit: ViT, pixels: Tensor, percentile: float | None) -> dict[str, float]:
    """The magnitude of every observed tensor: the largest, or the percentile of magnitudes over all of its numbers.

    Residual stream, logits and softmax keep the largest. Raises QuantizationError naming a tensor that is always zero
    or not finite.
    """
    sizes: dict[str, float] = {}

    def observe(name: str, values: Tensor) -> None:
        magnitudes = values.abs().flatten()
        if percentile is None or name.endswith(WHOLE):
            size = float(magnitudes.max())
        else:
            size = float(magnitudes.kthvalue(max(1, round(percentile / 100 * len(magnitudes)))).values)
        sizes[name] = max(size, sizes.get(name, 0.0))

    with torch.no_grad():
        for part in [pixels] if percentile is not None else pixels.split(BATCH):
            forward(vit, part, observe)
    for name, size in sizes.items():
        if not 0 < size < float("inf"):
            problem = "always zero" if size == 0 else "not finite"
            raise QuantizationError(
                f"{name} is {problem} in calibration",
                where="integer",
                do="check images and weights, or set integer: null",
            )
    return sizes
