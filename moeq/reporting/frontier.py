"""The frontier of assignments: objective against bytes by method, as an SVG of its own, and a run's in its report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeq.assigners.report import THIS, UNIFORM, Point
from moeq.reporting import svg
from moeq.reporting.charts import BYTES_AXIS, mark_bytes
from moeq.reporting.html import Drawing, Section, figure
from moeq.tables import human_size

WIDTH, HEIGHT = 760, 420
LEFT, BELOW, ABOVE, RIGHT = 74, 44, 10, 190
COLOURS = """:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --muted: #5b6570; --faint: #dfe3e8;
  --series-1: #0067a8; --series-2: #c4500a; --series-3: #00805c; --series-4: #a84c86; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ed; --muted: #9aa5b1; --faint: #353c45;
  --series-1: #5ab4f0; --series-2: #f0935a; --series-3: #3ecfa0; --series-4: #e08fc0; } }
svg { background: var(--paper); font-family: system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }"""


def frontier_svg(points: Sequence[Point]) -> str:
    """An SVG file; dominated points are hollow, both axes logarithmic (objectives of 0 are left out)."""
    drawing = _drawing("frontier", "objective against bytes by method", points, "objective (hollow: dominated)")
    head, _, rest = drawing.svg.partition(">")
    return f"{head}>\n<style>{COLOURS}</style>{rest}\n"


def frontier(points: Sequence[Point]) -> Section | None:
    """What the losses predict for other sizes; points: as `around` makes them. None where nothing costs anything."""
    if not any(point.objective > 0 for point in points):
        return None
    own = next(point for point in points if point.method == THIS)
    widths = [point for point in points if point.method == UNIFORM and point.objective > 0]
    label = f"Objective against bytes of all experts; {THIS}: {own.objective:.3g} at {human_size(own.expert_bytes)}."
    drawing = _drawing("around", label, points, "objective")
    caption = (
        "The objective is what the assignment keeps small: losses of the replicas on held-out tokens, weighted as the "
        "recipe says. The line has its least at every size, no measurement of the model, and training after the "
        f"assignment is not in it. Squares: {UNIFORM}, of {len(widths)} widths."
    )
    return Section("frontier", "What other sizes would cost", [figure(drawing, caption)])


def _drawing(name: str, label: str, points: Sequence[Point], measure: str) -> Drawing:
    shown = [point for point in points if point.objective > 0]
    methods = list(dict.fromkeys(point.method for point in shown))

    def fill(figure: Any) -> None:
        plane = svg.axes(figure, LEFT, BELOW, WIDTH - LEFT - RIGHT, HEIGHT - BELOW - ABOVE)
        for index, method in enumerate(methods):
            line = sorted((p for p in shown if p.method == method), key=lambda p: p.expert_bytes)
            _line(plane, method, line, svg.SERIES[index % len(svg.SERIES)], svg.MARKERS[index % len(svg.MARKERS)])
        _axes(plane, shown, measure)
        plane.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, handlelength=1.6)

    return svg.draw(name, label, WIDTH, HEIGHT, fill)


def _line(plane: Any, method: str, points: Sequence[Point], colour: str, marker: str) -> None:
    sizes, values = [p.expert_bytes for p in points], [p.objective for p in points]
    if len(points) > 1 and method != UNIFORM:  # between two widths of all experts there is nothing
        plane.plot(sizes, values, color=colour, linewidth=1.0, alpha=0.6)
    for point in points:
        face = svg.PAPER if point.dominated else colour
        plane.plot(
            [point.expert_bytes], [point.objective], marker, markersize=5, markerfacecolor=face, markeredgecolor=colour
        )
    plane.plot([], [], marker, color=colour, markersize=5, label=method)


def _axes(plane: Any, points: Sequence[Point], measure: str) -> None:
    sizes = [point.expert_bytes for point in points] or [1]
    plane.set(xscale="log", yscale="log", xlim=(min(sizes) / 1.05, max(sizes) * 1.05))
    mark_bytes(plane)
    plane.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    plane.yaxis.set_minor_formatter(lambda value, _: "")
    plane.grid()
    plane.set(xlabel=BYTES_AXIS, ylabel=measure)
