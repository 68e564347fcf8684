"""Maps of layers x experts: one small embedded picture each, however many experts there are.

L layers, E experts of the widest layer (narrower layers end earlier). A cell is a whole number of points, and
`SHARPNESS` pixels a point, so that cells and outlines come out even.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeq.reporting import formats, svg
from moeq.reporting.html import Drawing

SHARPNESS = 2  # pixels of the picture a point
SHARE_MAP, LOSS_MAP = "viridis", "plasma"
ABSENT = (0.55, 0.58, 0.62, 1.0)  # no figure for this expert: grey, which no colour map here holds
OUTLINE = (1.0, 0.45, 0.0, 1.0)
WIDTHS = {1: "#fde725", 2: "#7ad151", 3: "#22a884", 4: "#2a788e", 8: "#414487", 16: "#440154"}  # viridis backwards
DARK_WIDTH = 3.5  # from which on text in cells is white
MOST_TEXTS = 600
LEFT, BELOW, ABOVE, RIGHT = 40, 84, 8, 16  # points around the map
LEGEND_WIDTH, SMALLEST_WIDTH = 200, 372

Pixels = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of a map in points."""

    layers: int
    experts: int

    @property
    def cell_width(self) -> int:
        return min(40, max(2, 880 // self.experts))

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


def share_map(name: str, label: str, rows: Sequence[np.ndarray]) -> Drawing:
    """Shares from 0 to the largest; experts at exactly 0 are grey."""
    values = stack(rows)
    top = max(float(np.nanmax(values)), 1e-12)
    colours = _colours(SHARE_MAP, values / top)
    colours[values == 0] = ABSENT
    ticks = [(part, formats.share(part * top)) for part in (0.0, 0.5, 1.0)]
    return _map(name, label, colours, values, lambda figure: _bar(figure, SHARE_MAP, "share of activations", ticks))


def log_map(name: str, label: str, rows: Sequence[np.ndarray], quantity: str) -> Drawing:
    """Positive values on a logarithmic scale; others are grey."""
    values = stack(rows)
    positive = np.isfinite(values) & (values > 0)
    logs = np.log10(np.where(positive, values, 1.0))
    low, high = (float(logs[positive].min()), float(logs[positive].max())) if positive.any() else (0.0, 1.0)
    high = max(high, low + 1e-6)
    colours = _colours(LOSS_MAP, np.where(positive, (logs - low) / (high - low), np.nan))
    colours[np.isfinite(values) & ~positive] = ABSENT
    ticks = [(part, formats.share(10 ** (low + part * (high - low)), 2)) for part in (0.0, 0.5, 1.0)]
    return _map(name, label, colours, values, lambda figure: _bar(figure, LOSS_MAP, quantity, ticks))


def width_map(
    name: str, label: str, bits: Sequence[np.ndarray], hot: Sequence[np.ndarray], present: Sequence[int] = ()
) -> Drawing:
    """Widths in the colours of `WIDTHS`, means of several in one between; widths are written where there is room.

    Experts on the GPU are outlined. present: the widths of the legend; none: those of the experts.
    """
    from matplotlib.colors import to_rgba

    values, outlined = stack(bits), stack(hot) == 1
    known = np.array([to_rgba(colour) for colour in WIDTHS.values()])
    colours = np.stack([np.interp(np.nan_to_num(values), list(WIDTHS), channel) for channel in known.T], -1)
    colours[np.isnan(values)] = 0
    present = present or sorted({int(width) for row in bits for width in row})
    entries = _entries(present, bool(outlined.any()))
    room = sum(_swatch_width(entry[2]) for entry in entries)
    return _map(name, label, colours, values, lambda figure: _swatches(figure, entries), room, outlined, True)


def _colours(colour_map: str, parts: NDArray[np.float64]) -> Pixels:
    """RGBA [L, E, 4] of parts in [0, 1]; transparent where NaN."""
    from matplotlib import colormaps

    colours = np.asarray(colormaps[colour_map](np.nan_to_num(parts)), dtype=np.float64)
    colours[np.isnan(parts)] = 0
    return colours


def paint(colours: Pixels, grid: Grid, outlined: NDArray[np.bool_] | None) -> NDArray[np.uint8]:
    """The picture [L*height, E*width, 4] in pixels: a colour a cell, gaps between large cells, outlines."""
    height, width = grid.cell_height * SHARPNESS, grid.cell_width * SHARPNESS
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
    if min(height, width) >= 16:
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
    texts: bool = False,
) -> Drawing:
    grid = Grid(layers=values.shape[0], experts=values.shape[1])
    width, height = grid.size
    picture = paint(colours, grid, outlined)

    def fill(figure: Any) -> None:
        plane = svg.axes(figure, LEFT, BELOW, width, height)
        plane.imshow(
            picture, interpolation="none", aspect="auto", extent=(-0.5, grid.experts - 0.5, grid.layers - 0.5, -0.5)
        )
        plane.set_xticks(ticks(grid.experts, grid.cell_width, 30))
        plane.set_yticks(ticks(grid.layers, grid.cell_height, 20))
        plane.tick_params(length=0, pad=4)
        plane.set_xlabel("expert", labelpad=2)
        plane.set_ylabel("MoE layer", labelpad=3)
        plane.spines[:].set_visible(False)
        if texts and grid.cell_width >= 16 and grid.cell_height >= 14 and values.size <= MOST_TEXTS:
            _write_cells(plane, values)
        legend(figure)

    whole = max(SMALLEST_WIDTH, LEFT + width + RIGHT, LEFT + legend_width)
    return svg.draw(name, label, whole, BELOW + height + ABOVE, fill, shrinks=False)


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
    bar.text(1.07, 0.5, quantity, ha="left", va="center", color=svg.MUTED, clip_on=False)


def _entries(present: Sequence[int], outlined: bool) -> list[tuple[Any, Any, str]]:
    """Fill, edge and text of the swatches: the widths that occur, and what an outline means."""
    entries: list[tuple[Any, Any, str]] = [(WIDTHS[width], "none", formats.count(width, "bit")) for width in present]
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
