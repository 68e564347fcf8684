"""Compiled work on several cores, by torch's threads or by some of our own that wait between calls.

Between torch's parallel pieces the threads of its OpenMP spin for some milliseconds, unless OMP_WAIT_POLICY is PASSIVE,
as moeq sets it: others would get a share of the cores only. So where they spin, as in vLLM, they do the work; where
they sleep, threads of our own do it, beside the thread that calls.

Work is compiled code at an address, which takes the address of int64 numbers that say what is to be done, shares it out
with all threads that have the same numbers, and returns when all of it is done. A thread of ours that has nothing to do
looks for more for a while, letting every other program go first, before it sleeps: to wake one takes as long as some MB
of packed matrices. One that has not begun when the calling one has finished is told that it need not. One that is woken
would often go on on the core of the thread that woke it, for some milliseconds, though another one is idle; so it is
told to go on on any other core that it may run on.

All of this is compiled: what Python does between two calls is not in the caches any more after a layer's matrices.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import types
from numpy.typing import NDArray

from moeq_kernels.cpu.compiled import call, call_parallel, call_work
from moeq_kernels.cpu.kept_code import compiler, internal
from moeq_kernels.cpu.memory import add_at, int64s, look_at, put_at, swap_at

PATIENCE = 1000  # looks for more work before a thread sleeps, some tenths of a millisecond
LINE = 64  # bytes of a cache line
# where the numbers of a post lie: which one it is, how often it was claimed, whether it is done, whether its thread
# sleeps, the addresses of code and numbers, its own number and whether it was told where to go on; then what it sleeps
# with, pthread_mutex_t and pthread_cond_t, and a cpu_set_t of where it may run and one of where it is to go on
TICKET, CLAIMED, DONE, ASLEEP, WORK, MUTEX, CONDITION, CORES = (LINE * place for place in (0, 1, 2, 3, 4, 5, 7, 9))
THREAD, TOLD = WORK + 16, WORK + 24
CORES_BYTES = 128
POST_BYTES = CORES + 2 * CORES_BYTES
MOVABLE = sys.platform == "linux"  # whether threads can be told where to run
STOP = -1  # the last ticket
# where those of a team lie: whether it has work, how many threads it is with the one that calls, GOMP_parallel or 0,
# and how many posts there are, and where
BUSY, THREADS, PARALLEL, POSTS, FIRST = 0, LINE, LINE + 8, LINE + 16, LINE + 24
TEAM_BYTES = 2 * LINE
# how work is divided: not at all; where no thread needs to be woken, else these are woken for what comes next; always
ALONE, WHERE_AWAKE, ALWAYS = range(3)

_give_way = types.ExternalFunction("sched_yield", types.int32())
_lock, _unlock, _signal = (
    types.ExternalFunction(name, types.int32(types.int64))
    for name in ("pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_signal")
)
_sleep = types.ExternalFunction("pthread_cond_wait", types.int32(types.int64, types.int64))
_make_lock, _make_condition = (
    types.ExternalFunction(name, types.int32(types.int64, types.int64))
    for name in ("pthread_mutex_init", "pthread_cond_init")
)
_core = types.ExternalFunction("sched_getcpu", types.int32())
_cores, _set_cores = (
    types.ExternalFunction(name, types.int32(types.int32, types.int64, types.int64))
    for name in ("sched_getaffinity", "sched_setaffinity")
)
_compile = compiler()
_internal = internal()


@_internal  # type: ignore[untyped-decorator]
def _tell(post):  # type: ignore[no-untyped-def]
    """Have the thread of a post, which sleeps, go on on another core than this one's, if it may."""
    thread, core, own, others = look_at(post + THREAD), _core(), post + CORES, post + CORES + CORES_BYTES
    if thread == 0 or not 0 <= core < 8 * CORES_BYTES or _cores(thread, CORES_BYTES, own) != 0:
        return
    left, numbers = 0, CORES_BYTES // 8
    may, without = int64s(own, numbers), int64s(others, numbers)
    for place in range(numbers):
        without[place] = may[place] & ~(1 << core % 64) if place == core // 64 else may[place]
        left |= without[place]
    if left != 0 and _set_cores(thread, CORES_BYTES, others) == 0:
        put_at(post + TOLD, 1)


@_compile  # type: ignore[untyped-decorator]
def _prepare(post):  # type: ignore[no-untyped-def]
    """What a thread sleeps with."""
    return _make_lock(post + MUTEX, 0) + _make_condition(post + CONDITION, 0)


@_internal  # type: ignore[untyped-decorator]
def _rest(post, seen):  # type: ignore[no-untyped-def]
    """Sleep until one is woken."""
    _lock(post + MUTEX)
    put_at(post + ASLEEP, 1)
    while look_at(post + ASLEEP) != 0 and look_at(post + TICKET) == seen:
        _sleep(post + CONDITION, post + MUTEX)
    put_at(post + ASLEEP, 0)
    if MOVABLE and look_at(post + TOLD) != 0:
        put_at(post + TOLD, 0)
        _set_cores(0, CORES_BYTES, post + CORES)
    _unlock(post + MUTEX)


@_compile  # type: ignore[untyped-decorator]
def _serve(post):  # type: ignore[no-untyped-def]
    """Do what is posted, until the last ticket."""
    looks, seen = 0, 0
    while True:
        ticket = look_at(post + TICKET)
        if ticket != seen:
            seen, looks = ticket, 0
            if ticket == STOP:
                return
            if add_at(post + CLAIMED, 1) == 0:
                call_work(look_at(post + WORK), look_at(post + WORK + 8))
                put_at(post + DONE, 1)
            continue
        looks += 1
        if looks > PATIENCE:
            _rest(post, seen)
            looks = 0
        _give_way()


