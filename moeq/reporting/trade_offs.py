"""Size, quality and speed of what a run's measurements can be made into: one drawing and one table, with commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from moeq.estimator.policies import titled
from moeq.reporting import formats, svg
from moeq.reporting.html import Drawing, Row, Section, element, figure, paragraph, table
from moeq.reporting.inputs import SpeedInputs, TradeOff
from moeq.tables import human_bytes, human_size

WIDTH, HEIGHT = 760, 330
LEFT, BELOW, ABOVE, BETWEEN, RIGHT = 70, 44, 30, 34, 16
THIS = "this run"
CLOSE = 0.005  # of a panel's width: closer to the axis than this no mark is named


def trade_offs(points: Sequence[TradeOff], speed: SpeedInputs) -> Section | None:
    """None where the speeds of the run's sizes say nothing, or fewer than two points stand."""
    if not speed.tells or sum(point.objective > 0 for point in points) < 2:
        return None
    sizes = "the model's own sizes" if speed.geometry_is_the_models else f"the sizes of {speed.geometry['name']}"
    caption = (
        "Each point is an assignment, in both drawings at the same height; lower is better, to the left is smaller and "
        "to the right faster. What another beats in size, objective and speed together is left out; ringed: this run."
    )
    reading = (
        "The objective is what the losses on held-out tokens predict, as the recipe weights them. Speed: decode of one "
        f"sequence with {sizes}, by a model of {points[0].hardware}, not measured; routing as calibration counted it. "
        "Each line's command makes its assignment of this run's measurements, or one of the same speed and no larger "
        "objective (RUN: the run's directory); what follows from it, moeq run makes anew."
    )
    parts = [figure(_drawing(points), caption), paragraph(reading, kind="reading"), _table(points)]
    return Section("trade-offs", "Size, quality and speed", parts)


def _table(points: Sequence[TradeOff]) -> Any:
    rows = []
    for point in points:
        cells = (
            THIS if point.command is None else element("code", point.command),
            titled(point.policy).short,
            formats.number(point.tokens_per_second),
            f"{point.bits_per_weight:.2f}",
            human_size(point.expert_bytes),
            f"{point.objective:.3g}",
        )
        rows.append(Row(cells=cells, kind="exported") if point.command is None else cells)
    head = ("command", "policy", "tokens/s", "stored bits", "experts", "objective")
    return table("The fastest first.", head, rows, texts=2)


def _drawing(points: Sequence[TradeOff]) -> Drawing:
    shown = [point for point in points if point.objective > 0]
    policies = list(dict.fromkeys(point.policy for point in shown))
    width, height = (WIDTH - LEFT - BETWEEN - RIGHT) / 2, HEIGHT - BELOW - ABOVE

    def fill(drawn: Any) -> None:
        by_size = svg.axes(drawn, LEFT, BELOW, width, height)
        by_speed = svg.axes(drawn, LEFT + width + BETWEEN, BELOW, width, height)
        for plane, of in ((by_size, _bytes_of), (by_speed, _speed_of)):
            for index, policy in enumerate(policies):
                _marks(plane, [p for p in shown if p.policy == policy], of, index)
            own = [p for p in shown if p.command is None]
            ring = {"markersize": 14, "markerfacecolor": "none", "markeredgecolor": svg.INK}
            plane.plot([of(p) for p in own], [p.objective for p in own], "o", linestyle="none", **ring)
            plane.set(xscale="log", yscale="log")
            plane.yaxis.set_minor_formatter(lambda value, _: "")
            _ticks(plane, [of(p) for p in shown], human_bytes if of is _bytes_of else partial(formats.number, digits=3))
            plane.grid()
        by_size.set(xlabel="bytes of all experts", ylabel="objective")
        by_size.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
        by_speed.yaxis.set_major_formatter(lambda value, _: "")
        by_speed.set(xlabel="decode tokens a second", ylim=by_size.get_ylim())
        handles = [_handle(by_size, policy, index) for index, policy in enumerate(policies)]
        by_size.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(policies), borderaxespad=0.2
        )

    own = next((p for p in points if p.command is None), None)
    label = f"Objective against size and speed of {len(shown)} assignments"
    if own is not None:
        speed = formats.number(own.tokens_per_second)
        label += f"; {THIS}: {own.objective:.3g} at {human_size(own.expert_bytes)}, {speed} a second"
    return svg.draw("trade-offs", f"{label}.", WIDTH, HEIGHT, fill)


def _bytes_of(point: TradeOff) -> float:
    return float(point.expert_bytes)


def _speed_of(point: TradeOff) -> float:
    return point.tokens_per_second


def _marks(plane: Any, points: Sequence[TradeOff], of: Callable[[TradeOff], float], index: int) -> None:
    values = [of(point) for point in points], [point.objective for point in points]
    plane.plot(*values, svg.MARKERS[index], color=svg.SERIES[index], linestyle="none", markersize=6)


def _handle(plane: Any, policy: str, index: int) -> Any:
    style = {"color": svg.SERIES[index], "linestyle": "none", "markersize": 6}
    return plane.plot([], [], svg.MARKERS[index], label=titled(policy).short, **style)[0]


def _ticks(plane: Any, values: Sequence[float], text: Callable[[float], str]) -> None:
    """Some values in equal ratios, written so that none covers another."""
    low, high = min(values), max(values)
    plane.set_xlim(low / 1.08, high * 1.08)
    marks = [low] if high / low < 1 + CLOSE else np.geomspace(low, high, 4).tolist()
    plane.set_xticks(marks, [text(round(mark) if mark >= 1000 else mark) for mark in marks])
    plane.set_xticks([], minor=True)
