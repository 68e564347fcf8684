"""Fit a hardware file to measured points: efficiencies and fixed latencies by bounded least squares, and nothing else.

What is minimized are squares of relative errors (estimated over measured seconds, less 1). Peaks, capacities and
dataflows stay as the file has them. How well the fit foretells is asked of rows that were left out of it.

Letters: P measured points, C constants that are fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from moeq.artifacts.files import write_text
from moeq.estimator.devices import Constant, Hardware
from moeq.estimator.fitting import PARAMETERS, FloatArray, Model, Setting, determination, held_out
from moeq.estimator.measured import Point, read_points
from moeq.estimator.sheets import Table

AT_BOUND = 1e-6  # of the fit's own variables: closer than this, a constant is at the end of its range
WEAK = 0.25  # standard error over value above which a constant is only weakly determined
Verdict = Literal["determined", "weakly determined", "tied", "no effect", "hidden", "at its bound"]


@dataclass(frozen=True, kw_only=True)
class FittedConstant:
    """One constant: dotted key, SI value before and after, standard error (None: cannot be told), and its verdict.

    tied_to: constants from which these points cannot tell it apart.
    """

    key: str
    before: float
    value: float
    standard_error: float | None
    verdict: Verdict
    tied_to: tuple[str, ...] = ()

    @property
    def is_efficiency(self) -> bool:
        """Whether it is a share in (0, 1]; otherwise it is seconds."""
        return self.key.endswith("efficiency")

    @property
    def text(self) -> str:
        """As a hardware file writes it."""
        return self.shown(self.value)

    def shown(self, value: float) -> str:
        """A value of this constant as a hardware file writes it."""
        return f"{value:.6g}" if self.is_efficiency else f"{round(value * 1e6, 6):g} us"


@dataclass(frozen=True, kw_only=True)
class FitError:
    """Relative errors of estimated seconds, absolute values: their mean and the largest."""

    mean: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class FittedPoint:
    """A measured point and what is estimated for it: before, fitted, and by a fit that did not see its row.

    held_out_seconds is None where there are too few rows to leave any out.
    """

    point: Point
    before_seconds: float
    fitted_seconds: float
    held_out_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fit: the hardware with its fitted constants, every constant and point, errors before, fitted and held out."""

    file: str
    hardware: Hardware
    constants: tuple[FittedConstant, ...]
    points: tuple[FittedPoint, ...]
    before: FitError
    fitted: FitError
    held_out: FitError | None
    folds: int


def fit_file(path: Path, hardware: Hardware, setting: Setting | None = None) -> Fit:
    """Fit a hardware's constants to the measured points of a CSV file (`measured.py` names its columns).

    setting: the model, its placement and the context where rows do not say. Raises EstimateError, naming the row, for
    points that cannot be read or estimated.
    """
    points = read_points(path)
    model = Model(points, hardware, setting or Setting(), path)
    x, start = model.solve(np.arange(len(points)))
    x = model.without_idle(x)
    before, fitted = model.seconds(model.start), model.seconds(x)
    left_out, folds = held_out(model, start)
    constants = tuple(_constants(model, x))
    error = None if left_out is None else _error(left_out, model.measured)
    measured = f"{path.name} ({len(points)} points" + (")" if error is None else f", held-out error {error.mean:.1%})")
    sourced = tuple(_sourced(hardware, constants, measured))
    return Fit(
        file=path.name,
        hardware=model.hardware_at(x).model_copy(update={"constants": sourced}),
        constants=constants,
        points=tuple(
            FittedPoint(
                point=point,
                before_seconds=float(before[index]),
                fitted_seconds=float(fitted[index]),
                held_out_seconds=None if left_out is None else float(left_out[index]),
            )
            for index, point in enumerate(points)
        ),
        before=_error(before, model.measured),
        fitted=_error(fitted, model.measured),
        held_out=error,
        folds=folds,
    )


def write_hardware(path: Path, fit: Fit) -> None:
    """Write the fitted hardware as a file that `load_hardware` reads; fitted constants name the measurements."""
    tree: dict[str, Any] = {
        "name": path.stem,
        "description": f"{fit.hardware.name}, fitted to {len(fit.points)} measured points",
    }
    for constant in fit.hardware.constants:
        *parents, leaf = constant.key.split(".")
        here = tree
        for parent in parents:
            here = here.setdefault(parent, {})
        here[leaf] = {"value": _scalar(constant.text), "source": constant.source}
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    write_text(path, f"# {fit.hardware.name}, with constants fitted to measured points.\n{text}")


