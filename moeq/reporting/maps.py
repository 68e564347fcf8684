"""Maps of layers x experts: one small embedded picture each, however many experts there are.

L layers, E experts of the widest layer (narrower layers end earlier). A cell is a whole number of points, and
`SHARPNESS` pixels a point, so that cells and outlines come out even; cells without gaps and outlines are one pixel
each, which the viewer scales.

Colour scales run from the least to the largest value, but for outliers: values further than `FENCE` interquartile
ranges beyond the quartiles (of the logarithms, on a logarithmic scale) take the colours of the ends, so that one of
them does not make all others look alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeq.reporting import formats, svg
from moeq.reporting.html import Drawing
from moeq.reporting.names import layer_names

FENCE = 3  # Tukey's "far out"
SHARPNESS = 2  # pixels of the picture a point
WORTH_MAP, LOSS_MAP = "viridis", "plasma"
ABSENT = (0.55, 0.58, 0.62, 1.0)  # no figure for this expert: grey, which no colour map here holds
OUTLINE = (1.0, 0.45, 0.0, 1.0)
WIDTHS = {0: "#d5d8dc", 1: "#fde725", 2: "#7ad151", 3: "#22a884", 4: "#2a788e", 8: "#414487", 16: "#440154"}
# but for 0, dropped: viridis backwards
DARK_WIDTH = 3.5  # from which on text in cells is white
MOST_TEXTS = 600
GAPS_FROM = 16  # pixels of a cell that has gaps around it
WHOLE, HALF = 880, 440  # room for a map that has the page's width, or half of it
LEFT, BELOW, ABOVE, RIGHT = 40, 84, 8, 16  # points around the map
TITLE = 20  # and for each line above it
BESIDE = 14  # between the names of layers and the map
LEGEND_WIDTH, SMALLEST_WIDTH = 200, 372

Pixels = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What a map of values shows.

    name: with its unit, beside the colour scale; form: a value as text; log: logarithmic scale, for positive values;
    from_zero: the scale begins at 0; zero_is_grey: exactly 0 is grey, as what is not known always is.
    """

    name: str
    form: Callable[[float], str]
    log: bool = False
    from_zero: bool = False
    zero_is_grey: bool = False
    colours: str = WORTH_MAP


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A colour scale from `low` to `high`, the ends on a logarithmic one being positive.

    below, above: how many values lie beyond and take the colours of the ends; least, largest: of all values.
    """

    low: float
    high: float
    log: bool
    below: int
    above: int
    least: float
    largest: float

    def parts(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Where values lie on the scale, from 0 to 1; NaN where a value is not known or has no logarithm."""
        low, high = self._ends()
        shown = _logs(values) if self.log else values
        return np.clip((shown - low) / (high - low), 0, 1)

    def at(self, part: float) -> float:
        """The value at a part of the scale."""
        low, high = self._ends()
        value = low + part * (high - low)
        return float(10**value) if self.log else value

    def _ends(self) -> tuple[float, float]:
        low, high = (float(np.log10(end)) for end in (self.low, self.high)) if self.log else (self.low, self.high)
        return low, max(high, low + 1e-9 * max(1.0, abs(low)))


def scale_of(rows: Sequence[np.ndarray], quantity: Quantity) -> Scale:
    """The colour scale of a map's values; from 0 (log: 1) to 1 where none is known."""
    values = stack(rows)
    shown = _logs(values) if quantity.log else values
    known = np.sort(shown[np.isfinite(shown)])
    if not known.size:
        return Scale(
            low=float(quantity.log), high=1.0, log=quantity.log, below=0, above=0, least=np.nan, largest=np.nan
        )
    first, third = np.quantile(known, (0.25, 0.75))
    reach = FENCE * (third - first) if third > first else np.inf
    inside = known[(known >= first - reach) & (known <= third + reach)]
    low = 0.0 if quantity.from_zero else float(inside[0])
    high = float(inside[-1])
    ends = (low, high, float(known[0]), float(known[-1]))
    low, high, least, largest = (10**end for end in ends) if quantity.log else ends
    below = 0 if quantity.from_zero else int((known < inside[0]).sum())
    above = int((known > inside[-1]).sum())
    return Scale(low=low, high=high, log=quantity.log, below=below, above=above, least=least, largest=largest)


