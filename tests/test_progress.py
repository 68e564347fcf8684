"""What is told on standard error."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest
from rich.markup import escape

from moeq.final_table import empty_table
from moeq.progress import PlainConsole, Reporter
from moeq.terminal import print_comparison

TIMES = r"20% \d:\d\d:\d\d \d:\d\d:\d\d left$"
KERNELS = logging.getLogger("moeq.kernels")


def test_what_the_kernels_tell_is_said_by_the_newest_reporter_and_by_no_quiet_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = KERNELS.handlers, KERNELS.level
    try:
        Reporter()
        Reporter()
        KERNELS.info("compiling [code]")
        assert capsys.readouterr().err == "compiling [code]\n"
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "stderr", io.StringIO())
            Reporter()
            sys.stderr.close()
        KERNELS.info("compiling for a program that has closed what it redirected")
        KERNELS.handlers = []
        Reporter(quiet=True)
        KERNELS.info("compiling")
        assert capsys.readouterr().err == ""
    finally:
        KERNELS.handlers, level = before
        KERNELS.setLevel(level)


NAME = "runs[draft]/[/b]:train:"  # markup of rich's, one of its pictures, and what closes what nothing opened


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    table = empty_table(NAME)
    table.add_row(f"{NAME} 1")
    PlainConsole().print(table)
    PlainConsole().print(f"{NAME} 2")
    Reporter().say(f"[dim]{escape(NAME)}[/dim] 3")
    shown = capsys.readouterr()
    assert [line.rstrip() for line in shown.out.splitlines()] == [NAME, f"{NAME} 1", f"{NAME} 2"]
    assert shown.err == f"{NAME} 3\n"


@pytest.mark.parametrize("columns", ["0", "", "wide"])
def test_no_width_is_as_if_none_were_asked_for(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is left out, and what goes to a pipe has a line for a paragraph."""
    monkeypatch.setenv("COLUMNS", columns)
    table = empty_table(NAME)
    table.add_row("a cell")
    PlainConsole().print(table)
    PlainConsole().print("word " * 60)
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [NAME, "a cell", ("word " * 60).strip()]


def test_names_of_what_is_compared_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    sure = {"difference": 0.1, "low": 0.0, "high": 0.2, "p": 0.01, "adjusted_p": 0.01, "items": 9,
            "effective_items": 9.0, "fewest_items": None}  # fmt: skip
    rows = [{"name": name, "perplexity": None, "cut_requests": {}, "bytes": 5} for name in (NAME, f"{NAME}2")]
    cells = [
        {"metric": "acc", "value": 0.5, "stderr": None, "change": change, "flips": None} for change in (None, sure)
    ]
    entries = [{"name": row["name"], "cells": {NAME: cell}} for row, cell in zip(rows, cells, strict=True)]
    print_comparison({"rows": rows, "table": entries, "differences": {"from": NAME, "how": "paired"}})
    shown = capsys.readouterr().out
    assert shown.count(f"  {NAME}2") == shown.count(f"{NAME}, acc") + 1 == 2
    assert " 0.010 " in shown


def test_a_small_divergence_is_not_none(capsys: pytest.CaptureFixture[str]) -> None:
    """As runs' tables and reports have it, in three digits; others in four places."""
    small = {"stderr": 8.2e-7, "change": None, "flips": None}
    cells = {
        "KL": {"metric": "nats a token", "value": 9.232e-6} | small,
        "acc": {"metric": "acc", "value": 0.5} | small,
    }
    row = {"name": "8-bit", "perplexity": None, "cut_requests": {}}
    how = {"from": "first", "how": "paired"}
    print_comparison({"rows": [row], "table": [{"name": "8-bit", "cells": cells}], "differences": how})
    shown = capsys.readouterr().out
    assert "9.23e-06 ± 8e-07" in shown
    assert "0.5000 ± 0.0000" in shown


@pytest.mark.parametrize("width", [40, 46, 60, 80])
@pytest.mark.parametrize("title", ["losses", "checking the store"])
def test_a_bar_shows_its_times_whole_in_a_narrow_terminal(title: str, width: int) -> None:
    """Its title makes room; what has been taken stands before what is left."""
    shown, reporter = io.StringIO(), Reporter()
    reporter.console = PlainConsole(file=shown, width=width, force_terminal=True, color_system=None)
    with reporter.bar(title, 10) as advance:
        advance()
        advance()
    lines = [line.strip() for line in re.split(r"\x1b\[\w+|[\r\n]", shown.getvalue()) if "20%" in line]
    assert re.search(TIMES, lines[-1])
    assert lines[-1].startswith(title[:3])
