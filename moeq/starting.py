"""Runs that begin: the recipe that options and names describe, on a model in a directory; refused before anything heavy
is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, get_type_hints

from rich.markup import escape

from moeq.arguments import check
from moeq.errors import RecipeError, hint, missing
from moeq.folders import RECIPE_COPY, expanded, has_recipe, is_run
from moeq.options import BUNDLED_TEXT, BuildOptions, RunOptions
from moeq.recipe import Recipe, Start, load_recipe
from moeq.recipe.agreement import changes_of

if TYPE_CHECKING:
    from moeq.stages.context import Context

Given = Recipe | Mapping[str, Any] | str | Path | None  # a recipe, its keys, its file; None: the run directory's
Texts = str | Path | Sequence[str | Path]

RUNS = "moeq-out"  # where runs without --out lie


def start_of(asked: RunOptions, path: Path | None, preset: str | None, model: str | None) -> Start:
    """What the recipe is made of; ModelError where a preset's model is not there, which its sequences are to fit."""
    changes = [*changes_of(asked), *(["trust_remote_code=true"] if asked.trust_remote_code else [])]
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
    recipe = start.before_runtime(asked.for_)
    model = model or recipe.model
    if model is None:
        return start
    from moeq.models.source import known_positions

    return replace(start, positions=known_positions(model, recipe.revision))


def short_name(model: str) -> str:
    """The last part of a model's name: of its directory or hub id, or behind bundled:."""
    path = expanded(model)
    return (path.resolve() if path.is_dir() else Path(model.removeprefix("bundled:"))).name or "model"


def check_no_run(model: str) -> None:
    """RecipeError for a run's directory where a model is wanted."""
    if is_run(Path(model)):
        do = f"its recipe is {Path(model) / RECIPE_COPY}; `moeq run {model}` goes on with it"
        raise RecipeError("this is a run, no model", where=model, do=do)


def context_of(asked: RunOptions, command: str) -> Context:
    """The run that the options describe, for a command: wrong ones are refused before the stages are imported."""
    from moeq.preflight import check_device, check_runtime

    check_runtime(asked.for_)
    if asked.device is not None:
        check_device(asked.device)
    path, model, out = asked.recipe_path, asked.named_model, asked.out
    if path is None and model is not None:
        check_no_run(model)
        out = out or Path(RUNS) / short_name(model)
    if path is None and asked.preset_name is None and out is not None and has_recipe(out):
        path = out / RECIPE_COPY
    start = start_of(asked, path, asked.preset_name, model)
    recipe = start.before_runtime(asked.for_)
    model = model or recipe.model
    if model is None and out is not None and is_run(out):
        if not has_recipe(out):
            raise missing(out / RECIPE_COPY, f"put it back; moeq {command} MODEL --out {out} begins with another")
        do = f"moeq {command} MODEL --preset {start.preset} --out OTHER starts another; without it this one goes on"
        raise RecipeError("this run has a recipe already", where=str(out), do=do)
    if model is None:
        do = f"name one (moeq {command} MODEL), a recipe, or --out of a run"
        if path is not None:
            do = "give --model, or write `model:` in it"
        if path is None and asked.out is not None:
            do = f"give the directory of a run, or name a model or a recipe (moeq {command} MODEL --out {asked.out})"
            raise RecipeError("no run is there, and no model is named", where=f"--out {asked.out}", do=do)
        raise RecipeError("no model", where=str(start), do=do)
    out = out or Path(RUNS) / (recipe.name if path is not None else short_name(model))
    context = opened(recipe, command, out=out, model=model, check=asked.check, quiet=asked.quiet)
    if start.path is None or asked.out is None:  # not in the command line already
        context.reporter.say(f"[dim]{escape(f'{start}, into {out}')}[/dim]")
    if isinstance(asked, BuildOptions) and asked.text and not asked.eval_text and BUNDLED_TEXT not in asked.text:
        said = "what is lost is measured on bundled text, not on --text; on other text by --eval-text"
        context.reporter.say(f"[dim]{said}[/dim]")
    if asked.for_ is not None:
        needed = runtime_changes(context, start, asked.for_)
    elif recipe.assign.target is not None:
        needed = runtime_changes(context, start, recipe.assign.target, only_grid=True)
    else:
        needed = []
    codes = recipe.losses.encoding.codes
    if isinstance(asked, BuildOptions) and asked.group_size is not None and codes != "grid" and asked.for_ is None:
        said = f"{codes} codes have no groups of weights that --group-size could set: grids have (--quality fast)"
        context.reporter.say(f"[dim]{said}[/dim]")
    if asked.for_ is None and recipe.assign.target is None:
        return context
    return replace(context, recipe=replace(start, changes=[*start.changes, *needed]).recipe())


