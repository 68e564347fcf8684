"""`moeq assign` on a finished run: budgets, targets, prices, frontier, a checkpoint within its size; `moeq eval`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from moeq import cli, estimator, inspection, pipeline, results
from moeq.artifacts import sealed
from moeq.artifacts.effects import read_effects
from moeq.artifacts.sensitivities import COLUMNS_KEY, MODEL_KEY, columns_digest, read_sensitivities, write_sensitivities
from moeq.artifacts.sensitivities import NAME as SENSITIVITIES
from moeq.artifacts.stage import current_digest, read_record
from moeq.errors import ArtifactError, AssignmentError, EstimateError, FormatError, RecipeError
from moeq.inspection import inspect
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import assign, evaluate, frontier, profile
from moeq.stages.checkpoint_size import CheckpointSize
from moeq.stages.context import Context
from moeq.stages.expert_bytes import expert_weights
from moeq.stages.hessian_traces import traces
from moeq.stages.order import BY_NAME
from moeq.stages.replicas import load_losses

SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "losses.group_size=16", "losses.methods=[gptq]",
    "losses.bits=[1, 2, 3, 4]", "assign.method=prefix-split",
    "losses.layer_effects={bits: 2, sequences: 2}", "eval.perplexity.sequences=4",
    "eval.perplexity.sequence_length=32", "estimate.grid.inputs=[128]", "estimate.grid.outputs=[512]",
)  # fmt: skip
METHODS = (
    "{name: f, method: frequency, code_bits: 2.5}", "{name: o, method: optimal, expert_bytes: 1MB}",
    "{name: m, method: mopeq, metric: hybrid}", "{name: s, method: mopeq, metric: hessian, trace: gaussian}",
    "{name: b, method: budget, expert_bytes: 1MB, cold_bits: 1, hot_bits: 4}",
    "{name: w, method: optimal, code_bits: 2, loss_weighting: squared, layer_weighting: measured}",
)  # fmt: skip


def context_of(model: Path, out: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, f"eval.compare=[{', '.join(METHODS)}]", *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


@pytest.fixture(scope="module")
def finished(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Context:
    context = context_of(tiny_qwen, tmp_path_factory.mktemp("assign") / "run")
    pipeline.run(context)
    return context


def moeq_assign(context: Context, out: Path, *options: str) -> dict[str, object]:
    shutil.copytree(context.out, out, dirs_exist_ok=True)
    result = CliRunner().invoke(cli.app, ["assign", "--out", str(out), "--json", "--quiet", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    found: dict[str, object] = json.loads(result.stdout)
    return found


@pytest.mark.full
def test_every_method_is_an_entry_of_compare(finished: Context) -> None:
    rows = {row.name: row for row in evaluate.load(finished).rows}
    assert {"f", "o", "m", "s", "b", "w"} <= set(rows)
    assert all(row.perplexity is not None and np.isfinite(row.perplexity) for row in rows.values())
    assert rows["f"].code_bits == 2.5
    weights = expert_weights(finished.model.layers)
    assert all(row.bits_per_weight == 8 * row.expert_bytes / weights for row in rows.values())
    assert rows["o"].expert_bytes <= 10**6


def test_sensitivities_have_what_the_losses_stage_measured(finished: Context) -> None:
    table = pq.read_table(finished.directory("assign") / SENSITIVITIES).to_pydict()
    layers = finished.model.layers
    assert len(table["expert"]) == sum(layer.num_experts for layer in layers)
    assert min(table["calibration_hessian_trace"]) > 0
    counts = np.concatenate([profile.load(finished).total(layer.index)[0] for layer in layers])
    assert table["activations"] == counts.tolist()
    rows = load_losses(finished).rows("expert")
    assert all(0 <= row["weighted_loss"] <= row["loss"] * 1.0001 for row in rows)  # routing weights are at most 1
    effects = read_effects(finished.directory("losses"))
    assert effects is not None
    assert len(effects.divergence) == len(layers)
    assert min(effects.divergence) > 0


def test_traces_are_read_from_the_checkpoint(finished: Context) -> None:
    closed = traces(finished, finished.recipe.eval.compare[2])
    sampled = traces(finished, finished.recipe.eval.compare[3])
    for exact, estimate in zip(closed, sampled, strict=True):
        np.testing.assert_allclose(estimate, exact, rtol=0.1)
        assert (exact != estimate).all()


def test_traces_are_in_every_table_and_not_computed_again(finished: Context, tmp_path: Path) -> None:
    path = finished.directory("assign") / SENSITIVITIES
    table = read_sensitivities(path)
    assert finished.recipe.assign.method == "prefix-split"  # which needs no traces
    closed = traces(finished, finished.recipe.eval.compare[2])
    for kept, exact in zip(table.column("frobenius_hessian_trace"), closed, strict=True):
        np.testing.assert_array_equal(kept, exact)
    counts = np.concatenate(table.column("activations"))
    normal = [(values - values.min()) / np.ptp(values) for values in (counts, np.concatenate(closed))]
    np.testing.assert_allclose(np.concatenate(table.column("hybrid_importance")), normal[0] * normal[1])
    fresh = context_of(Path(finished.model_name), finished.out)
    for kept, exact in zip(traces(fresh, fresh.recipe.eval.compare[2]), closed, strict=True):
        np.testing.assert_array_equal(kept, exact)
    assert "expert_reader" not in vars(fresh)


def test_a_table_of_an_earlier_version_is_made_again(finished: Context, tmp_path: Path) -> None:
    shutil.copytree(finished.out, tmp_path / "run")
    path = tmp_path / "run" / "assign" / SENSITIVITIES
    digest = current_digest(path.parent, "assign")
    pq.write_table(pq.read_table(path).drop_columns("hybrid_importance").replace_schema_metadata(), path)
    context = context_of(Path(finished.model_name), tmp_path / "run")
    with pytest.raises(ArtifactError, match="schema version"):
        read_sensitivities(path)
    remade = assign.sensitivities(context)
    assert remade.table.equals(read_sensitivities(finished.directory("assign") / SENSITIVITIES).table)
    assert current_digest(path.parent, "assign") == digest


def test_a_changed_table_is_refused_and_made_again(finished: Context, tmp_path: Path) -> None:
    """Its traces decide later assignments: one value turns, and the table is as readable as before."""
    shutil.copytree(finished.out, tmp_path / "run")
    path = tmp_path / "run" / "assign" / SENSITIVITIES
    whole = pq.read_table(path)
    columns = whole.to_pydict() | {"frobenius_hessian_trace": [1.0] * len(whole)}
    pq.write_table(pa.table(columns).replace_schema_metadata(whole.schema.metadata), path)
    for look in (lambda: read_sensitivities(path), lambda: inspect(path.parent)):
        with pytest.raises(ArtifactError, match=r"sensitivities\.parquet: changed since it was written"):
            look()
    context = context_of(Path(finished.model_name), tmp_path / "run")
    assert not pipeline.run(context, ("assign",))[0].skipped
    assert read_sensitivities(path).table.equals(whole)
    assert pipeline.run(context, ("assign",))[0].skipped


@pytest.mark.parametrize("place", ["statistics", "seal", "name of the seal", "key", "first", "last"])
def test_any_flipped_byte_of_the_table_is_found(finished: Context, tmp_path: Path, place: str) -> None:
    """Those too that pyarrow reads over: the statistics of a column stand in the footer."""
    shutil.copytree(finished.out, tmp_path / "run")
    path = tmp_path / "run" / "assign" / SENSITIVITIES
    assert sealed.is_sealed(path)
    content = bytearray(path.read_bytes())
    places = {"statistics": content.rindex(sealed.KEY) - 200, "seal": content.rindex(sealed.KEY) + len(sealed.KEY) + 9,
              "name of the seal": content.rindex(sealed.KEY), "key": content.rindex(COLUMNS_KEY),
              "first": 0, "last": len(content) - 1}  # fmt: skip
    content[places[place]] ^= 1
    path.write_bytes(content)
    for look in (lambda: read_sensitivities(path), lambda: inspect(path.parent), lambda: inspect(path.parent.parent)):
        with pytest.raises(
            ArtifactError, match=r"sensitivities\.parquet: (changed since it was written|cannot be read as Parquet)"
        ):
            look()


def test_a_table_that_an_earlier_moeq_wrote_is_read_as_before(finished: Context, tmp_path: Path) -> None:
    shutil.copytree(finished.out, tmp_path / "run")
    path = tmp_path / "run" / "assign" / SENSITIVITIES
    whole = pq.read_table(path)
    metadata = {key: value for key, value in whole.schema.metadata.items() if key != sealed.KEY}
    metadata[COLUMNS_KEY] = columns_digest(whole, metadata[MODEL_KEY].decode(), whole=False).encode()
    pq.write_table(whole.replace_schema_metadata(metadata), path)
    assert sealed.is_sealed(path) is None
    assert inspect(path.parent)
    changed = whole.to_pydict() | {"frobenius_hessian_trace": [1.0] * len(whole)}
    pq.write_table(pa.table(changed).replace_schema_metadata(metadata), path)
    with pytest.raises(ArtifactError, match=r"sensitivities\.parquet: changed since it was written"):
        inspect(path.parent)


def test_a_run_is_inspected_without_pyarrow(finished: Context) -> None:
    code = (
        "import sys; from pathlib import Path; from moeq.inspection import inspect\n"
        "for path in sys.argv[1:]: assert inspect(Path(path))\n"
        "heavy = {'torch', 'transformers', 'lm_eval', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    command = [sys.executable, "-c", code, str(finished.out), str(finished.directory("assign"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_another_models_table_is_not_taken(finished: Context, tmp_path: Path) -> None:
    shutil.copytree(finished.out, tmp_path / "run")
    path = tmp_path / "run" / "assign" / SENSITIVITIES
    columns = {name: [0.0] * len(values) if "trace" in name else values
               for name, values in pq.read_table(path).to_pydict().items()}  # fmt: skip
    write_sensitivities(path, columns, "another")
    context = context_of(Path(finished.model_name), tmp_path / "run")
    assert min(min(values) for values in traces(context, context.recipe.eval.compare[2])) > 0
    assert min(min(values) for values in assign.sensitivities(context).column("frobenius_hessian_trace")) > 0


def test_an_evaluation_by_itself_ends_with_the_table_of_the_run(finished: Context, tmp_path: Path) -> None:
    """Without speeds, which need an estimate that there may not be yet."""
    out = tmp_path / "run"
    shutil.copytree(finished.out, out)
    shutil.rmtree(out / "estimate")
    shutil.rmtree(out / "report")
    done = CliRunner().invoke(cli.app, ["eval", "--out", str(out), "--quiet"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.exception
    assert not done.stdout, "as asked for"
    done = CliRunner().invoke(cli.app, ["eval", "--out", str(out)], env={"COLUMNS": "200"})
    lines = done.stdout.splitlines()
    rows = results.final_rows(finished)
    assert lines[0].split()[:3] == ["assignment", "bits", "all"]
    for line, row in zip(lines[1:], rows, strict=False):
        assert line.startswith(row["label"])
        assert f"{row['perplexity']:.2f}" in line.split()
    assert not any(line.startswith(("name ", "rows")) for line in lines)
    assert lines[-1] == f"evaluation {out / 'eval' / 'eval.json'}"


def test_prices_frontier_and_gap(finished: Context, tmp_path: Path) -> None:
    options = ("--method", "frequency", "--code-bits", "2.5", "--price", "--frontier")
    found = moeq_assign(finished, tmp_path / "run", *options)
    summary = found["summary"]
    assert isinstance(summary, dict)
    assert summary["method"] == "frequency"
    assert summary["code_bits_all"] == 2.5
    assert summary["proven"]
    assert summary["gap_to_optimum"] > 0
    prices = {price["target"]: price for price in found["prices"]}  # type: ignore[attr-defined]
    assert prices["native"]["ratio"] == 1
    assert prices["vllm-cuda"]["ratio"] >= prices["gptqmodel"]["ratio"] >= 1
    assert "symmetric" in prices["transformers"]["refusal"]
    points = found["frontier"]["points"]  # type: ignore[index]
    assert any(point["dominated"] for point in points)
    assert not any(point["dominated"] for point in points if point["method"] == "optimal")
    plot = (tmp_path / "run" / "assign" / frontier.PLOT).read_text("utf-8")
    assert plot.startswith("<svg")
    assert "optimal" in plot


def test_plot_and_tables_are_outside_the_digest(finished: Context, tmp_path: Path) -> None:
    plain = moeq_assign(finished, tmp_path / "one", "--method", "optimal", "--code-bits", "2")
    more = moeq_assign(finished, tmp_path / "two", "--method", "optimal", "--code-bits", "2", "--frontier")
    assert plain["digest"] == more["digest"]


def test_a_budget_that_a_target_cannot_meet_is_refused_before_anything_is_measured(
    tiny_mixtral: Path, tmp_path: Path
) -> None:
    asked = "assign={method: optimal, bits_per_weight: 2.5, target: auto-round}"
    context = context_of(tiny_mixtral, tmp_path / "run", asked, "losses.group_size=32")
    with pytest.raises(AssignmentError, match=r"2\.5 bits a weight cannot be met; the least possible is 2\."):
        pipeline.run(context, ("profile", "losses", "assign"))
    assert not (tmp_path / "run" / "profile").exists()


@pytest.mark.parametrize(
    ("method", "target", "refusal"),
    [
        ("trellis", "gptqmodel", "trellis codes; gptqmodel has none.*--for gptqmodel` makes grids"),
        ("gptq", "exl3", "grids; exl3 has none.*--for exl3` makes EXL3's codes"),
    ],
)
@pytest.mark.parametrize("compared", [False, True])
def test_codes_that_a_target_does_not_read_are_refused_before_anything_is_measured(
    tiny_mixtral: Path, tmp_path: Path, method: str, target: str, refusal: str, compared: bool
) -> None:
    own, other = (
        f"method: uniform, bits: 4, quantizer: {method}{f', target: {target}' if named else ''}"
        for named in (not compared, compared)
    )
    asked = (f"losses.methods=[{method}]", f"assign={{{own}}}", f"eval.compare=[{{name: other, {other}}}]")
    context = context_of(tiny_mixtral, tmp_path / "run", *asked)
    where = f"{'eval.compare other, ' if compared else ''}assign.target: {target}"
    with pytest.raises(FormatError, match=f"{where}.*{refusal}"):
        pipeline.run(context, ("profile", "losses", "assign"))
    assert not (tmp_path / "run" / "profile").exists()


def test_a_target_that_cannot_load_it(finished: Context, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"target gptqmodel: .*, expert \d+: 1 bits"):
        moeq_assign(finished, tmp_path / "run", "--target", "gptqmodel")
    asked = ("--method", "optimal", "--code-bits", "3")
    with pytest.raises(FormatError, match="vllm reads symmetric grids only"):
        moeq_assign(finished, tmp_path / "run", *asked, "--target", "vllm")
    found = moeq_assign(finished, tmp_path / "run", *asked, "--target", "gptqmodel", "--granularity", "layer")
    where = found["summary"]["loads_in"]  # type: ignore[index]
    reasons = {name: why and why["reason"] for name, why in where.items()}
    assert (reasons["native"], reasons["gptqmodel"]) == (None, "24 rows"), "it packs multiples of 32"
    assert reasons["transformers"] == "zero points"
    read = json.loads((tmp_path / "run" / "assign" / assign.NAME).read_text("utf-8"))
    assert found["stage"] == "assign"
    assert all(len({expert["bits"] for expert in layer["experts"]}) == 1 for layer in read["layers"])


@pytest.mark.cases(1)
@pytest.mark.parametrize("others", ["{}", "{attention: 4, dense: 3, embeddings: 8, head: 8}"])
def test_size_is_that_of_the_whole_checkpoint(tiny_qwen: Path, finished: Context, tmp_path: Path, others: str) -> None:
    sizes = CheckpointSize(context_of(tiny_qwen, tmp_path, f"others={others}"))
    assert (sizes.other_bytes < CheckpointSize(finished).other_bytes - 100_000) == (others != "{}")
    size = sum(sizes.files([[1] * layer.num_experts for layer in finished.model.layers]).values()) + 20_000
    shutil.copytree(finished.out, tmp_path / "run")
    section = f"assign={{method: optimal, size: {size}}}"
    context = context_of(tiny_qwen, tmp_path / "run", section, "eval.compare=[]", f"others={others}")
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    folder = context.directory("export")
    assert sum(path.stat().st_size for path in folder.iterdir()) <= size
    assert assign.load(context).code_bits() > 1
    with pytest.raises(AssignmentError, match=r"size: .* the least possible is \d+"):
        moeq_assign(finished, tmp_path / "other", "--size", "10KiB")


def test_latency_is_shown_limited_and_follows_the_hardware_file(finished: Context, tmp_path: Path) -> None:
    out, hardware = tmp_path / "run", tmp_path / "own.yaml"
    text = (Path(estimator.__file__).parent / "hardware" / "paper-ctxmoe.yaml").read_text("utf-8")
    hardware.write_text(text, "utf-8")
    assert "ndp_latency_ms" not in moeq_assign(finished, out, "--method", "frequency", "--code-bits", "3")["summary"]
    options = ("--code-bits", "3", "--hardware", str(hardware))
    free = moeq_assign(finished, out, "--method", "optimal", *options)["summary"]
    took = free["ndp_latency_ms"]  # type: ignore[index]
    assert (
        took
        > moeq_assign(finished, out, "--method", "uniform", "--set", "assign.bits=1", "--hardware", str(hardware))[
            "summary"
        ]["ndp_latency_ms"]
        > 0
    )  # type: ignore[index]
    most = f"{0.9 * took:.9g}"
    kept = moeq_assign(finished, out, "--method", "optimal", *options, "--ndp-latency", most)["summary"]
    assert kept["ndp_latency_ms"] <= kept["ndp_latency_limit_ms"] == float(most)  # type: ignore[index]
    assert kept["objective"] > free["objective"]  # type: ignore[index]
    hardware.write_text(text.replace('"512 GB/s"', '"256 GB/s"').replace('"1 GHz"', '"500 MHz"'), "utf-8")
    with pytest.raises(AssignmentError, match=r"ndp_latency_ms: .*; the least possible is \d"):
        moeq_assign(finished, out, "--method", "optimal", *options, "--ndp-latency", f"{took / 4:.9g}")
    slower = moeq_assign(finished, out, "--method", "optimal", *options)["summary"]
    assert slower["ndp_latency_ms"] == pytest.approx(2 * took)  # type: ignore[index]


def test_latency_belongs_to_optimal_and_hardware_must_exist(finished: Context, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--ndp-latency belongs to optimal"):
        moeq_assign(finished, tmp_path / "run", "--method", "frequency", "--code-bits", "3", "--ndp-latency", "1")
    with pytest.raises(EstimateError, match="unknown hardware 'paper-ctxmo'; did you mean 'paper-ctxmoe'"):
        moeq_assign(finished, tmp_path / "run", "--hardware", "paper-ctxmo")


def test_inspect_knows_the_files(finished: Context, tmp_path: Path) -> None:
    moeq_assign(finished, tmp_path / "run", "--code-bits", "2", "--frontier")
    folder = tmp_path / "run" / "assign"
    table = inspection.inspect(folder / SENSITIVITIES)
    assert (table["kind"], "objective_2" in table["columns"]) == ("table of sensitivities", True)
    assert inspection.inspect(folder / frontier.NAME)["kind"] == "moeq frontier"
    effects = inspection.inspect(tmp_path / "run" / "losses" / "layer_effects.json")
    assert effects["kind"] == "moeq layer_effects"
    moeq_assign(finished, tmp_path / "run", "--code-bits", "3")
    assert not (folder / frontier.NAME).exists()  # it was of the earlier assignment


def test_what_a_result_is_drawn_or_counted_by_is_in_its_key(tiny_mixtral: Path, tmp_path: Path) -> None:
    """Where it decides nothing it is not, and what was made before stays."""

    def changed(stage: str, change: str, *recipe: str) -> bool:
        before, after = (
            BY_NAME[stage].own_inputs(context_of(tiny_mixtral, tmp_path / "run", *SMALL, *recipe, *more))
            for more in ((), (change,))
        )
        return before != after

    effects, traces = "losses.expert_effects={}", "assign={method: mopeq, widths: [2, 4], trace: rademacher}"
    assert [changed("losses", "seed=1"), changed("losses", "seed=1", effects)] == [False, True]
    assert [changed("assign", "seed=1"), changed("assign", "seed=1", traces)] == [False, True]
    widened = "export.widen=true"
    assert [changed("assign", widened), changed("assign", widened, "assign.target=llama.cpp")] == [False, True]
    compared, sized = "eval.compare=[{name: of-a-long-name, method: uniform, bits: 2}]", "assign.size=2MB"
    for counted in ("export.max_shard=100kB", compared):
        assert [changed("assign", counted, more) for more in ("assign.code_bits=2", sized)] == [False, True]
    as_compared = "eval.compare=[{name: limited, method: frequency, size: 2MB}]"
    assert [changed(stage, "export.max_shard=100kB", as_compared) for stage in ("eval", "estimate")] == [True, True]
    tuned = "quantize.tune={}"
    assert [changed("quantize", "seed=1"), changed("quantize", "seed=1", tuned)] == [False, True]
    (tmp_path / "own.txt").write_text("Another text to draw from.\n" * 400, "utf-8")
    text = f"corpus.source=[{tmp_path / 'own.txt'}]"
    assert [changed("quantize", text), changed("quantize", text, tuned)] == [False, True]


def test_codes_of_another_assignment_than_lies_there_are_refused(finished: Context, tmp_path: Path) -> None:
    """By stages that run alone: `moeq export` behind `moeq assign`, or an edit, wants `moeq quantize` before it."""
    out = shutil.copytree(finished.out, tmp_path / "run")
    context = Context(recipe=finished.recipe, model_name=finished.model_name, out=out, reporter=Reporter(quiet=True))
    path = out / "assign" / "assignment.json"
    data = json.loads(path.read_text("utf-8"))
    edited = next(expert for expert in data["layers"][0]["experts"] if expert["bits"] in (1, 2, 3, 4))
    edited["bits"] = 3 if edited["bits"] != 3 else 2
    path.write_text(json.dumps(data), "utf-8")
    told, decided = pipeline.run_alone(context, "assign"), read_record(out / "assign", "assign").summary
    assert told.edited == ("assignment.json",)
    assert told.record.summary["expert_bytes"] == assign.summarize(context, assign.load(context))["expert_bytes"]
    assert told.record.summary["expert_bytes"] != decided["expert_bytes"]
    assert told.record.summary["optimum"] != decided["optimum"]
    for stage, made, by in (("export", "quantize", "quantize"), ("eval", "checkpoint", "export")):
        with pytest.raises(ArtifactError, match=f"{made}: made of another assign/ than lies there.*`moeq {by}` again"):
            pipeline.run_alone(context, stage)
    pipeline.run_alone(context, "quantize")
    with pytest.raises(ArtifactError, match="checkpoint: made of another assign/"):
        pipeline.run_alone(context, "eval")
    record = out / "quantize" / "stage.json"
    before = record.read_text("utf-8")
    record.write_text(json.dumps((data := json.loads(before)) | {"inputs": data["inputs"] | {"losses": "0" * 64}}))
    with pytest.raises(ArtifactError, match="quantize: made of another losses/ than lies there"):
        pipeline.run_alone(context, "export")
    record.write_text(before)
    assert not pipeline.run_alone(context, "export").skipped


def test_replicas_of_other_codes_than_the_assignment_is_of_are_refused(finished: Context, tmp_path: Path) -> None:
    """Of losses that were made again alone, or are asked for by the recipe alone: a checkpoint that its own settings do
    not describe, and rows whose bits are not those that were measured."""
    out = shutil.copytree(finished.out, tmp_path / "run")
    recipe = finished.recipe.model_dump(mode="json")
    recipe["losses"]["group_size"] *= 2
    recipe["eval"]["compare"] = [{"name": "two", "method": "uniform", "bits": 2}]
    context = Context(
        recipe=load_recipe(recipe), model_name=finished.model_name, out=out, reporter=Reporter(quiet=True)
    )
    with pytest.raises(ArtifactError, match=r"losses: replicas are groups of .*assignment two is of .*`moeq losses`"):
        pipeline.run_alone(context, "eval")
    pipeline.run_alone(context, "losses")
    with pytest.raises(ArtifactError, match=r"losses: replicas are groups of .*`moeq assign` again"):
        pipeline.run_alone(context, "quantize")
    assert not pipeline.run(context, ("assign", "quantize"))[-1].skipped
