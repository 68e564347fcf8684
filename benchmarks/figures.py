"""What the benchmarks share: figures with their goals, the table at the end and the file of it; how work is measured.

    def main() -> int:
        options = figures.arguments(__doc__, rounds=(21, 3), device="cpu")  # --rounds, 3 where --quick is given
        results = figures.Figures(options)
        results.add("growth from 4 to 32 layers", grown, "of a layer", at_most=0.25)
        results.add("share of the disk's rate", ratio, at_least=0.6, digits=2)
        results.add("level", level / 1e6, "MB")  # no goal: shown, and never missed
        results.table(["layers", "export"])  # what RESULTS.md shows beside the figures
        results.row("4", "258")  # shown at once, too
        results.left_out("gptqmodel", "it is not installed")
        return results.report()

`report` prints every figure with its goal, then one last line, and returns the exit code: 1 when a goal is missed (or a
value is not finite), 0 when all are met. Every benchmark takes --quick, the form that `make bench` runs, and --json
PATH, where `report` writes what it printed with date, commit, machine and command; `bench.py` makes RESULTS.md's tables
from such files. A benchmark that cannot be run here ends with `return figures.skipped(options, "why")`, exit code 0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeq.stages.context import Context

ROOT = Path(__file__).resolve().parents[1]
SOURCES = os.pathsep.join(  # PYTHONPATH of this tree, then what was in it: wheels that are not installed
    [str(ROOT), str(ROOT / "moeq-kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
PEERS = Path(os.environ.get("MOEQ_PEERS") or ROOT / ".peers")  # environments of other runtimes, see `make peers`
SHARED = ROOT.parent / "shared"  # trained checkpoints and texts that are not moeq's, where there are some


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure: at_most or at_least is its goal, if it has one; digits: behind the point when it is shown."""

    name: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    digits: int = 2

    @property
    def met(self) -> bool:
        """Whether its goal is reached, for want of which any finite value will do."""
        most, least = (math.inf if self.at_most is None else self.at_most), self.at_least
        return math.isfinite(self.value) and self.value <= most and (least is None or self.value >= least)

    def as_json(self) -> dict[str, Any]:
        """All of it; a value that is not finite is null."""
        return asdict(self) | {"value": self.value if math.isfinite(self.value) else None, "met": self.met}

    def cells(self) -> tuple[str, str, str]:
        """Value with unit, goal, and whether it is met."""
        word, limit = ("at most", self.at_most) if self.at_least is None else ("at least", self.at_least)
        goal = "" if limit is None else f"{word} {limit:.{self.digits}f}"
        return f"{self.value:.{self.digits}f} {self.unit}".strip(), goal, "met" if self.met else "MISSED"


@dataclass
class Figures:
    """What one run of a benchmark found; options: as `arguments` gives them.

    details: further keys of the file; before: seconds of earlier runs whose findings this one goes on from.
    """

    options: argparse.Namespace
    figures: list[Figure] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    before: float = 0.0

    def add(self, name: str, value: float, unit: str = "", **goal: Any) -> Figure:
        """One more figure; goal: at_most or at_least, and digits."""
        self.figures.append(Figure(name=name, value=float(value), unit=unit, **goal))
        return self.figures[-1]

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]] = ()) -> None:
        """A table of texts that RESULTS.md shows below the figures; the first column names the row."""
        self.tables.append({"columns": list(columns), "rows": [list(row) for row in rows]})

    def row(self, *cells: str) -> None:
        """One more row of the last table, printed at once below its columns."""
        columns, rows = (self.tables[-1][part] for part in ("columns", "rows"))
        rows.append(list(cells))
        for first, *others in (columns, cells) if len(rows) == 1 else (cells,):
            aligned = (f"{cell:>{len(title)}}" for cell, title in zip(others, columns[1:], strict=True))
            print(f"{first:26}", *aligned, sep="  ", flush=True)

    def left_out(self, what: str, why: str) -> None:
        """Say, here and in the file, what was not measured."""
        self.lacking.append(f"{what} left out: {why}")
        print(self.lacking[-1], flush=True)

    def keep(self) -> None:
        """Write what was found so far, in case the rest is stopped."""
        self._write()

    def report(self) -> int:
        """Print the figures and the last line, write the file that --json names; the exit code."""
        widest = max((len(figure.name) for figure in self.figures), default=0)
        missed, goals = [], 0
        print()
        for figure in self.figures:
            shown, goal, met = figure.cells()
            print(f"{figure.name:{widest}}  {shown:>24}  {goal:22} {met if goal else ''}".rstrip())
            goals += bool(goal)
            missed += [] if figure.met else [f"{figure.name} {shown} (goal {goal})"]
        self._write()
        lost = f"; MISSED: {', '.join(missed)}" if missed else ""
        print(f"{Path(sys.argv[0]).stem}: {goals - len(missed)} of {goals} goals met{lost}")
        return 1 if missed else 0

    def _write(self) -> None:
        path = self.options.json
        if path is not None:
            run = {"benchmark": Path(sys.argv[0]).stem, "quick": self.options.quick} | machine() | {
                "command": command(), "seconds": round(self.before + time.monotonic() - self.options.started, 1),
                "figures": [figure.as_json() for figure in self.figures],
                "tables": self.tables, "left_out": self.lacking,
            } | self.details  # fmt: skip
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(run, indent=1, allow_nan=False) + "\n", "utf-8")


def skipped(options: argparse.Namespace, why: str) -> int:
    """Nothing can be measured here: say so, and write it; the exit code, 0."""
    nothing = Figures(options)
    nothing.left_out(Path(sys.argv[0]).stem, why)
    return nothing.report()


