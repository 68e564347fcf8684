"""The stages in order: what each runs, and what its result depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from moeq.artifacts.files import digest_of
from moeq.artifacts.run import EDITABLE
from moeq.artifacts.sensitivities import NAME as SENSITIVITIES
from moeq.artifacts.trace import NAME as TRACE
from moeq.errors import MoeqError
from moeq.recipe import Recipe
from moeq.recipe.earlier import as_in_keys
from moeq.runtime.checkpoint import CARD
from moeq.stages import (
    assign,
    assign_ahead,
    estimate,
    evaluate,
    export,
    frontier,
    gates,
    losses,
    needs_evaluate,
    needs_losses,
    profile,
    quantize,
    refine,
    reparam,
    replicas,
    report,
)
from moeq.stages.context import Context
from moeq.stages.needs import Needs, Sizes

NO_PROGRESS: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: what it runs, the sections of the recipe that it reads, the stages whose artifacts it reads.

    after_growth: stages whose artifacts it also reads when the calibration text grows until experts are covered;
    revision: raised when the same inputs give other results, so that older artifacts are made again; text: parts of
    the corpus that it reads; computes: whether dtype and device decide its digits; check: finds what would make it fail
    later; intact: whether what it wrote outside its own directory is still there; apart: files outside its digest;
    editable: files that people may change by hand, accept: raises what is wrong with them, and edited: their summary;
    progress: patterns of files that it goes on with when it was broken off; glances: stages of whose artifacts it reads
    none of the weights; needs: what it takes in memory, on the disk and in time, from sizes alone.
    """

    name: str
    run: Callable[[Context], dict[str, Any]]
    needs: Callable[[Sizes], Needs]
    sections: tuple[str, ...]
    after: tuple[str, ...] = ()
    after_growth: tuple[str, ...] = ()
    revision: int = 1
    text: tuple[str, ...] = ()
    computes: bool = False
    extra: Callable[[Context], Any] | None = None
    check: Callable[[Context], None] | None = None
    intact: Callable[[Context], bool] | None = None
    apart: frozenset[str] = frozenset()
    editable: frozenset[str] = frozenset()
    accept: Callable[[Context], object] | None = None
    edited: Callable[[Context], dict[str, Any]] | None = None
    progress: Callable[[Context], Sequence[str]] = lambda _: NO_PROGRESS
    glances: frozenset[str] = frozenset()

    def reads(self, recipe: Recipe) -> tuple[str, ...]:
        """The stages whose artifacts it reads."""
        return self.after if recipe.corpus.until_covered is None else (*self.after, *self.after_growth)

    def settings(self, context: Context) -> str:
        """The digest of what the recipe says of it."""
        return digest_of(_sections(context, self))

    def own_inputs(self, context: Context) -> dict[str, str]:
        """Digests of what a stage's result depends on beside the artifacts of others."""
        inputs = {"model": context.model.stamp.digest, "recipe": self.settings(context)}
        inputs |= {part: context.text.digest(part) for part in self.text}
        if self.computes:
            inputs["compute"] = digest_of(context.model.compute())
        extra = None if self.extra is None else self.extra(context)
        if extra is not None:
            inputs["extra"] = digest_of(extra)
        return inputs

    def is_asked_otherwise(self, context: Context, made: Mapping[str, str]) -> bool:
        """Whether the recipe asks for something else than what a stage was given, by its record; whether the text is
        the same is not asked, which may be gone by now."""
        if made.get("recipe") not in (None, self.settings(context)):
            return True
        try:
            extra = None if self.extra is None else self.extra(context)
        except MoeqError:
            return False
        return made.get("extra") != (None if extra is None else digest_of(extra))

    def key(self, inputs: dict[str, str]) -> str:
        """The digest of all that a result depends on, those inputs among it."""
        return digest_of([self.name, self.revision, inputs])


