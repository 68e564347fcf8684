"""Bringing versions of experts from disk over a bounded cache into blocks, beside the model that runs.

Paper 001 (DynaExq), section 3.3: the last version serves until the new one is whole and published between two steps;
then its block is given back. A copy that fails leaves the version as it was, is counted, and is said once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moeq.errors import first_line
from moeq.runtime.dynamic.pools import HIGH, Pools
from moeq.runtime.experts_by_row import LastUsed
from moeq_kernels.cpu.versions import VersionedLayer
from moeq_kernels.description import Matrix

Read = Callable[[int, int, int], Mapping[str, Matrix]]  # layer, expert, version -> its matrices


@dataclass(frozen=True, order=True)
class Switch:
    """An expert of a layer that is to have another version."""

    layer: int
    expert: int
    version: int


@dataclass
class Counts:
    """What happened so far. without_room: copies that found no block; restarts: of a thread that ended."""

    promotions: int = 0
    demotions: int = 0
    failures: int = 0
    without_room: int = 0
    restarts: int = 0
    host_hits: int = 0
    host_misses: int = 0
    copied_bytes: int = 0


@dataclass
class _Retired:
    """A block that is free as soon as no call reads it any more."""

    layer: int
    published: int
    version: int
    block: int
    switch: Switch


def _bytes_of(matrices: Mapping[str, Matrix]) -> int:
    return sum(matrix.nbytes for matrix in matrices.values())


@dataclass
class Copies:
    """Copies under way, at most `transient` of them.

    background: a thread makes them, else `request` does; say: what is told once of every kind of failure.
    """

    layers: Sequence[VersionedLayer]
    pools: Pools
    read: Read
    transient: int
    host_bytes: int
    background: bool
    say: Callable[[str], None]
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._host = LastUsed(self.host_bytes, _bytes_of)
        self._pending: deque[Switch] = deque()
        self._tasks: deque[Callable[[], None]] = deque()
        self._flying: set[tuple[int, int]] = set()
        self._ready: deque[tuple[Switch, int]] = deque()
        self._retired: list[_Retired] = []
        self._said: set[str] = set()
        self._changed = threading.Condition(threading.Lock())
        self._registering = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def in_flight(self) -> int:
        """Copies that have a second block."""
        return len(self._flying)

    def submit(self, task: Callable[[], None]) -> None:
        """Do something before further copies, in their thread."""
        if not self.background:
            task()
            return
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()
        self._alive()

    def request(self, switches: Iterable[Switch]) -> None:
        """These are wanted now, in this order; what was wanted before and has not begun is forgotten."""
        with self._changed:
            self._pending = deque(one for one in switches if (one.layer, one.expert) not in self._flying)
            self._changed.notify()
        if self.background:
            self._alive()
            return
        while self._pending:
            if len(self._flying) >= self.transient:
                self.register()
            if len(self._flying) >= self.transient:
                break  # a call reads what would have to be given back
            self._copy(self._pending.popleft())

    def register(self) -> list[Switch]:
        """Publish what is ready; what took effect. For one thread at a time, between two steps."""
        if not self._ready and not self._retired:
            return []
        done: list[Switch] = []
        with self._registering:
            by_layer: dict[int, list[tuple[Switch, int]]] = {}
            while self._ready:
                switch, block = self._ready.popleft()
                by_layer.setdefault(switch.layer, []).append((switch, block))
            for number, ready in by_layer.items():
                layer, before = self.layers[number], self.layers[number].places()
                published = layer.publish({switch.expert: (switch.version, block) for switch, block in ready})
                for switch, _ in ready:
                    version, block = before[switch.expert]
                    self._retired.append(_Retired(number, published, version, block, switch))
                    self.counts.promotions += switch.version == HIGH
                    self.counts.demotions += switch.version != HIGH
                    done.append(switch)
            self._sweep()
        return done

    def _sweep(self) -> None:
        left = []
        for one in self._retired:
            if not self.layers[one.layer].quiet(one.published):
                left.append(one)
                continue
            self.pools.pools[one.version].give_back(one.block)
            self._landed(one.switch)
        self._retired = left

    def _landed(self, switch: Switch) -> None:
        with self._changed:
            self._flying.discard((switch.layer, switch.expert))
            self._changed.notify()

    def _copy(self, switch: Switch) -> None:
        """One expert into a block of its new version."""
        self._flying.add((switch.layer, switch.expert))
        block, whole = self.pools.pools[switch.version].take(), False
        try:
            if block is None:
                self.counts.without_room += 1
                return
            matrices = self._matrices(switch)
            self.layers[switch.layer].blocks[switch.version].write(matrices, self.pools.bytes_of(switch.version, block))
            self.counts.copied_bytes += self.layers[switch.layer].blocks[switch.version].nbytes
            whole = True
            self._ready.append((switch, block))
        except Exception as error:  # whatever a disk, a file or a reader gives: the old version serves on
            self.counts.failures += 1
            self._say(f"layer {switch.layer}, expert {switch.expert} stays as it is: {first_line(error)}", error)
        finally:
            if not whole:
                if block is not None:
                    self.pools.pools[switch.version].give_back(block)
                self._landed(switch)

    def _matrices(self, switch: Switch) -> Mapping[str, Matrix]:
        missed = False

        def read() -> Mapping[str, Matrix]:
            nonlocal missed
            missed = True
            return self.read(switch.layer, switch.expert, switch.version)

        key = (switch.layer, switch.expert, switch.version)
        matrices: Mapping[str, Matrix] = self._host.get(key, read)
        self.counts.host_misses += missed
        self.counts.host_hits += not missed
        return matrices

    def _say(self, text: str, error: Exception) -> None:
        """Once for every kind of failure."""
        kind = type(error).__name__
        if kind not in self._said:
            self._said.add(kind)
            self.say(text)

    def _alive(self) -> None:
        """A thread that makes copies; another one where the last has ended."""
        if self._thread is not None and not self._thread.is_alive() and not self._closed:
            self.counts.restarts += 1
            if "thread" not in self._said:
                self._said.add("thread")
                self.say("the thread that copies experts has ended, another one goes on")
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="moeq copies", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._tasks and not self._may_copy():
                    self._changed.wait()
                if self._closed:
                    return
                task = self._tasks.popleft() if self._tasks else None
                switch = self._pending.popleft() if task is None else None
            if task is not None:
                task()
            elif switch is not None:
                self._copy(switch)

    def _may_copy(self) -> bool:
        return bool(self._pending) and len(self._flying) < self.transient

    def settle(self, seconds: float = 60.0) -> bool:
        """Wait until nothing is pending, registering what is ready; whether it came to that. For tests and ends."""
        until = threading.Event()
        for _ in range(int(seconds * 200)):
            self.register()
            with self._changed:
                if not self._pending and not self._tasks and not self._flying:
                    return True
            until.wait(0.005)
        return False

    def close(self) -> None:
        """End the thread; what is not registered yet never will be."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
