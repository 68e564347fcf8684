"""Running the stages in order: skipping what has not changed, resuming what was killed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.markup import escape

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.digests import digest_of_file, spent
from moeq.artifacts.evaluation import NAME as EVALUATION
from moeq.artifacts.files import BEGUN, building, locked, place, remove_partials, write_bytes
from moeq.artifacts.making import THREADS
from moeq.artifacts.mirror import mirrored
from moeq.artifacts.places import refuse_artifacts
from moeq.artifacts.replica_store import is_shared
from moeq.artifacts.run import RECIPE_COPY, STORE
from moeq.artifacts.stage import (
    StageRecord,
    damage,
    edited_files,
    is_current,
    read_record,
    write_record,
)
from moeq.artifacts.status import telling
from moeq.engine.randomness import own_randomness
from moeq.errors import ArtifactError
from moeq.progress import Counted
from moeq.runtimes import ONNX
from moeq.scratch import LOCK
from moeq.stages import assign, export, integer_forward, making, report, w8a8
from moeq.stages.context import Context
from moeq.stages.making import TEXT_FILES
from moeq.stages.order import BY_NAME, Stage
from moeq.stages.recorded import MODEL_FILES, changed_files
from moeq.stages.run_directory import (
    CODES_OF,
    check_codes,
    check_model,
    digest_before,
    is_another,
    record_of,
    write_recipe,
)
from moeq.stages.workers import with_threads
from moeq.tables import human_seconds
from moeq_kernels.freed import return_memory

REPARAM, PROFILE = "reparam", "profile"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What happened to one stage; edited: its files that were edited by hand and were kept."""

    stage: str
    skipped: bool
    seconds: float
    record: StageRecord
    edited: tuple[str, ...] = ()


def _inputs(context: Context, stage: Stage) -> dict[str, str]:
    """Digests of all that a stage's result depends on."""
    earlier = stage.reads(context.recipe)
    return stage.own_inputs(context) | {
        name: digest_before(context, name, cached=not context.check) for name in earlier
    }


def run_stage(context: Context, stage: Stage, *, force: bool = False) -> Outcome:
    """Run one stage unless its inputs have not changed; what it wrote, with its record, takes the old one's place last.

    force: files that were edited by hand are made again. Raises ArtifactError where they would have to be without.
    """
    directory = context.finished(stage.name)
    before = spent()
    inputs = _inputs(context, stage)
    key = stage.key(inputs)
    edited = _edited(context, stage)
    if edited and not force:
        _accept(context, stage, key)
    elif edited:
        edited = []
        context.reporter.say(f"[yellow]{stage.name}: what was edited by hand is replaced[/yellow]")
    if _is_current(context, stage, key, stage.editable if edited else frozenset()):
        note = "edited by hand, kept" if edited else "unchanged, skipped"
        context.reporter.say(f"[dim]{stage.name:9} {note}[/dim]")
        record = read_record(directory, stage.name)
        return _outcome(context, stage, record, edited)
    for what in damage(directory, stage.name, stage.editable):
        context.reporter.say(f"  [yellow]{stage.name}: {escape(what)}; made again[/yellow]")
    context.reporter.say(f"[bold]{stage.name}[/bold]")
    context.model.check_unchanged()
    for name in stage.reads(context.recipe):
        digest_before(context, name, cached=name in stage.glances and not context.check)
    started, context.reporter.stage = time.monotonic(), Counted(stage.name, 1)
    with building(directory, progress=stage.progress(context)) as unfinished, context.writing(stage.name, unfinished):
        summary = stage.run(context)
        seconds = time.monotonic() - started
        context.model.check_unchanged()
        created = datetime.now(UTC).isoformat(timespec="seconds")
        record = write_record(
            unfinished,
            stage=stage.name,
            model=context.model.stamp,
            seed=context.recipe.seed,
            key=key,
            inputs=inputs,
            summary=summary,
            volatile={
                "created": created,
                "seconds": round(seconds, 3),
                THREADS: torch.get_num_threads(),
                MODEL_FILES: context.model.files,
                **({TEXT_FILES: making.text_files(context)} if stage.name == PROFILE else {}),
            },
            apart=stage.apart,
            before=before,
        )
        edited = [name for name in edited if digest_of_file(directory / name) != record.files[name].sha256]
        for name in edited:
            context.reporter.say(f"  {name}: edited by hand, kept")
            (unfinished / name).unlink()
            place(directory / name, unfinished / name)
    context.reporter.stage = None
    gc.collect()  # models refer to themselves
    return_memory()
    context.reporter.say(f"[green]{stage.name:9} done[/green] in {human_seconds(seconds)}")
    return _outcome(context, stage, record, edited, seconds)


