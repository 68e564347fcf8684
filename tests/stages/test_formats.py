"""Formats beside the native one, from the recipe to directories that load; resume; `moeq convert`."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import peers
import pytest
import torch
from fork_server import ForkServer
from made_sources import quantization_of, save_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moeq import conversion, pipeline, results
from moeq.artifacts.sums import write_sums
from moeq.errors import ArtifactError, EvaluationError, FormatError, RecipeError
from moeq.exporters import dequantized
from moeq.exporters.exporter import Loader
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.readers import open_packed
from moeq.folders import bytes_in
from moeq.inspection import inspect
from moeq.models.experts import stacked_weights
from moeq.models.loading import load_model
from moeq.models.source import open_source
from moeq.planning.capability import refusals
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.registry import Registry
from moeq.runtime.checkpoint import load_checkpoint
from moeq.runtimes import runtimes
from moeq.stages import assign, export
from moeq.stages.context import Context
from moeq.stages.export import format_directory
from moeq.stages.needs import Sizes
from moeq.verification.reference import values
from moeq.verification.weights import differences

STAGES = ("profile", "losses", "assign", "quantize", "export")
SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=32", "losses.group_size=32", "losses.methods=[rtn]",
    "losses.bits=[1, 2, 3, 4]", "assign.quantizer=rtn", "assign.method=frequency", "assign.code_bits=3",
    "others.attention=4", "others.head=8", "others.method=rtn", "eval.compare=[]",
)  # fmt: skip
CPU = torch.device("cpu")


def context_of(model: Path, out: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


def run(model: Path, out: Path, *overrides: str) -> Context:
    context = context_of(model, out, *overrides)
    pipeline.run(context, STAGES)
    return context


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "mixtral", "mixtral")


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    run(model, out, "export.formats=[dequantized]")
    return out


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "stage.json"}


@pytest.mark.full
def test_dequantized_holds_the_values_in_the_models_type(finished: Path) -> None:
    reader = NativeReader(finished / "checkpoint")
    plain = load_model(open_source(str(format_directory(finished, "dequantized"))), torch.float32, CPU)
    for layer in reader.layers:
        for expert in range(layer.num_experts):
            own = {name: stack[0] for name, stack in stacked_weights(plain, layer, slice(expert, expert + 1)).items()}
            for projection, matrix in reader.expert(layer, expert)[0].items():
                values = matrix if isinstance(matrix, torch.Tensor) else matrix.dequantize(torch.bfloat16)
                assert torch.equal(own[projection], values.float())
    for name, weight in reader.others():
        assert torch.equal(plain.get_submodule(name).weight.data, weight.dequantize(torch.bfloat16).float())
    card = (format_directory(finished, "dequantized") / "README.md").read_text("utf-8")
    assert "# mixtral" in card
    assert "base_model" not in card, "a local name is none of the hub's"


@pytest.mark.full
def test_the_reader_gives_what_the_runtime_computes_with(finished: Path) -> None:
    reader = NativeReader(finished / "checkpoint")
    native = load_checkpoint(finished / "checkpoint", torch.float32, CPU)
    for layer in reader.layers:
        packed = native.get_submodule(layer.name)
        for expert in range(layer.num_experts):
            for projection, matrix in reader.expert(layer, expert)[0].items():
                values = matrix if isinstance(matrix, torch.Tensor) else matrix.dequantize()
                mine = packed.get_submodule(f"{expert}.{projection}")
                assert torch.equal(mine.values(torch.float32), values)  # type: ignore[operator]
    for name, weight in reader.others():
        assert torch.equal(native.get_submodule(name).values(torch.float32), weight.dequantize())  # type: ignore[operator]
    packed_names = {name for name, _ in reader.others()}
    assert "lm_head" in packed_names
    rest = set(reader.rest())
    assert not any("experts" in key or key.removesuffix(".weight") in packed_names for key in rest)
    assert "model.layers.0.block_sparse_moe.gate.weight" in rest


def test_a_checkpoint_beyond_the_size_is_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A size limits the native one alone, and values that are not packed never keep to it."""
    chosen = "assign={method: optimal, quantizer: rtn, size: 1200KiB}"
    context = context_of(model, tmp_path, chosen, "export={formats: [dequantized], verify: false}")
    pipeline.run(replace(context, reporter=Reporter()), STAGES)
    assert ": assign.size, 1.18 MiB, limits checkpoint, not this" in capsys.readouterr().err


