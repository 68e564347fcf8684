"""`moeq reparam` and runs that begin with it: the folded checkpoint, its report, and what goes wrong by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import save
from packed_models import save_fp8
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from moeq import pipeline
from moeq.artifacts.run import FOLDED
from moeq.artifacts.stage import read_record
from moeq.errors import ArtifactError, ModelError, NotFiniteError, QuantizationError, RecipeError
from moeq.integers import folding
from moeq.integers.artifacts.reparam import SCHEMA, PerplexityRow, read_reparam
from moeq.models.source import open_source
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

SMALL = (
    "corpus.sequences=10", "corpus.sequence_length=32", "corpus.batch_size=5", "reparam.samples=8",
    "eval.perplexity.sequences=4", "eval.perplexity.sequence_length=32", "eval.compare=[]", "losses.group_size=16",
    "losses.methods=[rtn]", "assign.quantizer=rtn", "export.verify=false", "estimate.grid.inputs=[128]",
    "estimate.grid.outputs=[512]",
)  # fmt: skip
QUICK = "reparam.compare=false"


def context_of(model: Path | str, out: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


def reparam(model: Path | str, out: Path, *overrides: str) -> Path:
    """Run the stage alone; returns the folded checkpoint."""
    pipeline.run_alone(context_of(model, out, *overrides), "reparam")
    return out / "reparam" / FOLDED


def tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(2048, (3, 20), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model(ids).logits  # type: ignore[no-any-return]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_the_folded_checkpoint_is_the_same_model(tiny_mixtral: Path, tmp_path: Path) -> None:
    folded = reparam(tiny_mixtral, tmp_path)
    assert relative(logits(folded), logits(tiny_mixtral)) < 1e-5
    old, new = tensors(tiny_mixtral), tensors(folded)
    assert {name: (one.shape, one.dtype) for name, one in new.items()} == {
        name: (one.shape, one.dtype) for name, one in old.items()
    }
    changed = {name.rpartition("layers.")[2][2:] for name in old if not torch.equal(old[name], new[name])}
    experts = {f"block_sparse_moe.experts.{expert}.{name}.weight" for expert in range(5) for name in ("w1", "w3")}
    around = {"input_layernorm.weight", "post_attention_layernorm.weight", "block_sparse_moe.gate.weight"}
    assert changed == experts | around | {f"self_attn.{name}_proj.weight" for name in "qkv"}
    assert {path.name for path in tiny_mixtral.glob("*.json")} <= {path.name for path in folded.glob("*.json")}


def test_the_report_says_what_was_done(tiny_mixtral: Path, tmp_path: Path) -> None:
    reparam(tiny_mixtral, tmp_path, "reparam.range=percentile", "reparam.percentile=99")
    report = read_reparam(tmp_path / "reparam")
    assert [norm.path for norm in report.norms] == [
        f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    assert {norm.mode for norm in report.norms} == {"scale-only"}
    assert {norm.why for norm in report.norms} == {"the norm has no bias"}
    assert all(norm.r1[0] < 1 < norm.r1[1] and norm.r2 == (0, 0) for norm in report.norms)
    assert [(one.weight, one.axis) for one in report.norms[1].consumers] == [
        ("model.layers.0.mlp.experts.gate_up_proj", 2), ("model.layers.0.mlp.gate.weight", 1),
    ]  # fmt: skip
    assert report.left == {"model.norm": "not among reparam.norms"}
    assert 0 < report.float32.error < 1e-5
    assert (report.percentile, report.samples, report.tokens) == (99, 8, 256)
    reparam(tiny_mixtral, tmp_path / "whole", QUICK)
    whole = read_reparam(tmp_path / "whole" / "reparam")
    assert all(cut.scale < 0.95 * norm.scale for cut, norm in zip(report.norms, whole.norms, strict=True))
    assert report.perplexity is not None
    assert abs(report.perplexity.w8a8_folded / report.perplexity.w8a8 - 1) < 0.05
    assert report.perplexity.tokens == 4 * 31
    schema = json.loads((tmp_path / "reparam" / SCHEMA).read_text("utf-8"))
    assert set(schema["properties"]) == set(type(report).model_fields)


def test_zero_points_go_into_the_biases_on_disk(tmp_path: Path) -> None:
    model = save("phimoe", tmp_path / "model", attention_bias=True)
    folded = reparam(model, tmp_path / "run", QUICK, "reparam.norms=all")
    report = read_reparam(tmp_path / "run" / "reparam")
    modes = {norm.path: norm.mode for norm in report.norms}
    assert modes["model.layers.1.input_layernorm"] == modes["model.norm"] == "asymmetric"
    assert modes["model.layers.1.post_attention_layernorm"] == "scale-only"
    assert relative(logits(folded), logits(model)) < 1e-5
    old, new = tensors(model), tensors(folded)
    assert not torch.equal(old["model.layers.1.self_attn.k_proj.bias"], new["model.layers.1.self_attn.k_proj.bias"])
    alone = reparam(model, tmp_path / "scales", QUICK, "reparam.bias=false")
    assert torch.equal(old["model.norm.bias"], tensors(alone)["model.norm.bias"])
    assert {norm.mode for norm in read_reparam(tmp_path / "scales" / "reparam").norms} == {"scale-only"}


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["gpt_oss", "aria_text", "qwen3_next", "deepseek_v2"])
def test_families_keep_their_names_on_disk(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path / "model")
    folded = reparam(model, tmp_path / "run", QUICK)
    assert relative(logits(folded), logits(model)) < 1e-5
    assert {name: one.shape for name, one in tensors(folded).items()} == {
        name: one.shape for name, one in tensors(model).items()
    }


def test_half_precision_is_kept_or_widened(tiny_qwen: Path, tmp_path: Path) -> None:
    kept = reparam(tiny_qwen, tmp_path / "kept", QUICK)
    wide = reparam(tiny_qwen, tmp_path / "wide", QUICK, "reparam.dtype=float32")
    assert {one.dtype for one in tensors(kept).values()} == {torch.bfloat16}
    assert {one.dtype for one in tensors(wide).values()} == {torch.float32}
    assert json.loads((wide / "config.json").read_text("utf-8"))["dtype"] == "float32"
    errors = [read_reparam(tmp_path / name / "reparam") for name in ("kept", "wide")]
    assert errors[0].stored.error > 1e-4
    assert errors[1].stored.error < 1e-5
    assert errors[0].float32 == errors[1].float32
    assert relative(logits(wide), logits(tiny_qwen)) < 1e-5


def test_a_checkpoint_that_is_dequantized_while_loading(tmp_path: Path) -> None:
    plain, packed = save_fp8(tmp_path, "deepseek_v3", torch.float32)
    folded = reparam(packed, tmp_path / "run", QUICK, "reparam.dtype=float32")
    assert "quantization_config" not in json.loads((folded / "config.json").read_text("utf-8"))
    assert {one.dtype for one in tensors(folded).values()} == {torch.float32}
    assert relative(logits(folded), logits(plain)) < 1e-5


def copied(folder: Path, target: Path) -> dict[str, Tensor]:
    """Copy a model's folder; its tensors, which the caller changes and saves there."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return load_file(target / "model.safetensors")


