"""Estimated seconds of measured points as a function of a hardware's efficiencies and fixed latencies, and their fit.

Letters: P measured points, C constants that are fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeq.errors import EstimateError
from moeq.estimator.devices import SECTIONS, Hardware, file_key
from moeq.estimator.geometry import ModelGeometry, load_geometry
from moeq.estimator.measured import Point
from moeq.estimator.placement import Placement, uniform_placement
from moeq.estimator.simulation import Simulation, build_simulation
from moeq.estimator.step import Step, TermTotal

FOLDS = 5
SMALLEST_EFFICIENCY = 1e-3
LONGEST_LATENCY_SECONDS = 1.0
LATENCY_UNIT_SECONDS = 1e-5  # what a step of 1 in the fit is
STARTS = (None, 0.5, 0.25, 0.1)  # efficiencies to start from: the file's, and some that let other terms be the longer
MOST_STEPS = 40
TOLERANCE = 1e-8
NO_EFFECT = 1e-6  # relative change of every point below which a constant does not matter to them
SINGULAR = 1e-4  # share of the largest singular value below which constants cannot be told apart
SHARE = 0.01  # of a direction that cannot be told from nothing: what a constant must have in it to count
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Key = tuple[str | None, float | None, int | None, int | None]  # geometry, bits, GPU experts, context of a point


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What points are estimated with where their rows do not say: None must then be said by every row."""

    geometry: ModelGeometry | None = None
    placement: Placement | None = None
    context: int = 1024
    group_size: int | None = 128
    zero_points: bool = False
    codebook: str = ""


@dataclass(frozen=True)
class Run:
    """What an estimate is asked for: a decode step or a prefill of a batch, or a migration."""

    kind: Literal["decode", "prefill", "migration"]
    batch: int = 1
    input_tokens: int = 0

    def seconds(self, simulation: Simulation, labels: frozenset[str]) -> dict[str, float]:
        """Seconds by policy label."""
        parts: Mapping[str, Step | TermTotal]
        if self.kind == "decode":
            parts = simulation.decode(self.batch, labels)
        elif self.kind == "prefill":
            parts = simulation.prefill(self.batch, self.input_tokens, labels)
        else:
            parts = simulation.migration()
        return {label: part.seconds for label, part in parts.items() if label in labels}


