"""A program of integer operations: what is computed, in order, on which constants, into values of which widths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.errors import QuantizationError
from moeq.integers.artifacts.integer import Operation, Value
from moeq.integers.artifacts.integer_report import DroppedRow

Roles = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Program:
    """operations in order; constants: int64; reals: the real numbers that dyadic factors and whole biases stand for.

    image_shape: C, H, W. values: every value of a run but the batch. dropped: which codes of each block's softmax
    count as 0, and why.
    """

    operations: tuple[Operation, ...]
    constants: dict[str, Tensor]
    values: dict[str, Value]
    reals: dict[str, Tensor]
    image_shape: tuple[int, int, int]
    logits: str = "logits"
    dropped: tuple[DroppedRow, ...] = ()


def pixel_codes(program: Program, pixels: Tensor) -> Tensor:
    """The whole numbers int64 that stand for real pixels [B, C, H, W], rounded and saturated to the program's width.

    Unsigned codes are the image's own: QuantizationError where a pixel is no whole multiple of their scale.
    """
    held = program.values["pixels"]
    if tuple(pixels.shape[1:]) != program.image_shape:
        wanted = ", ".join(map(str, program.image_shape))
        raise QuantizationError(f"images are {list(pixels.shape)}, [images, {wanted}] are wanted", where="integer")
    if not bool(torch.isfinite(pixels).all()):
        raise QuantizationError("a pixel is not finite", where="integer", do="check the images")
    exact = pixels.double() / held.known_scale
    if held.signed:
        return torch.floor(exact + 0.5).clamp(*held.ends).to(torch.int64)
    codes = exact.round()
    if float((codes - exact).abs().max()) > 1e-3 or bool(((codes < 0) | (codes >= 2**held.bits)).any()):
        raise QuantizationError(
            f"pixels are no whole multiples of pixel_scale {held.scale:g} under {2**held.bits}",
            where="integer",
            do="give the images as the model's config says",
        )
    return codes.to(torch.int64)
