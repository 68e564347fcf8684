"""Files that come with moeq: three tiny trained models and a small corpus, to try it offline, and presets.

`README.md` in this directory describes them; in the repository, tests/bundled has what made them.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from moeq.errors import ArtifactError, hint

BUNDLED_NAMES = (
    "tiny-mixtral",
    "tiny-moe-vit",
    "tiny-moe-vit-65",
    "digits_split.json",
    "corpus",
    "corpus/calibration.jsonl",
    "corpus/evaluation.jsonl",
    "corpus/continuation_4way.jsonl",
    "corpus/lm_eval_tasks",
    "corpus/lm_eval_tasks/moeq_continuation.yaml",
    "presets",
    "LICENSE.PSF-2.0.txt",
    "README.md",
)


def bundled_path(name: str) -> Path:
    """Path of a bundled file or directory, one of `BUNDLED_NAMES`.

    Packages are installed as directories, so the path is a real one that outlives the call. Raises ArtifactError
    for an unknown name and for a file that this installation lacks.
    """
    if name not in BUNDLED_NAMES:
        raise ArtifactError(f"moeq bundles no {name!r}", do=hint(name, BUNDLED_NAMES, "known are "))
    path = Path(str(files(__name__))).joinpath(*name.split("/"))
    if not path.exists():
        raise ArtifactError("a bundled file is missing", where=str(path), do="install moeq again")
    return path
