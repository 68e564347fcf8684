"""Whole runs: run, plan and gc, and the run that options describe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from moeq.cli.ending import refuse, show
from moeq.errors import RecipeError
from moeq.folders import RECIPE_COPY, is_run
from moeq.options import BUNDLED_TEXT, BuildOptions, JsonOption, QuietOption, RunOptions, option, takes_options

if TYPE_CHECKING:
    from moeq.recipe import Start
    from moeq.stages.context import Context

RUNS = "moeq-out"  # where runs without --out lie
LOSSES = "losses"  # what a run has measured of a grid


def start_of(asked: RunOptions, path: Path | None, preset: str | None, model: str | None) -> Start:
    """What the recipe is made of; ModelError where a preset's model is not there, which its sequences are to fit."""
    from moeq.recipe import Start

    changes = [*asked.changes(), *(["trust_remote_code=true"] if asked.trust_remote_code else [])]
    start = Start(
        path=path,
        preset=preset,
        changes=changes,
        quantizer=asked.quantizer,
        refine=asked.refine,
        tune=asked.tune,
        names=asked.keys(),
    )
    if path is not None:
        return start
    recipe = start.recipe()
    model = model or recipe.model
    if model is None:
        return start
    from moeq.models.source import known_positions

    return replace(start, positions=known_positions(model, recipe.revision))


def short_name(model: str) -> str:
    """The last part of a model's name: of its directory or hub id, or behind bundled:."""
    path = Path(model).expanduser()
    return (path.resolve() if path.is_dir() else Path(model.removeprefix("bundled:"))).name or "model"


def check_no_run(model: str) -> None:
    """RecipeError for a run's directory where a model is wanted."""
    if is_run(Path(model)):
        do = f"its recipe is {Path(model) / RECIPE_COPY}; `moeq run {model}` goes on with it"
        raise RecipeError("this is a run, no model", where=model, do=do)


def context_of(asked: RunOptions, command: str) -> Context:
    """The run that the options describe, for a command: wrong ones are refused before the stages are imported."""
    from rich.markup import escape

    from moeq import api
    from moeq.preflight import check_device, check_runtime

    check_runtime(asked.for_)
    if asked.device is not None:
        check_device(asked.device)
    path, model, out = asked.recipe_path, asked.named_model, asked.out
    if path is None and model is not None:
        check_no_run(model)
        out = out or Path(RUNS) / short_name(model)
    if path is None and asked.preset_name is None and out is not None and (out / RECIPE_COPY).is_file():
        path = out / RECIPE_COPY
    start = start_of(asked, path, asked.preset_name, model)
    recipe = start.recipe()
    model = model or recipe.model
    if model is None and out is not None and is_run(out):
        do = f"moeq {command} MODEL --preset {start.preset} --out OTHER starts another; without it this one goes on"
        raise RecipeError("this run has a recipe already", where=str(out), do=do)
    if model is None:
        do = f"name one (moeq {command} MODEL), a recipe, or --out of a run"
        raise RecipeError("no model", where=str(start), do=do)
    out = out or Path(RUNS) / (recipe.name if path is not None else short_name(model))
    context = api.opened(recipe, command, out=out, model=model, check=asked.check, quiet=asked.quiet)
    if start.path is None or asked.out is None:  # not in the command line already
        context.reporter.say(f"[dim]{escape(f'{start}, into {out}')}[/dim]")
    if isinstance(asked, BuildOptions) and asked.text and not asked.eval_text and BUNDLED_TEXT not in asked.text:
        said = "what is lost is measured on bundled text, not on --text; on other text by --eval-text"
        context.reporter.say(f"[dim]{said}[/dim]")
    if asked.for_ is not None:
        needed = runtime_changes(context, start, asked.for_)
    elif recipe.assign.target is not None and not (out / LOSSES).exists():
        needed = runtime_changes(context, start, recipe.assign.target, only_grid=True)
    else:
        needed = []
    codes = recipe.losses.encoding.codes
    if isinstance(asked, BuildOptions) and asked.group_size is not None and codes != "grid" and asked.for_ is None:
        said = f"{codes} codes have no groups of weights that --group-size could set: grids have (--quality fast)"
        context.reporter.say(f"[dim]{said}[/dim]")
    return replace(context, recipe=replace(start, changes=[*start.changes, *needed]).recipe()) if needed else context


