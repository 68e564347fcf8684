"""What libraries say to programmers stays off standard error, for a whole command."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from typing import TextIO

LIBRARIES = (
    "accelerate", "datasets", "huggingface_hub", "httpx", "lm_eval", "matplotlib", "torch", "transformers", "urllib3",
)  # fmt: skip
SETTINGS = {  # what they read when they are imported
    "HF_HUB_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
MATTERS = re.compile(r"CUDA|NVIDIA|out of memory|offload_buffers")  # of a warning that a user should know of
MOST_CHARACTERS = 300  # of it


def quiet_libraries() -> None:
    """A library's warning is dropped, or one line of moeq's where a user should know of it.

    What the user has set stays: -W, PYTHONWARNINGS, TRANSFORMERS_VERBOSITY and the like.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    for library in LIBRARIES:
        logging.getLogger(library).setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.simplefilter("default")
        warnings.showwarning = _show_warning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = " ".join(str(message).split())
    if MATTERS.search(text):
        print(f"moeq: note: {text[:MOST_CHARACTERS]}", file=sys.stderr)
