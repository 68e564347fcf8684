"""What `moeq plan` foretells against what `moeq run` takes: seconds and peak anonymous memory of every stage.

    python benchmarks/plan.py [--layers 4] [--experts 16] [--hidden 512] [--intermediate 512]

On the bundled model with the demo recipe and on a random Mixtral in bfloat16, loaded and streamed; each plan and each
run in a fresh process. Goals: the whole run within a factor of 2 of the foretold seconds; no stage takes more memory
than foretold.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import figures
from memory import make, resident

ROOT = Path(__file__).parents[1]
DEMO = [str(ROOT / "recipes" / "demo.yaml")]
SMALL = [
    "corpus.sequences=32", "corpus.sequence_length=128", "losses.bits=[1,2,3,4]", "eval.perplexity.sequences=32",
    "eval.perplexity.sequence_length=128", "eval.compare=[{name: u2, method: uniform, bits: 2}]",
    "estimate.grid.inputs=[128]", "estimate.grid.outputs=[512]",
]  # fmt: skip


def measure(model: str, recipe: str | None, overrides: list[str], out: str) -> dict[str, dict[str, float]]:
    """In this process: every stage's seconds and highest RssAnon, that of its own processes included."""
    from moeq import pipeline
    from moeq.progress import Reporter
    from moeq.recipe import load_recipe
    from moeq.stages.context import Context

    loaded = load_recipe(Path(recipe) if recipe else None, overrides)
    context = Context(recipe=loaded, model_name=model, out=Path(out), reporter=Reporter(quiet=True))
    peaks: dict[str, int] = {}
    stage, stop = "profile", threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            now, taken = stage, resident()["RssAnon"] + sum(map(anonymous, children()))
            peaks[now] = max(peaks.get(now, 0), taken)

    thread = threading.Thread(target=watch)
    thread.start()
    seconds = {}
    try:
        for stage in pipeline.BY_NAME:
            started = time.perf_counter()
            pipeline.run(context, (stage,))
            seconds[stage] = time.perf_counter() - started
            peaks.setdefault(stage, resident()["RssAnon"])
    finally:
        stop.set()
        thread.join()
    return {name: {"seconds": seconds[name], "ram_bytes": peaks[name]} for name in seconds}


def children() -> list[str]:
    """Ids of the processes that this one started."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += (task / "children").read_text().split()
    return found


def anonymous(process: str) -> int:
    """Anonymous memory of a process, 0 when it has ended."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    return 0


def compare(title: str, model: str, recipe: list[str], overrides: list[str]) -> tuple[float, float]:
    """Print one table; returns foretold over measured seconds, and the least foretold over measured memory."""
    sets = [part for override in overrides for part in ("--set", override)]
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "moeq", "plan", *recipe, "--model", model, "--out", out, "--json", *sets]
        planned = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        arguments = [model, recipe[0] if recipe else "", f"{out}/run", *overrides]
        command = [sys.executable, __file__, "--one", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    print(f"\n{title}\nstage      foretold  measured  ratio   foretold   measured  ratio")
    least = float("inf")
    for stage in planned["stages"]:
        found = measured[stage["stage"]]
        ratio = stage["ram_bytes"] / found["ram_bytes"]
        least = min(least, ratio)
        print(
            f"{stage['stage']:9}  {stage['seconds']:6.1f} s  {found['seconds']:6.1f} s  "
            f"{stage['seconds'] / found['seconds']:5.2f}  {stage['ram_bytes'] / 1e6:6.0f} MB  "
            f"{found['ram_bytes'] / 1e6:6.0f} MB  {ratio:5.2f}",
            flush=True,
        )
    foretold = sum(stage["seconds"] for stage in planned["stages"])
    taken = sum(found["seconds"] for found in measured.values())
    print(f"{'all':9}  {foretold:6.1f} s  {taken:6.1f} s  {foretold / taken:5.2f}", flush=True)
    return foretold / taken, least


def main() -> int:
    parser = figures.parser(__doc__, hidden=512, intermediate=512, experts=16, layers=4)
    parser.add_argument("--one", nargs="+", metavar="MODEL RECIPE OUT", help="measure in this process")
    options = figures.parsed(parser)
    if options.one:
        model, recipe, out, *overrides = options.one
        print(json.dumps(measure(model, recipe or None, overrides, out)))
        return 0
    found = [compare("bundled model, demo recipe", "bundled:tiny-mixtral", DEMO, [])]
    with tempfile.TemporaryDirectory() as scratch:
        folder = make(Path(scratch) / "model", options.layers, options)
        title = f"{options.layers} layers of {options.experts} experts {options.hidden} x {options.intermediate}"
        found += [
            compare(f"{title}, stream: {how}", str(folder), [], [*SMALL, f"stream={how}"])
            for how in ("never", "always")
        ]
    report = figures.Figures(options)
    worst = max(max(ratio, 1 / ratio) for ratio, _ in found)
    report.add("seconds, off by a factor of", worst, at_most=2)
    report.add("foretold memory, of what a stage took at the least", min(ratio for _, ratio in found), at_least=1)
    return report.report()


if __name__ == "__main__":
    sys.exit(main())
