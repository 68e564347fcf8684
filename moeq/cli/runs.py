"""Whole runs: run, plan and gc, and the run that options describe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from moeq.cli.ending import refuse, show
from moeq.errors import RecipeError
from moeq.options import JsonOption, RunOptions, StageOptions, option, takes_options

if TYPE_CHECKING:
    from moeq.recipe import Recipe
    from moeq.stages.context import Context


def context_of(asked: RunOptions, command: str) -> Context:
    """The run that the options describe, for a command: wrong ones are refused before the stages are imported."""
    from moeq.preflight import check_run, check_runtime
    from moeq.progress import Reporter
    from moeq.recipe import load_recipe

    check_runtime(asked.for_)
    path = asked.recipe_path
    if path is None and asked.out is not None and (asked.out / "recipe.yaml").is_file():
        path = asked.out / "recipe.yaml"
    changes = [*asked.changes(), *(["trust_remote_code=true"] if asked.trust_remote_code else [])]
    recipe = load_recipe(path, changes)
    more = method_changes(recipe, asked)
    recipe = load_recipe(path, [*changes, *more]) if more else recipe
    model = asked.model or recipe.model
    if model is None:
        raise RecipeError("no model", where=str(path or "defaults"), do="give a recipe, --model, or --out of a run")
    out = asked.out or Path("moeq-out") / recipe.name
    check_run(recipe, model, out, command)
    from moeq.stages.context import Context

    reporter = Reporter(quiet=asked.quiet)
    context = Context(recipe=recipe, model_name=model, out=out, reporter=reporter, check=asked.check)
    if asked.for_ is None:
        return context
    needed = runtime_changes(context, asked.for_)
    return replace(context, recipe=load_recipe(path, [*changes, *more, *needed]))


def runtime_changes(context: Context, name: str) -> list[str]:
    """What --for changes of a run's recipe, told in a line each."""
    from rich.markup import escape

    from moeq.artifacts.runtime_settings import settings_for

    settings = settings_for(name, context.recipe, context.given().model.layers)
    for setting in settings:
        context.reporter.say(escape(f"for {name}: {setting}"))
    return [setting.change for setting in settings]


def method_changes(recipe: Recipe, asked: RunOptions) -> list[str]:
    """What --quantizer and --refine change of a recipe, which depends on what it says."""
    from moeq.recipe import BEST

    changes = []
    if asked.quantizer is not None:
        methods = [*recipe.losses.methods, *({asked.quantizer} - {BEST, *recipe.losses.methods})]
        changes += [f"losses.methods=[{', '.join(methods)}]", f"assign.quantizer={asked.quantizer}"]
    if asked.refine and recipe.quantize.refine is None:
        changes.append("quantize.refine={}")
    return changes


@takes_options("for_", "quantizer", "refine", "verify", "force")
def run(asked: StageOptions) -> None:
    """Run all stages below in order; goes on where it was stopped."""
    context = context_of(asked, "run")
    from moeq import pipeline, results, terminal

    outcomes = pipeline.run(context, force=asked.force)
    rows, paths = results.final_rows(context), pipeline.result_paths(context)
    unedited = [outcome.record.summary for outcome in outcomes if not outcome.edited]
    summaries = [summary for summary in unedited if "loads_in" in summary]
    loading = {"loads_in": summaries[0]["loads_in"]} if summaries else {}
    finished = {
        "stages": [terminal.outcome_json(outcome) for outcome in outcomes],
        "table": rows,
        "paths": {name: str(path) for name, path in paths.items()},
        **loading,
    }

    def show_text(_: Any) -> None:
        terminal.print_final(rows, paths, outcomes)
        terminal.print_summary(loading)

    show(finished, show_text, json=asked.json, quiet=asked.quiet)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(StageOptions):
    """Options of `moeq plan`, which has no --check and no --quiet."""

    check: bool = False
    quiet: bool = True
    probe: bool = option("Measure for a few seconds how fast this machine is.", default=True)


@takes_options("for_")
def plan(asked: PlanOptions) -> None:
    """Say what a run will need in memory, disk and time, and whether it fits here; reads no weights."""
    context = context_of(asked, "plan")
    from moeq import terminal
    from moeq.planning.plan import error_of, make_plan

    made = make_plan(context, probe=asked.probe)
    show(made.as_json(), lambda _: terminal.print_plan(made), json=asked.json)
    error = error_of(made)
    if error is not None:
        refuse(error, json=asked.json)


def gc(
    out: Annotated[list[Path] | None, Option(help="Run directory; may be given several times.")] = None,
    store: Annotated[
        Path | None, Option(help="Replica store that runs share: those that it knows of keep theirs.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only say what would be dropped.")] = False,
    json: JsonOption = False,
) -> None:
    """Drop replicas that no run's recipe or assignment refers to, and what killed runs left half-written."""
    from moeq import cleaning, terminal

    show(cleaning.collect(out or [], store, dry_run=dry_run), terminal.print_freed, json=json)
