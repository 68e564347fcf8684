"""moeq: makes Mixture-of-Experts models small enough to run where they don't fit.

Importing moeq is cheap: torch and transformers are not imported. When transformers is imported (before or after), the
`moeq` quantization method is registered with it, so that `AutoModelForCausalLM.from_pretrained(DIR)` runs a checkpoint
that moeq exported.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from moeq.version import __version__

# torch's OpenMP threads spin while they wait; on shared cores that costs up to two orders of magnitude.
# It only works before torch is imported, and only where the user has not chosen.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # In bfloat16 oneDNN keeps a kernel, and ideep its descriptor, for every number of rows it has seen: 0.6 MB each,
    # 1024 of either, and experts are given ever new numbers of tokens. A miss costs under a millisecond.
    for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(_cache, "128")

from moeq import plugin

plugin.install()

if TYPE_CHECKING:
    from moeq.api import (
        Assigned,
        Run,
        assign,
        bench,
        convert,
        evaluate,
        inspect,
        plan,
        reproduce,
        run,
        stage,
        verify,
    )
    from moeq.errors import MoeqError
    from moeq.exporters.native_dynamic import open_dynamic
    from moeq.recipe import Recipe, load_recipe
    from moeq.reproduction.result import Reproduction
    from moeq.runtime.checkpoint import load

_MODULES = {
    **dict.fromkeys(("Assigned", "Run", "assign", "bench", "convert", "evaluate", "inspect"), "moeq.api"),
    **dict.fromkeys(("plan", "reproduce", "run", "stage", "verify"), "moeq.api"),
    "MoeqError": "moeq.errors",
    **dict.fromkeys(("Recipe", "load_recipe"), "moeq.recipe"),
    "Reproduction": "moeq.reproduction.result",
    "load": "moeq.runtime.checkpoint",
    "open_dynamic": "moeq.exporters.native_dynamic",
}


def __getattr__(name: str) -> Any:
    """What moeq offers to Python (docs/python.md), imported when it is asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module 'moeq' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


__all__ = [
    "Assigned",
    "MoeqError",
    "Recipe",
    "Reproduction",
    "Run",
    "__version__",
    "assign",
    "bench",
    "convert",
    "evaluate",
    "inspect",
    "load",
    "load_recipe",
    "open_dynamic",
    "plan",
    "reproduce",
    "run",
    "stage",
    "verify",
]