def _sections(context: Context, stage: Stage) -> dict[str, Any]:
    """What a stage reads of the recipe; where its text (or images), hardware or tasks lie does not matter, only what
    they hold."""
    whole = as_in_keys(context.recipe.model_dump(mode="json"))
    for section in (whole["assign"], whole["estimate"], *whole["eval"]["compare"]):
        section["hardware"] = section["hardware"] and PurePath(section["hardware"]).name
    whole["eval"]["include_path"] = None
    if context.model.takes_images:
        whole["eval"]["perplexity"] = None
    if "evaluation" in stage.text and whole["eval"]["images"] is not None:
        del whole["eval"]["images"]["source"]
    if "calibration" in stage.text:
        del whole["corpus"]["source"]
    if "evaluation" in stage.text and whole["eval"]["perplexity"] is not None:
        del whole["eval"]["perplexity"]["source"]
    if stage.name == "eval" and whole["eval"]["translation"] is not None:
        del whole["eval"]["translation"]["source"], whole["eval"]["translation"]["target"]
    return {name: whole[name] for name in stage.sections}


STAGES = (
    Stage(
        name="reparam",
        run=reparam.run,
        needs=reparam.needs,
        revision=2,
        sections=("corpus",),
        text=("calibration",),
        extra=reparam.inputs,
        check=reparam.check,
    ),
    Stage(
        name="profile",
        run=profile.run,
        needs=profile.needs,
        sections=("corpus", "profile"),
        text=("calibration",),
        computes=True,
        extra=profile.coverage_settings,
        check=profile.check,
        intact=profile.trace_is_intact,
        apart=frozenset({TRACE}),
    ),
    Stage(
        name="losses",
        run=losses.run,
        needs=needs_losses.needs,
        revision=replicas.REVISION + replicas.ROWS_REVISION,
        sections=("corpus", "losses", "others"),
        after_growth=("profile",),
        text=("calibration",),
        computes=True,
        extra=losses.more_wanted,
        check=losses.check,
        intact=losses.is_intact,
        progress=losses.progress,
    ),
    Stage(
        name="assign",
        run=assign.run,
        needs=assign.needs,
        sections=("name", "assign"),
        after=("profile", "losses"),
        extra=assign.own_inputs,
        check=assign_ahead.check,
        intact=assign.is_intact,
        apart=frozenset({SENSITIVITIES, frontier.NAME, frontier.PLOT}),
        editable=EDITABLE["assign"],
        accept=assign.load,
        edited=frontier.edited,
    ),
    Stage(
        name="quantize",
        run=quantize.run,
        needs=quantize.needs,
        sections=("quantize",),
        after=("losses", "assign"),
        computes=True,
        check=quantize.check,
        extra=quantize.other_inputs,
        progress=refine.progress,
    ),
    Stage(
        name="export",
        run=export.run,
        needs=export.needs,
        revision=2,
        sections=("export",),
        after=("profile", "losses", "assign", "quantize"),
        extra=export.other_inputs,
        check=export.check,
        intact=export.formats_intact,
        apart=frozenset({CARD}),
    ),
    Stage(
        name="eval",
        run=evaluate.run,
        needs=needs_evaluate.needs,
        sections=("eval", "seed"),
        after=("profile", "losses", "assign", "export"),
        text=("evaluation",),
        computes=True,
        extra=evaluate.other_inputs,
        check=evaluate.check,
    ),
    Stage(
        name="estimate",
        run=estimate.run,
        needs=estimate.needs,
        revision=3,
        sections=("estimate", "eval", "seed"),
        after=("profile", "losses", "assign"),
        extra=estimate.hardware_digest,
        check=estimate.check,
    ),
    Stage(
        name="report",
        run=report.run,
        needs=report.needs,
        revision=report.REVISION,
        sections=tuple(name for name in Recipe.model_fields if name not in report.APART),
        after=("profile", "losses", "assign", "quantize", "export", "eval", "estimate"),
        extra=report.own_inputs,
        check=gates.check,
        intact=report.is_intact,
        glances=frozenset({"quantize", "export"}),
    ),
)
BY_NAME = {stage.name: stage for stage in STAGES}
