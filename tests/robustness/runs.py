"""Making and reading runs: a recipe that takes a second, what is on disk afterwards."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from moeq.bundled import bundled_path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
VOCABULARY = 2048  # of the bundled tokenizer


def copy_tokenizer(directory: Path) -> None:
    for name in TOKENIZER_FILES:
        shutil.copyfile(bundled_path("tiny-mixtral") / name, directory / name)


def tiny_recipe(model: Path, corpus: Path, **sections: Any) -> dict[str, Any]:
    """A whole run that takes a second; `sections` replace or add keys."""
    recipe: dict[str, Any] = {
        "name": "tiny",
        "model": str(model),
        "corpus": {"source": str(corpus), "sequences": 12, "sequence_length": 64, "batch_size": 6},
        "losses": {"group_size": 16},
        "assign": {"code_bits": 2},
        "export": {"verify": False},
        "eval": {
            "perplexity": {"source": str(corpus), "sequences": 4, "sequence_length": 64},
            "compare": [{"name": "uniform-3", "method": "uniform", "bits": 3}],
        },
        "estimate": {"grid": {"inputs": [128], "outputs": [128]}},
    }
    return recipe | sections


def write_recipe(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    return path


def partials(directory: Path) -> list[Path]:
    """What is half-written below a directory."""
    return sorted(directory.rglob("*.partial*")) if directory.exists() else []


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Modification time and content of every file of a run except its lock."""
    return {
        path.relative_to(directory).as_posix(): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def restamp(run: Path) -> None:
    """Let the stages' records state what their files hold now, as whoever wrote such files would have recorded them."""
    for path in run.glob("*/stage.json"):
        record = json.loads(path.read_text("utf-8"))
        for name, stamp in record.get("files", {}).items():
            data = (path.parent / name).read_bytes()
            stamp |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        path.write_text(json.dumps(record), "utf-8")


def digests(run: Path) -> dict[str, str]:
    """The digest in every finished stage's record."""
    records = [path for path in run.glob("*/stage.json") if path.parent.suffix not in {".partial", ".begun"}]
    return {path.parent.name: json.loads(path.read_text("utf-8"))["digest"] for path in records}
