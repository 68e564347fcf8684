"""Recipes from plain values: a file or a preset, and what is changed of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moeq.bundled.preset_files import DEFAULT, preset_path
from moeq.errors import RecipeError
from moeq.recipe.choices import BEST
from moeq.recipe.reading import load_recipe
from moeq.recipe.recipe import Recipe

LENGTHS = ("corpus.sequence_length", "eval.perplexity.sequence_length")  # within the positions that a model knows


def build_recipe(
    path: Path | None = None,
    *,
    preset: str | None = None,
    changes: Sequence[str] = (),
    quantizer: str | None = None,
    refine: bool = False,
    positions: int | None = None,
    names: Mapping[str, str] | None = None,
) -> Recipe:
    """The recipe of a file, else of a preset (the default one where none is named), with `key=value` changes.

    quantizer: whose replicas are used, added to losses.methods; refine: train the placed experts, by defaults where the
    recipe does not; positions: how many tokens the model knows, to which a preset's sequences are cut; names: what a
    key is called in a message where it was no `--set`. RecipeError where it is not valid.
    """
    changes = every_change(path, preset, changes, quantizer=quantizer, refine=refine, positions=positions, names=names)
    return _loaded(recipe_file(path, preset), changes, names)


def recipe_file(path: Path | None, preset: str | None) -> Path:
    """Where a recipe is read from: its file, else that of a preset, else that of the default one."""
    return path or preset_path(preset or DEFAULT)


def every_change(
    path: Path | None,
    preset: str | None,
    changes: Sequence[str],
    *,
    quantizer: str | None = None,
    refine: bool = False,
    positions: int | None = None,
    names: Mapping[str, str] | None = None,
) -> list[str]:
    """The changes of `build_recipe` with those that depend on what the recipe says."""
    recipe = _loaded(recipe_file(path, preset), changes, names)
    more = method_changes(recipe, quantizer, refine)
    if path is None and positions is not None:
        more += _shorter(recipe, changes, positions)
    return [*changes, *more]


def method_changes(recipe: Recipe, quantizer: str | None, refine: bool) -> list[str]:
    """What --quantizer and --refine change of a recipe."""
    changes = []
    if quantizer is not None:
        methods = [*recipe.losses.methods, *({quantizer} - {BEST, *recipe.losses.methods})]
        changes += [f"losses.methods=[{', '.join(methods)}]", f"assign.quantizer={quantizer}"]
    if refine and recipe.quantize.refine is None:
        changes.append("quantize.refine={}")
    return changes


def _shorter(recipe: Recipe, changes: Sequence[str], positions: int) -> list[str]:
    """Sequences of no more tokens than the model knows positions, but for lengths that were asked for."""
    asked = {change.partition("=")[0].strip() for change in changes}
    measured = recipe.eval.perplexity
    lengths = (recipe.corpus.sequence_length, 0 if measured is None else measured.sequence_length)
    return [
        f"{key}={positions}"
        for key, length in zip(LENGTHS, lengths, strict=True)
        if length > positions and key not in asked and not {"corpus", "eval", "eval.perplexity"} & asked
    ]


def _loaded(path: Path, changes: Sequence[str], names: Mapping[str, str] | None) -> Recipe:
    """`load_recipe`, whose messages name options as they were given."""
    try:
        return load_recipe(path, changes)
    except RecipeError as error:
        for key, option in (names or {}).items():
            section, _, leaf = key.rpartition(".")
            if error.where in (f"--set {key}", f"--set {section}") and leaf in error.what:
                what = error.what.removeprefix(f"{key}: ").removeprefix(f"{section}: ")
                raise RecipeError(what, where=option, do=error.do) from None
        raise
