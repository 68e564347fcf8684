"""The engine of one machine: worker processes of the standard library, replaced when they die.

One thread of the driver hands out tasks, so that workers go on while the driver computes. A task whose worker died is
begun again by another; what it had written goes. Tensors go through files of a spool, never through pipes.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from moeq.engine import worker
from moeq.engine.arrays import encode
from moeq.engine.spool import Spool, read
from moeq.engine.task import Closing, Failure, Outcome, Shared, Task, Tensors
from moeq.errors import MoeqError, PlanError

MOST_DEATHS = 10  # of workers at one task: then it is the task
MOST_STARTS = 3  # of workers that end before they are ready, one after the other
SECONDS = 5.0  # that a worker has to end when it is told to


@dataclass(kw_only=True)
class _Pending:
    """A task that is not done: what the worker is sent, and how many died at it."""

    name: str
    message: bytes
    ram_bytes: int
    deaths: int = 0


@dataclass(kw_only=True, eq=False)
class _Worker:
    """A process, the driver's end of its pipe, and the ticket of what it does."""

    process: Any
    pipe: Connection
    ready: bool = False
    ticket: int | None = None


@dataclass(kw_only=True)
class _State:
    """What the thread and the driver share, under one lock. fatal: why no task runs any more."""

    pending: dict[int, _Pending] = field(default_factory=dict)
    queue: deque[int] = field(default_factory=deque)
    done: dict[int, Path | Failure | MoeqError] = field(default_factory=dict)
    fatal: Exception | None = None
    closing: bool = False
    replaced: int = 0


