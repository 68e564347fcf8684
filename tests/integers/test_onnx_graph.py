"""The integer forward as ONNX: every number of the test vectors from onnxruntime, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from integer_models import made, pixels
from integers.test_integer_files import CASES, written
from tiny_models import FULL

from moeq.errors import ArtifactError, FormatError
from moeq.integers.artifacts.integer import KINDS
from moeq.integers.forward.description import describe
from moeq.integers.forward.program import pixel_codes
from moeq.integers.forward.run import run
from moeq.integers.forward.saved import read, write
from moeq.integers.forward.schemes import program_of
from moeq.recipe import IntegerSection

onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

from moeq.integers.onnx_graph import kinds  # noqa: E402
from moeq.integers.onnx_graph import write as graphs  # noqa: E402
from moeq.integers.onnx_graph.graph import OPSET, Graph  # noqa: E402
from moeq.integers.onnx_graph.qonnx import DOMAIN, QUANT, VERSION, quant_function  # noqa: E402


def session(model: Any) -> Any:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("integer") / "out", *CASES["moe"])


@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_gives_every_number_of_the_vectors(name: str, tmp_path: Path) -> None:
    found = graphs.made(written(tmp_path / "out", *CASES[name]))
    numbers = sum(tensor.numel() for value, tensor in found.vectors.items() if value != "pixels")
    assert graphs.compared(found) == numbers > 20_000
    assert [one.version for one in found.model.opset_import] == [OPSET]
    assert {one.domain for one in found.model.opset_import} == {""}


def test_other_images_and_other_numbers_of_them_give_the_same_logits(folder: Path) -> None:
    model = made("moe")
    images = pixels(model, 7, seed=9)
    program = program_of(describe(model), pixels(model, 16), CASES["moe"][1])
    codes = pixel_codes(program, images)
    wanted = run(program, codes)["logits"].numpy()
    runner = session(graphs.made(folder).model)
    for count in (1, 7):
        (logits,) = runner.run(None, {"pixels": codes[:count].numpy().astype(np.uint8)})
        assert np.array_equal(logits, wanted[:count])


def test_experts_that_nobody_chooses_are_given_nothing(tmp_path: Path) -> None:
    model = made("moe")
    with torch.no_grad():
        model.blocks[1].moe.router.weight[2:] = 0
        model.blocks[1].moe.router.weight[:2] *= 30
    program = program_of(describe(model), pixels(model, 16), IntegerSection())
    values = run(program, pixel_codes(program, pixels(model, 2, seed=1)))
    write(tmp_path / "out", program, values, {}, None)
    chosen = values["blocks.1.router.index"].unique()
    assert len(chosen) < 5
    assert graphs.compared(graphs.made(tmp_path / "out")) > 0


def test_a_file_is_written_with_what_it_was_checked_by(folder: Path, tmp_path: Path) -> None:
    told = graphs.write(folder, tmp_path)
    model = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert told["bytes"] == (tmp_path / "model.onnx").stat().st_size
    assert "onnxruntime gives all " in told["check"]
    assert told["nodes"] == len(model.graph.node)
    assert {"MatMulInteger", "Where", "ScatterND", "TopK"} <= set(told["operators"])
    assert "onnxruntime" not in graphs.write(folder, tmp_path, verify=False)["check"]


def test_values_have_their_types_and_are_annotated_with_their_bits(folder: Path) -> None:
    manifest, program, _ = read(folder)
    model = graphs.made(folder).model
    types = {info.name: info.type.tensor_type.elem_type
             for info in (*model.graph.value_info, *model.graph.input, *model.graph.output)}  # fmt: skip
    bits = {one.tensor_name: one.quant_parameter_tensor_names[0].value for one in model.graph.quantization_annotation}
    for stored in manifest.values:
        assert types[stored.name] == graphs.TYPES[stored.dtype], stored.name
        assert bits[stored.name] == f"{'' if stored.signed else 'U'}INT{stored.bits}"
    assert bits["blocks.0.attention.codes"] == "UINT4"
    assert set(bits) == set(program.values)


def test_a_number_that_differs_is_named(folder: Path) -> None:
    found = graphs.made(folder)
    name = "blocks.0.query"
    found.vectors[name][1, 2, 3] += 1
    with pytest.raises(ArtifactError, match=r"another value blocks\.0\.query than the vectors, first at \[1, 2, 3\]"):
        graphs.compared(found)


def test_what_operators_cannot_carry_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    data = json.loads((copy / "manifest.json").read_text())
    for value in data["values"]:
        if value["name"] == "blocks.0.norm1":
            value["bits"] = 9
    (copy / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(FormatError, match=r"onnx: blocks\.0\.query: value blocks\.0\.norm1 has 9 bits, ONNX's MatMul"):
        graphs.made(copy)


def test_every_kind_of_operation_has_its_nodes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert [kind for kind in KINDS if not hasattr(kinds.Kinds, f"_{kind}")] == []
    monkeypatch.delattr(kinds.Kinds, "_router")
    with pytest.raises(FormatError, match=r"blocks\.1\.router: no ONNX operators are known .* of kind router"):
        graphs.made(folder)


@pytest.mark.parametrize("shift", [0, 1, 7, 15, 40])
def test_rounded_shifts_are_those_of_the_document(shift: int) -> None:
    graph = Graph({})
    x = np.random.default_rng(shift).integers(-(2**51), 2**51, 500)
    x[:4] = [0, -1, 1, -(2**shift)]
    out = graph.round_shift("x", shift)
    kind = onnx.TensorProto.INT64
    made = onnx.helper.make_graph(
        graph.nodes or [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", kind, [None])],
        [onnx.helper.make_tensor_value_info(out if graph.nodes else "y", kind, [None])],
        initializer=list(graph.constants.values()),
    )
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=8)
    (found,) = session(model).run(None, {"x": x})
    assert found.tolist() == [(int(one) + ((1 << shift) >> 1)) >> shift for one in x]


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", CASES)
def test_products_through_quant_give_every_number(name: str, tmp_path: Path) -> None:
    """The file's own function of Quant runs in onnxruntime; every operand of a product states its bits."""
    found = graphs.made(written(tmp_path / "out", *CASES[name]), qonnx=True)
    numbers = sum(tensor.numel() for value, tensor in found.vectors.items() if value != "pixels")
    assert graphs.compared(found) == numbers
    nodes = found.model.graph.node
    quants = {node.output[0]: node for node in nodes if node.op_type == QUANT}
    products = [node for node in nodes if node.op_type == "MatMul" and node.input[0] in quants]
    assert len(products) == found.products > 10
    assert all(one in quants for node in products for one in node.input)
    assert "MatMulInteger" not in {node.op_type for node in nodes}
    assert {node.domain for node in quants.values()} == {DOMAIN}
    widths = {
        side: [attributes(quants[node.input[place]])["narrow"] for node in products]
        for place, side in enumerate(("a", "b"))
    }
    of_two_values = sum(operation.kind.endswith("_attention") for operation in found.manifest.operations)
    of_two_values *= 2 if "uniform" in name else 1
    assert sum(widths["a"]) == 0, "values take the whole range of two's complement"
    assert sum(widths["b"]) == len(products) - of_two_values, "weights leave the lowest code out"


