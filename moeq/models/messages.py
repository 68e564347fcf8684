"""What the room says when transformers fails, and transformers kept quiet."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import transformers
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars

from moeq.bounded import shortened
from moeq.errors import ModelError, MoeqError, missing
from moeq.models.source import CONFIG

MOST_CHARACTERS = 300  # of what transformers says
INSTALL = "install what is missing"
REMEDY = "check that the directory is a complete transformers checkpoint"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and advice, which belong on nobody's report; errors still raise."""
    logger, bars = logging.getLogger("transformers"), transformers.utils.logging
    level, shown, without_hubs = logger.level, bars.is_progress_bar_enabled(), are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        if shown:
            bars.disable_progress_bar()  # and the hub's
        try:
            yield
        finally:
            logger.setLevel(level)
            if shown:
                bars.enable_progress_bar()
                if without_hubs:
                    disable_progress_bars()


@contextmanager
def asking_transformers(what: str, where: Path | str, do: str = REMEDY) -> Iterator[None]:
    """Keep transformers quiet and make one ModelError of whatever it raises; what moeq itself refuses within stays.

    MissingError where the path, or the directory's configuration, is no longer there: a missing directory's name is
    taken for one on the hub.
    """
    try:
        with quiet_transformers():
            yield
    except MoeqError:
        raise
    except Exception as error:  # ValueError, KeyError, OSError, its validators' own types, and what a class raises
        if isinstance(where, Path) and not (where if where.name == CONFIG else where / CONFIG).exists():
            raise missing(where, "download or make it again") from error
        do = INSTALL if isinstance(error, ImportError) else do
        raise ModelError(f"transformers cannot {what} ({line(error)})", where=str(where), do=do) from error


def damaged(path: Path, what: str) -> ModelError:
    """The error for a checkpoint that is not what its configuration says."""
    return ModelError(what, where=str(path), do=REMEDY)


def wrong_keys(path: Path, problem: str, keys: Sequence[str]) -> ModelError:
    """The error for tensors that are missing, unexpected or otherwise wrong, which names the first of them."""
    return damaged(path, f"{len(keys)} {problem}, the first: {keys[0]}")


def line(error: Exception) -> str:
    """The first line of an exception, with its type, and the second where the first ends with a colon."""
    lines = [text for text in map(str.strip, str(error).splitlines()) if text] or ["no message"]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return shortened(f"{type(error).__name__}: {text}", MOST_CHARACTERS)
