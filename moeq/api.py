"""From Python: runs, stages, assignments, plans, comparisons, benches, reproductions; commands go through these.

`moeq.run`, `moeq.stage`, `moeq.assign`, `moeq.plan`, `moeq.evaluate`, `moeq.bench` and `moeq.reproduce`, with
`moeq.Recipe` and `moeq.load_recipe`.
Importing this module imports neither torch nor transformers. Errors are those of `moeq.errors`: one line each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moeq.artifacts.run import RECIPE_COPY, STAGES
from moeq.errors import RecipeError, hint
from moeq.recipe import Recipe, Start, load_recipe

if TYPE_CHECKING:
    from moeq.artifacts.assignment import Assignment
    from moeq.artifacts.gates import Gate
    from moeq.pipeline import Outcome
    from moeq.planning.result import Plan
    from moeq.reproduction.result import Reproduction
    from moeq.stages.context import Context

Given = Recipe | Mapping[str, Any] | str | Path | None  # a recipe, its keys, its file; None: the run directory's


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run.

    stages: what happened to each, in order; table: a row a variant, as `results.final_rows` has them; paths: what was
    made, by name: checkpoint, report, evaluation, and `checkpoint in FORMAT` for every other format; gates: the bounds
    of the recipe with what the run came to, none of which raises; next: {what for: command
    line} of what may follow.
    """

    out: Path
    recipe: Recipe
    stages: tuple[Outcome, ...]
    table: tuple[dict[str, Any], ...]
    paths: Mapping[str, Path]
    gates: tuple[Gate, ...]
    next: Mapping[str, str]

    @property
    def checkpoint(self) -> Path:
        """The packed checkpoint in the native format, for `moeq.load` and `from_pretrained`."""
        return self.paths["checkpoint"]

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.paths["report"]


@dataclass(frozen=True, kw_only=True)
class Assigned:
    """An assignment of a run.

    outcome: what happened to the stage; None where the assignment was only looked at. prices: what each runtime's
    restriction costs; frontier: objective against bytes of every method; None where they were not asked for.
    """

    assignment: Assignment
    outcome: Outcome | None
    prices: list[dict[str, Any]] | None
    frontier: dict[str, Any] | None


def run(
    recipe: Given = None,
    *,
    out: str | Path,
    model: str | Path | None = None,
    force: bool = False,
    check: bool = False,
    quiet: bool = False,
) -> Run:
    """Run all stages of a recipe into the directory `out`, from the profile to the report; stopped, it goes on.

    recipe: None takes the one in `out`, without one the preset `balanced`. model: a directory, a hub id or
    bundled:NAME, instead of the recipe's. force: files that were edited by hand are made anew. check: every file is
    read and hashed, also those that have not changed since they were. Raises the MoeqError of the stage that fails;
    what was finished before it stays.
    """
    return run_in(opened(recipe, "run", out=out, model=model, check=check, quiet=quiet), force=force)


def run_in(context: Context, *, force: bool = False) -> Run:
    """`run`, of what was opened."""
    from moeq import pipeline, results
    from moeq.stages.gates import verdicts

    outcomes = pipeline.run(context, force=force)
    return Run(
        out=context.out,
        recipe=context.recipe,
        stages=tuple(outcomes),
        table=tuple(results.final_rows(context)),
        paths=pipeline.result_paths(context),
        gates=verdicts(context),
        next=results.next_steps(context),
    )


def stage(
    name: str,
    recipe: Given = None,
    *,
    out: str | Path,
    model: str | Path | None = None,
    force: bool = False,
    check: bool = False,
    quiet: bool = False,
) -> Outcome:
    """Run one stage (reparam, profile, losses, assign, quantize, export, eval, estimate, report) of a run.

    Options as `run` has them. Raises ArtifactError where an earlier stage that it reads has not been run.
    """
    if name not in STAGES:
        raise RecipeError(f"no stage {name!r}", do=hint(name, STAGES))
    context = opened(recipe, name, out=out, model=model, check=check, quiet=quiet)
    from moeq import pipeline

    return pipeline.run_alone(context, name, force=force)


