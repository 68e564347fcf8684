"""Triton ready for tests: for a GPU where there is one, else in its interpreter, chosen when Triton is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

WRITTEN_IN_TRITON = (
    "moeq_kernels.gpu.bits",
    "moeq_kernels.gpu.codes",
    "moeq_kernels.gpu.grid",
    "moeq_kernels.gpu.parts",
    "moeq_kernels.gpu.programs",
    "moeq_kernels.gpu.sums",
    "moeq_kernels.gpu.version_programs",
    "moeq_kernels.gpu.walks",
    "moeq_kernels.gpu.work",
    "kernels.gpu.numbers_kernel",
)


def forget(*packages: str) -> None:
    """Python is to import these again; compiled extensions stay, of which there can be one."""
    for name in list(sys.modules):
        if name in packages or (name.split(".")[0] in packages and not name.startswith("triton._C")):
            del sys.modules[name]


@contextmanager
def triton_here() -> Iterator[str]:
    """The device of the tests, with Triton ready for it."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        yield "cuda"
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        forget("triton", *WRITTEN_IN_TRITON)
        yield "cpu"
    forget("triton", *WRITTEN_IN_TRITON)