def attributes(node: Any) -> dict[str, Any]:
    return {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}


@pytest.mark.parametrize(
    ("signed", "narrow", "bits"), [(1, 0, 8), (1, 1, 8), (0, 0, 4), (0, 1, 4), (1, 1, 2), (1, 0, 3)]
)
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.3])
def test_quant_is_that_of_qonnx(signed: int, narrow: int, bits: int, scale: float) -> None:
    """Ends as in QONNX's definition: signed -2^(b-1) + narrow to 2^(b-1) - 1, unsigned 0 to 2^b - 1 - narrow."""
    x = np.arange(-150, 150, dtype=np.float32) * np.float32(0.37)
    low, high = (-(2 ** (bits - 1)) + narrow, 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1 - narrow)
    wanted = np.round(np.clip(x / np.float32(scale), low, high)) * np.float32(scale)
    names = ("x", "scale", "zero", "bits")
    node = onnx.helper.make_node(
        QUANT, names, ["y"], domain=DOMAIN, signed=signed, narrow=narrow, rounding_mode="ROUND"
    )
    info = [onnx.helper.make_tensor_value_info(name, 1, [None] if name in "xy" else []) for name in (*names, "y")]
    graph = onnx.helper.make_graph([node], "g", info[:4], info[4:])
    imports = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, VERSION)]
    model = onnx.helper.make_model(graph, opset_imports=imports, functions=[quant_function(OPSET)], ir_version=8)
    fed = {name: np.array(value, np.float32) for name, value in zip(names, (x, scale, 0, bits), strict=True)}
    (found,) = session(model).run(None, fed)
    assert np.array_equal(found, wanted.astype(np.float32))
    if find_spec("qonnx") is not None:
        from qonnx.custom_op.general.quant import quant

        theirs = quant(x, fed["scale"], fed["zero"], fed["bits"], signed, narrow, "ROUND")
        assert np.array_equal(found, theirs.astype(np.float32))