def assign(
    recipe: Given = None,
    *,
    out: str | Path,
    model: str | Path | None = None,
    look: bool = False,
    prices: bool = False,
    frontier: bool = False,
    force: bool = False,
    check: bool = False,
    quiet: bool = False,
) -> Assigned:
    """Decide which expert of a run gets which width and place (the stage `assign`), on its profile and losses.

    look: only what is there is read, nothing is decided anew. Other options as `run` has them. Raises AssignmentError
    for a budget that cannot be met.
    """
    context = opened(recipe, "assign", out=out, model=model, check=check, quiet=quiet)
    return assign_in(context, look=look, prices=prices, frontier=frontier, force=force)


def assign_in(
    context: Context, *, look: bool = False, prices: bool = False, frontier: bool = False, force: bool = False
) -> Assigned:
    """`assign`, of what was opened."""
    from moeq import pipeline
    from moeq.stages import assign as deciding
    from moeq.stages import frontier as stage

    outcome = None if look else pipeline.run_alone(context, "assign", force=force)
    with pipeline.looking(context, "assign") if look else nullcontext():
        return Assigned(
            assignment=deciding.load(context),
            outcome=outcome,
            prices=stage.prices(context) if prices else None,
            frontier=stage.frontier(context) if frontier else None,
        )


def plan(
    recipe: Given = None, *, out: str | Path, model: str | Path | None = None, probe: bool = True, quiet: bool = True
) -> Plan:
    """What a run will need in memory, disk and time, and whether it fits here; reads no weights, and downloads none.

    probe: measure for a few seconds how fast this machine is; without, no times. Nothing is written.
    """
    context = opened(recipe, "plan", out=out, model=model, quiet=quiet)
    from moeq.planning.plan import make_plan

    return make_plan(context, probe=probe)


