"""The integer forward of a run as an ONNX file: `moeq export --format onnx` or qonnx, and export.onnx of a recipe."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moeq.artifacts.files import building, digest_of
from moeq.artifacts.stage import StageRecord, is_current, read_record, write_record
from moeq.errors import FormatError, MissingError, RecipeError
from moeq.integers.artifacts.integer import NAME as MANIFEST
from moeq.integers.forward.description import KNOWN, is_known
from moeq.runtimes import ONNX, QONNX, W8A8
from moeq.stages import integer_forward
from moeq.stages.context import Context

WHERE = "--format onnx"
PACKAGE = "onnx"
STAGE = "export-onnx"  # what its record is of
BLOCK_NODES, EXPERT_NODES, NODE = 340, 18, 125  # nodes of a block and of an expert in it; bytes of each
CHANNEL, TABLE = 36, 8192  # bytes of a channel's bias, multiplier and shift, and of the table of an activation function


def check(context: Context) -> None:
    """RecipeError where the recipe wants ONNX and the package is not installed."""
    if context.recipe.export.onnx:
        _check_package()


def _check_package() -> None:
    if find_spec(PACKAGE) is None:
        raise RecipeError("the package onnx is not installed", where=WHERE, do="pip install 'moeq[onnx]'")


def is_intact(context: Context) -> bool:
    """Whether what the recipe wants of it is there, made of what `moeq reparam` has left."""
    if not context.recipe.export.onnx:
        return True
    key = _key(read_record(context.finished("reparam"), "reparam"), context.recipe.export.verify)
    return is_current(context.out / ONNX, STAGE, key, cached=not context.check)


def _key(forward: StageRecord, verify: bool) -> str:
    """Of a file that is made of what `moeq reparam` has left."""
    return digest_of([STAGE, forward.digest, verify])


def write(context: Context, *, verify: bool, qonnx: bool = False) -> dict[str, Any]:
    """Write OUT/onnx/model.onnx (of a model with several tasks onnx/task-0/model.onnx and so on), whole or not at all.

    verify: compare every number of the test vectors with onnxruntime's, where it is installed; qonnx: OUT/qonnx
    instead, with operands of products through QONNX's Quant. Returns what was written, by task. Raises RecipeError
    where onnx is not installed, ArtifactError where `moeq reparam` has not run, MissingError where it wrote no integer
    forward, FormatError for a model of another kind and for what the operators cannot carry.
    """
    if not is_known(context.model.skeleton):
        what = f"{type(context.model.skeleton).__name__} has no integer forward, which is what would be written"
        do = f"known are {KNOWN}; of a language model `--format {W8A8}` writes one in int8"
        raise FormatError(what, where=f"--format {QONNX if qonnx else ONNX}", do=do)
    _check_package()
    directory = context.finished("reparam")
    record = read_record(directory, "reparam")
    whole = directory / integer_forward.FOLDER
    folders = [whole] if (whole / MANIFEST).is_file() else sorted(path.parent for path in whole.glob(f"*/{MANIFEST}"))
    if not folders:
        raise MissingError(
            "this run has no integer forward",
            where=str(whole),
            do="run `moeq reparam` with --set reparam.integer={} on a vision transformer",
        )
    from moeq.integers.onnx_graph import write as graphs

    target = context.out / (QONNX if qonnx else ONNX)
    found: dict[str, Any] = {}
    with building(target) as partial:
        for folder in folders:
            name = "" if folder == whole else folder.name
            (partial / name).mkdir(exist_ok=True)
            written = graphs.write(folder, partial / name, verify=verify, qonnx=qonnx)
            found[name or "task-0"] = written | {"file": str(Path(target) / name / graphs.NAME)}
        key = _key(record, verify)
        write_record(
            partial, stage=STAGE, model=record.model, seed=record.seed, key=key, inputs={}, summary={}, volatile={}
        )
    return found


def foreseen_bytes(context: Context) -> int:
    """Bytes of the files: weights in int8, and a graph of every task."""
    model, layers = context.model.described
    config: Any = model.config
    nodes = BLOCK_NODES * config.num_hidden_layers + EXPERT_NODES * sum(layer.num_experts for layer in layers)
    weights = sum(weight.numel() * (1 if weight.dim() > 1 else CHANNEL) for weight in model.parameters())
    return int(getattr(config, "num_tasks", 1) * (weights + TABLE * config.num_hidden_layers + NODE * nodes))