def runtime_changes(context: Context, start: Start, name: str, *, only_grid: bool = False) -> list[str]:
    """What --for changes of a run's recipe, told in a line each; of a preset, and of the recipe of a run that goes on,
    all but what was asked for may change.

    only_grid: as assign.target alone has it: the grid, where the runtime loads no other.
    """
    from moeq.artifacts.runtime_settings import grid_settings, settings_for

    own = start.path is None or (not only_grid and start.path == context.out / RECIPE_COPY)
    beside = {change.partition("=")[0].strip() for change in start.changes}
    beside |= {"assign.quantizer"} if start.quantizer is not None else set()
    said = beside if own else None
    if only_grid:
        settings = grid_settings(name, context.recipe, said)
    else:
        from moeq.stages.expert_bytes import room

        given = context.given()
        settings = settings_for(name, context.recipe, given.model.layers, said, room(given), beside)
    for setting in settings:
        context.reporter.say(escape(f"for {name}: {setting}"))
    return [setting.change for setting in settings]


def opened(
    recipe: Recipe, command: str, *, out: Path, model: str | None = None, check: bool = False, quiet: bool = False
) -> Context:
    """A recipe on a model in a directory, for a stage, `run` or `plan`.

    What can be refused without a model's code is refused before any is imported: RecipeError, and the errors of a
    model, a text, hardware or tasks that are not there.
    """
    from moeq.preflight import check_run
    from moeq.progress import Reporter

    name = model or recipe.model
    if name is None:
        raise RecipeError("no model", where=str(out), do="name one, or give a recipe that does")
    check_run(recipe, name, out, command)
    from moeq.stages.context import Context

    there = command != "plan"
    return Context(recipe=recipe, model_name=name, out=out, reporter=Reporter(quiet=quiet), check=check, weights=there)


class RunWords(TypedDict, total=False):
    """What changes a recipe or stands in its place, as the options of `moeq run` of the same names do.

    bits, code_bits, size: the budget; quality, preset: without a recipe; for_: the runtime that is to load what is
    made; text, eval_text: what it is calibrated and measured on; overrides: `key=value`, as --set takes them.
    """

    bits: float | str
    code_bits: float | str
    size: int | str
    quality: str
    preset: str
    for_: str
    text: Texts
    eval_text: Texts
    quantizer: str
    refine: bool
    tune: bool
    group_size: int
    device: str
    workers: int
    overrides: str | Sequence[str]


def begun(
    recipe: Given,
    command: str,
    *,
    out: str | Path | None,
    model: str | Path | None,
    check: bool = False,
    quiet: bool = False,
    **options: Unpack[RunWords],
) -> Context:
    """A run from Python, for `run`, `plan` or a stage: what was opened, its recipe as the options change it.

    recipe: or what else the command takes in its place, a model or a run.

    RecipeError for an option that is unknown or does not go with what else is given, and as `opened` raises.
    """
    places: dict[str, Any] = {"out": path_of(out), "model": None if model is None else str(model)}
    asked = _asked(options, **places, check=check, quiet=quiet)
    if recipe is None or isinstance(recipe, str | Path):
        return context_of(replace(asked, what=None if recipe is None else str(recipe)).in_its_run(), command)
    alone = [name for name in ("quality", "preset", "for_", "quantizer", "refine", "tune") if name in options]
    if alone:
        do = "say it in the recipe's keys"
        raise RecipeError("goes without a recipe's keys", where=alone[0], do=do)
    changes = changes_of(asked)
    if isinstance(recipe, Recipe):  # a copy with other values has not been validated
        recipe = recipe.model_dump(exclude_unset=True, warnings=False)
    whole = load_recipe(recipe, changes)
    places["out"] = places["out"] or Path(RUNS) / whole.name
    return opened(whole, command, **places, check=check, quiet=quiet)


def listed(given: Texts) -> list[str]:
    """One name, or several, as a list."""
    return [str(given)] if isinstance(given, str | Path) else [str(one) for one in given]


def path_of(given: str | Path | None) -> Path | None:
    """A path, where one is given."""
    return None if given is None else Path(given)


def _asked(options: RunWords, **more: Any) -> BuildOptions:
    """Options from Python as the command line has them; RecipeError for an unknown one."""
    for name in set(options) - set(RunWords.__annotations__):
        raise RecipeError(f"no option {name!r}", do=hint(name, [*RunWords.__annotations__, "model", "out"]))
    given: dict[str, Any] = {}
    hints = get_type_hints(RunWords)
    for name, value in options.items():
        if value is None:
            continue
        check(name, value, hints[name])
        if name in ("text", "eval_text", "overrides"):
            value = listed(value)  # type: ignore[arg-type]
        elif name in ("bits", "code_bits", "size"):
            value = str(value)
        given["set_" if name == "overrides" else name] = value
    return BuildOptions(**given, **more)
