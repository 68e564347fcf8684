"""The side of a worker: it takes tasks from a pipe one after the other, and ends with its driver."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from moeq.engine.arrays import encode
from moeq.engine.spool import Folders, read
from moeq.engine.task import Failure, Tensors

READY = b"ready"
DRIVER_GONE = 3  # exit code
VISIBLE = "CUDA_VISIBLE_DEVICES"
OPEN = 2  # things that were put and stay mapped: of the layer that is worked on and of the next


def main(pipe: Connection, folders: Folders, threads: int, gpu: str | None = None) -> None:
    """Work until the pipe ends. threads: of torch and of compiled loops in this process; gpu: CUDA's name of the only
    one that it sees, None: those that it was started with."""
    if gpu is not None:
        os.environ[VISIBLE] = gpu  # before CUDA starts in this process
    for number in (signal.SIGINT, signal.SIGHUP):  # which a terminal sends to all; the driver decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    watch = threading.Thread(target=_end_with_driver, args=(folders,), daemon=True)
    watch.start()
    torch.set_num_threads(threads)
    gc.freeze()  # what was imported is no garbage, and its memory stays shared with the other workers
    try:
        _work(pipe, folders)
    except (EOFError, OSError):  # the pipe ended: the driver is gone, or is about to end this process
        watch.join()


def _work(pipe: Connection, folders: Folders) -> None:
    """Do what the pipe says until it ends: EOFError, OSError."""
    opened: dict[Path, Tensors] = {}
    pipe.send_bytes(READY)
    while True:
        ticket, rest = pickle.loads(pipe.recv_bytes())
        pipe.send_bytes(pickle.dumps((ticket, _done(rest, opened, folders))))


def _done(rest: bytes, opened: dict[Path, Tensors], folders: Folders) -> Path | Failure:
    """Do a task; where its outcome was written, or its error."""
    try:
        function, arguments, paths = pickle.loads(rest)
        tensors = _opened(paths, opened)
        value, made, seconds = run(function, arguments, tensors)
        return folders.write("outcome", encode((value, platform.node(), seconds), made))
    except Exception as error:
        return Failure.of(error)


def run(function: Callable[[Any, Tensors], Any], arguments: Any, tensors: Tensors) -> tuple[Any, Tensors, float]:
    """What a task's function gives, and the seconds that it took."""
    started = time.perf_counter()
    with torch.no_grad():
        value, made = function(arguments, tensors)
    return value, made, time.perf_counter() - started


def _opened(paths: list[Path], opened: dict[Path, Tensors]) -> Tensors:
    """Tensors of some files; those of a few files stay mapped for the next task."""
    for path in paths:
        opened[path] = opened.pop(path) if path in opened else read(path)[1]  # the last used last
    while len(opened) > max(OPEN, len(paths)):
        del opened[next(iter(opened))]
    return {name: tensor for path in paths for name, tensor in opened[path].items()}


def _end_with_driver(folders: Folders) -> None:
    """End this process, with what was handed through files, as soon as the driver is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        folders.remove()
        sys.stderr.flush()
        os._exit(DRIVER_GONE)