def _outcome(
    context: Context, stage: Stage, record: StageRecord, edited: Sequence[str], seconds: float | None = None
) -> Outcome:
    """What happened to a stage, which was skipped without seconds; of files that were edited by hand the summary is
    theirs, not of those that it wrote."""
    if edited and stage.edited is not None:
        record = record.model_copy(update={"summary": stage.edited(context)})
    skipped = seconds is None
    return Outcome(stage=stage.name, skipped=skipped, seconds=seconds or 0.0, record=record, edited=tuple(edited))


def _is_current(context: Context, stage: Stage, key: str, edited: frozenset[str] = frozenset()) -> bool:
    """Whether what a stage would make is there; edited: files that need not be as it made them."""
    directory, cached = context.finished(stage.name), not context.check
    there = is_current(directory, stage.name, key, edited, cached=cached, reporter=context.reporter)
    return there and (stage.intact is None or stage.intact(context))


def _edited(context: Context, stage: Stage) -> list[str]:
    """Files of a stage that may be edited and are not as it wrote them; without a record, all that are there.

    A file that was put there by hand, or that an old moeq wrote and was killed, is not told from an edited one.
    """
    directory = context.finished(stage.name)
    if record_of(directory, stage.name) is None:
        return [name for name in sorted(stage.editable) if (directory / name).is_file()]
    return edited_files(directory, stage.name, stage.editable)


def _accept(context: Context, stage: Stage, key: str) -> None:
    """ArtifactError where files that were edited by hand are not valid, or were made of other inputs than they are."""
    record = record_of(context.finished(stage.name), stage.name)
    if record is not None and record.key != key:
        raise _refuse_edited(context, stage)
    if stage.accept is not None:
        stage.accept(context)


def _refuse_edited(context: Context, stage: Stage) -> ArtifactError:
    return ArtifactError(
        "edited by hand, and what it was made of has changed since",
        where=str(context.finished(stage.name) / _edited(context, stage)[0]),
        do="replace it with --force; to keep it, undo the change, or put a copy of it back afterwards",
    )


def _asked_otherwise(context: Context, stage: Stage) -> bool:
    """Whether a stage, or one whose artifact it reads, is asked for something else than its record says."""
    record = record_of(context.finished(stage.name), stage.name)
    if record is None:
        return False
    own = {name: digest for name, digest in record.inputs.items() if name not in BY_NAME}
    if own != stage.own_inputs(context) or record.key != stage.key(record.inputs):
        return True
    return any(_asked_otherwise(context, BY_NAME[name]) for name in stage.reads(context.recipe))


def _look_ahead(context: Context, stages: Sequence[Stage], force: bool) -> None:
    """What stages would refuse after others have run, before the first of them: as far as it can be known now.

    Raises what they raise: ArtifactError for a file edited by hand that would be lost, FormatError for a format that
    cannot carry the assignment.
    """
    given = context.given()
    if context.folds and not _is_finished(given, BY_NAME[REPARAM]):
        return
    for stage in stages:
        if stage.name != REPARAM and not force and _edited(context, stage) and _asked_otherwise(context, stage):
            raise _refuse_edited(context, stage)
    if context.recipe.export.formats and any(stage.name == "export" for stage in stages):
        assignment = _coming_assignment(context, stages, force)
        if assignment is not None:
            export.check_formats(context, assignment)


def _coming_assignment(context: Context, stages: Sequence[Stage], force: bool) -> Assignment | None:
    """The assignment that is exported; None where what decides it is still to be made."""
    stage, coming = BY_NAME["assign"], {asked.name for asked in stages}
    if stage.name not in coming or _is_finished(context, stage, stage.editable if not force else frozenset()):
        return assign.load(context)
    if all(_is_finished(context, BY_NAME[name]) for name in coming & {"profile", "losses"}):
        return assign.make(context, context.recipe.assign, context.recipe.name)
    return None


def _is_finished(context: Context, stage: Stage, edited: frozenset[str] = frozenset()) -> bool:
    """Whether a stage would be skipped."""
    try:
        return _is_current(context, stage, stage.key(_inputs(context, stage)), edited)
    except ArtifactError:  # of a stage before it
        return False


