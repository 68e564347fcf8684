"""Modules outside of the experts from recipe to checkpoint: what is stored, exported, loaded and evaluated."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import family_models
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moeq import cleaning, inspection, pipeline
from moeq.artifacts import non_experts as artifact
from moeq.artifacts.manifest import read_manifest
from moeq.artifacts.replicas import layer_file
from moeq.errors import ArtifactError, RecipeError
from moeq.models import loading
from moeq.models.forward import forward
from moeq.models.non_experts import OTHER_TIES, OWN_CLASS
from moeq.models.source import read_header
from moeq.models.streaming import StreamedModel
from moeq.numerics import gptq
from moeq.numerics.factor import factorize
from moeq.numerics.storing import packed_of
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.runtime.checkpoint import load_checkpoint
from moeq.runtime.hf_quantizer import MoeqConfig
from moeq.runtime.packed_modules import GUARD_SHAPE, PackedModule, TiedHead, replace_modules
from moeq.stages import assign, evaluate
from moeq.stages import non_experts as others
from moeq.stages import non_experts as others_stage
from moeq.stages.context import Context
from moeq.stages.replicas import load_index
from stages.test_families import check_export

CPU = torch.device("cpu")
SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=32", "corpus.batch_size=3", "losses.group_size=16",
    "losses.bits=[2]", "losses.methods=[gptq]", "assign={method: uniform, bits: 2}",
    "eval.perplexity.sequences=4", "eval.perplexity.sequence_length=32", "eval.compare=[]",
    "estimate.grid.inputs=[128]", "estimate.grid.outputs=[128]",
)  # fmt: skip
ALL = "others={attention: 4, dense: 3, shared: 2, embeddings: 8, head: 8}"
TO_EXPORT = ("profile", "losses", "assign", "quantize", "export")
TO_EVAL = (*TO_EXPORT, "eval")
FAMILIES = {  # shared experts; a dense first layer and MLA; tied embeddings; biases on attention; heads with biases
    "qwen2_moe": {"attention", "dense", "shared", "embeddings", "head"},
    "deepseek_v3": {"attention", "dense", "shared", "embeddings", "head"},
    "cohere2_moe": {"attention", "dense", "shared", "embeddings"},
    "gpt_oss": {"attention", "embeddings", "head"},
    "phimoe": {"attention", "embeddings", "head"},
    "granitemoehybrid": {"attention", "shared", "embeddings", "head"},
    "switch_transformers": {"attention", "dense"},
}  # fmt: skip


def context(model: Path, out: Path, *overrides: str, said: list[str] | None = None) -> Context:
    reporter = Reporter(quiet=True)
    if said is not None:
        reporter.say = said.append  # type: ignore[method-assign]
    return Context(recipe=load_recipe(None, [*SMALL, *overrides]), model_name=str(model), out=out, reporter=reporter)


def run(
    model: Path, out: Path, *overrides: str, stages: tuple[str, ...] = ("profile", "losses"), **more: Any
) -> Context:
    made = context(model, out, *overrides, **more)
    pipeline.run(made, stages)
    return made


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_models.save("deepseek_v3", tmp_path_factory.mktemp("models") / "deepseek")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_models.save("cohere2_moe", tmp_path_factory.mktemp("models") / "tied")


def content(folder: Path) -> dict[str, bytes]:
    """Bytes of a folder's files, records and locks apart."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("stage.json", ".lock")
    }


def sets(made: Context) -> dict[str, str]:
    return {"experts": load_index(made).set, "others": artifact.read_index(made.directory("losses")).set}


