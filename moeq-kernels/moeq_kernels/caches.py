"""Where moeq keeps what it found out about this machine, for its user."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MOEQ_CACHE"


def folder() -> Path:
    """$MOEQ_CACHE, else $XDG_CACHE_HOME/moeq, else ~/.cache/moeq; it need not be there."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own)
    users = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # a relative one counts as none, says XDG's specification: it would be another folder wherever a command starts
    return (users if users.is_absolute() else Path("~/.cache").expanduser()) / "moeq"