def test_a_size_limits_what_is_written_for_the_target(model: Path, tmp_path: Path) -> None:
    """In AutoGPTQ's layout, which has zero points and groups that the native checkpoint does not."""
    names, chosen = ("gptqmodel", "auto-round"), "granularity: projection, gpu_experts: 1, size: 1650KB"
    wide = ("losses.bits=[2, 3, 4, 8]", "losses.symmetric=true", "others={attention: 4, method: rtn}")

    def asked(target: str) -> Context:
        section = f"assign={{method: optimal, quantizer: rtn, target: {target}, {chosen}}}"
        formats = f"export={{formats: [{', '.join(names)}], verify: false}}"
        return context_of(model, tmp_path, *wide, section, formats)

    pipeline.run(asked(names[0]), STAGES)
    assert 1_600_000 < bytes_in(format_directory(tmp_path, names[0])) <= 1_650_000
    widths = assign.load(asked(names[0])).expert_widths()
    for name in names:
        inputs = assign.inputs_of(asked(name), asked(name).recipe.assign, name)
        each, there = inputs.in_the_checkpoint(), bytes_in(format_directory(tmp_path, name))
        said = inputs.other_bytes + sum(each.stored(layer, width) for layer, of in enumerate(widths) for width in of)
        assert there <= said <= 1.03 * there


def test_damage_is_named(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "checkpoint", tmp_path / "broken")
    placed = json.loads((tmp_path / "broken" / "placement.json").read_text("utf-8"))
    placed["layers"][1]["hidden_size"] += 1
    (tmp_path / "broken" / "placement.json").write_text(json.dumps(placed))
    write_sums(tmp_path / "broken")
    with pytest.raises(ArtifactError, match=r"model\.layers\.1\.mlp\.experts: config\.json and the manifest differ"):
        NativeReader(tmp_path / "broken")
    placed["layers"][1]["hidden_size"] -= 1
    expert = placed["layers"][0]["experts"][2]
    expert["bits"] = expert["replicas"][0]["bits"] = 8 if expert["bits"] != 8 else 4
    (tmp_path / "broken" / "placement.json").write_text(json.dumps(placed))
    write_sums(tmp_path / "broken")
    reader = NativeReader(tmp_path / "broken")
    with pytest.raises(ArtifactError, match=r"model\.layers\.0\.mlp\.experts, expert 2, gate_proj: codes is"):
        reader.expert(reader.layers[0], 2)