@pytest.fixture
def modules_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the modules that are quantized."""
    found: list[str] = []
    linears, table = others_stage.quantize_linears, others_stage.quantize_embedding

    def counting(modules: Any, sums: Any, weight: Any) -> Any:
        for module, result in linears(modules, sums, weight):
            found.append(module.name)
            yield module, result

    monkeypatch.setattr(others_stage, "quantize_linears", counting)
    monkeypatch.setattr(
        others_stage, "quantize_embedding", lambda name, *rest: (found.append(name), table(name, *rest))[1]
    )
    return found


LONG = {"granitemoehybrid", "phimoe", "switch_transformers"}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=pytest.mark.full) if one in LONG else one for one in sorted(FAMILIES)]
)
def test_what_is_exported_is_what_was_evaluated(family: str, tmp_path: Path) -> None:
    """Logits of the loaded checkpoint, of the model with its weights replaced and of modules replaced by hand."""
    model = family_models.save(family, tmp_path / "model")
    made = run(model, tmp_path / "run", ALL, stages=TO_EVAL)
    check_export(made, tmp_path / "checked")
    run(model, tmp_path / "run", ALL, stages=("export",))  # the check takes the configuration apart
    manifest = read_manifest(made.directory("export"))
    assert {module.kind for module in manifest.others} == FAMILIES[family]
    packed: Any = load_checkpoint(made.directory("export"), torch.float32, CPU)
    stored = others.Stored(made)
    original: Any = loading.load_model(made.model.source, torch.float32, CPU)
    made.model.__dict__["module"] = original
    with made.model.overlay() as overlay:
        evaluate.replaced(made, overlay, assign.load(made))
    for module in stored.modules:
        values = stored.packed(module).dequantize()
        assert torch.equal(original.get_submodule(module.name).weight, values)
        here = packed.get_submodule(module.name)
        assert isinstance(here, PackedModule)
        assert torch.equal(here.values(torch.float32), values)
        if module.biased:
            assert torch.equal(here.state_dict()["bias"], original.get_submodule(module.name).get_parameter("bias"))
    ids = torch.randint(20, family_models.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted, found = forward(original, ids).logits, forward(packed, ids).logits
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5  # kernels add up in another order


@pytest.mark.full
@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_codes_in_the_checkpoint_are_those_of_the_numerics(deepseek: Path, tmp_path: Path, method: str) -> None:
    """Hessians from plain hooks on an ordinary forward pass, sequence by sequence, held-out ones and pads left out."""
    texts = tmp_path / "text.jsonl"
    draw = random.Random(1)
    words = lambda: " ".join("".join(draw.choices("abcdefghij", k=4)) for _ in range(draw.randint(2, 14)))  # noqa: E731
    texts.write_text("".join(json.dumps({"text": words()}) + "\n" for _ in range(40)))
    made = run(
        deepseek, tmp_path / "run", ALL, f"others.method={method}", "others.damping=0.05", "others.group_size=24",
        "others.symmetric=true", f"corpus.source={texts}", "corpus.packed=false", "corpus.sequences=24",
        stages=TO_EXPORT,
    )  # fmt: skip
    model: Any = loading.load_model(made.model.source, torch.float32, CPU)
    names = ("model.layers.0.self_attn.kv_b_proj", "model.layers.1.self_attn.q_a_proj",
             "model.layers.2.mlp.shared_experts.down_proj", "model.layers.0.mlp.up_proj", "lm_head")  # fmt: skip
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, given, at=name: rows[at].append(given[0].reshape(-1, given[0].shape[-1]))
        )
    sequences = made.text.grown_calibration
    with torch.no_grad():
        for index in range(len(sequences)):
            if index % 4 != 3:
                length = int(sequences.mask[index].sum())
                forward(model, sequences.ids[index : index + 1, :length])
    assert not bool(sequences.mask.all())
    stored = others.Stored(made)
    widths = made.recipe.others.widths()
    checked = 0
    for module in stored.modules:
        if module.name in names:
            weight = model.get_submodule(module.name).weight.detach().unsqueeze(0)
            of = torch.cat(rows[module.name])
            factor = factorize((of.T @ of / len(of)).unsqueeze(0), 0.05).unit_upper
            wanted = packed_of(
                gptq.quantize(
                    weight,
                    factor if method == "gptq" else None,
                    bits=[widths[module.kind]],
                    group_size=24,
                    symmetric=True,
                ),
                widths[module.kind],
                symmetric=True,
            )
            found = stored.packed(module)
            same = (found.dequantize() - wanted.dequantize()[0]).abs() < 1e-6
            assert float(same.float().mean()) > (0.995 if method == "gptq" else 0.99999)  # sums in another order
            checked += 1
    assert checked == len(names)
    table = others.table(made)
    assert table is not None
    assert {row.fallback for row in table.modules} == {"none"}
    assert {row.method for row in table.modules if row.kind != "embeddings"} == {method}
    calibration = sum(int(mask.sum()) for index, mask in enumerate(sequences.mask) if index % 4 != 3)
    assert {row.calibration_rows for row in table.modules if row.kind != "embeddings"} == {calibration}
    assert {row.heldout_rows for row in table.modules} == {int(sequences.mask.sum()) - calibration}


def test_errors_in_the_table_are_those_of_held_out_rows(deepseek: Path, tmp_path: Path) -> None:
    made = run(deepseek, tmp_path / "run", ALL)
    table = others.table(made)
    assert table is not None
    model: Any = loading.load_model(made.model.source, torch.float32, CPU)
    rows: dict[str, list[torch.Tensor]] = {}
    for row in table.modules:
        model.get_submodule(row.module).register_forward_hook(
            lambda _, given, output, at=row.module: rows.setdefault(at, []).append((given[0], output))
        )
    sequences = made.text.grown_calibration
    with torch.no_grad():
        forward(model, sequences.ids[3::4])
    for row in table.modules:
        given, exact = rows[row.module][0]
        module = next(one for one in others.chosen(made) if one.name == row.module)
        weight = others.Stored(made).packed(module).dequantize()
        found = weight[given] if module.lookup else given @ weight.T
        error = float((found - exact).square().mean() / exact.square().mean())
        assert row.relative_error == pytest.approx(error, rel=2e-3), row.module


@pytest.mark.full
def test_a_streamed_run_writes_the_same_bytes(deepseek: Path, tmp_path: Path) -> None:
    reads: list[int] = []
    whole = run(deepseek, tmp_path / "whole", ALL, stages=TO_EVAL)
    streamed = run(deepseek, tmp_path / "streamed", ALL, "stream=always", stages=TO_EVAL)
    for stage in ("losses", "quantize"):
        assert content(whole.directory(stage)) == content(streamed.directory(stage)), stage
    figures = [evaluate.load(one).rows for one in (whole, streamed)]
    for one, other in zip(*figures, strict=True):
        assert one.perplexity == pytest.approx(other.perplexity, rel=1e-6)
    assert isinstance(streamed.model.streamed, StreamedModel)
    before = streamed.model.streamed.bytes_read
    alone = context(deepseek, tmp_path / "alone", "stream=always")
    pipeline.run(alone, ("profile", "losses"))
    assert alone.model.streamed is not None
    reads.append(alone.model.streamed.bytes_read)
    more = context(deepseek, tmp_path / "more", "stream=always", ALL)
    pipeline.run(more, ("profile", "losses"))
    assert more.model.streamed is not None
    assert more.model.streamed.bytes_read == reads[0] < before  # the same walk, no second one


def test_the_original_stays_the_original(tied: Path, tmp_path: Path) -> None:
    """The embeddings of a streamed model are put back after an assignment was measured."""
    made = context(tied, tmp_path / "run", ALL, "stream=always")
    pipeline.run(made, ("profile", "losses", "assign"))
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        before = forward(made.model.module, ids).logits
        with made.model.overlay() as overlay:
            changed = evaluate.replaced(made, overlay, assign.load(made))
            assert not torch.allclose(forward(changed, ids).logits, before, rtol=1e-4)
        assert torch.equal(forward(made.model.module, ids).logits, before)
    model: Any = made.model.module
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.full
def test_compared_assignments_have_the_same_rest(deepseek: Path, tmp_path: Path) -> None:
    made = run(deepseek, tmp_path / "run", ALL, "eval.compare=[{name: again, method: uniform, bits: 2}]",
               stages=TO_EVAL)  # fmt: skip
    original, own, again = evaluate.load(made).rows
    assert own.perplexity == pytest.approx(again.perplexity, rel=1e-5)
    assert original.perplexity != pytest.approx(own.perplexity, rel=1e-3)
    manifest = read_manifest(made.directory("export"))
    assert own.other_bytes == again.other_bytes == manifest.totals.non_expert_bytes
    assert original.total_bytes == sum(header.bytes for header in made.model.source.tensors.values())
    summary = json.loads((made.directory("assign") / "stage.json").read_text())["summary"]
    assert summary["checkpoint_bytes"] == own.checkpoint_bytes
    assert summary["expert_bytes"] + summary["other_bytes"] == own.total_bytes
    plain = run(deepseek, tmp_path / "plain", stages=TO_EVAL)
    assert evaluate.load(plain).rows[1].other_bytes == original.other_bytes
    assert "others" not in json.loads((plain.directory("export") / "placement.json").read_text())
    assert "others" not in json.loads((plain.directory("export") / "config.json").read_text())["quantization_config"]
    assert not list(plain.directory("losses").glob("others*"))


@pytest.mark.full
def test_neither_touches_what_the_store_has_of_the_other(
    deepseek: Path, tmp_path: Path, modules_made: list[str]
) -> None:
    first = run(deepseek, tmp_path / "run", ALL)
    before, names = content(first.store), sets(first)
    total = len(modules_made)
    assert total == len(others.chosen(first))
    modules_made.clear()
    run(deepseek, tmp_path / "run", ALL, "losses.bits=[2]", "losses.group_size=24", "others.group_size=16")
    assert modules_made == []
    run(deepseek, tmp_path / "run", ALL, "losses.max_measured_tokens=99")
    assert modules_made == []
    other = run(deepseek, tmp_path / "run", ALL.replace("attention: 4", "attention: 8"))
    assert set(modules_made) == {module.name for module in others.chosen(other) if module.kind == "attention"}
    assert sets(other) == names
    after = content(other.store)
    assert {name: after[name] for name in before if f"{names['experts']}/" in name} == {
        name: data for name, data in before.items() if f"{names['experts']}/" in name
    }
    modules_made.clear()
    back = run(deepseek, tmp_path / "run", ALL)
    assert modules_made == []
    assert content(back.directory("losses")) == content(run(deepseek, tmp_path / "new", ALL).directory("losses"))


@pytest.mark.full
def test_a_setting_makes_only_what_reads_it(deepseek: Path, tmp_path: Path, modules_made: list[str]) -> None:
    first = run(deepseek, tmp_path / "run", ALL)
    experts = {name: data for name, data in content(first.store).items() if sets(first)["experts"] in name}
    for setting in ("others.symmetric=true", "others.damping=0.1", "others.method=rtn"):
        modules_made.clear()
        again = run(deepseek, tmp_path / "run", ALL, setting)
        kinds = {module.kind for module in others.chosen(again) if module.name in modules_made}
        assert kinds == {"attention", "dense", "shared", "head"} | ({"embeddings"} if "symmetric" in setting else set())
        assert {name: data for name, data in content(again.store).items() if sets(first)["experts"] in name} == experts


@pytest.mark.full
def test_gc_keeps_what_a_run_names_and_drops_the_rest(deepseek: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    wanted = content(run(deepseek, tmp_path / "new", "others={attention: 4}").store)
    run(deepseek, out, ALL)
    made = run(deepseek, out, "others={attention: 4}", stages=TO_EXPORT)
    cleaning.collect([out], None, dry_run=False)
    assert content(made.store) == wanted
    run(deepseek, out, "others={attention: 4}", stages=TO_EXPORT)
    assert inspection.inspect(out / "store")["kind"] == "moeq replica store"
    none = run(deepseek, out)
    name = artifact.read_index(tmp_path / "new" / "losses").set
    assert (none.store / name).is_dir()
    cleaning.collect([out], None, dry_run=False)
    assert not (none.store / name).exists()


@pytest.mark.full
def test_an_interrupted_layer_is_the_only_one_made_again(
    deepseek: Path, tmp_path: Path, modules_made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = others_stage.Making._keep

    def failing(self: Any, block: str, results: Any) -> None:
        if block == "model.layers.1":
            raise KeyboardInterrupt
        keep(self, block, results)

    monkeypatch.setattr(others_stage.Making, "_keep", failing)
    with pytest.raises(KeyboardInterrupt):
        run(deepseek, tmp_path / "run", ALL)
    monkeypatch.setattr(others_stage.Making, "_keep", keep)
    modules_made.clear()
    resumed = run(deepseek, tmp_path / "run", ALL)
    assert modules_made
    assert not any(name.startswith("model.layers.0.") for name in modules_made)
    whole = run(deepseek, tmp_path / "whole", ALL)
    assert content(resumed.directory("losses")) == content(whole.directory("losses"))
    assert content(resumed.store) == content(whole.store)


@pytest.mark.cases(1)
@pytest.mark.parametrize("damage", ["flipped", pytest.param("truncated", marks=pytest.mark.full), "deleted"])
def test_a_damaged_store_is_named_and_mended(
    deepseek: Path, tmp_path: Path, damage: str, modules_made: list[str]
) -> None:
    made = run(deepseek, tmp_path / "run", ALL, stages=TO_EXPORT)
    path = layer_file(made.store / sets(made)["others"], 1)
    whole, before = path.read_bytes(), {stage: content(made.directory(stage)) for stage in TO_EXPORT[1:]}
    data = bytearray(whole)
    data[-30] ^= 1
    path.unlink()
    if damage != "deleted":
        path.write_bytes(whole[:-50] if damage == "truncated" else data)
    (made.directory("quantize") / "stage.json").unlink()
    with pytest.raises(ArtifactError, match=r"layer-001\.safetensors.*run `moeq losses` again"):
        pipeline.run_alone(context(deepseek, tmp_path / "run", ALL), "quantize")
    modules_made.clear()
    said: list[str] = []
    run(deepseek, tmp_path / "run", ALL, stages=TO_EXPORT, said=said)
    assert modules_made
    assert all(name.startswith("model.layers.1.") for name in modules_made)
    assert any(str(path) in line and "damaged" in line for line in said) == (damage != "deleted")
    assert path.read_bytes() == whole
    assert {stage: content(made.directory(stage)) for stage in TO_EXPORT[1:]} == before


@pytest.mark.parametrize("widths", ["{head: 8}", "{embeddings: 4, head: 8}", "{embeddings: 4}"])
def test_two_widths_for_one_tensor_are_refused(tied: Path, tmp_path: Path, widths: str) -> None:
    with pytest.raises(RecipeError, match=r"others: embeddings and head are one tensor.*the same width, or neither"):
        run(tied, tmp_path / "run", f"others={widths}")
    assert not (tmp_path / "run").exists()


def test_a_tied_pair_is_one_tensor_in_the_checkpoint(tied: Path, tmp_path: Path) -> None:
    made = run(tied, tmp_path / "run", "others={embeddings: 4, head: 4}", stages=TO_EXPORT)
    (row,) = read_manifest(made.directory("export")).others
    assert (row.name, row.tied, row.quantizer) == ("model.embed_tokens", "lm_head", "rtn")
    packed: Any = load_checkpoint(made.directory("export"), torch.float32, CPU)
    assert isinstance(packed.get_output_embeddings(), TiedHead)
    packed.save_pretrained(tmp_path / "again")
    again: Any = load_checkpoint(tmp_path / "again", torch.float32, CPU)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, packed(ids).logits)
    assert packed.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 15)


@pytest.mark.cases(2)
@pytest.mark.parametrize("stream", ["always", "never"])
@pytest.mark.parametrize("same", [True, False])
def test_a_head_that_the_disk_has_beside_tied_embeddings(tied: Path, tmp_path: Path, same: bool, stream: str) -> None:
    """transformers ties them where they are the same, and lets them be two where they are not."""
    model = shutil.copytree(tied, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    head = {"lm_head.weight": table.clone() if same else table.flip(0)}
    save_file(tensors | head, model / "model.safetensors", {"format": "pt"})
    made = run(model, tmp_path / "run", "others={embeddings: 4, head: 4}", f"stream={stream}", stages=TO_EVAL)
    there = [(row.name, row.tied) for row in read_manifest(made.directory("export")).others]
    assert there == ([("model.embed_tokens", "lm_head")] if same else [("model.embed_tokens", None), ("lm_head", None)])
    assert evaluate.load(made).export_logit_error < 1e-5
    packed: Any = load_checkpoint(made.directory("export"), torch.float32, CPU)
    assert isinstance(packed.get_output_embeddings(), TiedHead) == same


def test_what_the_model_lacks_or_keeps_is_said(tmp_path: Path) -> None:
    model = family_models.save("jamba", tmp_path / "model")
    made = run(model, tmp_path / "run", "others={attention: 4, shared: 4}")
    table = others.table(made)
    assert table is not None
    assert table.absent == ("shared",)
    assert table.left
    assert all(name.endswith("dt_proj") for name in table.left)
    record = json.loads((made.directory("losses") / "stage.json").read_text())
    assert record["summary"]["others"]["not_in_this_model"] == ["shared"]
    assert record["summary"]["others"]["left_in_full_precision"] == len(table.left)


def test_tables_that_stay_as_they_are_are_not_said_to_be_missing(tmp_path: Path) -> None:
    """Gemma's table of words, of a class of its own, and its head, tied to it: "Not in this model" was said of both."""
    model = family_models.save("gemma4_text", tmp_path / "model")
    made = run(model, tmp_path / "run", "others={dense: 8, embeddings: 8, head: 8}")
    table = others.table(made)
    assert table is not None
    assert table.absent == ("dense",)
    assert table.left == {"model.embed_tokens": OWN_CLASS, "lm_head": OTHER_TIES}