def run(
    context: Context,
    names: tuple[str, ...] = tuple(BY_NAME),
    *,
    force: bool = False,
    threads: Mapping[str, int] | None = None,
) -> list[Outcome]:
    """Run stages in order in the context's directory, which is locked meanwhile.

    force: files that were edited by hand are made again; threads: of stages that have others than the recipe's. Raises
    MoeqError of the failing stage's class; whatever was finished before stays.
    """
    stages = [BY_NAME[name] for name in names if name != REPARAM or context.folds]
    with own_randomness(), with_threads(context.recipe.threads), _directory(context, stages, force) as collected:
        for stage in stages:
            with with_threads((threads or {}).get(stage.name)):
                collected.add(run_stage(context.given() if stage.name == REPARAM else context, stage, force=force))
    return collected.outcomes


def run_alone(context: Context, name: str, *, force: bool = False) -> Outcome:
    """Run one stage on the artifacts that are there; ArtifactError when one it needs is missing or of another model."""
    stage = BY_NAME[name]
    context = context.given() if name == REPARAM else context
    with (
        own_randomness(),
        with_threads(context.recipe.threads),
        _directory(context, [stage], force, alone=True) as collected,
    ):
        collected.add(run_stage(context, stage, force=force))
    return collected.outcomes[0]


@contextmanager
def looking(context: Context, name: str) -> Iterator[None]:
    """The locked run directory for who only looks at what a stage and those before it made."""
    stage = BY_NAME[name]
    _check_directory(context)
    with own_randomness(), with_threads(context.recipe.threads):
        _prepare(context, [stage])
        _check_needed(context, stage)
        read_record(context.finished(name), name)
        with locked(context.out):
            yield


@dataclass
class _Collected:
    """Outcomes of stages; send: has the mirror have what each of them made."""

    outcomes: list[Outcome]
    send: Callable[[], None]

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.send()


@contextmanager
def _directory(context: Context, stages: list[Stage], force: bool, *, alone: bool = False) -> Iterator[_Collected]:
    """The locked run directory with the recipe of this run in it, for stages whose outcomes the block collects.

    What is refused is refused before; where a stage refuses, and none was run before it, the directory is as it was.
    """
    _check_directory(context)
    _prepare(context if alone else context.given(), stages)
    new, names = not context.out.exists(), [stage.name for stage in stages]
    outcomes: list[Outcome] = []
    try:
        with (
            locked(context.out) as lock,
            telling(lock, context.reporter, context.given().model.source.name, names),
            mirrored(
                context.recipe.mirror,
                context.out,
                context.reporter,
                lambda mirror: check_model(context.given(), BY_NAME, mirror),
            ) as send,
        ):
            for stage in stages if alone else []:
                _check_needed(context, stage)
            _remove_partials(context)
            _look_ahead(context, stages, force)
            for stage in stages if alone else []:
                _check_others(context, stage)
            with _recipe_written(context if alone else context.given(), outcomes):
                yield _Collected(outcomes, send)
    finally:
        made = new and context.out.is_dir()  # which it is not where the system refuses it
        if made and not outcomes and [path.name for path in context.out.iterdir()] == [LOCK]:
            with suppress(OSError):  # another run has come
                (context.out / LOCK).unlink()
                context.out.rmdir()


@contextmanager
def _recipe_written(context: Context, outcomes: list[Outcome]) -> Iterator[None]:
    """Write the recipe to the run directory; an error before any stage has run puts back what was there."""
    path = context.out / RECIPE_COPY
    before = path.read_bytes() if path.is_file() else None
    write_recipe(context)
    try:
        yield
    except Exception:
        if all(outcome.skipped for outcome in outcomes):
            _put_back(path, before)
        raise


def _put_back(path: Path, before: bytes | None) -> None:
    """Give a file its former bytes; where there was none, it goes unless something of a run lies beside it."""
    if before is not None:
        if path.read_bytes() != before:
            write_bytes(path, before)
    elif {beside.name for beside in path.parent.iterdir()} <= {path.name, LOCK}:
        path.unlink(missing_ok=True)


def _check_directory(context: Context) -> None:
    """RecipeError, ArtifactError for a directory that belongs to something else than runs of this model."""
    refuse_artifacts(context.out)
    check_model(context.given(), BY_NAME)


