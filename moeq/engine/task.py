"""What a task is, what an engine does with it, and how an error of a task names where it happened.

A task is a function of a module, small arguments, and tensors that were put before: large ones never go through
pickles. Engines run tasks in any order and on any worker, and give the outcomes in the order in which they are asked
for; a task that was begun twice, because a worker was lost, counts once.
"""

from __future__ import annotations

import platform
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from moeq import errors
from moeq.errors import MoeqError

Tensors = Mapping[str, Tensor]
Function = Callable[[Any, Tensors], tuple[Any, Tensors]]
NO_MEMORY = MemoryError.__name__  # also of classes that libraries derive from it


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a task takes, as `plan` counts it: bytes of main memory and of a GPU's beside what was put, and seconds by
    the clock on one worker (0: not known)."""

    ram_bytes: int = 0
    gpu_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Tensors that were put where every worker reaches them, without copies where memory allows; place: the engine's
    own name for where they are; bytes: what they take."""

    key: str
    place: Any
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """One piece of work. name: says layer and experts, for errors and displays; function: of a module, called with
    arguments and the tensors of all that is shared, gives a value and tensors."""

    name: str
    function: Function
    arguments: Any = None
    shared: tuple[Shared, ...] = ()
    resources: Resources = Resources()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a task gave: a value, and tensors that are the caller's; host: of the worker; seconds: it took there."""

    value: Any
    tensors: dict[str, Tensor]
    host: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error of a task as it travels: its class by name, a MoeqError's parts, the traceback as text, the host."""

    kind: str
    what: str
    where: str | None
    do: str | None
    traceback: str
    host: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """An error that is being handled."""
        known = isinstance(error, MoeqError)
        return cls(
            kind=NO_MEMORY if isinstance(error, MemoryError) else type(error).__name__,
            what=error.what if known else str(error),  # type: ignore[attr-defined]
            where=error.where if known else None,  # type: ignore[attr-defined]
            do=error.do if known else None,  # type: ignore[attr-defined]
            traceback=traceback.format_exc(),
            host=platform.node(),
        )

    def error(self, task: str) -> Exception:
        """What the caller raises: an error of the same class that names task and host, where it is one of moeq's or
        says that memory ran out."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, MoeqError):
            return kind(self.what, where=f"{self.where or task}, on {self.host}", do=self.do)
        own = MemoryError if self.kind == NO_MEMORY else TaskError
        error = own(f"{task}, on {self.host}: {self.kind}: {self.what}")
        error.__cause__ = _Remote(f"\n{self.traceback}")
        return error


class TaskError(Exception):
    """What no worker should have raised: a bug in a task; the cause is its traceback there."""


class _Remote(Exception):
    """A traceback of another process, as text."""


class Engine(Protocol):
    """Runs tasks on workers."""

    name: str
    workers: int

    def put(self, tensors: Tensors) -> Shared:
        """Copy tensors to where workers reach them; what they were copied from may change or go afterwards."""

    def drop(self, shared: Shared) -> None:
        """Give up what was put; tasks that need it must have been gathered."""

    def submit(self, task: Task) -> int:
        """Have a task run; returns the ticket by which its outcome is gathered, once."""

    def gather(self, tickets: Iterable[int]) -> Iterator[Outcome]:
        """The outcomes in this order, each as soon as it is there. Raises the error of the first that failed."""

    def doing(self) -> list[str]:
        """What every worker does at the moment, for people; of engines whose workers are not known, the tasks that were
        submitted."""

    def close(self) -> None:
        """End all workers; what they were doing is lost."""


class Closing:
    """Engines as context managers."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """What the engine does at its end."""
        raise NotImplementedError


def bounded(engine: Engine, tasks: Iterable[Task], window: int) -> Iterator[Outcome]:
    """The outcomes of tasks in their order, `window` of them submitted and not yet gathered at most: neither tasks nor
    outcomes pile up, however many there are."""
    if window < 1:
        raise ValueError(f"a window of {window} tasks")
    coming = iter(tasks)
    tickets = deque(engine.submit(task) for task in islice(coming, window))
    while tickets:
        yield next(iter(engine.gather([tickets.popleft()])))
        tickets.extend(engine.submit(task) for task in islice(coming, 1))


def groups(count: int, parts: int, most: int | None = None) -> list[range]:
    """The numbers below `count` in at most so many consecutive ranges of sizes as equal as can be, more where a range
    would have more than `most` numbers."""
    if count < 1:
        return []
    parts = max(1, min(count, parts))
    if most is not None:
        parts = max(parts, -(-count // max(1, most)))
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def falling_groups(count: int, parts: int, most: int | None = None) -> list[range]:
    """As `groups`, but the first ranges are about three times as large as the last ones: where workers take them in
    this order, less is left to the last one that is busy. Equal ones where a range would have less than one number."""
    equal = groups(count, parts, most)
    if count < 2 * max(1, len(equal)):
        return equal
    done = [part / len(equal) for part in range(len(equal) + 1)]
    bounds = [round(count * (1.5 - 0.5 * share) * share) for share in done]
    falling = [range(start, stop) for start, stop in pairwise(bounds)]
    if most is not None and max(map(len, falling)) > most:
        return falling_groups(count, len(equal) + 1, most)
    return falling


def named(experts: Sequence[int]) -> str:
    """Experts of a task in words."""
    return f"expert {experts[0]}" if len(experts) == 1 else f"experts {experts[0]} to {experts[-1]}"
