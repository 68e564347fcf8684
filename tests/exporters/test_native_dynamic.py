"""Checkpoints whose experts change between two of their widths: opened, begun, followed by commands, refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from moeq import pipeline, preflight
from moeq.artifacts import dynamic_log
from moeq.artifacts.bench import manifest_digest, read_bench
from moeq.artifacts.manifest import read_manifest
from moeq.benching import measure
from moeq.benching.asked import Asked
from moeq.benching.tables import tables as bench_tables
from moeq.comparison.eval_options import EvalOptions
from moeq.comparison.refusals import needs_a_run
from moeq.comparison.side_by_side import compare
from moeq.comparison.subjects import Subject, open_subjects
from moeq.errors import MoeqError
from moeq.exporters import native_dynamic
from moeq.exporters.native_dynamic import open_dynamic
from moeq.generation import generate
from moeq.inspection import inspect
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.reporting.followed import followed, shares
from moeq.runtime.dynamic.needs import ACTIVATIONS, CACHE, WEIGHTS
from moeq.runtime.dynamic.options import DynamicOptions, Following, in_words
from moeq.runtime.dynamic.told import table
from moeq.stages.context import Context
from moeq_kernels.cpu.forms import forms
from moeq_kernels.names import VARIABLE

SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=32", "losses.group_size=16", "losses.bits=[1,2,3,4]",
    "losses.methods=[rtn]", "losses.per_projection=false", "export.verify=false", "eval.compare=[]",
)  # fmt: skip
MIXED = ("assign={method: prefix-split, code_bits: 3, gpu_experts: 1}", "quantize.replicas=all")
FOLLOWS = "period=2,ema=0.5,certainty=0,threshold=0"


@pytest.fixture(autouse=True)
def _nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One form of kernel for all: which one is fastest would be measured anew."""
    monkeypatch.setenv(VARIABLE, next(iter(forms())))


@pytest.fixture(scope="session")
def made(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A checkpoint of the tiny model as a recipe's further keys say; losses are measured once."""
    first = tmp_path_factory.mktemp("dynamic")

    @cache
    def of(*keys: str) -> Path:
        out = first / str(abs(hash(keys)))
        done = next((path for path in first.iterdir()), None)
        if done is not None:
            shutil.copytree(done, out)
        recipe = load_recipe(None, [*SMALL, *keys])
        context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=out, reporter=Reporter(quiet=True))
        pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
        return context.directory("export")

    return of


@pytest.fixture(scope="session")
def checkpoint(made: Callable[..., Path]) -> Path:
    return made(*MIXED)


def memory(checkpoint: Path, places: int, **given: Any) -> int:
    """Bytes of a budget with so many experts of every layer in high precision."""
    with open_dynamic(checkpoint, DynamicOptions(memory=1 << 30, **given), policy="fixed") as dynamic:
        budget = dynamic.budget
        each = len(budget.layers) * (budget.high_bytes - budget.low_bytes)
        return sum(budget.other_bytes.values()) + budget.least_bytes + places * each


# opened