class ProcessEngine(Closing):
    """Processes that start as forks of a server which has imported `preload`, with a number of threads each.

    beside: a folder for tensors that shared memory has no room for; ram_bytes: of all tasks that run at once, at most
    (None: no limit; one runs always); gpus: those that workers divide among each other in this order, by their numbers
    in this process, so that each sees one (none: workers see what this process sees). StorageError, PlanError.
    """

    name = "processes"

    def __init__(
        self,
        workers: int,
        *,
        threads: int,
        beside: Path,
        preload: Sequence[str] = (),
        ram_bytes: int | None = None,
        gpus: Sequence[int] = (),
    ) -> None:
        self.workers, self.threads, self.ram_bytes, self.gpus = workers, threads, ram_bytes, gpus
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([worker.__name__, *preload])
        self._spool = Spool(beside)
        self._numbers = count()
        self._state = _State()
        self._changed = threading.Condition()
        self._woken, self._wake = os.pipe()
        self._failed_starts = 0
        self._crew: list[_Worker] = []
        try:
            self._crew += [self._start(place) for place in range(workers)]
        except BaseException:
            self._spool.remove()
            raise
        self._thread = threading.Thread(target=self._dispatch, name="moeq-engine", daemon=True)
        self._thread.start()

    @property
    def replaced(self) -> int:
        """How many workers died and were replaced."""
        return self._state.replaced

    @property
    def pids(self) -> list[int]:
        """The workers' processes at the moment."""
        return [one.process.pid for one in list(self._crew)]

    def doing(self) -> list[str]:
        with self._changed:
            return [self._name(one.ticket) if one.ready else "starting" for one in self._crew]

    def _name(self, ticket: int | None) -> str:
        """What a worker with this ticket does."""
        return "waiting" if ticket is None else self._state.pending[ticket].name

    def put(self, tensors: Tensors) -> Shared:
        encoded = encode(None, tensors)
        path = self._spool.write("put", encoded)
        return Shared(key=path.name, place=path, bytes=encoded.nbytes)

    def drop(self, shared: Shared) -> None:
        shared.place.unlink(missing_ok=True)

    def submit(self, task: Task) -> int:
        ticket = next(self._numbers)
        rest = pickle.dumps((task.function, task.arguments, [shared.place for shared in task.shared]))
        pending = _Pending(name=task.name, message=pickle.dumps((ticket, rest)), ram_bytes=task.resources.ram_bytes)
        with self._changed:
            self._state.pending[ticket] = pending
            self._state.queue.append(ticket)
        os.write(self._wake, b".")
        return ticket

    def gather(self, tickets: Iterable[int]) -> Iterator[Outcome]:
        for ticket in tickets:
            with self._changed:
                self._changed.wait_for(lambda: ticket in self._state.done or self._state.fatal is not None)  # noqa: B023
                if ticket not in self._state.done:
                    raise self._state.fatal or RuntimeError("no outcome")
                found, name = self._state.done[ticket], self._state.pending[ticket].name
            opened = read(found) if isinstance(found, Path) else None  # before it may be taken for a dead worker's
            with self._changed:
                del self._state.done[ticket], self._state.pending[ticket]
            if isinstance(found, MoeqError):
                raise found
            if isinstance(found, Failure):
                raise found.error(name)
            assert opened is not None
            (value, host, seconds), tensors = opened
            found.unlink(missing_ok=True)  # what is mapped stays
            yield Outcome(value=value, tensors=tensors, host=host, seconds=seconds)

    def close(self) -> None:
        with self._changed:
            if self._state.closing:
                return
            self._state.closing = True
        os.write(self._wake, b".")
        self._thread.join()
        for one in self._crew:
            one.pipe.close()
            one.process.terminate()
        for one in self._crew:
            one.process.join(SECONDS)
            if one.process.is_alive():
                one.process.kill()
                one.process.join()
        os.close(self._wake)
        os.close(self._woken)
        self._spool.remove()

    def _start(self, place: int) -> _Worker:
        """A new worker at a place of the crew; it says when it is ready."""
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._spool.for_workers(), self.threads, self._gpu(place))
        process = self._context.Process(target=worker.main, args=arguments, daemon=True, name="moeq-worker")
        process.start()
        theirs.close()
        return _Worker(process=process, pipe=ours)

    def _gpu(self, place: int) -> str | None:
        """CUDA's name of the GPU of the worker at a place."""
        if not self.gpus:
            return None
        number, visible = self.gpus[place % len(self.gpus)], os.environ.get(worker.VISIBLE)
        return str(number) if visible is None else visible.split(",")[number].strip()

    def _dispatch(self) -> None:
        """Hand out tasks and take what comes, until the engine closes; an error of it is the engine's end."""
        try:
            while True:
                with self._changed:
                    if self._state.closing or self._state.fatal is not None:
                        return
                    self._hand_out()
                there = {one.pipe: one for one in self._crew} | {one.process.sentinel: one for one in self._crew}
                for ready in wait([self._woken, *there]):
                    if ready == self._woken:
                        os.read(self._woken, 1 << 16)
                    elif (one := there[ready]) in self._crew:  # else it was replaced a moment ago
                        self._hear(one)
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        with self._changed:
            self._state.fatal = error
            self._changed.notify_all()

    def _hand_out(self) -> None:
        """Give every idle worker a task, in the order in which they were submitted, as memory allows."""
        running = [self._state.pending[one.ticket].ram_bytes for one in self._crew if one.ticket is not None]
        for one in self._crew:
            if not self._state.queue:
                return
            if not one.ready or one.ticket is not None:
                continue
            pending = self._state.pending[self._state.queue[0]]
            if self.ram_bytes is not None and running and sum(running) + pending.ram_bytes > self.ram_bytes:
                return
            one.ticket = self._state.queue.popleft()
            running.append(pending.ram_bytes)
            try:
                one.pipe.send_bytes(pending.message)
            except OSError:  # it has died; its sentinel says so
                continue

    def _hear(self, one: _Worker) -> None:
        """Take what a worker says, or replace one that is gone."""
        try:
            if one.pipe.poll():
                self._take(one, one.pipe.recv_bytes())
                return
        except (EOFError, OSError):
            pass
        one.process.join(SECONDS)
        if one.process.is_alive():  # its pipe is broken
            one.process.kill()
            one.process.join()
        self._replace(one)

    def _take(self, one: _Worker, message: bytes) -> None:
        if message == worker.READY:
            one.ready, self._failed_starts = True, 0
            return
        ticket, found = pickle.loads(message)
        with self._changed:
            one.ticket = None
            self._state.done[ticket] = found
            self._changed.notify_all()

    def _replace(self, one: _Worker) -> None:
        """Put a new worker in the place of one that died, and its task first."""
        pid, code = one.process.pid, one.process.exitcode
        one.pipe.close()
        with self._changed:
            kept = {found for found in self._state.done.values() if isinstance(found, Path)}
        self._spool.remove_of(pid, kept)
        if not one.ready:
            self._failed_starts += 1
            if self._failed_starts >= MOST_STARTS:
                do = 'see what they wrote to standard error; a script needs `if __name__ == "__main__":`'
                self._end(PlanError(f"worker processes end before they begin ({_ended(code)})", do=do))
                return
        with self._changed:
            self._state.replaced += 1
            if one.ticket is not None:
                pending = self._state.pending[one.ticket]
                pending.deaths += 1
                if pending.deaths < MOST_DEATHS:
                    self._state.queue.appendleft(one.ticket)
                else:
                    what = f"{pending.deaths} workers died at it, the last one of {_ended(code)}"
                    do = "check the memory: `moeq plan` says what workers take; use fewer of them"
                    self._state.done[one.ticket] = PlanError(what, where=pending.name, do=do)
                    self._changed.notify_all()
        place = self._crew.index(one)
        self._crew[place] = self._start(place)


def _ended(code: int | None) -> str:
    """How a process ended, in words."""
    if code is not None and code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
