"""`moeq export --format onnx`: the integer forward of a run, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeq import pipeline
from moeq.errors import ArtifactError, FormatError, MissingError, RecipeError
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import export
from moeq.stages import onnx as onnx_stage
from moeq.stages.context import Context
from moeq.stages.needs import Sizes
from stages.test_reparam_vit import context_of, model_of, reparam

WANTED = ("reparam.integer.vectors=1", "reparam.integer.schemes=false", "eval.images.images=8")


@pytest.mark.cases(1)
@pytest.mark.parametrize("tasks", [1, 2])
def test_every_task_of_a_run_is_a_file(tmp_path: Path, tasks: int) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[onnx]'")
    model = model_of(tmp_path / "model", num_tasks=tasks)
    reparam(model, tmp_path / "run", *WANTED)
    found = onnx_stage.write(context_of(model, tmp_path / "run", *WANTED), verify=True)
    assert list(found) == [f"task-{task}" for task in range(tasks)]
    for told in found.values():
        assert Path(told["file"]).stat().st_size == told["bytes"]
        assert told["check"].startswith("onnx.checker ")
    files = {path.relative_to(tmp_path / "run" / "onnx").as_posix() for path in tmp_path.glob("run/onnx/**/*.onnx")}
    assert files == ({"model.onnx"} if tasks == 1 else {"task-0/model.onnx", "task-1/model.onnx"})


@pytest.mark.full
def test_qonnx_lies_beside(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[onnx]'")
    model = model_of(tmp_path / "model")
    reparam(model, tmp_path / "run", *WANTED)
    context = context_of(model, tmp_path / "run", *WANTED)
    (told,) = onnx_stage.write(context, verify=True, qonnx=True).values()
    assert told["file"] == str(tmp_path / "run" / "qonnx" / "model.onnx")
    assert told["quant_products"] > 10
    assert {"Quant", "MatMul"} <= set(told["operators"])
    assert not (tmp_path / "run" / "onnx").exists()


@pytest.mark.parametrize("name", ["onnx", "qonnx"])
def test_forms_of_the_integer_forward_stand_alone(name: str) -> None:
    from moeq.cli.stages import export
    from moeq.options import StageOptions

    with pytest.raises(RecipeError, match=f"{name} is of what `moeq reparam` makes; give --format {name} by itself"):
        export.__wrapped__(StageOptions(what=None, format=[name, "gguf"]))


@pytest.mark.parametrize("qonnx", [False, True])
def test_a_language_model_is_refused_with_what_there_is_for_one(tmp_path: Path, qonnx: bool) -> None:
    context = Context(recipe=load_recipe(None), model_name="bundled:tiny-mixtral", out=tmp_path, reporter=Reporter())
    refusal = r"^--format q?onnx: MixtralForCausalLM has no integer forward.*`--format compressed-tensors-w8a8` writes"
    with pytest.raises(FormatError, match=refusal):
        onnx_stage.write(context, verify=True, qonnx=qonnx)


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tmp_path / "model")
    context = context_of(model, tmp_path / "run", *WANTED)
    monkeypatch.setattr(onnx_stage, "find_spec", lambda _: object())
    with pytest.raises(ArtifactError, match="this stage has not been run; run `moeq reparam`"):
        onnx_stage.write(context, verify=True)
    reparam(model, tmp_path / "run", "reparam.integer=null")
    with pytest.raises(MissingError, match="this run has no integer forward"):
        onnx_stage.write(context, verify=True)
    monkeypatch.setattr(onnx_stage, "find_spec", lambda _: None)
    with pytest.raises(
        RecipeError, match=r"--format onnx: the package onnx is not installed; pip install 'moeq\[onnx\]'"
    ):
        onnx_stage.write(context, verify=True)
    assert not (tmp_path / "run" / "onnx").exists()


@pytest.mark.full
def test_a_run_writes_it_behind_its_checkpoint(tmp_path: Path) -> None:
    """export.formats names it, of a run with experts; what is there is not written again, what was damaged is."""
    pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[onnx]'")
    model = model_of(tmp_path / "model")
    small = ("losses.methods=[rtn]", "losses.group_size=8", "losses.bits=[4]", "assign.bits=4", "assign.method=uniform",
             "eval.compare=[]", "export.verify=false", "export.formats=[onnx]")  # fmt: skip
    context = context_of(model, tmp_path / "run", *WANTED, *small)
    assert (context.recipe.export.formats, context.recipe.export.onnx) == ([], True)
    stages = ("reparam", "profile", "losses", "assign", "quantize", "export")
    pipeline.run(context, stages)
    file = tmp_path / "run" / "onnx" / "model.onnx"
    size = export.needs(Sizes(context)).files["../onnx"]
    assert 0.85 < size / file.stat().st_size < 1.15
    assert pipeline.result_paths(context)["onnx"] == file.parent
    written = file.stat().st_mtime_ns
    assert all(one.skipped for one in pipeline.run(context, stages))
    assert file.stat().st_mtime_ns == written
    file.write_bytes(b"")
    assert [one.stage for one in pipeline.run(context, stages) if not one.skipped] == ["export"]
    assert file.stat().st_size > 1000
    with pytest.raises(RecipeError, match=r"export\.onnx needs reparam\.integer"):
        context_of(model, tmp_path / "run", *WANTED, "export.formats=[onnx]", "reparam.integer=null")
