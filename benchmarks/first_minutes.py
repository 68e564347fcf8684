"""What a user meets in the first minutes: calibration text of any size, the plan, refusals, and what hashing costs.

    python benchmarks/first_minutes.py [--quick] [--text-megabytes 1000] [--model-gigabytes 8] [--only plan refusals]

Whole commands in fresh processes: processor seconds (user and system, children included) and peak resident memory as
the kernel counts them. Goals:
calibration: `moeq profile` of the bundled model on --text-megabytes of text, plain and gzipped: at most 100 MB more
than on 1 MB.
plan: what `moeq plan` foretells of the demo against its run: memory within 10 %, processor seconds within a factor of
1.5 (`benchmarks/plan.py` does it for more models).
refusals: wrong options, damaged files and unknown keys of every command: 0.7 s of processor time at most.
hashing: seconds that SHA-256 took, of all processor seconds of a run from a random Mixtral of --model-gigabytes to its
verified checkpoint: at most 5 %.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import figures
import memory
import plan

from moeq.bundled import bundled_path

MEGABYTE = 10**6
EXPERTS = 40  # of the random model's layers, each 1024 x 1024: 252 MB a layer
REFUSED = (
    ["run", "no-such-recipe.yaml"],
    ["run", "recipes/demo.yaml", "--set", "assign.no_such_key=1"],
    ["run", "recipes/demo.yaml", "--set", "losses.bits=[99]"],
    ["profile", "--model", "no/such/model/here", "--out", "OUT"],
    ["losses", "--set", "losses.group_size=many", "--model", "bundled:tiny-mixtral", "--out", "OUT"],
    ["assign", "--out", "OUT"],
    ["assign", "--out", "OUT", "--bits-per-weight", "none"],
    ["quantize", "--out", "OUT"],
    ["export", "--out", "OUT", "--format", "no-such-format"],
    ["eval", "bundled:tiny-mixtral", "--tasks", "arc_easy", "--include-path", "no-such-folder"],
    ["eval", "bundled:tiny-mixtral", "--stride", "4", "--window", "2"],
    ["eval", "no-such-model"],
    ["estimate", "--model", "mixtral-8x7b", "--hardware", "no-such-hardware"],
    ["report", "--out", "OUT"],
    ["plan", "no-such-recipe.yaml"],
    ["inspect", "no-such-file"],
    ["convert", "no-such-checkpoint", "--to", "gptq", "--out", "OUT"],
    ["verify", "no-such-checkpoint"],
    ["generate", "no-such-checkpoint", "Once"],
    ["gc", "--out", "no-such-run"],
)


@dataclass(frozen=True)
class Taken:
    """What a command took: processor seconds, the highest resident bytes of one of its processes, its exit code."""

    seconds: float
    resident_bytes: int
    code: int
    said: str


def taken(*words: str) -> Taken:
    """Run `moeq WORDS` in a fresh process."""
    command = [sys.executable, "-m", "moeq", *words]
    given = os.environ | {"PYTHONPATH": str(figures.ROOT), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(command, cwd=figures.ROOT, env=given, stdout=subprocess.DEVNULL, stderr=said)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        return Taken(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, child.returncode, said.read())


def done(*words: str) -> Taken:
    """Run a command that has to succeed."""
    ended = taken(*words)
    if ended.code != 0:
        raise RuntimeError(f"moeq {' '.join(words)} ended with {ended.code}: {ended.said[-500:]}")
    return ended


def write_text(path: Path, size: int) -> Path:
    """A text of that size: the bundled corpus over and over, every copy numbered so that no two lines are alike."""
    records = bundled_path("corpus/calibration.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(record)["text"] for record in records]
    left = size
    with gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb") as stream:
        for number in itertools.count():
            part = "\n\n".join(f"{number}. {text}" for text in texts).encode()[:left]
            stream.write(part)
            left -= len(part)
            if not left:
                return path


def calibration(results: figures.Figures, scratch: Path) -> None:
    sizes = {"1 MB": MEGABYTE, f"{results.options.text_megabytes} MB": results.options.text_megabytes * MEGABYTE}
    small = None
    results.table(["text", "memory, MB", "processor, s"])
    for suffix in (".txt", ".txt.gz"):
        for name, size in sizes.items():
            text = write_text(scratch / f"text{suffix}", size)
            profile = done(
                "profile", "--model", "bundled:tiny-mixtral", "--out", str(scratch / "run"), "--quiet",
                "--set", f"corpus.source={text}", "--set", "corpus.sequences=16",
            )  # fmt: skip
            shutil.rmtree(scratch / "run")
            text.unlink()
            results.row(f"{name} {suffix}", f"{profile.resident_bytes / 1e6:.0f}", f"{profile.seconds:.1f}")
            small = small or profile
            if size > MEGABYTE:
                more = (profile.resident_bytes - small.resident_bytes) / 1e6
                results.add(f"calibration on {name} of {suffix}, above 1 MB", more, "MB", at_most=100, digits=0)
                results.add(f"calibration on {name} of {suffix}", profile.seconds, "s of processor", digits=1)


def refusals(results: figures.Figures, scratch: Path) -> None:
    rows = []
    for words in REFUSED:
        given = [str(scratch / "none") if word == "OUT" else word for word in words]
        refusal = taken(*given)
        if refusal.code in (0, 1) or len(refusal.said.strip().splitlines()) != 1:
            raise RuntimeError(f"moeq {' '.join(given)} ended with {refusal.code}: {refusal.said[-500:]}")
        rows.append((refusal.seconds, " ".join(words), refusal.code))
        print(f"{refusal.seconds:5.2f} s  exit {refusal.code:3}  moeq {' '.join(words)}", flush=True)
    results.add("the slowest refusal", max(rows)[0], "s of processor", at_most=0.7)
    results.table(
        ["moeq", "processor, s", "exit"], [[words, f"{seconds:.2f}", str(code)] for seconds, words, code in rows]
    )


def hashing(results: figures.Figures, scratch: Path) -> None:
    shape = argparse.Namespace(hidden=1024, intermediate=1024, experts=EXPERTS)
    layer_bytes = memory.bytes_of_layer(shape)
    layers = max(1, round(results.options.model_gigabytes * 1e9 / layer_bytes))
    folder = scratch / "model"
    folder.mkdir()
    memory.make(folder, layers, shape)
    out = scratch / "run"
    sets = [part for override in [*memory.OVERRIDES, *results.options.set] for part in ("--set", override)]
    spent, every = 0.0, 0.0
    for name in ("profile", "losses", "assign", "quantize", "export"):
        stage = done(name, "--model", str(folder), "--out", str(out), "--quiet", *sets)
        record = json.loads((out / {"export": "checkpoint"}.get(name, name) / "stage.json").read_text("utf-8"))
        hashed = record["volatile"]["hashing_seconds"]
        spent, every = spent + hashed, every + stage.seconds
        print(f"{name:9} {stage.seconds:7.1f} s, hashing {hashed:.1f} s", flush=True)
    size = f"{layers * layer_bytes / 1e9:.1f} GB"
    results.add(f"hashing, of a run on {size}", 100 * spent / every, "%", at_most=5, digits=1)


def planned(results: figures.Figures, scratch: Path) -> None:
    plan.add_ratios(results, "the demo", plan.compare("the demo", "bundled:tiny-mixtral", plan.DEMO, []))


PARTS = {"calibration": calibration, "plan": planned, "refusals": refusals, "hashing": hashing}


def main() -> int:
    made = figures.parser(__doc__, text_megabytes=(1000, 200), model_gigabytes=(8.0, 1.0))
    made.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    made.add_argument("--set", nargs="*", default=[], help="keys of the recipe of the part hashing")
    options = figures.parsed(made)
    results = figures.Figures(options)
    for name in options.only:
        with tempfile.TemporaryDirectory() as scratch:
            PARTS[name](results, Path(scratch))
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
