"""The FPGA sheet of paper 004: work, efficiency, claims, bounds of both platforms, off-chip traffic of its two kernels.

It states bounds and how much of them the printed figures use; it does not predict a latency.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

from moeq.estimator.sheets import TOLERANCE, Row, Table, differs, filled, printed
from moeq.estimator.sheets.fpga import (
    AttentionOrder,
    Experts,
    LinearOrder,
    VisionModel,
    attention_traffic_bytes,
    least_units,
    linear_traffic_bytes,
)
from moeq.estimator.units import parse_quantity

NAME = "paper_004"
UNITS = (1, 4, 16, 64)  # processing elements and compute units to show: the paper states neither number
PACKED_MACS = 2  # INT8 multiply-accumulates of one DSP a cycle when two share an operand


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A printed row of Table 4 or 5; None where nothing is printed."""

    name: str
    source: str
    power_watts: float
    gops: float
    gops_per_watt: float
    latency_ms: float | None = None
    model: str | None = None

    @property
    def work_gop(self) -> float | None:
        """Operations of a frame: throughput times latency, in 1e9."""
        return None if self.latency_ms is None else self.gops * self.latency_ms / 1000

    @property
    def efficiency(self) -> float:
        """GOPS per watt from the printed throughput and power."""
        return self.gops / self.power_watts

    @property
    def seconds(self) -> float:
        """The printed latency in seconds; only rows with one have it."""
        assert self.latency_ms is not None, self.name
        return self.latency_ms / 1000

    @property
    def frames_per_second(self) -> float:
        """Frames per second at the printed latency."""
        assert self.latency_ms is not None, self.name
        return 1000 / self.latency_ms


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of the paper's own design: its row, the model, the clock, and the FPGA with the DSPs that the design uses.

    bytes_per_second: off-chip; block_ram_bytes: of all its block RAMs.
    """

    row: Accelerator
    model: VisionModel
    clock_hertz: float
    dsps: int
    used_dsps: int
    bytes_per_second: float
    block_ram_bytes: float

    @property
    def peak_gops(self) -> float:
        """Throughput of the DSPs used, at one multiply-accumulate a cycle."""
        return 2 * self.used_dsps * self.clock_hertz / 1e9

    @property
    def cycles(self) -> float:
        """Cycles of a frame: printed latency times clock."""
        return self.row.seconds * self.clock_hertz

    @property
    def bandwidth_gops(self) -> float:
        """Throughput at which reading every weight once a frame takes the whole bandwidth."""
        seconds = self.model.weight_bytes / self.bytes_per_second
        return self.model.operations / 1e9 / seconds


def accelerators() -> dict[str, Accelerator]:
    """The printed rows by name."""
    return {row["name"]: Accelerator(**row) for row in printed(NAME)["accelerators"]}


def models() -> dict[str, VisionModel]:
    """The vision transformers by name, without experts."""
    return {name: VisionModel(**sizes) for name, sizes in printed(NAME)["models"].items()}


def runs() -> Iterator[Run]:
    """The runs of the paper's own design; experts are M3ViT's (an assumption: paper 004 does not state them)."""
    rows, shapes, paper = accelerators(), models(), printed(NAME)
    for run in paper["runs"]:
        row, fpga = rows[run["row"]], paper["platforms"][run["platform"]]
        yield Run(
            row=row,
            model=replace(shapes[str(row.model)], experts=Experts(**paper["experts"]) if run["experts"] else None),
            clock_hertz=parse_quantity(run["clock"], "hertz"),
            dsps=fpga["dsps"],
            used_dsps=fpga["used_dsps"],
            bytes_per_second=parse_quantity(fpga["bandwidth"], "byte/second"),
            block_ram_bytes=fpga["block_rams"] * parse_quantity(fpga["block_ram"], "byte"),
        )


def tables() -> list[Table]:
    """The whole sheet."""
    rows = {
        "work": _work(),
        "efficiency": _efficiency(),
        "claims": _claims(),
        "bounds": _bounds(),
        "cycles": _cycles(),
        "resources": _resources(),
        "losses": _losses(),
        "attention": _attention(),
        "linear": _linear(),
    }
    return filled(NAME, rows, tolerance=TOLERANCE)


def _flag(given: float, recomputed: float) -> str:
    return f"differs by {recomputed / given - 1:+.0%}" if differs(given, recomputed) else ""


def _work() -> Iterator[Row]:
    shapes = models()
    for row in accelerators().values():
        if row.work_gop is not None:
            work = None if row.model is None else shapes[row.model].operations / 1e9
            flag = "" if work is None else _flag(row.work_gop, work)
            yield row.name, row.source, row.gops, row.latency_ms, row.work_gop, work, flag


def _efficiency() -> Iterator[Row]:
    for row in accelerators().values():
        flag = _flag(row.gops_per_watt, row.efficiency)
        yield row.name, row.source, row.gops, row.power_watts, row.gops_per_watt, row.efficiency, flag


def _claims() -> Iterator[Row]:
    """Every claim's figure from the printed rows, and from recomputed ones."""
    rows = accelerators()
    for claim in printed(NAME)["claims"]:
        figure = claim["figure"]
        as_printed, again = (
            getattr(rows[claim["of"]], name) / (getattr(rows[claim["over"]], name) if "over" in claim else 1.0)
            for name in (figure, "efficiency" if figure == "gops_per_watt" else figure)
        )
        yield claim["text"], claim["printed"], as_printed, again, _flag(claim["printed"], again)


