"""Compiled work on several cores, by torch's threads or by some of our own that wait between calls.

Between torch's parallel pieces the threads of its OpenMP spin for some milliseconds, unless OMP_WAIT_POLICY is PASSIVE,
as moeq sets it: others would get a share of the cores only. So where they spin, as in vLLM, they do the work; where
they sleep, a crew does it, beside the thread that calls.

Work is compiled code at an address, which takes the address of int64 numbers that say what is to be done, shares it out
with all threads that have the same numbers, and returns when all of it is done. A thread of the crew that has nothing
to do looks for more for a while, letting every other program go first, before it sleeps: to wake one takes as long as
some MB of packed matrices. One that has not begun when the calling one has finished is told that it need not.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray, types
from numpy.typing import NDArray

from moeq_kernels.cpu.compiled import call, call_work
from moeq_kernels.cpu.kept_code import compiler
from moeq_kernels.cpu.memory import add_at, int64s, look_at, put_at

PATIENCE = 1000  # looks for more work before a thread sleeps, some tenths of a millisecond
LINE = 64  # bytes of a cache line
# where the numbers of a post lie: which one it is, how often it was claimed, whether it is done, whether its thread
# sleeps, and the addresses of code and numbers
TICKET, CLAIMED, DONE, ASLEEP, WORK = (LINE * place for place in range(5))
STOP = -1  # the last ticket

_give_way = types.ExternalFunction("sched_yield", types.int32())
_compile = compiler()


@_compile  # type: ignore[untyped-decorator]
def _serve(post, seen):  # type: ignore[no-untyped-def]
    """Do what is posted until nothing comes for a while; the last ticket that was seen."""
    looks = 0
    while True:
        ticket = look_at(post + TICKET)
        if ticket != seen:
            seen, looks = ticket, 0
            if ticket == STOP:
                return seen
            if add_at(post + CLAIMED, 1) == 0:
                call_work(look_at(post + WORK), look_at(post + WORK + 8))
                put_at(post + DONE, 1)
            continue
        looks += 1
        if looks > PATIENCE:
            put_at(post + ASLEEP, 1)
            if look_at(post + TICKET) == seen:
                return seen
            put_at(post + ASLEEP, 0)
        _give_way()


def _lead(posts, count, work, numbers):  # type: ignore[no-untyped-def]
    """Post work to the threads of `count` posts, whose addresses lie at one, do it, and wait for those that have begun;
    for `compiled.call`."""
    for post in carray(int64s(posts), count):
        put_at(post + WORK, work)
        put_at(post + WORK + 8, numbers)
        put_at(post + DONE, 0)
        put_at(post + CLAIMED, 0)  # from now on it may be claimed, even by one that has the last ticket only
        add_at(post + TICKET, 1)
    call_work(work, numbers)
    for post in carray(int64s(posts), count):
        if add_at(post + CLAIMED, 1) > 0:
            while look_at(post + DONE) == 0:
                _give_way()


class _Crew:
    """Threads that wait for work, one less than `threads`."""

    def __init__(self, threads: int) -> None:
        self._space = np.zeros((threads, 5 * LINE // 8), np.int64)
        skipped = -self._space.ctypes.data % LINE // 8
        self._posts = self._space.reshape(-1)[skipped:][: (threads - 1) * 5 * LINE // 8].reshape(threads - 1, -1)
        self._addresses = self._posts.ctypes.data + np.arange(threads - 1) * self._posts.strides[0]
        self.posts = int(self._addresses.ctypes.data), threads - 1
        self._posts[:, ASLEEP // 8] = 1
        self._sleeps = [(_at(address + ASLEEP), _asleep()) for address in self._addresses.tolist()]
        _serve.compile("int64(int64, int64)")
        self._threads = [
            threading.Thread(target=self._wait, args=(number,), name="moeq-kernel", daemon=True)
            for number in range(threads - 1)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.stop)

    def _wait(self, number: int) -> None:
        seen, address, sleep = 0, int(self._addresses[number]), self._sleeps[number][1]
        while seen != STOP:
            sleep.acquire()
            seen = _serve(address, seen)

    def wake(self) -> bool:
        """Have all look for work; whether all did so before."""
        were = True
        for asleep, sleep in self._sleeps:
            if asleep.value:
                asleep.value, were = 0, False
                sleep.release()
        return were

    def stop(self) -> None:
        """Have all threads end, before Python does."""
        self._posts[:, TICKET // 8] = STOP
        self.wake()
        for thread in self._threads:
            thread.join(1)


def _at(address: int) -> ctypes.c_int64:
    """The number at an address, as Python reads and writes it."""
    return ctypes.c_int64.from_address(address)


def _asleep() -> threading.Lock:
    """What a thread sleeps at until it is released; a lock wakes one in less time than a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


Parallel = Callable[[int, int, int, int], None]
_crew = cache(_Crew)
_busy = threading.Lock()


@cache
def _parallel() -> Parallel | None:
    """`GOMP_parallel`(work, numbers, threads, 0) of the OpenMP runtime that torch calls: libgomp, or Intel's or LLVM's,
    which have it too; None where there is none."""
    libraries = [None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")]  # the program's own goes first
    for library in libraries if torch.backends.openmp.is_available() else ():
        try:
            found: Any = ctypes.CDLL(library).GOMP_parallel
        except (AttributeError, OSError):
            continue
        found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
        return found  # type: ignore[no-any-return]
    return None


@cache
def _spinning() -> bool:
    """Whether torch's threads do; OpenMP reads the variable as it is loaded."""
    return os.environ.get("OMP_WAIT_POLICY", "").strip().upper() != "PASSIVE"


def _after_fork() -> None:
    """A child has none of its parent's threads, and OpenMP would wait for them."""
    global _busy, _parallel
    _crew.cache_clear()
    _busy, _parallel = threading.Lock(), cache(lambda: None)


os.register_at_fork(after_in_child=_after_fork)


def awake() -> bool:
    """Whether the other threads would take their part at once, and are not busy. Those that sleep are woken, for what
    comes next."""
    if _busy.locked():
        return False
    if _spinning() and _parallel() is not None:
        return True
    return _crew(torch.get_num_threads()).wake()


def together(work: int, numbers: NDArray[np.int64] | int, threads: int | None = None) -> None:
    """Do work in as many threads at once as torch has, this one among them; numbers: or their address. See the top of
    this file."""
    count = torch.get_num_threads() if threads is None else threads
    address = numbers if isinstance(numbers, int) else int(numbers.ctypes.data)
    busy, lead = _busy, call(_lead)
    if count == 1 or not busy.acquire(blocking=False):  # another thread of this program has them now
        lead(0, 0, work, address)
        return
    try:
        parallel = _parallel() if _spinning() else None
        if parallel is not None:
            parallel(work, address, count, 0)
            return
        crew = _crew(count)
        crew.wake()
        lead(*crew.posts, work, address)
    finally:
        busy.release()
