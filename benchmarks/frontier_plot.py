"""The plot of benchmarks/frontier.py: a panel for every model, drawn as the report's pictures are, on white."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moeq.reporting import svg
from moeq.reporting.labels import Box, place

WIDTH, HEIGHT = 860, 470
LEFT, BELOW, ABOVE, RIGHT = 66, 44, 28, 150
STYLES = {  # colour and marker of a method, in the order of tables and labels
    "RTN": (svg.MUTED, "v"),
    "GPTQ": (svg.SERIES[0], "s"),
    "SignRound": (svg.SERIES[3], "D"),
    "learned codes": (svg.SERIES[2], "o"),
    "trellis, 256 states": (svg.SERIES[1], "^"),
    "trellis, 1024 states": (svg.INK, "P"),
    "auto-round": (svg.SERIES[3], "x"),
    "gptqmodel": (svg.SERIES[0], "+"),
}
DROPPING = ", dropping"
KINDS = ("uniform", "mixed", f"mixed{DROPPING}", "tuned", f"tuned{DROPPING}", "peer")
NOTE = (
    "lines: mixed widths; hollow, dashed: one width for all; stars: tuned; open: dropping; crosses: others' own output"
)


@dataclass(frozen=True)
class Point:
    """One point of the frontier; asked: the width or the bits that were asked for."""

    model: str
    method: str
    kind: str
    asked: str
    bits: float
    perplexity: float
    kl: float
    stderr: float
    same: float
    seconds: float

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.model, self.method, self.kind, self.asked)

    @property
    def order(self) -> tuple[int, int]:
        """Where it stands in tables."""
        return list(STYLES).index(self.method), KINDS.index(self.kind)

    def cells(self) -> list[str]:
        """As tables have them."""
        figures = [f"{self.bits:.3f}", f"{self.kl:.4f}", f"{self.stderr:.4f}", f"{self.perplexity:.2f}"]
        return [self.method, self.kind, *figures, f"{100 * self.same:.1f} %", f"{self.seconds:.0f}"]


def plot(points: Sequence[Point]) -> str:
    """An SVG file."""
    models = list(dict.fromkeys(point.model for point in points))

    def fill(figure: Any) -> None:
        for index, model in enumerate(models):
            below = BELOW + (len(models) - 1 - index) * HEIGHT
            plane = svg.axes(figure, LEFT, below, WIDTH - LEFT - RIGHT, HEIGHT - BELOW - ABOVE)
            _panel(plane, model, [point for point in points if point.model == model], below)

    label = f"KL to the original against stored bits of an expert's weight: {', '.join(models)}"
    return _on_white(svg.printed(svg.draw("kl-against-bits", label, WIDTH, HEIGHT * len(models), fill)))


def _on_white(text: str) -> str:
    """With a ground of its own: a dark page behind it must not hide black text."""
    head, _, rest = text.partition(">")
    return f'{head}><rect width="100%" height="100%" fill="#fff"/>{rest}'


def _panel(plane: Any, model: str, points: Sequence[Point], below: float) -> None:
    ends: list[tuple[str, Point]] = []
    for method, (colour, marker) in STYLES.items():
        for kind in KINDS:
            line = sorted((p for p in points if (p.method, p.kind) == (method, kind)), key=lambda p: p.bits)
            if line:
                _line(plane, line, kind, colour, marker)
                ends += _label(line, method, kind)
    _axes(plane, points)
    plane.set_title(f"{model}; {NOTE}", fontsize=svg.TEXT_SIZE - 1, loc="left", color=svg.INK)
    _names(plane, ends, Box(LEFT, below, WIDTH - 2, below + HEIGHT - BELOW - ABOVE))


def _line(plane: Any, line: Sequence[Point], kind: str, colour: str, marker: str) -> None:
    bits, kl = [p.bits for p in line], [p.kl for p in line]
    styles: dict[str, dict[str, Any]] = {
        "uniform": {"linewidth": 0.9, "linestyle": (0, (3, 3)), "markerfacecolor": svg.PAPER},
        "mixed": {"linewidth": 1.6},
        f"mixed{DROPPING}": {"linestyle": "none", "markersize": 8, "markerfacecolor": svg.PAPER},
        "tuned": {"linestyle": "none", "marker": "*", "markersize": 11},
        f"tuned{DROPPING}": {"linestyle": "none", "marker": "*", "markersize": 13, "markerfacecolor": svg.PAPER},
        "peer": {"linewidth": 0.9, "linestyle": (0, (1, 2)), "markersize": 9, "markeredgewidth": 2},
    }
    plane.plot(bits, kl, **({"color": colour, "marker": marker, "markersize": 5} | styles[kind]))


def _label(line: Sequence[Point], method: str, kind: str) -> list[tuple[str, Point]]:
    """The name of a line, at its end; uniform ones have the marker of their mixed line."""
    names = {"mixed": method, "peer": method} | {
        kind: f"{method}, {kind.removeprefix('mixed, ')}" for kind in KINDS if kind.startswith(("mixed,", "tuned"))
    }
    return [(names[kind], line[-1])] if kind in names else []


def _axes(plane: Any, points: Sequence[Point]) -> None:
    kl = [p.kl for p in points]
    low, high = min(kl) / 1.3, max(kl) * 1.2
    plane.set(yscale="log", xlim=(2.0, 4.3), ylim=(low, high))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [step * 10.0**power for power in powers for step in (1, 2, 5) if low <= step * 10.0**power <= high]
    plane.set_yticks(marks, [f"{mark:.4g}" for mark in marks])
    plane.set_yticks([], minor=True)
    plane.grid()
    plane.set(xlabel="stored bits of an expert's weight, scales and zero points counted", ylabel="KL, nats a token")


def _names(plane: Any, ends: Sequence[tuple[str, Point]], bounds: Box) -> None:
    """Every line's name beside its end, where it covers no other."""
    spots = [tuple(plane.transData.transform((point.bits, point.kl))) for _, point in ends]
    boxes = place(spots, [name for name, _ in ends], bounds)
    inverse = plane.transData.inverted()
    for (name, point), spot, box in zip(ends, spots, boxes, strict=True):
        colour = STYLES[point.method][0]
        if box.distance(spot) > 14:
            ahead = inverse.transform(box.nearest(spot))
            plane.plot(*zip((point.bits, point.kl), ahead, strict=True), color=colour, linewidth=0.7, clip_on=False)
        at = inverse.transform((box.left, (box.bottom + box.top) / 2))
        plane.text(*at, name, va="center_baseline", color=colour, clip_on=False)
