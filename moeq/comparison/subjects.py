"""What `moeq eval` can measure, by how it is written on the command line.

MODEL              a directory, hub id or bundled:NAME in full precision
CHECKPOINT         a directory that moeq exported
RUN                a run directory: its own assignment, on the model that it was made of
RUN:NAME           another assignment of its recipe (eval.compare), or `original`; RUN:* stands for all of them
ASSIGNMENT.json    an assignment in a folder of a run
RESULTS.json       what an earlier `moeq eval --out` wrote
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import abspath
from pathlib import Path
from typing import Any

from moeq.artifacts.assignment import EDITED, Assignment, read_assignment
from moeq.artifacts.manifest import read_manifest
from moeq.artifacts.reading import read_json_file
from moeq.artifacts.run import RECIPE_COPY
from moeq.artifacts.stage import QUANTIZED
from moeq.artifacts.sums import check_sums
from moeq.comparison.refusals import assignments_of, split_run
from moeq.errors import EvaluationError, ModelError
from moeq.evaluation.context_options import ContextOptions
from moeq.folders import CHECKPOINT, CONFIG, bytes_in, expanded
from moeq.models.source import ModelSource, open_source
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.runtime.dynamic.options import DynamicOptions
from moeq.stages import assign, quantize
from moeq.stages.checkpoint_size import CheckpointSize, original_bytes
from moeq.stages.context import Context
from moeq.stages.evaluate import ORIGINAL
from moeq.stages.run_directory import check_codes, check_run
from moeq_kernels.widths import METHOD

Following = ContextOptions | DynamicOptions
ASSIGNMENT_KEYS = {"method", "layers", "group_size"}  # of an assignment, not of results


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One row of the comparison: what is loaded, and what is then done to it.

    run: the run that it belongs to; assignment: of the run, None for the original; edited: it is another than what was
    decided; exported: the run's own, whose experts may have been refined; checkpoint: packed, as exported; context:
    experts placed and quantized by context; dynamic: experts that change between two precisions as the workload asks
    for it.
    """

    name: str
    source: ModelSource
    run: Context | None = None
    assignment: Assignment | None = None
    edited: bool = False
    exported: bool = False
    checkpoint: Path | None = None
    context: ContextOptions | None = None
    dynamic: DynamicOptions | None = None

    @property
    def base(self) -> str:
        """What subjects share that can be measured on one loaded model; a dynamic one has its own."""
        path = str((self.checkpoint or self.source.path).resolve())
        return path if self.dynamic is None else f"{path} {self.name}"

    def whole_bytes(self) -> int | None:
        """Of all files that the checkpoint has, or would have; None where more than one precision is kept, or where
        they lie elsewhere."""
        if self.context is not None or self.dynamic is not None:
            return None
        if self.checkpoint is not None:
            return bytes_in(self.checkpoint)
        if self.run is not None:
            return CheckpointSize(self.run).of(self.assignment)
        return None if self.source.is_remote else original_bytes(self.source)

    def described(self) -> dict[str, Any]:
        """What was measured, for the results."""
        described: dict[str, Any] = {"subject": self.name, "model": self.source.name}
        if self.assignment is not None:
            described["assignment"] = {"name": self.assignment.name, "method": self.assignment.method}
        if self.run is not None and self.context is None:
            called = ORIGINAL if self.assignment is None else self.assignment.name
            label = self.run.labels.get(called)
            described["label"] = f"{label}, edited {EDITED}" if self.edited and label is not None else label
        if self.context is not None:
            described["context_aware"] = self.context.model_dump(mode="json")
        if self.dynamic is not None:
            described["dynamic"] = self.dynamic.model_dump(mode="json")
        return described


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """Rows of a result file."""

    path: Path


