"""estimate.json of `moeq estimate` without a run: cases with their estimates, memories, and what is stated of them."""

from __future__ import annotations

from typing import Any, Literal

from moeq.estimator.capacity import CapacityPlan
from moeq.estimator.hit_rates import HitRates
from moeq.estimator.result import Estimate, Frozen
from moeq.estimator.stated import Comparison
from moeq.version import __version__


class Case(Frozen):
    """One placed model; geometry: the sizes that were assumed, stated: what a publication gives beside it.

    hit_rates: of placements of as many experts on the recorded trace, None without one.
    """

    name: str
    geometry: dict[str, Any]
    estimate: Estimate
    capacity: CapacityPlan
    stated: tuple[Comparison, ...] = ()
    hit_rates: HitRates | None = None

    @property
    def batches(self) -> list[int]:
        """Batches of the grid, rising."""
        return sorted({point.batch for point in self.estimate.points})

    def at(self, places: set[tuple[int, int, int]]) -> Case:
        """The same with the points of some places only."""
        points = tuple(point for point in self.estimate.points if point.at in places)
        return self.model_copy(update={"estimate": self.estimate.model_copy(update={"points": points})})


class EstimateDocument(Frozen):
    """All cases of one command; routing says what decides which experts are chosen."""

    schema_version: Literal[1] = 1
    moeq_version: str = __version__
    name: str
    hardware: str
    routing: str
    cases: tuple[Case, ...]

    @property
    def stated(self) -> list[Comparison]:
        """What publications state of all cases, beside the estimates."""
        return [comparison for case in self.cases for comparison in case.stated]
