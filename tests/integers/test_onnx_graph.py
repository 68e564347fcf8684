"""The integer forward as ONNX: every number of the test vectors from onnxruntime, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from integer_models import made, pixels
from integers.test_integer_files import CASES, written

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


def test_qonnx_reads_the_bits(folder: Path) -> None:
    wrapper = pytest.importorskip("qonnx.core.modelwrapper", reason="qonnx is not installed: pip install qonnx")
    model = wrapper.ModelWrapper(graphs.made(folder).model)
    assert str(model.get_tensor_datatype("blocks.0.attention.codes").name) == "UINT4"
    assert str(model.get_tensor_datatype("blocks.0.query").name) == "INT8"
    assert str(model.get_tensor_datatype("tokens").name).startswith("INT")
