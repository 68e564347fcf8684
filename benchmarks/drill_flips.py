"""One bit of one file turns, and a command follows: it refuses the file by its name, or makes it again with a word.

A place has copies of model and text and a finished run; the drills of one worker go on in it, as every drill ends with
the run as it was. Files larger than 16 MiB are read in another way, and are drilled in a run of their own.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drill_subjects import MADE, MODELS, TEXT, Ground, Lost, Subject, differing, recipe_of, refusal, result
from fork_server import Finished
from robustness import runs

LARGE = 16 << 20
SMALL_RUNS, LARGE_RUNS = ("formats", "run", "vision", "refine"), ("wide",)
FREE = ("README.md", "recipe.yaml", ".lock", ".gitattributes")  # cards are for people, recipes are written every time
PROGRESS = ".refined.json"  # of refinement that was broken off; what it says is checked against the files
INDEX = "model.safetensors.index.json"
LISTS = ("stage.json", "SHA256SUMS", INDEX)  # of files: where a line of them turns, the file that it is of is named
OTHER_MODEL = "was made from another model"  # as a model is whose configuration turned
NOT_CONVERTED = ("checkpoint-llama.cpp", "checkpoint-dequantized")
SILENT = ("stage.json", PROGRESS)  # may be written again without a word
REFUSED = {2, 3, 4, 5, 6, 7, 8, 9, 12, 13}  # exit codes of what is wrong with files
WRITTEN_IN = 0.5  # share of flips before which another command than `run` is given


class Finishable:
    """A place with sources of its own and a finished run of one of the recipes."""

    def __init__(self, ground: Ground, name: str) -> None:
        self.ground, self.name, self.place = ground, name, ground.place()
        sources = self.place / "sources"
        sources.mkdir()
        recipe = recipe_of(name, sources)
        self.model, self.text = Path(recipe["model"]), sources / TEXT
        MODELS[self.model.name](self.model)
        shutil.copyfile(ground.sources / TEXT, self.text)
        path = runs.write_recipe(self.place / "recipe.yaml", recipe)
        self.subject = Subject(name, lambda place: ["run", str(path), "--out", str(place / MADE)])
        self.out = self.place / MADE
        ground.finish(self.subject, self.place)
        self.subject.wanted = self.all()

    def all(self) -> dict[str, str]:
        """The digests of what has to be as it was: the run and the sources."""
        return result(self.place)

    def kinds(self, large: bool) -> dict[str, list[Path]]:
        """The files by kind: where they lie and how they end."""
        found: dict[str, list[Path]] = {}
        for path in sorted(self.place.rglob("*")):
            wanted = path.is_file() and path.name not in FREE and (path.stat().st_size > LARGE) == large
            if wanted and path.stat().st_size:
                found.setdefault(self.kind(path), []).append(path)
        return found

    def is_rows(self, path: Path) -> bool:
        """Whether a file of the store holds rows, which are read when a table is made of them."""
        return path.parent.name == "losses" and self.out / "store" in path.parents

    def made_of(self, path: Path) -> tuple[str, ...]:
        """Files of the run that have to be made again for another to be read at all."""
        if self.is_rows(path):
            return "losses/losses.parquet", "losses/others.json"
        return ("quantize/stage.json",) if path.name == PROGRESS else ()

    def kind(self, path: Path) -> str:
        """What a file is, for the table."""
        if path.name == "stage.json":
            return "record"
        if path.suffix == ".gguf":
            return "GGUF"
        if path == self.text:
            return "text"
        if self.model in path.parents:
            return f"model {path.suffix}" if path.suffix == ".safetensors" else f"model {path.name}"
        stage = path.relative_to(self.out).parts[0]
        where = "checkpoint of a format" if stage.startswith("checkpoint-") else stage
        if self.is_rows(path):
            return "store rows of losses"
        of_checkpoint = stage.startswith("checkpoint") and path.suffix != ".safetensors"
        return f"{where} {path.name}" if of_checkpoint or path.suffix == ".json" else f"{where} {path.suffix}"


class Spoiled:
    """The finished runs that bits are turned in, of every worker its own."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self._places: dict[tuple[int, str], Finishable] = {}
        self._turns: Counter[tuple[str, ...]] = Counter()
        self._lock = threading.Lock()

    def _of(self, name: str) -> Finishable:
        key = (threading.get_ident(), name)
        if key not in self._places:
            self._places[key] = Finishable(self.ground, name)
        return self._places[key]

    def drill(self, seed: str, number: int, count: Callable[[str, Counter[str], str, str | None], None]) -> None:
        """One flip: every fifth in a large file, kinds in turn."""
        chance, large = random.Random(seed), number % 5 == 4
        names = LARGE_RUNS if large else SMALL_RUNS
        row, failure, finished = "nothing", None, None
        try:
            finished = self._of(names[number % len(names)])
            kinds = finished.kinds(large)
            kind, path = self._next(kinds, chance, large)
            row = f"{'above' if large else 'below'} 16 MiB: {kind}"
            flip(finished, path, chance)
        except Exception as error:
            words = " ".join(error.words) if isinstance(error, Lost) else ""
            failure = f"{type(error).__name__}: {error}; seed {seed}, moeq {words}"
            if finished is not None:
                failure += f"; kept {finished.place}"
                del self._places[threading.get_ident(), finished.name]
        count("flips", Counter({row: 1}), seed, failure)

    def _next(self, kinds: dict[str, list[Path]], chance: random.Random, large: bool) -> tuple[str, Path]:
        """A file of the kind that had fewest turns."""
        with self._lock:
            kind = min(kinds, key=lambda name: (self._turns[str(large), name], chance.random()))
            self._turns[str(large), kind] += 1
        return kind, chance.choice(kinds[kind])


