"""Making a checkpoint again: its recipe run on the model and the texts that were matched, and what came of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from moeq import pipeline
from moeq.artifacts import making
from moeq.artifacts.files import PARTIAL, locked, make_directory, read_json, write_json
from moeq.artifacts.provenance import CALIBRATION, NO_SUBJECTS, TEXT, Statement, read_provenance
from moeq.artifacts.reading import relative_name
from moeq.artifacts.run import STAGES, STORE
from moeq.artifacts.storage import storage_errors
from moeq.bounded import shortened
from moeq.errors import CorpusError, MoeqError, RecipeError, StorageError
from moeq.progress import Reporter
from moeq.recipe import Recipe, SourceSection, load_recipe, source_name
from moeq.recipe.recipe import MOST_THREADS
from moeq.reproduction.differences import file_differences, matrix_differences
from moeq.reproduction.matching import Inputs
from moeq.reproduction.result import MatrixDifference, Reproduction
from moeq.runtimes import NATIVE
from moeq.stages import export
from moeq.stages.context import Context
from moeq.stages.workers import with_threads
from moeq.version import __version__

MARKER = "reproduction.json"  # in the run's directory: of which statement, and with what
TEXTS = "texts"  # links to texts by the names that the recipe has for them
MAKING = STAGES[: STAGES.index("export") + 1]
NOTE = 1000  # characters about versions
BESIDE = ".reproduced"  # behind the checkpoint's name, where no directory is named


def reproduce(inputs: Inputs, out: Path | None, reporter: Reporter) -> Reproduction:
    """Make a checkpoint again in a run directory and compare it; a run that was stopped goes on.

    out: None for one beside the checkpoint, which goes when all is equal. Raises RecipeError for a directory that holds
    something else, and what a run raises.
    """
    folder = inputs.checkpoint.with_name(f"{inputs.checkpoint.name}{BESIDE}") if out is None else out
    threads = _threads(inputs.statement)
    with with_threads(threads.get("export")), _run_directory(folder, inputs, temporary=out is None):
        context = _context(inputs, folder, reporter)
        _check_sets(context, inputs.statement)
        here = making.builder(context.model.device, torch.get_num_threads(), threads).version
        notes = tuple(_notes(inputs.statement, here, _packages(inputs)))
        if context.recipe.quantize.tune is not None and context.recipe.stream == "auto":  # of older versions
            how = "it is" if context.model.streams else "it is not"
            notes = (*notes, f"whether its model was streamed while scales were trained is not stated; here {how}")
        for note in notes:
            reporter.say(f"[yellow]{escape(note)}[/yellow]")
        pipeline.run(context, MAKING, threads=threads)
    found = _compared(inputs, context, reporter, notes)
    if not found.is_equal or out is not None:
        return found
    _remove(folder)
    return replace(found, out=None)


def _threads(statement: Statement) -> dict[str, int]:
    """{stage: as many as the statement says, by which sums were divided}; none of those of which it does not."""
    version = statement.predicate.details.builder.version
    stated = {name: version.get(making.threads_of(name), version.get(making.THREADS, "")) for name in MAKING}
    return {name: int(count) for name, count in stated.items() if count in map(str, range(1, MOST_THREADS + 1))}


@contextmanager
def _run_directory(folder: Path, inputs: Inputs, *, temporary: bool) -> Iterator[None]:
    """The directory of this very reproduction; RecipeError for one that holds something else.

    temporary: it goes where nothing was made in it.
    """
    within = any(folder.resolve().is_relative_to(place) for place in (inputs.checkpoint, inputs.model))
    if within:
        raise RecipeError("lies in what is read", where=f"--out {folder}", do="choose another --out")
    versions = {"statement": inputs.digest, "packages": _packages(inputs), **making.builder().version}
    versions[making.THREADS] = str(torch.get_num_threads())
    if folder.is_dir() and any(path.name != f"{MARKER}{PARTIAL}" for path in folder.iterdir()):
        begun = read_json(folder / MARKER) if (folder / MARKER).is_file() else None
        if begun != versions:
            other = (
                "is there already"
                if begun is None
                else "another checkpoint was made again in it, or with other versions"
            )
            raise RecipeError(other, where=str(folder), do="remove it, or choose another --out")
    try:
        write_json(make_directory(folder) / MARKER, versions)
        yield
    except BaseException:
        if temporary:
            with suppress(StorageError, OSError), locked(folder):  # else another command is making it there
                if not any(folder.glob("*/stage.json")):
                    _remove(folder)
        raise


def _remove(folder: Path) -> None:
    """Remove a run directory, what says whose it is last: of one that is killed here the same command goes on."""
    for path in folder.iterdir():
        if path.name != MARKER:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(folder)


def _context(inputs: Inputs, folder: Path, reporter: Reporter) -> Context:
    recipe = _recipe(inputs, folder)
    called = inputs.statement.parameters.model
    return Context(recipe=recipe, model_name=str(inputs.model), out=folder, called=called, reporter=reporter)


def _recipe(inputs: Inputs, folder: Path) -> Recipe:
    """The statement's recipe on what lies here, with a store of its own."""
    data = inputs.recipe.model_dump(mode="json") | {"store": str(folder / STORE)}
    data["eval"] = {"compare": data["eval"]["compare"]}  # all else is not measured here
    data["corpus"]["source"] = _sources(inputs, folder)
    data["export"]["verify"] = False
    return load_recipe(data)


