"""Fuzzing, counted: every reader of files, options and standard input on inputs that were changed at random.

    python benchmarks/fuzzing.py [--inputs 1000000] [--each 20000] [--workers 2] [--seed 0] [--targets NAME ...]
                                 [--keep FOLDER]
    python benchmarks/fuzzing.py --replay TARGET FILE

The targets are those of the tests (tests/robustness/fuzzing): each has a valid input, which is changed in one to three
places, and checks what is read of it. An input is refused, with one line that says where and what to do, or read; all
else is a crash: another error, more than 5 s, too much memory (which is measured in every 20th input), or a result that
is not sound. Every reader has --each inputs; the rest goes where inputs take least, the same time to each reader.
Seeds decide all inputs. The input of a crash is kept in --keep, with the command that replays it.

Goal: no crash, and so many inputs.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import figures  # isort: skip

sys.path.insert(0, str(figures.ROOT / "tests"))

QUICK = {"inputs": 2_000, "each": 20}
CHUNK = 500  # inputs that a worker is given at once
MEASURED = 20  # memory of every so many-th input
STEP = 1 << 40  # between the seeds of runs
MEMORY = Path("/dev/shm")
MOST_KEPT = 20  # crashes of a target whose inputs are kept


@dataclass
class Counted:
    """What came of inputs of one target."""

    target: str
    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    crashes: list[tuple[int, str]] = field(default_factory=list)  # seed, what was wrong

    def add(self, other: Counted) -> None:
        self.inputs += other.inputs
        self.outcomes += other.outcomes
        self.seconds += other.seconds
        self.crashes += other.crashes

    @property
    def each(self) -> float:
        """Seconds of an input."""
        return self.seconds / max(1, self.inputs)

    def cells(self) -> list[str]:
        numbers = [self.inputs, self.outcomes["read"], self.outcomes["refused"], self.outcomes["crashed"]]
        return [self.target, *(f"{number:,}" for number in numbers), f"{self.seconds:.1f}"]


def _start(folder: str, checkpoint: str) -> None:
    """What a worker keeps: the targets, in a folder of its own."""
    import torch
    from robustness.fuzzing import Fuzzed

    torch.set_num_threads(1)
    globals()["FUZZED"] = Fuzzed(Path(folder) / f"worker-{os.getpid()}", Path(checkpoint))


def run_chunk(target: str, first: int, count: int) -> Counted:
    """Inputs of consecutive seeds, in a worker."""
    fuzzed, counted = globals()["FUZZED"], Counted(target)
    fuzzed.target(target)
    began = time.perf_counter()
    for seed in range(first, first + count):
        counted.inputs += 1
        try:
            outcome = fuzzed.run(target, fuzzed.mutated(target, seed), memory=seed % MEASURED == 0)
        except Exception as error:
            outcome = "crashed"
            counted.crashes.append((seed, _told(error)))
        counted.outcomes[outcome] += 1
    counted.seconds = time.perf_counter() - began
    return counted


def _told(error: Exception) -> str:
    """The error and the last two places that it came from."""
    places = traceback.extract_tb(error.__traceback__)[-2:]
    where = " < ".join(f"{Path(place.filename).name}:{place.lineno}" for place in reversed(places))
    return f"{type(error).__name__}: {str(error)[:200]} ({where})"


def chunks(targets: Sequence[str], counts: dict[str, int], done: dict[str, int], seed: int) -> Iterator[tuple]:
    """(target, first seed, inputs) of what is to be run beyond what is done, the targets in turn."""
    for start in range(0, max(counts.values(), default=0), CHUNK):
        for target in targets:
            if (left := counts[target] - start) > 0:
                yield target, seed * STEP + done[target] + start, min(CHUNK, left)


def shares(rest: int, each: dict[str, float]) -> dict[str, int]:
    """`rest` inputs, the same time to each target; each: seconds of an input."""
    speeds = {target: 1 / max(seconds, 1e-6) for target, seconds in each.items()}
    return {target: math.ceil(rest * speed / sum(speeds.values())) for target, speed in speeds.items()}


def count(options: argparse.Namespace, folder: Path, checkpoint: Path, targets: Sequence[str]) -> dict[str, Counted]:
    """Run all inputs."""
    counted = {target: Counted(target) for target in targets}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, context, _start, (str(folder), str(checkpoint))) as pool:
        counts = dict.fromkeys(targets, options.each)
        while sum(counts.values()):
            done = {target: found.inputs for target, found in counted.items()}
            jobs = {pool.submit(run_chunk, *job): job for job in chunks(targets, counts, done, options.seed)}
            for job in as_completed(jobs):
                try:
                    counted[jobs[job][0]].add(job.result())
                except BrokenProcessPool:
                    raise SystemExit(f"a worker died within {jobs[job]}: its last input is in {folder}") from None
            rest = options.inputs - sum(found.inputs for found in counted.values())
            counts = shares(rest, {target: found.each for target, found in counted.items()}) if rest > 0 else {}
    return counted


def keep(crashed: Counted, folder: Path, fuzzed: object) -> None:
    """The inputs of crashes, one of each kind, and how they are replayed."""
    kinds: dict[str, int] = {}
    for seed, what in sorted(crashed.crashes):
        kinds.setdefault(what.rpartition(" (")[2], seed)  # by its place
    for seed in list(kinds.values())[:MOST_KEPT]:
        path = folder / f"{crashed.target}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(fuzzed.mutated(crashed.target, seed))  # type: ignore[attr-defined]
        said = next(text for one, text in crashed.crashes if one == seed)
        print(
            f"  {crashed.target}: {said}\n    python benchmarks/fuzzing.py --replay {crashed.target} {path}", flush=True
        )


def replay(target: str, file: Path, folder: Path, checkpoint: Path) -> int:
    """One input again, with all that it raises."""
    from robustness.fuzzing import Fuzzed

    print(f"{target}: {Fuzzed(folder / 'replayed', checkpoint).run(target, file.read_bytes())}")
    return 0


def main() -> int:
    parser = figures.parser(
        __doc__, inputs=(1_000_000, QUICK["inputs"]), each=(20_000, QUICK["each"]), workers=2, seed=0
    )
    parser.add_argument("--targets", nargs="+")
    parser.add_argument("--keep", type=Path, default=Path("fuzzing-crashes"))
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "FILE"))
    options = figures.parsed(parser)
    from robustness.fuzzing import TARGETS, Fuzzed
    from robustness.fuzzing.made import exported

    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        folder = Path(name)
        checkpoint = exported(folder)
        if options.replay:
            return replay(options.replay[0], Path(options.replay[1]), folder, checkpoint)
        targets = options.targets or list(TARGETS)
        counted = count(options, folder, checkpoint, targets)
        crashed = [found for found in counted.values() if found.crashes]
        fuzzed = Fuzzed(folder / "kept", checkpoint)
        for found in crashed:
            keep(found, options.keep, fuzzed)
    return report(options, list(counted.values()))


def report(options: argparse.Namespace, counted: Sequence[Counted]) -> int:
    """The table and the figures."""
    results = figures.Figures(options)
    results.table(["reader", "inputs", "read", "refused", "crashed", "seconds"])
    for found in counted:
        results.row(*found.cells())
    seconds = time.monotonic() - options.started
    inputs = sum(found.inputs for found in counted)
    results.add("readers", len(counted), digits=0)
    results.add("inputs", inputs, at_least=options.inputs, digits=0)
    results.add("inputs of the reader with fewest", min(found.inputs for found in counted), at_least=options.each,
                digits=0)  # fmt: skip
    results.add("crashes", sum(found.outcomes["crashed"] for found in counted), at_most=0, digits=0)
    results.add("inputs a second", inputs / seconds, digits=0)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
