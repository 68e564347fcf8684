"""Linux gives the registers of AMX's tiles, 8 KiB a thread, only to processes that ask for them."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

ARCH_PRCTL = 158  # number of the system call on x86-64
ARCH_REQ_XCOMP_PERM, TILE_DATA = 0x1023, 18  # asm/prctl.h; the state's number in Intel's manual, volume 1, 13.1


@cache
def tiles_allowed() -> bool:
    """Whether this process, with all of its threads and those forked off, may use tiles; it is asked for once."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0)
