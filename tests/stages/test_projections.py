"""Widths of matrices from the recipe to the checkpoint: bytes, codes, logits, hand edits, refining, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import family_models
import pytest
import torch
from manifest_reader import read_expert
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from moeq import inspection, pipeline
from moeq.artifacts.assignment import matrix_widths, read_assignment, width_of
from moeq.artifacts.manifest import read_manifest
from moeq.bundled import bundled_path
from moeq.errors import ArtifactError, AssignmentError, MoeqError, RecipeError
from moeq.models.forward import forward
from moeq.models.kinds import GATED
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import assign, evaluate, quantize
from moeq.stages.context import Context
from moeq.stages.expert_bytes import total_bytes
from moeq.stages.replicas import load_index, load_losses, open_layer
from moeq_kernels.packed import packed_bytes
from moeq_kernels.widths import Encoding

SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "losses.group_size=16", "losses.bits=[1,2,3,4]",
    "eval.perplexity.sequences=4", "eval.perplexity.sequence_length=48", "eval.compare=[]",
    "estimate.grid.inputs=[128]", "estimate.grid.outputs=[512]",
)  # fmt: skip
OPTIMAL = "assign={method: optimal, code_bits: 2, granularity: projection, loss_weighting: squared}"
UNIFORM = "assign={method: uniform, bits: 2}"
STAGES = ("profile", "losses", "assign", "quantize", "export")


def make(model: str | Path, out: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


def run(model: str | Path, out: Path, *overrides: str, stages: tuple[str, ...] = STAGES) -> Context:
    context = make(model, out, *overrides)
    pipeline.run(context, stages)
    return context


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """The whole way on the bundled model."""
    return run(bundled_path("tiny-mixtral"), tmp_path_factory.mktemp("run"), OPTIMAL, stages=tuple(pipeline.BY_NAME))


@pytest.mark.full
def test_the_bundled_model_at_two_bits(finished: Context) -> None:
    assignment = assign.load(finished)
    summary = pipeline.read_record(finished.directory("assign"), "assign").summary
    flat = [choice for layer in assignment.layers for choice in layer.experts]
    assert sum(choice.projections is not None for choice in flat) > len(flat) / 4
    assert 1.97 < assignment.code_bits() <= 2
    assert summary["code_bits_all"] == float(assignment.code_bits())
    assert summary["proven"]
    assert summary["gap_to_optimum"] == pytest.approx(0, abs=1e-9)
    size = sum(
        packed_bytes(*layer.shape(name), width_of(choice.widths, name), Encoding(group_size=16, symmetric=False))
        for layer, mine in zip(finished.model.layers, assignment.layers, strict=True)
        for choice in mine.experts
        for name in layer.projections
    )
    totals = read_manifest(finished.directory("export")).totals
    found = inspection.inspect(finished.directory("export"))
    assert size == summary["expert_bytes"] == totals.placed_expert_bytes == found["placed_expert_bytes"]
    mixed = [choice.projections for choice in flat if choice.projections is not None]
    assert found["experts_by_code_bits"]["mixed"] == summary["experts_by_code_bits"]["mixed"] == len(mixed)
    assert found["mixed_experts_matrices_by_code_bits"]["up_proj"] == {
        str(bits): sum(one["up_proj"] == bits for one in mixed) for bits in sorted({one["up_proj"] for one in mixed})
    }
    file = inspection.inspect(finished.directory("assign") / assign.NAME)
    assert file["code_bits"] == summary["code_bits_all"]
    assert file["experts_by_code_bits"] == summary["experts_by_code_bits"]


@pytest.mark.full
def test_the_checkpoint_is_the_dequantized_model(finished: Context, tmp_path: Path) -> None:
    ids = torch.arange(3, 63).reshape(2, 30)
    folder = finished.directory("export")
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["format_version"] == 2
    packed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = make(finished.model_name, finished.out, OPTIMAL, "dtype=float32")
    with torch.no_grad(), plain.model.overlay() as overlay:
        logits = forward(packed, ids).logits
        model = evaluate.replaced(plain, overlay, assign.load(plain))
        torch.testing.assert_close(logits, forward(model, ids).logits, rtol=1e-4, atol=1e-4)
        packed.save_pretrained(tmp_path / "again")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
        assert torch.equal(forward(again, ids).logits, logits)
    assert packed.generate(ids[:1, :5], max_new_tokens=4, do_sample=False).shape == (1, 9)
    page = (finished.directory("report") / "report.html").read_text()
    assert "Code bits of every matrix of every expert" in page
    assert "the mean of its matrices&#x27; code bits" in page


@pytest.mark.full
def test_every_matrix_is_the_stores_of_its_width(finished: Context) -> None:
    """A reader without moeq finds in the checkpoint what the store has at each matrix's own width."""
    folder, index = finished.directory("export"), load_index(finished)
    manifest: dict[str, Any] = json.loads((folder / "placement.json").read_text())
    assert "`projections`" in manifest["layout"]["description"]
    for number, (layer, mine) in enumerate(zip(manifest["layers"], assign.load(finished).layers, strict=True)):
        stored = open_layer(finished, index, number)
        for expert, choice in zip(layer["experts"], mine.experts, strict=True):
            (replica,) = expert["replicas"]
            assert (replica["bits"], replica.get("projections")) == (choice.bits, choice.projections)
            assert replica["quantizer"] == "gptq"
            values = read_expert(folder, layer, replica, manifest["layout"])
            for name in layer["projections"]:
                entry = index.entry("gptq", width_of(choice.widths, name))
                wanted = stored.expert(entry, name, expert["expert"]).dequantize()
                torch.testing.assert_close(torch.from_numpy(values[name]).float(), wanted, rtol=1e-6, atol=1e-8)


