"""Tasks of tests, which worker processes import by this module's name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeq.engine.worker import VISIBLE
from moeq.errors import QuantizationError

Tensors = Mapping[str, Tensor]


def square(number: int, tensors: Tensors) -> tuple[int, dict[str, Tensor]]:
    return number * number, {}


def scaled(factor: float, tensors: Tensors) -> tuple[str, dict[str, Tensor]]:
    return f"{torch.get_num_threads()} threads", {name: tensor * factor for name, tensor in tensors.items()}


def layout(_: Any, tensors: Tensors) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Strides and addresses modulo 64 of what came."""
    return {name: (tensor.stride(), tensor.data_ptr() % 64) for name, tensor in tensors.items()}, {}


def slow(seconds: float, tensors: Tensors) -> tuple[int, dict[str, Tensor]]:
    time.sleep(seconds)
    return os.getpid(), {}


def gpus_seen(seconds: float, tensors: Tensors) -> tuple[tuple[int, str | None], dict[str, Tensor]]:
    """The worker's process, and what CUDA is told of GPUs there."""
    time.sleep(seconds)
    return (os.getpid(), os.environ.get(VISIBLE)), {}


def refused(expert: int, tensors: Tensors) -> tuple[None, dict[str, Tensor]]:
    raise QuantizationError("the loss is not a number", where=f"layers.3, expert {expert}", do="use float32")


def broken(_: Any, tensors: Tensors) -> tuple[None, dict[str, Tensor]]:
    raise ZeroDivisionError("by a bug")


def hungry(_: Any, tensors: Tensors) -> tuple[None, dict[str, Tensor]]:
    np.empty(1 << 50)
    return None, {}


def deadly(marker: str, tensors: Tensors) -> tuple[str, dict[str, Tensor]]:
    """Kills its process the first times, as often as the file of this name is short of bytes; always without one."""
    path = Path(marker)
    if not marker or len(path.read_bytes()) < 2:
        if marker:
            with path.open("ab") as stream:
                stream.write(b".")
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive", {}


def held(path: str, tensors: Tensors) -> tuple[int, dict[str, Tensor]]:
    """How many tasks ran at once in this folder, this one counted."""
    own = Path(path) / f"{os.getpid()}-{time.monotonic_ns()}"
    own.touch()
    time.sleep(0.05)
    there = len(list(Path(path).iterdir()))
    own.unlink()
    return there, {}
