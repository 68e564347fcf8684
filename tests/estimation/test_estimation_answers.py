"""moeq estimate without a run: every way to name a model, what is printed and written, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from moeq.artifacts.assignment import Assignment, ExpertChoice, LayerAssignment, write_assignment
from moeq.artifacts.trace import RoutingTrace, write_trace
from moeq.cli import app
from moeq.errors import MoeqError
from moeq.estimation.estimate_options import EstimateOptions
from moeq.estimation.subject import read_model
from moeq.estimator import (
    Grid,
    ModelGeometry,
    estimate,
    geometry_from_config,
    load_geometry,
    load_hardware,
    uniform_placement,
)
from moeq.estimator.cases import EstimateDocument
from moeq.estimator.sheets import known_sheets
from moeq.models import loading
from moeq.models.source import open_source
from moeq_kernels.widths import Encoding

RECIPE = Path(__file__).parents[2] / "recipes" / "paper-000-figures.yaml"
SMALL = ("--model", "mixtral-8x7b", "--bits", "3", "--gpu-experts", "4")
ONE = ("--grid", "in=128", "out=512", "batch=1")


def moeq(*arguments: str | Path, columns: int = 80) -> tuple[int, str]:
    """Exit code and what is printed, or the one line of the error."""
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["estimate", *map(str, arguments)])
    if isinstance(done.exception, MoeqError):
        assert "\n" not in str(done.exception)
        return done.exception.exit_code, str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def as_json(*arguments: str | Path) -> Any:
    code, text = moeq(*arguments, "--json")
    assert code == 0, text
    return json.loads(text)


def assigned(path: Path, layers: int, experts: int, **codes: Any) -> Path:
    """An assignment of 2 and 4 bits, or others, in turns, whose first expert is on the GPU in FP16."""
    turns = codes.pop("turns", (2, 4))
    choices = tuple(
        ExpertChoice(tier="gpu" if e == 0 else "ndp", bits=16 if e == 0 else turns[e % 2], importance=1.0)
        for e in range(experts)
    )
    every = tuple(LayerAssignment(name=f"layer {index}", experts=choices) for index in range(layers))
    write_assignment(
        path, Assignment(**{"name": "turns", "method": "optimal", "group_size": 64, "layers": every} | codes)
    )
    return path


@pytest.mark.full
def test_a_case_has_any_name(tmp_path: Path) -> None:
    stated = {"figure": "decode", "over": "monde_opt", "low": 1, "high": 2, "source": "here"}
    case = {"name": "3 bits [draft] [/b]", "geometry": "mixtral-8x7b", "bits": 3, "gpu_experts": 2, "stated": [stated]}
    grid = {"inputs": [128], "outputs": [512]}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"name": "named", "estimate": {"grid": grid, "figures": {"cases": [case]}}}), "utf-8")
    code, text = moeq(recipe, "--out", tmp_path / "out", columns=200)
    assert code == 0, text
    assert text.count("3 bits [draft] [/b]") >= 3  # in the table, in what is missed, and above what is its own


def test_the_figures_are_those_of_the_estimator() -> None:
    found = as_json(*SMALL, "--grid", "in=128,512", "out=512", "batch=1,4")
    geometry = load_geometry("mixtral-8x7b")
    made = estimate(geometry, load_hardware("paper-ctxmoe"), uniform_placement(geometry, bits=3, hot_experts=4))
    (case,) = found["cases"]
    rows = [row for row in case["estimate"]["speedups"] if row["baseline"] == "monde_bwrule" and row["batch"] == 1]
    assert [row["decode"] for row in rows] == pytest.approx(
        [made.speedups_over("monde_bwrule", batch=1)[0].decode] * 2, rel=1e-12
    )
    assert {point["batch"] for point in case["estimate"]["points"]} == {1, 4}


def test_names_of_policies_are_explained_below_their_table_with_their_papers() -> None:
    text = " ".join(moeq(*SMALL, *ONE, columns=160)[1].split())
    for name in (
        "NDP: near-data processing",
        "MoNDE: a GPU beside",
        "bandwidth rule: MoNDE's own",
        "HOBBIT: a GPU alone",
    ):
        assert name in text
    assert "https://arxiv.org/abs/2405.18832" in text


@pytest.mark.cases(1)
@pytest.mark.parametrize("columns", [40, 60, 80, 160])
def test_tables_fit_every_window(columns: int) -> None:
    code, text = moeq(*SMALL, *ONE, columns=columns)
    assert code == 0
    assert max(len(line) for line in text.splitlines()) <= columns
    flat = " ".join(text.split())
    for word in ("context_aware", "monde_bwrule", "monde_opt", "what it hangs on", "link.bandwidth", "8.56×"):
        assert word in flat


def test_only_chosen_policies_are_shown() -> None:
    found = as_json(*SMALL, *ONE, "--policy", "gpu_only")["cases"][0]["estimate"]
    assert {point["policy"] for point in found["points"]} == {"context_aware", "gpu_only", "monde_bwrule", "monde_opt"}
    assert {row["baseline"] for row in found["speedups"]} == {"gpu_only", "monde_bwrule", "monde_opt"}


def test_what_is_written(tmp_path: Path) -> None:
    out = tmp_path / "an estimate"
    printed = as_json(*SMALL, *ONE, "--out", out)
    assert EstimateDocument.model_validate_json((out / "estimate.json").read_text()).cases[0].capacity.fits
    assert json.loads((out / "estimate.json").read_text()) == {k: v for k, v in printed.items() if k != "paths"}
    assert set(printed["paths"].values()) <= {str(path) for path in out.iterdir()}
    page = (out / "estimate.html").read_text()
    assert page.count("<svg") == 2
    assert "MoNDE (bandwidth rule)" in page
    drawn = json.loads((out / "timeline.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in drawn if event["name"] == "process_name"]
    assert names == ["context_aware", "monde_bwrule", "monde_opt"]
    for number, name in enumerate(names, start=1):
        mine = [event for event in drawn if event["ph"] == "X" and event["pid"] == number]
        assert {event["args"]["layer"] for event in mine} == set(range(32))
        point = next(p for p in printed["cases"][0]["estimate"]["points"] if p["policy"] == name)
        end = max(event["ts"] + event["dur"] for event in mine)
        assert 0.3 < end / (1e6 * point["decode_seconds_per_token"]) < 3  # one outcome of the routing, not its mean
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    as_json(*SMALL, *ONE, "--out", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first
    (out / "recipe.yaml").touch()
    assert moeq(*SMALL, *ONE, "--out", out) == (2, f"--out {out}: a run lies in it; choose another --out")


@pytest.mark.full
def test_the_recipe_of_figures(tmp_path: Path) -> None:
    found = as_json(RECIPE, "--out", tmp_path / "out")
    assert len(found["cases"]) == 4
    assert sum(len(case["stated"]) for case in found["cases"]) == 14
    page = (tmp_path / "out" / "estimate.html").read_text()
    assert page.count("<svg") == 5  # what is stated, and latency and throughput of both models
    code, text = moeq(RECIPE, "--out", tmp_path / "out")
    assert code == 0
    assert text.count("missed  ") == 6
    assert "8x7B, 2 code bits, decode over MoNDE (bandwidth rule): 9.75×" in " ".join(text.split())
    slower = as_json(RECIPE, "--hardware", "h100-ndp-pcie4", "--grid", "in=128", "out=512", "--out", tmp_path / "other")
    assert slower["hardware"] == "h100-ndp-pcie4"
    assert all(row["missed"] for case in slower["cases"] for row in case["stated"] if row["figure"] == "decode")


def test_a_recipe_of_figures_is_no_run(tiny_mixtral: Path, tmp_path: Path) -> None:
    arguments = ["run", str(RECIPE), "--model", str(tiny_mixtral), "--out", str(tmp_path / "out")]
    short = [f"{key}.sequence_length=32" for key in ("corpus", "eval.perplexity")]
    refused = CliRunner().invoke(app, [*arguments, *(word for one in short for word in ("--set", one))]).exception
    assert isinstance(refused, MoeqError)
    assert refused.exit_code == 2
    assert "moeq estimate RECIPE" in str(refused)


def test_sizes_from_a_configuration_are_those_of_the_weights(tiny_mixtral: Path, tmp_path: Path) -> None:
    source = open_source(str(tiny_mixtral))
    skeleton, layers = loading.describe(source)
    experts = loading.expert_keys(source, skeleton, layers)
    rest = sum(int(np.prod(header.shape)) for key, header in source.tensors.items() if key not in experts)
    config = tmp_path / "config.json"
    config.write_bytes((tiny_mixtral / "config.json").read_bytes())
    for name in (str(tiny_mixtral), str(config)):
        found = read_model(name).geometry
        assert found.non_expert_parameters == rest
        assert (found.num_layers, found.num_experts) == (len(layers), layers[0].num_experts)
    known = geometry_from_config(
        source.config,
        num_moe_layers=len(layers),
        num_experts=layers[0].num_experts,
        expert_intermediate_size=layers[0].intermediate_size,
        non_expert_parameters=rest,
    )
    assert read_model(str(tiny_mixtral)).geometry.expert_parameters == known.expert_parameters


def test_a_quantized_configuration_counts_as_before(tiny_mixtral: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_mixtral / "config.json").read_text())
    packed = tmp_path / "packed.json"
    packed.write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    plain, other = (read_model(str(path)).geometry for path in (tiny_mixtral, packed))
    assert other.non_expert_parameters == plain.non_expert_parameters
    assert other.name == "packed"


def test_an_assignment(tiny_mixtral: Path, tmp_path: Path) -> None:
    geometry = read_model(str(tiny_mixtral)).geometry
    path = assigned(tmp_path / "assignment.json", geometry.num_layers, geometry.num_experts)
    case = as_json("--model", tiny_mixtral, "--assignment", path, *ONE)["cases"][0]
    assert case["estimate"]["placement"] == "turns"
    assert (case["estimate"]["group_size"], case["estimate"]["zero_points"]) == (64, True)
    hot = next(part for part in case["capacity"]["gpu"]["parts"] if part["name"] == "hot experts")
    assert hot["bytes"] == geometry.num_layers * geometry.expert_bytes(16, None)


def test_beside_dropped_experts_those_in_fp16_are_not_taken_for_one_bit(tmp_path: Path) -> None:
    """All of 8x22B's would fit the GPU then, and be 16 times as fast as what does not."""
    path = assigned(tmp_path / "assignment.json", 56, 8, turns=(16, 0))
    found = as_json("--model", "mixtral-8x22b", "--hardware", "h100-ndp-cxl", "--assignment", path, *ONE)
    beside = found["cases"][0]["without_ndp"]
    assert (beside["policy"], beside["narrowed"]) == ("gpu_only", False)
    assert beside["decode"] < 1


