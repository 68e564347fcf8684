"""Charts: similarity by layer, loss by width, experts by width, size against perplexity or logit error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeq.reporting import formats, svg
from moeq.reporting.html import Drawing
from moeq.reporting.labels import Box, place
from moeq.reporting.maps import WIDTHS, ticks
from moeq.reporting.names import layer_names
from moeq.tables import human_bytes

WIDTH, HEIGHT = 532, 270
LEFT, BELOW, ABOVE, RIGHT = 86, 44, 10, 16
MARKERS = ("o", "s", "^", "D")
BYTES_AXIS = "bytes of all experts, scales and zero points counted (logarithmic)"


@dataclass(frozen=True, kw_only=True)
class Band:
    """A middle value with a range around it at every position of x."""

    middle: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A point of the size chart; cost: what should be small, such as perplexity."""

    name: str
    size_bytes: int
    cost: float
    exported: bool


def plane_of(figure: Any, width: int = WIDTH, height: int = HEIGHT) -> Any:
    """Axes of a chart of this size, the usual one."""
    return svg.axes(figure, LEFT, BELOW, width - LEFT - RIGHT, height - BELOW - ABOVE)


def mark_bytes(plane: Any) -> None:
    """Round sizes at a logarithmic axis of bytes whose limits are set: three or more of them, no more than fit."""
    low, high = plane.get_xlim()
    for part in (1, 2, 4, 8, 16):  # of a doubling
        steps = (2**k * (part + step) // part for k in range(4, 64) for step in range(part))
        marks = [mark for mark in steps if low <= mark <= high]
        if len(marks) >= 3:
            break
    marks = marks[:: 1 + len(marks) // 7] or [round((low * high) ** 0.5)]
    plane.set_xticks(marks, [human_bytes(mark) for mark in marks])
    plane.set_xticks([], minor=True)


def by_layer(plane: Any, names: Sequence[str]) -> None:
    """Name the axes of cosines over layers, by the model's own names of them where these are numbered."""
    layers, named = len(names), layer_names(names)
    places = ticks(layers, (WIDTH - LEFT - RIGHT) / layers, 30)
    numbered = all(label.isdigit() for label in named.labels)
    labels = [named.labels[place] if numbered else str(place + 1) for place in places]
    plane.set(xlim=(-0.5, layers - 0.5))
    plane.set_xticks(places, labels)
    title = named.title if numbered else "MoE layers in the model's order"
    plane.set(xlabel=title, ylabel="cosine, prefill and decode")
    plane.grid(axis="y")


def similarity_chart(name: str, label: str, band: Band, names: Sequence[str]) -> Drawing:
    """Cosine of prefill and decode by layer: mean over sequences, 10-90 % of them, mean over layers."""

    def fill(figure: Any) -> None:
        plane, layers = plane_of(figure), np.arange(len(band.middle))
        known = np.isfinite(band.middle)
        thick, large = (4, 5) if len(layers) <= 40 else (2, 3)
        bars = (layers[known], band.low[known], band.high[known])
        plane.vlines(*bars, color=svg.SERIES[0], alpha=0.35, linewidth=thick)
        plane.plot(layers, band.middle, color=svg.SERIES[0], marker="o", markersize=large, linewidth=1.2)
        mean = float(np.mean(band.middle[known]))
        plane.axhline(mean, color=svg.SERIES[1], linewidth=1.2, linestyle=(0, (5, 3)))
        low = min(0.95, np.floor(float(np.nanmin(band.low)) * 20 - 0.2) / 20)
        room = 0.16 * (1 - low)  # below the curve, for the text
        plane.set_ylim(low - room, 1 + 0.02 * (1 - low))
        note = f"mean over layers {mean:.3f} (dashed)"
        plane.text(0.99, 0.03, note, transform=plane.transAxes, ha="right", color=svg.SERIES[1])
        plane.yaxis.get_major_locator().set_params(nbins=5)
        by_layer(plane, names)

    return svg.draw(name, label, WIDTH, HEIGHT, fill)


def loss_chart(name: str, label: str, widths: Sequence[int], methods: Mapping[str, Band]) -> Drawing:
    """Relative loss against width, one line a method, logarithmic."""

    def fill(figure: Any) -> None:
        plane, x = plane_of(figure), np.arange(len(widths))
        for index, (method, band) in enumerate(methods.items()):
            colour, marker = svg.SERIES[index % len(svg.SERIES)], MARKERS[index % len(MARKERS)]
            middle, low, high = (np.where(line > 0, line, np.nan) for line in (band.middle, band.low, band.high))
            plane.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
            plane.plot(x, middle, color=colour, marker=marker, markersize=5, linewidth=1.6, label=method)
        plane.set_yscale("log")
        plane.yaxis.set_major_formatter(lambda value, _: formats.share(value))
        plane.yaxis.set_minor_formatter(lambda value, _: "")
        plane.tick_params(which="minor", length=0)
        plane.set_xticks(x, [str(width) for width in widths])
        plane.set(xlim=(-0.3, len(widths) - 0.7), xlabel="code bits", ylabel="relative loss")
        plane.grid(axis="y")
        plane.legend(loc="upper right", handlelength=2.2)

    return svg.draw(name, label, WIDTH, HEIGHT, fill)


def width_chart(name: str, label: str, counts: Mapping[int, int], what: str = "experts") -> Drawing:
    """Bars of experts, or matrices, by width."""
    total, top = sum(counts.values()), max(counts.values())
    width = LEFT + RIGHT + max(220, 92 * len(counts))

    def fill(figure: Any) -> None:
        plane = plane_of(figure, width, 210)
        for x, (bits, count) in enumerate(counts.items()):
            plane.bar(x, count, width=0.62, color=WIDTHS[bits], edgecolor=svg.MUTED, linewidth=0.6)
            text = f"{count:,} ({100 * count / total:.0f}{formats.NARROW_SPACE}%)"
            plane.annotate(text, (x, count), (0, 4), textcoords="offset points", ha="center")
        plane.set_xticks(range(len(counts)), [str(bits) for bits in counts])
        plane.set(xlim=(-0.6, len(counts) - 0.4), ylim=(0, 1.16 * top), xlabel="code bits", ylabel=what)
        plane.yaxis.get_major_locator().set_params(integer=True, nbins=5)
        plane.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        plane.grid(axis="y")

    return svg.draw(name, label, width, 210, fill)


def dominated(points: Sequence[Variant]) -> list[bool]:
    """Whether some other point is at least as small and as good, and better in one of both."""

    def beats(a: Variant, b: Variant) -> bool:
        no_worse = a.size_bytes <= b.size_bytes and a.cost <= b.cost
        return no_worse and (a.size_bytes < b.size_bytes or a.cost < b.cost)

    return [any(beats(other, point) for other in points) for point in points]


def size_chart(name: str, label: str, points: Sequence[Variant], measure: str) -> Drawing:
    """Expert bytes (logarithmic) against a measure; dominated points are hollow, the exported one has a ring."""
    height, width = 340, 568  # two beside each other on a wide page

    def fill(figure: Any) -> None:
        plane = plane_of(figure, width, height)
        _size_axes(plane, points, measure)
        for point, hollow in zip(points, dominated(points), strict=True):
            colour = svg.SERIES[1] if point.exported else svg.SERIES[0]
            at, face = ([point.size_bytes], [point.cost]), svg.PAPER if hollow else colour
            edge = {"markeredgecolor": colour, "markeredgewidth": 1.6, "clip_on": False}
            plane.plot(*at, "o", markersize=8, markerfacecolor=face, **edge)
            if point.exported:
                plane.plot(*at, "o", markersize=15, markerfacecolor="none", markeredgecolor=colour, clip_on=False)
        _write_names(plane, points, Box(LEFT, BELOW, width - RIGHT, height - 4))

    return svg.draw(name, label, width, height, fill)


def _size_axes(plane: Any, points: Sequence[Variant], measure: str) -> None:
    sizes, values = [p.size_bytes for p in points], [p.cost for p in points]
    plane.set_xscale("log")
    spread = max(1.25, (max(sizes) / min(sizes)) ** 0.14)
    plane.set_xlim(min(sizes) / spread, max(sizes) * spread)
    mark_bytes(plane)
    if max(values) > 4 * min(values):
        plane.set_yscale("log")
        plane.set_ylim(min(values) / 1.25, max(values) * 1.25)
        for axis in (plane.yaxis.set_major_formatter, plane.yaxis.set_minor_formatter):
            axis(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else "")
    else:
        room = 0.12 * (max(values) - min(values)) or 0.05 * max(values)
        plane.set_ylim(min(values) - room, max(values) + room)
    plane.grid()
    plane.set(xlabel=BYTES_AXIS, ylabel=measure)


def _write_names(plane: Any, points: Sequence[Variant], bounds: Box) -> None:
    """Every point's name beside it, where it covers no other name or point."""
    spots = [tuple(plane.transData.transform((p.size_bytes, p.cost))) for p in points]
    for point, spot, box in zip(points, spots, place(spots, [p.name for p in points], bounds), strict=True):
        if box.distance(spot) > 14:
            start = plane.transData.inverted().transform(spot)
            end = plane.transData.inverted().transform(box.nearest(spot))
            plane.plot(*zip(start, end, strict=True), color=svg.MUTED, linewidth=0.8, zorder=1)
        plane.text(
            *plane.transData.inverted().transform((box.left, (box.bottom + box.top) / 2)),
            point.name,
            va="center_baseline",
            fontweight="bold" if point.exported else "normal",
        )
