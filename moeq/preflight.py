"""What a command refuses before anything heavy is imported: names, numbers and files that are not there.

Nothing here knows torch, transformers or lm-eval. What only a model, a tokenizer or a device can say is refused later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeq.artifacts.bench import NAME as BENCH
from moeq.artifacts.places import refuse_artifacts
from moeq.artifacts.reading import read_json_file
from moeq.artifacts.run import store_folder
from moeq.artifacts.storage import check_no_address
from moeq.artifacts.sums import NAME as SUMS
from moeq.benching.asked import Asked
from moeq.bounded import is_hub_id
from moeq.errors import (
    ArtifactError,
    EvaluationError,
    ModelError,
    PushError,
    RecipeError,
    StorageError,
    is_utf8,
    missing,
    name_trouble,
)
from moeq.exporters.exporter import loaders
from moeq.folders import CHECKPOINT, checkpoint_of, expanded, is_run
from moeq.models import offline
from moeq.models.declared import is_native
from moeq.models.source import check_there
from moeq.recipe import BUNDLED, DIGITS, HUB, Recipe, TextSource, each_source
from moeq.runtime.dynamic.options import DynamicOptions, Following
from moeq.runtimes import ONNX, named, runtimes

TASKS_FOLDER = "give a folder of task YAML files to --include-path (eval.include_path)"
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
ALL = frozenset({"run", "plan"})  # commands that go through every stage
CALIBRATED = ALL | {"reparam", "profile", "losses"}
EVALUATED = ALL | {"eval"}
ONNX_EXPORT = f"export --format {ONNX}"
FOR_DENSE = frozenset({"reparam", "report", ONNX_EXPORT})  # a vision transformer is folded, with experts or without
ESTIMATED = ALL | {"assign", "eval", "estimate"}


def check_run(recipe: Recipe, model: str, out: Path, command: str) -> None:
    """What a command on a run reads must be there: MissingError, ModelError, EstimateError.

    StorageError for a run directory that is a file, or that no file of tensors or tables can be written to by its name.
    """
    _check_writable_name(out)
    check_no_address(store_folder(recipe, out))
    config = check_there(model, recipe.revision)
    folds = command == "plan" and recipe.reparam is not None  # which may be all that is planned
    if command not in FOR_DENSE and not folds:
        check_experts(config, model)
    there = next((folder for folder in (out, *out.parents) if folder.exists()), out)
    if there.exists() and not there.is_dir():
        what = "is a file" if there == out else f"{there} is a file"
        raise StorageError(what, where=str(out), do="choose another --out")
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


def _check_writable_name(out: Path) -> None:
    """StorageError for a name that no file of tensors or tables can be written to by, and for an address."""
    check_no_address(out)
    if not is_utf8(out):
        what, do = name_trouble(out, "choose another --out, or rename it")
        raise StorageError(what, where=str(out), do=do)


def check_experts(config: Mapping[str, Any], model: str) -> None:
    """ModelError for a model that has no experts, as its configuration and the record of families know."""
    from moeq.models.support import answer

    found = answer(config)
    if found.verdict == "dense":
        raise ModelError(found.line, where=model, do=found.do)


def check_checkpoint(path: Path) -> None:
    """MissingError for what is not there, ModelError for a file or a run."""
    do = "give RUN/checkpoint of a moeq run"
    check_folder(path, do)
    if not path.is_dir():
        raise ModelError("not a directory", where=str(path), do=do)
    if is_run(path):
        raise ModelError("this is a run", where=str(path), do=f"give {path / CHECKPOINT}")


def check_dynamic(
    text: str | None, checkpoint: Path | None, log: Path | None = None, watch: bool = False
) -> Following | None:
    """What --dynamic and the options beside it say, None where it is not given.

    RecipeError for what cannot be, for a log or a table without it, and for a file that cannot be written; ModelError
    where the checkpoint has not two such widths, ArtifactError for one without a manifest (None: looked at later).
    """
    for name, given in (("--dynamic-log", log is not None), ("--watch", watch)):
        if given and text is None:
            raise RecipeError("no expert changes its precision", where=name, do="give --dynamic too")
    if log is not None:
        check_no_address(log)
        if log.is_dir() or not log.absolute().parent.is_dir():
            where = f"--dynamic-log {log}"
            raise RecipeError("is no file that can be written", where=where, do="give a path in a folder")
    if text is None:
        return None
    options = DynamicOptions.parse(text)
    if checkpoint is not None:
        _check_pair(options, checkpoint)
    return Following(options=options, log=log, watch=watch)


def _check_pair(options: DynamicOptions, checkpoint: Path) -> None:
    """ModelError where a checkpoint has not two such widths, ArtifactError for one without a manifest."""
    from moeq.artifacts.manifest import read_manifest  # which imports numpy

    options.pair(read_manifest(checkpoint).widths_there, str(checkpoint))


def check_bench(asked: Asked, out: Path | None) -> None:
    """What a bench reads must be there, and may be written where it is to go: MissingError, ModelError, RecipeError."""
    check_device(asked.device)
    _check_together(asked)
    for name, dense in ((asked.checkpoint, False), (asked.dense, True)):
        if name is None:
            continue
        packed = checkpoint_of(Path(name)) != Path(name)  # a run's
        if not packed:
            config = check_there(name)
            check_experts(config, name)
            packed = is_native(config)
        if packed and dense:
            what = "packed, and --dense is the model that the checkpoint was made of"
            raise ModelError(what, where=name, do="give that model, or leave --dense out")
        if not packed and not dense and asked.dense is not None:
            what = "not packed, and --dense is the model that a packed one was made of"
            raise ModelError(what, where=name, do="give a packed checkpoint or a run, or leave --dense out")
    if asked.dynamic is not None:
        _check_pair(asked.dynamic, checkpoint_of(Path(asked.checkpoint)))
    check_path(asked.gguf, "give a GGUF file to --gguf")
    if out is not None:
        refuse_artifacts(out)
        _check_kind(asked, out)


def _check_kind(asked: Asked, out: Path) -> None:
    """RecipeError where a bench of the other kind, such as the one in a run's report, would be replaced."""
    path = out / BENCH
    try:
        found = read_json_file(path)
    except (OSError, ValueError):
        return
    if isinstance(found, dict) and ("grid" in found) != asked.grid:
        what = f"holds a bench {'without' if asked.grid else 'with'} --grid, which this one would replace"
        raise RecipeError(what, where=str(path), do="give another directory to --out")


