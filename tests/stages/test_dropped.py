"""Dropped experts from the recipe to the checkpoint: bytes, logits, refining, hand edits, other formats, refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import save
from manifest_reader import read_expert
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from moeq import inspection, pipeline
from moeq.artifacts.losses import WHOLE
from moeq.artifacts.manifest import read_manifest
from moeq.bundled import bundled_path
from moeq.conversion import convert
from moeq.errors import ArtifactError, AssignmentError, BudgetError, FormatError, MoeqError
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.readers import open_packed
from moeq.models.forward import forward
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.runtime.packed_experts import PackedExperts
from moeq.stages import assign, assign_ahead, evaluate, quantize
from moeq.stages.context import Context
from moeq.stages.replicas import load_losses
from moeq.verification.verify import Options, verify
from moeq_kernels.choice import choosing
from moeq_kernels.dropped import WithoutDropped
from moeq_kernels.packed import PackedWeight

SMALL = (
    "corpus.sequences=24", "corpus.sequence_length=64", "losses.group_size=64", "losses.bits=[1,2,3,4]",
    "eval.perplexity.sequences=4", "eval.perplexity.sequence_length=48", "eval.compare=[]",
    "estimate.grid.inputs=[128]", "estimate.grid.outputs=[512]", "estimate.hardware=paper-ctxmoe",
    "estimate.geometry=[mixtral-8x7b]",
)  # fmt: skip
DROPPING = "assign={method: optimal, bits_per_weight: 1.6, granularity: projection, drop: true}"
UNIFORM = "assign={method: uniform, bits: 2}"
STAGES = ("profile", "losses", "assign", "quantize", "export")
IDS = torch.arange(3, 63).reshape(2, 30)


def make(model: str | Path, out: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """The whole way on the bundled model."""
    context = make(bundled_path("tiny-mixtral"), tmp_path_factory.mktemp("run"), DROPPING)
    pipeline.run(context, tuple(pipeline.BY_NAME))
    return context


def dropped(context: Context) -> list[tuple[int, int]]:
    layers = assign.load(context).layers
    return [(number, e) for number, layer in enumerate(layers) for e, one in enumerate(layer.experts) if one.is_dropped]


def edit(context: Context, *places: tuple[int, int]) -> None:
    """Drop experts by hand."""
    path = context.directory("assign") / assign.NAME
    content = json.loads(path.read_text())
    for layer, expert in places:
        content["layers"][layer]["experts"][expert] |= {"bits": 0, "quantizer": None}
        content["layers"][layer]["experts"][expert].pop("projections", None)
    path.write_text(json.dumps(content))


@pytest.mark.full
def test_nothing_is_stored_of_them(finished: Context) -> None:
    gone, folder = dropped(finished), finished.directory("export")
    assert 0 < len(gone) < 16
    manifest = read_manifest(folder)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["format_version"] == 3
    assert "is dropped" in manifest.layout["description"]
    names = [layer.name for layer in manifest.layers]
    keys = {key for path in folder.glob("experts-*.safetensors") for key in safe_open(path, "pt").keys()}  # noqa: SIM118
    for layer, expert in gone:
        placed = manifest.layers[layer].experts[expert]
        assert (placed.bits, placed.replicas, config["experts"][names[layer]][expert]) == (0, (), 0)
        assert not [key for key in keys if key.startswith(f"{names[layer]}.{expert}.")]
    summary = pipeline.read_record(finished.directory("assign"), "assign").summary
    found = inspection.inspect(folder)
    assert found["experts_by_code_bits"]["dropped"] == summary["experts_by_code_bits"]["dropped"] == len(gone)
    assert summary["expert_bytes"] == manifest.totals.placed_expert_bytes == found["placed_expert_bytes"]
    assert found["bits_per_weight"] <= 1.6
    assert summary["proven"]
    page = (finished.directory("report") / "report.html").read_text()
    assert "dropped" in page


def test_the_checkpoint_is_the_model_without_them(finished: Context, tmp_path: Path) -> None:
    gone = dropped(finished)
    plain = make(finished.model_name, finished.out, DROPPING, "dtype=float32")
    for policy in ("reference", "fixed"):
        with choosing(policy):
            packed = AutoModelForCausalLM.from_pretrained(finished.directory("export"), dtype=torch.float32)
        modules = [module for module in packed.modules() if isinstance(module, PackedExperts)]
        with torch.no_grad(), plain.model.overlay() as overlay:
            logits = forward(packed, IDS).logits
            model = evaluate.replaced(plain, overlay, assign.load(plain))
            torch.testing.assert_close(logits, forward(model, IDS).logits, rtol=1e-4, atol=1e-4)
            for layer, expert in gone:
                of = plain.model.layers[layer]
                weights = of.kind.weights(model.get_submodule(of.name), slice(expert, expert + 1))
                assert not any(stack.any() for stack in weights.values())
                assert isinstance(modules[layer].prepared, WithoutDropped)
    packed.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(forward(again, IDS).logits, logits)
    assert packed.generate(IDS[:1, :5], max_new_tokens=4, do_sample=False).shape == (1, 9)


def test_a_reader_without_moeq_reads_the_others(finished: Context) -> None:
    folder, reader = finished.directory("export"), NativeReader(finished.directory("export"))
    manifest: dict[str, Any] = json.loads((folder / "placement.json").read_text())
    for of, layer in zip(manifest["layers"], reader.layers, strict=True):
        for expert in of["experts"]:
            matrices, _ = reader.expert(layer, expert["expert"])
            if expert["bits"] == 0:
                assert not any(matrix.dequantize().any() for matrix in matrices.values())  # type: ignore[union-attr]
                continue
            (replica,) = expert["replicas"]
            values = read_expert(folder, of, replica, manifest["layout"])
            for name, matrix in matrices.items():
                assert torch.equal(torch.tensor(values[name]).float(), matrix.dequantize())  # type: ignore[union-attr]


def test_it_is_verified_and_converted(finished: Context, tmp_path: Path) -> None:
    folder = finished.directory("export")
    verdict = verify(folder, Options(against=str(finished.model_name)), Reporter(quiet=True))
    assert not verdict.problems
    convert(folder, "dequantized", tmp_path / "plain")
    one = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    with torch.no_grad():
        wanted = forward(one, IDS).logits
        assert (forward(other, IDS).logits - wanted).norm() < 2e-3 * wanted.norm()


@pytest.mark.full
def test_the_others_make_up_for_them(finished: Context, tmp_path: Path) -> None:
    """Refined with its layer, what is left answers for what is gone; dropped experts stay so, by hand or not."""
    out = tmp_path / "run"
    options = (UNIFORM, "quantize.refine={iterations: 20}", f"store={finished.store}")
    context = make(finished.model_name, out, *options)
    pipeline.run(context, ("profile", "losses", "assign"))
    edit(context, (1, 0), (2, 5))
    pipeline.run(context, ("quantize", "export", "eval"))
    assert dropped(context) == [(1, 0), (2, 5)]
    made = quantize.read_made(context.directory("quantize"))
    name = context.model.layers[1].name
    assert made.layers[name][0] == {}
    assert {method for one in made.layers[name][1:] for method in one.values()} <= {"gptq", "gptq+refined"}
    row = next(row for row in evaluate.load(context).rows if row.exported)
    assert row.bits_per_weight == pytest.approx((2 + 16 / 64 + 2 / 64) * 30 / 32, rel=0.02)
    packed = AutoModelForCausalLM.from_pretrained(context.directory("export"), dtype=torch.float32)
    plain = make(finished.model_name, out, *options, "dtype=float32")
    with torch.no_grad(), plain.model.overlay() as overlay:
        model = evaluate.replaced(plain, overlay, assign.load(plain), exported=True)
        torch.testing.assert_close(forward(packed, IDS).logits, forward(model, IDS).logits, rtol=1e-4, atol=1e-4)


def test_the_table_says_what_experts_answer(finished: Context) -> None:
    table = load_losses(finished)
    for row in table.rows(WHOLE):
        assert row["relative_loss"] == pytest.approx(row["loss"] / row["energy"], rel=1e-6)
        assert row["weighted_energy"] <= row["energy"] * 1.01  # routing weights of mixtral are below 1


def test_other_runtimes_are_refused_in_a_line_or_have_zeros(finished: Context, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"[01] bits; auto-round loads .*--widen"):
        convert(finished.directory("export"), "auto-round", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    convert(finished.directory("export"), "auto-round", tmp_path / "other", widen=True)
    other = open_packed(tmp_path / "other")
    for layer, expert in dropped(finished):
        for matrix in other.expert(other.layers[layer], expert)[0].values():
            assert isinstance(matrix, PackedWeight)
            assert not matrix.dequantize().any()


@pytest.mark.parametrize("budget", ["bits_per_weight: 0.5", "code_bits: 1/2", "expert_bytes: 300000"])
@pytest.mark.parametrize("granularity", ["expert", "projection"])
def test_a_budget_below_the_narrowest_width_is_met_by_dropping(
    budget: str, granularity: str, finished: Context
) -> None:
    """It is refused where none may be dropped, and where nothing would be left."""
    section = f"method: optimal, {budget}, granularity: {granularity}"
    context = make(finished.model_name, finished.out, f"assign={{{section}, drop: true}}")
    assign_ahead.check(context)
    assignment = assign.make(context, context.recipe.assign, "run")
    assert {0, 1} <= {*assignment.widths()}
    with pytest.raises(MoeqError, match=r"least possible|between 1"):
        assign_ahead.check(make(finished.model_name, finished.out, f"assign={{{section}}}"))
    less = section.replace("0.5", "0").replace("1/2", "0").replace("300000", "1")
    nothing = make(finished.model_name, finished.out, f"assign={{{less}, drop: true}}")
    for refused in (assign_ahead.check, lambda context: assign.make(context, context.recipe.assign, "run")):
        with pytest.raises(BudgetError, match=r"every expert would be dropped; raise the budget$"):
            refused(nothing)
    quick = make(finished.model_name, finished.out, f"assign={{{section}, ndp_latency_ms: 1.0e-9, drop: true}}")
    inputs = assign.inputs_of(quick, quick.recipe.assign, "run")
    inputs = replace(inputs, tokens_given=tuple(np.ones(layer.num_experts) for layer in quick.model.layers))
    with pytest.raises(BudgetError, match=r"every expert would be dropped; raise the budget or ndp_latency_ms$"):
        assign.decide(inputs)


def test_that_every_expert_is_dropped_by_hand_is_refused(finished: Context, tmp_path: Path) -> None:
    shutil.copytree(finished.out, tmp_path / "run")
    copy = make(finished.model_name, tmp_path / "run", DROPPING)
    edit(copy, *((layer, expert) for layer in range(4) for expert in range(8)))
    with pytest.raises(AssignmentError, match=r"assignment\.json: every expert is dropped; give some of them a width"):
        assign.load(copy)


def test_experts_with_biases_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a budget could be met by dropping them alone."""
    model = save("gpt_oss", tmp_path / "model")
    with pytest.raises(BudgetError, match="the least possible is"):
        assign_ahead.check(make(model, tmp_path / "run", "assign={method: optimal, bits_per_weight: 0.5, drop: true}"))
    context = make(model, tmp_path / "run", UNIFORM)
    pipeline.run(context, ("profile", "losses", "assign"))
    asked = make(model, tmp_path / "run", "assign={method: optimal, bits_per_weight: 6, drop: true}")
    pipeline.run(replace(asked, reporter=Reporter()), ("assign",))
    assert "drop: no expert is dropped, since they have biases" in capsys.readouterr().err
    pipeline.run(context, ("assign",))
    edit(context, (0, 1))
    with pytest.raises(AssignmentError, match="expert 1: an expert with biases cannot be dropped"):
        pipeline.run(context, ("quantize",))


def test_a_manifest_that_places_nothing_without_saying_so(finished: Context, tmp_path: Path) -> None:
    folder = shutil.copytree(finished.directory("export"), tmp_path / "copy")
    content = json.loads((folder / "placement.json").read_text())
    expert = next(e for e in content["layers"][0]["experts"] if e["bits"])
    for change in ({"bits": 0}, {"replicas": []}):
        changed = json.loads(json.dumps(content))
        changed["layers"][0]["experts"][expert["expert"]] |= change
        (folder / "placement.json").write_text(json.dumps(changed))
        with pytest.raises(ArtifactError, match="placed replicas"):
            read_manifest(folder)
