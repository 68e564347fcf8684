"""Independent pieces of work on the CPU, side by side: one thread each, not all threads in every small operation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Piece = TypeVar("Piece")


def side_by_side(work: Callable[[Piece], None], pieces: Sequence[Piece], *, one_each: bool = False) -> None:
    """work(piece) for all pieces, as many at once as torch has threads, without gradients.

    With fewer pieces than threads, or away from the main thread, one after the other with all of torch's threads;
    one_each: on the main thread with one thread each all the same, so that what a piece gives, whose sums may hang on
    the number of threads, does not hang on how many are beside it. The first error is raised when all pieces that were
    begun have ended.
    """
    threads = torch.get_num_threads()
    few = len(pieces) < threads and not one_each
    if threads == 1 or few or threading.current_thread() is not threading.main_thread():
        with torch.no_grad():
            for piece in pieces:
                work(piece)
        return

    inference = torch.is_inference_mode_enabled()

    def alone(piece: Piece) -> None:
        torch.set_num_threads(1)  # a thread's own setting for OpenMP; MKL's is everyone's
        with torch.inference_mode(inference), torch.no_grad():  # these are a thread's own too
            work(piece)

    with ThreadPoolExecutor(threads, thread_name_prefix="moeq-pieces") as pool:
        try:
            done = [pool.submit(alone, piece) for piece in pieces]
            wait(done)
            for ended in done:
                ended.result()
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)
