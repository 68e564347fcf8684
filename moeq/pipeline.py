"""The stages in order: keys, skipping what has not changed, resuming what was killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moeq.artifacts.evaluation import NAME as EVALUATION
from moeq.artifacts.files import digest_of, locked, remove_partials, write_text
from moeq.artifacts.sensitivities import NAME as SENSITIVITIES
from moeq.artifacts.stage import StageRecord, current_digest, is_current, read_record, write_record
from moeq.artifacts.trace import NAME as TRACE
from moeq.errors import ArtifactError
from moeq.models.corpus import BUNDLED, DIGITS, Source, pinned
from moeq.recipe import Recipe
from moeq.runtime.checkpoint import CARD
from moeq.stages import (
    assign,
    estimate,
    evaluate,
    export,
    integer_forward,
    losses,
    profile,
    quantize,
    reparam,
    report,
)
from moeq.stages.context import STORE, Context
from moeq.tables import human_seconds

RECIPE_COPY = "recipe.yaml"
REPARAM = "reparam"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: what it runs, the sections of the recipe that it reads, the stages whose artifacts it reads.

    after_growth: stages whose artifacts it also reads when the calibration text grows until experts are covered;
    revision: raised when the same inputs give other results, so that older artifacts are made again; text: parts of
    the corpus that it reads; computes: whether dtype and device decide its digits; check: finds what would make it fail
    later; intact: whether what it wrote outside its own directory is still there; apart: files outside its digest;
    editable: files that people may change by hand.
    """

    name: str
    run: Callable[[Context], dict[str, Any]]
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

    def needs(self, recipe: Recipe) -> tuple[str, ...]:
        """The stages whose artifacts it reads."""
        return self.after if recipe.corpus.until_covered is None else (*self.after, *self.after_growth)


STAGES = (
    Stage(
        name="reparam",
        run=reparam.run,
        revision=2,
        sections=("corpus",),
        text=("calibration",),
        extra=reparam.inputs,
        check=integer_forward.check,
    ),
    Stage(
        name="profile",
        run=profile.run,
        sections=("corpus", "profile"),
        text=("calibration",),
        computes=True,
        extra=profile.coverage_settings,
        intact=profile.trace_is_intact,
        apart=frozenset({TRACE}),
    ),
    Stage(
        name="losses",
        run=losses.run,
        revision=losses.REVISION + losses.ROWS_REVISION,
        sections=("corpus", "losses", "others"),
        after_growth=("profile",),
        text=("calibration",),
        computes=True,
        check=losses.check,
        intact=losses.is_intact,
    ),
    Stage(
        name="assign",
        run=assign.run,
        sections=("name", "assign"),
        after=("profile", "losses"),
        extra=assign.own_hardware,
        check=assign.check,
        apart=frozenset({SENSITIVITIES, assign.FRONTIER, assign.FRONTIER_PLOT}),
        editable=frozenset({assign.NAME}),
    ),
    Stage(name="quantize", run=quantize.run, sections=("quantize",), after=("losses", "assign"), computes=True),
    Stage(
        name="export",
        run=export.run,
        revision=2,
        sections=("export",),
        after=("profile", "losses", "assign", "quantize"),
        check=export.check,
        intact=export.formats_intact,
        apart=frozenset({CARD}),
    ),
    Stage(
        name="eval",
        run=evaluate.run,
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
        revision=2,
        sections=("estimate", "eval", "seed"),
        after=("profile", "losses", "assign"),
        extra=estimate.hardware_digest,
        check=estimate.check,
    ),
    Stage(
        name="report",
        run=report.run,
        revision=report.REVISION,
        sections=tuple(name for name in Recipe.model_fields if name not in {"model", "store"}),
        after=("profile", "losses", "assign", "quantize", "export", "eval", "estimate"),
        extra=report.own_inputs,
        intact=report.is_intact,
    ),
)
BY_NAME = {stage.name: stage for stage in STAGES}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What happened to one stage."""

    stage: str
    skipped: bool
    seconds: float
    record: StageRecord


def _inputs(context: Context, stage: Stage) -> dict[str, str]:
    """Digests of all that a stage's result depends on."""
    found = {"model": context.stamp.digest, "recipe": digest_of(_sections(context, stage))}
    found |= {part: context.text_digest(part) for part in stage.text}
    if stage.computes:
        found["compute"] = digest_of(context.compute())
    extra = None if stage.extra is None else stage.extra(context)
    if extra is not None:
        found["extra"] = digest_of(extra)
    for name in stage.needs(context.recipe):
        found[name] = current_digest(context.directory(name), name)
    return found


def _sections(context: Context, stage: Stage) -> dict[str, Any]:
    """What a stage reads of the recipe; where its text (or images) lies does not matter, only what it holds."""
    whole = context.recipe.model_dump(mode="json")
    if context.takes_images:
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


