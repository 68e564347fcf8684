"""What `drills.py` breaks off, spoils and starts twice: commands on tiny models, and what each leaves unbroken.

Every command works in a folder of its own, the place: what it makes lies in place/in. Models, texts and recipes lie in
one folder for all, which no command may change; where a drill flips their bits it has copies of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import figures

sys.path.insert(0, str(figures.ROOT / "tests"))

from fork_server import MOEQ, Finished, ForkServer, Running, shared
from robustness import runs

from moeq.artifacts.sensitivities import NAME as SENSITIVITIES
from moeq.artifacts.sensitivities import read_sensitivities
from moeq.bundled import bundled_path
from moeq.errors import ArtifactError

MADE = "in/out"  # below a place: what a command makes
FORMATS = ["auto-round", "transformers", "vllm-cuda", "dequantized", "llama.cpp", "gptqmodel"]
GROUPS = {"group_size": 32, "methods": ["rtn"], "bits": [4], "symmetric": True}
OF_RTN = {"method": "uniform", "bits": 4, "quantizer": "rtn"}
MODELS: dict[str, Callable[[Path], Path]] = {
    "tiny": runs.save_tiny_model,
    "even": lambda folder: runs.save_model(
        folder, vocab_size=runs.VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_local_experts=4, max_position_embeddings=128,
    ),
    "vision": lambda folder: Path(shutil.copytree(bundled_path("tiny-moe-vit"), folder)),
    "wide": runs.save_wide_model,
}  # fmt: skip
MODEL = {"run": "tiny", "refine": "tiny", "formats": "even", "vision": "vision", "wide": "wide"}  # of each recipe
RUNS = ("run", "formats", "refine", "vision")
TEXT = "text.jsonl"


class Lost(Exception):
    """Something that a drill found wrong; `words`: the command that did it."""

    def __init__(self, what: str, words: list[str] | None = None) -> None:
        self.words = words or []
        super().__init__(what)


def recipe_of(name: str, sources: Path) -> dict[str, Any]:
    """The recipe of a subject whose model and text lie in a folder."""
    recipe = runs.tiny_recipe(sources / MODEL[name], sources / TEXT)
    if name == "run":
        others = {"attention": 4, "embeddings": 8, "head": 8}
        tasks = {"tasks": ["moeq_continuation"], "limit": 4}
        recipe["profile"] = {"trace": True}
        return recipe | {"quantize": {"replicas": "all"}, "others": others, "eval": recipe["eval"] | tasks}
    recipe["eval"]["compare"] = []
    if name == "formats":
        return recipe | {"losses": GROUPS, "assign": OF_RTN, "export": {"verify": False, "formats": FORMATS}}
    if name == "refine":
        losses = {"group_size": 16, "layer_effects": {"bits": 2, "sequences": 4}, "bits": [2, 3]}
        assign = {"method": "optimal", "code_bits": 3, "granularity": "projection"}
        quantize = {"refine": {"iterations": 15}}
        trained = {"losses": losses | {"methods": ["gptq", "signround"]}, "quantize": quantize}
        return recipe | trained | {"reparam": {"samples": 4}, "assign": assign}
    if name == "vision":
        digits = {"source": "digits", "sequences": 24, "batch_size": 9}
        whole = {"samples": 20, "integer": {"vectors": 1, "schemes": False}}
        estimate = recipe["estimate"] | {"geometry": "model"}
        changed = {"corpus": digits, "reparam": whole, "losses": {"group_size": 32, "methods": ["gptq"]}}
        images = {"images": {"images": 12}, "compare": []}
        return recipe | changed | {"assign": {"method": "uniform", "bits": 4}, "eval": images, "estimate": estimate}
    losses = {"group_size": 64, "bits": [8], "methods": ["gptq"], "symmetric": True, "per_projection": False}
    export = {"formats": ["gptqmodel"], "verify": False, "max_shard": "40MB"}
    return recipe | {"losses": losses, "assign": {"method": "uniform", "bits": 8}, "export": export}


@dataclass
class Subject:
    """A command; words: of its line, for a place; seconds, stages: what it took unbroken, in all and by stage;
    wanted: what it leaves in a place, by file a digest."""

    name: str
    words: Callable[[Path], list[str]]
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    wanted: dict[str, str] = field(default_factory=dict)
    size: int = 0

    def left(self, made: Path) -> float:
        """About how many seconds it has still to do, by the stages that are finished."""
        done = {path.parent.name for path in made.glob("*/stage.json")}
        return max(0.2, self.seconds - sum(self.stages[stage] for stage in self.stages if directory(stage) in done))


def directory(stage: str) -> str:
    """Where a stage writes."""
    return runs.DIRECTORIES.get(stage, stage)


class Ground:
    """The folder of all drills: sources, unbroken results, places; and the server that runs the commands."""

    def __init__(self, folder: Path, names: Sequence[str] = RUNS, server: ForkServer | None = None) -> None:
        """names: of RUNS, those that are drilled; server: None: one that ends with this process."""
        self.folder, self.sources = folder, folder / "sources"
        self.sources.mkdir(parents=True)
        environment = {"MOEQ_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTHONPATH"] = figures.SOURCES
        if server is None:
            os.environ |= environment
        self.server = server or shared(*MOEQ)
        self._counter, self._lock = 0, threading.Lock()
        runs.save_short_corpus(self.sources / TEXT)
        self.subjects: dict[str, Subject] = {}
        for name in names:
            self._add_run(name)
        if "run" in names:
            given = [str(self.unbroken("run")), "--text", str(self.sources / TEXT), "--window", "64"]
            given += ["--tasks", "moeq_continuation", "--limit", "8", "--context-aware", "gpu_experts=1,code_bits=2"]
            self._add("eval", lambda place: ["eval", *given, "--out", str(place / f"{MADE}.json")])
        for target in ("gptqmodel", "llama.cpp", "transformers") if "formats" in names else ():
            packed = ["convert", str(self.unbroken("formats") / "checkpoint"), "--to", target, "--no-verify", "--out"]
            self._add(f"convert to {target}", lambda place, words=packed: [*words, str(place / MADE)])  # type: ignore[misc]
        self._before = self._digest_of_sources()

    def _add_run(self, name: str) -> None:
        recipe = recipe_of(name, self.sources)
        if not (self.sources / MODEL[name]).exists():
            MODELS[MODEL[name]](self.sources / MODEL[name])
        path = runs.write_recipe(self.sources / f"{name}.yaml", recipe)
        self._add(name, lambda place: ["run", str(path), "--out", str(place / MADE)])

    def _add(self, name: str, words: Callable[[Path], list[str]]) -> None:
        self.subjects[name] = Subject(name, words)
        self._measure(self.subjects[name])

    def unbroken(self, name: str) -> Path:
        """What a subject made without being broken off."""
        return self.folder / "unbroken" / name / MADE

    def _measure(self, subject: Subject) -> None:
        """Run it twice, for what it leaves and, when all is compiled, for how long it takes."""
        first, again = self.folder / "unbroken" / subject.name, self.folder / "again"
        self.finish(subject, first)
        began = time.monotonic()
        self.finish(subject, again)
        subject.seconds = time.monotonic() - began
        subject.wanted = result(first)
        if result(again) != subject.wanted:
            raise Lost(f"{subject.name} is not the same twice: {differing(result(again), subject.wanted)}")
        for stage in ("reparam", *runs.STAGES):
            if (again / MADE / directory(stage) / "stage.json").is_file():
                subject.stages[stage] = runs.stage_record(again / MADE, stage)["volatile"]["seconds"]
        subject.size = sum(path.stat().st_size for path in again.rglob("*") if path.is_file())
        shutil.rmtree(again)

    def place(self) -> Path:
        """A new place."""
        with self._lock:
            self._counter += 1
            made = self.folder / f"place-{self._counter:04}"
        (made / "in").mkdir(parents=True)
        return made

    def start(self, subject: Subject, place: Path, *more: str, **limits: Any) -> Running:
        return self.server.start(*subject.words(place), *more, **limits)

    def run(self, subject: Subject, place: Path, *more: str, **limits: Any) -> Finished:
        return self.start(subject, place, *more, **limits).wait()

    def finish(self, subject: Subject, place: Path) -> None:
        """Run the command to its end, which it has to reach without a word."""
        (place / "in").mkdir(parents=True, exist_ok=True)
        finished = self.run(subject, place, "--quiet")
        if (finished.code, finished.stderr) != (0, ""):
            raise Lost(f"did not end well: exit {finished.code}: {finished.stderr.strip()}", subject.words(place))

    def finish_as_unbroken(self, subject: Subject, place: Path) -> None:
        """Run the command to its end; Lost unless all is there as it would be had nothing happened.

        A conversion appears when it is whole, and is not made a second time.
        """
        if subject.stages or not (place / MADE).exists():
            self.finish(subject, place)
        self.check(subject, place)

    def check(self, subject: Subject, place: Path) -> None:
        """Lost unless a place holds what an unbroken command leaves, and the sources are as they were."""
        found = result(place)
        if found != subject.wanted:
            raise Lost(f"other than unbroken: {differing(found, subject.wanted)}", subject.words(place))
        if self._digest_of_sources() != self._before:
            raise Lost("models, texts, recipes or finished runs were changed", subject.words(place))

    def _digest_of_sources(self) -> dict[str, str]:
        return result(self.sources) | result(self.folder / "unbroken")


def result(folder: Path) -> dict[str, str]:
    """The digest of all that counts of every file below a folder: of records and comparisons without what they took."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "recipe.yaml" and path.suffix != ".lock" and path.name != ".lock":
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if path.name in ("stage.json", "out.json"):
                digest = json.dumps(_without_times(json.loads(path.read_text("utf-8"))), sort_keys=True)
            if path.name == SENSITIVITIES:  # Parquet has bytes that nobody reads
                with suppress(ArtifactError):
                    digest = str(read_sensitivities(path).table.to_pydict())
            found[path.relative_to(folder).as_posix()] = digest
        elif path.is_dir() and path.suffix in {".partial", ".begun"}:
            found[path.relative_to(folder).as_posix()] = "half-written"
    return found


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_times(one) for name, one in value.items() if name not in ("volatile", "seconds")}
    return [_without_times(one) for one in value] if isinstance(value, list) else value


def differing(found: dict[str, str], wanted: dict[str, str]) -> str:
    """The names of files that differ, are missing or are too many."""
    parts = {
        "changed": [name for name in wanted if name in found and found[name] != wanted[name]],
        "missing": sorted(wanted.keys() - found.keys()),
        "left behind": sorted(found.keys() - wanted.keys()),
    }
    return "; ".join(f"{what} {', '.join(names[:4])}" for what, names in parts.items() if names)


def refusal(finished: Finished, codes: set[int], words: list[str], *names: str) -> str:
    """The one line with which a quiet command was refused; Lost unless it has one of the codes and the names in it."""
    lines = finished.stderr.splitlines()
    if finished.code not in codes:
        raise Lost(f"exit {finished.code}, not one of {sorted(codes)}: {finished.stderr.strip()[-600:]}", words)
    if len(lines) != 1 or not lines[0].startswith("moeq: ") or not all(name in lines[0] for name in names):
        raise Lost(f"not one line with {names}: {finished.stderr.strip()[-600:]}", words)
    return lines[0]
