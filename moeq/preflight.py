"""What a command refuses before anything heavy is imported: names, numbers and files that are not there.

Nothing here knows torch, transformers or lm-eval. What only a model, a tokenizer or a device can say is refused later.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from moeq.errors import ArtifactError, CorpusError, EvaluationError, ModelError, RecipeError, StorageError
from moeq.exporters.exporter import loaders
from moeq.models.source import check_there
from moeq.recipe import BUNDLED, DIGITS, HUB, Recipe
from moeq.runtimes import named, runtimes

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
ALL = frozenset({"run", "plan"})  # commands that go through every stage
CALIBRATED = ALL | {"reparam", "profile", "losses"}
EVALUATED = ALL | {"eval"}
ESTIMATED = ALL | {"assign", "eval", "estimate"}


def check_run(recipe: Recipe, model: str, out: Path, command: str) -> None:
    """What a command on a run reads must be there: ModelError, CorpusError, EvaluationError, EstimateError.

    StorageError for a run directory that is a file.
    """
    check_there(model, recipe.revision)
    if out.exists() and not out.is_dir():
        raise StorageError("is a file", where=str(out), do="choose another --out")
    section = recipe.eval
    if command in CALIBRATED:
        check_texts(recipe.corpus.source)
    if command in EVALUATED and section.perplexity is not None:
        check_texts(section.perplexity.source)
    if command in EVALUATED and section.tasks:
        check_tasks(section.include_path)
    if command in ESTIMATED:
        named = [recipe.estimate.hardware, recipe.assign.hardware, *(compared.hardware for compared in section.compare)]
        check_hardware([name for name in named if name is not None])


def check_checkpoint(path: Path) -> None:
    """ModelError unless a directory is there that is no run."""
    if not path.is_dir():
        raise ModelError("no such checkpoint directory", where=str(path), do="give RUN/checkpoint of a moeq run")
    if not (path / "config.json").is_file() and (path / "checkpoint").is_dir():
        raise ModelError("this is a run", where=str(path), do=f"give {path / 'checkpoint'}")


def check_directory(path: Path) -> None:
    """RecipeError where there is nothing of that name."""
    if not path.exists():
        raise RecipeError("no such directory", where=str(path), do="give a checkpoint's directory")


def check_path(path: Path) -> None:
    """ArtifactError where there is neither a file nor a directory of that name."""
    if not path.exists():
        raise ArtifactError("no such file or directory", where=str(path), do="give a path that moeq wrote")


def check_loader(target: str | None) -> None:
    """RecipeError for a runtime whose loader no format names; None: the usual one."""
    if target is not None:
        named(target, loaders(), "--target")


def check_runtime(name: str | None) -> None:
    """RecipeError for a word that names no runtime; None: none is asked for."""
    if name is not None:
        named(name, runtimes(), "--for")


def check_absent(out: Path) -> None:
    """RecipeError where a directory that is to be written is there."""
    if out.exists():
        raise RecipeError("is there already", where=str(out), do="choose another --out or remove it")


def check_device(name: str) -> None:
    """ModelError for a name that no device has; whether it is there is seen when it is used."""
    if DEVICE.fullmatch(name) is None:
        raise ModelError("unknown device", where=f"device {name}", do="use auto, cpu or cuda")


def check_tasks(include_path: str | Path | None) -> None:
    """EvaluationError for a folder of tasks that is not there."""
    if include_path is not None and not Path(include_path).expanduser().is_dir():
        do = "correct --include-path (eval.include_path)"
        raise EvaluationError("no such folder of tasks", where=str(include_path), do=do)


def check_texts(source: str | Sequence[str]) -> None:
    """CorpusError for a file of text or images that is not there; hub datasets are looked up when they are read."""
    for name in [source] if isinstance(source, str) else source:
        if name in (BUNDLED, DIGITS) or name.startswith(HUB) or Path(name).expanduser().exists():
            continue
        raise CorpusError("no such file", where=name, do="give the path of a text file, or bundled")


def check_hardware(names: Sequence[str]) -> None:
    """EstimateError for hardware that is neither a preset nor a file, or damaged."""
    if names:
        from moeq.estimator import load_hardware

        for name in names:
            load_hardware(name)