def test_loading_without_moeq_fails_by_these_guards_alone(deepseek: Path, tmp_path: Path) -> None:
    made = run(deepseek, tmp_path / "run", "others={attention: 4}", stages=TO_EXPORT)
    folder = shutil.copytree(made.directory("export"), tmp_path / "copy")
    plain: Any = loading.load_model(made.model.source, torch.float32, CPU)
    headers = {key: header for path in folder.glob("others-*.safetensors") for key, header in read_header(path).items()}
    modules = read_manifest(folder).others
    assert len(modules) == 15
    for module in modules:
        assert (
            headers[f"{module.name}.weight"].shape == GUARD_SHAPE != plain.get_parameter(f"{module.name}.weight").shape
        )
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(plain).from_pretrained(folder)


@pytest.mark.full
def test_inspect_finds_a_flipped_bit(deepseek: Path, tmp_path: Path) -> None:
    made = run(deepseek, tmp_path / "run", ALL, stages=tuple(pipeline.BY_NAME))
    assert "What else was packed" in (made.directory("report") / "report.html").read_text()
    card = (made.directory("export") / "README.md").read_text()
    assert "| of it shared | 6 at 2 code bits, groups of 16 weights, with zero points:" in card
    found = inspection.inspect(made.directory("export"))
    assert set(found["packed_modules"]) == {"embeddings", "head", "attention", "dense", "shared"}
    path = made.directory("export") / "others-001.safetensors"
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"model\.layers\.1.*SHA-256 differs"):
        inspection.inspect(made.directory("export"))


