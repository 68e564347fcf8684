"""What a user meets in the first minutes: light commands and refusals, text of any size, the plan, what hashing costs.

    python benchmarks/first_minutes.py [--quick] [--text-megabytes 1000] [--model-gigabytes 8] [--only plan refusals]

Whole commands in fresh processes: processor seconds (user and system, children included) and peak resident memory as
the kernel counts them. Python keeps what it compiled, as it does for every user (a folder of the benchmark's own,
whatever PYTHONDONTWRITEBYTECODE says); light commands and refusals count at their best of three. Goals:
commands: families, inspect of every kind of thing, estimate without a model to load, gc and help: 0.7 s of processor
time at most, and neither torch nor transformers nor lm-eval is imported (what is listed in UNHURRIED has no goal).
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
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import figures
import memory
import plan

from moeq.artifacts import sensitivities
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
    ["assign", "--out", "OUT", "--bits", "none"],
    ["quantize", "--out", "OUT"],
    ["export", "--out", "OUT", "--format", "no-such-format"],
    ["eval", "bundled:tiny-mixtral", "--tasks", "arc_easy", "--include-path", "no-such-folder"],
    ["eval", "bundled:tiny-mixtral", "--stride", "4", "--window", "2"],
    ["eval", "no-such-model"],
    ["estimate", "--model", "mixtral-8x7b", "--hardware", "no-such-hardware"],
    ["report", "--out", "OUT"],
    ["plan", "no-such-recipe.yaml"],
    ["inspect", "no-such-file"],
    ["convert", "no-such-checkpoint", "--to", "gptqmodel", "--out", "OUT"],
    ["verify", "no-such-checkpoint"],
    ["generate", "no-such-checkpoint", "Once"],
    ["gc", "--out", "no-such-run"],
    ["run", "--model", "DENSE", "--out", "OUT"],
    ["families", "./no-such-model"],
    ["run", "bundled:tiny-mixtral", "--bits", "99"],
    ["run", "bundled:tiny-mixtral", "--for", "llamacpp"],
    ["run", "bundled:tiny-mixtral", "--bitz", "2"],
    ["init", "./no-such-model"],
    ["recipe", "--preset", "no-such-preset"],
    ["push", "no-such-checkpoint", "me/name"],
    ["rum"],
)
ARCHIVES = figures.ROOT / "tests" / "made_before"  # runs, models and checkpoints that an earlier moeq made
LIGHT = (
    ["--version"], ["--help"], ["run", "--help"], ["families"], ["families", "qwen3"], ["families", "llama"],
    ["families", "tiny-qwen"], ["families", "bundled:tiny-mixtral"],
    ["inspect", "tiny-qwen"], ["inspect", "tiny-vit"], ["inspect", "BUNDLED"],
    ["inspect", "run/checkpoint"], ["inspect", "checkpoints/nested"], ["inspect", "checkpoints/auto-round"],
    ["inspect", "checkpoints/gptq"], ["inspect", "checkpoints/compressed-tensors"], ["inspect", "checkpoints/gguf"],
    ["inspect", "run"], ["inspect", "run/store"], ["inspect", "run/profile"],
    ["inspect", "run/profile/trace.safetensors"],
    ["inspect", "run/losses"], ["inspect", "run/assign"], ["inspect", "run/assign/assignment.json"],
    ["inspect", "run/quantize"], ["inspect", "run/eval/eval.json"], ["inspect", "run/recipe.yaml"],
    ["inspect", "vit-run/reparam/reparam.json"], ["inspect", "vit-run/reparam/integer.json"],
    ["gc", "--out", "run", "--dry-run"], ["estimate", "--model", "mixtral-8x7b"],
    ["estimate", "--model", "mixtral-8x7b", "--hardware", "h100-ndp-pcie4"],
    ["estimate", "--model", "mixtral-8x7b", "--capacity"], ["estimate", "--model", "tiny-qwen", "--bits", "3"],
    ["estimate", "--model", "run/checkpoint"], ["estimate", "--model", "checkpoints/gptq"],
    ["estimate", "--sheet", "paper-004"],
    ["recipe", "--schema"], ["recipe", "--preset", "best"],
    ["init", "bundled:tiny-mixtral", "--out", "-", "--bits", "3"],
)  # fmt: skip
UNHURRIED = (  # Parquet is read by pyarrow, scipy works out an evaluation anew, matplotlib draws a page's charts; a
    # configuration alone does not say how large all but the experts is, and the forward in whole numbers is run again
    ["inspect", "run/losses/losses.parquet"], ["inspect", "run/assign/sensitivities.parquet"],
    ["inspect", "comparison.json"], ["estimate", "recipes/paper-000-figures.yaml", "--out", "OUT"],
    ["estimate", "--model", "tiny-qwen/config.json"], ["inspect", "vit-run/reparam/integer"],
)  # fmt: skip
HEAVY = ("torch", "transformers", "lm_eval")
COMPILED = Path(tempfile.gettempdir()) / f"moeq-bytecode-{os.getuid()}"
ROUNDS = 3  # of which the least counts: other work on the machine only adds
WATCHED = """
import atexit, sys
written = sys.argv.pop(1)
atexit.register(lambda: open(written, "w").write(" ".join({name.partition(".")[0] for name in sys.modules})))
from moeq.cli import main
main()
"""


@dataclass(frozen=True)
class Taken:
    """What a command took: processor seconds, the highest resident bytes of one of its processes, its exit code."""

    seconds: float
    resident_bytes: int
    code: int
    said: str


def taken(*words: str, start: Sequence[str] = ("-m", "moeq"), cwd: Path = figures.ROOT) -> Taken:
    """Run `moeq WORDS` in a fresh process; start: what Python is given before the words."""
    command = [sys.executable, *start, *words]
    given = os.environ | {"PYTHONPATH": figures.SOURCES, "HF_HUB_OFFLINE": "1", "PYTHONPYCACHEPREFIX": str(COMPILED)}
    given.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(command, cwd=cwd, env=given, stdout=subprocess.DEVNULL, stderr=said)
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


def commands(results: figures.Figures, scratch: Path) -> None:
    """Light commands: the least processor seconds of some rounds, and what of HEAVY each has imported at its end."""
    for archive in sorted(ARCHIVES.glob("*.tar.xz"))[-1:]:
        with tarfile.open(archive) as opened:
            opened.extractall(scratch, filter="data")
    table = scratch / "run" / "assign" / sensitivities.NAME
    found = sensitivities.read_sensitivities(
        table
    )  # and written as this moeq does: an earlier one's is pyarrow's to read
    sensitivities.write_sensitivities(table, found.table.to_pydict(), found.model)
    places = {"OUT": str(scratch / "page"), "BUNDLED": str(bundled_path("tiny-mixtral"))}
    results.table(["moeq", "processor, s", "imports"])
    slowest, guilty = 0.0, 0
    for words in (*LIGHT, *UNHURRIED):
        given = [places.get(word, word) for word in words]
        seen = scratch / "modules"
        rounds = [taken(str(seen), *given, start=("-c", WATCHED), cwd=scratch) for _ in range(ROUNDS)]
        if any(one.code for one in rounds):
            raise RuntimeError(f"moeq {' '.join(given)} ended with {rounds[0].code}: {rounds[0].said[-500:]}")
        imported = sorted(set(HEAVY) & set(seen.read_text("utf-8").split()))
        seconds = min(one.seconds for one in rounds)
        results.row(" ".join(words), f"{seconds:.2f}", ", ".join(imported) or "-")
        if words in LIGHT:
            slowest, guilty = max(slowest, seconds), guilty + bool(imported)
    results.add("the slowest light command", slowest, "s of processor", at_most=0.7)
    results.add("light commands that import torch, transformers or lm-eval", guilty, at_most=0, digits=0)


def refusals(results: figures.Figures, scratch: Path) -> None:
    rows = []
    dense = scratch / "dense"
    dense.mkdir()
    (dense / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    places = {"OUT": str(scratch / "none"), "DENSE": str(dense)}
    for words in REFUSED:  # options that are new get a line of REFUSED
        given = [places.get(word, word) for word in words]
        refusal = min((taken(*given) for _ in range(ROUNDS)), key=lambda one: one.seconds)
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


PARTS = {"commands": commands, "refusals": refusals, "calibration": calibration, "plan": planned, "hashing": hashing}


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
