"""Compiled work on several cores: threads that wait between calls, beside the one that calls.

Work is compiled code at an address, which takes the address of int64 numbers that say what is to be done, shares it out
with all threads that have the same numbers, and returns when all of it is done. A thread that has nothing to do looks
for more for a while, letting every other program go first, before it sleeps: to wake one takes as long as some MB of
packed matrices. A thread that has not begun when the calling one has finished is told that it need not.
"""

from __future__ import annotations

import atexit
import os
import threading
from functools import cache

import numpy as np
import torch
from numba import njit, types
from numpy.typing import NDArray

from moeq_kernels.cpu.compiled import call_work
from moeq_kernels.cpu.memory import add_at, look_at, put_at

PATIENCE = 1000  # looks for more work before a thread sleeps, some tenths of a millisecond
LINE = 64  # bytes of a cache line
# where the numbers of a post lie: which one it is, how often it was claimed, whether it is done, whether its thread
# sleeps, and the addresses of code and numbers
TICKET, CLAIMED, DONE, ASLEEP, WORK = (LINE * place for place in range(5))
STOP = -1  # the last ticket

_give_way = types.ExternalFunction("sched_yield", types.int32())
_compile = njit(nogil=True, cache=True, error_model="numpy")


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


@_compile  # type: ignore[untyped-decorator]
def _lead(posts, work, numbers):  # type: ignore[no-untyped-def]
    """Post work to the threads of these posts [n], do it, and wait for those that have begun."""
    for post in posts:
        put_at(post + WORK, work)
        put_at(post + WORK + 8, numbers)
        put_at(post + DONE, 0)
        put_at(post + CLAIMED, 0)  # from now on it may be claimed, even by one that has the last ticket only
        add_at(post + TICKET, 1)
    call_work(work, numbers)
    for post in posts:
        if add_at(post + CLAIMED, 1) > 0:
            while look_at(post + DONE) == 0:
                _give_way()


class _Crew:
    """Threads that wait for work, one less than `threads`."""

    def __init__(self, threads: int) -> None:
        self.busy = threading.Lock()
        self._space = np.zeros((threads, 5 * LINE // 8), np.int64)
        skipped = -self._space.ctypes.data % LINE // 8
        self._posts = self._space.reshape(-1)[skipped:][: (threads - 1) * 5 * LINE // 8].reshape(threads - 1, -1)
        self.addresses = self._posts.ctypes.data + np.arange(threads - 1) * self._posts.strides[0]
        self._sleeps = [threading.Semaphore(0) for _ in self._posts]
        self._posts[:, ASLEEP // 8] = 1
        _serve.compile("int64(int64, int64)")
        self._threads = [
            threading.Thread(target=self._wait, args=(number,), name="moeq-kernel", daemon=True)
            for number in range(threads - 1)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.stop)

    def _wait(self, number: int) -> None:
        seen, address = 0, int(self.addresses[number])
        while seen != STOP:
            self._sleeps[number].acquire()
            seen = _serve(address, seen)

    def wake(self) -> None:
        for post, sleep in zip(self._posts, self._sleeps, strict=True):
            if post[ASLEEP // 8]:
                post[ASLEEP // 8] = 0
                sleep.release()

    def stop(self) -> None:
        """Have all threads end, before Python does."""
        self._posts[:, TICKET // 8] = STOP
        self.wake()
        for thread in self._threads:
            thread.join(1)


_crew = cache(_Crew)
os.register_at_fork(after_in_child=_crew.cache_clear)  # a child has none of its parent's threads


def together(work: int, numbers: NDArray[np.int64], threads: int | None = None) -> None:
    """Do work in as many threads at once as torch has, this one among them; see the top of this file."""
    count = torch.get_num_threads() if threads is None else threads
    crew = _crew(count) if count > 1 else None
    if crew is None or not crew.busy.acquire(blocking=False):  # another thread of this program has them now
        _lead(np.zeros(0, np.int64), work, numbers.ctypes.data)
        return
    try:
        crew.wake()
        _lead(crew.addresses, work, numbers.ctypes.data)
    finally:
        crew.busy.release()
