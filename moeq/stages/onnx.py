"""The integer forward of a finished run as an ONNX file: `moeq export --format onnx`, or qonnx."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moeq.artifacts.files import building
from moeq.artifacts.stage import read_record
from moeq.errors import MissingError, RecipeError
from moeq.integers.artifacts.integer import NAME as MANIFEST
from moeq.stages import integer_forward
from moeq.stages.context import Context

FORMAT, QONNX = "onnx", "qonnx"
WHERE = "--format onnx"
PACKAGE = "onnx"


def write(context: Context, *, verify: bool, qonnx: bool = False) -> dict[str, Any]:
    """Write OUT/onnx/model.onnx (of a model with several tasks onnx/task-0/model.onnx and so on), whole or not at all.

    verify: compare every number of the test vectors with onnxruntime's, where it is installed; qonnx: OUT/qonnx
    instead, with operands of products through QONNX's Quant. Returns what was
    written, by task. Raises RecipeError where onnx is not installed, ArtifactError where `moeq reparam` has not run,
    MissingError where it wrote no integer forward, FormatError for what the operators cannot carry.
    """
    if find_spec(PACKAGE) is None:
        raise RecipeError("the package onnx is not installed", where=WHERE, do="pip install 'moeq[onnx]'")
    directory = context.finished("reparam")
    read_record(directory, "reparam")
    whole = directory / integer_forward.FOLDER
    folders = [whole] if (whole / MANIFEST).is_file() else sorted(path.parent for path in whole.glob(f"*/{MANIFEST}"))
    if not folders:
        raise MissingError(
            "this run has no integer forward",
            where=str(whole),
            do="run `moeq reparam` with --set reparam.integer={} on a vision transformer",
        )
    from moeq.integers.onnx_graph import write as graphs

    target = context.out / (QONNX if qonnx else FORMAT)
    found: dict[str, Any] = {}
    with building(target) as partial:
        for folder in folders:
            name = "" if folder == whole else folder.name
            (partial / name).mkdir(exist_ok=True)
            written = graphs.write(folder, partial / name, verify=verify, qonnx=qonnx)
            found[name or "task-0"] = written | {"file": str(Path(target) / name / graphs.NAME)}
    return found
