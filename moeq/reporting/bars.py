"""Bars: one figure of several policies at every grid point, and estimates beside stated ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeq.reporting import formats, svg
from moeq.reporting.html import Drawing

LEFT, BELOW, RIGHT, PLANE = 64, 48, 14, 220
BAR, GAP, LEAST = 13, 22, 420  # points: a bar, between two groups, the least width of a plane
LEGEND_ROW, LEGEND = 18, {"loc": "upper left", "bbox_to_anchor": (0, 1), "handlelength": 1.2}
ROW, NAMES, NOTES = 24, 12, 120


@dataclass(frozen=True, kw_only=True)
class Series:
    """One policy's bars; inner: a part of each that is drawn in front of it, narrower."""

    name: str
    values: Sequence[float]
    inner: Sequence[float] | None = None
    own: bool = False


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A stated range and its estimate, with a note behind them."""

    name: str
    stated: tuple[float, float]
    estimate: tuple[float, float]
    missed: bool
    note: str


def grouped_bars(
    name: str, label: str, groups: Sequence[str], series: Sequence[Series], axis: str, inner: str = ""
) -> Drawing:
    """Bars of every series at every group; `axis` names the values, `inner` what the narrow bars in front are."""
    from matplotlib.patches import Patch

    inside = max(LEAST, len(groups) * (len(series) * BAR + GAP))
    entries = len(series) + bool(inner)
    widest = max(svg.text_width(line.name) for line in series) + 40
    columns = max(1, min(entries, int((inside + LEFT) // widest)))
    above = LEGEND_ROW * -(-entries // columns) + 12
    width, height = LEFT + inside + RIGHT, above + PLANE + BELOW

    def fill(figure: Any) -> None:
        plane = svg.axes(figure, LEFT, BELOW, inside, PLANE)
        pitch = inside / len(groups)
        step = min(2.0 * BAR, (pitch - GAP) / len(series))
        centres = (np.arange(len(groups)) + 0.5) * pitch
        for index, (line, look) in enumerate(zip(series, _looks(series), strict=True)):
            places = centres + (index - (len(series) - 1) / 2) * step
            plane.bar(places, line.values, width=0.86 * step, label=line.name, **look)
            if line.inner is not None:
                plane.bar(places, line.inner, width=0.4 * step, color=svg.INK, linewidth=0)
        handles = plane.get_legend_handles_labels()[0]
        if inner:
            handles.append(Patch(facecolor=svg.INK, label=inner))
        plane.set_xlim(0, inside)
        plane.set_xticks(centres, groups)
        plane.tick_params(axis="x", length=0)
        plane.yaxis.get_major_locator().set_params(nbins=6)
        plane.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        plane.grid(axis="y")
        plane.set(xlabel="input / output tokens", ylabel=axis)
        figure.legend(handles=handles, ncol=columns, columnspacing=1.4, **LEGEND)

    return svg.draw(name, label, width, height, fill)


def _looks(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Colour and hatch of every series: the page's colours, then the same with stripes; own ones are orange."""
    others = (svg.SERIES[0], svg.SERIES[2], svg.SERIES[3], svg.MUTED)
    looks, counts = [], {True: 0, False: 0}
    for line in series:
        number = counts[line.own]
        counts[line.own] += 1
        colour = svg.SERIES[1] if line.own else others[number % len(others)]
        striped = number >= (1 if line.own else len(others))
        look = {"color": svg.PAPER, "hatch": "////"} if striped else {"color": colour}
        looks.append(look | {"edgecolor": colour, "linewidth": 1.0})
    return looks


def beside_chart(name: str, label: str, rows: Sequence[Beside], axis: str) -> Drawing:
    """One row a figure: the stated range as a wide pale bar, the estimate as a narrow one in front, a note behind."""
    left = int(max(svg.text_width(row.name) for row in rows)) + NAMES
    inside, height = 340, ROW * len(rows)
    above = LEGEND_ROW + 8
    width = left + inside + NOTES
    from matplotlib.patches import Patch

    most = max(max(*row.stated, *row.estimate) for row in rows)
    least = 0.006 * most  # of a single number

    def fill(figure: Any) -> None:
        plane = svg.axes(figure, left, BELOW, inside, height)
        places = np.arange(len(rows))[::-1]
        _spans(plane, places, [row.stated for row in rows], least, 0.66, svg.FAINT, svg.MUTED)
        colours = [svg.SERIES[1] if row.missed else svg.SERIES[0] for row in rows]
        _spans(plane, places, [row.estimate for row in rows], least, 0.26, colours, colours)
        for place, row, colour in zip(places, rows, colours, strict=True):
            plane.text(1.02, place, row.note, transform=plane.get_yaxis_transform(), va="center_baseline", color=colour)
        plane.set_yticks(places, [row.name for row in rows])
        plane.tick_params(axis="y", length=0)
        plane.set(xlim=(0, 1.04 * most), ylim=(-0.6, len(rows) - 0.4), xlabel=axis)
        plane.xaxis.set_major_formatter(lambda value, _: f"{value:g}{formats.TIMES}")
        plane.grid(axis="x")
        marks = [("stated", svg.FAINT, svg.MUTED), ("estimate", svg.SERIES[0], svg.SERIES[0])]
        marks += [("estimate, missed", svg.SERIES[1], svg.SERIES[1])] if any(row.missed for row in rows) else []
        handles = [Patch(facecolor=face, edgecolor=edge, label=text) for text, face, edge in marks]
        figure.legend(handles=handles, ncol=3, **LEGEND)

    return svg.draw(name, label, width, above + height + BELOW, fill)


def _spans(plane: Any, places: Any, ranges: Sequence[tuple[float, float]], least: float, height: float, face: Any,
           edge: Any) -> None:  # fmt: skip
    """Horizontal bars from low to high, at least `least` wide around the middle."""
    lows = [min(low, (low + high - least) / 2) for low, high in ranges]
    widths = [max(high - low, least) for low, high in ranges]
    plane.barh(places, widths, left=lows, height=height, color=face, edgecolor=edge, linewidth=0.8)
