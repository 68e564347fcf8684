"""What one layer is quantized and measured on: its tokens, as they are routed, and its experts, some at a time.

Letters: T tokens, n some of them, k experts a token, e experts of one batch, H hidden size, N output rows and K inputs
of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moeq.errors import QuantizationError
from moeq.models.experts import ExpertLayer, ExpertMath
from moeq.models.walk import LayerInputs
from moeq.quantizers.training_rows import evenly
from moeq.recipe import LossesSection

SAMPLE_TOKENS = 1024  # of a layer's tokens, run through every expert for what a rarely routed one borrows
PART_BYTES = 2**30  # of rows that are multiplied at once: all tokens' can be more than a GPU holds


@dataclass(frozen=True, kw_only=True)
class RoutedTokens:
    """One layer's tokens: calibration and held-out rows, samples of both, and their routing."""

    hidden: Tensor  # [T, H] float32
    experts: Tensor  # [T, k]
    scores: Tensor | None  # [T, k] what multiplies an expert's input, where a family does that
    weights: Tensor  # [T, k] what multiplies an expert's output: routing weights, or ones
    heldout: Tensor  # [T] bool
    everyone: bool  # whether every expert calibrates on all tokens
    sample: Tensor  # [<= SAMPLE_TOKENS, H] of the calibration rows
    heldout_sample: Tensor
    left_out: int  # tokens that are not among them, since their activations are not finite

    @classmethod
    def of(cls, inputs: LayerInputs, config: LossesSection) -> RoutedTokens:
        """Split by sequence; QuantizationError where one of the two sides has no tokens."""
        hidden = inputs.hidden.float()
        stride = heldout_stride(config.heldout_fraction)
        heldout = (inputs.sequence % stride == stride - 1).to(hidden.device)
        if bool(heldout.all()) or not bool(heldout.any()):
            lacking = "calibration" if bool(heldout.all()) else "held-out"
            raise QuantizationError(
                f"no {lacking} tokens: of {inputs.left_out:,} the activations are not finite",
                where=inputs.layer.name,
                do="use dtype: float32, or more corpus.sequences",
            )
        scores = inputs.weights.to(hidden) if inputs.layer.kind.scales_inputs else None
        samples = [
            _weighed(hidden, scores, thin(side.nonzero().squeeze(1), SAMPLE_TOKENS)) for side in (~heldout, heldout)
        ]
        return cls(
            hidden=hidden,
            experts=inputs.experts,
            scores=scores,
            weights=inputs.weights.to(hidden) if scores is None else torch.ones_like(scores),
            heldout=heldout,
            everyone=config.tokens == "all",
            sample=samples[0],
            heldout_sample=samples[1],
            left_out=inputs.left_out,
        )

    def count(self, expert: int) -> int:
        """How many calibration tokens were routed to an expert."""
        return int(((self.experts == expert).any(1) & ~self.heldout).sum())

    def routed(self, expert: int, heldout: bool) -> Tensor:
        """The expert's inputs [n, H]: its own tokens, or all calibration tokens where the recipe says so."""
        side = self.heldout if heldout else ~self.heldout
        chosen = self.experts == expert
        rows = side if self.everyone and not heldout else chosen.any(1) & side
        if self.scores is None:
            return self.hidden[rows]
        own = (self.scores * chosen).sum(1)
        scale = torch.where(chosen.any(1), own, self.scores.mean(1))
        return self.hidden[rows] * scale[rows].unsqueeze(1)

    def calibration_weights(self, expert: int) -> Tensor:
        """Squared weight [n] that multiplies the expert's output at each calibration token, as `routed` has them,
        divided by their mean.

        A token that is not the expert's own (where it sees all) counts with the mean weight of the token's experts.
        """
        chosen, side = self.experts == expert, ~self.heldout
        own = (self.weights * chosen).sum(1)
        if self.everyone:
            squared = torch.where(chosen.any(1), own, self.weights.mean(1))[side].square()
        else:
            squared = own[chosen.any(1) & side].square()
        mean = squared.mean()
        return squared / mean if bool(mean > 0) else torch.ones_like(squared)

    def squared_weights(self, expert: int) -> Tensor:
        """Squared weight [n] that multiplies the expert's output at each of its held-out tokens, as `routed` has them.

        Without any, the mean over all that the layer's experts were given.
        """
        chosen = self.experts == expert
        squared = (self.weights * chosen).sum(1).square()[chosen.any(1) & self.heldout]
        return squared if len(squared) else self.weights.square().mean().reshape(1)

    @cached_property
    def shared(self) -> Tensor:
        """Mean of x x^T over the calibration tokens, [H, H]."""
        rows = (~self.heldout).nonzero().squeeze(1)
        parts = rows.split(part_rows(self.hidden.shape[1]))
        return sum_of_products(_weighed(self.hidden, self.scores, part) for part in parts) / len(rows)


def _weighed(hidden: Tensor, scores: Tensor | None, rows: Tensor) -> Tensor:
    """Tokens [n, H] at some rows [n], times the mean of what multiplies an expert's input, where a family does that."""
    return hidden[rows] if scores is None else hidden[rows] * scores[rows].mean(1, keepdim=True)


def heldout_stride(fraction: float) -> int:
    """Every how-many-th sequence is kept for measuring."""
    return max(2, round(1 / fraction))


def thin(rows: Tensor, count: int) -> Tensor:
    """At most `count` of the rows [n, ...], evenly spaced."""
    return rows if len(rows) <= count else rows[evenly(len(rows), count).to(rows.device)]


@dataclass(frozen=True, kw_only=True)
class ExpertBatch:
    """A batch of experts: matrices [e, N, K] and biases [e, N] in float32, what else they compute."""

    which: slice
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    math: ExpertMath

    def one(self, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Matrices [N, K] and biases [N] of one expert of the batch."""
        return tuple({name: stack[index] for name, stack in of.items()} for of in (self.weights, self.biases))  # type: ignore[return-value]

    def some(self, which: slice) -> ExpertBatch:
        """Some of the experts, by their places in the batch: matrices [e, N, K]."""
        weights, biases = ({name: stack[which] for name, stack in of.items()} for of in (self.weights, self.biases))
        numbers = self.numbers()[which]
        return replace(self, which=slice(numbers.start, numbers.stop), weights=weights, biases=biases)

    def numbers(self) -> range:
        """The experts' numbers in the layer."""
        return range(self.which.start, self.which.stop)


def part_rows(features: int) -> int:
    """Rows of so many float32 features that are multiplied at once; a gated product has them three times over."""
    return max(1, PART_BYTES // (3 * 4 * features))


def row_bytes(layer: ExpertLayer, rows: int) -> int:
    """Bytes of rows that an expert is given, and of what it makes of those that are multiplied at once."""
    inner, hidden = layer.intermediate_size, layer.hidden_size
    at_once = max(min(rows, part_rows(inner)) * 3 * inner, min(rows, part_rows(hidden)) * hidden)
    return 4 * (rows * hidden + at_once)


def sum_of_products(parts: Iterable[Tensor]) -> Tensor:
    """Sum [K, K] of x x^T over rows that come in parts [n, K], at least one part."""
    rest = iter(parts)
    first = next(rest)
    total = first.T @ first
    for part in rest:
        total.addmm_(part.T, part)
    return total
