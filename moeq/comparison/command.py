"""moeq eval: a run's stage, or any models, checkpoints, runs and assignments side by side; which one is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moeq.comparison import loaded
from moeq.comparison.subjects import Earlier, Subject, open_subjects
from moeq.errors import EvaluationError, RecipeError
from moeq.evaluation import document
from moeq.evaluation.batching import BatchSize
from moeq.evaluation.context_options import ContextOptions
from moeq.evaluation.harness import evaluate_tasks, open_tasks
from moeq.evaluation.harness_models import StaticLM
from moeq.evaluation.multimodal import check_images, image_tasks
from moeq.evaluation.strided import check_windows, read_text, score_text, too_long
from moeq.models import hub
from moeq.models.corpus import BUNDLED, has_processor
from moeq.progress import Reporter

RECIPES = (".yaml", ".yml")
WINDOW = 512


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command line of `moeq eval`; words: a recipe, or what is compared."""

    words: list[str]
    model: str | None = None
    out: Path | None = None
    overrides: list[str]
    tasks: str | None = None
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: str | None = None
    text: str | None = None
    window: int | None = None
    stride: int | None = None
    context_aware: list[str]
    truncate: bool = False
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    json: bool = False
    quiet: bool = False

    @property
    def recipe(self) -> Path | None:
        """Of a run's stage."""
        return Path(self.words[0]) if self.words else None

    @property
    def task_names(self) -> list[str]:
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]

    @property
    def rows(self) -> BatchSize | None:
        """The batch size; RecipeError unless it is a number or auto."""
        if self.batch_size is None or self.batch_size == "auto":
            return None if self.batch_size is None else "auto"
        if not self.batch_size.isdigit() or int(self.batch_size) < 1:
            raise RecipeError(f"--batch-size {self.batch_size}", do="give a number of at least 1, or auto")
        return int(self.batch_size)


def needs_a_run(asked: Asked) -> bool:
    """Whether the stage of a run is meant; RecipeError for options that it does not have, or that only it has."""
    stage = not asked.words or (len(asked.words) == 1 and Path(asked.words[0]).suffix in RECIPES)
    beyond = {
        "--text": asked.text,
        "--window": asked.window,
        "--stride": asked.stride,
        "--context-aware": asked.context_aware or None,
        "--truncate": asked.truncate or None,
        "--dtype": None if asked.dtype == "auto" else asked.dtype,
        "--device": None if asked.device == "auto" else asked.device,
    }
    of_a_run = {"--model": asked.model, "--set": asked.overrides or None}
    wrong = [name for name, value in (beyond if stage else of_a_run).items() if value is not None]
    if wrong and stage:
        raise RecipeError(f"{wrong[0]} belongs to models, checkpoints and runs", where="moeq eval", do="name one")
    if wrong:
        raise RecipeError(
            f"{wrong[0]} belongs to a run's stage", where="moeq eval", do="give a recipe, or leave it out"
        )
    return stage


def recipe_overrides(asked: Asked) -> list[str]:
    """What the options change of a run's recipe."""
    given: dict[str, Any] = {
        "tasks": f"[{', '.join(asked.task_names)}]" if asked.tasks is not None else None,
        "include_path": asked.include_path,
        "num_fewshot": asked.num_fewshot,
        "limit": asked.limit,
        "batch_size": asked.rows,
    }
    return [*asked.overrides, *(f"eval.{name}={value}" for name, value in given.items() if value is not None)]