def test_codes_that_are_no_grids_count_with_their_blocks(tiny_mixtral: Path, tmp_path: Path) -> None:
    """i-quants of 2 bits take 2.5625, of 4 bits 4.25, where a scale for 256 weights would be a sixteenth of a bit."""
    geometry = read_model(str(tiny_mixtral)).geometry
    sizes, codes = (geometry.num_layers, geometry.num_experts), vars(Encoding.iq("iq-s"))
    path = assigned(tmp_path / "assignment.json", *sizes, **codes)
    found = as_json("--model", tiny_mixtral, "--assignment", path, *ONE)["cases"][0]
    widths = [(2.5625, 4.25)[expert % 2] for expert in range(1, geometry.num_experts)]
    taken = geometry.num_layers * geometry.expert_parameters * sum(widths) / 8
    assert found["estimate"]["capacity"]["ndp_expert_bytes"] == pytest.approx(taken)
    replicas = {part["name"]: part["bytes"] for part in found["capacity"]["ndp"]["parts"]}
    whole = geometry.num_layers * geometry.num_experts * geometry.expert_parameters / 8
    assert replicas["2-bit replicas"] == pytest.approx(2.5625 * whole)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--hardware", "paper-ctxmo", *SMALL), 10, ["unknown hardware", "did you mean 'paper-ctxmoe'"]),
        (("--hardware", "none.yaml", *SMALL), 13, ["none.yaml: no such file or directory"]),
        (("--model", "mixtral-8x7"), 10, ["unknown geometry 'mixtral-8x7'", "did you mean 'mixtral-8x7b'"]),
        (("--model", "./nowhere", "--bits", "3"), 13, ["./nowhere: no such file or directory"]),
        (("--model", "nowhere/config.json", "--bits", "3"), 3, ["nowhere/config.json"]),
        (("--model", "org/none", "--bits", "3"), 3, ["org/none: neither here nor to be had from the hub"]),
        (("--hardware", "paper-ctxmoe"), 2, ["no model; give --model"]),
        ((*SMALL, "--policy", "hobit"), 10, ["unknown policy 'hobit'; did you mean 'hobbit'"]),
        ((*SMALL, "--grid", "in=a"), 2, ["--grid in: 'a' is no whole number"]),
        ((*SMALL, "--grid", "in=1", "ou=2"), 2, ["ou=2: no recipe"]),
        (("--model", "mixtral-8x7b", "--bits", "0.5"), 2, ["--bits: 0.5 bits"]),
        (("--model", "mixtral-8x7b", "--gpu-experts", "9"), 10, ["9 hot experts of 8"]),
        (("--model", "mixtral-8x7b", "--gpu-experts", "8"), 10, ["does not fit: GPU: non-expert weights 2.99 GiB + hot",
                                                                 "= 87.1 GiB of 74.5 GiB", "at most 6"]),
        ((*SMALL, "--manifest", "x"), 2, ["--manifest and --bits or --gpu-experts each say"]),
        (("--model", "mixtral-8x7b", "--assignment", "none.json"), 13, ["none.json: no such file"]),
        (("--model", "mixtral-8x7b", "--manifest", "none"), 13, ["none: no such file"]),
        ((*SMALL, "--set", "seed=1"), 2, ["--set changes a recipe, and there is none"]),
        ((RECIPE, "--bits", "3"), 2, ["--bits cannot go with a recipe"]),
        ((RECIPE, "another"), 2, ["unexpected argument 'another'"]),
        ((RECIPE, "--hardware", "paper-ctxmo"), 10, ["did you mean 'paper-ctxmoe'"]),
        ((*SMALL, "--zipf", "1", "--trace", "x"), 2, ["--trace and --zipf each say"]),
        ((*SMALL, "--replicas", "0,2"), 2, ["--replicas: '0' is no width"]),
        ((*SMALL, "--zipf", "-1"), 10, ["Zipf exponent"]),
        (("--sheet", "paper-005"), 10, ["unknown sheet 'paper-005'", "paper-004"]),
        (("--sheet", "paper-004", "--bits", "3"), 2, ["--sheet uses nothing of --bits"]),
        (("--sheet", "paper-004", "--context", "3"), 2, ["--sheet uses nothing of --context"]),
        ((*SMALL, "--capacity", "--rate", "2"), 2, ["--capacity uses nothing of --rate"]),
        ((*SMALL, "--capacity", "--policy", "hobbit"), 2, ["--capacity uses nothing of --policy"]),
        ((*SMALL, "--capacity", "--zipf", "1"), 2, ["--capacity uses nothing of --zipf"]),
        ((RECIPE, "--group-size", "64"), 2, ["--group-size cannot go with a recipe"]),
        (("--model", "mixtral-8x7b", "--assignment", RECIPE, "--group-size", "64"), 2,
         ["--assignment and --group-size each say"]),
        (("mixtral-8x7b", "--bits", "3"), 2, ["mixtral-8x7b: no recipe", "a model as --model mixtral-8x7b"]),
    ],
)  # fmt: skip
def test_refusals(arguments: tuple[str | Path, ...], code: int, words: list[str]) -> None:
    found, text = moeq(*arguments)
    assert found == code, text
    for word in words:
        assert word in text