def test_it_begins_as_it_is_placed(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    settings = DynamicOptions(memory=memory(checkpoint, 1))
    with open_dynamic(checkpoint, settings, policy="fixed") as dynamic:
        assert (dynamic.settings.high, dynamic.settings.low) == (4, 2)
        assert dynamic.places == 1
        for number, layer in enumerate(manifest.layers):
            on_gpu = [expert.tier == "gpu" for expert in layer.experts]
            assert dynamic.high(number).tolist() == on_gpu


def test_without_memory_experts_take_what_the_assignment_takes(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    with open_dynamic(checkpoint, "high=4,low=2", tokens=10, policy="fixed") as dynamic:
        experts = [expert for layer in manifest.layers for expert in layer.experts]
        sizes = {bits: max(one.bytes for expert in experts for one in expert.replicas if one.bits == bits)
                 for bits in (2, 4)}  # fmt: skip
        layers, places = len(manifest.layers), dynamic.places
        taken = len(experts) * sizes[2] + places * layers * (sizes[4] - sizes[2])
        assert taken <= manifest.totals.placed_expert_bytes
        full = places == manifest.layers[0].num_experts
        assert full or taken + layers * (sizes[4] - sizes[2]) > manifest.totals.placed_expert_bytes
        assert set(dynamic.budget.other_bytes) == {WEIGHTS, CACHE, ACTIVATIONS}
        assert dynamic.budget.memory_bytes == sum(dynamic.budget.other_bytes.values()) + dynamic.budget.pool_bytes


def test_keys_and_values_are_those_of_the_model(checkpoint: Path) -> None:
    with open_dynamic(checkpoint, tokens=50, policy="fixed") as dynamic:
        config = dynamic.model.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        each = 2 * config.num_hidden_layers * config.num_key_value_heads * head * dynamic.model.dtype.itemsize
        assert dynamic.budget.other_bytes[CACHE] == 50 * each
    with open_dynamic(checkpoint, "tokens=0", tokens=50, policy="fixed") as dynamic:
        assert set(dynamic.budget.other_bytes) == {WEIGHTS}


@pytest.mark.parametrize(
    ("given", "pair"), [({}, (4, 2)), ({"high": 16}, (16, 4)), ({"low": 4}, (16, 4)), ({"high": 16, "low": 2}, (16, 2))]
)
def test_pairs_of_widths(checkpoint: Path, given: dict[str, int], pair: tuple[int, int]) -> None:
    with open_dynamic(checkpoint, DynamicOptions(memory=1 << 30, **given), policy="fixed") as dynamic:
        assert (dynamic.settings.high, dynamic.settings.low) == pair


def test_usual_pairs_come_first() -> None:
    options = DynamicOptions()
    assert options.pair({1, 2, 3, 4, 8, 16}, "") == (4, 2)
    assert options.pair({4, 8, 16}, "") == (16, 4)
    assert options.pair({1, 3}, "") == (3, 1)
    assert DynamicOptions(high=8).pair({1, 2, 4, 8}, "") == (8, 4)
    assert DynamicOptions(low=1).pair({1, 2, 4, 8}, "") == (2, 1)


# commands


def evaluated(words: list[Path], **given: Any) -> list[dict[str, Any]]:
    found = compare(EvalOptions(recipe=[str(word) for word in words], window=24, quiet=True, **given))
    rows: list[dict[str, Any]] = found["rows"]
    return rows


@pytest.mark.cases(1)
@pytest.mark.parametrize("width", [2, 4])
def test_all_low_or_all_high_is_the_static_checkpoint(made: Callable[..., Path], checkpoint: Path, width: int,
                                                      tmp_path: Path) -> None:  # fmt: skip
    static = made(f"assign={{method: uniform, bits: {width}}}")
    wanted = memory(checkpoint, 0) if width == 2 else 1 << 30
    text = tmp_path / "text.txt"
    text.write_text("The first of all ways to measure is to count. " * 12)
    one, two, three = evaluated([static, checkpoint], text=str(text), dynamic=[f"memory={wanted},period=1"])
    experts = read_manifest(checkpoint).layers[0].num_experts
    assert three["dynamic"]["high_experts_a_layer"] == (0 if width == 2 else experts)
    assert three["perplexity"]["perplexity"] == one["perplexity"]["perplexity"] != two["perplexity"]["perplexity"]
    assert three["name"].startswith(f"{checkpoint.parent.name}/checkpoint dynamic 4/2 bits in ")
    assert three["name"].endswith("period=1")
    prompt, length = "The first", {"max_new_tokens": 8, "temperature": 0.0, "seed": 0, "device": "cpu"}
    following = Following(options=DynamicOptions(memory=wanted + (1 << 20) * (width == 4), tokens=0))
    told = generate(checkpoint, prompt, dynamic=following, **length)
    assert told["text"] == generate(static, prompt, **length)["text"]
    assert told["dynamic"]["high_bits"] == 4


def test_the_same_texts_give_the_same_results_and_a_log(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{number} words about {number * number}." for number in range(80)))
    given = {"text": str(text), "batch_size": "1", "dynamic": [f"memory={memory(checkpoint, 1)},{FOLLOWS}"]}
    logs = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    rows = [evaluated([checkpoint], dynamic_log=log, **given)[1] for log in logs]
    assert rows[0]["perplexity"] == rows[1]["perplexity"]
    assert rows[0]["dynamic"] == rows[1]["dynamic"]
    assert rows[0]["dynamic"]["promotions"] > 0
    assert rows[0]["of"]["dynamic"]["ema"] == 0.5
    assert logs[0].read_bytes() == logs[1].read_bytes()
    described = inspect(logs[0])
    assert described["kind"] == "log of dynamic precision"
    assert described["ended"] == "yes"
    for name in ("promotions", "demotions", "copied_bytes", "host_hits", "host_misses", "failures"):
        assert described[name] == rows[0]["dynamic"][name]


def test_a_log_says_what_was_there(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    settings = DynamicOptions.parse(f"memory={memory(checkpoint, 2)},{FOLLOWS}")
    with open_dynamic(checkpoint, settings, copies="between", policy="fixed", log=path) as dynamic:
        began = [dynamic.high(number) for number in range(len(dynamic.layers))]
        torch.manual_seed(0)
        for _ in range(20):
            dynamic(input_ids=torch.randint(0, 200, (1, 7)))
        dynamic.copies.settle()
        now = [dynamic_log.mask(dynamic.high(number).tolist()) for number in range(len(dynamic.layers))]
        shown = table(dynamic, began)
        killed = path.read_text("utf-8")
    log = dynamic_log.read_log(path)
    assert [step for step, _ in log.sets] == [0, *range(2, 21, 2), 20]
    assert [int(mask, 16) for mask in now] == list(log.sets[-1][1])
    assert log.sums.promotions == dynamic.summary()["promotions"] > 0
    assert dynamic_log.is_log(path)
    path.write_text(killed + '{"step": 22, "hig')
    cut = dynamic_log.read_log(path)
    assert cut.end is None
    assert cut.decisions == log.decisions
    assert inspect(path)["ended"].startswith("no")
    assert "promotions" in in_words(dynamic.summary())
    reporter = Reporter()
    reporter.console.width = 60
    with reporter.console.capture() as captured:
        reporter.console.print(shown)
    lines = captured.get().splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert len(lines) >= 2 + len(dynamic.layers)


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda line: line | {"high": line["high"][1:]}, "sets of"),
        (lambda line: line | {"high": ["ffff"] * len(line["high"])}, "an expert that its layer has not"),
        (lambda line: line | {"step": -1}, "step"),
        (lambda line: line | {"switches": [{"layer": 0, "expert": 99, "version": 1}]}, "no expert 99 of layer 0"),
        (lambda line: line | {"copied_bytes": "many"}, "copied_bytes"),
        (lambda _: [], "no object"),
    ],
)
def test_damaged_logs_are_refused(
    checkpoint: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    path = tmp_path / "log.jsonl"
    with open_dynamic(checkpoint, "memory=1GiB,period=1,copies=between", policy="fixed", log=path) as dynamic:
        dynamic(input_ids=torch.tensor([[1, 2, 3]]))
    lines = path.read_text("utf-8").splitlines()
    lines[1] = json.dumps(change(json.loads(lines[1])))
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(MoeqError, match=said) as caught:
        inspect(path)
    assert caught.value.exit_code == 7
    assert caught.value.where == f"{path}, line 2"


def test_a_bench_beside_static_precision(checkpoint: Path, tmp_path: Path) -> None:
    options = DynamicOptions.parse(f"memory={memory(checkpoint, 2)},{FOLLOWS},tokens=0,copies=between")
    asked = Asked(checkpoint=str(checkpoint), dynamic=options, batches=(1, 2), prompt_tokens=6, new_tokens=5, repeat=2)
    found = measure.bench(asked, Reporter(quiet=True))
    measure.write(tmp_path, found)
    assert not (tmp_path / measure.POINTS).exists()
    dynamic = found["dynamic"]
    assert [way["name"] for way in dynamic["ways"]] == ["static high", "static low", "static mixed", "dynamic"]
    high, low, mixed, following = (way["expert_bytes"] for way in dynamic["ways"])
    assert low < mixed < high
    assert mixed <= following == dynamic["summary"]["pool_bytes"]
    for way in dynamic["ways"]:
        assert [point["batch"] for point in way["points"]] == [1, 2]
        for point in way["points"]:
            assert point["decode_tokens_per_second"] == point["batch"] / point["token_seconds"]
            assert point["prefill_tokens_per_second"] == point["batch"] * 6 / point["first_token_seconds"]
    assert [point["decode_of_low"] for point in dynamic["ways"][1]["points"]] == [1, 1]
    counted = [point["promotions"] for point in dynamic["ways"][-1]["points"]]
    assert 0 < sum(counted) <= dynamic["summary"]["promotions"]
    steps = [moment["step"] for moment in dynamic["over_time"]]
    assert steps == [0, 2 + 5, 2 + 10, 4 + 15, 4 + 20]
    console = Console(width=80, record=True)
    for title, shown, notes in bench_tables(found):
        console.print(title, shown, *notes, sep="\n")
    assert all(len(line) <= 80 for line in console.export_text().splitlines())
    read = read_bench(tmp_path / "bench.json")
    assert read.dynamic is not None
    assert read.dynamic.manifest_sha256 == manifest_digest(checkpoint)
    assert shares(read.dynamic)[0] == 0 < shares(read.dynamic)[-1] <= 1
    page = followed(read).parts
    assert "<svg" in page[-1]
    assert "static mixed" in page[1]


def test_what_differs_stands_in_the_name() -> None:
    usual = DynamicOptions.parse("memory=1GiB").label((4, 2))
    assert usual == "dynamic 4/2 bits in 1.00 GiB"
    assert DynamicOptions.parse("memory=1GiB,period=2,tokens=0").label((4, 2)) == f"{usual} period=2 tokens 0"
    assert DynamicOptions.parse("memory=1GiB,tokens=512").label((4, 2)) == f"{usual} tokens 512"
    modes = DynamicOptions.parse("memory=1GiB,host=2GiB,busy=0.5,planes=false")
    assert modes.label((4, 2)) == f"{usual} busy=0.5 planes=false host 2.00 GiB"
    assert DynamicOptions.parse("memory=1GiB,host=1GiB,busy=0.25,planes=true").label((4, 2)) == usual


# refused


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("high=8", 3, "has replicas of every expert at 1, 2, 3, 4, 16 bits; 8 bits and fewer are asked for"),
        ("high=8,low=3", 3, "8 and 3 bits are asked for; name two of them, or export with quantize.replicas: all"),
        ("low=16", 3, "16 bits and more are asked for"),
        ("high=2,low=4", 2, "low must be below high"),
        ("high=5", 2, "high is '5'; give one of 1, 2, 3, 4, 8, 16"),
        ("bits=4", 2, "unknown option 'bits'"),
        ("memory", 2, "'memory' is not OPTION=VALUE; write for example memory=24GiB,high=4,low=2, or auto"),
        ("memory=24 wide", 2, "memory"),
        ("memory=4MB, memory=5MB", 2, "--dynamic: memory is there twice; name every option once"),
        ("period=0", 2, "period is '0'; give 1 or more"),
        ("ema=1", 2, "ema"),
        ("copies=none", 2, "copies"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(checkpoint: Path, text: str, code: int, said: str) -> None:
    with pytest.raises(MoeqError) as caught:
        preflight.check_dynamic(text, checkpoint)
    assert said in str(caught.value)
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)


def test_a_bench_of_both_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(MoeqError, match="--dynamic: is measured beside static precision alone; leave --grid out"):
        preflight.check_bench(Asked(checkpoint=str(checkpoint), dynamic=DynamicOptions(), grid=True), None)
    for grid, there in ((True, "{}"), (False, '{"grid": []}')):
        (tmp_path / "bench.json").write_text(there)
        with pytest.raises(MoeqError, match=r"bench\.json: holds a bench with(out)? --grid, which .*another directory"):
            preflight.check_bench(Asked(checkpoint=str(checkpoint), grid=grid), tmp_path)
        preflight.check_bench(Asked(checkpoint=str(checkpoint), grid=not grid), tmp_path)
    with pytest.raises(MoeqError, match="8 bits and fewer are asked for"):
        preflight.check_bench(Asked(checkpoint=str(checkpoint), dynamic=DynamicOptions(high=8)), None)


def test_options_without_dynamic_are_refused(tmp_path: Path) -> None:
    for given, said in (({"log": tmp_path / "log"}, "--dynamic-log"), ({"watch": True}, "--watch")):
        with pytest.raises(MoeqError, match=f"{said}: no expert changes its precision; give --dynamic too"):
            preflight.check_dynamic(None, None, **given)
    with pytest.raises(MoeqError, match="is no file that can be written"):
        preflight.check_dynamic("auto", None, tmp_path)
    with pytest.raises(MoeqError, match="--dynamic belongs to models, checkpoints and runs"):
        needs_a_run(EvalOptions(dynamic=["auto"]))


def test_a_checkpoint_of_one_width_is_refused(made: Callable[..., Path]) -> None:
    single = made("assign={method: uniform, bits: 2}")
    with pytest.raises(MoeqError, match=r"at 2 bits, and two widths are needed; export with quantize.replicas: all"):
        evaluated([single], dynamic=["auto"])


def test_a_run_stands_for_its_checkpoint(checkpoint: Path) -> None:
    run, options = checkpoint.parent, DynamicOptions(period=2)
    rows = [row for row in open_subjects([f"{run}:original", str(run)], [options], False) if isinstance(row, Subject)]
    (dynamic,) = [row for row in rows if row.dynamic is not None]
    assert (dynamic.run, dynamic.checkpoint) == (None, checkpoint)
    assert dynamic.name == f"{run.name} {options.label((4, 2))}"


def test_what_has_no_packed_experts_is_refused(checkpoint: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint.parent / "recipe.yaml", tmp_path)
    for words, where in (([tiny_mixtral], tiny_mixtral), ([tiny_mixtral, Path(f"{tmp_path}:original")], tmp_path)):
        said = f"^{where}: no replicas of its experts; --dynamic needs a run's checkpoint with them"
        with pytest.raises(MoeqError, match=said):
            evaluated(words, dynamic=["auto"])
    with pytest.raises(MoeqError, match="a log has one row's decisions; give --dynamic once"):
        evaluated([checkpoint], dynamic=["auto", "period=2"], dynamic_log=checkpoint.parent / "log.jsonl")


def test_a_budget_that_is_too_small_says_the_sum(checkpoint: Path) -> None:
    least = memory(checkpoint, 0)
    with open_dynamic(checkpoint, DynamicOptions(memory=least), policy="fixed") as dynamic:
        assert dynamic.places == 0
    with pytest.raises(MoeqError) as caught:
        open_dynamic(checkpoint, DynamicOptions(memory=least - 1), tokens=16, policy="fixed")
    parts = (WEIGHTS, CACHE, ACTIVATIONS, "all experts in low precision", "more than")
    assert all(part in str(caught.value) for part in parts)
    assert caught.value.exit_code == 3


def test_an_assignment_of_fewer_bits_than_the_low_ones_is_no_budget(made: Callable[..., Path]) -> None:
    narrow = made("assign={method: uniform, bits: 2}", "quantize.replicas=all")
    with pytest.raises(MoeqError, match=r"all experts at 4 bits take .* of its own assignment; give memory"):
        open_dynamic(narrow, "high=16,low=4", policy="fixed")


def test_what_is_no_cpu_and_no_gpu_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_dynamic, "resolve_device", torch.device)
    with pytest.raises(MoeqError, match="a CPU or a CUDA GPU, and this is mps; give --device cpu or cuda") as caught:
        open_dynamic(checkpoint, device="mps")
    assert caught.value.exit_code == 3
    monkeypatch.setenv(VARIABLE, "plain")
    with pytest.raises(MoeqError, match="plain does not compute on cuda; leave it out"):
        open_dynamic(checkpoint, device="cuda")