def test_padding_is_no_sample(tiny_mixtral: Path, tmp_path: Path) -> None:
    """The padding token lies along one channel, where it would stand out."""
    model = tmp_path / "model"
    held = copied(tiny_mixtral, model)
    held["model.embed_tokens.weight"][2] = 0
    held["model.embed_tokens.weight"][2, 5] = 1
    save_file(held, model / "model.safetensors", {"format": "pt"})
    text = tmp_path / "short.jsonl"
    text.write_text("".join(json.dumps({"text": "one two three " * count}) + "\n" for count in (1, 2, 3, 4)))
    settings = (f"corpus.source={text}", "corpus.packed=false", "corpus.sequences=4")
    reparam(model, tmp_path / "run", QUICK, *settings)
    report = read_reparam(tmp_path / "run" / "reparam")
    assert (report.samples, report.tokens) == (4, 42)
    assert report.norms[0].high[1] < 5  # the padding's is the root of 40


@pytest.mark.full
def test_a_run_goes_on_with_the_folded_model(tiny_mixtral: Path, tmp_path: Path) -> None:
    context = context_of(tiny_mixtral, tmp_path, QUICK)
    first = pipeline.run(context)
    assert [one.stage for one in first][:2] == ["reparam", "profile"]
    given, folded = (open_source(str(path)).stamp().digest for path in (tiny_mixtral, tmp_path / "reparam" / FOLDED))
    assert read_record(tmp_path / "reparam", "reparam").model.digest == given
    records = [one.record for one in first[1:]]
    assert {record.model.digest for record in records} == {folded}
    assert {record.model.name for record in records} == {tiny_mixtral.name}
    again = pipeline.run(context_of(tiny_mixtral, tmp_path, QUICK))
    assert all(one.skipped for one in again)
    with safe_open(tmp_path / "checkpoint" / "model-00001-of-00001.safetensors", "pt") as file:
        norm = file.get_tensor("model.layers.0.input_layernorm.weight")
    assert torch.equal(norm, tensors(tmp_path / "reparam" / FOLDED)["model.layers.0.input_layernorm.weight"])


@pytest.mark.full
def test_what_changes_in_the_section_is_made_again(tiny_mixtral: Path, tmp_path: Path) -> None:
    stages = ("reparam", "profile")
    pipeline.run(context_of(tiny_mixtral, tmp_path, QUICK), stages)
    compared = pipeline.run(context_of(tiny_mixtral, tmp_path, "reparam.compare=true"), stages)
    assert [one.skipped for one in compared] == [False, True]
    narrow = pipeline.run(context_of(tiny_mixtral, tmp_path, QUICK, "reparam.bits=4"), stages)
    assert [one.skipped for one in narrow] == [False, True]  # scales alone fold the same at any width
    fewer = pipeline.run(context_of(tiny_mixtral, tmp_path, QUICK, "reparam.samples=2"), stages)
    assert [one.skipped for one in fewer] == [False, False]
    without = pipeline.run(context_of(tiny_mixtral, tmp_path, "reparam=null"), stages)
    assert [(one.stage, one.skipped) for one in without] == [("profile", False)]