class _Opening:
    """Subjects that are opened together: each run once, and what rows call the directories."""

    def __init__(self, words: Sequence[str], trust: bool) -> None:
        self.trust = trust
        self._runs: dict[Path, Context] = {}
        self._named = {_parts(split_run(word)[0] or _run_above(Path(word)) or Path(word)) for word in words}

    def run(self, folder: Path) -> Context:
        """A run; EvaluationError where its recipe names no model."""
        key = folder.resolve()
        if key not in self._runs:
            recipe = load_recipe(folder / RECIPE_COPY, ["trust_remote_code=true"] if self.trust else [])
            if recipe.model is None:
                do = "give the model in the recipe"
                raise EvaluationError("names no model", where=str(folder / RECIPE_COPY), do=do)
            run = Context(recipe=recipe, model_name=recipe.model, out=folder, reporter=Reporter(quiet=True))
            check_run(run)
            self._runs[key] = run
        return self._runs[key]

    def name_of(self, folder: Path, length: int = 1) -> str:
        """The last parts of a directory's path: so many, and more where others that are named end like that, too."""
        own = _parts(folder)
        while length < len(own) and any(other[-length:] == own[-length:] for other in self._named - {own}):
            length += 1
        return str(Path(*own[-length:]))


def _parts(folder: Path) -> tuple[str, ...]:
    """Of a directory's whole path, also of one that is named as . or .."""
    return Path(abspath(expanded(folder))).parts


def open_subjects(words: Sequence[str], following: Sequence[Following], trust: bool) -> list[Subject | Earlier]:
    """The rows that the command line names, in order.

    `following` adds rows to every run and checkpoint, dynamic ones to checkpoints with both precisions alone, of a run
    its own.

    Raises EvaluationError for two rows of one name, and what opening a model, run or file raises.
    """
    rows: list[Subject | Earlier] = []
    opening = _Opening(words, trust)
    for word in words:
        opened = _opened(word, opening)
        rows += opened
        able = next((row for row in opened if isinstance(row, Subject) and (row.run or row.checkpoint)), None)
        if able is not None:
            ables = [_packed(able, opening) if isinstance(options, DynamicOptions) else able for options in following]
            pairs = zip(ables, following, strict=True)
            rows += [_follows(one, options, opening) for one, options in pairs if _may(rows, one, options)]
    subjects = [row for row in rows if isinstance(row, Subject)]
    for options in following:
        if not any(options in (subject.context, subject.dynamic) for subject in subjects):
            if isinstance(options, DynamicOptions):
                _ = [_pair(_packed(subject, opening), options) for subject in subjects]  # says what the first one has
            needed = "a run, or a checkpoint" if isinstance(options, ContextOptions) else "a run's checkpoint"
            do = f"{options.option} needs {needed} with them"
            without = (str(subject.run.out) for subject in subjects if subject.run is not None)
            raise EvaluationError("no replicas of its experts", where=next(without, words[0]), do=do)
    check_once([subject.name for subject in subjects], "name every subject once")
    return rows


def check_once(names: Sequence[str], do: str) -> None:
    """EvaluationError for a name that is there twice."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise EvaluationError("is there twice", where=twice, do=do)


def _follows(able: Subject, options: Following, opening: _Opening) -> Subject:
    """The row of a run or a checkpoint whose experts follow something."""
    where = opening.name_of(able.run.out) if able.run is not None else able.name
    if isinstance(options, DynamicOptions):
        pair = _pair(able, options)
        assert pair is not None, "only what is packed has a dynamic row"
        return replace(able, name=f"{where} {options.label(pair)}", dynamic=options)
    return replace(able, name=f"{where} {options.label}", assignment=None, exported=False, context=options)


def _may(rows: Sequence[Subject | Earlier], able: Subject, options: Following) -> bool:
    """Not where a run that is named twice has its row of these options already, nor a dynamic row of what has not both
    precisions."""
    if isinstance(options, DynamicOptions):
        try:
            has_both = _pair(able, options) is not None
        except ModelError:
            return False
        subjects = (row for row in rows if isinstance(row, Subject) and row.dynamic == options)
        return has_both and not any(row.checkpoint == able.checkpoint for row in subjects)
    same = (row for row in rows if isinstance(row, Subject) and row.context == options)
    return able.run is None or not any(row.run is able.run for row in same)


def _packed(subject: Subject, opening: _Opening) -> Subject:
    """A run's own checkpoint, called as the run, where it has exported one; else the subject as it is."""
    folder = None if subject.run is None else subject.run.out / CHECKPOINT
    if folder is None or not (folder / CONFIG).is_file():
        return subject
    source = open_source(str(folder), trust_remote_code=opening.trust)
    return _of_checkpoint(source, opening.name_of(folder.parent))


