"""`moeq run` on random Mixtral and Qwen3-MoE models of awkward sizes: what comes out, loads back and adds up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch
from manifest_reader import read_expert, read_tensor
from safetensors import safe_open
from tiny_models import some
from transformers import AutoModelForCausalLM

from moeq import inspection, pipeline, results
from moeq.artifacts.manifest import read_manifest
from moeq.errors import CorpusError
from moeq.models.source import open_source
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.runtime.hook import unhooked
from moeq.stages import assign, evaluate
from moeq.stages.context import Context
from moeq.stages.expert_bytes import total_bytes
from moeq.stages.replicas import load_index

SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "corpus.batch_size=5",
    "eval.perplexity.sequences=6", "eval.perplexity.sequence_length=48",
    "eval.compare=[{name: uniform-3, method: uniform, bits: 3}, {name: u1, method: uniform, bits: 1, quantizer: rtn}]",
    "estimate.grid.inputs=[128]", "estimate.grid.outputs=[512]",
)  # fmt: skip
CASES = {
    "mixtral": ("tiny_mixtral", ("losses.group_size=16", "assign.code_bits=5/2", "assign.gpu_experts=1")),
    "qwen": (
        "tiny_qwen",
        (
            "losses.group_size=-1",
            "assign.code_bits=2.2",
            "quantize.replicas=all",
            "estimate.geometry=[mixtral-8x7b, model]",
        ),
    ),
    "nested": (
        "tiny_mixtral",
        ("losses.group_size=16", "losses.nested=true", "assign.code_bits=5/2", "quantize.replicas=all"),
    ),
    "projections": (
        "tiny_mixtral",
        (
            "losses.group_size=16",
            "quantize.replicas=all",
            "assign={method: optimal, code_bits: 2, granularity: projection, gpu_experts: 1, quantizer: best}",
        ),
    ),
    "symmetric": (
        "tiny_mixtral",
        ("losses.group_size=24", "losses.symmetric=true", "assign={method: uniform, bits: 4, gpu_experts: 2}"),
    ),
}

WITHOUT = """
import sys
assert "moeq" not in sys.modules
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1])
print("RAN")
"""


def run(model: Path, out: Path, overrides: tuple[str, ...]) -> Context:
    recipe = load_recipe(None, [*SMALL, *overrides])
    context = Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))
    pipeline.run(context)
    return context


@pytest.fixture(scope="module", params=some(CASES, 2))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Context:
    fixture, overrides = CASES[request.param]
    return run(request.getfixturevalue(fixture), tmp_path_factory.mktemp("run") / request.param, overrides)


@pytest.mark.cases(1)
def test_manifest_alone_rebuilds_every_expert(finished: Context) -> None:
    """A reader without moeq gives the dequantized weights, in every replica."""
    folder = finished.directory("export")
    manifest: dict[str, Any] = json.loads((folder / "placement.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in manifest["layers"]:
        module = loaded.get_submodule(layer["name"])
        assert len(layer["experts"]) == layer["num_experts"]
        for expert in layer["experts"]:
            placed = [replica for replica in expert["replicas"] if replica["placed"]]
            assert [replica["bits"] for replica in placed] == [expert["bits"]]
            for replica in expert["replicas"]:
                values = read_expert(folder, layer, replica, manifest["layout"])
                if replica["placed"]:
                    assert list(values) == layer["projections"]
                    for name, mine in values.items():
                        loaded_one = module.get_submodule(f"{expert['expert']}.{name}").values(torch.float32)
                        wanted = torch.from_numpy(mine).float()
                        torch.testing.assert_close(loaded_one, wanted, rtol=1e-6, atol=1e-8)
    if finished.recipe.quantize.replicas == "all":
        widths = {
            tuple(sorted(r["bits"] for r in e["replicas"] if "projections" not in r))
            for x in manifest["layers"]
            for e in x["experts"]
        }
        assert widths == {(1, 2, 3, 4, 8, 16)}


def test_bytes_on_disk_are_what_the_manifest_states(finished: Context) -> None:
    folder = finished.directory("export")
    found = inspection.inspect(folder)
    totals = read_manifest(folder).totals
    assert found["placed_expert_bytes"] == totals.placed_expert_bytes == sum(totals.bytes_by_tier.values())
    assert found["placed_expert_bytes"] == total_bytes(finished, assign.load(finished))
    headers = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as stream:
            headers += 8 + int.from_bytes(stream.read(8), "little")
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert files - headers == found["tensor_bytes_on_disk"]


@pytest.mark.cases(1)
def test_logits_equal_the_dequantized_models(finished: Context) -> None:
    ids = torch.arange(3, 63).reshape(2, 30)
    packed = AutoModelForCausalLM.from_pretrained(finished.directory("export"), dtype=torch.float32)
    plain = Context(recipe=finished.recipe, model_name=finished.model_name, out=finished.out)
    plain.model.__dict__["dtype"] = torch.float32
    with torch.no_grad(), plain.model.overlay() as overlay:
        model = evaluate.replaced(plain, overlay, assign.load(plain))
        torch.testing.assert_close(packed(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert evaluate.load(finished).export_logit_error <= evaluate.CHECK_TOLERANCE[finished.model.dtype]


def test_everything_but_the_experts_is_untouched(finished: Context) -> None:
    source, folder = open_source(finished.model_name), finished.directory("export")
    rest = {key for key in source.tensors if ".experts." not in key}
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert rest
    for key in rest:
        original, copy = read_tensor(source.tensors[key].file, key), read_tensor(folder / index[key], key)
        assert original[1] == copy[1], key
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (source.path / name).read_bytes()
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "moeq"
    assert config != source.config == unhooked(config)


@pytest.mark.full
def test_saving_again_keeps_weights_and_the_guard(finished: Context, tmp_path: Path) -> None:
    ids = torch.arange(3, 33)[None]
    first = AutoModelForCausalLM.from_pretrained(finished.directory("export"))
    first.save_pretrained(tmp_path / "again")
    second, info = AutoModelForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        assert torch.equal(first(ids).logits, second(ids).logits)
    program = tmp_path / "load.py"
    program.write_text(WITHOUT)
    for folder in (finished.directory("export"), tmp_path / "again"):
        done = fork_server.shared(*fork_server.TRANSFORMERS).run(folder, program=program)
        assert done.code != 0
        assert "RAN" not in done.stdout
        assert "size mismatch" in done.stderr


def test_evaluated_rows_and_card(finished: Context) -> None:
    rows = {row["name"]: row for row in results.final_rows(finished)}
    assert set(rows) == {"original", "run", "uniform-3", "u1"}
    assert rows["run"]["exported"]
    assert all(row["perplexity"] > 1 for row in rows.values())
    assert rows["original"]["expert_bytes"] > rows["uniform-3"]["expert_bytes"] > rows["u1"]["expert_bytes"]
    card = (finished.directory("export") / "README.md").read_text()
    assert "import moeq" in card
    assert finished.model.source.name in card


@pytest.mark.cases(2)
def test_generation_runs_on_the_export(finished: Context) -> None:
    from moeq.generation import generate

    options = {"max_new_tokens": 5, "seed": 1, "device": "cpu"}
    first = generate(finished.directory("export"), "def main", temperature=0.8, **options)
    again = generate(finished.directory("export"), "def main", temperature=0.8, **options)
    assert first["text"] == again["text"]
    assert first["text"].startswith("def main")
    assert 1 <= first["new_tokens"] <= 5


def test_loss_table_is_complete_and_readable_by_others(finished: Context) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(finished.directory("losses") / "losses.parquet").to_pandas()
    experts = sum(layer.num_experts for layer in finished.model.layers)
    assert len(table) == experts * 4 * 2 * 5
    assert table.loss.notna().all()
    index = load_index(finished)
    entry = index.entry("gptq", 3)
    with safe_open(finished.out / "store" / index.set / "layer-000.safetensors", "pt") as handle:
        assert f"{entry}.gate_proj.codes" in handle.keys()  # noqa: SIM118


def test_unpacked_corpus_profiles_only_real_tokens(tiny_mixtral: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": "some words " * n}) + "\n" for n in (3, 30, 7, 12, 5, 21))
    )
    recipe = load_recipe(None, [*SMALL, f"corpus.source={tmp_path / 'text.jsonl'}", "corpus.packed=false",
                                "corpus.sequences=6"])  # fmt: skip
    context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=tmp_path / "run", reporter=Reporter(quiet=True))
    outcome = pipeline.run(context, ("profile",))[0]
    calibration = context.text.calibration
    assert outcome.record.summary["tokens"] == int(calibration.mask.sum()) < calibration.ids.numel()


@pytest.mark.full
def test_a_hand_edited_assignment_is_kept_and_used(tiny_mixtral: Path, tmp_path: Path) -> None:
    overrides = ("losses.group_size=16", "assign={method: uniform, bits: 2}")
    context = run(tiny_mixtral, tmp_path / "run", overrides)
    path = context.directory("assign") / assign.NAME
    path.write_text(path.read_text().replace('"bits": 2', '"bits": 8', 3))
    outcomes = {o.stage: o.skipped for o in pipeline.run(context)}
    assert outcomes["assign"]
    assert not outcomes["quantize"]
    manifest = read_manifest(context.directory("export"))
    assert [expert.bits for expert in manifest.layers[0].experts] == [8, 8, 8, 2, 2]
    assert all(o.skipped for o in pipeline.run(context))


@pytest.mark.full
def test_the_demo_recipe_runs_on_any_model(tiny_qwen: Path, tmp_path: Path) -> None:
    overrides = ["corpus.sequence_length=64", "corpus.sequences=12", "eval.perplexity.sequence_length=64",
                 "eval.perplexity.sequences=6", "eval.limit=2"]  # fmt: skip
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "demo.yaml", overrides)
    context = Context(recipe=recipe, model_name=str(tiny_qwen), out=tmp_path, reporter=Reporter(quiet=True))
    outcomes = {outcome.stage: outcome.record.summary for outcome in pipeline.run(context)}
    assert outcomes["estimate"]["geometry_is_the_models"]
    assert {row["name"] for row in results.final_rows(context)} >= {"original", "optimal-2.1", "hot4+uniform-2"}


def test_sequences_longer_than_the_model_are_refused(tiny_qwen: Path, tmp_path: Path) -> None:
    for key in ("corpus.sequence_length", "eval.perplexity.sequence_length"):
        recipe = load_recipe(None, [*SMALL, f"{key}=129"])
        context = Context(recipe=recipe, model_name=str(tiny_qwen), out=tmp_path / "run", reporter=Reporter(quiet=True))
        with pytest.raises(CorpusError, match=f"{key}: 129 tokens are more than the model's 128 positions"):
            pipeline.run(context)
    assert not (tmp_path / "run").exists()
