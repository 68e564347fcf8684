"""What the room says when transformers fails, and transformers kept quiet."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import transformers

from moeq.bounded import shortened

MOST_CHARACTERS = 300  # of what transformers says
REMEDY = "check that the directory is a complete transformers checkpoint"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and advice, which belong on nobody's report; errors still raise."""
    logger = logging.getLogger("transformers")
    level = logger.level
    transformers.utils.logging.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def line(error: Exception) -> str:
    """The first line of an exception, with its type, and the second where the first ends with a colon."""
    lines = [one.strip() for one in str(error).splitlines() if one.strip()] or ["no message"]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return shortened(f"{type(error).__name__}: {text}", MOST_CHARACTERS)
