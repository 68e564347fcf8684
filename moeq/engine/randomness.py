"""Random numbers of whoever calls: a run has its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def own_randomness() -> Iterator[None]:
    """Seeds and draws within leave the generators of Python, numpy and torch as they were: who draws what to run next
    would draw the same every time."""
    python, arrays, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002
        torch.set_rng_state(tensors)
        torch.cuda.set_rng_state_all(on_gpus)
