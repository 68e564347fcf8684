"""Where output must not go: into a model, a checkpoint, or one artifact of a run."""

from __future__ import annotations

from pathlib import Path

from moeq.artifacts.stage import RECORD
from moeq.errors import RecipeError

MANIFEST = "placement.json"  # of a checkpoint in the native format
MODEL_FILES = ("config.json", MANIFEST, "*.safetensors", "*.gguf")  # of a checkpoint, ours or another's
ELSEWHERE = "choose another --out"


def refuse_artifacts(out: Path, option: str = "--out") -> None:
    """RecipeError for a place that is a file, a model, a checkpoint, or one artifact of a run."""
    where, elsewhere = f"{option} {out}", ELSEWHERE.replace("--out", option)
    if out.exists() and not out.is_dir():
        raise RecipeError("is no directory", where=where, do=elsewhere)
    if (out / RECORD).is_file():
        do = f"{elsewhere}, such as {out.parent if option == '--out' else out.parent / option.strip('-')}"
        raise RecipeError("is one artifact of a run, not a run", where=where, do=do)
    if any(any(out.glob(pattern)) for pattern in MODEL_FILES):
        raise RecipeError("a model or checkpoint lies in it", where=where, do=elsewhere)