@pytest.mark.full
def test_a_format_is_written_once_and_again_when_it_is_damaged(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = (
        "others.head=null",
        "losses.bits=[2, 3, 4]",
        "assign.method=uniform",
        "assign.code_bits=null",
        "assign.bits=3",
    )
    run(model, tmp_path, *changes)
    before = (tmp_path / "checkpoint" / "stage.json").read_text("utf-8")
    run(model, tmp_path, *changes, "export.formats=[auto-round]")
    directory = format_directory(tmp_path, "auto-round")
    first, stamp = contents(directory), (directory / "config.json").stat().st_mtime_ns
    assert quantization_of(directory)["bits"] == 3
    run(model, tmp_path, *changes, "export.formats=[auto-round, gptqmodel]")
    assert (directory / "config.json").stat().st_mtime_ns == stamp, "what is there is not written again"
    assert format_directory(tmp_path, "gptqmodel").is_dir()
    (directory / "config.json").unlink()
    (tmp_path / f"{directory.name}.partial").mkdir()
    again = run(model, tmp_path, *changes, "export.formats=[auto-round, gptqmodel]")
    assert contents(directory) == first
    assert not list(tmp_path.glob("*.partial"))
    assert json.loads(before)["digest"] == json.loads((tmp_path / "checkpoint" / "stage.json").read_text())["digest"]
    paths, steps = pipeline.result_paths(again), results.next_steps(again)
    assert paths["checkpoint for gptqmodel"].is_dir()
    assert [what for what in steps if what.startswith("check ")] == ["check it", "check auto-round", "check gptqmodel"]
    assert steps["check gptqmodel"] == f"moeq verify {paths['checkpoint for gptqmodel']}"
    assert "elsewhere" not in steps, "it has been written for others"
    there = runtimes()
    apart = replace(there["gptqmodel"].exporter, loaders=(Loader(name="gptqmodel", packages={}, load=None),))
    monkeypatch.setattr(results, "runtimes", lambda: there | {"gptqmodel": replace(there["gptqmodel"], exporter=apart)})
    assert "check gptqmodel" not in results.next_steps(again), "which nothing here runs"
    conversion.convert(tmp_path / "checkpoint", "gptqmodel", tmp_path / "converted")
    native = contents(format_directory(tmp_path, "gptqmodel"))
    converted = contents(tmp_path / "converted")
    differ = {name for name in native if native[name] != converted.get(name)}
    assert differ <= {"README.md", "provenance.json", "SHA256SUMS"}, "only what it was made of"


@pytest.mark.full
def test_what_cannot_be_carried_is_said_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    one = ("assign.method=uniform", "assign.code_bits=null", "assign.bits=1", "others.head=null")
    with pytest.raises(FormatError, match=r"export\.formats: auto-round: .*expert 0: 1 bits.*--widen"):
        run(model, tmp_path, *one, "export.formats=[auto-round]")
    assert not (tmp_path / "checkpoint").exists()
    trellis = ("losses.methods=[trellis]", "assign.quantizer=trellis", "export.formats=[auto-round]")
    with pytest.raises(FormatError, match=r"export\.formats: auto-round: trellis codes.*moeq run --for auto-round"):
        run(model, tmp_path / "trellis", "others.head=null", *trellis)
    assert not (tmp_path / "trellis").exists(), "before anything is measured"
    context = context_of(model, tmp_path, *one, "export.formats=[auto-round, transformers]", "export.widen=true")
    asked = ((1,) * 6,) * 2
    assert refusals(context, asked) == []
    narrow = context_of(model, tmp_path, *one, "export.formats=[gptqmodel]")
    assert any(
        "export.formats: gptqmodel cannot carry it" in line and "1 bits" in line for line in refusals(narrow, asked)
    )
    run(model, tmp_path, *one, "others.attention=null", "export.formats=[transformers]", "export.widen=true")
    declared = quantization_of(format_directory(tmp_path, "transformers"))
    assert declared["config_groups"]["group_0"]["weights"]["num_bits"] == 2


GGUF = (
    "others.head=null", "others.attention=null", "losses.bits=[2, 3, 4]", "losses.symmetric=true",
    "assign.method=uniform",
    "assign.code_bits=null", "assign.bits=4", "export.formats=[llama.cpp]", "eval.perplexity.sequence_length=32",
)  # fmt: skip


def test_gguf_is_written_verified_and_planned(tmp_path: Path) -> None:
    peers.module("gguf")
    model = save_model(tmp_path / "model", "qwen3_moe", norm_topk_prob=True)
    context = run(model, tmp_path / "run", *GGUF)
    out = format_directory(tmp_path / "run", "llama.cpp")
    found = open_packed(out, as_values=True)
    native = NativeReader(tmp_path / "run" / "checkpoint")
    for layer, mine in zip(native.layers, found.layers, strict=True):
        for expert in range(layer.num_experts):
            for name, matrix in native.expert(layer, expert)[0].items():
                assert torch.equal(values(found.expert(mine, expert)[0][name]), values(matrix))
    foretold = export.needs(Sizes(context)).files
    assert foretold["../checkpoint-llama.cpp"] == pytest.approx((out / "model.gguf").stat().st_size, rel=0.15)
    described = inspect(out.rename(tmp_path / "moved"))
    assert (described["experts"], described["loads_in"]) == ("6 stacks of Q4_0", {"llama.cpp": None})
    (tmp_path / "moved" / "stage.json").unlink()
    assert inspect(tmp_path / "moved") == described, "the same without the run's record, which convert writes none of"
    (tmp_path / "moved" / "model.gguf").write_bytes(b"")
    with pytest.raises(ArtifactError):
        inspect(tmp_path / "moved")


def test_what_gguf_cannot_carry_is_said_before_anything_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers.module("gguf")
    with pytest.raises(FormatError, match="attention within a window of 8 tokens"):
        run(model, tmp_path / "run", *GGUF)
    good = save_model(tmp_path / "model", "qwen3_moe", norm_topk_prob=True)
    narrow = context_of(good, tmp_path / "run", *GGUF)
    for bits, why in ((2, "2 bits of 128 inputs in groups of 32; llama.cpp has blocks of 256"), (4, "")):
        lines = [line for line in refusals(narrow, ((bits,) * 6,) * 2) if "llama.cpp" in line]
        assert [why in line for line in lines] == [True] * bool(why)
    mixed = ((4, 8, 4, 4, 4, 4),) * 2
    assert any("8 bits beside 4" in line for line in refusals(narrow, mixed))
    within = context_of(good, tmp_path / "run", *GGUF, "assign.target=llama.cpp")
    assert not [line for line in refusals(within, mixed) if "llama.cpp" in line]
    with pytest.raises(FormatError, match=r"lm_head: 8 bits with zero points; llama\.cpp.*set others\.symmetric"):
        run(good, tmp_path / "run", *GGUF, "others.head=8")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RecipeError, match="the package gguf is not installed"):
        run(good, tmp_path / "run", *GGUF)
    assert not list((tmp_path / "run").glob("profile*"))