@pytest.mark.parametrize(("layers", "experts", "word"), [(1, 0, "1 MoE layers"), (0, -1, "experts a layer")])
def test_an_assignment_of_another_model(
    tiny_mixtral: Path, tmp_path: Path, layers: int, experts: int, word: str
) -> None:
    geometry = read_model(str(tiny_mixtral)).geometry
    path = assigned(tmp_path / "a.json", geometry.num_layers - layers, geometry.num_experts + experts)
    code, text = moeq("--model", tiny_mixtral, "--assignment", path, *ONE)
    assert code == 10
    assert text.startswith(f"{path}: ")
    assert word in text


def traced(path: Path, geometry: ModelGeometry, *, layers: int = 0, experts: int = 0) -> Path:
    """A random trace of two domains whose sequences each keep to their own two experts."""
    count, length, generator = 8, 12, np.random.default_rng(0)
    every = geometry.num_experts + experts
    own = np.stack([generator.permutation(every)[:2] for _ in range(count)])
    chosen = np.repeat(own, length, axis=0)[:, None, :].repeat(geometry.num_layers + layers, axis=1)
    write_trace(
        path,
        RoutingTrace(
            layers=tuple(f"layer {index}" for index in range(geometry.num_layers + layers)),
            num_experts=(every,) * (geometry.num_layers + layers),
            top_k=2,
            experts=chosen.astype(np.int16),
            lengths=np.full(count, length, np.int32),
            prefill=np.full(count, 4, np.int32),
            domains=("prose", "python") * (count // 2),
        ),
    )
    return path


def test_a_recorded_trace(tiny_mixtral: Path, tmp_path: Path) -> None:
    geometry = read_model(str(tiny_mixtral)).geometry
    path = traced(tmp_path / "trace.safetensors", geometry)
    arguments = ("--model", tiny_mixtral, "--bits", "2", "--gpu-experts", "2", "--trace", path, *ONE)
    case = as_json(*arguments)["cases"][0]
    assert case["estimate"]["routing"] == {"1": "trace"}
    overall = case["hit_rates"]["rows"][-1]
    assert [row["domain"] for row in case["hit_rates"]["rows"]] == ["prose", "python", "all"]
    assert overall["rates"]["context_aware"] == 1.0
    assert overall["rates"]["static"] < 1.0
    own = next(point for point in case["estimate"]["points"] if point["policy"] == "context_aware")
    assert own["gpu_expert_share"] == 1.0
    code, text = moeq(*arguments)
    assert code == 0
    assert "as recorded, 8 sequences" in " ".join(text.split())
    assert "expert tokens that the GPU serves" in text


@pytest.mark.parametrize(
    ("change", "word"), [({"layers": 1}, "3 MoE layers"), ({"experts": 1}, "experts a layer"), (None, "no such file")]
)
def test_a_trace_that_is_not_of_this_model(
    tiny_mixtral: Path, tmp_path: Path, change: dict[str, int] | None, word: str
) -> None:
    path = tmp_path / "trace.safetensors"
    if change is not None:
        traced(path, read_model(str(tiny_mixtral)).geometry, **change)
    code, text = moeq("--model", tiny_mixtral, "--trace", path, *ONE)
    assert code == (13 if change is None else 10)
    assert text.startswith(f"{path}: ")
    assert word in text


@pytest.mark.full
def test_skewed_routing_and_growing_keys_and_values() -> None:
    plain, skewed, growing = (as_json(*SMALL, *ONE, *more)["cases"][0]["estimate"]["points"] for more in
                              ((), ("--zipf", "1.5"), ("--kv-growth",)))  # fmt: skip

    def of(points: list[dict[str, Any]], field: str) -> float:
        return next(float(point[field]) for point in points if point["policy"] == "context_aware")

    assert of(skewed, "gpu_expert_share") > of(plain, "gpu_expert_share") + 0.1
    assert of(growing, "decode_seconds_per_token") < of(plain, "decode_seconds_per_token")  # 384 tokens on average


def test_what_is_said_of_a_growing_context_is_of_the_context_that_it_grows_to(tmp_path: Path) -> None:
    """The timeline, the intervals and the page are those of requests as long as the table's."""
    long = ("--model", "mixtral-8x7b", "--bits", "3", "--gpu-experts", "3", "--grid", "in=12000", "out=2000", "batch=8")
    moeq(*long, "--kv-growth", "--out", tmp_path)
    fixed = as_json(*long, "--context", "13000")["cases"][0]
    grown = as_json(*long, "--kv-growth")["cases"][0]
    for one, other in zip(grown["intervals"], fixed["intervals"], strict=True):
        assert (one["low"], one["high"]) == pytest.approx((other["low"], other["high"]), rel=1e-3)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    mine = [event for event in events if "dur" in event and "context" in names[event["pid"]]]
    dense = sum(event["dur"] for event in mine if event["name"] == "dense")
    terms = {row["term"]: row["seconds"] for row in grown["estimate"]["terms"] if row["policy"] == "context_aware"}
    assert dense / 1e6 == pytest.approx(terms["dense"], rel=1e-3)
    page = (tmp_path / "estimate.html").read_text()
    assert "the decode step attends to the prompt and what was decoded so far." in page


def test_tens_of_thousands_of_tokens_are_written_out() -> None:
    """A range of them had its first end without the power of ten: 1.533-2.538e+04 tokens a second."""
    many = ("--model", "qwen3-30b-a3b", "--hardware", "h200-x8-nvlink", "--bits", "4", "--gpu-experts", "128")
    code, text = moeq(*many, "--grid", "in=128", "out=128,8192", "batch=128", "--kv-growth", columns=100)
    assert code == 0
    row = next(line for line in text.splitlines() if line.startswith("context_aware "))
    assert "15,335-25,376" in row
    assert "e+0" not in text


def test_policies_that_cannot_run_are_left_out_or_refused() -> None:
    """All experts of Mixtral-8x22B at 5 bits do not fit the GPU."""
    large = ("--model", "mixtral-8x22b", "--bits", "5", "--gpu-experts", "1", *ONE)
    found = as_json(*large)["cases"][0]["estimate"]
    assert "static_mixed" in {row["policy"] for row in found["refused"]}
    assert "static_mixed" not in {point["policy"] for point in found["points"]}
    code, text = moeq(*large)
    assert code == 0
    assert "static_mixed: cannot run" in text
    code, text = moeq(*large, "--policy", "static_mixed")
    assert code == 10
    assert "static_mixed" in text


def test_capacity() -> None:
    code, text = moeq("--capacity", "--model", "mixtral-8x22b", "--gpu-experts", "2", "--grid", "in=128", "out=512")
    assert code == 0
    assert "most FP16 experts a layer on the GPU at 1 x 1,024 tokens: 2" in text  # the default context
    code, text = moeq("--capacity", *SMALL, "--grid", "in=128", "out=512", "--kv-growth")
    assert "at 1 x 640 tokens: 6" in text
    assert "at 1 x 9,000 tokens: 6" in moeq("--capacity", *SMALL, *ONE, "--context", "9000")[1]
    found = as_json("--capacity", "--model", "mixtral-8x22b", "--gpu-experts", "2")
    assert found["fits"]
    assert [row["gpu_experts"] for row in found["by_gpu_experts"]] == [0, 1, 2]


def test_fewer_replicas_fit_where_all_do_not() -> None:
    large = ("--capacity", "--model", "qwen3-235b-a22b", "--gpu-experts", "12")
    code, text = moeq(*large)
    assert code == 10
    assert "near-data memory: FP16 experts 423 GiB + 1-bit replicas" in text
    assert "keep fewer replicas" in text
    assert [part["name"] for part in as_json(*large, "--replicas", "1")["ndp"]["parts"]] == [
        "FP16 experts",
        "1-bit replicas",
    ]
    assert len(as_json(*large, "--replicas", "none")["ndp"]["parts"]) == 1
    estimated = as_json(*large[1:], *ONE, "--replicas", "1")["cases"][0]["estimate"]["capacity"]
    assert estimated["replica_bits"] == [1]


def test_capacity_is_refused_with_the_sum_after_what_fits_is_shown() -> None:
    arguments = ["--capacity", "--model", "mixtral-8x22b", "--gpu-experts", "3"]
    code, text = moeq(*arguments)
    assert code == 10
    assert "does not fit: GPU: non-expert weights 9.93 GiB + hot experts 94.5 GiB" in text
    done = CliRunner().invoke(app, ["estimate", *arguments, "--json"])
    assert done.exit_code == 10
    assert not json.loads(done.stdout)["fits"]
    assert done.stderr.count("\n") == 1


def test_sheets_that_are_there_are_named_and_completed() -> None:
    option = EstimateOptions.__dataclass_fields__["sheet"].metadata["typer"].keywords
    assert option["autocompletion"]("p") == known_sheets()
    assert [name for name in known_sheets() if name not in option["help"]] == []


def test_sheets() -> None:
    code, text = moeq("--sheet", "paper-004")
    assert code == 0
    assert "GOPS per watt, recomputed" in text
    assert {"title", "columns", "rows", "notes"} <= set(as_json("--sheet", "paper-002")["pages"][0])


@pytest.mark.parametrize("name", ["published", "paper-004"])
def test_sheets_break_lines_only_between_words(name: str) -> None:
    """Rows that do not fit beside one another stand one below another."""
    pages = as_json("--sheet", name)["pages"]
    cells = [cell for page in pages for row in page["rows"] for cell in row if isinstance(cell, str)]
    words = {word for cell in cells for word in cell.split() if len(word) <= 40}
    for columns in (50, 100):
        code, text = moeq("--sheet", name, columns=columns)
        assert code == 0
        assert max(map(len, text.splitlines())) <= columns
        assert [word for word in words if word not in text] == []


def measured(path: Path, policies: tuple[str, ...] = ("context_aware", "monde_opt", "gpu_only")) -> Path:
    """Runs of Mixtral-8x7B on a machine whose link reaches 70 % of its bandwidth, as the estimator has them."""
    geometry, machine = load_geometry("mixtral-8x7b"), load_hardware("paper-ctxmoe").changed("link", efficiency=0.7)
    grid = Grid(inputs=(128, 2048), outputs=(512,), batches=(1, 4))
    made = estimate(geometry, machine, uniform_placement(geometry, bits=3, hot_experts=4), grid=grid)
    fields = ("policy", "batch", "input_tokens", "output_tokens", "end_to_end_seconds", "decode_seconds_per_token")
    rows = [
        ",".join(str(getattr(point, field)) for field in fields) for point in made.points if point.policy in policies
    ]
    path.write_text("\n".join([",".join(fields), *rows]) + "\n")
    return path


@pytest.mark.full
def test_a_fit(tmp_path: Path) -> None:
    path, fitted = measured(tmp_path / "measured.csv"), tmp_path / "mine.yaml"
    found = as_json("--fit", path, *SMALL, "--out", fitted)
    constants = {one["key"]: one for one in found["constants"]}
    assert constants["link.efficiency"]["value"] == pytest.approx(0.7, rel=0.01)
    assert found["held_out"]["mean"] < 0.01 < found["before"]["mean"]
    assert found["hardware_file"] == str(fitted)
    again = as_json("--hardware", fitted, *SMALL, *ONE)
    assert again["hardware"] == "mine"
    code, text = moeq("--fit", path, *SMALL, "--out", tmp_path / "folder")
    assert code == 0
    assert "held out" in text
    assert [one.name for one in (tmp_path / "folder").iterdir()] == ["paper-ctxmoe-fitted.yaml"]


def test_a_fit_that_cannot_be_made(tmp_path: Path) -> None:
    path = measured(tmp_path / "measured.csv", ("hobbit",))
    path.write_text(path.read_text().replace("hobbit,1,2048,512", "hobit,1,2048,512"))
    code, text = moeq("--fit", path, *SMALL)
    assert (code, text.startswith(f"{path}, row ")) == (10, True)
    assert "did you mean 'hobbit'" in text
    assert moeq("--fit", path, *SMALL, "--policy", "hobbit")[0] == 2
    assert moeq("--fit", tmp_path / "none.csv", *SMALL)[0] == 13


@pytest.mark.full
def test_several_hardware_are_compared(tmp_path: Path) -> None:
    both = ("--hardware", "h100-ndp-cxl", "--hardware", "h200-host-pcie5", "--replicas", "3")
    found = as_json("--model", "mixtral-8x7b", *ONE, *both, "--out", tmp_path / "out")
    assert [case["estimate"]["hardware"] for case in found["cases"]] == ["h100-ndp-cxl", "h200-host-pcie5"]
    assert found["hardware"] == "h100-ndp-cxl, h200-host-pcie5"
    assert [case["name"].split(":")[0] for case in found["cases"]] == ["h100-ndp-cxl", "h200-host-pcie5"]
    code, text = moeq("--model", "mixtral-8x7b", *ONE, *both, columns=100)
    assert code == 0
    table = text.split("J/token: of a request")[0].splitlines()
    assert any(line.startswith("h200-host-pcie5: 3 code bits") for line in table)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ((RECIPE,), "give one of them, or several with --model, to compare them"),
        (("--model", "mixtral-8x7b", "--capacity"), "give one of them"),
    ],
)
def test_several_hardware_where_one_is_taken(arguments: tuple[str | Path, ...], remedy: str) -> None:
    several = ("--hardware", "h100-ndp-cxl", "--hardware", "h200-host-pcie5")
    assert moeq(*arguments, *several) == (2, f"estimate: 2 times --hardware; {remedy}")


