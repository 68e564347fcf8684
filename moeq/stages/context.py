"""What every stage is given: the recipe, the model, the run directory; loaded once, when first asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.markup import escape
from torch import nn

from moeq.artifacts.run import DIRECTORIES, FOLDED, STORE, store_folder
from moeq.artifacts.stage import ModelStamp, read_record
from moeq.errors import ModelError
from moeq.evaluation.harness import BUNDLED_TASK, open_tasks
from moeq.models import corpus, hub, loading
from moeq.models.experts import ExpertLayer, find_expert_layers
from moeq.models.forward import takes_images
from moeq.models.non_experts import OtherModules, find_others
from moeq.models.single import ExpertReader
from moeq.models.source import ModelSource, open_source
from moeq.models.streaming import StreamedModel
from moeq.progress import Reporter
from moeq.recipe import Recipe
from moeq.stages.recorded import stamp_of
from moeq.stages.text import RunText


@dataclass(kw_only=True)
class Context:
    """One run: a recipe on a model in a directory.

    as_given: the model is the one that was named, even where the recipe goes on with a folded one. check: files are
    read and hashed also where a digest that was taken of them before would do.
    """

    recipe: Recipe
    model_name: str
    out: Path
    as_given: bool = False
    check: bool = False
    reporter: Reporter = field(default_factory=Reporter)
    announced: bool = False
    overwritten: list[str] = field(default_factory=list)  # resident parameters of a streamed model
    traces: dict[Any, list[np.ndarray]] = field(default_factory=dict)  # of the experts' Hessians, by how they were made
    unfinished: dict[str, Path] = field(default_factory=dict)  # where a stage that is running writes
    text_digests: dict[str, str] = field(default_factory=dict)  # of calibration and evaluation, which may be large

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
        """Whether the store lies in the run directory and belongs to this run alone."""
        return self.store.resolve() == (self.out / STORE).resolve()

    @property
    def folds(self) -> bool:
        """Whether the model is the one whose norms `moeq reparam` folded."""
        return self.recipe.reparam is not None and not self.as_given

    def given(self) -> Context:
        """The same run before its norms are folded: this one, where none are, so that no text is read twice."""
        return replace(self, as_given=True) if self.folds else self

    @cached_property
    def source(self) -> ModelSource:
        """Raises ArtifactError where the folded model is wanted and not there."""
        if self.reporter.quiet:
            hub.be_quiet()
        if self.folds:
            directory = self.directory("reparam")
            model = read_record(directory, "reparam").model
            found = open_source(str(directory / FOLDED), trust_remote_code=self.recipe.trust_remote_code)
            return replace(found, name=model.name, revision=model.revision)
        return open_source(self.model_name, self.recipe.revision, trust_remote_code=self.recipe.trust_remote_code)

    @cached_property
    def model_files(self) -> dict[str, str]:
        """{name: SHA-256} of the model's files as this run found them."""
        return self.source.file_digests(cached=not self.check, reporter=self.reporter)

    @cached_property
    def stamp(self) -> ModelStamp:
        return stamp_of(self.source, self.model_files, self.out)

    def check_model(self) -> None:
        """ModelError naming the first of the model's files that has changed since this run began."""
        now = self.source.file_digests()
        for path in [*self.source.side_files(), *self.source.files]:
            if now[path.name] != self.model_files.get(path.name):
                raise ModelError("changed since the run began", where=str(path), do="run the same command again")

    @cached_property
    def device(self) -> torch.device:
        return loading.resolve_device(self.recipe.device)

    @cached_property
    def dtype(self) -> torch.dtype:
        return loading.compute_dtype(self.source, self.recipe.dtype, self.device)

    @cached_property
    def described(self) -> tuple[nn.Module, list[ExpertLayer]]:
        """Skeleton on the meta device and expert layers (none of a dense model), from the configuration alone."""
        return loading.describe(self.source, self.recipe.trust_remote_code, experts=False)

    @property
    def layers(self) -> list[ExpertLayer]:
        """The expert layers; ModelError when there are none."""
        return self.described[1] or find_expert_layers(self.described[0])

    @cached_property
    def others(self) -> OtherModules:
        """What is not a routed expert and can be quantized."""
        return find_others(*self.described, self.source)

    @cached_property
    def takes_images(self) -> bool:
        """Whether the model is an image classifier: it reads images with labels, and has no tokenizer."""
        return takes_images(self.described[0])

    @cached_property
    def text(self) -> RunText:
        """What it is calibrated and measured on."""
        return RunText(self)

    @cached_property
    def tokenizer(self) -> Any:
        return loading.load_tokenizer(self.source, self.recipe.trust_remote_code)

    @cached_property
    def expert_reader(self) -> ExpertReader:
        """Experts read one by one, in the checkpoint's own type."""
        dtype = loading.source_dtype(self.source)
        return ExpertReader(self.source, loading.skeleton(self.source, dtype, self.recipe.trust_remote_code))

    def say_damaged(self, path: Path) -> None:
        self.reporter.say(f"  [yellow]{escape(str(path))}: damaged, made again[/yellow]")

    @cached_property
    def streams(self) -> bool:
        """Whether decoder layers stay on disk: as the recipe says; auto: when they are over a third of memory."""
        if self.recipe.stream != "auto":
            return self.recipe.stream == "always"
        return loading.loaded_bytes(self.source, self.dtype) > loading.memory_bytes(self.device) / 3

    @cached_property
    def streamed(self) -> StreamedModel | None:
        """The model with its decoder layers on disk, None when it is to be loaded whole."""
        if not self.streams:
            return None
        return StreamedModel(self.source, self.dtype, self.device, self.recipe.trust_remote_code)

    @cached_property
    def model(self) -> nn.Module:
        """The model in full precision. Stages that overwrite its weights must call `drop_model` afterwards."""
        how = "streaming" if self.streamed is not None else "loading"
        if not self.announced:
            dtype = str(self.dtype).removeprefix("torch.")
            self.reporter.say(f"  {how} {escape(self.model_name)} ({dtype}, {self.device})")
            self.announced = True
        if self.streamed is not None:
            return self.streamed.model  # type: ignore[no-any-return]
        return loading.load_model(self.source, self.dtype, self.device, self.recipe.trust_remote_code)

    def drop_model(self) -> None:
        """Forget what was done to the model; the next use of `model` has the checkpoint's weights again."""
        self.__dict__.pop("model", None)
        if self.streamed is not None:
            self.streamed.overlay = self.streamed.block_overlay = None
            self.streamed.read_again(self.overwritten)
            self.overwritten = []

    @cached_property
    def image_task(self) -> corpus.ImageTask:
        """What the image classifier takes."""
        return corpus.ImageTask.of(self.described[0], self.source.path)

    @cached_property
    def task_manager(self) -> Any:
        """lm-eval's task manager with the recipe's tasks, None when the recipe names none."""
        section = self.recipe.eval
        return open_tasks(section.tasks, section.include_path) if section.tasks else None

    @cached_property
    def image_processor(self) -> Any:
        """The model's processor where a task of the recipe has images, else None.

        Raises EvaluationError for such a task on a model that takes text only, and for images that are not there.
        """
        section = self.recipe.eval
        if not section.tasks or section.tasks == [BUNDLED_TASK]:
            return None
        from moeq.evaluation.multimodal import check_images, image_tasks  # brings lm-eval in, which takes seconds

        tasks = image_tasks(self.task_manager, section.tasks, with_images=corpus.has_processor(self.source.path))
        check_images(tasks, section.limit)
        return corpus.load_processor(self.source.path, self.recipe.trust_remote_code) if tasks else None

    def compute(self) -> dict[str, str]:
        """What beside the inputs decides the digits of a result."""
        return {"dtype": str(self.dtype), "device": self.device.type}