def _bounds() -> Iterator[Row]:
    for run in runs():
        gops, peak, bandwidth, weights = run.row.gops, run.peak_gops, run.bandwidth_gops, run.model.weight_bytes
        of_all, fits = gops / (peak * run.dsps / run.used_dsps), "yes" if weights <= run.block_ram_bytes else "no"
        bounds = (peak, PACKED_MACS * peak, gops / peak, of_all)
        yield run.row.name, gops, *bounds, weights / 1e6, fits, bandwidth, gops / bandwidth


def _cycles() -> Iterator[Row]:
    for run in runs():
        a_cycle = run.model.macs / run.cycles
        row = run.row.name, run.clock_hertz / 1e6, run.row.latency_ms, run.cycles, a_cycle
        yield *row, run.used_dsps, a_cycle / run.used_dsps, PACKED_MACS


def _resources() -> Iterator[Row]:
    paper = printed(NAME)
    for run, stated in zip(runs(), paper["runs"], strict=True):
        fpga = paper["platforms"][stated["platform"]]
        used, large = fpga["used_block_rams"], parse_quantity("36 Kibit", "byte")
        all_of_them = run.block_ram_bytes / large
        held, weights = used * large, run.model.weight_bytes
        fits = "yes" if weights <= held else "no"
        shares = run.used_dsps, run.used_dsps / run.dsps, used, used / all_of_them
        yield stated["platform"], *shares, held / 1e6, run.row.name, weights / 1e6, fits


def _losses() -> Iterator[Row]:
    """Accuracy that is lost, and energy that is saved."""
    paper, rows = printed(NAME), accelerators()
    stated = paper["stated"]
    lost = {row["model"]: round(row["full"] - row["ours"], 2) for row in paper["accuracy"]}
    yield (
        "points lost, M3ViT (5.2)",
        stated["m3vit_loss"],
        lost["M3ViT"],
        _flag(stated["m3vit_loss"], lost["M3ViT"]),
    )
    most = stated["most_loss"]
    for model, points in lost.items():
        yield f"points lost, {model} (abstract)", f"under {most}", points, "" if points < most else "more"
    ours, theirs = (rows[stated[key]] for key in ("energy_of", "energy_over"))
    saved = 100 * (1 - ours.power_watts * ours.seconds / (theirs.power_watts * theirs.seconds))
    least = stated["energy_saved"]
    yield (
        "% of a frame's energy saved over Edge-MoE (abstract)",
        f"over {least}",
        saved,
        "" if saved > least else "less",
    )


def _attention() -> Iterator[Row]:
    for name, model in models().items():
        for elements in UNITS:
            naive, broadcast, preloaded = (
                attention_traffic_bytes(model, order, elements) / 1e6 for order in get_args(AttentionOrder)
            )
            yield name, elements, naive, elements, broadcast, 1, preloaded


def _linear() -> Iterator[Row]:
    for run in runs():
        rate, seconds = run.bytes_per_second, run.row.seconds
        least = least_units(run.model, rate, seconds)
        for units in UNITS:
            naive, unified, preloaded = (
                linear_traffic_bytes(run.model, order, units) for order in get_args(LinearOrder)
            )
            shares = naive / rate / seconds, unified / rate / seconds
            yield run.row.name, units, naive / 1e6, shares[0], unified / 1e6, shares[1], preloaded / 1e6, least
