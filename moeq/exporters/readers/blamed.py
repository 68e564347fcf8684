"""Another package's layout: what it raises becomes one line that names that package, and its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moeq.exporters.exporter import Exporter
from moeq.exporters.readers.layout import Grid, Layout, Parts, Stored
from moeq.registry import EXPORTERS

if TYPE_CHECKING:
    from moeq.models.source import TensorHeader


class BlamedLayout:
    """A `Layout` of another package's exporter. A ValueError about a matrix stays one: callers say which it is."""

    def __init__(self, exporter: Exporter, layout: Layout) -> None:
        self._name, self._layout = exporter.name, layout
        with EXPORTERS.blaming(exporter.name, lambda: self._at("anchor and parts")):
            self.anchor, self.parts = str(layout.anchor), tuple(layout.parts)

    def grid(self, names: Sequence[str]) -> Grid | None:
        found: Grid | None = self._asked("grid", (Grid, type(None)), (), names)
        return found

    def shape(self, headers: Mapping[str, TensorHeader], grid: Grid) -> tuple[int, int]:
        rows, inputs = self._asked("shape", (tuple, list), (ValueError,), headers, grid)
        return rows, inputs

    def check(self, headers: Mapping[str, TensorHeader], grid: Grid, rows: int, inputs: int) -> None:
        self._asked("check", (object,), (ValueError,), headers, grid, rows, inputs)

    def read(self, parts: Parts, grid: Grid, rows: int, inputs: int) -> Stored:
        found: Stored = self._asked("read", (Stored,), (ValueError,), parts, grid, rows, inputs)
        return found

    def _at(self, what: str) -> str:
        kind = type(self._layout)
        return f"{what} of {kind.__module__}.{kind.__qualname__}"

    def _asked(self, name: str, gives: tuple[type, ...], says: tuple[type[Exception], ...], *given: Any) -> Any:
        """What a function gives, one of some classes; says: what it may raise."""
        with EXPORTERS.blaming(self._name, lambda: self._at(f"{name}()"), says):
            found = getattr(self._layout, name)(*given)
            if not isinstance(found, gives):
                raise TypeError(f"it returns a {type(found).__name__}, no {gives[0].__name__}")
            return found
