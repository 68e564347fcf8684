"""model.onnx of an integer forward's folder, checked, and run by onnxruntime against every value of its vectors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from torch import Tensor

from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import write_bytes
from moeq.errors import ArtifactError, FormatError
from moeq.integers.artifacts.integer import NAME as MANIFEST
from moeq.integers.artifacts.integer import IntegerManifest, Value
from moeq.integers.forward.saved import read
from moeq.integers.onnx_graph.graph import IR_VERSION, OPSET, TYPES, WHERE, Graph
from moeq.integers.onnx_graph.kinds import Kinds
from moeq.integers.onnx_graph.qonnx import DOMAIN, VERSION, annotation, quant_function
from moeq.version import __version__

NAME = "model.onnx"
MOST_BYTES = 2**31 - 1  # of a protobuf
DATATYPE = "finn_datatype"  # key of a tensor's annotation, as QONNX and FINN read it
INPUT = "pixels"
OUTSIDE = ("layer_norm", "log_attention", "uniform_attention", "table", "router", "experts")  # beside their products


@dataclass(frozen=True, kw_only=True)
class Made:
    """A model and what it is compared with: the vectors of its folder, by name."""

    model: onnx.ModelProto
    manifest: IntegerManifest
    vectors: dict[str, Tensor]
    products: int = 0  # whose operands pass QONNX's Quant
    standard: tuple[str, ...] = ()  # kinds of operations that compute outside of them


def made(folder: Path, *, qonnx: bool = False) -> Made:
    """The ONNX model of an integer forward, checked by onnx.

    Input `pixels` [images, C, H, W] and output `logits` [images, L] have the types that the manifest states; every
    other value of the manifest is a tensor of its name. Each is annotated with its bits (QONNX). FormatError, naming
    operation and operator, for what opset 17 cannot carry; ArtifactError for a folder that is damaged. qonnx: operands
    of products pass QONNX's Quant (qonnx.py).
    """
    manifest, program, vectors = read(folder)
    graph = Graph(program.values, qonnx=qonnx)
    shapes = {stored.name: stored.shape for stored in manifest.values}
    kinds = Kinds(graph, {name: tensor.numpy() for name, tensor in program.constants.items()}, shapes)
    for operation in program.operations:
        kinds.add(operation)
    constants = list(graph.constants.values())
    size = sum(len(one.raw_data) for one in constants)
    if size > MOST_BYTES:
        raise FormatError(
            f"constants of {size:,} bytes, a protobuf holds 2 GiB",
            where=f"{WHERE}: {folder}",
            do="take a smaller model",
        )
    whole = helper.make_graph(
        graph.nodes,
        "moeq integer forward",
        [_described(INPUT, program.values[INPUT], shapes)],
        [_described(program.logits, program.values[program.logits], shapes)],
        initializer=constants,
        value_info=[_described(name, value, shapes) for name, value in program.values.items()
                    if name not in (INPUT, program.logits)],
    )  # fmt: skip
    whole.quantization_annotation.extend(_annotated(name, value) for name, value in program.values.items())
    model = helper.make_model(
        whole,
        opset_imports=[helper.make_opsetid("", OPSET), *([_quant_domain()] if qonnx else [])],
        functions=[quant_function(OPSET)] if qonnx else [],
        ir_version=IR_VERSION,
        producer_name="moeq",
        producer_version=__version__,
    )
    told = {"moeq.manifest_sha256": digest_of_file(folder / MANIFEST), "moeq.rounding": manifest.rounding}
    helper.set_model_props(model, told)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FormatError(f"onnx refuses the graph ({reason})", where=f"{WHERE}: {folder}", do="report it") from None
    kinds_there = dict.fromkeys(operation.kind for operation in program.operations)
    apart = tuple(kind for kind in kinds_there if kind in OUTSIDE) if qonnx else ()
    return Made(model=model, manifest=manifest, vectors=vectors, products=graph.products, standard=apart)


def _quant_domain() -> onnx.OperatorSetIdProto:
    return helper.make_opsetid(DOMAIN, VERSION)


def _described(name: str, value: Value, shapes: dict[str, tuple[int, ...]]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TYPES[value.dtype], ["images", *shapes[name]])


def _annotated(name: str, value: Value) -> onnx.TensorAnnotation:
    entry = onnx.StringStringEntryProto(key=DATATYPE, value=annotation(value))
    return onnx.TensorAnnotation(tensor_name=name, quant_parameter_tensor_names=[entry])


def compared(found: Made) -> int:
    """How many numbers of the vectors onnxruntime gave, all of them equal.

    Raises ArtifactError naming the first value that differs, with its first place. The package onnxruntime must be
    there.
    """
    import onnxruntime

    watched = onnx.ModelProto()
    watched.CopyFrom(found.model)
    names = [stored.name for stored in found.manifest.values if stored.name != INPUT]
    infos = {info.name: info for info in (*watched.graph.value_info, *watched.graph.output)}
    del watched.graph.output[:]
    watched.graph.output.extend(infos[name] for name in names)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
    pixels = found.vectors[INPUT].numpy()
    given = pixels.astype(helper.tensor_dtype_to_np_dtype(TYPES[_stored(found, INPUT)]))
    numbers = 0
    for name, value in zip(names, session.run(names, {INPUT: given}), strict=True):
        wanted = found.vectors[name].numpy()
        numbers += _equal(name, value, wanted)
    return numbers


def _stored(found: Made, name: str) -> str:
    return next(stored.dtype for stored in found.manifest.values if stored.name == name)


def _equal(name: str, value: Any, wanted: Any) -> int:
    if value.shape != wanted.shape or not np.array_equal(value, wanted):
        same = value.shape == wanted.shape
        first = np.argwhere(value != wanted)[0].tolist() if same else list(value.shape)
        what = f"first at {first}" if same else f"of shape {first}"
        raise ArtifactError(
            f"onnxruntime gives another value {name} than the vectors, {what}", where=WHERE, do="report it"
        )
    return int(wanted.size)


def write(folder: Path, target: Path, *, verify: bool = True, qonnx: bool = False) -> dict[str, Any]:
    """Write target/model.onnx of an integer forward's folder; returns what was written and what it was checked by.

    verify: run it by onnxruntime and compare every value of the vectors first, where that package is there. qonnx: as
    `made` takes it; then also how many products have operands through Quant, and what is computed outside of them.
    """
    found = made(folder, qonnx=qonnx)
    said = f"onnx.checker {onnx.__version__}"
    if verify:
        try:
            numbers = compared(found)
            said += f"; onnxruntime gives all {numbers:,} numbers of the test vectors"
        except ImportError:
            said += "; not run, onnxruntime is missing (pip install 'moeq[onnx]')"
    data = found.model.SerializeToString()
    write_bytes(target / NAME, data)
    operators = sorted({node.op_type for node in found.model.graph.node})
    quant = {"quant_products": found.products, "standard_operators_only": list(found.standard)} if qonnx else {}
    return quant | {
        "file": str(target / NAME),
        "bytes": len(data),
        "opset": OPSET,
        "nodes": len(found.model.graph.node),
        "operators": operators,
        "check": said,
    }
