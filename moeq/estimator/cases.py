"""estimate.json of `moeq estimate` without a run: cases with their estimates, memories, and what is stated of them."""

from __future__ import annotations

from typing import Any, Literal

from moeq.estimator.capacity import CapacityPlan
from moeq.estimator.confidence import IntervalRow
from moeq.estimator.hit_rates import HitRates
from moeq.estimator.result import Estimate, Frozen
from moeq.estimator.serving import ServedRow
from moeq.estimator.stated import Comparison
from moeq.tables import rounded
from moeq.version import __version__


class WithoutNdp(Frozen):
    """The fastest policy that computes nothing near the data, at the first point of the grid.

    `decode`, `end_to_end`: how many times as fast as the placement that is asked about. `narrowed`: experts that the
    placement has in FP16 on the GPU take the width of the others, since all of them fit the GPU only so.
    """

    policy: str
    narrowed: bool
    decode_tokens_per_second: float
    decode: float
    end_to_end: float

    def text(self) -> str:
        """In a sentence."""
        how = ", all experts at the narrower bits," if self.narrowed else ""
        return (
            f"Without near-data processing the fastest here is {self.policy}{how} with "
            f"{rounded(self.decode_tokens_per_second)} tokens a second in decode: {self.decode:.3g} times as fast as "
            f"the placement that is asked about, {self.end_to_end:.3g} times over a whole request."
        )


class Case(Frozen):
    """One placed model; geometry: the sizes that were assumed, stated: what a publication gives beside it.

    hit_rates: of placements of as many experts on the recorded trace, None without one; without_ndp: None where no
    such policy fits, or nothing computes near the data anyway; intervals: all assumptions varied together;
    served: what a server sees under a rate of requests.
    """

    name: str
    geometry: dict[str, Any]
    estimate: Estimate
    capacity: CapacityPlan
    stated: tuple[Comparison, ...] = ()
    hit_rates: HitRates | None = None
    without_ndp: WithoutNdp | None = None
    intervals: tuple[IntervalRow, ...] = ()
    served: tuple[ServedRow, ...] = ()

    @property
    def batches(self) -> list[int]:
        """Batches of the grid, rising."""
        return sorted({point.batch for point in self.estimate.points})

    def at(self, places: set[tuple[int, int, int]]) -> Case:
        """The same with the points of some places only."""
        points = tuple(point for point in self.estimate.points if point.at in places)
        return self.model_copy(update={"estimate": self.estimate.model_copy(update={"points": points})})


class EstimateDocument(Frozen):
    """All cases of one command; routing says what decides which experts are chosen.

    left_out: of several hardware that are compared, those that the model does not fit, each with its sum.
    """

    schema_version: Literal[1] = 1
    moeq_version: str = __version__
    name: str
    hardware: str
    routing: str
    cases: tuple[Case, ...]
    left_out: tuple[str, ...] = ()

    @property
    def stated(self) -> list[Comparison]:
        """What publications state of all cases, beside the estimates."""
        return [comparison for case in self.cases for comparison in case.stated]
