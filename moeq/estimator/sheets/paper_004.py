"""The FPGA sheet of paper 004: work, efficiency, claims, bounds of both platforms, off-chip traffic of its two kernels.

It states bounds and how much of them the printed figures use; it does not predict a latency.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeq.estimator.sheets import Cell, Table, printed
from moeq.estimator.sheets.fpga import (
    Experts,
    VisionModel,
    attention_traffic_bytes,
    blocks_at_once,
    least_units,
    linear_traffic_bytes,
)
from moeq.estimator.units import parse_quantity

NAME = "paper_004"
TOLERANCE = 0.05  # a printed figure further from its recomputed one than this share of it is flagged
UNITS = (1, 4, 16, 64)  # processing elements and compute units to show: the paper states neither number
PACKED_MACS = 2  # INT8 multiply-accumulates of one DSP a cycle when two share an operand
FLAG = "differs"


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
    def disagrees(self) -> bool:
        """Whether the printed GOPS per watt is not that of the row's own figures."""
        return differs(self.gops_per_watt, self.efficiency)

    @property
    def frames_per_second(self) -> float:
        """Frames per second at the printed latency; only rows with one have it."""
        assert self.latency_ms is not None, self.name
        return 1000 / self.latency_ms


@dataclass(frozen=True, kw_only=True)
class Platform:
    """An FPGA: DSPs in all and used by the paper's design, off-chip bandwidth, bytes of its block RAMs."""

    name: str
    dsps: int
    used_dsps: int
    bytes_per_second: float
    block_ram_bytes: float


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What bounds a run: printed throughput against that of the DSPs used, one and two multiply-accumulates a cycle.

    used_share: of the peak at one a cycle; all_share: of that of all the platform's DSPs; bandwidth_gops: throughput at
    which reading every weight once a frame takes the whole bandwidth; bandwidth_share: of it.
    """

    peak_gops: float
    used_share: float
    all_share: float
    bandwidth_gops: float
    bandwidth_share: float
    weight_bytes: int


def differs(given: float, recomputed: float) -> bool:
    """Whether a printed figure is further than TOLERANCE from the recomputed one."""
    return abs(given / recomputed - 1) > TOLERANCE


def accelerators() -> dict[str, Accelerator]:
    """The printed rows by name."""
    return {row["name"]: Accelerator(**row) for row in printed(NAME)["accelerators"]}


def platforms() -> dict[str, Platform]:
    """Both FPGAs by name."""
    return {
        name: Platform(
            name=name,
            dsps=one["dsps"],
            used_dsps=one["used_dsps"],
            bytes_per_second=parse_quantity(one["bandwidth"], "byte/second"),
            block_ram_bytes=one["block_rams"] * parse_quantity(one["block_ram"], "byte"),
        )
        for name, one in printed(NAME)["platforms"].items()
    }


def models() -> dict[str, VisionModel]:
    """The vision transformers by name, without experts."""
    return {name: VisionModel(**one) for name, one in printed(NAME)["models"].items()}


def with_experts(model: VisionModel) -> VisionModel:
    """The model with M3ViT's experts (an assumption: paper 004 does not state them)."""
    return replace(model, experts=Experts(**printed(NAME)["experts"]))


def bounds(row: Accelerator, platform: Platform, model: VisionModel, clock_hertz: float) -> Bounds:
    """The bounds of a run of `model` on a platform, and how much of them the printed row uses."""
    peak = 2 * platform.used_dsps * clock_hertz / 1e9
    seconds = model.weight_bytes / platform.bytes_per_second
    bandwidth = model.operations / 1e9 / seconds
    return Bounds(
        peak_gops=peak,
        used_share=row.gops / peak,
        all_share=row.gops / (peak * platform.dsps / platform.used_dsps),
        bandwidth_gops=bandwidth,
        bandwidth_share=row.gops / bandwidth,
        weight_bytes=model.weight_bytes,
    )


def tables() -> list[Table]:
    """The whole sheet."""
    return [_work(), _efficiency(), _claims(), _bounds(), _attention(), _linear()]


def _flag(given: float, recomputed: float) -> str:
    return f"{FLAG} by {recomputed / given - 1:+.0%}" if differs(given, recomputed) else ""


def _work() -> Table:
    known = models()
    rows: list[tuple[Cell, ...]] = []
    for row in accelerators().values():
        if row.work_gop is None:
            continue
        shapes = known[row.model].operations / 1e9 if row.model is not None else None
        flag = "" if shapes is None else _flag(row.work_gop, shapes)
        rows.append((row.name, row.source, row.gops, row.latency_ms, row.work_gop, shapes, flag))
    return Table(
        title="Work of a frame: printed throughput times printed latency",
        columns=("row", "table", "GOPS", "latency (ms)", "work (GOP)", "from shapes (GOP)", "flag"),
        rows=tuple(rows),
        notes=(
            "From shapes: a dense ViT/16 at 224 x 224, two operations a multiply-accumulate; a token's experts "
            "together have the size of the MLP.",
            "Where work and shapes differ, the row's throughput and latency are not of the same run.",
        ),
    )