@pytest.mark.full
def test_plan_counts_them(model: Path, tmp_path: Path) -> None:
    changes = ("others.head=null", "losses.bits=[2, 3, 4]", "assign.method=uniform", "assign.code_bits=null",
               "assign.bits=4", "export.formats=[gptqmodel, dequantized]",
               "eval.perplexity.sequence_length=32")  # fmt: skip
    context = run(model, tmp_path, *changes)
    foretold = export.needs(Sizes(context)).files
    for name in context.recipe.export.formats:
        size = sum(path.stat().st_size for path in format_directory(tmp_path, name).rglob("*") if path.is_file())
        assert foretold[f"../checkpoint-{name}"] == pytest.approx(size, rel=0.05)


def test_the_command_converts_and_refuses(moeq: ForkServer, finished: Path, tmp_path: Path) -> None:
    command = ("convert", finished / "checkpoint", "--to")
    done = moeq.run(*command, "dequantized", "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["for"], said["verified_with"]) == ("dequantized", "transformers")
    assert said["logits_error"] < 1e-3
    refused = moeq.run(*command, "gptqmodel", "--out", tmp_path / "no")
    assert refused.code == FormatError.exit_code
    assert len(refused.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "no").exists()
    with pytest.raises(RecipeError, match="is there already"):
        conversion.convert(finished / "checkpoint", "gptqmodel", tmp_path / "out")
    with pytest.raises(ArtifactError, match="nothing in it is packed"):
        conversion.convert(tmp_path / "out", "gptqmodel", tmp_path / "other")


def test_what_loads_wrongly_is_an_error(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer drops the sign of some values, which only loading can show."""
    whole = dequantized.value_of
    monkeypatch.setattr(dequantized, "value_of", lambda *given: whole(*given).abs())
    with pytest.raises(EvaluationError, match="its values differ"):
        conversion.convert(finished / "checkpoint", "dequantized", tmp_path / "out", verify=True)


def test_what_is_packed_beside_the_experts_is_compared_where_it_is_plain(finished: Path, tmp_path: Path) -> None:
    made = Path(shutil.copytree(format_directory(finished, "dequantized"), tmp_path / "made"))
    name = "model.layers.1.self_attn.q_proj"
    file = open_source(str(made)).tensors[f"{name}.weight"].file
    tensors = load_file(file)
    made_of, quiet = open_packed(finished / "checkpoint", as_values=True), Reporter(quiet=True)
    assert differences(made_of, open_packed(made, as_values=True), quiet) == []
    save_file(tensors | {f"{name}.weight": tensors[f"{name}.weight"].flip(0).contiguous()}, file, {"format": "pt"})
    assert differences(made_of, open_packed(made, as_values=True), quiet) == [f"{name}: its values differ"]


def test_guards_of_a_model_in_float16_are_none_of_its_values(tmp_path: Path) -> None:
    """They have its type, and stand where dequantized modules beside the experts do."""
    model = save_model(tmp_path / "model", "mixtral")
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16).save_pretrained(model)
    made = run(model, tmp_path / "run", "export.formats=[dequantized]")
    assert format_directory(made.out, "dequantized").is_dir()


@pytest.mark.cases(1)
@pytest.mark.parametrize("folded", [False, True])
def test_terms_of_the_model_that_have_changed_reach_all_that_is_made_of_it(
    model: Path, tmp_path: Path, folded: bool
) -> None:
    """No digest of the model has them, and no weight is another one."""
    own = Path(shutil.copytree(model, tmp_path / "model"))
    asked = ["export.formats=[dequantized]", "export.verify=false"]
    asked += ["reparam={compare: false, samples: 2}"] if folded else []
    for terms in ("mit", "apache-2.0"):
        (own / "LICENSE").write_text(terms)
        (own / "README.md").write_text(f"---\nlicense: {terms}\n---\n")
        context = context_of(own, tmp_path / "run", *asked)
        made = pipeline.run(context, (*(["reparam"] if folded else []), *STAGES))
        ran = [outcome.stage for outcome in made if not outcome.skipped]
        for name in ("checkpoint", "checkpoint-dequantized", *(["reparam/checkpoint"] if folded else [])):
            assert (context.out / name / "LICENSE").read_text() == terms
            assert f"license: {terms}" in (context.out / name / "README.md").read_text()
    assert ran == [*(["reparam"] if folded else []), "export"]


def test_versions_of_somebody_elses_exporter_are_kept_apart(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(model, tmp_path)
    context.directory("export").mkdir(parents=True)
    (context.directory("export") / "placement.json").write_text("{}")
    keys = set()
    for package in (None, "strangers 1.0", "strangers 2.0"):
        monkeypatch.setattr(Registry, "origin", lambda _, name, by=package: by if name == "auto-round" else None)
        keys.add(export._format_key(context, "auto-round"))
    assert len(keys) == 3