@dataclass(frozen=True)
class Parameter:
    """A constant; the fit sees 1/value of an efficiency and value/unit of a latency, in which times are linear."""

    section: str
    field: str

    @property
    def key(self) -> str:
        """As a hardware file writes it: `gpu.layer_overhead`."""
        return f"{self.section}.{file_key(self.field)}"

    @property
    def is_efficiency(self) -> bool:
        """Whether it is a share in (0, 1]; otherwise it is seconds."""
        return self.field.endswith("efficiency")

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest x."""
        if self.is_efficiency:
            return 1.0, 1 / SMALLEST_EFFICIENCY
        return 0.0, LONGEST_LATENCY_SECONDS / LATENCY_UNIT_SECONDS

    def to_fit(self, value: float) -> float:
        """x of a value."""
        return 1 / value if self.is_efficiency else value / LATENCY_UNIT_SECONDS

    def from_fit(self, x: float) -> float:
        """The value of x, a share or seconds."""
        return min(1.0, 1 / x) if self.is_efficiency else max(0.0, x) * LATENCY_UNIT_SECONDS

    def error(self, x: float, x_error: float) -> float:
        """Standard error of the value from that of x."""
        return x_error / x**2 if self.is_efficiency else x_error * LATENCY_UNIT_SECONDS


PARAMETERS = tuple(
    Parameter(section, field)
    for section, model in SECTIONS.items()
    for field in model.model_fields
    if field.endswith(("efficiency", "overhead_seconds", "latency_seconds"))
)


class Model:
    """Estimated seconds of measured points as a function of the fitted constants x [C]."""

    def __init__(self, points: Sequence[Point], hardware: Hardware, setting: Setting, path: Path) -> None:
        self.points, self.hardware = points, hardware
        self.measured = np.array([point.seconds for point in points])
        file = [float(getattr(getattr(hardware, constant.section), constant.field)) for constant in PARAMETERS]
        self.start = np.array([constant.to_fit(value) for constant, value in zip(PARAMETERS, file, strict=True)])
        self.parts = [_parts(point) for point in points]
        self.simulations: dict[Key, Simulation] = {}
        self.keys: list[Key] = []
        for point in points:
            key = (point.geometry, point.bits, point.gpu_experts, point.context)
            where = f"{path}, row {point.row}"
            if key not in self.simulations:
                self.simulations[key] = _simulation(point, hardware, setting, where)
            self.keys.append(key)
            refusal = self.simulations[key].refusals(point.batch).get(point.policy)
            if refusal is not None:
                raise EstimateError(
                    f"{point.policy} cannot run: {refusal}",
                    where=where,
                    do="leave the row out, or name the policy that was measured",
                )

    def hardware_at(self, x: FloatArray) -> Hardware:
        """The hardware with the constants at x."""
        hardware = self.hardware
        for constant, value in zip(PARAMETERS, x.tolist(), strict=True):
            section = getattr(hardware, constant.section)
            changed = section.model_copy(update={constant.field: constant.from_fit(value)})
            hardware = hardware.model_copy(update={constant.section: changed})
        return hardware

    def seconds(self, x: FloatArray, chosen: IntArray | None = None) -> FloatArray:
        """Estimated seconds [P] of all points, or of chosen ones; what points share is worked out once."""
        rows = [*zip(self.points, self.keys, self.parts, strict=True)]
        rows = rows if chosen is None else [rows[index] for index in chosen]
        wanted: dict[tuple[Key, Run], set[str]] = {}
        for point, key, parts in rows:
            for run in parts:
                wanted.setdefault((key, run), set()).add(point.policy)
        hardware = self.hardware_at(x)
        moved = {key: self.simulations[key].on(hardware) for key, _ in wanted}
        done = {(key, run): run.seconds(moved[key], frozenset(labels)) for (key, run), labels in wanted.items()}
        return np.array(
            [sum(times * done[key, run][point.policy] for run, times in parts.items()) for point, key, parts in rows]
        )

    def errors(self, x: FloatArray, chosen: IntArray) -> FloatArray:
        """Relative errors of chosen points."""
        return np.asarray(self.seconds(x, chosen) / self.measured[chosen] - 1)

    def solve(self, chosen: IntArray, starts: Sequence[int] = range(len(STARTS))) -> tuple[FloatArray, int]:
        """The constants with the least squares of relative errors of chosen points, and the start they came from.

        A term that is hidden behind a longer one has no slope, so that one start alone may end beside the best fit.
        """
        from scipy.optimize import least_squares

        lowest, highest = np.array([constant.bounds for constant in PARAMETERS]).T
        fits = {
            start: least_squares(
                self.errors, np.clip(self._started(STARTS[start]), lowest, highest), bounds=(lowest, highest),
                args=(chosen,), method="dogbox", x_scale="jac", xtol=TOLERANCE, ftol=TOLERANCE, gtol=TOLERANCE,
                max_nfev=MOST_STEPS,
            )
            for start in starts
        }  # fmt: skip
        best = min(fits, key=lambda start: float(fits[start].cost))
        return np.asarray(fits[best].x, dtype=np.float64), best

    def _started(self, efficiency: float | None) -> FloatArray:
        if efficiency is None:
            return self.start
        both = zip(PARAMETERS, self.start, strict=True)
        return np.array([constant.to_fit(efficiency) if constant.is_efficiency else old for constant, old in both])

    def without_idle(self, x: FloatArray) -> FloatArray:
        """x with the constants that do not matter to any point back at the file's values."""
        kept, seconds = x, self.seconds(x)
        for index, start in enumerate(self.start):
            other = kept.copy()
            other[index] = start
            if np.abs(self.seconds(other) / seconds - 1).max() < NO_EFFECT:
                kept = other
        return kept

    def either(self, x: FloatArray) -> tuple[int, ...]:
        """The two efficiencies of which the slower rate paces transfers, where either could be what the points show."""
        hardware = self.hardware_at(x)
        link, memory = hardware.all_links.rate, hardware.ndp.memory_rate
        rates = {("link", "efficiency"): link, ("ndp", "memory_efficiency"): memory}
        slower, faster = sorted(rates, key=lambda name: rates[name])
        pair = tuple(PARAMETERS.index(Parameter(*name)) for name in (slower, faster))
        other = x.copy()
        other[pair[0]] = 1.0
        other[pair[1]] *= rates[faster] / rates[slower]
        same = np.abs(self.seconds(other) / self.seconds(x) - 1).max() < NO_EFFECT
        return pair if same and other[pair[1]] <= PARAMETERS[pair[1]].bounds[1] else ()

    def jacobian(self, x: FloatArray) -> FloatArray:
        """Change of every point's relative error [P, C] with every constant, by central or one-sided differences."""
        columns, everything = [], np.arange(len(self.points))
        for index, constant in enumerate(PARAMETERS):
            step = 1e-5 * max(1.0, abs(x[index]))
            low, high = x.copy(), x.copy()
            low[index] = max(constant.bounds[0], x[index] - step)
            high[index] = min(constant.bounds[1], x[index] + step)
            change = self.errors(high, everything) - self.errors(low, everything)
            columns.append(change / (high[index] - low[index]))
        return np.stack(columns, axis=1)