def edit(context: Context, **change: object) -> None:
    """Change the first expert of the second layer in assignment.json."""
    path = context.directory("assign") / assign.NAME
    found = json.loads(path.read_text())
    found["layers"][1]["experts"][0] |= change
    path.write_text(json.dumps(found))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("bits", "widths", "message"),
    [
        (3, {"gate_proj": 3, "down_proj": 2}, r"layers\.1.*, expert 0: .*the model's are gate_proj, up"),
        (3, {"w1": 3, "w2": 2, "w3": 2}, r"layers\.1.*, expert 0: projections are w1, w2, w3"),
        (2, dict(zip(GATED, (3, 2, 2), strict=True)), r"layers\.1\.experts\.0\.bits is 2, .*widest"),
        (3, dict.fromkeys(GATED, 3), r"layers\.1\.experts\.0\.projections must have several"),
        (5, dict(zip(GATED, (5, 3, 3), strict=True)), r"layers\.1\.experts\.0\.bits must be one of"),
        (4, dict(zip(GATED, (4, 5, 3), strict=True)), r"layers\.1\.experts\.0: up_proj has 5 bits"),
        (8, dict(zip(GATED, (8, 3, 3), strict=True)), r"expert 0: 8 bits is not among losses\.bits"),
    ],
)
def test_hand_edits_that_make_no_sense(
    tiny_mixtral: Path, tmp_path: Path, bits: int, widths: dict[str, int], message: str
) -> None:
    context = run(tiny_mixtral, tmp_path, UNIFORM, stages=STAGES[:3])
    edit(context, bits=bits, projections=widths)
    with pytest.raises(MoeqError, match=message) as caught:
        assign.load(context)
    assert isinstance(caught.value, ArtifactError | AssignmentError)
    assert "\n" not in str(caught.value)


@pytest.mark.full
def test_a_matrix_left_as_it_is_and_who_made_the_others(tiny_mixtral: Path, tmp_path: Path) -> None:
    """By hand: gate as in the checkpoint, up and down at 3 bits by the best method; not to be refined."""
    context = run(tiny_mixtral, tmp_path, "assign={method: uniform, bits: 2, quantizer: best}", "dtype=float32")
    edit(context, bits=16, projections={"gate_proj": 16, "up_proj": 3, "down_proj": 3}, quantizer=None)
    pipeline.run(context, STAGES)
    layer = context.model.layers[1]
    with safe_open(quantize.files(context.directory("quantize"))[1], "pt") as file:
        keys = [key for key in file.keys() if key.startswith(f"{layer.name}.0.")]  # noqa: SIM118
    ends = ["down_proj.codes", "down_proj.scales", "down_proj.zeros", "gate_proj.dense", "up_proj.codes",
            "up_proj.scales", "up_proj.zeros"]  # fmt: skip
    assert [key.removeprefix(f"{layer.name}.0.") for key in sorted(keys)] == ends
    replica = read_manifest(context.directory("export")).layers[1].experts[0].replicas[0]
    assert replica.quantizer == load_losses(context).best()[1][3][0]
    assert inspection.inspect(context.directory("export"))["placed_expert_bytes"] == total_bytes(
        context, assign.load(context)
    )
    ids = torch.arange(3, 33)[None]
    with torch.no_grad(), context.model.overlay() as overlay:
        found = forward(AutoModelForCausalLM.from_pretrained(context.directory("export")), ids).logits
        model = evaluate.replaced(context, overlay, assign.load(context))
        torch.testing.assert_close(found, forward(model, ids).logits, rtol=1e-4, atol=1e-4)
    refining = make(tiny_mixtral, tmp_path, "assign={method: uniform, bits: 2, quantizer: best}", "dtype=float32",
                    "quantize.refine={iterations: 3}")  # fmt: skip
    with pytest.raises(AssignmentError, match=r"layers\.1.*, expert 0: some of its matrices have 16 bits"):
        pipeline.run(refining, STAGES)


