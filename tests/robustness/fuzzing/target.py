"""What a fuzz target is, and the bounds that every reading of an input keeps."""

from __future__ import annotations

import contextlib
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from robustness.fuzzing.mutations import json_bytes, tensors_bytes, text_bytes

from moeq.errors import MoeqError

SECONDS = 5.0  # of the processor, for one input
SPARE_BYTES = 192 << 10  # what reading takes whatever the file: buffers, messages, tracebacks
Check = Callable[[], None]  # of what was read; it is outside of the bounds
TARGETS: dict[str, type[Target]] = {}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where targets work: a folder, and a checkpoint that moeq exported, which some valid inputs are of."""

    folder: Path
    checkpoint: Path


class Target:
    """A reader of what others may have written. A subclass that names itself is a target.

    per_byte, spare: the bytes of memory that a byte of input may take, and that any input may (per_byte 0: no promise);
    refuses: whether there is anything that it refuses.
    """

    name: ClassVar[str] = ""
    per_byte: ClassVar[int] = 2
    spare: ClassVar[int] = SPARE_BYTES
    refuses: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        if cls.name:
            assert TARGETS.get(cls.name, cls).__qualname__ == cls.__qualname__, f"two targets are named {cls.name}"
            TARGETS[cls.name] = cls

    def __init__(self, place: Place) -> None:
        self.folder = place.folder / self.name
        self.folder.mkdir(parents=True)
        self.beside = 0  # bytes of files that an input is read with
        self.prepare(place)

    def prepare(self, place: Place) -> None:
        """Put what an input is read with into the folder."""

    def valid(self) -> bytes:
        """The input before it is changed; it is read."""
        raise NotImplementedError

    def mutated(self, chance: random.Random) -> bytes:
        """A changed input."""
        raise NotImplementedError

    def read(self, data: bytes) -> Check | None:
        """Read an input; returns what compares the result with what sound inputs give. MoeqError for a refusal."""
        raise NotImplementedError

    def file(self, name: str, data: bytes) -> Path:
        """A file of the target's folder."""
        path = self.folder / name
        path.write_bytes(data)
        return path


class JsonTarget(Target):
    """One whose inputs are JSON: `value` is valid."""

    per_byte = 200  # a value of a few bytes becomes a part of a model, or a line about what is wrong with it
    value: Any

    def valid(self) -> bytes:
        return json.dumps(self.value).encode()

    def mutated(self, chance: random.Random) -> bytes:
        return json_bytes(self.value, chance)


class BytesTarget(Target):
    """One whose inputs are changed byte by byte: `data` is valid."""

    data: bytes

    def valid(self) -> bytes:
        return self.data

    def mutated(self, chance: random.Random) -> bytes:
        return text_bytes(self.data, chance)


class TensorsTarget(BytesTarget):
    """One of safetensors files; inner: the key of the metadata that holds JSON."""

    inner: ClassVar[str | None] = None

    def mutated(self, chance: random.Random) -> bytes:
        return tensors_bytes(self.data, chance, self.inner)


class Excess(AssertionError):
    """Reading took more memory than it may."""


class Fuzzed:
    """The targets in a folder of their own, made when they are first asked for."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        """checkpoint: one that moeq exported."""
        self.place = Place(folder=folder, checkpoint=checkpoint)
        self.made: dict[str, Target] = {}
        self.measured: set[str] = set()  # targets of which memory was measured before

    def target(self, name: str) -> Target:
        if name not in self.made:
            self.made[name] = TARGETS[name](self.place)
        return self.made[name]

    def valid(self, name: str) -> bytes:
        return self.target(name).valid()

    def mutated(self, name: str, seed: int) -> bytes:
        """An input of a target: the valid one changed in one to three places."""
        return self.target(name).mutated(random.Random(seed))

    def run(self, name: str, data: bytes, *, memory: bool = True) -> str:
        """`refused` or `read`; AssertionError for too much time or memory, and whatever else reading raises.

        memory: measure it, which takes two to four times as long.
        """
        target = self.target(name)
        if memory and target.per_byte and name not in self.measured:
            self.measured.add(name)
            for warm in (target.valid(), b"{}"):  # the first reading compiles patterns that later ones find
                with contextlib.suppress(MoeqError):
                    target.read(warm)
        if not memory or not target.per_byte:
            return _timed(target, data)
        try:
            return _measured(target, data)
        except Excess:  # what is imported or compiled for the first of its kind is there the next time
            return _measured(target, data)


def _measured(target: Target, data: bytes) -> str:
    """`_timed`, and how much memory was held at once."""
    tracemalloc.start()
    try:
        return _timed(target, data)
    finally:
        tracemalloc.stop()


def _timed(target: Target, data: bytes) -> str:
    began = time.process_time()
    try:
        check, outcome, error = target.read(data), "read", None
    except MoeqError as refusal:
        check, outcome, error = None, "refused", refusal
    seconds, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    if error is not None:
        told = len(str(error).splitlines()) == 1 and error.where and error.do
        assert told, f"not one line that says where and what to do: {error!r}"
    assert seconds < SECONDS, f"{seconds:.1f} s"
    most = target.per_byte * (len(data) + target.beside) + target.spare
    if peak > most:
        raise Excess(f"{peak} bytes for {len(data)}")
    if check is not None:
        tracemalloc.stop()
        check()
    return outcome
