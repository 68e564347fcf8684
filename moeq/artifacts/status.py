"""What a run says of itself while it runs: once a second, in the file that locks its directory.

So that whoever sees the directory, here or on another machine, knows how far it is; the file is empty when it ends,
and left as it was where it is killed.
"""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated

from pydantic import Field, ValidationError

from moeq.artifacts.stage import Frozen
from moeq.progress import Reporter
from moeq.scratch import LOCK

SCHEMA_VERSION = 1
SECONDS = 1.0  # between two words
SLACK = 2.0  # by which clocks that are read one after the other may differ
SILENT_SECONDS = 30.0  # after which a run on another machine counts as gone
MOST_WORKERS = 256  # that are named
MOST_BYTES = 1 << 16  # of the file
TICKS = os.sysconf("SC_CLK_TCK")  # a second
Count = Annotated[int, Field(ge=0, lt=2**63)]
Moment = Annotated[float, Field(ge=0, le=1e12)]  # seconds since 1970


class Step(Frozen):
    """Something that goes on: how much of it is done, since when (seconds since 1970)."""

    title: str
    total: Count
    done: Count
    began: Moment

    @property
    def left(self) -> float | None:
        """Seconds that it takes yet, at the rate so far; None where nothing is done."""
        return None if not self.done else (time.time() - self.began) / self.done * max(0, self.total - self.done)


class Status(Frozen):
    """A running command. model: its name; stages: that it goes through; stage: that runs, None between two; counted:
    what is counted in it, the innermost last; workers: what each does; resident_bytes: of the command's process; said:
    when this was said, in seconds since 1970."""

    schema_version: int = SCHEMA_VERSION
    host: str
    pid: Count
    model: str
    began: Moment
    said: Moment
    stages: tuple[str, ...]
    stage: Step | None
    counted: tuple[Step, ...]
    workers: tuple[str, ...]
    resident_bytes: Count

    @property
    def is_alive(self) -> bool:
        """Whether its process is there; of one on another machine, whether it has said something lately."""
        if self.host != platform.node():
            return time.time() - self.said < SILENT_SECONDS
        return began(self.pid) <= self.said + SLACK


def began(pid: int) -> float:
    """When the process of a number began, in seconds since 1970; infinity where there is none, or one that was killed
    and that nobody has waited for. A number that was a killed command's may be another process's by now, and often is
    where a container or a machine starts anew."""
    try:
        state, *more = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return math.inf
    if state in "ZX":
        return math.inf
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(more[18]) / TICKS


@contextmanager
def telling(stream: IO[str], reporter: Reporter, model: str, stages: Sequence[str]) -> Iterator[None]:
    """While the block runs, say once a second in a locked file what a reporter knows; a disk may refuse it."""
    began, done = time.time(), threading.Event()

    def tell() -> None:
        while True:
            with suppress(OSError):
                _write(stream.fileno(), _status(reporter, model, began, stages).model_dump_json().encode() + b"\n")
            if done.wait(SECONDS):
                return

    thread = threading.Thread(target=tell, name="moeq-status", daemon=True)
    with suppress(RuntimeError):  # no memory for a thread: the run needs none
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
        reporter.stage = None
        with suppress(OSError):
            os.ftruncate(stream.fileno(), 0)


def read_status(directory: Path) -> Status | None:
    """What the run in a directory said last; None where none goes on, or said nothing yet."""
    for _ in range(10):
        try:
            data = (directory / LOCK).read_bytes()[:MOST_BYTES]
        except OSError:
            return None
        if not data:
            return None
        status = parse_status(data)
        if status is not None:
            return status if status.is_alive else None
        time.sleep(SECONDS / 20)  # it is being written
    return None


def parse_status(data: bytes) -> Status | None:
    """What a file's bytes say; None where they are no status."""
    try:
        return Status.model_validate_json(data)
    except ValidationError:
        return None


def _write(descriptor: int, data: bytes) -> None:
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def _status(reporter: Reporter, model: str, began: float, stages: Sequence[str]) -> Status:
    workers = reporter.workers()
    shown = workers[:MOST_WORKERS] + ([f"{len(workers) - MOST_WORKERS} more"] if len(workers) > MOST_WORKERS else [])
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Status(
        host=platform.node(),
        pid=os.getpid(),
        model=model,
        began=began,
        said=time.time(),
        stages=tuple(stages),
        stage=None if reporter.stage is None else Step(**asdict(reporter.stage)),
        counted=tuple(Step(**asdict(one)) for one in list(reporter.counted)),
        workers=tuple(shown),
        resident_bytes=resident,
    )