def runtime_changes(context: Context, start: Start, name: str, *, only_grid: bool = False) -> list[str]:
    """What --for changes of a run's recipe, told in a line each; of a preset, and of the recipe of a run that goes on,
    all but what was asked for may change.

    only_grid: as assign.target alone has it: the grid, where the runtime loads no other.
    """
    from rich.markup import escape

    from moeq.artifacts.runtime_settings import grid_settings, settings_for

    own = start.path is None or (not only_grid and start.path == context.out / RECIPE_COPY)
    said = None if not own else {change.partition("=")[0].strip() for change in start.changes}
    if only_grid:
        settings = grid_settings(name, context.recipe, said)
    else:
        from moeq.stages.expert_bytes import room

        settings = settings_for(name, context.recipe, context.given().model.layers, said, room(context.given()))
    for setting in settings:
        context.reporter.say(escape(f"for {name}: {setting}"))
    return [setting.change for setting in settings]


@takes_options("for_", "device", "workers", "quantizer", "refine", "tune", "verify", "force")
def run(asked: BuildOptions) -> None:
    """Make a model small: all stages below in order, from a recipe or with none; goes on where it was stopped."""
    context = context_of(asked, "run")
    from moeq import api, terminal
    from moeq.cli import gates

    made = api.run_in(context, force=asked.force)
    unedited = [outcome.record.summary for outcome in made.stages if not outcome.edited]
    loading = next(({"loads_in": one["loads_in"]} for one in unedited if "loads_in" in one), {})
    finished = {
        "stages": [terminal.outcome_json(outcome) for outcome in made.stages],
        "table": made.table,
        "paths": {name: str(path) for name, path in made.paths.items()},
        **loading,
        "gates": gates.as_json(made.gates),
        "next": made.next,
    }

    def show_text(_: Any) -> None:
        terminal.print_final(made.table, made.paths, made.stages)
        terminal.print_summary(loading)
        gates.print_lines(made.gates)
        print("\nnext", *(f"  {line}" for line in terminal.named_lines(made.next)), sep="\n")

    show(finished, show_text, json=asked.json, quiet=asked.quiet)
    gates.end(made.gates, json=asked.json)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(BuildOptions):
    """Options of `moeq plan`, which has no --check."""

    check: bool = False
    probe: bool = option("Measure for a few seconds how fast this machine is.", default=True)


@takes_options("for_", "device", "workers", "quantizer", "refine", "tune")
def plan(asked: PlanOptions) -> None:
    """Say what a run will need in memory, disk and time, and whether it fits here; reads and downloads no weights."""
    context = context_of(replace(asked, quiet=True), "plan")
    from moeq import terminal
    from moeq.planning.plan import error_of, make_plan

    made = make_plan(context, probe=asked.probe)
    show(made.as_json(), lambda _: terminal.print_plan(made), json=asked.json, quiet=asked.quiet)
    error = error_of(made)
    if error is not None:
        refuse(error, json=asked.json)


def gc(
    run: Annotated[list[Path] | None, Argument(help="Run directories.")] = None,
    out: Annotated[list[Path] | None, Option(help="The same as a RUN; may be given several times.")] = None,
    store: Annotated[
        Path | None, Option(help="Replica store that runs share: those that it knows of keep theirs.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only say what would be dropped.")] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Drop replicas that no run's recipe or assignment refers to, and what killed runs left half-written."""
    from moeq import cleaning, terminal

    freed = cleaning.collect([*(run or []), *(out or [])], store, dry_run=dry_run)
    show(freed, terminal.print_freed, json=json, quiet=quiet)


def watch(
    out: Annotated[Path, Argument(help="Run directory, also one that lies on a disk shared with other machines.")],
    once: Annotated[bool, Option("--once", help="Look once.")] = False,
    html: Annotated[Path | None, Option(help="Write a page that refreshes itself here, too.")] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show how far a run is that goes on elsewhere: stages, layers, workers, sizes, time left; until it ends."""
    from moeq import watching

    view = watching.watch(out, html=html, once=once, quiet=quiet)
    show(view.as_json(), lambda _: watching.show(view), json=json, quiet=quiet)