def run_stage(context: Context, stage: Stage, *, keep_edits: bool = True) -> Outcome:
    """Run one stage unless its inputs have not changed; the record is its last write.

    keep_edits=False: files that were edited by hand are made again.
    """
    directory = context.directory(stage.name)
    inputs = _inputs(context, stage)
    key = digest_of([stage.name, stage.revision, inputs])
    current = is_current(directory, stage.name, key, stage.editable if keep_edits else frozenset())
    if current and (stage.intact is None or stage.intact(context)):
        record = read_record(directory, stage.name)
        edited = current_digest(directory, stage.name) != record.digest
        note = "edited by hand, kept" if edited else "unchanged, skipped"
        context.reporter.say(f"[dim]{stage.name:9} {note}[/dim]")
        return Outcome(stage=stage.name, skipped=True, seconds=0.0, record=record)
    context.reporter.say(f"[bold]{stage.name}[/bold]")
    started = time.monotonic()
    (directory / "stage.json").unlink(missing_ok=True)
    summary = stage.run(context)
    seconds = time.monotonic() - started
    record = write_record(
        directory,
        stage=stage.name,
        model=context.stamp,
        seed=context.recipe.seed,
        key=key,
        inputs=inputs,
        summary=summary,
        volatile={"created": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": round(seconds, 3)},
        apart=stage.apart,
    )
    context.reporter.say(f"[green]{stage.name:9} done[/green] in {human_seconds(seconds)}")
    return Outcome(stage=stage.name, skipped=False, seconds=seconds, record=record)


def run(context: Context, names: tuple[str, ...] = tuple(BY_NAME)) -> list[Outcome]:
    """Run stages in order in the context's directory, which is locked meanwhile.

    Raises MoeqError of the failing stage's class; whatever was finished before stays.
    """
    given = context.given()
    stages = [BY_NAME[name] for name in names if name != REPARAM or context.folds]
    _prepare(given, stages)
    with locked(context.out):
        _remove_partials(context)
        write_text(context.out / RECIPE_COPY, _recipe_text(given))
        return [run_stage(given if stage.name == REPARAM else context, stage) for stage in stages]


def run_alone(context: Context, name: str) -> Outcome:
    """Run one stage on the artifacts that are there; ArtifactError when one it needs is missing or of another model."""
    stage = BY_NAME[name]
    context = context.given() if name == REPARAM else context
    _prepare(context, [stage])
    with locked(context.out):
        _remove_partials(context)
        made = dict.fromkeys(stage.needs(context.recipe), context)
        for needed, of in (made | ({REPARAM: context.given()} if context.folds else {})).items():
            record = read_record(context.directory(needed), needed)
            if record.model.digest != of.stamp.digest:
                raise ArtifactError(
                    f"made from another model ({record.model.name})",
                    where=str(context.directory(needed)),
                    do=f"run `moeq {needed}` again or choose another --out",
                )
        return run_stage(context, stage, keep_edits=False)


def _prepare(context: Context, stages: list[Stage]) -> None:
    """What can be wrong with model, device, text, tasks and hardware is found before the first write."""
    import torch

    if context.recipe.threads is not None:
        torch.set_num_threads(context.recipe.threads)
    torch.manual_seed(context.recipe.seed)
    needed = ["layers", "dtype"] if any(stage.name != REPARAM for stage in stages) else ["dtype"]
    reads = any(stage.text for stage in stages)
    needed += ["perplexity"] if reads else []  # or what makes none possible
    needed += ["tokenizer"] if reads and not context.takes_images else []
    needed += ["calibration"] if any("calibration" in stage.text for stage in stages) else []
    for name in needed:
        getattr(context, name)
    for stage in stages:
        if stage.check is not None:
            stage.check(context)


def _remove_partials(context: Context) -> None:
    own = [STORE] if context.owns_store else []
    stages = [context.directory(name).name for name in BY_NAME]
    remove_partials(context.out, [RECIPE_COPY, *own, *stages, *export.FORMAT_DIRECTORIES])


def _recipe_text(context: Context) -> str:
    import yaml

    data = context.recipe.model_dump(mode="json") | {"model": _absolute(context.model_name)}
    data["revision"] = context.source.revision or data["revision"]
    data["store"] = None if context.owns_store else str(context.store.resolve())
    if context.takes_images:
        data["corpus"]["source"] = _absolute(data["corpus"]["source"])
        data["eval"]["perplexity"] = None
    else:
        data["corpus"]["source"] = _pinned(data["corpus"]["source"], context.calibration_sources)
    if data["eval"]["images"] is not None:
        data["eval"]["images"]["source"] = _absolute(data["eval"]["images"]["source"])
    if data["eval"]["perplexity"] is not None:
        data["eval"]["perplexity"]["source"] = _pinned(data["eval"]["perplexity"]["source"], context.evaluation_sources)
    for key in ("source", "target") if data["eval"]["translation"] is not None else ():
        data["eval"]["translation"][key] = _absolute(data["eval"]["translation"][key])
    for section, key in (("eval", "include_path"), ("estimate", "hardware"), ("assign", "hardware")):
        data[section][key] = _absolute(data[section][key])
    for compared in data["eval"]["compare"]:
        compared["hardware"] = _absolute(compared["hardware"])
    return f"# The recipe as it was run, defaults filled in.\n{yaml.safe_dump(data, sort_keys=False)}"


def _pinned(source: str | list[str], opened: list[Source]) -> Any:
    """Files by their absolute path, hub datasets at their commit."""
    return _absolute(pinned(source, opened))


def _absolute(name: Any) -> Any:
    """Paths that exist become absolute, so that the copied recipe works from any directory; other names stay."""
    if isinstance(name, list):
        return [_absolute(one) for one in name]
    own = not isinstance(name, str) or name in (BUNDLED, DIGITS)
    return name if own or not Path(name).exists() else str(Path(name).resolve())


def result_paths(context: Context) -> dict[str, Path]:
    """Where a finished run put what the user came for."""
    section = context.recipe.reparam
    return {
        **({"integer": context.directory(REPARAM) / integer_forward.FOLDER} if section and section.integer else {}),
        "checkpoint": context.directory("export"),
        **{
            f"checkpoint in {name}": export.format_directory(context.out, name)
            for name in context.recipe.export.formats
        },
        "report": context.directory("report") / report.NAME,
        "evaluation": context.directory("eval") / EVALUATION,
    }
