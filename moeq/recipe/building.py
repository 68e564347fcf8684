"""Recipes from plain values: a file or a preset, and what is changed of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moeq.bundled.preset_files import DEFAULT, preset_path
from moeq.errors import RecipeError
from moeq.recipe.choices import BEST
from moeq.recipe.reading import SET, load_recipe, with_overrides, written_methods
from moeq.recipe.recipe import Recipe
from moeq.registry import QUANTIZERS

GRID = ("losses.symmetric", "losses.symmetric_range", "losses.nested")  # what no other codes than a grid's have
LENGTHS = ("corpus.sequence_length", "eval.perplexity.sequence_length")  # within the positions that a model knows


def with_method(methods: Sequence[str], quantizer: str) -> list[str]:
    """losses.methods with a quantizer more, `best` being none; with it alone, where its codes are of another kind."""
    if quantizer in {BEST, *methods}:
        return list(methods)
    other = {QUANTIZERS.get(name).encoding is not None for name in (quantizer, *methods)}
    return [*methods, quantizer] if other == {False} else [quantizer]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a recipe is made of: a file, else a preset (the default one where none is named), and `key=value` changes.

    quantizer: whose replicas are used, added to losses.methods (`with_method`); refine, tune: train the placed experts,
    all scales, by defaults where the recipe does not; positions: how many tokens the model knows, to which a preset's
    sequences are cut; names: what a key is called in messages where it was not given by --set.
    """

    path: Path | None = None
    preset: str | None = None
    changes: Sequence[str] = ()
    quantizer: str | None = None
    refine: bool = False
    tune: bool = False
    positions: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """Where the recipe is read from; RecipeError for a preset that there is not."""
        return self.path or preset_path(self.preset or DEFAULT)

    def __str__(self) -> str:
        return f"preset {self.preset or DEFAULT}" if self.path is None else str(self.path)

    def recipe(self) -> Recipe:
        """The recipe; RecipeError where it is not valid."""
        changes = self._with_quantizer()
        recipe = self._loaded(changes)
        more = self._more(recipe)
        return self._loaded([*changes, *more]) if more else recipe

    def before_runtime(self, name: str | None) -> Recipe:
        """What the settings of a runtime, by name or the recipe's assign.target, follow from: `recipe`; a grid that was
        asked for is unchecked beside codes of another kind, which these settings may replace."""
        grid = [change for change in self.changes if change.partition("=")[0].strip() in GRID]
        try:
            return self.recipe()
        except RecipeError:
            if not grid:
                raise
            recipe = replace(self, changes=[change for change in self.changes if change not in grid]).recipe()
            if name is None and recipe.assign.target is None:
                raise
        asked = with_overrides({}, grid, str(self))["losses"]
        return recipe.model_copy(update={"losses": recipe.losses.model_copy(update=asked)})

    def every_change(self) -> list[str]:
        """The changes, and those that depend on what the recipe says."""
        changes = self._with_quantizer()
        return [*changes, *self._more(self._loaded(changes))]

    def _with_quantizer(self) -> list[str]:
        """The changes and the quantizer's, before anything is checked: other changes may be of what it alone can do."""
        if self.quantizer is None:
            return [*self.changes]
        methods = written_methods(self.file, self.changes)
        if methods is not None:
            methods = [f"losses.methods=[{', '.join(with_method(methods, self.quantizer))}]"]
        return [*self.changes, *(methods or ()), f"assign.quantizer={self.quantizer}"]

    def _more(self, recipe: Recipe) -> list[str]:
        """What is to be changed, too, of the recipe that the changes give."""
        more = []
        for name, asked in (("refine", self.refine), ("tune", self.tune)):
            if asked and getattr(recipe.quantize, name) is None:
                more.append(f"quantize.{name}={{}}")
        if self.path is None and self.positions is not None:
            more += self._shorter(recipe, self.positions)
        return more

    def _shorter(self, recipe: Recipe, positions: int) -> list[str]:
        """Sequences of no more tokens than the model knows positions, but for lengths that were asked for."""
        asked = {change.partition("=")[0].strip() for change in self.changes}
        measured = recipe.eval.perplexity
        lengths = (recipe.corpus.sequence_length, 0 if measured is None else measured.sequence_length)
        return [
            f"{key}={positions}"
            for key, length in zip(LENGTHS, lengths, strict=True)
            if length > positions and not {key, key.rpartition(".")[0], key.partition(".")[0]} & asked
        ]

    def _loaded(self, changes: Sequence[str]) -> Recipe:
        """`load_recipe`, whose messages name options as they were given."""
        try:
            return load_recipe(self.file, changes)
        except RecipeError as error:
            for key, option in self.names.items():
                if error.where == SET and error.what.startswith((f"{key} ", f"{key}:")):
                    raise RecipeError(f"{option}{error.what.removeprefix(key)}", do=error.do) from None
            section = f"{error.what.partition(':')[0]}."
            given = [key for key in (change.partition("=")[0].strip() for change in changes) if key.startswith(section)]
            if error.where == SET and given and all(key in self.names for key in given):
                where = ", ".join(self.names[key] for key in dict.fromkeys(given))
                raise RecipeError(error.what, where=where, do=error.do) from None
            raise
