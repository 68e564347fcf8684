"""What was freed goes back to the system."""

from __future__ import annotations

import ctypes


def return_memory() -> None:
    """Give what was freed back to the system; glibc keeps it otherwise, and whatever comes next lies on top of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