def test_modules_of_unlike_types_are_not_touched(deepseek: Path, tmp_path: Path) -> None:
    made = run(deepseek, tmp_path / "run", ALL, stages=TO_EXPORT)
    packed: Any = load_checkpoint(made.directory("export"), torch.float32, CPU)
    original: Any = loading.load_model(made.model.source, torch.float32, CPU)
    kept = dict(original.named_parameters())
    left = {name for name, _ in packed.named_parameters()}
    assert left == {name for name in kept if "norm" in name or name.endswith("mlp.gate.weight")}
    assert all(torch.equal(kept[name], parameter) for name, parameter in packed.named_parameters())
    assert not any(isinstance(module, nn.Linear | nn.Embedding) for module in packed.modules())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": {"model.layers.0.mlp": 4}}, "names a module that is no linear"),
        ({"group_size": None}, "others: group_size"),
        ({"bits": {"lm_head": 5.5}}, "others: lm_head: a width must be of"),
        ({"extra": 1}, "others: unknown key 'extra'"),
        ({"tied": None}, "others: tied"),
    ],
)
def test_a_configuration_that_was_changed_is_refused(change: dict[str, Any], message: str) -> None:
    sound = {"bits": {"lm_head": 4}, "group_size": 16, "symmetric": False, "tied": {}}
    MoeqConfig(experts={}, others=sound)

    def loaded() -> None:
        others = MoeqConfig(experts={}, others=sound | change).stored.others
        assert others is not None
        replace_modules(family_models.build("mixtral"), others)

    with pytest.raises(ArtifactError, match=message):
        loaded()