def describe(constant: FittedConstant) -> str:
    """A verdict in words."""
    words = {
        "no effect": "does not matter to these points, kept",
        "tied": f"these points cannot tell it from {', '.join(constant.tied_to)}",
        "hidden": "hidden behind another term at this value; the file's own is too slow for these points",
        "at its bound": "at the end of its range: another term or the peak may be wrong",
    }
    if constant.verdict in words:
        return words[constant.verdict]
    if constant.standard_error is None:
        return f"{constant.verdict}; as many constants as points, no error can be given"
    share = constant.standard_error / constant.value if constant.value else float("inf")
    return f"{constant.verdict}, standard error {share:.0%}"


def fit_tables(fit: Fit) -> list[Table]:
    """The fit as tables to print: errors, constants, points."""
    errors = [("as the file has it", fit.before), ("fitted", fit.fitted)]
    notes = ["Errors are relative to the measured seconds."]
    if fit.held_out is None:
        notes.append("One row: nothing can be held out.")
    else:
        errors.append((f"held out ({fit.folds} parts of the rows, each by a fit to the others)", fit.held_out))
    return [
        Table(
            title=f"{fit.hardware.name} against {len(fit.points)} points of {fit.file}",
            columns=("constants", "mean error", "largest error"),
            rows=tuple((name, error.mean, error.largest) for name, error in errors),
            notes=tuple(notes),
        ),
        Table(
            title="Fitted constants",
            columns=("constant", "before", "fitted", "how sure"),
            rows=tuple((row.key, row.shown(row.before), row.text, describe(row)) for row in fit.constants),
        ),
        Table(
            title="Measured and estimated seconds",
            columns=("row", "policy", "batch", "measure", "measured", "before", "fitted", "held out", "error"),
            rows=tuple(
                (
                    row.point.row, row.point.policy, row.point.batch, row.point.measure, row.point.seconds,
                    row.before_seconds, row.fitted_seconds, row.held_out_seconds,
                    row.fitted_seconds / row.point.seconds - 1,
                )
                for row in fit.points
            ),
        ),
    ]  # fmt: skip


def _error(seconds: FloatArray, measured: FloatArray) -> FitError:
    errors = np.abs(seconds / measured - 1)
    return FitError(mean=float(errors.mean()), largest=float(errors.max()))


def _constants(model: Model, x: FloatArray) -> Iterator[FittedConstant]:
    """Every constant with how well the points determine it."""
    known = determination(model, x)
    for index, (parameter, fitted, before) in enumerate(zip(PARAMETERS, x.tolist(), model.start.tolist(), strict=True)):
        value, tied = parameter.from_fit(fitted), known.tied_to[index]
        error = None if known.standard_error is None else parameter.error(fitted, float(known.standard_error[index]))
        verdict: Verdict = "determined"
        if tied:
            verdict = "tied"
        elif not known.matters[index]:
            verdict = "no effect" if fitted == before else "hidden"
        elif min(abs(fitted - bound) for bound in parameter.bounds) < AT_BOUND:
            verdict = "at its bound"
        elif error is not None and error > WEAK * value:
            verdict = "weakly determined"
        yield FittedConstant(
            key=parameter.key,
            before=parameter.from_fit(before),
            value=value,
            standard_error=None if verdict in ("no effect", "tied", "hidden") else error,
            verdict=verdict,
            tied_to=tuple(PARAMETERS[other].key for other in tied),
        )


def _sourced(hardware: Hardware, fitted: tuple[FittedConstant, ...], measured: str) -> Iterator[Constant]:
    """The constants of a hardware file, fitted ones with their new value, the measurements as their source."""
    changed = {
        constant.key: constant
        for constant in fitted
        if constant.verdict != "no effect" and (constant.verdict, constant.value) != ("tied", constant.before)
    }
    for old in hardware.constants:
        if (new := changed.get(old.key)) is None:
            yield old
        else:
            doubt = "" if new.verdict == "determined" else f"; {describe(new)}"
            source = f"fitted to {measured}{doubt}; before: {old.text}"
            yield Constant(key=old.key, text=new.text, source=source)


def _scalar(text: str) -> Any:
    """A constant as YAML holds it: a number where its text is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
