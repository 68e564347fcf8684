"""Bringing versions of experts from disk over a bounded cache into blocks, beside the model that runs.

Paper 001 (DynaExq), section 3.3: the last version serves until the new one is whole and published between two steps;
then its block is given back. A copy that fails leaves the version as it was, is counted, and is said once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from moeq.errors import first_line
from moeq.runtime.dynamic.host import HostCache, Key
from moeq.runtime.dynamic.pools import HIGH, Pools
from moeq.runtime.dynamic.transfer import Transfer
from moeq_kernels.description import Versioned
from moeq_kernels.streams import Event

ENDS_SECONDS = 5.0  # that a copy which waits for its file has to end, when all is closed


@dataclass(frozen=True, order=True)
class Switch:
    """An expert of a layer that is to have another version."""

    layer: int
    expert: int
    version: int

    @property
    def key(self) -> Key:
        return self.layer, self.expert, self.version


@dataclass
class Counts:
    """What happened so far. without_room: copies that found no block; restarts: of a thread that ended; prefetched:
    versions that were read before they were asked for; prefetch_hits: those of them that then were."""

    promotions: int = 0
    demotions: int = 0
    failures: int = 0
    without_room: int = 0
    restarts: int = 0
    host_hits: int = 0
    host_misses: int = 0
    copied_bytes: int = 0
    prefetched: int = 0
    prefetch_hits: int = 0


@dataclass(frozen=True)
class _Arriving:
    """A block that is published as soon as the device has all of it."""

    switch: Switch
    block: int
    arrived: Event


@dataclass
class _Retired:
    """A block that is free as soon as no call reads it any more."""

    layer: int
    published: int
    version: int
    block: int
    switch: Switch


@dataclass
class Copies:
    """Copies under way, at most `transient` of them.

    transfer: how a version comes into a block; host: where versions wait; background: a thread makes copies, and takes
    no more than a share `busy` of a processor's time, else `request` makes them; say: what is told once of every kind
    of failure.
    """

    layers: Sequence[Versioned]
    pools: Pools
    transfer: Transfer
    host: HostCache
    transient: int
    background: bool
    say: Callable[[str], None]
    busy: float = 1.0
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._pending: deque[Switch] = deque()
        self._after: dict[Switch, Switch] = {}
        self._ahead: deque[Switch] = deque()
        self._foreseen: set[Key] = set()  # of what was to be read ahead last, those whose turn has come
        self._flying: set[tuple[int, int]] = set()
        self._ready: deque[_Arriving] = deque()
        self._retired: list[_Retired] = []
        self._said: set[str] = set()
        self._changed = threading.Condition(threading.Lock())
        self._copying = threading.RLock()
        self._registering = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def in_flight(self) -> int:
        """Copies that have a second block, or are about to."""
        return len(self._flying)

    def request(
        self,
        switches: Iterable[Switch],
        after: Mapping[Switch, Switch] | None = None,
        ahead: Iterable[Switch] = (),
    ) -> None:
        """These are wanted now, in this order; what was wanted before and has not begun is forgotten.

        after: switches that are only made where another one was; ahead: what is read, the likeliest first, as far as
        there is room for it, when nothing is left to be copied.
        """
        with self._changed:
            self._pending, self._after = deque(switches), dict(after or {})
            self._ahead, self._foreseen = deque(ahead), set()
            self._changed.notify()
        if self.background:
            self._keep_alive()
            return
        while (switch := self._next()) is not None or self._blocked():
            if switch is not None:
                self._copy(switch)
                continue
            self.register(wait=True)
            if self._blocked():
                break  # a call reads what would have to be given back
        self.register(wait=True)
        while (one := self._next_ahead()) is not None:
            self._bring_ahead(one)

    def _blocked(self) -> bool:
        """Whether something is wanted that has to wait for copies in flight."""
        with self._changed:
            return bool(self._pending) and len(self._flying) >= self.transient

    def _next(self) -> Switch | None:
        """What is to be copied now, and counts as in flight from here on."""
        with self._changed:
            while self._pending and len(self._flying) < self.transient:
                switch = self._pending.popleft()
                place = switch.layer, switch.expert
                if place not in self._flying:
                    self._flying.add(place)
                    return switch
            return None

    def _next_ahead(self) -> Switch | None:
        with self._changed:
            if not self._ahead or self._pending or self._closed:
                return None
            self._foreseen.add(self._ahead[0].key)
            return self._ahead.popleft()

    def register(self, wait: bool = False) -> list[Switch]:
        """Publish what is ready; what took effect. Between two steps, of whichever thread.

        wait: also for what the device has not done yet.
        """
        if not self._ready and not self._retired:
            return []
        done: list[Switch] = []
        with self._registering:
            for number, ready in self._arrived(wait).items():
                layer = self.layers[number]
                before = {switch.expert: layer.place(switch.expert) for switch, _ in ready}
                published = layer.publish({switch.expert: (switch.version, block) for switch, block in ready})
                for switch, _ in ready:
                    version, block = before[switch.expert]
                    self._retired.append(_Retired(number, published, version, block, switch))
                    self.counts.promotions += switch.version == HIGH
                    self.counts.demotions += switch.version != HIGH
                    done.append(switch)
            self._sweep(wait)
        return done

    def _arrived(self, wait: bool) -> dict[int, list[tuple[Switch, int]]]:
        """What can be published now by layer, in the order in which it was brought; the rest stays."""
        found: dict[int, list[tuple[Switch, int]]] = {}
        left = []
        while self._ready:
            one = self._ready.popleft()
            if wait:
                one.arrived.wait()
            if one.arrived.done() and self.layers[one.switch.layer].ready(wait):
                found.setdefault(one.switch.layer, []).append((one.switch, one.block))
            else:
                left.append(one)
        self._ready.extendleft(reversed(left))
        return found

    def _sweep(self, wait: bool = False) -> None:
        left = []
        for one in self._retired:
            if not self.layers[one.layer].quiet(one.published, wait):
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
        """One expert, which is in flight, into a block of its new version."""
        block, whole, pool = None, False, self.pools.pools[switch.version]
        try:
            with self._copying:
                version, old = self.layers[switch.layer].place(switch.expert)
                if version == switch.version or self._in_vain(switch):
                    return
                block = pool.take()
                if block is None:
                    self.counts.without_room += 1
                    return
                staged = self._staged(switch)
                before = self.pools.bytes_of(version, old)
                into = self.pools.bytes_of(switch.version, block)
                moved, arrived = self.transfer.place(switch.layer, switch.version, staged, before, into)
                self.counts.copied_bytes += moved
                if staged is not None and not arrived.done():
                    self.host.hold(switch.key, arrived)
                whole = True
            self._ready.append(_Arriving(switch, block, arrived))
        except Exception as error:  # whatever a disk, a file or a reader gives: the old version serves on
            self.counts.failures += 1
            self._say(f"layer {switch.layer}, expert {switch.expert} stays as it is: {first_line(error)}", error)
        finally:
            if not whole:
                if block is not None:
                    pool.give_back(block)
                self._landed(switch)

    def _in_vain(self, switch: Switch) -> bool:
        """Whether what a switch was to follow was not made: it is neither published nor in flight."""
        first = self._after.get(switch)
        if first is None or (first.layer, first.expert) in self._flying:
            return False
        return self.layers[first.layer].place(first.expert)[0] != first.version

    def _staged(self, switch: Switch) -> Tensor | None:
        """What waits in memory for a copy, read where it does not yet."""
        if not self.transfer.host_sizes[switch.version]:
            return None
        staged, ahead = self.host.take(switch.key)
        if staged is None:
            self.counts.host_misses += 1
            return self.host.fill(switch.key, lambda into: self.transfer.stage(*switch.key, into))
        self.counts.host_hits += 1
        self.counts.prefetch_hits += ahead
        return staged

    def _bring_ahead(self, switch: Switch) -> None:
        """Into the cache alone, in no place of what is about to be copied or is likelier to be."""
        with self._changed:
            wanted = self._foreseen.union(one.key for one in self._pending)
        try:
            with self._copying:
                if switch.key in self.host or not self.host.room_ahead(switch.version, wanted):
                    return
                self.host.fill(switch.key, lambda into: self.transfer.stage(*switch.key, into), ahead=True)
                self.counts.prefetched += 1
        except Exception as error:
            self.counts.failures += 1
            self._say(f"layer {switch.layer}, expert {switch.expert} is not read ahead: {first_line(error)}", error)

    def _say(self, text: str, error: Exception) -> None:
        """Once for every kind of failure."""
        kind = type(error).__name__
        if kind not in self._said:
            self._said.add(kind)
            self.say(text)

    def _keep_alive(self) -> None:
        """A thread that makes copies; another one where the last has ended."""
        with self._changed:
            if self._closed or (self._thread is not None and self._thread.is_alive()):
                return
            again, self._thread = self._thread is not None, self._new_thread()
        if again:
            self.counts.restarts += 1
            if "thread" not in self._said:
                self._said.add("thread")
                self.say("the thread that copies experts has ended, another one goes on")

    def _new_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._work, name="moeq copies", daemon=True)
        thread.start()
        return thread

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._something():
                    self._changed.wait()
                if self._closed:
                    return
            began = time.thread_time()
            if (switch := self._next()) is not None:
                self._copy(switch)
            elif (one := self._next_ahead()) is not None:
                self._bring_ahead(one)
            self._rest(time.thread_time() - began)

    def _something(self) -> bool:
        return (bool(self._pending) and len(self._flying) < self.transient) or (bool(self._ahead) and not self._pending)

    def _rest(self, worked: float) -> None:
        """Leave the processor to the forward pass for its share of the time."""
        if self.busy < 1 and worked > 0:
            until = time.monotonic() + worked * (1 / self.busy - 1)
            with self._changed:
                while not self._closed and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No copy is begun within; one that is on its way is waited for."""
        with self._copying:
            for one in list(self._ready):
                one.arrived.wait()
            yield

    def settle(self, seconds: float = 60.0) -> bool:
        """Wait until nothing is pending, registering what is ready; whether it came to that. For tests and ends."""
        until, pause = time.monotonic() + seconds, threading.Event()
        while time.monotonic() < until:
            self.register()
            with self._changed:
                if not self._pending and not self._flying and not self._ahead:
                    return True
            if self.background:
                self._keep_alive()
            pause.wait(0.002)
        return False

    def close(self) -> None:
        """End the thread; what is not registered yet never will be. Blocks and cache are given back, unless a copy
        waits for its file even then."""
        with self._changed:
            self._closed = True
            self._pending.clear()
            self._ahead.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(ENDS_SECONDS)
            if self._thread.is_alive():
                self.say("a copy of an expert still waits for its file; it ends with the process")
                return
        with self._registering:
            while self._ready:
                one = self._ready.popleft()
                one.arrived.wait()
                self.pools.pools[one.switch.version].give_back(one.block)
                self._landed(one.switch)
            self._sweep(wait=True)
        self.host.clear()