@pytest.mark.full
def test_hardware_that_is_too_small_is_left_out_of_a_comparison_and_said(tmp_path: Path) -> None:
    asked = ("--model", "deepseek-v3", *ONE, "--samples", "8", "--hardware", "rtx5090-host-pcie5")
    code, text = moeq(*asked, "--hardware", "h200-x8-nvlink", "--out", tmp_path / "out")
    assert code == 0
    assert "left out rtx5090-host-pcie5: does not fit: GPU: non-expert weights 31.9 GiB" in " ".join(text.split())
    assert "562,176 bytes a token of 1024 on 8 GPUs together" in " ".join(text.split())
    kept = EstimateDocument.model_validate_json((tmp_path / "out" / "estimate.json").read_text())
    assert [case.estimate.hardware for case in kept.cases] == ["h200-x8-nvlink"]
    assert len(kept.left_out) == 1
    assert "Left out: rtx5090-host-pcie5: does not fit" in (tmp_path / "out" / "estimate.html").read_text()
    code, text = moeq(*asked, "--hardware", "rtx5090-host-ssd")
    assert (code, "rtx5090-host-pcie5: does not fit" in text) == (10, True), (code, text)


def test_experts_on_the_gpu_may_be_quantized_too() -> None:
    model = ("--model", "mixtral-8x7b", "--hardware", "h100-ndp-cxl", *ONE, "--replicas", "3")
    half, quarter = (as_json(*model, "--gpu-bits", bits)["cases"][0] for bits in ("8", "4"))
    hot = [case["estimate"]["placement"] for case in (half, quarter)]
    assert hot == [
        "3 code bits, 8 of 8 experts on the GPU at 8",
        "3 code bits, 8 of 8 experts on the GPU at 4",
    ]
    usual, none = (as_json(*model, "--gpu-experts", hot)["cases"][0]["estimate"]["placement"] for hot in ("6", "0"))
    assert usual == "3 code bits, 6 of 8 experts on the GPU in FP16"
    assert none == "3 code bits, 0 of 8 experts on the GPU"
    terms = [case["estimate"]["terms"] for case in (half, quarter)]
    read = [next(row["bytes"] for row in rows if row["term"] == "gpu_experts") for rows in terms]
    assert read[0] / read[1] == pytest.approx((8 + 16 / 128) / (4 + 16 / 128))
    assert quarter["capacity"]["gpu_stored_bits"] == 4.125
    assert moeq(*model, "--gpu-bits", "0.5") == (2, "--gpu-bits: 0.5 bits; give 1 to 16")


