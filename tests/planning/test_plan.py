"""The verdict: what does not fit is named with its remedy; huge models are planned from headers alone."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import family_models
import pytest
import torch
from models.hub_server import serving
from rich.console import Console
from strangers import changed
from typer.testing import CliRunner

import moeq
from moeq import cli, terminal
from moeq.bundled import bundled_path
from moeq.errors import AssignmentError, CorpusError, MissingError, ModelError, PlanError
from moeq.models import source
from moeq.planning import plan as plan_module
from moeq.planning.capability import refusals
from moeq.planning.plan import error_of, make_plan
from moeq.planning.result import Machine, Need, Plan
from moeq.recipe import load_recipe
from moeq.registry import EXPORTERS, NATIVE_FORMAT
from moeq.stages import order
from moeq.stages.context import Context
from moeq.stages.needs import Sizes

GIB = 2**30
STAGES = tuple(stage.name for stage in order.STAGES if stage.name != "reparam")
FAMILIES = (
    "mixtral", "gpt_oss", "nemotron_h", "llama4", "qwen3_vl_moe", "dbrx", "jetmoe", "switch_transformers",
    "longcat_flash", "deepseek_v3", "granitemoe", "aria",
)  # fmt: skip
SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=32", "losses.group_size=16", "assign.code_bits=2",
    "eval.perplexity.sequences=4",
    "eval.perplexity.sequence_length=32", "eval.compare=[]", "estimate.grid.inputs=[128]",
)  # fmt: skip


def context_of(model: Path, tmp_path: Path, *overrides: str) -> Context:
    return Context(recipe=load_recipe(None, [*SMALL, *overrides]), model_name=str(model), out=tmp_path / "run")


def pretend(monkeypatch: pytest.MonkeyPatch, **limits: int | None) -> None:
    there = {"ram": 1 << 50, "gpu": None, "disk": 1 << 50, "disk_path": "/data"} | limits
    monkeypatch.setattr(plan_module, "machine", lambda *_: Machine(**there))  # type: ignore[arg-type]


def test_a_plan_measures_with_the_recipes_threads(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves the process those that it had; the run has them, and what it needs hangs on them."""
    before, seen = torch.get_num_threads(), []
    for name, told in (("measure", None), ("add_up", ())):
        monkeypatch.setattr(plan_module, name, lambda *_, told=told, **__: seen.append(torch.get_num_threads()) or told)
    make_plan(context_of(tiny_mixtral, tmp_path, f"threads={before + 2}"), probe=True)
    assert (seen, torch.get_num_threads()) == ([before + 2] * 2, before)


def need(stage: str, ram: int = 1, gpu: int = 0, size: int = 0, temporary: int = 0) -> Need:
    return Need(
        stage=stage,
        ram_terms={"model": ram},
        gpu_terms={"stopped batches": gpu},
        read=0,
        lasting={"x": size},
        linked=0,
        temporary=temporary,
        seconds=None,
    )