def evaluate(
    *what: str | Path,
    tasks: str | Sequence[str] = (),
    text: str | Path | None = None,
    out: str | Path | None = None,
    include_path: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int | Literal["auto"] | None = None,
    window: int | None = None,
    stride: int | None = None,
    context_aware: Sequence[str] = (),
    dynamic: Sequence[str] = (),
    dynamic_log: str | Path | None = None,
    truncate: bool = False,
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure models, checkpoints, runs, assignments of runs (RUN:NAME) and earlier results side by side.

    The first is what the others are compared with, item by item: differences with intervals, and, on text, the KL of
    the next token's distribution. tasks: lm-eval's; text: a file, or bundled (also where neither is named); out: JSON
    file for the results with every sample. Returns what such a file holds. Raises EvaluationError and, for what is
    named and cannot be read, ModelError or ArtifactError.
    """
    from moeq.comparison.eval_options import EvalOptions

    if not what:
        raise RecipeError("nothing to evaluate", do="name models, checkpoints or runs")
    asked = EvalOptions(
        recipe=[str(word) for word in what],
        tasks=(tasks if isinstance(tasks, str) else ", ".join(tasks)) or None,
        text=None if text is None else str(text),
        out=_path(out),
        include_path=_path(include_path),
        num_fewshot=num_fewshot,
        limit=limit,
        batch_size=None if batch_size is None else str(batch_size),
        window=window,
        stride=stride,
        context_aware=list(context_aware),
        dynamic=list(dynamic),
        dynamic_log=_path(dynamic_log),
        truncate=truncate,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        quiet=quiet,
    )
    from moeq.comparison.refusals import check

    check(asked)
    from moeq.comparison.side_by_side import compare

    return compare(asked)


def bench(
    checkpoint: str | Path,
    *,
    dense: str | Path | None = None,
    batches: Sequence[int] | None = None,
    prompt_tokens: int = 64,
    new_tokens: int = 16,
    repeat: int = 3,
    grid: bool = False,
    dynamic: str | None = None,
    beams: Sequence[int] = (1, 2),
    peers: bool = True,
    gguf: str | Path | None = None,
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto",
    out: str | Path | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Time a checkpoint, packed or dense, on this machine, beside its dense model and other libraries' kernels.

    grid: batches by beams with and without batch pruning instead (paper 002, Table 3); dynamic: precision that follows
    the workload beside static high, low and mixed instead (paper 001, Figure 5), as `--dynamic` says; out: directory
    for bench.json and measured.csv, which `moeq estimate --fit` reads. Returns what bench.json holds. Raises
    ModelError, ArtifactError or EvaluationError.
    """
    from moeq.benching.asked import Asked
    from moeq.runtime.dynamic.options import DynamicOptions

    asked = Asked(
        checkpoint=str(checkpoint),
        dense=None if dense is None else str(dense),
        batches=None if batches is None else tuple(batches),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeat=repeat,
        grid=grid,
        dynamic=None if dynamic is None else DynamicOptions.parse(dynamic),
        beams=tuple(beams),
        peers=peers,
        gguf=_path(gguf),
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    from moeq.preflight import check_bench

    check_bench(asked, _path(out))
    from moeq.benching import measure
    from moeq.progress import Reporter

    found = measure.bench(asked, Reporter(quiet=quiet))
    if out is not None:
        measure.write(Path(out), found)
    return found


def reproduce(
    checkpoint: str | Path,
    *,
    model: str | Path,
    texts: Sequence[str | Path] = (),
    out: str | Path | None = None,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> Reproduction:
    """Make a checkpoint again from its provenance.json and compare every file's bytes.

    model, texts: what it was made of, under any name; what has another digest than the provenance says is refused.
    out: the run directory, by default one beside the checkpoint that goes when all is equal. A difference is no error:
    `is_equal` says it. Raises ArtifactError for a checkpoint that is not whole or has no provenance, ModelError and
    CorpusError for files that are not those, RecipeError for a recipe that is not followed, and what a run raises.
    """
    from moeq.progress import Reporter
    from moeq.reproduction.matching import match

    reporter = Reporter(quiet=quiet)
    inputs = match(Path(checkpoint), str(model), [str(text) for text in texts], trust_remote_code, reporter)
    from moeq.reproduction import again

    return again.reproduce(inputs, _path(out), reporter)


def opened(
    recipe: Given,
    command: str,
    *,
    out: str | Path,
    model: str | Path | None = None,
    check: bool = False,
    quiet: bool = False,
) -> Context:
    """A recipe on a model in a directory, for a stage, `run` or `plan`.

    What can be refused without a model's code is refused before any is imported: RecipeError, and the errors of a
    model, a text, hardware or tasks that are not there.
    """
    from moeq.preflight import check_run
    from moeq.progress import Reporter

    folder = Path(out)
    read = read_recipe(recipe, folder, None if model is None else str(model))
    name = read.model if model is None else str(model)
    if name is None:
        raise RecipeError("no model", where=str(folder), do="name one, or give a recipe that does")
    check_run(read, name, folder, command)
    from moeq.stages.context import Context

    there = command != "plan"
    return Context(recipe=read, model_name=name, out=folder, reporter=Reporter(quiet=quiet), check=check, weights=there)


def read_recipe(recipe: Given, out: Path, model: str | None) -> Recipe:
    """A recipe as it is given; None: the one in the run directory `out`, or without one the default preset."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe is not None:
        return load_recipe(Path(recipe) if isinstance(recipe, str) else recipe)
    if (out / RECIPE_COPY).is_file():
        return load_recipe(out / RECIPE_COPY)
    from moeq.models.source import known_positions

    return Start(positions=None if model is None else known_positions(model, None)).recipe()


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)