def _check_needed(context: Context, stage: Stage) -> None:
    """ArtifactError when an artifact that a stage reads is missing, of another model, or not what was written."""
    made = {REPARAM: context.given()} if context.folds else {}
    for needed, of in (made | dict.fromkeys(stage.reads(context.recipe), context)).items():
        _check_model_of(of, needed)
        if needed == REPARAM:
            digest_before(context, needed, cached=not context.check)


def _check_others(context: Context, stage: Stage) -> None:
    """Say of what a stage that runs alone reads what the recipe would not make of what is there now: it is taken as it
    is, but by `export`, whose provenance says that the recipe made it, and where it is other codes; ArtifactError."""
    for name in CODES_OF.keys() & set(stage.reads(context.recipe)) - stage.glances:
        check_codes(context, name)
    for needed in (*([REPARAM] if context.folds else []), *stage.reads(context.recipe)):
        said, do = _made_otherwise(context, needed), f"`moeq run {context.out}` makes it anew"
        if said is not None and stage.name == "export":
            what = f"{said}: the provenance of a checkpoint would be wrong"
            raise ArtifactError(what, where=str(context.finished(needed)), do=do)
        if said is not None:
            context.reporter.say(f"[yellow]{needed}: taken as it is, {escape(f'{said}; {do}')}[/yellow]")


def _made_otherwise(context: Context, name: str) -> str | None:
    """What is said of a stage's artifact that the recipe as it is would not make of what is there; None of others."""
    record = record_of(context.finished(name), name)
    if record is None:
        return None
    if BY_NAME[name].is_asked_otherwise(context.given() if name == REPARAM else context, record.inputs):
        return "made by other settings than the recipe's"
    others = [one for one in BY_NAME[name].reads(context.recipe) if is_another(context, one, record)]
    return f"made from another result of `moeq {others[0]}` than is there now" if others else None


def _check_model_of(context: Context, needed: str) -> None:
    """ArtifactError where a stage was run on another model, or on other bytes of this one."""
    record = read_record(context.directory(needed), needed)
    if record.model.digest == context.model.stamp.digest:
        return
    changed = changed_files(record, context.model.files)
    what = f": {changed[0]} is not the file that it read" if changed else ""
    raise ArtifactError(
        f"made from another model ({record.model.name}){what}",
        where=str(context.directory(needed)),
        do=f"run `moeq {needed}` again or choose another --out",
    )


def _prepare(context: Context, stages: list[Stage]) -> None:
    """What can be wrong with model, device, text, tasks and hardware is found before the first write.

    What follows from sizes and the recipe comes first: a large text is not read for a run that is refused anyway.
    """
    torch.manual_seed(context.recipe.seed)
    if any(stage.name != REPARAM for stage in stages):
        _ = context.model.layers
    _ = context.model.dtype
    parts = {part for stage in stages for part in stage.text}
    if parts:
        _ = context.text.perplexity  # or what makes none possible
    for stage in stages:
        if stage.check is not None:
            stage.check(context)
    context.text.check(parts)


def _remove_partials(context: Context) -> None:
    """Take away what is half-written, but for what a stage that was broken off goes on with."""
    folders = {name: context.finished(name).name for name in BY_NAME}
    kept = [
        folders[name]
        for name, stage in BY_NAME.items()  # with a record in it, it is one that was being replaced
        if stage.progress(context) and record_of(context.out / f"{folders[name]}{BEGUN}", name) is None
    ]
    own = [STORE] if context.owns_store and not is_shared(context.store) else []  # others may be writing there
    remove_partials(context.out, [RECIPE_COPY, *own, *folders.values(), *export.format_directories()], kept)


def result_paths(context: Context) -> dict[str, Path]:
    """Where a finished run put what the user came for."""
    section = context.recipe.reparam
    return {
        **({"integer": context.directory(REPARAM) / integer_forward.FOLDER} if section and section.integer else {}),
        **({"w8a8": context.directory(REPARAM) / w8a8.FOLDER} if section and section.w8a8 else {}),
        **({ONNX: context.out / ONNX} if context.recipe.export.onnx else {}),
        "checkpoint": context.directory("export"),
        **{
            f"checkpoint for {name}": export.format_directory(context.out, name)
            for name in context.recipe.export.formats
        },
        "report": context.directory("report") / report.NAME,
        "evaluation": context.directory("eval") / EVALUATION,
    }