def test_sums_beyond_float32_are_refused_by_name(folder: Path) -> None:
    program = read(folder)[1]
    graph = Graph(program.values, qonnx=True)
    graph.operation = "blocks.0.down"
    one = graph.constant("weight", np.full((1040, 1), 127, np.int8))
    with pytest.raises(FormatError, match=r"qonnx: blocks\.0\.down: its sums can reach 16,906,240, float32 of QONNX's"):
        graph.product("x", one, "blocks.0.query")
    graph.product("x", graph.constant("less", np.full((1032, 1), 127, np.int8)), "blocks.0.query")
    graph.inner = 1 << 11
    with pytest.raises(FormatError, match="its sums can reach 33,554,432"):
        graph.product("x", "y", "blocks.0.query", right_value="blocks.0.key")
    assert graph.products == 1


def test_what_is_outside_of_quant_is_told(folder: Path, tmp_path: Path) -> None:
    told = graphs.write(folder, tmp_path, qonnx=True)
    model = onnx.load(tmp_path / "model.onnx")
    assert told["quant_products"] == sum(node.op_type == QUANT for node in model.graph.node) / 2
    assert told["standard_operators_only"] == ["layer_norm", "log_attention", "table", "router", "experts"]
    assert "onnxruntime gives all " in told["check"]


def test_qonnx_runs_products_as_onnxruntime_does(folder: Path) -> None:
    graph = Graph(read(folder)[1].values, qonnx=True)
    generator = np.random.default_rng(3)
    weight, x = generator.integers(-7, 8, (24, 5)), generator.integers(-128, 128, (3, 24))
    out = graph.product("x", graph.constant("weight", weight.astype(np.int8)), "blocks.0.query")
    info = [onnx.helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in
            (("x", onnx.TensorProto.INT8, [3, 24]), (out, onnx.TensorProto.INT64, [3, 5]))]  # fmt: skip
    whole = onnx.helper.make_graph(graph.nodes, "g", info[:1], info[1:], initializer=list(graph.constants.values()))
    imports = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, VERSION)]
    model = onnx.helper.make_model(whole, opset_imports=imports, functions=[quant_function(OPSET)], ir_version=8)
    (found,) = session(model).run(None, {"x": x.astype(np.int8)})
    assert np.array_equal(found, x @ weight)
    execution = pytest.importorskip("qonnx.core.onnx_exec", reason="qonnx is not installed: pip install qonnx")
    from qonnx.core.modelwrapper import ModelWrapper
    from qonnx.transformation.infer_datatypes import InferDataTypes
    from qonnx.transformation.infer_shapes import InferShapes

    theirs = ModelWrapper(model).transform(InferShapes()).transform(InferDataTypes())
    assert np.array_equal(execution.execute_onnx(theirs, {"x": x.astype(np.int8)})[out], found)
    kinds = {str(theirs.get_tensor_datatype(node.output[0])) for node in theirs.graph.node if node.op_type == QUANT}
    assert kinds == {"INT8", "INT4"}, "values of 8 bits, weights of 4"


@pytest.mark.skipif(not FULL, reason="two minutes: qonnx makes a session a node; MOEQ_FULL=1")
def test_qonnx_runs_the_whole_graph(folder: Path) -> None:
    execution = pytest.importorskip("qonnx.core.onnx_exec", reason="qonnx is not installed: pip install qonnx")
    from qonnx.core.modelwrapper import ModelWrapper
    from qonnx.transformation.infer_shapes import InferShapes

    found = graphs.made(folder, qonnx=True)
    for info in (*found.model.graph.input, *found.model.graph.output, *found.model.graph.value_info):
        info.type.tensor_type.shape.dim[0].dim_value = len(found.vectors["pixels"])
    model = ModelWrapper(found.model).transform(InferShapes())
    given = {"pixels": found.vectors["pixels"].numpy().astype(np.uint8)}
    values = execution.execute_onnx(model, given, return_full_exec_context=True)
    for name, vector in found.vectors.items():
        assert np.array_equal(values[name], vector.numpy()), name


def test_qonnx_reads_the_bits(folder: Path) -> None:
    wrapper = pytest.importorskip("qonnx.core.modelwrapper", reason="qonnx is not installed: pip install qonnx")
    model = wrapper.ModelWrapper(graphs.made(folder).model)
    assert str(model.get_tensor_datatype("blocks.0.attention.codes").name) == "UINT4"
    assert str(model.get_tensor_datatype("blocks.0.query").name) == "INT8"
    assert str(model.get_tensor_datatype("tokens").name).startswith("INT")