@pytest.mark.full
def test_a_217_gib_model_is_planned_from_its_headers(
    sparse_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(source, "digests_of_files", refuse)
    pretend(monkeypatch)
    started = time.monotonic()
    plan = make_plan(context_of(sparse_qwen, tmp_path, "losses.group_size=128"), probe=False)
    assert time.monotonic() - started < 60
    assert not (tmp_path / "run").exists()
    model = plan.model
    weights = 70 * 128 * 3 * 4096 * 1024
    assert model["expert_bytes"] == 2 * weights
    assert (model["decoder_layers"], model["moe_layers"], model["top_k"], model["streamed"]) == (70, 70, 8, True)
    assert model["resident_bytes"] == 2 * (2 * 151936 * 4096 + 4096)
    needs = {one.stage: one for one in plan.stages}
    block = model["largest_decoder_layer_bytes"]
    for stage in ("profile", "losses"):
        assert block < needs[stage].ram < model["resident_bytes"] + 4 * block + 8 * GIB
    codes = weights * (1 + 2 + 3 + 4 + 8) // 8
    assert codes < needs["losses"].written < 1.08 * codes
    assert needs["profile"].read >= model["bytes"]
    assert model["placed_expert_bytes"] < needs["eval"].ram < 2 * model["placed_expert_bytes"] + 20 * GIB


def test_what_is_short_is_named_with_need_and_remedy(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, ram=100 * 2**20)
    plan = make_plan(context_of(tiny_mixtral, tmp_path), probe=False)
    assert {one.stage for one in plan.shortages} == set(STAGES)
    assert {one.resource for one in plan.shortages} == {"memory"}
    error = error_of(plan)
    assert isinstance(error, PlanError)
    assert "needs" in str(error)
    assert "there are 100 MiB" in str(error)
    pretend(monkeypatch, disk=10_000)
    plan = make_plan(context_of(tiny_mixtral, tmp_path), probe=False)
    assert [(one.stage, one.resource) for one in plan.shortages] == [("losses", "disk")]
    assert "choose an --out on another disk than /data" in str(error_of(plan))
    assert plan.shortages[0].need == sum(one.written for one in plan.stages)
    pretend(monkeypatch)
    assert error_of(make_plan(context_of(tiny_mixtral, tmp_path), probe=False)) is None


def test_a_model_of_the_hub_is_planned_without_its_weights(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = make_plan(context_of(tiny_mixtral, tmp_path), probe=False)
    weights = (tiny_mixtral / "model.safetensors").stat().st_size
    with serving(tmp_path / "cache", monkeypatch) as hub:
        hub.repositories["org/tiny"] = tiny_mixtral
        context = replace(context_of(Path("org/tiny"), tmp_path), weights=False)
        plan = make_plan(context, probe=True)
        assert len(hub.gets("model.safetensors")) == 1
    for one, two in zip(here.stages, plan.stages, strict=True):
        assert (one.stage, one.ram, one.temporary) == (two.stage, two.ram, two.temporary)
        assert two.written == pytest.approx(one.written, abs=1000)  # the name, and the commit beside it
        assert (two.seconds or 0) > 0
    assert (here.download_bytes, plan.download_bytes) == (0, weights)
    assert "in 1 file to" in plan.notes[0]
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    most = plan.as_json()["disk_bytes"]
    assert most > weights
    limits: dict[str, Any]
    for limits, downloads, runs in (
        ({"disk": weights - 1}, False, False),  # nor would the run's own files, without the weights
        ({"disk": weights + most - 1}, True, False),
        ({"disk": weights + most}, True, True),
        ({"disk": most, "hub_disk": weights - 1, "hub_path": "/hub"}, False, True),
        ({"disk": most, "hub_disk": weights, "hub_path": "/hub"}, True, True),
    ):
        pretend(monkeypatch, **limits)
        short = [one.stage for one in make_plan(context, probe=False).shortages]
        assert ("download" not in short, not set(short) - {"download"}) == (downloads, runs), limits


@pytest.mark.cases(2)
@pytest.mark.parametrize("options", [
    {"bits": 2.5, "quality": "best"}, {"size": "3MiB", "for_": "transformers"}, {"bits": 3, "for_": "exl3"},
    {"preset": "paper-000"},
])  # fmt: skip
def test_a_plan_of_one_line_needs_no_weights_either(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "cache", monkeypatch) as hub:
        hub.repositories["org/tiny"] = bundled_path("tiny-mixtral")
        there = moeq.plan("org/tiny", out=tmp_path / "run", probe=False, **options)
        assert len(hub.gets("model.safetensors")) == 1
    here = moeq.plan("bundled:tiny-mixtral", out=tmp_path / "run", probe=False, **options)
    assert [one.ram for one in there.stages] == [one.ram for one in here.stages]
    assert there.download_bytes == (bundled_path("tiny-mixtral") / "model.safetensors").stat().st_size


def test_a_store_on_another_disk_needs_room_there(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(tiny_mixtral, tmp_path, f"store={tmp_path / 'shared'}")
    pretend(monkeypatch)
    here = {one.stage: one for one in make_plan(context, probe=False).stages}["losses"]
    pretend(monkeypatch, store_disk=1 << 50, store_path="/other")
    there = {one.stage: one for one in make_plan(context, probe=False).stages}["losses"]
    assert here.elsewhere == 0
    assert here.written - there.written == there.elsewhere > 100_000
    pretend(monkeypatch, store_disk=there.elsewhere - 1, store_path="/other")
    plan = make_plan(context, probe=False)
    assert [(one.stage, one.resource, one.need) for one in plan.shortages] == [("losses", "disk", there.elsewhere)]
    assert "choose a store on another disk than /other" in str(error_of(plan))


def test_verdicts_take_each_resource_by_itself() -> None:
    there = Machine(ram=10, gpu=5, disk=100, disk_path="/")
    fine = (need("profile", ram=10, gpu=5, size=60), need("losses", size=30, temporary=10))
    assert plan_module.shortages(fine, there) == []
    short = (need("profile", ram=11, gpu=6, size=60), need("losses", size=30, temporary=11), need("assign", size=50))
    found = [(one.stage, one.resource, one.need, one.do) for one in plan_module.shortages(short, there)]
    assert found == [
        ("profile", "memory", 11, "use stream: always"),
        ("profile", "GPU memory", 6, "use fewer corpus.sequences"),
        ("losses", "disk", 140, "choose an --out on another disk than /"),
    ]
    assert plan_module.shortages(short, Machine(ram=11, gpu=None, disk=140, disk_path="/")) == []


def test_command_prints_the_table_and_one_line(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--model", str(tiny_mixtral), "--out", str(tmp_path / "run")]
    arguments += [part for one in SMALL for part in ("--set", one)]
    done = CliRunner().invoke(cli.app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["fits"]
    assert all(stage["seconds"] > 0 for stage in found["stages"] if stage["stage"] != "assign")
    assert all(value > 0 for value in found["rates"].values())
    assert not (tmp_path / "run").exists()
    pretend(monkeypatch, ram=2**20)
    done = CliRunner().invoke(cli.app, [*arguments, "--json", "--no-probe"])
    assert done.exit_code == PlanError.exit_code
    found = json.loads(done.stdout)
    assert not found["fits"]
    assert found["rates"] is None
    assert found["stages"][0]["seconds"] is None
    assert done.stderr.count("\n") == 1
    monkeypatch.setattr("sys.argv", ["moeq", *arguments, "--no-probe"])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == PlanError.exit_code
    captured = capsys.readouterr()
    assert "short: memory" in captured.out
    assert max(map(len, captured.out.splitlines())) <= 80
    assert captured.err.startswith("moeq: does not fit: ")
    assert captured.err.count("\n") == 1


def test_the_widest_table_goes_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stages = tuple(need(stage, ram=999 * GIB, gpu=139 * GIB, size=2000 * GIB, temporary=999 * GIB) for stage in STAGES)
    there = Machine(ram=1, gpu=1, disk=1, disk_path="/")
    plan = Plan(recipe="r", model={}, stages=stages, machine=there, rates={}, refusals=(),
                shortages=tuple(plan_module.shortages(stages, there)), notes=())  # fmt: skip
    console = Console(width=200)
    width = max(len(line.rstrip()) for line in _text(console, terminal._plan_table(plan)).splitlines())
    assert width <= 80


def _text(console: Console, table: Any) -> str:
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_what_a_run_refuses_a_plan_refuses_in_the_same_words(tiny_mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(AssignmentError, match="gpu_experts is 9, the layer has 5 experts"):
        make_plan(context_of(tiny_mixtral, tmp_path, "assign.gpu_experts=9"), probe=False)
    with pytest.raises(CorpusError, match="129 tokens are more than the model's 128 positions"):
        make_plan(context_of(tiny_mixtral, tmp_path, "corpus.sequence_length=129"), probe=False)
    with pytest.raises(MissingError, match="no such file"):
        make_plan(context_of(tiny_mixtral, tmp_path, "corpus.source=/nowhere.txt"), probe=False)


def test_refused_families_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = family_models.save("doge", tmp_path / "doge")
    with pytest.raises(ModelError, match="its experts are single rows of two embeddings, not matrices"):
        make_plan(context_of(folder, tmp_path), probe=False)


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_supported_kind_of_experts_is_planned(family: str, tmp_path: Path) -> None:
    folder = family_models.save(family, tmp_path / family)
    plan = make_plan(context_of(folder, tmp_path), probe=False)
    assert plan.fits
    assert plan.model["bytes"] == plan.model["expert_bytes"] + plan.model["other_bytes"]
    assert plan.model["placed_expert_bytes"] < plan.model["expert_bytes"]


def test_formats_say_what_they_cannot_carry(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(tiny_mixtral, tmp_path)
    mixed = ((1, 2, 3, 4, 16),) * 2
    assert refusals(context, mixed) == []
    narrow = replace(EXPORTERS.get(NATIVE_FORMAT).targets[0], widths=(16,))
    changed(monkeypatch, EXPORTERS, NATIVE_FORMAT, targets=(narrow,))
    line = refusals(context, mixed)[0]
    assert line.startswith("export.format native cannot carry it: ")
    assert "1 bits; native loads 16; " in line
    assert line.endswith("; choose another format")
    plan = make_plan(context, probe=False)
    assert not plan.fits
    assert "cannot carry it" in str(error_of(plan))
    monkeypatch.undo()
    few = context_of(tiny_mixtral, tmp_path, "corpus.sequences=3")
    assert "raise corpus.sequences to 4" in refusals(few, mixed)[0]


def test_text_is_measured_as_the_run_reads_it(tiny_mixtral: Path, tmp_path: Path) -> None:
    from corpora import make_sequences, read_documents

    from moeq.models.corpus import Fields

    context = context_of(tiny_mixtral, tmp_path)
    text = Sizes(context).calibration
    documents = read_documents(context.text.calibration_sources, Fields(), context.model.tokenizer)
    everything = make_sequences(documents, context.model.tokenizer, length=32, count=None)
    assert 0.9 < text.whole / everything.ids.numel() < 1.1
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"text": document.text, "domain": document.domain} for document in documents]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "text.parquet")
    (tmp_path / "text.txt").write_text("\n".join(row["text"] for row in rows))
    for name in ("text.parquet", "text.txt"):
        again = Sizes(context_of(tiny_mixtral, tmp_path, f"corpus.source={tmp_path / name}"))
        assert 0.85 < again.calibration.whole / everything.ids.numel() < 1.15, name


@pytest.mark.parametrize(("dtype", "width"), [("auto", 2), ("float32", 4)])
def test_a_folded_checkpoint_is_counted_before_it_is_there(
    dtype: str, width: int, tiny_qwen: Path, tmp_path: Path
) -> None:
    context = context_of(tiny_qwen, tmp_path, "reparam.samples=4", f"reparam.dtype={dtype}")
    plan = make_plan(context, probe=False)
    assert [need.stage for need in plan.stages] == ["reparam", *STAGES]
    whole = source.open_source(str(tiny_qwen))
    weights = sum(header.bytes // 2 for header in whole.tensors.values())
    assert plan.stages[0].lasting["checkpoint"] == weights * width
    assert plan.stages[0].ram_terms
