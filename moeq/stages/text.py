"""What a run is calibrated and measured on: text with tasks, or the images of an image classifier."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from rich.markup import escape

from moeq.artifacts.files import digest_of
from moeq.artifacts.profile import read_profile
from moeq.errors import ArtifactError, CorpusError, RecipeError
from moeq.evaluation.harness import BUNDLED_TASK, open_tasks
from moeq.models import corpus
from moeq.progress import Reporter
from moeq.recipe import PerplexitySection, Recipe, TestImagesSection, TextSource, source_text
from moeq.stages.model import RunModel

OF_TEXT = {  # of the section `eval`: what an image classifier lacks for it
    "tasks": "runs no tasks of lm-eval",
    "low_precision": "has no curves of perplexity",
    "translation": "translates nothing",
}


class Run(Protocol):
    """What text is read for; text_digests: of calibration and evaluation, and of their files alone, as far as they are
    known."""

    recipe: Recipe
    reporter: Reporter
    text_digests: dict[str, str]

    @property
    def model(self) -> RunModel: ...
    def directory(self, stage: str) -> Path: ...


class RunText:
    """The sequences of a run, read when they are first asked for."""

    def __init__(self, run: Run) -> None:
        self._run, self.recipe, self.model = run, run.recipe, run.model
        self._there: dict[str, int] = {}  # tokens of a part's files
        self._said: set[str] = set()

    @cached_property
    def perplexity(self) -> PerplexitySection | None:
        """What perplexity is measured on; None where the recipe wants none, and for image classifiers.

        Raises RecipeError where the recipe asks for what its model cannot do.
        """
        section = self.recipe.eval
        if not self.model.takes_images:
            if section.images is not None:
                raise RecipeError("the model reads text, no images", where="eval.images", do="leave it out")
            return section.perplexity
        instead = "leave it out: an image classifier is measured by accuracy, cross-entropy and logit error"
        if section.perplexity is not None and "perplexity" in section.model_fields_set:
            raise RecipeError("an image classifier has no perplexity", where="eval.perplexity", do=instead)
        for key, what in OF_TEXT.items():
            if getattr(section, key):
                raise RecipeError(f"an image classifier {what}", where=f"eval.{key}", do=instead)
        return None

    @cached_property
    def calibration_sources(self) -> list[corpus.Source]:
        """What calibration text comes from; none for image classifiers."""
        return [] if self.model.takes_images else corpus.open_sources(self.recipe.corpus.source, "calibration")

    @cached_property
    def evaluation_sources(self) -> list[corpus.Source]:
        """What perplexity is measured on."""
        return [] if self.perplexity is None else corpus.open_sources(self.perplexity.source, "evaluation")

    def _image_sets(self, source: TextSource) -> list[corpus.ImageSet]:
        """The labelled images that a source names."""
        section = self.recipe.corpus
        files = corpus.ImageFiles(
            model=self.model.source.path,
            trust_remote_code=self.recipe.trust_remote_code,
            channels=self.model.image_task.shape[0],
            image_field=section.image_field or "image",
            label_field=section.label_field,
            names=self.model.skeleton.config.label2id,  # type: ignore[union-attr,arg-type]
        )
        return corpus.open_image_sets(corpus.image_names(source), self.model.image_task, files)

    @cached_property
    def calibration_images(self) -> list[corpus.ImageSet]:
        return self._image_sets(self.recipe.corpus.source)

    @cached_property
    def evaluation_images(self) -> list[corpus.ImageSet]:
        """What an image classifier is measured on; CorpusError where calibration would see all of it."""
        source = self.test_images.source
        if source is not None:
            return self._image_sets(source)
        for images in self.calibration_images:
            if not images.rows:
                raise CorpusError(
                    "no row numbers train and test: there is nothing left to be measured on",
                    where=images.name,
                    do="store them, or name other images in eval.images.source",
                )
        return self.calibration_images

    @property
    def test_images(self) -> TestImagesSection:
        """The recipe's section, or its defaults."""
        return self.recipe.eval.images or TestImagesSection()

    @property
    def corpus_names(self) -> tuple[str, ...]:
        """What artifacts call what was calibrated on."""
        if self.model.takes_images:
            return tuple(images.public_name for images in self.calibration_images)
        return tuple(source.public_name for source in self.calibration_sources)

    def calibration_chunks(self) -> Iterator[corpus.Sequences]:
        """The calibration sequences that the recipe asks for; then, with corpus.until_covered, more and more."""
        section = self.recipe.corpus
        limit = section.sequences if section.until_covered is None else section.until_covered.max_sequences
        with self.reading("calibration"):
            chunks = self._calibration_rows(section.sequences, limit).chunks(section.sequences, limit)
            chunk = next(chunks, None)
        while chunk is not None:
            yield chunk
            with self.reading("calibration"):
                chunk = next(chunks, None)

    def _calibration_rows(self, first: int, most: int) -> corpus.TextRows | corpus.ImagePool:
        """What calibration sequences are taken of: `first` at first, `most` in all."""
        section = self.recipe.corpus
        if self.model.takes_images:
            where = f"corpus {source_text(section.source)}"
            return corpus.ImagePool(self.calibration_images, "train", self.model.image_task, where)
        pool = self._calibration_pool(first, most)
        if pool.with_images():
            processor = corpus.load_processor(self.model.source.path, self.recipe.trust_remote_code)
            pool.encode_with(corpus.Encoder(processor, section.sequence_length))
        return pool

    def _calibration_pool(self, first: int, most: int) -> corpus.TextRows:
        section = self.recipe.corpus
        self.check_length(section.sequence_length, "corpus.sequence_length")
        pool = corpus.open_corpus(
            self.calibration_sources,
            self._calibration_fields,
            self.model.tokenizer,
            length=section.sequence_length,
            first=first,
            most=most,
            packed=section.packed,
            where=f"corpus {source_text(section.source)}",
            seed=self.recipe.seed if section.shuffle else None,
            bar=self._run.reporter.bar,
            say=lambda line: self._say(f"corpus.source: {line}"),
        )
        self._there["calibration"] = pool.tokens()
        return pool

    def _evaluation_pool(self) -> corpus.TextRows:
        section = self.perplexity or PerplexitySection()
        self.check_length(section.sequence_length, "eval.perplexity.sequence_length")
        pool = corpus.open_corpus(
            self.evaluation_sources,
            corpus.Fields(text=section.text_field),
            self.model.tokenizer,
            length=section.sequence_length,
            first=section.sequences,
            most=section.sequences,
            where=f"eval.perplexity {source_text(section.source)}",
            bar=self._run.reporter.bar,
            say=lambda line: self._say(f"eval.perplexity.source: {line}"),
        )
        self._there["evaluation"] = pool.tokens()
        return pool

    def _say(self, line: str) -> None:
        """A line about the text, which may be read more than once, said once."""
        if line not in self._said:
            self._said.add(line)
            self._run.reporter.say(f"  [yellow]{escape(line)}[/yellow]")

    def lies_here(self, part: str) -> bool:
        """Whether a part can be read without a download."""
        return all(isinstance(source, corpus.LocalFile) for source in self._sources(part))

    def tokens_there(self, part: str) -> int:
        """About how many tokens the files of a part have, all of them; it is read once for that."""
        if part not in self._there:
            count = self.recipe.corpus.sequences
            _ = self._calibration_pool(count, count) if part == "calibration" else self._evaluation_pool()
        return self._there[part]

    @property
    def _calibration_fields(self) -> corpus.Fields:
        section = self.recipe.corpus
        return corpus.Fields(
            text=section.text_field,
            messages=section.messages_field,
            prompt=section.prompt_field,
            response=section.response_field,
            image=section.image_field,
            chat=section.chat_template,
        )

    @cached_property
    def calibration(self) -> corpus.Sequences:
        """The calibration sequences that the recipe asks for, before they grow."""
        return next(self.calibration_chunks())

    @cached_property
    def tuning(self) -> corpus.Sequences:
        """What quantize.tune trains on and chooses by: as many calibration sequences as it asks for, evenly spaced in
        the text, or those that the profile came to."""
        section = self.recipe.quantize.tune
        if section is None or section.sequences is None:
            return self.grown_calibration
        try:
            with self.reading("calibration"):
                return self._calibration_rows(section.sequences, section.sequences).take(section.sequences)
        except CorpusError as error:
            do = (error.do or "").replace("corpus.sequences", "quantize.tune.sequences")
            raise CorpusError(error.what, where=error.where, do=do) from None

    @cached_property
    def grown_calibration(self) -> corpus.Sequences:
        """The sequences that the profile came to; without corpus.until_covered, those that the recipe asks for.

        Raises ArtifactError when the profile was made of other text.
        """
        if self.recipe.corpus.until_covered is None:
            return self.calibration
        path = self._run.directory("profile")
        wanted = read_profile(path)
        parts, total = [], 0
        for chunk in self.calibration_chunks():
            parts.append(chunk)
            total += len(chunk)
            if total >= len(wanted.tokens):
                break
        sequences = corpus.join(parts)
        if sequences.digest() != wanted.text:
            raise ArtifactError("made of other sequences", where=str(path), do="run `moeq profile` again")
        return sequences

    @cached_property
    def evaluation(self) -> corpus.Sequences | None:
        """The evaluation text as sequences, None when the recipe wants no perplexity; or the images."""
        section = self.perplexity
        if self.model.takes_images:
            wanted = self.test_images
            where = f"eval.images {source_text(wanted.source or self.recipe.corpus.source)}"
            return corpus.ImagePool(self.evaluation_images, "test", self.model.image_task, where).take(wanted.images)
        if section is None:
            return None
        with self.reading("evaluation"):
            return self._evaluation_pool().take(section.sequences)

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
        section, folder = self.recipe.eval, self.model.source.path
        if not section.tasks or section.tasks == [BUNDLED_TASK]:
            return None
        from moeq.evaluation.multimodal import check_images, image_tasks  # brings lm-eval in, which takes seconds

        tasks = image_tasks(self.task_manager, section.tasks, with_images=corpus.has_processor(folder))
        check_images(tasks, section.limit)
        return corpus.load_processor(folder, self.recipe.trust_remote_code) if tasks else None

    def digest(self, part: str) -> str:
        """Digest of all that decides the calibration or evaluation text, beside the recipe's sections.

        Files are read once for it, as bytes; nothing is tokenized.
        """
        known = self._run.text_digests
        if part not in known:
            own, beside = self._digest(part), self.model.of_the_text()
            known[part] = digest_of([own, beside]) if beside else own
        return known[part]

    def _digest(self, part: str) -> str:
        if self.model.takes_images:
            sets = self.evaluation_images if part == "evaluation" else self.calibration_images
            return digest_of([[images.domain, images.digest] for images in sets])
        sources = self._sources(part)
        if not sources:
            return "none"
        digest = self._files_digest(part)
        together = [[source] for source in sources] if corpus.are_weighted(sources) else [sources]
        rule = {} if all(map(corpus.is_small, together)) else {"places": str(corpus.RULE)}
        if part == "evaluation":
            return digest_of({"sources": digest} | rule) if rule else digest
        parts = {"sources": digest} | rule
        images = corpus.images_digest(sources, self._calibration_fields, self._run.reporter.bar)
        if images is not None:
            parts["images"] = images
        if self.recipe.corpus.shuffle:
            parts["seed"] = str(self.recipe.seed)
        return digest_of(parts)

    def _files_digest(self, part: str) -> str:
        """Digest of a part's sources as they were when it was first asked for."""
        known, name = self._run.text_digests, f"files of {part}"
        if name not in known:
            known[name] = self._files_now(part)
        return known[name]

    def _files_now(self, part: str) -> str:
        return corpus.sources_digest(self._sources(part), self._run.reporter.bar)

    def _sources(self, part: str) -> list[corpus.Source]:
        return self.evaluation_sources if part == "evaluation" else self.calibration_sources

    @contextmanager
    def reading(self, part: str) -> Iterator[None]:
        """What is read in the block is what a part's digest was taken of; CorpusError where files have changed since.

        A run keeps what it has read, while files may be edited: what is measured hours later would be called after
        text that it never saw.
        """
        before = self._files_digest(part)
        yield
        if self._files_now(part) != before:
            named = {"calibration": ("corpus", self.recipe.corpus), "evaluation": ("eval.perplexity", self.perplexity)}
            key, section = named[part]
            where = key if section is None else f"{key} {source_text(section.source)}"
            raise CorpusError("changed since the run began", where=where, do="run the same command again")

    def check(self, parts: Collection[str]) -> None:
        """CorpusError for text that is not there, cannot be read or is too little: what is cheap to tell comes first.

        parts: calibration, evaluation.
        """
        if parts and not self.model.takes_images:
            perplexity = self.perplexity if "evaluation" in parts else None
            if "calibration" in parts:
                self.check_length(self.recipe.corpus.sequence_length, "corpus.sequence_length")
                _ = self.calibration_sources
            if perplexity is not None:
                self.check_length(perplexity.sequence_length, "eval.perplexity.sequence_length")
                _ = self.evaluation_sources
            _ = self.model.tokenizer
        for part in sorted(parts):
            getattr(self, part)

    def check_length(self, length: int, key: str) -> None:
        """CorpusError when sequences are longer than the positions that the model knows."""
        config = self.model.source.config
        positions = (config.get("text_config") or config).get("max_position_embeddings")
        if isinstance(positions, int) and length > positions:
            raise CorpusError(
                f"{length} tokens are more than the model's {positions} positions",
                where=key,
                do=f"set it to {positions} or less",
            )
