"""What every stage is given: the run (recipe, directory, store), its model and its text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from moeq.artifacts.provenance import NamedModel
from moeq.artifacts.run import DIRECTORIES, STORE, store_folder
from moeq.models.loading import full_precision
from moeq.progress import Reporter
from moeq.recipe import Recipe
from moeq.recipe.labels import labels
from moeq.stages.model import RunModel
from moeq.stages.text import RunText


@dataclass(kw_only=True)
class Context:
    """One run: a recipe on a model in a directory.

    as_given: the model is the one that was named, even where the recipe goes on with a folded one. check: files are
    read and hashed also where a digest that was taken of them before would do. called: what artifacts call the model
    where it is not as it lies here, of a checkpoint that is made again. weights: of a hub model, whether they are
    downloaded, or their headers alone are read.
    """

    recipe: Recipe
    model_name: str
    out: Path
    as_given: bool = False
    check: bool = False
    called: NamedModel | None = None
    weights: bool = True
    reporter: Reporter = field(default_factory=Reporter)
    unfinished: dict[str, Path] = field(default_factory=dict)  # where a stage that is running writes
    text_digests: dict[str, str] = field(default_factory=dict)  # see `RunText.digest`, `RunText.reading`

    def directory(self, stage: str) -> Path:
        """Where a stage's artifact lies; of the stage that is running, where it is being written."""
        return self.unfinished.get(stage) or self.finished(stage)

    def finished(self, stage: str) -> Path:
        """Where a stage's finished artifact lies, that of an earlier run while the stage is running."""
        return self.out / DIRECTORIES.get(stage, stage)

    @contextmanager
    def writing(self, stage: str, directory: Path) -> Iterator[None]:
        """Have a stage's artifact be written to, and read from, an unfinished directory."""
        self.unfinished[stage] = directory
        try:
            yield
        finally:
            del self.unfinished[stage]

    @cached_property
    def store(self) -> Path:
        """Folder of the replica store: the recipe's, that of the environment, or the run's own."""
        return store_folder(self.recipe, self.out)

    @property
    def owns_store(self) -> bool:
        """Whether the store lies in the run directory, not behind a link there, and belongs to this run alone."""
        return self.store.resolve() == self.out.resolve() / STORE

    @property
    def folds(self) -> bool:
        """Whether the model is the one whose norms `moeq reparam` folded."""
        return self.recipe.reparam is not None and not self.as_given

    def given(self) -> Context:
        """The same run before its norms are folded: this one, where none are, so that no text is read twice."""
        return replace(self, as_given=True) if self.folds else self

    @cached_property
    def model(self) -> RunModel:
        return RunModel(
            name=self.model_name,
            recipe=self.recipe,
            out=self.out,
            reporter=self.reporter,
            check=self.check,
            called=self.called,
            weights=self.weights,
            folded=self.directory("reparam") if self.folds else None,
        )

    @cached_property
    def labels(self) -> dict[str, str]:
        """What every row of the evaluation is called, by its name."""
        return labels(self.recipe, full_precision(self.model.source))

    @cached_property
    def text(self) -> RunText:
        """What the model is calibrated and measured on."""
        return RunText(self)
