"""All benchmarks in their quick form, and RESULTS.md's tables from the files that they write.

    python benchmarks/bench.py [NAME ...] [--full] [--to build/bench]   run them; exits 1 where a goal is missed
    python benchmarks/bench.py --record build/bench                     keep these files, and make the tables of them
    python benchmarks/bench.py --tables                                 make the tables of the files that are kept

`make bench` is the first. Each benchmark is a program of its own, one after the other, --quick but for --full; what
needs a peer, a GPU or the trained checkpoints beside the repository (../shared) says in a line that it was left out.
One that fails, or takes longer than LIMIT_SECONDS, counts as missed. The files (date, commit, machine, command,
figures, goals, tables) go to --to; those that RESULTS.md shows are kept in benchmarks/results/, and the text between
its markers `<!-- NAME -->` and `<!-- /NAME -->` is what `markdown` makes of results/NAME.json, nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from figures import ROOT, Figure

HERE = ROOT / "benchmarks"
KEPT, RESULTS = HERE / "results", HERE / "RESULTS.md"
MARKED = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
LIMIT_SECONDS = 600
NOTHING = "nothing was measured"


def names() -> list[str]:
    """The benchmarks: programs that report figures."""
    texts = {path.stem: path.read_text("utf-8") for path in sorted(HERE.glob("*.py")) if path.stem != "bench"}
    return [name for name, text in texts.items() if ".report()" in text and "__main__" in text]


def run(name: str, folder: Path, full: bool) -> dict[str, Any]:
    """One benchmark in a process of its own: the file that it wrote, with its exit code and seconds."""
    path, started = folder / f"{name}.json", time.monotonic()
    path.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / f"{name}.py"), *([] if full else ["--quick"]), "--json", str(path)]
    print(f"\n== {name}", flush=True)
    try:
        code = subprocess.run(command, timeout=None if full else LIMIT_SECONDS, cwd=ROOT).returncode
    except subprocess.TimeoutExpired:
        code = -1
        print(f"{name}: stopped after {LIMIT_SECONDS} s", flush=True)
    nothing = {"benchmark": name, "figures": [], "left_out": []}
    written = json.loads(path.read_text("utf-8")) if path.is_file() else nothing
    return written | {"code": code, "took": time.monotonic() - started}


def rows(written: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Name, value, goal and verdict of each figure."""
    return [(figure.name, *figure.cells()) for figure in map(read_figure, written["figures"])]


def read_figure(entry: dict[str, Any]) -> Figure:
    """A figure as a file has it."""
    value = float("nan") if entry["value"] is None else entry["value"]
    return Figure(**{name: entry[name] for name in entry if name not in ("met", "value")}, value=value)


def summary(runs: list[dict[str, Any]]) -> int:
    """Print all figures as one table, what was left out, and what was missed; the exit code."""
    listed = [(written["benchmark"], *row) for written in runs for row in rows(written)]
    widths = [max((len(row[column]) for row in listed), default=0) for column in range(4)]
    print()
    for row in listed:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())
    for written in runs:
        for line in written["left_out"]:
            print(f"{written['benchmark']}: {line}")
    missed = [f"{row[0]}: {row[1]} {row[2]} (goal {row[3]})" for row in listed if row[4] == "MISSED"]
    missed += [
        f"{written['benchmark']}: failed, exit code {written['code']}"
        for written in runs
        if written["code"] != 0 and (written["code"] != 1 or all(row[3] != "MISSED" for row in rows(written)))
    ]
    took = sum(written["took"] for written in runs)
    print(f"\n{len(runs)} benchmarks, {len(listed)} figures, {took / 60:.1f} minutes: {len(missed)} missed")
    print("\n".join(missed), end="\n" if missed else "")
    return 1 if missed else 0


def markdown(written: dict[str, Any]) -> str:
    """A file as RESULTS.md shows it: where it is from, its figures, and the tables that the benchmark gave."""
    where = f"{written['date']}, commit {written['commit']}; {written['machine']}; {written['seconds']:.0f} s"
    lines = [f"`{written['command']}` ({where})", ""]
    shown = [(name, value, goal, met if goal else "") for name, value, goal, met in rows(written)]
    lines += table(["figure", "value", "goal", ""], shown)
    if "plot" in written:
        name, told = written["plot"]
        lines += ["", f"![{told}](results/{name})"]
    for further in written["tables"]:
        lines += ["", *table(further["columns"], further["rows"])]
    return "\n".join([*lines, *(f"\n{line[0].upper()}{line[1:]}." for line in written["left_out"])]) + "\n"


def table(columns: list[str], cells: list[Any]) -> list[str]:
    """The lines of a Markdown table; columns after the first are figures."""
    return [
        f"| {' | '.join(columns)} |",
        f"|---|{'---:|' * (len(columns) - 1)}",
        *(f"| {' | '.join(row)} |" for row in cells),
    ]


def with_tables(text: str, kept: Path) -> str:
    """RESULTS.md with what stands between its markers made of the kept files; SystemExit where one is missing."""

    def made(match: re.Match[str]) -> str:
        path = kept / f"{match[2]}.json"
        if not path.is_file():
            raise SystemExit(f"{path}: RESULTS.md shows it, and it is not there; run the benchmark and --record it")
        return f"{match[1]}{markdown(json.loads(path.read_text('utf-8')))}{match[3]}"

    return MARKED.sub(made, text)


def record(folder: Path, kept: Path, results: Path) -> list[str]:
    """Keep the files of a run that measured something, and make the tables again; a new one is put at the end."""
    kept.mkdir(exist_ok=True)
    text, taken = results.read_text("utf-8"), []
    for path in sorted(folder.glob("*.json")):
        written = json.loads(path.read_text("utf-8"))
        if written["figures"]:
            shutil.copyfile(path, kept / path.name)
            if "plot" in written:
                shutil.copyfile(path.parent / written["plot"][0], kept / written["plot"][0])
            taken.append(path.stem)
            if f"<!-- {path.stem} -->" not in text:
                text += f"\n<!-- {path.stem} -->\n<!-- /{path.stem} -->\n"
    results.write_text(with_tables(text, kept), "utf-8")
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--full", action="store_true", help="not the quick forms: hours")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "bench", help="folder of the files")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="keep these files and make RESULTS.md's tables")
    parser.add_argument("--tables", action="store_true", help="make RESULTS.md's tables of the files that are kept")
    options = parser.parse_args()
    if options.record is not None:
        print(f"kept: {', '.join(record(options.record, KEPT, RESULTS)) or NOTHING}")
        return 0
    if options.tables:
        RESULTS.write_text(with_tables(RESULTS.read_text("utf-8"), KEPT), "utf-8")
        return 0
    unknown = sorted(set(options.names) - set(names()))
    if unknown:
        parser.error(f"no benchmark {unknown[0]}; there are {', '.join(names())}")
    options.to.mkdir(parents=True, exist_ok=True)
    return summary([run(name, options.to, options.full) for name in options.names or names()])


if __name__ == "__main__":
    sys.exit(main())
