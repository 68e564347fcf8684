"""Which experts are worth high precision as the workload goes on: paper 001 (DynaExq), Algorithm 1.

The hotness of an expert is an exponential average of what routers give it, S <- a*S + (1-a)*g at every step, where g is
the mean router weight of the step's tokens, 0 for experts that none chose (passive decay). Every so many steps the top
n_hot of a layer with S >= tau are to be in high precision. One implementation for the runtime and for the estimator.

Beyond the paper: `Q`, the sum of squares of what every token added to S, decayed alike. It is at least the variance of
S where tokens choose on their own, so that a difference of S is compared with what chance makes of it (`certainty`):
an expert takes the place of another only where it is hotter by so many standard deviations.

Shapes: D layers, E experts, n choices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
TIE = 1e-12  # of equal scores the expert that is in high precision already stays


@dataclass(frozen=True, kw_only=True)
class Control:
    """How precision follows hotness.

    places: n_hot, experts of a layer in high precision; ema: a, a step; threshold: tau as a share of the score that the
    last of n_hot has after warm-up, 0: none; certainty: standard deviations by which an expert must be hotter than the
    one whose place it takes.
    """

    places: int
    ema: float = 0.99
    threshold: float = 1.0
    certainty: float = 0.0


@dataclass
class Controller:
    """Hotness and precision of the experts of D layers.

    hotness, squares [D, E]: S and Q; high [D, E]: those that are to be in high precision; tau [D, 1].
    """

    control: Control
    hotness: FloatArray
    high: BoolArray
    tau: FloatArray
    squares: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        self.squares = np.zeros_like(self.hotness)

    @classmethod
    def after_warmup(cls, control: Control, hotness: FloatArray) -> Controller:
        """With the hottest in high precision, ties to the lower index, and tau fixed (paper 001, section 3.5)."""
        rank = np.argsort(np.argsort(-hotness, axis=1, kind="stable"), axis=1, kind="stable")
        last = np.where(rank == control.places - 1, hotness, 0.0).sum(axis=1, keepdims=True)
        share = control.threshold if control.places < hotness.shape[1] else 0.0
        return cls(control=control, hotness=hotness, high=rank < control.places, tau=share * last)

    def begin(self, gained: FloatArray, steps: int, squares: FloatArray | None = None) -> bool:
        """The warm-up of a run, as `fold`: what was known before counts as if its steps had weighed as much as these,
        and tau is fixed by both (paper 001, section 3.5). False, and nothing is done, where nothing was chosen."""
        fresh = gained.sum(axis=1, keepdims=True)
        if not (fresh > 0).all():
            return False
        known, whole = self.hotness.sum(axis=1, keepdims=True), fresh / (1 - self.control.ema**steps)
        self.hotness = self.hotness * np.where(known > 0, whole / np.where(known > 0, known, 1), 0)
        self.fold(gained, steps, squares)
        places, experts = self.control.places, self.hotness.shape[1]
        share = self.control.threshold if 0 < places < experts else 0.0
        self.tau = share * np.sort(self.hotness, axis=1)[:, [max(0, experts - places)]] if share else self.tau * 0
        return True

    def fold(self, gained: FloatArray, steps: int, squares: FloatArray | None = None) -> None:
        """A number of steps in which S gained [D, E], and Q squares [D, E], each decayed until their end."""
        decay = self.control.ema**steps
        self.hotness = decay * self.hotness + gained
        if squares is not None:
            self.squares = decay**2 * self.squares + squares

    def decide(self, most: int | None = None) -> BoolArray:
        """Which [D, E] are to be in high precision from now on, after at most so many promotions in a layer.

        Where not all are let through, as many of those that were to make room stay, the hottest first.
        """
        places, certainty = self.control.places, self.control.certainty
        if certainty == 0:
            wanted = _top(self.hotness + TIE * self.high, places) & (self.hotness >= self.tau)
        else:
            wanted = np.stack([self._surely(row) for row in range(len(self.high))])
        self.high = wanted if most is None else _let_through(self.high, wanted, self.hotness, most)
        return self.high

    def _surely(self, row: int) -> BoolArray:
        """[E] of a layer whose members change only where chance does not explain it."""
        hotness, squares, control = self.hotness[row], self.squares[row], self.control
        kept = self.high[row] & (hotness >= self.tau[row] - control.certainty * np.sqrt(squares))
        order = np.argsort(-hotness, kind="stable")
        coldest = [expert for expert in order[::-1] if kept[expert]]
        free = control.places - len(coldest)
        for expert in order:
            if kept[expert] or hotness[expert] < self.tau[row, 0]:
                continue
            if free > 0:
                free -= 1
            elif coldest and hotness[expert] - hotness[coldest[0]] > control.certainty * np.sqrt(
                squares[expert] + squares[coldest[0]]
            ):
                kept[coldest.pop(0)] = False
            else:
                break
            kept[expert] = True
        return np.asarray(kept, dtype=np.bool_)


def gained(
    experts: NDArray[np.int64], weights: FloatArray, left: FloatArray, *, num_experts: int, ema: float
) -> tuple[FloatArray, FloatArray]:
    """What S and Q [E] of a layer gain by choices of experts [n] with router weights [n] over the tokens of their step.

    left [n]: steps that follow each until the end of what is folded.
    """
    added = (1 - ema) * ema**left * weights
    sums, squares = (np.bincount(experts, each, minlength=num_experts) for each in (added, added**2))
    return sums.astype(np.float64), squares.astype(np.float64)


def _top(scores: FloatArray, places: int) -> BoolArray:
    """Mask [D, E] of the `places` highest scores of every row."""
    mask = np.full(scores.shape, places >= scores.shape[1])
    if 0 < places < scores.shape[1]:
        np.put_along_axis(mask, np.argpartition(-scores, places - 1, axis=1)[:, :places], True, axis=1)
    return mask


def _let_through(before: BoolArray, wanted: BoolArray, hotness: FloatArray, most: int) -> BoolArray:
    """Mask [D, E] after at most so many promotions in every row, the hottest first."""
    decided = wanted.copy()
    for row in np.flatnonzero((wanted & ~before).sum(axis=1) > most):
        order = np.argsort(-hotness[row], kind="stable")
        entering, leaving = (order[mask[order]] for mask in (wanted[row] & ~before[row], before[row] & ~wanted[row]))
        late = entering[most:]
        decided[row, late] = False
        decided[row, leaving[: len(late)]] = True
    return decided
