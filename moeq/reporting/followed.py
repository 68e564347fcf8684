"""What `moeq bench --dynamic` measured: precision that follows the workload, and what was in high precision when."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeq.artifacts.bench import Bench, Followed, Way
from moeq.reporting import formats, svg
from moeq.reporting.charts import HEIGHT, WIDTH, plane_of
from moeq.reporting.html import Drawing, Section, figure, lead, table
from moeq.tables import human_bytes, rounded

HEAD = ("way", "batch", "first token, ms", "a step, ms", "prefill, tokens/s", "decode, tokens/s", "of low", "experts")
READING = (
    "Medians of {repeat} requests of {prompt} prompt tokens and {new} new ones, which alternate. Of low: decode over "
    "that of all experts in low precision; experts: their bytes in memory. Static mixed has as many experts in high "
    "precision as dynamic has places, always the same."
)


def followed(bench: Bench) -> Section:
    """The four panels of paper 001's Figure 5 as a table, and the hot set over time."""
    found, machine, settings = bench.dynamic, bench.machine, bench.settings
    assert found is not None, "a bench without dynamic precision"
    sums = found.over_time[-1]
    reads = sums.host_hits + sums.host_misses
    hits = (
        "" if not reads else f" {sums.host_hits} of {reads} replicas came from the host's memory, the others from disk."
    )
    text = (
        f"Experts change between {found.summary.high_bits} and {found.summary.low_bits} bits while the model runs, "
        f"{found.summary.high_experts_a_layer} of every layer in high precision (paper 001). Measured on "
        f"{machine.name} ({machine.device}, {formats.count(machine.threads, 'thread')}): {sums.promotions} promotions, "
        f"{sums.demotions} demotions, "
        f"{human_bytes(sums.copied_bytes)} moved, {sums.failures} copies failed.{hits}"
    )
    reading = READING.format(repeat=settings.repeat, prompt=settings.prompt_tokens, new=settings.new_tokens)
    rows = [row for way in found.ways for row in _rows(way)]
    drawn = figure(
        _over_time(found),
        "Experts in high precision that were not at the beginning, as a share of all places (dots, left), and bytes "
        "moved (right), after every request.",
    )
    return Section("followed", "Precision that follows the workload", [lead(text), table(reading, HEAD, rows), drawn])


def _rows(way: Way) -> list[tuple[str, ...]]:
    return [
        (
            way.name, f"{point.batch}",
            rounded(point.first_token_seconds * 1e3, 3), rounded(point.token_seconds * 1e3, 3),
            rounded(point.prefill_tokens_per_second, 3), rounded(point.decode_tokens_per_second, 3),
            f"{point.decode_of_low:.2f}", human_bytes(way.expert_bytes),
        )
        for point in way.points
    ]  # fmt: skip


def shares(found: Followed) -> list[float]:
    """Experts in high precision that were not at the beginning, over the places, at every time."""
    began = [int(mask, 16) for mask in found.over_time[0].high]
    places = max(1, sum(one.bit_count() for one in began))
    return [
        sum((int(mask, 16) & ~before).bit_count() for mask, before in zip(time.high, began, strict=True)) / places
        for time in found.over_time
    ]


def _over_time(found: Followed) -> Drawing:
    steps = np.array([time.step for time in found.over_time])
    moved = np.array([time.copied_bytes for time in found.over_time]) / 2**20

    def fill(drawn: Any) -> None:
        plane = plane_of(drawn, WIDTH - 60)
        plane.plot(steps, shares(found), color=svg.SERIES[0], marker="o", markersize=4, linewidth=1.6)
        plane.set(xlabel="forward passes", ylabel="share that changed", ylim=(-0.02, 1.02))
        plane.grid(axis="y")
        right = plane.twinx()
        right.plot(steps, moved, color=svg.SERIES[1], linewidth=1.6)
        right.set(ylabel="MiB moved")
        right.set_ylim(0, max(1e-3, 1.05 * float(moved.max())))

    return svg.draw("followed", "Hot set and bytes moved over forward passes", WIDTH, HEIGHT, fill)
