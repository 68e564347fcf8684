"""What an integer forward is made with: widths, softmax quantizer, calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from moeq.errors import QuantizationError
from moeq.recipe import Denominator, Ends, Softmax


@dataclass(frozen=True, kw_only=True)
class Settings:
    """weights, activations, attention: bits (W/A/Attn). denominator: the sum of the quantized softmax numerators, or of
    the exact ones, made by a table; uniform attention always takes the exact one. range, percentile: of activations.
    calibration: images that ranges are measured on; vectors: images whose every tensor is written; schemes: whether the
    other schemes of paper 004's Table 1 are evaluated too. task: whose router and head, of models with several.

    Patch embedding, router and head are the sensitive ends: they keep 8 bits where `weights` has fewer.
    """

    weights: int = 8
    activations: int = 8
    attention: int = 4
    softmax: Softmax = "log-sqrt2"
    denominator: Denominator = "quantized"
    range: Ends = "minmax"
    percentile: float = 99.99
    calibration: int = 32
    vectors: int = 4
    schemes: bool = True
    task: int = 0

    def __post_init__(self) -> None:
        """QuantizationError for a key that is out of bounds."""
        bounds = {
            "weights": (self.weights, 2, 8),
            "activations": (self.activations, 3, 8),
            "attention": (self.attention, 2, 8),
            "percentile": (self.percentile, 50, 100),
            "calibration": (self.calibration, 1, 4096),
            "vectors": (self.vectors, 1, 1024),
            "task": (self.task, 0, 4096),
        }
        for key, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise QuantizationError(f"{key} is {value}", where="integer", do=f"give {low} to {high}")
        choices = {
            "softmax": (self.softmax, get_args(Softmax)),
            "denominator": (self.denominator, get_args(Denominator)),
            "range": (self.range, get_args(Ends)),
        }
        for key, (choice, known) in choices.items():
            if choice not in known:
                raise QuantizationError(f"{key} is {choice!r}", where="integer", do=f"give one of {', '.join(known)}")

    @property
    def end_weights(self) -> int:
        """Bits of the weights of patch embedding, router and head."""
        return max(8, self.weights)

    @property
    def widths(self) -> str:
        """W/A/Attn as the paper writes them."""
        return f"{self.weights}/{self.activations}/{self.attention}"
