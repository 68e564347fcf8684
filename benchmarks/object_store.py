"""What a model in an object store costs: its answers come late, and some requests fail.

    python benchmarks/object_store.py [--rounds 3] [--layers 12] [--experts 16] [--hidden 384] [--latency 0.1]
                                      [--failing 0.05] [--cache 0.1]

scale.py's random Mixtral, profiled and quantized (GPTQ, 3 widths) in runs of their own processes, one thread, streamed:
from this disk, and through the reader of object stores, every request of which takes --latency seconds more; --failing
of them fail, half by an error and half by coming short; blocks of at most --cache of the weights are kept. The store is
the disk behind fsspec, so that what it costs is latency and repeated requests, not the network's rate. Runs take turns;
ratios are of the same round. "nothing fetched before": the same without prefetch.

Goals: at most 1.3 times the time from the disk, the same digests, and no more of the weights on the disk than allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import figures
from scale import SETTINGS, make

STAGES = ("profile", "losses", "assign", "quantize")
KINDS = ("disk", "store", "nothing fetched before")
GOAL = 1.3


def worsen(latency: float, failing: float) -> None:
    """Let every request of the store take longer, and some fail, by a fixed seed."""
    import fsspec

    system: Any = fsspec.filesystem("file")
    real, chance, lock = system.cat_file, random.Random(5), threading.Lock()

    def cat_file(path: str, start: int | None = None, end: int | None = None, **more: Any) -> Any:
        time.sleep(latency)
        with lock:
            drawn = chance.random()
        if drawn < failing / 2:
            raise OSError("connection reset")
        data = real(path, start=start, end=end, **more)
        return data[:-1] if drawn < failing else data

    system.cat_file = cat_file


def one(kind: str, model: str, out: Path, latency: float, failing: float) -> None:
    """In this process: a run, its seconds and digests, and what the store says of itself."""
    from moeq import pipeline
    from moeq.artifacts.remote import Store

    where = model
    if kind != "disk":
        worsen(latency, failing)
        where = f"file://{model}"
    if kind == KINDS[2]:
        assert callable(Store.follow)
        Store.follow = lambda *_: None  # type: ignore[method-assign]
    context = figures.context(where, out, [*SETTINGS, "stream=always"], None)
    begun = time.perf_counter()
    outcomes = pipeline.run(context, STAGES)
    found: dict[str, Any] = {"seconds": time.perf_counter() - begun}
    found["digests"] = {outcome.stage: outcome.record.digest for outcome in outcomes}
    if kind != "disk":
        file: Any = context.model.source.files[0]
        found |= {"fetched": file.store.fetched, "retried": file.store.retried, "held": file.store.held_bytes}
    print(json.dumps(found))


def run(kind: str, model: Path, scratch: Path, options: argparse.Namespace, size: int) -> dict[str, Any]:
    """A run in a process of its own, with a cache of its own."""
    words = [kind, str(model), str(scratch / "out"), str(options.latency), str(options.failing)]
    environment = os.environ | {
        "PYTHONPATH": figures.SOURCES, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "MOEQ_CACHE": str(scratch / "cache"), "MOEQ_REMOTE_CACHE": str(int(size * options.cache)),
    }  # fmt: skip
    command = [sys.executable, __file__, "--one", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"a run from the {kind} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = figures.parser(
        __doc__, rounds=(3, 1), layers=(12, 6), experts=(16, 8), hidden=(384, 192), intermediate=512, latency=0.1,
        failing=0.05, cache=0.1,
    )  # fmt: skip
    parser.add_argument("--one", nargs=5, metavar=("KIND", "MODEL", "OUT", "LATENCY", "FAILING"), help="one run, here")
    options = figures.parsed(parser)
    if options.one:
        kind, model, out, latency, failing = options.one
        one(kind, model, Path(out), float(latency), float(failing))
        return 0
    results, runs = figures.Figures(options), {kind: [] for kind in KINDS}  # type: ignore[var-annotated]
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder) / "model", options)
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        for number in range(options.rounds):
            for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                scratch = Path(folder) / f"{number} {kind}"
                scratch.mkdir()
                runs[kind].append(run(kind, model, scratch, options, size))
    results.table(["run", "seconds", "MB fetched", "of the weights", "requests made again"])
    for kind, found in runs.items():
        middle = statistics.median(each["seconds"] for each in found)
        last = found[-1]
        store = ("", "", "") if kind == KINDS[0] else (
            f"{last['fetched'] / 1e6:.0f}", f"{last['fetched'] / size:.1f}", str(last["retried"])
        )  # fmt: skip
        results.row(kind, f"{middle:.1f}", *store)
    for kind, goal in zip(KINDS[1:], ({"at_most": GOAL}, {}), strict=True):
        pairs = zip(runs[kind], runs[KINDS[0]], strict=True)
        results.add(
            f"time, {kind}", statistics.median(a["seconds"] / b["seconds"] for a, b in pairs), "of disk's", **goal
        )
    everything = [each for found in runs.values() for each in found]
    same = sum(each["digests"] == everything[0]["digests"] for each in everything)
    results.add("runs with the same digests", same, f"of {len(everything)}", at_least=len(everything), digits=0)
    held = max(each["held"] for each in everything if "held" in each)
    results.add("weights that lie in the cache", held / size, "of them", at_most=options.cache, digits=3)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