def turn(path: Path, chance: random.Random) -> str:
    """Turn a bit of a file in its place, with its time of change as it was half of the time; which bit."""
    before, bit = path.stat(), chance.randrange(8 * path.stat().st_size)
    with path.open("r+b") as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0]
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))
    if chance.random() < 0.5:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return f"bit {bit % 8} of byte {bit // 8} of {path}"


def flip(finished: Finishable, path: Path, chance: random.Random) -> None:
    """Turn a bit, give a command that reads the file half of the time, and `run`; Lost unless all is right."""
    whole, ground, subject = path.read_bytes(), finished.ground, finished.subject
    joined = [other for other in finished.out.rglob("*") if other.is_file() and other.samefile(path)]
    what = turn(path, chance)
    words: list[Any] = subject.words(finished.place)
    try:
        if chance.random() < WRITTEN_IN and finished.out in path.parents:
            words = looking_at(finished, path, chance)
            looked(ground.server.run(*words), path, words, finished)
        words = subject.words(finished.place)
        for name in finished.made_of(path):
            (finished.out / name).unlink(missing_ok=True)
        ended = ground.server.run(*words)
        source = finished.out not in path.parents
        if ended.code != 0:
            lines = [line for line in ended.stderr.splitlines() if line.startswith("moeq: ")]
            named = [] if source and OTHER_MODEL in ended.stderr else names_of(path, joined)
            refusal(Finished(ended.code, "", "\n".join(lines[-1:])), REFUSED, words, *named)
        elif source:
            if not {"done"} & {event for _, event in events(ended.stderr)}:
                raise Lost("passed on silently: no stage ran again", words)
        elif finished.all() != subject.wanted and "edited by hand" not in ended.stderr:
            raise Lost(f"passed on: {differing(finished.all(), subject.wanted)}: {ended.stderr[-600:]}", words)
        elif path.read_bytes() == whole and path.name not in SILENT and not said(ended.stderr, path, joined):
            raise Lost(f"made again without a word: {ended.stderr[-600:]}", words)
        for one in [path] if source or ended.code != 0 or "edited by hand" in ended.stderr else []:
            one.write_bytes(whole)
            ground.finish(subject, finished.place)
        if finished.all() != subject.wanted:
            raise Lost(f"other than unbroken: {differing(finished.all(), subject.wanted)}", words)
    except Lost as lost:
        raise Lost(f"{lost}; {what}", lost.words) from None


def names_of(path: Path, joined: list[Path]) -> list[str]:
    """What a message has to name: the file, unless another name of the same file will do."""
    several = len({other.name for other in [path, *joined]}) > 1
    return [] if several or path.name in LISTS else [path.name]


def said(stderr: str, path: Path, joined: list[Path]) -> bool:
    """Whether a message names the file, or another name of it."""
    return any(other.name in stderr for other in [path, *joined])


def events(stderr: str) -> list[tuple[str, str]]:
    """(stage, done | skipped) in what a run reported."""
    found = []
    for line in stderr.splitlines():
        word, *rest = line.split() or [""]
        if word in ("reparam", *runs.STAGES):
            found.append((word, "done" if rest[:1] == ["done"] else "skipped" if "skipped" in rest else "begins"))
    return found


def looking_at(finished: Finishable, path: Path, chance: random.Random) -> list[Any]:
    """A command that is given what the file is part of."""
    folder = finished.out / path.relative_to(finished.out).parts[0]
    commands = [["inspect", folder]]
    if folder.name.startswith("checkpoint") and finished.name != "vision":
        if folder.name not in NOT_CONVERTED:
            target = finished.place / "converted"
            commands.append(["convert", folder, "--to", "dequantized", "--no-verify", "--out", target])
        if folder.name in ("checkpoint", "checkpoint-dequantized"):
            commands.append(["generate", folder, "a", "--max-new-tokens", "1"])
    return list(map(str, chance.choice(commands)))


def looked(ended: Finished, path: Path, words: list[str], finished: Finishable) -> None:
    """Lost unless a command refused the file by its name, or does not read it."""
    shutil.rmtree(finished.place / "converted", ignore_errors=True)
    if ended.code != 0:
        lines = [line for line in ended.stderr.splitlines() if line.startswith("moeq: ")]
        names = [] if path.name in LISTS else [path.name]
        refusal(Finished(ended.code, "", "\n".join(lines[-1:])), REFUSED, words, *names)
    elif words[0] == "inspect" and path.name not in SILENT and path.name not in ended.stdout + ended.stderr:
        raise Lost(f"not seen: {ended.stdout[-400:]}", words)