def parser(documentation: str | None, **settings: Any) -> argparse.ArgumentParser:
    """A parser with --quick, --json and a setting for each name: its default, or (default, value with --quick).

    The type of a setting is that of its default: int, float, str, Path, a list of one of them, or False for a flag.
    """
    made = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="the short form that `make bench` runs")
    made.add_argument("--json", type=Path, metavar="PATH", help="write the figures here, too")
    made.set_defaults(started=time.monotonic())
    for name, value in settings.items():
        usual, quick = value if isinstance(value, tuple) else (value, value)
        flag = f"--{name.replace('_', '-')}"
        shown = f"[default: {usual}" + (f"; --quick: {quick}]" if quick != usual else "]")
        if usual is False:
            made.add_argument(flag, action="store_true")
        else:
            kind = type(usual[0] if isinstance(usual, list) else usual)
            several = {"nargs": "+"} if isinstance(usual, list) else {}
            made.add_argument(flag, type=kind, help=shown, default=_Default(usual, quick), **several)  # type: ignore[arg-type]
    return made


@dataclass(frozen=True)
class _Default:
    """A default that --quick decides."""

    usual: Any
    quick: Any


def arguments(documentation: str | None, **settings: Any) -> argparse.Namespace:
    """The options that `parser` makes of the command line."""
    return parsed(parser(documentation, **settings))


def parsed(made: argparse.ArgumentParser, given: Sequence[str] | None = None) -> argparse.Namespace:
    """What a parser reads, the defaults being those of --quick where that is given."""
    options = made.parse_args(given)
    for name, value in vars(options).items():
        if isinstance(value, _Default):
            setattr(options, name, value.quick if options.quick else value.usual)
    return options


@contextmanager
def kept_or_temporary(folder: Path | None) -> Iterator[Path]:
    """The folder that was given, made if it is not there and kept; for None one that is gone afterwards."""
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as used:
        Path(used).mkdir(parents=True, exist_ok=True)
        yield Path(used)


def machine() -> dict[str, str]:
    """Date, commit and machine of a run."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "unknown"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cores = len(os.sched_getaffinity(0))
    name = f"{cores} cores, {memory:.0f} GB, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    if "OMP_NUM_THREADS" in os.environ:  # otherwise torch takes all cores
        name += f", OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        name += f", {torch.cuda.get_device_name()}"
    return {"date": datetime.now(UTC).date().isoformat(), "commit": commit, "machine": name}


def command() -> str:
    """The command line as a shell takes it, without the file that it writes; places of this machine are FOLDER."""
    words = [f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    if "--json" in words:
        del words[words.index("--json") : words.index("--json") + 2]
    return shlex.join(["python", *("FOLDER" if Path(word).is_absolute() else word for word in words)])


def processor_seconds(work: Callable[[], object], rounds: int = 1) -> float:
    """Median of the processor's seconds of some rounds, all threads of this process."""
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def resident(process: str = "self") -> dict[str, int]:
    """RssAnon and RssFile of a process, bytes."""
    rows = (line.partition(":") for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in rows if name in ("RssAnon", "RssFile")}


class Peaks:
    """The highest of the numbers that `level` gives, looked at 50 times a second while a `with` block runs."""

    def __init__(self, level: Callable[[], dict[str, int]] = resident) -> None:
        self.level, self.highest = level, level()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            for name, value in self.level().items():
                self.highest[name] = max(self.highest.get(name, 0), value)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def printed(*words: str) -> str:
    """What Python prints for these words of a command line, in a fresh process; messages go to standard error."""
    given = os.environ | {"PYTHONPATH": SOURCES}
    return subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, check=True, env=given).stdout


def in_fresh_process(script: str, *words: str) -> Any:
    """What a Python program prints as JSON on its last line."""
    return json.loads(printed(script, *words).splitlines()[-1])


def moeq_json(*words: str) -> Any:
    """What `moeq WORDS --json` prints."""
    return json.loads(printed("-m", "moeq", *words, "--json"))


def last_line(said: str) -> str:
    """What a program that failed said last."""
    return (said.strip().splitlines() or ["no message"])[-1]


def environment(home: Path, pins: Path, *installs: Sequence[str]) -> str | None:
    """Make a peer's virtual environment where it is not there yet; why it cannot be, None when it can.

    pins: constraints of pip's; installs: requirements, one `pip install` after another, but for the first without
    isolation of builds.
    """
    done, python = home / ".installed", home / "bin" / "python"
    if done.exists():
        return None
    print(f"installing into {home}", flush=True)
    steps = [[sys.executable, "-m", "venv", "--clear", str(home)]]
    for number, requirements in enumerate(installs):
        isolation = ["--no-build-isolation"] if number else []
        steps.append([str(python), "-m", "pip", "install", "-q", "-c", str(pins), *isolation, *requirements])
    for step in steps:
        result = subprocess.run(step, capture_output=True, text=True)
        if result.returncode:
            return f"it cannot be installed ({last_line(result.stderr)})"
    done.touch()
    return None


def context(model: str | Path, out: Path, overrides: Sequence[str] = (), recipe: Path | None = None) -> Context:
    """A run of a model that reports nothing; recipe: a file, None for the defaults."""
    from moeq.progress import Reporter
    from moeq.recipe import load_recipe
    from moeq.stages.context import Context

    loaded = load_recipe(recipe, list(overrides))
    return Context(recipe=loaded, model_name=str(model), out=out, reporter=Reporter(quiet=True))


def script(path: Path) -> Any:
    """A Python file that is not moeq's, such as a training script with its texts, as a module."""
    import importlib.util

    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
