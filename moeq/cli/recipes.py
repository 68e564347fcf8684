"""Recipes themselves: init writes one, recipe shows one as it is understood, and what one may hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from typer import Argument

from moeq.bundled.preset_files import DEFAULT
from moeq.cli.ending import print_json, show
from moeq.errors import RecipeError
from moeq.folders import RECIPE_COPY, as_word, is_run
from moeq.options import MODEL_NAMES, RECIPES, BuildOptions, option, takes_options

if TYPE_CHECKING:
    from moeq.recipe import Start

STANDARD_OUTPUT = Path("-")


@dataclass(frozen=True, kw_only=True)
class InitOptions(BuildOptions):
    """Options of `moeq init`."""

    what: Annotated[
        str | None,
        Argument(metavar="MODEL", help=f"{MODEL_NAMES}; without one --model names it where the recipe is run."),
    ] = None
    out: Path | None = option(
        "File to write, NAME.yaml, which must not be there yet; -: standard output [default: recipe.yaml]."
    )
    check: bool = False

    def in_its_run(self) -> Self:
        """As it is: --out is the file to write, and a run is refused where its model is asked for."""
        return self


@takes_options("quantizer", "refine", "tune", "format", "for_")
def init(asked: InitOptions) -> None:
    """Write a commented recipe: a preset with a model and other options put in place, to go on with in an editor."""
    from moeq.models.declared import refuse_quantized
    from moeq.models.source import check_there
    from moeq.starting import RUNS, check_no_run, short_name

    out = asked.out or Path("recipe.yaml")
    if asked.recipe_path is not None:
        raise RecipeError("is a recipe", where=asked.what, do="give a model, or nothing; --out names the file")
    if out != STANDARD_OUTPUT and out.suffix not in RECIPES:
        do = f"end its name in {RECIPES[0]}, by which commands know a recipe"
        raise RecipeError("is no name of a recipe", where=f"--out {out}", do=do)
    if out != STANDARD_OUTPUT and (out.exists() or out.is_symlink()):
        raise RecipeError("is there already", where=str(out), do="choose another --out, or -")
    model = asked.named_model
    if model is not None:
        check_no_run(model)
        refuse_quantized(check_there(model), model)
    text = _recipe_text(asked, model)
    if out == STANDARD_OUTPUT:
        show({"text": text}, lambda _: print(text, end=""), json=asked.json)
        return
    from moeq.artifacts.files import write_text

    write_text(out, text)
    into = " --model MODEL" if model is None else f" --out {as_word(Path(RUNS) / short_name(model))}"
    words = f"moeq run {as_word(out)}{into}"
    written = {"recipe": str(out), "next": words}
    show(written, lambda _: print(f"{out} written\nnext: {words}"), json=asked.json, quiet=asked.quiet)


def _recipe_text(asked: BuildOptions, model: str | None) -> str:
    """The preset's text with what options change in place."""
    from moeq.bounded import parse_yaml
    from moeq.recipe.editing import with_values
    from moeq.recipe.reading import parse_recipe, with_overrides
    from moeq.starting import start_of

    start = start_of(asked, None, asked.preset_name, model)
    if asked.for_ is not None:
        start = replace(start, changes=[*start.changes, *_runtimes_changes(asked, start, model)])
    text = start.file.read_text("utf-8")
    raw = with_overrides(parse_yaml(text).value, start.every_change(), str(start))
    raw |= {} if model is None else {"model": model}
    written = with_values(text, raw)
    assert parse_recipe(written) == start.recipe().model_copy(update={"model": raw["model"]}), "it holds what was asked"
    return written


def _runtimes_changes(asked: BuildOptions, start: Start, model: str | None) -> list[str]:
    """What --for changes, told as `moeq run` tells it; of the model's own matrices, where it is named."""
    from moeq.preflight import check_runtime
    from moeq.starting import RUNS, opened, runtime_changes, short_name

    check_runtime(asked.for_)
    assert asked.for_ is not None
    if model is None:
        do = "name it: what a runtime loads hangs on the sides of its matrices"
        raise RecipeError("no model", where=f"--for {asked.for_}", do=do)
    context = opened(
        start.before_runtime(asked.for_), "plan", out=Path(RUNS) / short_name(model), model=model, quiet=asked.quiet
    )
    return runtime_changes(context, start, asked.for_)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(BuildOptions):
    """Options of `moeq recipe`."""

    what: Annotated[
        str | None,
        Argument(metavar="RECIPE|RUN", help=f"YAML recipe, or a run's directory [default: preset {DEFAULT}]."),
    ] = None
    out: Path | None = None
    check: bool = False
    schema: bool = option("Print the JSON Schema of recipes, by which editors complete keys.", default=False)

    def in_its_run(self) -> Self:
        """With the recipe of a run that is named."""
        named = self.what is not None and is_run(Path(self.what))
        return replace(self, what=str(Path(self.what or "") / RECIPE_COPY)) if named else self


@takes_options("quantizer", "refine", "tune", "format")
def recipe(asked: RecipeOptions) -> None:
    """Print a whole recipe as it is understood, every default filled in; of a preset where no file is named."""
    from moeq.starting import start_of

    if asked.schema:
        from moeq.recipe.recipe import recipe_schema

        print_json(recipe_schema())
        return
    from moeq.recipe.editing import as_yaml

    if asked.what is not None and asked.recipe_path is None:
        do = "give a file that ends in .yaml; `moeq init MODEL` writes one, and every run has its own"
        raise RecipeError("is no recipe", where=asked.what, do=do)
    start = start_of(asked, asked.recipe_path, asked.preset_name, asked.model)
    data: dict[str, Any] = start.recipe().model_dump(mode="json")
    data["model"] = asked.model or data["model"]

    show(data, lambda _: print(as_yaml(data), end=""), json=asked.json, quiet=asked.quiet)