def _check_together(asked: Asked) -> None:
    """RecipeError for an option of a bench that would do nothing beside the others."""
    given = {
        "--grid": asked.grid, "--dense": asked.dense is not None, "--gguf": asked.gguf is not None,
        "--beams": asked.beams is not None,
    }  # fmt: skip
    alone = {
        "--dynamic": (asked.dynamic is not None, "is measured beside static precision alone", tuple(given)),
        "--grid": (asked.grid, "is of the checkpoint alone", ("--dense", "--gguf")),
    }
    for name, (there, what, others) in alone.items():
        wrong = next((other for other in others if given[other]), None)
        if there and wrong is not None:
            raise RecipeError(what, where=name, do=f"leave {wrong} out")
    if asked.beams is not None and not asked.grid:
        raise RecipeError("are those of a grid", where="--beams", do="give --grid too")
    if asked.gguf is not None and not asked.peers:
        raise RecipeError("is for llama.cpp, one of the peers", where="--gguf", do="leave --no-peers out")


def check_path(path: Path | None, do: str) -> None:
    """MissingError where there is neither a file nor a directory of that name; None: none is named."""
    if path is not None and not path.exists():
        raise missing(path, do)


def check_folder(
    path: Path, do: str = "give a checkpoint, a run, a model's directory or a file that moeq wrote"
) -> None:
    """As `check_path`, for what may be on the hub under such a name, but has to be a directory here."""
    check_path(path, f"{do}; of the hub: hf download {path} --local-dir DIRECTORY" if is_hub_id(path) else do)


def check_push(path: Path, name: str) -> None:
    """What an upload needs before anything is loaded: ModelError, RecipeError, ArtifactError, PushError."""
    if not is_hub_id(name):
        raise RecipeError("no name of a repository", where=name, do="give USER/NAME, as on the hub")
    check_checkpoint(path)
    if not (path / SUMS).is_file():
        do = "export it again with this moeq, or write them: sha256sum * > SHA256SUMS"
        raise ArtifactError(f"no {SUMS}, by which what is uploaded is checked", where=str(path), do=do)
    if offline.is_set():
        raise PushError("HF_HUB_OFFLINE is set", where=name, do="unset it")


def check_loader(target: str | None) -> None:
    """RecipeError for a runtime whose loader no format names; None: the usual one."""
    if target is not None:
        named(target, loaders(), "--target")


def check_runtime(name: str | None) -> None:
    """RecipeError for a word that names no runtime; None: none is asked for."""
    if name is not None:
        named(name, runtimes(), "--for")


def check_absent(out: Path) -> None:
    """RecipeError where a directory that is to be written is there, StorageError for a name that is no UTF-8."""
    _check_writable_name(out)
    if out.exists() or out.is_symlink():
        raise RecipeError("is there already", where=str(out), do="choose another --out or remove it")


def check_device(name: str) -> None:
    """RecipeError for a name that no device has; whether it is there is seen when it is used."""
    if DEVICE.fullmatch(name) is None:
        raise RecipeError(f"unknown device {name!r}", where="--device", do="use auto, cpu or cuda")


def check_temperature(temperature: float) -> None:
    """RecipeError for one that is not finite."""
    if not math.isfinite(temperature):
        raise RecipeError(f"cannot be {temperature}", where="--temperature", do="give a finite number from 0")


def check_tasks(include_path: str | Path | None) -> None:
    """MissingError for a folder of tasks that is not there, EvaluationError for a file."""
    folder = None if include_path is None else expanded(include_path)
    check_path(folder, TASKS_FOLDER)
    if folder is not None and not folder.is_dir():
        raise EvaluationError("not a directory", where=str(include_path), do=TASKS_FOLDER)


def check_texts(source: TextSource) -> None:
    """MissingError for a file of text or images that is not there; hub datasets are looked up when they are read."""
    for name in [one.path for one in each_source(source)]:
        if name in (BUNDLED, DIGITS) or name.startswith(HUB) or expanded(name).exists():
            continue
        raise missing(name, "give the path of a text file, or bundled")


def check_hardware(names: Sequence[str]) -> None:
    """EstimateError for hardware that is no preset, or damaged; MissingError for a file that is not there."""
    if names:
        from moeq.estimator import load_hardware

        for name in names:
            load_hardware(name)
