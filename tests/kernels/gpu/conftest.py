"""The GPU's kernels: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from triton_here import triton_here


@pytest.fixture(scope="package")
def place() -> Iterator[str]:
    """The device of the tests, with Triton ready for it."""
    with triton_here() as device:
        yield device