@pytest.mark.full
def test_every_headline_has_what_needs_no_near_data_processor_beside_it(tmp_path: Path) -> None:
    """8x7B at the paper's widths fits the GPU whole and is faster there; 8x22B does with all experts at 3 or 2 bits."""
    found = as_json(RECIPE, "--out", tmp_path / "out")
    beside = [case["without_ndp"] for case in found["cases"]]
    assert [(each["policy"], each["narrowed"]) for each in beside] == [
        ("static_mixed", False), ("static_mixed", False), ("static_mixed", True), ("static_mixed", True),
    ]  # fmt: skip
    assert all(each["decode"] > 1 for each in beside)
    code, text = moeq(RECIPE, "--out", tmp_path / "out", columns=120)
    assert (code, text.count("Without near-data processing the fastest here is static_mixed")) == (0, 4)
    page = (tmp_path / "out" / "estimate.html").read_text()
    assert page.count("Without near-data processing the fastest here is static_mixed") == 8
    alone = as_json("--model", "mixtral-8x7b", "--hardware", "a100-host-pcie4", *ONE)
    assert alone["cases"][0]["without_ndp"] is None


def test_a_cache_of_fewer_bits_takes_less_and_is_read_faster() -> None:
    model = ("--model", "mixtral-8x7b", "--bits", "3", "--gpu-experts", "2", "--context", "32768", *ONE)
    whole, half = (as_json(*model, *more)["cases"][0] for more in ((), ("--cache-bits", "8")))
    kept = [case["capacity"]["gpu"]["parts"][2]["bytes"] for case in (whole, half)]
    assert kept[0] == 2 * kept[1] == 32768 * 32 * 4 * 8 * 128
    steps = [case["estimate"]["points"][0]["decode_seconds_per_token"] for case in (whole, half)]
    assert steps[1] < steps[0]
    assert half["geometry"]["cache_bits"] == 8
    assert "cache_bits" not in whole["geometry"]
    assert any("keys and values in 8 bits: 65,536 bytes a token" in line for line in half["estimate"]["assumptions"])
    assert moeq(*model, "--cache-bits", "0") == (2, "--cache-bits: 0 bits; give 1 to 32")


