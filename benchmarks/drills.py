"""Drills: commands are killed, stopped, starved, spoiled and started twice at random moments, and lose nothing.

    python benchmarks/drills.py [--quick] [--only kills signals disk flips twice] [--kills 200] [--flips 200]
        [--others 20] [--seed 2026] [--workers 2] [--folder DIR]

The commands are `run` (all stages with tasks and replicas of all widths; exports to every runtime's format; refinement,
folded norms and measured layers; a vision transformer with its forward in whole numbers), `convert` and context-aware
`eval`, on tiny models. After every harm the same command has to end with the bytes that an unbroken one leaves, nothing
half-written beside them, and models, texts, recipes and other runs as they were.
kills: SIGKILL, half of them spread over the seconds that a command takes, half over its stages; several hit one
directory before it is finished. signals: SIGTERM and SIGINT (one line, exit code, nothing half-written), SIGSTOP.
disk: a full and a read-only disk (where file systems can be mounted), a directory that is deleted, limits on file size
and on memory (RLIMIT_AS): one line and the exit code of its class. flips: one bit, anywhere in any kind of file, below
and above 16 MiB: refused with its name or made again with a word, never passed on. twice: two runs in one directory,
two runs on one store, two conversions to one target. --others: drills of each kind of signals, disk and twice.
Every drill is random.Random(f"{seed}-{kind}-{number}"). A line for each goes to FOLDER/drills.log; a place where
something was lost is kept, and printed with what was lost and the command. Goal: everything passes.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import figures
from drill_subjects import Ground, Lost

import drill_flips  # isort: skip
import drill_kinds  # isort: skip

KINDS = ("kills", "signals", "disk", "flips", "twice")


@dataclass
class Tally:
    """What was run and what passed, by kind and row of the table; failures: a line each."""

    log: Path
    run: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})
    passed: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    started: float = field(default_factory=time.monotonic)

    def count(self, kind: str, rows: Counter[str], name: str, failure: str | None) -> None:
        """Note a drill that ended; failure: what it lost."""
        with self.lock:
            self.run[kind] += rows
            self.passed[kind] += Counter() if failure else rows
            said = ", ".join(f"{row} {number}" for row, number in rows.items()) or "nothing landed"
            line = f"{time.monotonic() - self.started:7.1f} s  {name}: {said}" + (
                f"; LOST: {failure}" if failure else ""
            )
            with self.log.open("a") as stream:
                print(line, file=stream)
            if failure:
                self.failures.append(line)
                print(line, flush=True)


def drilled(ground: Ground, tally: Tally, kind: str, drill: drill_kinds.Drill, seed: str) -> Counter[str]:
    """One drill in a place of its own, which stays where something was lost."""
    place, rows, failure = ground.place(), Counter[str](), None
    try:
        rows = drill(ground, random.Random(seed), place)
    except Exception as error:  # whatever it is, it is to be seen
        words = " ".join(error.words) if isinstance(error, Lost) else ""
        named = getattr(drill, "__name__", kind).replace("_", " ")
        rows = Counter({named: 1})
        failure = f"{type(error).__name__}: {error}; seed {seed}, moeq {words}; kept {place}"
    else:
        shutil.rmtree(place)
    tally.count(kind, rows, seed, failure)
    return rows


def kills(ground: Ground, tally: Tally, options: argparse.Namespace, pool: ThreadPoolExecutor) -> None:
    """Places one after another until so many kills have landed."""
    landed, number = 0, 0
    while landed < options.kills and number < 3 * options.kills:
        needed = max(1, -(-(options.kills - landed) // drill_kinds.KILLS_A_DIRECTORY))
        seeds = [f"{options.seed}-kills-{number + place}" for place in range(needed)]
        number += needed
        landed += sum(
            rows.total()
            for rows in pool.map(lambda seed: drilled(ground, tally, "kills", drill_kinds.kill, seed), seeds)
        )


def each(kind: str, drills: Callable[[], Iterable[drill_kinds.Drill]]) -> Callable[..., None]:
    """A kind of which --others drills each are done."""

    def play(ground: Ground, tally: Tally, options: argparse.Namespace, pool: ThreadPoolExecutor) -> None:
        chosen = [(drill, n) for n in range(options.others) for drill in drills()]
        numbered = [(drill, f"{options.seed}-{kind}-{place}") for place, (drill, _) in enumerate(chosen)]
        list(pool.map(lambda one: drilled(ground, tally, kind, *one), numbered))

    return play


def flips(ground: Ground, tally: Tally, options: argparse.Namespace, pool: ThreadPoolExecutor) -> None:
    """Bits of all kinds of files in turn, in a place that goes on from flip to flip."""
    spoiled = drill_flips.Spoiled(ground)
    seeds = [f"{options.seed}-flips-{number}" for number in range(options.flips)]
    list(pool.map(lambda one: spoiled.drill(one[1], one[0], tally.count), enumerate(seeds)))


def on_disk() -> Iterable[drill_kinds.Drill]:
    """The drills of the disk that can be done here."""
    possible = drill_kinds.runs.can_mount()
    return [drill for drill in drill_kinds.DISK if possible or drill not in drill_kinds.MOUNTED]


PLAYS: dict[str, Callable[[Ground, Tally, argparse.Namespace, ThreadPoolExecutor], None]] = {
    "kills": kills,
    "signals": each("signals", lambda: drill_kinds.SIGNALS),
    "disk": each("disk", on_disk),
    "flips": flips,
    "twice": each("twice", lambda: drill_kinds.TWICE),
}


def main() -> int:
    made = figures.parser(__doc__, kills=(200, 8), flips=(200, 8), others=(20, 1), seed=2026, workers=2)
    made.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    made.add_argument(
        "--folder", type=Path, help="where all happens [default: a new one, which goes unless it is needed]"
    )
    options = figures.parsed(made)
    results = figures.Figures(options)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="moeq-drills-"))
    tally = Tally(folder / "drills.log")
    ground = Ground(folder)
    print(f"unbroken runs in {time.monotonic() - tally.started:.0f} s; every drill is told in {tally.log}", flush=True)
    if "disk" in options.only and not drill_kinds.runs.can_mount():
        results.left_out("a full and a read-only disk", "no file system can be mounted here")
    with ThreadPoolExecutor(options.workers) as pool:
        for kind in options.only:
            PLAYS[kind](ground, tally, options, pool)
            print(f"{kind}: {tally.passed[kind].total()} of {tally.run[kind].total()} passed", flush=True)
    results.table(["drill", "run", "passed"])
    for kind in options.only:
        for row, number in sorted(tally.run[kind].items()):
            results.row(f"{kind}: {row}", str(number), str(tally.passed[kind][row]))
    for kind in options.only:
        run, passed = tally.run[kind].total(), tally.passed[kind].total()
        wanted = {"kills": options.kills, "flips": options.flips}.get(kind, 1)
        results.add(f"{kind} that were run", run, at_least=wanted, digits=0)
        results.add(f"{kind} after which something was lost", run - passed, at_most=0, digits=0)
    if options.folder is None and not tally.failures:
        shutil.rmtree(folder)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