def _parts(point: Point) -> Mapping[Run, int]:
    """The runs that a measured figure is made of, and how often each."""
    decode = Run("decode", point.batch)
    prefill = Run("prefill", point.batch, point.input_tokens or 0)
    migration = Run("migration")
    return {
        "prefill_seconds": {prefill: 1},
        "migration_seconds": {migration: 1},
        "time_to_first_token_seconds": {prefill: 1, migration: 1, decode: 1},
        "decode_seconds_per_token": {decode: 1},
        "end_to_end_seconds": {prefill: 1, migration: 1, decode: point.output_tokens or 0},
    }[point.measure]


def _simulation(point: Point, hardware: Hardware, setting: Setting, where: str) -> Simulation:
    """The simulation of a point; EstimateError naming its row for what is not said or does not fit together."""
    try:
        geometry = setting.geometry if point.geometry is None else load_geometry(point.geometry)
        if geometry is None:
            raise EstimateError("no geometry", do="add a column geometry, or name the model")
        placement = _placement(point, geometry, setting)
    except EstimateError as error:
        raise EstimateError(error.what, where=where, do=error.do) from None
    return build_simulation(
        geometry,
        hardware,
        placement,
        group_size=setting.group_size,
        zero_points=setting.zero_points,
        codebook=setting.codebook,
        context=setting.context if point.context is None else point.context,
    )


def _placement(point: Point, geometry: ModelGeometry, setting: Setting) -> Placement:
    if point.bits is not None and point.gpu_experts is not None:
        return uniform_placement(geometry, bits=point.bits, hot_experts=point.gpu_experts)
    if point.bits is not None or point.gpu_experts is not None:
        raise EstimateError("bits and gpu_experts go together", do="fill both or neither")
    if setting.placement is None:
        raise EstimateError("neither bits nor gpu_experts", do="fill both, or give a placement")
    if (experts := setting.placement.bits.shape[1]) != geometry.num_experts:
        text = f"a placement of {experts} experts a layer, {geometry.name} has {geometry.num_experts}"
        raise EstimateError(text, do="give a placement of this model")
    return setting.placement


def held_out(model: Model, start: int) -> tuple[FloatArray | None, int]:
    """Seconds [P] of every point by a fit without its row's fold, and the number of folds; None below two rows.

    start: the one to fit from, which the fit to all points has chosen.
    """
    rows = {row: index for index, row in enumerate(dict.fromkeys(point.row for point in model.points))}
    folds = min(FOLDS, len(rows))
    if folds < 2:
        return None, 0
    fold = np.array([rows[point.row] % folds for point in model.points])
    seconds = np.zeros(len(model.points))
    for part in range(folds):
        x, _ = model.solve(np.flatnonzero(fold != part), [start])
        out = np.flatnonzero(fold == part)
        seconds[out] = model.seconds(x, out)
    return seconds, folds


@dataclass(frozen=True, kw_only=True)
class Determination:
    """How well points determine the constants that matter to them, `matters` [C].

    standard_error [C] of x (None: as many constants as points); tied_to: of every constant, others that the points
    cannot tell it from.
    """

    matters: NDArray[np.bool_]
    standard_error: FloatArray | None
    tied_to: tuple[tuple[int, ...], ...]


def determination(model: Model, x: FloatArray) -> Determination:
    """How well the points determine the constants at x: from the singular values of the scaled Jacobian."""
    jacobian = model.jacobian(x)
    norms = np.linalg.norm(jacobian, axis=0)
    matters = norms * np.maximum(1.0, np.abs(x)) > NO_EFFECT
    _, values, directions = np.linalg.svd(jacobian[:, matters] / norms[matters], full_matrices=True)
    values = np.concatenate([values, np.zeros(len(directions) - len(values))])
    blurred = values <= SINGULAR * values.max(initial=0.0)
    together = np.zeros((len(PARAMETERS), len(PARAMETERS)))
    together[np.ix_(matters, matters)] = directions[blurred].T @ directions[blurred]
    freedom = len(model.points) - int((~blurred).sum())
    error = None
    if freedom > 0:
        squares = float((model.errors(x, np.arange(len(model.points))) ** 2).sum()) / freedom
        seen = directions[~blurred] / values[~blurred, None]
        error = np.full(len(PARAMETERS), np.inf)
        error[matters] = np.sqrt(squares * (seen**2).sum(axis=0)) / norms[matters]
    either = model.either(x)
    if matters[list(either)].any():
        together[np.ix_(either, either)] = 1.0
    return Determination(
        matters=matters,
        standard_error=error,
        tied_to=tuple(
            tuple(int(other) for other in np.flatnonzero(np.abs(row) > SHARE) if other != index)
            for index, row in enumerate(together)
        ),
    )