def test_all_but_the_experts_at_fewer_bits_takes_less_and_is_read_faster() -> None:
    model = ("--model", "mixtral-8x7b", "--bits", "3", "--gpu-experts", "2", *ONE)
    whole, half = (as_json(*model, *more)["cases"][0] for more in ((), ("--other-bits", "8")))
    rest = [case["capacity"]["gpu"]["parts"][0]["bytes"] for case in (whole, half)]
    assert rest[0] == 2 * rest[1] == 2 * 1_605_636_096
    dense = [
        next(row for row in case["estimate"]["terms"] if row["term"] == "dense" and row["policy"] == "context_aware")
        for case in (whole, half)
    ]
    assert dense[0]["bytes"] - dense[1]["bytes"] == pytest.approx(1_605_636_096)
    assert dense[1]["seconds"] < dense[0]["seconds"]
    assert "all but the experts at 8.00 bits a weight, under every policy" in half["estimate"]["assumptions"]
    assert moeq(*model, "--other-bits", "40") == (2, "--other-bits: 40 bits; give 1 to 32")


@pytest.mark.full
def test_a_recipe_may_have_the_sizes_themselves(tmp_path: Path) -> None:
    named = load_geometry("mixtral-8x7b").sizes()
    sizes = {key: value for key, value in named.items() if key not in ("name", "max_positions")}
    recipe = tmp_path / "own.yaml"
    cases = [
        {"name": "by name", "geometry": "mixtral-8x7b", "bits": 3, "gpu_experts": 4},
        {"name": "by sizes", "geometry": sizes, "bits": 3, "gpu_experts": 4},
    ]
    grid = {"inputs": [128], "outputs": [64]}
    recipe.write_text(json.dumps({"recipe_version": 1, "estimate": {"grid": grid, "figures": {"cases": cases}}}))
    one, other = as_json(recipe, "--out", tmp_path / "out")["cases"]
    assert other["geometry"]["name"] == "by sizes"
    assert one["estimate"]["points"] == other["estimate"]["points"]
    cases[1]["geometry"] = {**sizes, "top_k": 9}
    recipe.write_text(json.dumps({"recipe_version": 1, "estimate": {"grid": grid, "figures": {"cases": cases}}}))
    code, text = moeq(recipe, "--out", tmp_path / "out")
    assert (code, "top_k is 9 of 8 experts" in text) == (10, True)


