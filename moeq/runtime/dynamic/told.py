"""What a model whose experts change their precision is doing, told while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moeq.progress import Reporter
from moeq.runtime.dynamic.model import DynamicMoE
from moeq.tables import human_bytes

TIMES_A_SECOND = 4
MOST_NAMED = 8  # experts of a layer that are named


@contextmanager
def watched(dynamic: DynamicMoE, reporter: Reporter) -> Iterator[None]:
    """A live table on standard error while it runs, where that is a terminal; the last one stays there."""
    began = [dynamic.high(number) for number in range(len(dynamic.layers))]
    with Live(
        console=reporter.console,
        get_renderable=lambda: table(dynamic, began),
        refresh_per_second=TIMES_A_SECOND,
        vertical_overflow="ellipsis",
    ):
        yield
    if not reporter.console.is_terminal:  # there the last table ends without a new line
        reporter.console.print()


def table(dynamic: DynamicMoE, began: list[np.ndarray]) -> Group:
    """The sums; and layer by layer, how many experts are in high precision, which, and how many of them are new.

    began: [E] of every layer, those that were at the beginning.
    """
    summary = dynamic.summary()
    shown = Table(box=None, pad_edge=False)
    shown.add_column("layer", justify="right")
    shown.add_column(f"{summary['high_bits']} bits", justify="right")
    shown.add_column("new", justify="right")
    shown.add_column("experts", overflow="ellipsis", no_wrap=True)
    for number, before in enumerate(began):
        high = dynamic.high(number)
        named = np.flatnonzero(high)
        hottest = named[np.argsort(-dynamic.controllers[number].hotness[0][named], kind="stable")][:MOST_NAMED]
        more = " ..." if len(named) > len(hottest) else ""
        entered = int((high & ~before).sum())
        shown.add_row(f"{number}", f"{len(named)}", f"{entered}", " ".join(map(str, hottest)) + more)
    return Group(Text(_sums(summary), style="dim"), shown)


def _sums(summary: Mapping[str, Any]) -> str:
    return (
        f"step {summary['steps']}: {summary['promotions']} promotions, {summary['demotions']} demotions, "
        f"{human_bytes(summary['copied_bytes'])} moved; host {summary['host_hits']} hits, {summary['host_misses']} "
        f"misses; {summary['failures']} failed"
    )
