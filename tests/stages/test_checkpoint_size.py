"""One size of a checkpoint: what `--size` limits, what the tables show, and what the directory has."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moeq import pipeline, results
from moeq.artifacts.assignment import Assignment
from moeq.assigners import sensitivity
from moeq.errors import AssignmentError, RecipeError
from moeq.progress import Reporter
from moeq.recipe import AssignSection, load_recipe
from moeq.stages import assign, evaluate
from moeq.stages.checkpoint_size import CheckpointSize, original_bytes
from moeq.stages.context import Context
from moeq.tables import human_size
from moeq.terminal import print_final

pytestmark = pytest.mark.full

SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=48", "losses.group_size=16", "losses.methods=[rtn]",
    "assign.quantizer=rtn", "eval.perplexity.sequences=2", "eval.perplexity.sequence_length=32", "eval.tasks=[]",
    "export.verify=false", "estimate.grid.inputs=[128]", "estimate.grid.outputs=[512]",
)  # fmt: skip
COMPARED = (
    "eval.compare=[{name: u1, method: uniform, bits: 1, quantizer: rtn}, "
    "{name: u3, method: uniform, bits: 3, quantizer: rtn}, "
    "{name: p2, method: prefix-split, code_bits: 2.25, quantizer: rtn}, "
    "{name: m2, method: optimal, code_bits: 2.25, quantizer: rtn, granularity: projection}]"
)


def make(out: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, COMPARED, *overrides])
    return Context(recipe=recipe, model_name="bundled:tiny-mixtral", out=out, reporter=Reporter(quiet=True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """The whole way on the bundled model."""
    context = make(tmp_path_factory.mktemp("size") / "run", "assign.code_bits=2", "assign.method=optimal")
    pipeline.run(context)
    return context


def directory_bytes(context: Context) -> int:
    return sum(path.stat().st_size for path in context.directory("export").iterdir())


def spare(context: Context) -> int:
    return 4096 + 400 * sum(layer.num_experts for layer in context.model.layers)


def test_the_table_shows_what_the_directory_has(finished: Context, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in results.final_rows(finished)}
    own, written = rows[finished.recipe.name]["checkpoint_bytes"], directory_bytes(finished)
    assert written <= own <= written + spare(finished)
    assert own <= 1.01 * written
    assert rows["original"]["checkpoint_bytes"] == original_bytes(finished.model.source)
    assert rows["original"]["checkpoint_bytes"] == sum(
        path.stat().st_size for path in finished.model.source.path.iterdir()
    )
    summary = pipeline.read_record(finished.directory("assign"), "assign").summary
    assert summary["checkpoint_bytes"] == own == evaluate.load(finished).row(finished.recipe.name).checkpoint_bytes  # type: ignore[union-attr]
    print_final(list(rows.values()), {}, [pipeline.run_stage(finished, pipeline.BY_NAME["estimate"])])
    page = (finished.directory("report") / "report.html").read_text("utf-8")
    shown = " ".join(capsys.readouterr().out.split())
    for row in rows.values():
        assert human_size(row["checkpoint_bytes"]) in shown
        assert human_size(row["checkpoint_bytes"]) in page
        assert row["checkpoint_bytes"] > row["total_bytes"] >= row["expert_bytes"]
    assert "whole: every file of the checkpoint, at most, as --size limits it" in shown


def test_a_report_of_an_earlier_version_has_its_sizes_too(finished: Context, tmp_path: Path) -> None:
    shutil.copytree(finished.out, tmp_path / "run")
    older = replace(finished, out=tmp_path / "run")
    path = older.directory("eval") / "eval.json"
    lines = [line for line in path.read_text("utf-8").splitlines() if "checkpoint_bytes" not in line]
    path.write_text("\n".join(lines), "utf-8")
    assert evaluate.load(older) == evaluate.load(finished)


@pytest.mark.parametrize(
    "overrides",
    [
        ("assign.method=uniform", "assign.bits=3"),
        ("assign.method=prefix-split", "assign.code_bits=1.75", "assign.gpu_experts=1"),
        ("assign.method=optimal", "assign.code_bits=2.5", "assign.granularity=projection"),
        ("assign.method=optimal", "assign.code_bits=2.5", "assign.granularity=projection", "quantize.replicas=all"),
        ("assign.code_bits=2", "others={attention: 4, embeddings: 8, head: 8}", "export.max_shard=100kB"),
        ("assign.code_bits=2", "losses.nested=true", "losses.symmetric=true", "quantize.replicas=all"),
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_no_directory_is_larger_than_was_said(finished: Context, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    shutil.copytree(finished.out, tmp_path / "run")
    context = make(tmp_path / "run", *overrides)
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    said = CheckpointSize(context).total(assign.load(context))
    assert directory_bytes(context) <= said <= directory_bytes(context) + spare(context)


def section_of(override: str) -> AssignSection:
    return load_recipe(None, [*SMALL, "eval.compare=[]", override]).assign


def objective(context: Context, assignment: Assignment, section: AssignSection) -> float:
    return sensitivity.objective(assign.inputs_of(context, section, "o"), assignment)


@pytest.mark.parametrize("granularity", ["expert", "projection"])
def test_a_size_of_the_table_is_taken_as_a_limit(finished: Context, granularity: str) -> None:
    """Exactly as it is in JSON, and as it is printed: what comes out is as good, and within it."""
    sizes = CheckpointSize(finished)
    rows = {row.name: row.assignment for row in evaluate.load(finished).rows if row.assignment is not None}
    for row in results.final_rows(finished):
        if row["name"] == "original" or (row["name"] == "m2" and granularity == "expert"):
            continue
        for typed in (str(row["checkpoint_bytes"]), human_size(row["checkpoint_bytes"])):
            wanted = f"assign={{method: optimal, quantizer: rtn, size: {typed}, granularity: {granularity}}}"
            section = section_of(wanted)
            found = assign.make(finished, section, "limited")
            assert section.size is not None
            assert sizes.total(found) <= section.size
            least = objective(finished, rows[row["name"]], section)
            assert objective(finished, found, section) <= least * (1 + 1e-9)


def test_every_method_keeps_its_size(finished: Context) -> None:
    size = CheckpointSize(finished).total(assign.load(finished)) + 40_000
    for more in ("method: uniform", "method: frequency", "method: prefix-split", "method: optimal",
                 "method: budget, hot_bits: 3, cold_bits: 1", "method: optimal, gpu_experts: 1"):  # fmt: skip
        more += f", quantizer: rtn, size: {size + (10**6 if 'gpu' in more else 0)}"
        section = section_of(f"assign={{{more}}}")
        found = assign.make(finished, section, "limited")
        assert CheckpointSize(finished).total(found) <= (section.size or 0)


@pytest.mark.parametrize("granularity", ["expert", "projection"])
def test_dropped_experts_count_as_the_table_shows_them(finished: Context, granularity: str) -> None:
    sizes = CheckpointSize(finished)
    least = sizes.other_bytes + sum(
        layer.num_experts * sizes.matrix_bytes(layer, name, 1)
        for layer in finished.model.layers
        for name in layer.projections
    )
    wanted = (
        f"assign={{method: optimal, quantizer: rtn, size: {least - 30_000}, granularity: {granularity}, drop: true}}"
    )
    inputs = assign.inputs_of(finished, section_of(wanted), "limited")
    found = assign.decide(inputs)
    assert found.drops
    each = inputs.in_the_checkpoint()
    counted = sum(each.stored(layer, width) for layer, of in enumerate(found.expert_widths()) for width in of)
    assert inputs.other_bytes + counted == sizes.total(found) <= least - 30_000


def test_the_least_size_that_a_refusal_names_is_taken(finished: Context) -> None:
    def limited(size: str) -> Assignment:
        section = section_of(f"assign={{method: optimal, quantizer: rtn, size: {size}}}")
        return assign.make(finished, section, "limited")

    with pytest.raises(AssignmentError, match=r"the least possible is \d+ \(") as refused:
        limited("1MiB")
    named = re.search(r"least possible is (\d+) \((.*?)\)", str(refused.value))
    assert named is not None
    for typed in named.groups():
        assert {choice.bits for layer in limited(typed).layers for choice in layer.experts} == {1}


def test_a_size_of_all_replicas_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"assign: size is that of the checkpoint, which has every width .* use exp"):
        make(tmp_path, "assign={method: optimal, quantizer: rtn, size: 2MiB}", "quantize.replicas=all")


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1023, 1024, 1025, 5_000_001, 10_476_322, 2**40 - 1, 3 * 2**40 + 1])
def test_what_is_printed_is_never_less(count: int) -> None:
    typed = section_of(f"assign={{method: optimal, quantizer: rtn, size: {human_size(count + 1)}}}").size
    assert typed is not None
    assert count < typed <= 1.011 * (count + 1) + 24
