"""Where moeq keeps what it found out about this machine, for its user."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MOEQ_CACHE"


def folder() -> Path:
    """$MOEQ_CACHE, else $XDG_CACHE_HOME/moeq, else ~/.cache/moeq; it need not be there."""
    own = os.environ.get(VARIABLE)
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "moeq"