def _sources(inputs: Inputs, folder: Path) -> Any:
    """What the recipe calibrates on, files by their paths here."""
    source = inputs.recipe.corpus.source
    listed = source if isinstance(source, list) else [source]
    placed: list[Any] = []
    for at, (one, text) in enumerate(zip(listed, inputs.texts, strict=True)):
        keys = one.model_dump(mode="json") if isinstance(one, SourceSection) else None
        name = one.path if isinstance(one, SourceSection) else one
        plain = keys is None or "name" in keys
        place = name if text is None else str(text)
        if isinstance(text, Path):
            place = str(_placed(text, name, folder / TEXTS / str(at), plain=plain))
        placed.append(place if keys is None else keys | {"path": place})
    return placed if isinstance(source, list) else placed[0]


def _placed(path: Path, name: str, folder: Path, *, plain: bool) -> Path:
    """A text where its path names its domain as the recipe's did: where it lies, or by a link.

    plain: folders name nothing.
    """
    try:
        link = folder / relative_name(name)
    except ValueError as error:
        raise RecipeError(str(error), where="corpus.source", do="download the checkpoint again") from None
    if path.name == link.name and (plain or source_name(str(path)) == source_name(str(link))):
        return path  # images that its rows name are beside it
    make_directory(link.parent)
    with storage_errors(link):
        if link.is_symlink():
            link.unlink()
        link.symlink_to(path.resolve())
    return link


def _check_sets(context: Context, statement: Statement) -> None:
    """CorpusError for a set of images that is not the one that the statement has."""
    if not context.given().model.takes_images:
        return
    wanted = [digests.own for _, digests in statement.dependencies(TEXT)]
    for images, digest in zip(context.given().text.calibration_images, wanted, strict=False):
        if images.digest != digest:
            what = f"other images: their digest is {images.digest}, the provenance has {digest}"
            raise CorpusError(what, where=images.name, do="give those that it was calibrated on")


def _packages(inputs: Inputs) -> dict[str, str]:
    """The versions here of the packages that the statement names."""
    return {name: _version(name) for name in inputs.statement.packages}


def _version(package: str) -> str:
    try:
        return __version__ if package == "moeq" else metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _notes(statement: Statement, here: Mapping[str, str], packages: Mapping[str, str]) -> Iterator[str]:
    """Versions and the machine where they are not those that the statement has, on one line."""
    stated = statement.packages | statement.predicate.details.builder.version
    now = {**packages, **here}
    differ = [
        f"{name} {stated[name]}, here {now.get(name, 'unknown')}" for name in stated if now.get(name) != stated[name]
    ]
    if differ:
        yield shortened(
            f"made with other versions or on another machine, so bytes may differ: {'; '.join(differ)}", NOTE
        )


def _compared(inputs: Inputs, context: Context, reporter: Reporter, notes: tuple[str, ...]) -> Reproduction:
    """What was made beside what the statement says of the checkpoint's files."""
    runtime = inputs.statement.parameters.runtime
    native = runtime == NATIVE
    remade = context.finished("export") if native else export.format_directory(context.out, runtime)
    stated = inputs.statement.files
    made = {path.name for path in remade.iterdir() if path.is_file()} - NO_SUBJECTS
    files = file_differences(inputs.checkpoint, remade, stated, made)
    matrices: tuple[MatrixDifference, ...] = ()
    unread = None
    if files:
        reporter.say(f"  {len(files)} files differ")
        try:
            trust = inputs.trust_remote_code
            matrices = tuple(matrix_differences(inputs.checkpoint, remade, reporter, trust))
        except MoeqError as error:
            unread = str(error)
    again = read_provenance(remade)
    stage = None if again is None else _first_stage(inputs.statement, again)
    if again is not None and again.dependencies(CALIBRATION) != inputs.statement.dependencies(CALIBRATION):
        notes = (*notes, "its recipe and texts give another calibration text than the provenance states")
    if stage is not None and not files:
        notes = (*notes, f"its recipe gives other results of {stage} than the provenance states, and the same files")
    return Reproduction(
        checkpoint=inputs.checkpoint,
        remade=remade,
        out=context.out,
        equal=tuple(sorted(set(stated) - {one.file for one in files})),
        files=tuple(files),
        matrices=matrices,
        unread=unread,
        stage="export" if files and stage is None else stage,
        notes=notes,
    )


def _first_stage(statement: Statement, again: Statement) -> str | None:
    """The first stage before the export that did not write what the statement says; None where all did."""
    before, now = statement.byproducts, again.byproducts
    return next((name for name in MAKING if before.get(name) != now.get(name)), None)
