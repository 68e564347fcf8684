"""Curves of perplexity against the share of every layer's experts at a low width (paper 001, Figure 4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeq.artifacts.assignment import FULL
from moeq.artifacts.low_precision import COLDEST, HOTTEST, RANDOM, Curve, LowPrecisionReport, Sweep
from moeq.papers import DYNAEXQ
from moeq.reporting import formats, svg
from moeq.reporting.charts import HEIGHT, WIDTH, plane_of
from moeq.reporting.html import Drawing, Raw, Section, figure, lead, table

NAMES = {COLDEST: "coldest first", HOTTEST: "hottest first", RANDOM: "random"}
MARKERS = {COLDEST: "o", HOTTEST: "s", RANDOM: "^"}


def low_precision(report: LowPrecisionReport) -> Section:
    """A chart and a table of every pair of widths."""
    text = (
        "Perplexity while more and more experts of every layer go to a low width, in three orders: by how often "
        "calibration chose them, and at random. Hotness is a good guide where the curve that begins with the coldest "
        f"stays below the random ones. ({DYNAEXQ.short}, Figure 4.)"
    )
    parts = [lead(text)]
    for number, sweep in enumerate(report.sweeps):
        caption = (
            f"{_title(sweep)} ({sweep.quantizer}), on {formats.count(sweep.sequences, 'sequence')} of the evaluation "
            "text. Band: the range of the random orders, line: their mean."
        )
        parts += [figure(share_chart(sweep, number), caption), _table(sweep)]
    return Section("low-precision", "Share of experts at a low width", parts)


def _title(sweep: Sweep) -> str:
    high = "full-precision" if sweep.high_bits == FULL else formats.width(sweep.high_bits)
    return f"{formats.width(sweep.low_bits)} among {high} experts"


def share_chart(sweep: Sweep, number: int) -> Drawing:
    """Perplexity by share, a line an order; the random ones as their mean with a band of their range."""

    def fill(figure: Any) -> None:
        plane = plane_of(figure)
        for index, order in enumerate((COLDEST, HOTTEST, RANDOM)):
            curves = [curve for curve in sweep.curves if curve.order == order]
            if not curves:
                continue
            shares = np.array([point.low_experts / sweep.experts for point in curves[0].points])
            values = np.array([[point.perplexity for point in curve.points] for curve in curves])
            colour = svg.SERIES[index]
            if len(curves) > 1:
                plane.fill_between(shares, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)
            style = {"marker": MARKERS[order], "markersize": 4, "linewidth": 1.5, "label": NAMES[order]}
            plane.plot(shares, values.mean(0), color=colour, **style)
        plane.xaxis.set_major_formatter(lambda value, _: formats.share(value))
        plane.grid(axis="y")
        plane.set(xlabel=f"{formats.width(sweep.low_bits)} experts of every layer", ylabel="perplexity")
        plane.legend(loc="upper left", handlelength=2.2)

    label = f"Chart of perplexity by share of experts: {_title(sweep)}."
    return svg.draw(f"low-precision-{number}", label, WIDTH, HEIGHT, fill)


def _table(sweep: Sweep) -> Raw:
    head = ("order", *(formats.share(point.share) for point in sweep.curves[0].points))
    rows = [(_name(curve), *(formats.perplexity(point.perplexity) for point in curve.points)) for curve in sweep.curves]
    return table(f"Perplexity by the share of each layer's experts: {_title(sweep)}.", head, rows)


def _name(curve: Curve) -> str:
    return NAMES[curve.order] if curve.number is None else f"{NAMES[curve.order]} {curve.number + 1}"
