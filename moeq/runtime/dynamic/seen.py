"""What the tokens of a layer chose since the last decision, in bounded room however long their texts are.

Calls of few tokens are kept as they are, which takes some microseconds, and folded together when a decision is made;
calls of many are folded at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moeq.analysis.hotness import FloatArray, gained

MOST_CALLS = 256  # that are kept as they are
Gained = tuple[FloatArray, int, FloatArray]  # S and Q [1, E] that a layer gained, and over how many steps


class Notes(Protocol):
    """Where the choices of a layer go."""

    def add(self, index: Tensor, weights: Tensor) -> None:
        """One call's choices and their weights [T, k]."""


class Statistics(Protocol):
    """What was chosen in all layers since it was last asked for."""

    def of(self, layer: int) -> Notes:
        """Where a layer's choices go."""

    def ask(self) -> None:
        """What was chosen so far is wanted; does not wait."""

    def answered(self, wait: bool) -> list[Gained] | None:
        """What was asked for, once it is there, and then once; wait: until it is."""


class Seen:
    """Of one layer of E experts: what S and Q gain (see `moeq.analysis.hotness`), a call being a step."""

    def __init__(self, experts: int, ema: float) -> None:
        self.experts, self.ema = experts, ema
        self._lock = threading.Lock()
        self._calls: list[tuple[int, Tensor, Tensor]] = []
        self._steps = 0
        self._folded = 0  # steps that the sums are of
        self._sums, self._squares = np.zeros(experts), np.zeros(experts)

    @property
    def held_bytes(self) -> int:
        """Of what is kept: at most MOST_CALLS calls of E choices, and the sums."""
        kept = sum(index.nbytes + weights.nbytes for _, index, weights in self._calls)
        return kept + self._sums.nbytes + self._squares.nbytes

    def add(self, index: Tensor, weights: Tensor) -> None:
        """One call's choices and their weights [T, k]."""
        kept = index.clone(), weights.detach().clone()
        with self._lock:
            self._calls.append((self._steps, *kept))
            self._steps += 1
            if index.numel() > self.experts or len(self._calls) >= MOST_CALLS:
                self._fold()

    def drained(self) -> Gained:
        """S and Q [1, E] gained since the last time, and over how many steps."""
        with self._lock:
            self._fold()
            found = self._sums[None], self._steps, self._squares[None]
            self._steps = self._folded = 0
            self._sums, self._squares = np.zeros(self.experts), np.zeros(self.experts)
        return found

    def _fold(self) -> None:
        """Calls into the sums, each decayed until now."""
        decay = self.ema ** (self._steps - self._folded)
        self._sums, self._squares, self._folded = decay * self._sums, decay**2 * self._squares, self._steps
        if not self._calls:
            return
        numbers = torch.cat([index.reshape(-1) for _, index, _ in self._calls]).long().numpy()
        weights = torch.cat([one.reshape(-1) for _, _, one in self._calls]).double().numpy()
        sizes = [index.numel() for _, index, _ in self._calls]
        share = weights / np.repeat([max(1, len(index)) for _, index, _ in self._calls], sizes)
        left = np.repeat([float(self._steps - 1 - step) for step, _, _ in self._calls], sizes)
        # others hand their input through or are none; one weight that is no number would be every average's for good
        known = (numbers >= 0) & (numbers < self.experts) & np.isfinite(share)
        sums, squares = gained(numbers[known], share[known], left[known], num_experts=self.experts, ema=self.ema)
        self._sums, self._squares, self._calls = self._sums + sums, self._squares + squares, []


class SeenHere:
    """`Statistics` on the CPU, where they are there at once."""

    def __init__(self, experts: Sequence[int], ema: float) -> None:
        self.layers = [Seen(count, ema) for count in experts]
        self._asked = False

    def of(self, layer: int) -> Seen:
        return self.layers[layer]

    def ask(self) -> None:
        self._asked = True

    def answered(self, wait: bool) -> list[Gained] | None:
        if not self._asked:
            return None
        self._asked = False
        return [layer.drained() for layer in self.layers]
