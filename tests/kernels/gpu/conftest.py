"""The GPU's kernels: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from triton_here import triton_here


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    """The device of the tests, with Triton ready for it. Of a module: a folder is no package of pytest's, and the
    interpreter would stay on for whatever is tested next, which takes thirty times as long there."""
    with triton_here() as device:
        yield device
