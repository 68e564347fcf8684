"""What quantizers may ask of a batch of experts: Hessians and rows of tokens, computed when they are asked for.

Letters: E experts, T tokens, n rows of one expert, H hidden size, I intermediate size, K inputs of a matrix, either of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeq.models.experts import DOWN
from moeq.numerics.factor import Factor
from moeq.numerics.gptq import Quantized
from moeq.quantizers.layer_data import ExpertBatch, RoutedTokens, part_rows, sum_of_products
from moeq.recipe import LossesSection


@dataclass(kw_only=True)
class Note:
    """What the loss table says of an expert beside its losses: what stood in for what it lacked, and the traces of the
    Hessians of its first matrices and of down."""

    fallback: list[str] = field(default_factory=list)
    hessian_trace: tuple[float, float] | None = None

    def add(self, **fallbacks: bool) -> None:
        """Add the names of those that there were."""
        self.fallback += [name for name, so in fallbacks.items() if so and name not in self.fallback]


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Of a batch of experts, for one quantizer and what it starts from.

    batch: the experts' numbers, biases and what else they compute; notes: of every expert, which quantizers add to;
    seed: the recipe's, of what is drawn; start: the codes of the quantizer that this one starts from.
    """

    tokens: RoutedTokens
    batch: ExpertBatch
    settings: LossesSection
    notes: list[Note]
    seed: int = 0
    start: dict[str, Quantized] | None = None

    @property
    def lent(self) -> Tensor:
        """Rows [<= 1024, H] of the layer that stand in where an expert's own are few."""
        return self.tokens.sample

    def rows(self, index: int) -> Tensor:
        """The calibration rows [n, H] of one expert of the batch, maybe none."""
        return self.tokens.routed(self.batch.numbers()[index], heldout=False)

    def row_weights(self, index: int) -> Tensor | None:
        """What each of one expert's calibration rows counts, [n] with mean 1; None: all the same."""
        if self.settings.hessian_weighting == "none":
            return None
        return self.tokens.calibration_weights(self.batch.numbers()[index])

    def hessians(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of every expert: what its first matrices are given, [H, H], and its down projection, [I, I]; fills notes.

        H_e <- (n_e*H_e + lambda*H_layer) / (n_e + lambda), H as means over tokens, own ones weighted by `row_weights`;
        for down, H_layer runs a sample of the layer's tokens through the expert itself. Up to a factor, GPTQ's H = 2 X
        X^T (Frantar et al., arXiv 2210.17323), and where an error's square counts with a weight, H = 2 X diag(w) X^T.
        """
        first, second = list[Tensor](), list[Tensor]()
        lend = self.settings.borrow_tokens
        for index, note in enumerate(self.notes):
            rows, weights = self.rows(index), self.row_weights(index)
            own, borrowed = self._inner_products(index, rows, weights), self._inner_products(index, self.lent)
            total = max(len(rows) + lend, 1e-9)
            first.append((_products(rows, weights) + lend * self.tokens.shared) / total)
            second.append((own + lend * borrowed / len(self.lent)) / total)
            note.add(borrowed_hessian=len(rows) < self.settings.min_tokens, left_out_tokens=self.tokens.left_out > 0)
            note.hessian_trace = (float(first[-1].diagonal().sum()), float(second[-1].diagonal().sum()))
        return first, second

    def hessians_by_input(self, projections: Iterable[str]) -> Iterator[tuple[list[str], list[Tensor]]]:
        """`hessians` beside the names of the matrices that they are of: gate and up (or up alone), then down.

        Every expert's, [K, K]; who has stacked them clears the list, which gives their memory back.
        """
        first, second = self.hessians()
        yield [name for name in projections if name != DOWN], first
        yield [DOWN], second

    def factors(
        self, projections: Iterable[str], factorize: Callable[[Tensor, float], Factor]
    ) -> Iterator[tuple[list[str], Tensor, Factor]]:
        """As `hessians_by_input`, stacked, [E, K, K], beside their factors; what these fell back to is noted."""
        for names, hessians in self.hessians_by_input(projections):
            hessian = torch.stack(hessians)
            hessians.clear()
            factor = factorize(hessian, self.settings.damping)
            self.note_fallbacks(factor)
            yield names, hessian, factor

    def note_fallbacks(self, factor: Factor) -> None:
        """Note of every expert what the factor of its Hessian [K, K] fell back to."""
        for index, note in enumerate(self.notes):
            note.add(**factor.fallbacks(index, self.settings.damping))

    def _inner_products(self, index: int, rows: Tensor, counts: Tensor | None = None) -> Tensor:
        """Sum [I, I] of y y^T, times their counts [n], over what an expert's down projection is given at some rows [n,
        H]."""
        weights, biases = self.batch.one(index)
        size = part_rows(weights[DOWN].shape[1])
        inner = (self.batch.math.intermediate(part, weights, biases) for part in rows.split(size))
        return sum_of_products(inner if counts is None else map(_weighed, inner, counts.split(size)))


def _products(rows: Tensor, counts: Tensor | None) -> Tensor:
    """Sum [H, H] of x x^T over some rows [n, H], times their counts [n]."""
    if counts is None:
        return rows.T @ rows
    size = part_rows(rows.shape[1])
    return sum_of_products(map(_weighed, rows.split(size), counts.split(size)))


def _weighed(rows: Tensor, counts: Tensor) -> Tensor:
    """Rows [n, K] whose products count as often as counts [n] say."""
    return rows * counts.sqrt().unsqueeze(1)