@_compile  # type: ignore[untyped-decorator]
def _wake(first, count):  # type: ignore[no-untyped-def]
    """Have the threads of some posts look for work; whether all did so before."""
    were = True
    for post in range(first, first + count * POST_BYTES, POST_BYTES):
        if look_at(post + ASLEEP) != 0:
            were = False
            _lock(post + MUTEX)
            if MOVABLE and look_at(post + ASLEEP) != 0:
                _tell(post)
            put_at(post + ASLEEP, 0)
            _signal(post + CONDITION)
            _unlock(post + MUTEX)
    return were


@_internal  # type: ignore[untyped-decorator]
def _lead(first, count, work, numbers):  # type: ignore[no-untyped-def]
    """Post work to the threads of some posts, do it, and wait for those that have begun."""
    end = first + count * POST_BYTES
    for post in range(first, end, POST_BYTES):
        put_at(post + WORK, work)
        put_at(post + WORK + 8, numbers)
        put_at(post + DONE, 0)
        put_at(post + CLAIMED, 0)  # from now on it may be claimed, even by one that has the last ticket only
        add_at(post + TICKET, 1)
    call_work(work, numbers)
    for post in range(first, end, POST_BYTES):
        if add_at(post + CLAIMED, 1) > 0:
            while look_at(post + DONE) == 0:
                _give_way()


@_internal  # type: ignore[untyped-decorator]
def threads_of(team):  # type: ignore[no-untyped-def]
    """How many a team has, with the one that calls."""
    return look_at(team + THREADS) if team else 1


@_internal  # type: ignore[untyped-decorator]
def divide(team, how, work, numbers):  # type: ignore[no-untyped-def]
    """Do work with a team's threads, alone where it is 0 or works for another thread of this program already."""
    if team == 0 or how == ALONE or swap_at(team + BUSY, 1) != 0:
        call_work(work, numbers)
        return
    parallel, first, count = look_at(team + PARALLEL), look_at(team + FIRST), look_at(team + POSTS)
    if parallel:
        call_parallel(parallel, work, numbers, look_at(team + THREADS))
    elif _wake(first, count) or how == ALWAYS:
        _lead(first, count, work, numbers)
    else:
        call_work(work, numbers)
    put_at(team + BUSY, 0)


def _divided(team, how, work, numbers):  # type: ignore[no-untyped-def]
    """For `compiled.call`."""
    divide(team, how, work, numbers)
    return 0


class _Team:
    """So many threads: torch's, or this one and some of our own."""

    def __init__(self, threads: int) -> None:
        parallel = _parallel() if _spinning() else 0
        posts = 0 if parallel else threads - 1
        self._space = np.zeros((TEAM_BYTES + posts * POST_BYTES + LINE) // 8, np.int64)
        self._skipped = -self._space.ctypes.data % LINE
        self.address = self._space.ctypes.data + self._skipped
        first = self.address + TEAM_BYTES
        for place, number in ((THREADS, threads), (PARALLEL, parallel), (POSTS, posts), (FIRST, first)):
            self._put(place, number)
        self._posts = first, posts
        _serve.compile((types.int64,))
        _wake.compile((types.int64, types.int64))
        addresses = range(first, first + posts * POST_BYTES, POST_BYTES)
        if any(_prepare(post) for post in addresses):
            raise OSError("the system makes no more locks for threads")
        self._threads = [
            threading.Thread(target=_serve, args=(post,), name="moeq-kernel", daemon=True) for post in addresses
        ]
        for number, thread in enumerate(self._threads):
            thread.start()
            self._put(TEAM_BYTES + number * POST_BYTES + THREAD, thread.native_id or 0)
        self._process = os.getpid()
        atexit.register(self.stop)

    def _put(self, place: int, number: int) -> None:
        self._space[(self._skipped + place) // 8] = number

    def stop(self) -> None:
        """Have our own threads end, before Python does; a child that was forked off has none of them."""
        if os.getpid() != self._process:
            return
        for place in range(len(self._threads)):
            self._put(TEAM_BYTES + place * POST_BYTES + TICKET, STOP)
        _wake(*self._posts)
        for thread in self._threads:
            thread.join(1)


_teams = cache(_Team)


@cache
def _parallel() -> int:
    """The address of `GOMP_parallel`(work, numbers, threads, 0) of the OpenMP runtime that torch calls: libgomp, or
    Intel's or LLVM's, which have it too; 0 where there is none."""
    libraries = [None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")]  # the program's own goes first
    for library in libraries if torch.backends.openmp.is_available() else ():
        try:
            found: Any = ctypes.CDLL(library).GOMP_parallel
        except (AttributeError, OSError):
            continue
        return ctypes.cast(found, ctypes.c_void_p).value or 0
    return 0


@cache
def _spinning() -> bool:
    """Whether torch's threads do; OpenMP reads the variable as it is loaded."""
    return os.environ.get("OMP_WAIT_POLICY", "").strip().upper() != "PASSIVE"


def _after_fork() -> None:
    """A child has none of its parent's threads, and OpenMP would wait for them."""
    global _parallel
    _teams.cache_clear()
    _parallel = cache(lambda: 0)


os.register_at_fork(after_in_child=_after_fork)


def team() -> int:
    """The address of as many threads as torch has, for `divide`; 0 for one."""
    count = torch.get_num_threads()
    return 0 if count == 1 else _teams(count).address


def together(work: int, numbers: NDArray[np.int64]) -> None:
    """Do work in as many threads at once as torch has, this one among them. See the top of this file."""
    call(_divided)(team(), ALWAYS, work, int(numbers.ctypes.data))
