"""Gates: bounds of a recipe with what a run came to (gates.json beside the report)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from moeq.artifacts.files import write_json
from moeq.artifacts.stage import Frozen, read_model

SCHEMA_VERSION = 1
NAME = "gates.json"
REMEDY = "run `moeq report` again"
MOST_DIGITS = 17  # of a float
MOST = {"equal_top1": 1.0}  # what a figure cannot exceed


class Gate(Frozen):
    """One bound and what was measured; value None: it was not, or is no number. low, high: interval of 95 %.

    of: the runtime of a gate on formats, which has no bound; why: what is wrong beside the figures.
    """

    name: str
    holds: bool
    value: float | None = None
    bound: float | None = None
    side: Literal["<=", ">="] | None = None
    low: float | None = None
    high: float | None = None
    of: str | None = None
    why: str | None = None

    def measured(self) -> str:
        """What was measured against the bound, or of which runtime the gate is."""
        if self.bound is None:
            return self.of or ""
        interval = ""
        if self.low is not None and self.high is not None:
            interval = f" (95 % {self._shown(self.low)} to {self._shown(self.high)})"
        return f"{self._shown(self.value)}{interval} {self.side} {self._shown(self.bound)}"

    def text(self) -> str:
        """The gate with what was measured, and what is wrong beside."""
        return f"{self.name}: {self.measured()}" + (f" ({self.why})" if self.why else "")

    def line(self) -> str:
        """The gate as one line of a terminal or a log."""
        why = f" ({self.why})" if self.why else ""
        return f"gate {self.name}: {self.measured()} {'ok' if self.holds else 'failed'}{why}"

    def _shown(self, figure: float | None) -> str:
        """A figure with as many digits as tell the value from the bound."""
        if figure is None:
            return "nothing"
        if self.name == "bytes":
            return f"{int(figure):,} B"
        digits = 4
        if self.value is not None and self.bound is not None and self.value != self.bound:
            while digits < MOST_DIGITS and f"{self.value:.{digits}g}" == f"{self.bound:.{digits}g}":
                digits += 1
        percent = " %" if self.name == "perplexity_increase" else ""
        return f"{figure:.{digits}g}{percent}"


class Gates(Frozen):
    schema_version: int = SCHEMA_VERSION
    gates: tuple[Gate, ...]


def bounded(
    name: str, value: float | None, bound: float, side: Literal["<=", ">="], stderr: float | None = None
) -> Gate:
    """A gate on a figure: at most or at least the bound itself. What is not a finite number holds nothing."""
    if value is None or not math.isfinite(value):
        why = "not measured" if value is None else f"{value} is no number"
        return Gate(name=name, holds=False, bound=bound, side=side, why=why)
    wide = None if stderr is None or not math.isfinite(stderr) else 1.96 * stderr
    return Gate(
        name=name,
        holds=value <= bound if side == "<=" else value >= bound,
        value=value,
        bound=bound,
        side=side,
        low=None if wide is None else max(0.0, value - wide),
        high=None if wide is None else min(MOST.get(name, math.inf), value + wide),
    )


def write_gates(path: Path, gates: tuple[Gate, ...]) -> None:
    write_json(path, Gates(gates=gates).model_dump(mode="json"))


def read_gates(path: Path) -> tuple[Gate, ...]:
    """ArtifactError where they are missing, damaged or of another schema version."""
    return read_model(path, Gates, SCHEMA_VERSION, remedy=REMEDY).gates
