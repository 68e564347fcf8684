"""An assignment's widths as llama-quantize takes them; its own quantizer gives every stack the type that is meant."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import peers
import pytest
from made_sources import MadeSource, save_model
from typer.testing import CliRunner

from moeq.artifacts.assignment import Assignment, ExpertChoice, LayerAssignment, Width, write_assignment
from moeq.cli import app
from moeq.errors import ArtifactError, FormatError, RecipeError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.gguf import FILE
from moeq.exporters.tensor_types import TYPES, told, types_of

PARTS = ("gate_proj", "up_proj", "down_proj")
LAYERS = [
    ("model.layers.0.mlp.experts", [2, 2]),
    ("model.layers.1.mlp.experts", [dict(zip(PARTS, (2, 3, 4), strict=True))] * 2),
]
WANTED = {
    "blk.0.ffn_gate_exps.weight": "Q2_K", "blk.0.ffn_up_exps.weight": "Q2_K", "blk.0.ffn_down_exps.weight": "Q2_K",
    "blk.1.ffn_gate_exps.weight": "Q2_K", "blk.1.ffn_up_exps.weight": "Q3_K", "blk.1.ffn_down_exps.weight": "Q4_K",
}  # fmt: skip


def assigned(path: Path, layers: list[tuple[str, list[Width]]]) -> Path:
    def choice(width: Width) -> ExpertChoice:
        apart = None if isinstance(width, int) else width
        bits = width if isinstance(width, int) else max(width.values())
        return ExpertChoice(tier="host", bits=bits, projections=apart, quantizer="rtn", importance=1.0)

    made = [LayerAssignment(name=name, experts=tuple(map(choice, widths))) for name, widths in layers]
    write_assignment(path, Assignment(name="made", method="optimal", group_size=64, layers=tuple(made)))
    return path


def found(patterns: dict[str, str], name: str) -> str | None:
    """The type of a tensor, as llama.cpp looks for it."""
    return next((kind for pattern, kind in patterns.items() if re.search(pattern.lower(), name)), None)


def test_every_stack_has_the_type_of_its_width() -> None:
    patterns = types_of(LAYERS, "k")
    assert {name: str(found(patterns, name)).upper() for name in WANTED} == WANTED
    for other in ("blk.0.ffn_gate_inp.weight", "blk.10.ffn_gate_exps.weight", "blk.0.ffn_gate_shexp.weight"):
        assert found(patterns, other) is None
    assert not any(re.search(r"[\sA-Z=]", pattern) for pattern in patterns), "as the command line is read"


def test_names_are_llama_cpps_own() -> None:
    gguf = peers.module("gguf")
    known = {kind.name.lower() for kind in gguf.GGMLQuantizationType}
    assert {name.lower() for names in TYPES.values() for name in names.values()} <= known


def test_mixes_and_widths_without_a_type_are_refused() -> None:
    mixed: list[tuple[str, list[Width]]] = [("model.layers.3.mlp.experts", [2, 4, 3])]
    with pytest.raises(FormatError, match=r"2, 3, 4 bits among its experts; .* one type for all; .* --widen"):
        types_of(mixed, "k")
    assert {*types_of(mixed, "k", widen=True).values()} == {"q4_K"}
    narrow: list[tuple[str, list[Width]]] = [("model.layers.3.mlp.experts", [1])]
    with pytest.raises(FormatError, match="1 bits; no type of k is as narrow; take iq"):
        types_of(narrow, "k")
    assert {*types_of(narrow, "iq").values()} == {"iq1_m"}
    with pytest.raises(FormatError, match="no numbered layer"):
        types_of([("experts", [4])], "k")
    with pytest.raises(FormatError, match="7 bits; no type of iq is as narrow"):
        types_of([("model.layers.0.mlp.experts", [7])], "iq")
    own = types_of([("model.layers.0.mlp.experts", [2])], "iq", codebook="iq-s")
    assert {*own.values()} == {"iq2_s"}, "the types that a run of i-quants has"


def test_an_assignment_a_run_and_a_checkpoint_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "assign").mkdir()
    file = assigned(tmp_path / "assign" / "assignment.json", LAYERS)
    model = save_model(tmp_path / "model", "qwen3_moe")
    source = MadeSource(model, lambda layer, expert, part: 2 if layer == 0 else 2 + PARTS.index(part))
    write("native", source, tmp_path / "checkpoint", WriteOptions())
    lines = {told(path, "k")["arguments"] for path in (file, tmp_path, tmp_path / "checkpoint")}
    assert len(lines) == 1
    assert len(shlex.split(lines.pop())) == 10, "five patterns"
    with pytest.raises(ArtifactError, match="no assignment of widths"):
        told(model, "k")


def test_the_command(tmp_path: Path) -> None:
    file, out = assigned(tmp_path / "assignment.json", LAYERS), tmp_path / "types.txt"
    words = ["inspect", str(file), "--tensor-types", "iq", "--out", str(out), "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    summary = json.loads(done.stdout)
    assert shlex.split(summary["arguments"]) == ["--tensor-type-file", str(out)]
    assert summary["needs_an_imatrix"] == "iq2_xs"
    assert out.read_text("utf-8").split() == [f"{key}={kind}" for key, kind in types_of(LAYERS, "iq").items()]
    with pytest.raises(RecipeError, match="is there already"):
        told(file, "iq", out)


def test_llama_cpps_quantizer_follows(tmp_path: Path) -> None:
    peers.interpreter("llama-cpp-python")
    gguf = peers.module("gguf")
    wide = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "norm_topk_prob": True}
    model = save_model(tmp_path / "model", "qwen3_moe", **wide)
    source = MadeSource(model, lambda *place: 16)
    write("llama.cpp", source, tmp_path / "plain", WriteOptions())
    job = {
        "source": str(tmp_path / "plain" / FILE),
        "out": str(tmp_path / "out.gguf"),
        "types": {
            pattern: int(gguf.GGMLQuantizationType[name.upper()]) for pattern, name in types_of(LAYERS, "k").items()
        },
        "ftype": int(gguf.LlamaFileType.MOSTLY_Q8_0),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    peers.run("llama-cpp-python", Path(__file__).parent / "peer_quantize.py", tmp_path / "job.json")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert {name: kinds[name] for name in WANTED} == WANTED
    assert kinds["blk.0.attn_q.weight"] == "Q8_0"