def _of_checkpoint(source: ModelSource, name: str) -> Subject:
    """A packed checkpoint as it was exported; ArtifactError where its files are others than it lists."""
    check_sums(source.path, cached=True)
    return Subject(name=name, source=source, checkpoint=source.path)


def _pair(subject: Subject, options: DynamicOptions) -> tuple[int, int] | None:
    """High and low bits of a checkpoint, None for what is none; ModelError where it has them not."""
    if subject.checkpoint is None:
        return None
    return options.pair(read_manifest(subject.checkpoint).widths_there, str(subject.checkpoint))


def _opened(word: str, opening: _Opening) -> list[Subject | Earlier]:
    path = expanded(word)
    if path.suffix == ".json" and path.is_file():
        return _of_json(path, opening)
    folder, name = split_run(word)
    if folder is not None:
        return list(_of_run(opening.run(folder), name, opening))
    source = open_source(word, trust_remote_code=opening.trust)
    is_here = path.is_dir()  # else it has an id, or an address
    if (source.config.get("quantization_config") or {}).get("quant_method") == METHOD:
        return [_of_checkpoint(source, opening.name_of(path, 2) if is_here else source.name)]
    return [Subject(name=opening.name_of(path) if is_here else source.name, source=source)]


def _of_json(path: Path, opening: _Opening) -> list[Subject | Earlier]:
    """An assignment of the run whose folder it lies in, or earlier results."""
    try:
        data = read_json_file(path)
    except (OSError, ValueError) as error:
        raise EvaluationError(
            f"cannot be read as JSON ({error})",
            where=str(path),
            do="give a JSON file that `moeq eval --out` or `moeq assign` wrote",
        ) from None
    if not isinstance(data, dict) or not set(data) >= ASSIGNMENT_KEYS:
        return [Earlier(path=path)]
    folder = _run_above(path)
    if folder is None:
        raise EvaluationError("an assignment outside of a run", where=str(path), do="put it into its run's directory")
    run = opening.run(folder)
    assignment = read_assignment(path)
    shown = f"{opening.name_of(folder)}:{assignment.name}"
    edited = assign.is_edited(run, path)
    return [Subject(name=shown, source=run.model.source, run=run, assignment=assignment, edited=edited)]


def _run_above(path: Path) -> Path | None:
    """The run in whose folder an assignment's file lies."""
    above = path.resolve().parents if path.suffix == ".json" else ()
    return next((folder for folder in above if (folder / RECIPE_COPY).is_file()), None)


def _of_run(run: Context, name: str | None, opening: _Opening) -> list[Subject]:
    """The run's own assignment, or one by its name, or all."""
    sections = {section.name: section for section in run.recipe.eval.compare}
    own, called, subjects = run.recipe.name, opening.name_of(run.out), []
    is_quantized = (run.directory("quantize") / quantize.NAME).is_file()  # without training the store says the same
    for wanted in assignments_of(run.recipe, name, run.out):
        shown = called if wanted == own and name is None else f"{called}:{wanted}"
        assignment = None
        if wanted != ORIGINAL:
            assignment = assign.load(run) if wanted == own else assign.make(run, sections[wanted], wanted)
        exported = wanted == own and (run.recipe.quantize.trains or is_quantized)
        if exported and run.recipe.quantize.trains:
            check_codes(run, QUANTIZED)
        edited, source = wanted == own and assign.is_edited(run), run.model.source
        subjects.append(
            Subject(name=shown, source=source, run=run, assignment=assignment, exported=exported, edited=edited)
        )
    return subjects