def run(asked: Asked, show: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """Measure what is named, show it, write the result file where one is asked for, and return what it holds."""
    if asked.quiet or asked.json:
        hub.be_quiet()
    reporter = Reporter(quiet=asked.quiet or asked.json)
    tasks = asked.task_names
    _check_options(asked)
    contexts = [ContextOptions.parse(text) for text in asked.context_aware]
    settings = loaded.Settings(
        dtype=asked.dtype,
        device=asked.device,
        batch_size=asked.rows or 16,
        truncate=asked.truncate,
        trust_remote_code=asked.trust_remote_code,
    )
    if asked.out is not None and (asked.out.is_dir() or not asked.out.absolute().parent.is_dir()):
        raise EvaluationError("is no file that can be written", where=str(asked.out), do="give a path in a folder")
    subjects = open_subjects(asked.words, contexts, asked.trust_remote_code)
    if (tasks or asked.text) and not any(isinstance(one, Subject) for one in subjects):
        raise EvaluationError(
            "nothing to measure, earlier results alone are named", where="moeq eval", do="name a model"
        )
    for one in subjects:
        if isinstance(one, Subject):
            loaded.check(one)
            _check_window(asked, one)
    manager = open_tasks(tasks, None if asked.include_path is None else str(asked.include_path)) if tasks else None
    settings = replace(settings, images=manager is not None and _check_images(asked, subjects, manager))
    rows = _rows(asked, subjects, settings, manager, reporter)
    whole = document.document(rows, _described(asked, settings))
    show(whole)  # before a full disk can lose it
    if asked.out is not None:
        document.write(asked.out, whole)
    return whole


def _check_options(asked: Asked) -> None:
    """RecipeError for options that nothing would follow, EvaluationError for windows that cannot be."""
    of_tasks = {
        "--include-path": asked.include_path,
        "--num-fewshot": asked.num_fewshot,
        "--limit": asked.limit,
        "--truncate": asked.truncate or None,
    }
    of_text = {"--window": asked.window, "--stride": asked.stride}
    if _text_source(asked) is not None:
        check_windows(asked.window or WINDOW, asked.stride)
    for given, missing, there in ((of_tasks, "--tasks", asked.task_names), (of_text, "--text", _text_source(asked))):
        wrong = [name for name, value in given.items() if value is not None]
        if wrong and not there:
            raise RecipeError(f"{wrong[0]} without {missing}", where="moeq eval", do=f"give {missing} too")


def _check_images(asked: Asked, subjects: Sequence[Subject | Earlier], manager: Any) -> bool:
    """Whether a task has images; EvaluationError when images, or models that take them, are missing."""
    found = False
    for subject in subjects:
        if isinstance(subject, Earlier):
            continue
        tasks = image_tasks(manager, asked.task_names, with_images=has_processor(subject.source.path))
        if tasks and subject.context is not None:
            raise EvaluationError(
                "has images, for which precision does not follow the context yet",
                where=f"task {next(iter(tasks))}",
                do="leave --context-aware out, or take tasks of text",
            )
        if tasks and not found:
            check_images(tasks, asked.limit)
        found = found or bool(tasks)
    return found


def _described(asked: Asked, settings: loaded.Settings) -> dict[str, Any]:
    return {
        "tasks": asked.task_names,
        "num_fewshot": asked.num_fewshot,
        "limit": asked.limit,
        "batch_size": settings.batch_size,
        "truncate": settings.truncate,
        "text": _text_source(asked),
        "window": asked.window,
        "stride": asked.stride,
    }


def _check_window(asked: Asked, subject: Subject) -> None:
    """EvaluationError for windows longer than the model's positions."""
    config = subject.source.config
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    if asked.window is not None and isinstance(positions, int) and asked.window > positions:
        raise too_long(asked.window, positions)


def _text_source(asked: Asked) -> str | None:
    """The text that perplexity is measured on; the bundled one where neither a text nor a task is named."""
    return asked.text or (None if asked.task_names else BUNDLED)


def _rows(
    asked: Asked, subjects: Sequence[Subject | Earlier], settings: loaded.Settings, manager: Any, reporter: Reporter
) -> list[document.Row]:
    """One row a subject, in the order in which they were named; those of one base are measured one after the other."""
    measured: dict[int, list[document.Row]] = {}
    with reporter.bar("eval", len(subjects)) as advance:
        for number, one in enumerate(subjects):
            if isinstance(one, Earlier):
                measured[number] = document.read_rows(one.path)
                advance()
        _check_names(subjects, measured)
        for number, subject, model in _by_base(subjects, settings):
            reporter.say(f"  {subject.name}")
            measured[number] = [_measure(asked, subject, model, settings, manager)]
            del model  # the next one may be of another base
            advance()
    return [row for number in sorted(measured) for row in measured[number]]


def _check_names(subjects: Sequence[Subject | Earlier], earlier: Mapping[int, Sequence[document.Row]]) -> None:
    """EvaluationError for a name that two rows would have, those of earlier results counted."""
    names = [one.name for one in subjects if isinstance(one, Subject)]
    names += [row["name"] for rows in earlier.values() for row in rows]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise EvaluationError("is there twice", where=twice, do="compare files and subjects of different names")


def _by_base(
    subjects: Sequence[Subject | Earlier], settings: loaded.Settings
) -> Iterator[tuple[int, Subject, loaded.Loaded]]:
    """Subjects with their numbers and the model that they are measured on, which is loaded once."""
    waiting = [(number, one) for number, one in enumerate(subjects) if isinstance(one, Subject)]
    while waiting:
        base = waiting[0][1].base
        model = loaded.load(waiting[0][1], settings)
        yield from ((number, one, model) for number, one in waiting if one.base == base)
        waiting = [(number, one) for number, one in waiting if one.base != base]
        del model  # before the next one is loaded


def _measure(
    asked: Asked, subject: Subject, model: loaded.Loaded, settings: loaded.Settings, manager: Any
) -> document.Row:
    started = time.monotonic()
    torch.manual_seed(0)
    lm = loaded.lm_of(model, subject, settings)
    row: document.Row = {"name": subject.name, "of": subject.described(), "lm_eval": None, "perplexity": None}
    source = _text_source(asked)
    if source is not None:
        row["perplexity"] = _perplexity(asked, lm, model.tokenizer, source, settings)
    if manager is not None:
        row["lm_eval"] = evaluate_tasks(
            lm,
            asked.task_names,
            manager,
            limit=asked.limit,
            num_fewshot=asked.num_fewshot,
            model=subject.described(),
        )
    row["cut_requests"] = dict(lm.cut)
    row["seconds"] = round(time.monotonic() - started, 3)
    return row


def _perplexity(asked: Asked, lm: StaticLM, tokenizer: Any, source: str, settings: loaded.Settings) -> dict[str, Any]:
    window = asked.window or min(WINDOW, lm.max_length)
    return score_text(lm, read_text(source, tokenizer, window, asked.stride), settings.batch_size)