@pytest.mark.full
def test_a_rate_of_requests(tmp_path: Path) -> None:
    model = ("--model", "mixtral-8x7b", "--bits", "3", "--hardware", "h100-ndp-cxl", "--replicas", "3", *ONE)
    (case,) = as_json(*model, "--gpu-experts", "4", "--rate", "0.5", "--out", tmp_path / "out")["cases"]
    rows = {row["policy"]: row for row in case["served"]}
    assert rows["static_mixed"]["keeps_up"]
    assert not rows["gpu_only"]["keeps_up"]
    assert "0.5 requests a second of 128 and 512 tokens" in (tmp_path / "out" / "estimate.html").read_text()
    for columns in (60, 100):
        code, text = moeq(*model, "--gpu-experts", "4", "--rate", "0.5", columns=columns)
        assert (code, "served: 0.5 requests a second" in text) == (0, True)
        assert max(map(len, text.splitlines())) <= columns
    assert moeq(*model, "--rate", "0")[0] == 2


def test_a_rate_minds_how_keys_and_values_grow() -> None:
    short = (
        "--model", "mixtral-8x7b", "--bits", "3", "--hardware", "h100-ndp-cxl", "--gpu-experts", "6", "--rate", "0.2",
        "--policy", "context_aware", "--grid", "in=100", "out=100", "batch=1",
    )  # fmt: skip
    of_context, growing = (
        {row["policy"]: row for row in as_json(*short, *more)["cases"][0]["served"]}["context_aware"]
        for more in (("--context", "4096"), ("--kv-growth",))
    )
    assert of_context["largest_batch"] < growing["largest_batch"]
    assert of_context["token_seconds"][0] > growing["token_seconds"][0]
    code, said = moeq(*short, "--context", "4096", "--kv-growth")
    assert (code, "--kv-growth takes the place of --context" in said) == (2, True)