def test_a_stage_alone_wants_the_folded_model(tiny_mixtral: Path, tiny_qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="run `moeq reparam`"):
        pipeline.run_alone(context_of(tiny_mixtral, tmp_path, QUICK), "profile")
    reparam(tiny_mixtral, tmp_path, QUICK)
    assert not pipeline.run_alone(context_of(tiny_mixtral, tmp_path, QUICK), "profile").skipped
    with pytest.raises(ArtifactError, match="made from another model"):
        pipeline.run_alone(context_of(tiny_qwen, tmp_path, QUICK), "profile")


def test_without_the_section_its_defaults_are_used(tiny_mixtral: Path, tmp_path: Path) -> None:
    context = context_of(tiny_mixtral, tmp_path, "reparam=null", "eval.perplexity=null")
    assert not pipeline.run_alone(context, "reparam").skipped
    assert read_reparam(tmp_path / "reparam").samples == 10  # all that the corpus has


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "overrides", "error", "message"),
    [
        ("qwen4_exp_text", (), ModelError, "Qwen4ExpForCausalLM: no norm feeds linears alone"),
        ("minimax", (), ModelError, r"layers\.0\.input_layernorm: .* also used by add in model\.layers\.0; name the"),
        ("jetmoe", ("reparam.norms=all",), ModelError, r"model\.norm: .*lm_head\.weight.* used by embedding"),
        ("mixtral", ("reparam.norms=[model.layers.*.input_norm]",), RecipeError, "no norm is called .*did you mean"),
        ("olmoe", ("reparam.norms=[model.layers.0.self_attn.q_norm]",), ModelError, "q_norm: .* no linear takes"),
    ],
)
def test_what_cannot_be_folded_is_named(
    family: str, overrides: tuple[str, ...], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model = save(family, tmp_path / "model")
    with pytest.raises(error, match=message) as caught:
        reparam(model, tmp_path / "run", QUICK, *overrides)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "reparam" / FOLDED).exists()


def test_norms_by_pattern(tiny_mixtral: Path, tmp_path: Path) -> None:
    reparam(tiny_mixtral, tmp_path, QUICK, "reparam.norms=['model.layers.*.input_layernorm']")
    report = read_reparam(tmp_path / "reparam")
    assert [norm.path for norm in report.norms] == [f"model.layers.{layer}.input_layernorm" for layer in (0, 1)]
    assert report.left["model.layers.0.post_attention_layernorm"] == "not among reparam.norms"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0.0, QuantizationError, r"layers\.1\.input_layernorm: channel 3 .* always 0 in calibration.*reparam\.norms"),
        (float("nan"), NotFiniteError, r"weights are not finite.*layers\.1\.input_layernorm|not finite"),
    ],
)
def test_a_damaged_channel_is_named(
    value: float, error: type[Exception], message: str, tiny_mixtral: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    held = copied(tiny_mixtral, model)
    held["model.layers.1.input_layernorm.weight"][3] = value
    save_file(held, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(error, match=message) as caught:
        reparam(model, tmp_path / "run", QUICK)
    assert "\n" not in str(caught.value)


def test_a_wrong_fold_is_caught_and_leaves_nothing(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = folding.folded_linear

    def wrong(weight: Tensor, bias: Tensor | None, fold: Any, *, axis: int) -> Any:
        matrix, shifted = right(weight, bias, fold, axis=axis)
        return matrix * 1.001, shifted

    monkeypatch.setattr(folding, "folded_linear", wrong)
    with pytest.raises(QuantizationError, match="logits are off by"):
        reparam(tiny_mixtral, tmp_path, QUICK)
    assert not list((tmp_path / "reparam").glob("*checkpoint*"))


def int8_of_the_bundled_model(out: Path, *overrides: str) -> PerplexityRow:
    recipe = load_recipe(None, ["corpus.sequences=32", *overrides])
    context = Context(recipe=recipe, model_name="bundled:tiny-mixtral", out=out, reporter=Reporter(quiet=True))
    pipeline.run_alone(context, "reparam")
    report = read_reparam(out / "reparam")
    assert report.float32.error < 1e-5
    assert report.perplexity is not None
    assert report.perplexity.original < report.perplexity.w8a8
    return report.perplexity


@pytest.mark.full
def test_the_fold_helps_where_activations_are_narrow(tmp_path: Path) -> None:
    found = int8_of_the_bundled_model(
        tmp_path, "corpus.sequence_length=256", "reparam.bits=6", "eval.perplexity.sequences=3"
    )
    assert found.w8a8_folded < 0.998 * found.w8a8


@pytest.mark.full
def test_int8_of_the_bundled_model_is_no_worse_folded(tmp_path: Path) -> None:
    found = int8_of_the_bundled_model(tmp_path)
    assert found.w8a8 < 1.05 * found.original
    assert found.w8a8_folded < 1.001 * found.w8a8
