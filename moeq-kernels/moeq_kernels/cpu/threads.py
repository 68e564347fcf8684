"""Compiled work on several cores: a few threads that wait between calls, beside the one that calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="moeq-kernel")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads


def together(work: Callable[..., None], arguments: tuple[Any, ...], threads: int | None = None) -> None:
    """work(*arguments) in as many threads at once as torch has, this one among them.

    `work` leaves Python's lock, shares out what is to be done, and ends when all of it is done: a thread that has not
    begun when this one ends is not needed.
    """
    count = torch.get_num_threads() if threads is None else threads
    others = [_pool(count - 1).submit(work, *arguments) for _ in range(count - 1)] if count > 1 else []
    try:
        work(*arguments)
    finally:
        for other in others:
            if not other.cancel():
                other.result()