def test_a_model_of_the_hub_whose_sizes_are_known_needs_no_network() -> None:
    asked = ("--hardware", "h200-x8-nvlink", "--samples", "8", "--json")
    (code, by_id), (_, by_name) = (moeq("--model", name, *asked) for name in ("deepseek-ai/DeepSeek-V3", "deepseek-v3"))
    assert code == 0
    assert by_id == by_name


@pytest.mark.full
def test_headlines_beside_intervals_are_those_of_the_tables() -> None:
    """Routing of 256 experts is drawn, for the tables with more samples than for the draws of assumptions."""
    code, text = moeq("--model", "deepseek-v3", "--hardware", "h200-x8-nvlink", "--json")
    assert code == 0
    case = json.loads(text)["cases"][0]
    own = next(point for point in case["estimate"]["points"] if point["policy"] == "context_aware")
    speedups = {f"decode over {row['baseline']}": row["decode"] for row in reversed(case["estimate"]["speedups"])}
    intervals = {row["figure"]: row for row in case["intervals"]}
    assert len(intervals) == 4
    for figure, row in intervals.items():
        assert row["value"] == (own["decode_seconds_per_token"] if figure == "decode step" else speedups[figure])
    code, text = moeq("--model", "deepseek-v3", "--hardware", "h200-x8-nvlink")
    outside = [row for row in intervals.values() if not row["low"] <= row["value"] <= row["high"]]
    assert " ".join(text.split()).count("as assumed it lies outside") == len(outside) > 0