def _efficiency() -> Table:
    return Table(
        title="GOPS per watt, recomputed",
        columns=("row", "table", "GOPS", "power (W)", "printed GOPS/W", "recomputed GOPS/W", "flag"),
        rows=tuple(
            (row.name, row.source, row.gops, row.power_watts, row.gops_per_watt, row.efficiency,
             _flag(row.gops_per_watt, row.efficiency))
            for row in accelerators().values()
        ),
        notes=(f"Flagged: printed and recomputed differ by more than {TOLERANCE:.0%}.",),
    )  # fmt: skip


def _claims() -> Table:
    rows = []
    for claim in printed(NAME)["claims"]:
        as_printed, again = _figures(claim)
        rows.append((claim["text"], claim["printed"], as_printed, again, _flag(claim["printed"], again)))
    return Table(
        title="Claims of the text, recomputed",
        columns=("claim", "in the text", "from printed figures", "from recomputed ones", "flag"),
        rows=tuple(rows),
        notes=("Recomputed: with GOPS per watt of the rows' own throughput and power.",),
    )


def _figures(claim: Mapping[str, Any]) -> tuple[float, float]:
    """A claim's figure from the printed rows, and from recomputed ones."""
    rows = accelerators()

    def ratio(figure: str) -> float:
        over = float(getattr(rows[claim["over"]], figure)) if "over" in claim else 1.0
        return float(getattr(rows[claim["of"]], figure)) / over

    figure = claim["figure"]
    return ratio(figure), ratio("efficiency" if figure == "gops_per_watt" else figure)


def runs() -> list[tuple[Accelerator, Platform, VisionModel, float]]:
    """The runs of the paper's own design: row, platform, model, clock in hertz."""
    found = []
    for run in printed(NAME)["runs"]:
        row = accelerators()[run["row"]]
        model = models()[str(row.model)]
        found.append(
            (
                row,
                platforms()[run["platform"]],
                with_experts(model) if run["experts"] else model,
                parse_quantity(run["clock"], "hertz"),
            )
        )
    return found


def _bounds() -> Table:
    rows = []
    for row, platform, model, clock in runs():
        one = bounds(row, platform, model, clock)
        fits = "yes" if one.weight_bytes <= platform.block_ram_bytes else "no"
        rows.append(
            (row.name, row.gops, one.peak_gops, PACKED_MACS * one.peak_gops, one.used_share, one.all_share,
             one.weight_bytes / 1e6, fits, one.bandwidth_gops, one.bandwidth_share)
        )  # fmt: skip
    return Table(
        title="Bounds, and how much of them the printed throughput uses",
        columns=(
            "row", "GOPS", "bound of used DSPs (GOPS)", "two MACs a DSP (GOPS)", "share of used DSPs",
            "share of all DSPs", "weights (MB)", "fit block RAM", "bound of bandwidth (GOPS)", "share of bandwidth",
        ),
        rows=tuple(rows),
        notes=(
            "DSPs: one INT8 multiply-accumulate a cycle and DSP. A share above 1 needs two in one DSP, or logic.",
            "Bandwidth: every weight read once a frame, all experts among them; preloaded weights are read never.",
            "M3ViT rows: 16 experts, top-4, in every other block (an assumption; the paper does not state it). "
            "UltraRAM, of which the paper says nothing, is not counted as block RAM.",
        ),
    )  # fmt: skip


def _attention() -> Table:
    rows = [
        (name, elements, attention_traffic_bytes(model, "naive", elements) / 1e6, blocks_at_once("naive", elements),
         attention_traffic_bytes(model, "broadcast", elements) / 1e6, blocks_at_once("broadcast", elements),
         attention_traffic_bytes(model, "preloaded", elements) / 1e6)
        for name, model in models().items()
        for elements in UNITS
    ]  # fmt: skip
    return Table(
        title="Off-chip traffic of attention: keys and values of a frame (4.2.1)",
        columns=(
            "model", "elements", "naive (MB)", "naive, blocks a step", "broadcast K (MB)", "broadcast, blocks a step",
            "preloaded (MB)",
        ),
        rows=tuple(rows),
        notes=("The paper does not state its number of processing elements; the naive traffic does not depend on it.",),
    )  # fmt: skip


def _linear() -> Table:
    rows = []
    for row, platform, model, _ in runs():
        assert row.latency_ms is not None
        seconds = row.latency_ms / 1000
        least = least_units(model, platform.bytes_per_second, seconds)
        naive = linear_traffic_bytes(model, "naive", 1)
        for units in UNITS:
            unified = linear_traffic_bytes(model, "unified", units)
            rows.append(
                (row.name, units, naive / 1e6, naive / platform.bytes_per_second / seconds, unified / 1e6,
                 unified / platform.bytes_per_second / seconds, linear_traffic_bytes(model, "preloaded", units) / 1e6,
                 least)
            )  # fmt: skip
    return Table(
        title="Off-chip traffic of the linear kernel: weights of a frame (4.2.2)",
        columns=(
            "row", "compute units", "naive (MB)", "naive, of the latency", "unified (MB)", "unified, of the latency",
            "preloaded (MB)", "least units for the latency",
        ),
        rows=tuple(rows),
        notes=(
            "Of the latency: time of the traffic at the platform's bandwidth over the printed latency; above 1 the "
            "printed latency is out of reach in that order.",
            "The paper does not state its number of compute units. Experts get their patches in equal shares. "
            "Preloaded weights are read once, before the first frame.",
        ),
    )  # fmt: skip


TABLES = tables