def _logs(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Decimal logarithms, NaN where there is none."""
    positive = np.isfinite(values) & (values > 0)
    return np.where(positive, np.log10(np.where(positive, values, 1.0)), np.nan)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of a map in points. room: how wide it may be, if cells of 2 points allow it."""

    layers: int
    experts: int
    room: int

    @property
    def cell_width(self) -> int:
        return min(40, max(2, self.room // self.experts))

    @property
    def cell_height(self) -> int:
        return min(26, self.cell_width, max(3, 620 // self.layers)) if self.experts > 20 else 26

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the map itself."""
        return self.cell_width * self.experts, self.cell_height * self.layers


def stack(rows: Sequence[np.ndarray]) -> NDArray[np.float64]:
    """Layers of unequal width as one float array [L, E], NaN where a layer has no such expert."""
    result = np.full((len(rows), max(len(row) for row in rows)), np.nan)
    for index, row in enumerate(rows):
        result[index, : len(row)] = row
    return result


def value_map(
    name: str,
    label: str,
    rows: Sequence[np.ndarray],
    quantity: Quantity,
    title: str = "",
    room: int = WHOLE,
    scale: Scale | None = None,
    layers: Sequence[str] = (),
) -> Drawing:
    """Values in the colours of a scale (None: their own); experts without one are grey. layers: the model's names."""
    values, scale = stack(rows), scale or scale_of(rows, quantity)
    parts = scale.parts(values)
    colours = _colours(quantity.colours, parts)
    there = np.isfinite(stack([np.zeros(len(row)) for row in rows]))
    colours[there & (np.isnan(parts) | (quantity.zero_is_grey & (values == 0)))] = ABSENT
    marks = [(part, quantity.form(scale.at(part))) for part in (0.0, 0.5, 1.0)]
    if scale.below:
        marks[0] = (0.0, f"≤ {marks[0][1]}")
    if scale.above:
        marks[2] = (1.0, f"≥ {marks[2][1]}")
    legend = partial(_bar, colour_map=quantity.colours, quantity=quantity.name, marks=marks)
    return _map(
        name, label, colours, values, legend, svg.text_width(quantity.name), room=room, title=title, layers=layers
    )


def width_map(
    name: str,
    label: str,
    bits: Sequence[np.ndarray],
    hot: Sequence[np.ndarray],
    title: str = "",
    room: int = WHOLE,
    present: Sequence[int] = (),
    layers: Sequence[str] = (),
) -> Drawing:
    """Widths in the colours of `WIDTHS`, means of several in one between; widths are written where there is room.

    Experts on the GPU are outlined. present: the widths of the legend; none: those of the experts. layers: the model's
    names of them.
    """
    from matplotlib.colors import to_rgba

    values, outlined = stack(bits), stack(hot) == 1
    known = np.array([to_rgba(colour) for colour in WIDTHS.values()])
    colours = np.stack([np.interp(np.nan_to_num(values), list(WIDTHS), channel) for channel in known.T], -1)
    colours[np.isnan(values)] = 0
    present = present or sorted({int(width) for row in bits for width in row})
    entries = _entries(present, bool(outlined.any()))
    beside = sum(_swatch_width(entry[2]) for entry in entries)
    legend = partial(_swatches, entries=entries)
    return _map(
        name, label, colours, values, legend, beside, outlined, room=room, texts=True, title=title, layers=layers
    )


def _colours(colour_map: str, parts: NDArray[np.float64]) -> Pixels:
    """RGBA [L, E, 4] of parts in [0, 1]; transparent where NaN."""
    from matplotlib import colormaps

    colours = np.asarray(colormaps[colour_map](np.nan_to_num(parts)), dtype=np.float64)
    colours[np.isnan(parts)] = 0
    return colours


def paint(colours: Pixels, grid: Grid, outlined: NDArray[np.bool_] | None) -> NDArray[np.uint8]:
    """The picture [L*height, E*width, 4] in pixels: a colour a cell, gaps between large cells, outlines.

    Without gaps and outlines a cell is one pixel.
    """
    height, width = grid.cell_height * SHARPNESS, grid.cell_width * SHARPNESS
    if min(height, width) < GAPS_FROM and (outlined is None or not outlined.any()):
        height = width = 1
    picture = np.repeat(np.repeat(colours, height, 0), width, 1)
    row = np.arange(picture.shape[0]) % height
    column = np.arange(picture.shape[1]) % width

    def frame(thickness: int) -> NDArray[np.bool_]:
        edge_row = (row < thickness) | (row >= height - thickness)
        edge_column = (column < thickness) | (column >= width - thickness)
        return np.asarray(edge_row[:, None] | edge_column[None, :])

    if outlined is not None and outlined.any():
        where = np.repeat(np.repeat(outlined, height, 0), width, 1)
        thickness = 2 if min(height, width) < 24 else 5
        picture[where & frame(max(1, min(thickness, min(height, width) // 4)))] = OUTLINE
    if min(height, width) >= GAPS_FROM:
        picture[frame(1)] = 0
    return np.round(picture * 255).astype(np.uint8)


def _map(
    name: str,
    label: str,
    colours: Pixels,
    values: NDArray[np.float64],
    legend: Callable[[Any], None],
    legend_width: float = 0,
    outlined: NDArray[np.bool_] | None = None,
    *,
    room: int,
    texts: bool = False,
    title: str = "",
    layers: Sequence[str] = (),
) -> Drawing:
    named = layer_names(layers) if layers else layer_names([f"MoE layer {row}" for row in range(values.shape[0])])
    left = max(LEFT, round(max(map(svg.text_width, named.labels))) + BESIDE)
    above = [text for text in (title, f"\N{DOWNWARDS ARROW} {named.title}") if text]
    grid = Grid(layers=values.shape[0], experts=values.shape[1], room=room)
    width, height = grid.size
    picture = paint(colours, grid, outlined)

    def fill(figure: Any) -> None:
        plane = svg.axes(figure, left, BELOW, width, height)
        plane.imshow(
            picture, interpolation="none", aspect="auto", extent=(-0.5, grid.experts - 0.5, grid.layers - 0.5, -0.5)
        )
        plane.set_xticks(ticks(grid.experts, grid.cell_width, 30))
        rows = ticks(grid.layers, grid.cell_height, 20)
        plane.set_yticks(rows, [named.labels[row] for row in rows])
        plane.tick_params(length=0, pad=4)
        plane.set_xlabel("expert", labelpad=2)
        plane.spines[:].set_visible(False)
        if texts and grid.cell_width >= 16 and grid.cell_height >= 14 and values.size <= MOST_TEXTS:
            _write_cells(plane, values)
        for line, text in enumerate(reversed(above)):
            look = {"fontweight": "bold"} if text == title else {"color": svg.MUTED}
            plane.annotate(text, (0, 1), (0, 6 + TITLE * line), "axes fraction", "offset points", va="bottom", **look)
        legend(figure)

    texts_above = left + 1.1 * max(map(svg.text_width, above))
    whole = max(SMALLEST_WIDTH, left + width + RIGHT, LEFT + legend_width, texts_above)
    return svg.draw(name, label, whole, BELOW + height + ABOVE + TITLE * len(above), fill, shrinks=False)


def ticks(count: int, cell: float, room: float) -> list[int]:
    """Round positions from 0 to count - 1 at least `room` points apart."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, count) if s * cell >= room or s >= count)
    return list(range(0, count, step))


def _write_cells(plane: Any, values: NDArray[np.float64]) -> None:
    for (layer, expert), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = "white" if value >= DARK_WIDTH else "black"
            text = f"{value:.0f}" if value == round(value) else f"{value:.1f}"
            plane.text(expert, layer, text, ha="center", va="center_baseline", color=colour)


def _bar(figure: Any, colour_map: str, quantity: str, marks: list[tuple[float, str]]) -> None:
    """The colour scale, below the map."""
    bar = svg.axes(figure, LEFT, 22, LEGEND_WIDTH, 9)
    ramp = _colours(colour_map, np.linspace(0, 1, 128)[None, :])
    bar.imshow(np.round(ramp * 255).astype(np.uint8), interpolation="none", aspect="auto", extent=(0, 1, 0, 1))
    bar.set_xticks([part for part, _ in marks], [text for _, text in marks])
    bar.set_yticks([])
    bar.tick_params(length=3, pad=2)
    bar.spines[:].set_visible(False)
    bar.text(0, 1.5, quantity, ha="left", va="bottom", color=svg.MUTED, clip_on=False)


def _entries(present: Sequence[int], outlined: bool) -> list[tuple[Any, Any, str]]:
    """Fill, edge and text of the swatches: the widths that occur, and what an outline means."""
    entries: list[tuple[Any, Any, str]] = [(WIDTHS[width], "none", formats.width(width)) for width in present]
    return [*entries, ("none", OUTLINE, "on the GPU")] if outlined else entries


def _swatch_width(text: str) -> float:
    return 17 + svg.text_width(text) + 10


def _swatches(figure: Any, entries: Sequence[tuple[Any, Any, str]]) -> None:
    """The meaning of colours and outlines, below the map."""
    from matplotlib.patches import Rectangle

    row = svg.axes(figure, LEFT, 18, LEGEND_WIDTH, 14)
    row.set_xlim(0, LEGEND_WIDTH)
    row.set_ylim(0, 14)
    row.axis("off")
    x = 0.0
    for fill, edge, text in entries:
        row.add_patch(Rectangle((x, 1), 12, 12, facecolor=fill, edgecolor=edge, linewidth=2, clip_on=False))
        row.text(x + 17, 7, text, va="center_baseline", clip_on=False)
        x += _swatch_width(text)