@torch.no_grad()
def predictions(context: Context, model: Any) -> torch.Tensor:
    """Logits on the calibration text."""
    batches = context.text.calibration.batches(4)
    return torch.cat([forward(model, b.input_ids, b.mask.long()).logits[b.mask] for b in batches])


@pytest.mark.full
def test_refined_at_the_widths_of_matrices(tiny_mixtral: Path, tmp_path: Path) -> None:
    context = run(tiny_mixtral, tmp_path, OPTIMAL, "quantize.refine={iterations: 20}", "dtype=float32")
    changed = 0
    for layer, mine in zip(read_manifest(context.directory("export")).layers, assign.load(context).layers, strict=True):
        for expert, choice in zip(layer.experts, mine.experts, strict=True):
            (replica,) = expert.replicas
            assert replica.widths == choice.widths
            changed += choice.projections is not None and replica.quantizer == "gptq+refined"
    assert changed > 0
    with context.model.overlay() as overlay:
        outputs = [predictions(context, overlay.set())]
        for exported in (False, True):
            model = evaluate.replaced(context, overlay, assign.load(context), exported=exported)
            outputs.append(predictions(context, model))
    plain, refined = (float((one - outputs[0]).square().mean()) for one in outputs[1:])
    assert refined < plain
    packed = AutoModelForCausalLM.from_pretrained(context.directory("export"))
    torch.testing.assert_close(predictions(context, packed), outputs[2], rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h"])  # biases; two matrices
def test_other_kinds_of_experts(family: str, tmp_path: Path) -> None:
    model = family_models.save(family, tmp_path / "model")
    context = run(model, tmp_path / "run", OPTIMAL, "dtype=float32", stages=(*STAGES, "eval"))
    assert assign.load(context).is_mixed
    assert evaluate.load(context).export_logit_error < 1e-5
    assert inspection.inspect(context.directory("export"))["placed_expert_bytes"] == total_bytes(
        context, assign.load(context)
    )


def test_old_files_are_read_unchanged(tiny_mixtral: Path, tmp_path: Path) -> None:
    context = run(tiny_mixtral, tmp_path, UNIFORM, stages=STAGES[:3])
    path = context.directory("assign") / assign.NAME
    assert "projections" not in path.read_text()
    assert json.loads(path.read_text()) | {"codebook": ""} == read_assignment(path).model_dump(mode="json")
    schema = json.loads(path.with_suffix(".schema.json").read_text())
    assert "projections" in schema["$defs"]["ExpertChoice"]["properties"]
    assert "projections" not in schema["$defs"]["ExpertChoice"]["required"]


def test_granularity_layer_and_what_rows_are_needed(tiny_mixtral: Path, tmp_path: Path) -> None:
    context = run(tiny_mixtral, tmp_path, OPTIMAL.replace("projection", "layer"), stages=STAGES[:3])
    assert all(len(set(bits.tolist())) == 1 for bits in assign.load(context).bits())
    with pytest.raises(RecipeError, match=r"assign: granularity projection needs losses\.per_projection: true"):
        make(tiny_mixtral, tmp_path, OPTIMAL, "losses.per_projection=false")
    with pytest.raises(RecipeError, match="granularity belongs to optimal"):
        make(tiny_mixtral, tmp_path, "assign={method: uniform, bits: 2, granularity: layer}")


@pytest.mark.full
def test_a_checkpoint_that_names_other_matrices_is_refused(finished: Context, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path in finished.directory("export").iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    name, experts = next(iter(config["quantization_config"]["experts"].items()))
    place = next(number for number, one in enumerate(experts) if not isinstance(one, int))
    widths = matrix_widths(experts[place])
    experts[place] = dict(zip(("w1", "w2", "w3"), widths, strict=True))
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=rf"{name}: expert {place} has widths of w1, w2, w3, not of gate_proj"):
        AutoModelForCausalLM.from_pretrained(folder)
