"""moeq eval without a run: models, checkpoints, runs and assignments are measured side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.markup import escape

from moeq.comparison import loaded
from moeq.comparison.eval_options import EvalOptions
from moeq.comparison.refusals import WINDOW, check, text_source
from moeq.comparison.subjects import Earlier, Subject, check_once, open_subjects
from moeq.engine.randomness import own_randomness
from moeq.errors import EvaluationError
from moeq.evaluation import result_file as document
from moeq.evaluation import task_files
from moeq.evaluation.divergence import Reference, Scorer
from moeq.evaluation.harness import evaluate_tasks, open_tasks
from moeq.evaluation.multimodal import check_images, image_tasks
from moeq.evaluation.strided import read_text, score_text
from moeq.evaluation.windows import too_long
from moeq.models import hub
from moeq.models.corpus import has_processor
from moeq.progress import Bar, Reporter

EARLIER = "of earlier results no logits are kept"


@own_randomness()
def compare(asked: EvalOptions, show: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """Measure what is named, show it, write the result file where one is asked for, and return what it holds."""
    if asked.quiet or asked.json:
        hub.be_quiet()
    reporter = Reporter(quiet=asked.quiet or asked.json)
    tasks = asked.task_names
    following = check(asked)
    subjects = open_subjects(asked.recipe, following, asked.trust_remote_code)
    measured = [subject for subject in subjects if isinstance(subject, Subject)]
    if asked.dynamic_log is not None and sum(subject.dynamic is not None for subject in measured) > 1:
        raise EvaluationError("a log has one row's decisions", where="--dynamic-log", do="give --dynamic once")
    if (tasks or asked.text) and not measured:
        what = "nothing to measure, earlier results alone are named"
        raise EvaluationError(what, where="moeq eval", do="name a model")
    for subject in measured:
        loaded.check(subject, asked.trust_remote_code)
        _check_window(asked, subject)
    if tasks and asked.include_path is not None:
        task_files.files_of(asked.include_path)  # which says no to what would be looked for everywhere
    manager = open_tasks(tasks, None if asked.include_path is None else str(asked.include_path)) if tasks else None
    settings = loaded.Settings(
        dtype=asked.dtype,
        device=asked.device or "auto",
        batch_size=asked.rows or 16,
        truncate=asked.truncate,
        trust_remote_code=asked.trust_remote_code,
        images=manager is not None and _check_images(asked, measured, manager),
        dynamic_log=asked.dynamic_log,
    )
    rows = _rows(asked, subjects, settings, manager, reporter)
    whole = document.document(rows, _described(asked, settings))
    show(whole)  # before a full disk can lose it
    if asked.out is not None:
        document.write(asked.out, whole)
    return whole


def _check_images(asked: EvalOptions, subjects: Sequence[Subject], manager: Any) -> bool:
    """Whether a task has images; EvaluationError when images, or models that take them, are missing."""
    some = False
    for subject in subjects:
        tasks = image_tasks(manager, asked.task_names, with_images=has_processor(subject.source.path))
        if tasks and subject.context is not None:
            what = "has images, for which precision does not follow the context yet"
            do = "leave --context-aware out, or take tasks of text"
            raise EvaluationError(what, where=f"task {next(iter(tasks))}", do=do)
        if tasks and not some:
            check_images(tasks, asked.limit)
        some = some or bool(tasks)
    return some


def _described(asked: EvalOptions, settings: loaded.Settings) -> dict[str, Any]:
    return {
        "tasks": asked.task_names,
        "num_fewshot": asked.num_fewshot,
        "limit": asked.limit,
        "batch_size": settings.batch_size,
        "truncate": settings.truncate,
        "text": text_source(asked),
        "window": asked.window,
        "stride": asked.stride,
    }


def _check_window(asked: EvalOptions, subject: Subject) -> None:
    """EvaluationError for windows longer than the model's positions."""
    config = subject.source.config
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    if asked.window is not None and isinstance(positions, int) and asked.window > positions:
        raise too_long(asked.window, positions)


def _rows(
    asked: EvalOptions,
    subjects: Sequence[Subject | Earlier],
    settings: loaded.Settings,
    manager: Any,
    reporter: Reporter,
) -> list[document.Row]:
    """One row a subject, in the order in which they were named; those of one base are measured one after the other,
    the first one first, which the others' distributions are compared with."""
    measured: dict[int, list[document.Row]] = {}
    folder = None if asked.out is None else asked.out.absolute().parent
    with Reference(folder) as reference, reporter.bar("eval", len(subjects)) as advance:
        several = sum(isinstance(subject, Subject) for subject in subjects) > 1
        first = reference if several and isinstance(subjects[0], Subject) else None
        for number, subject in enumerate(subjects):
            if isinstance(subject, Earlier):
                measured[number] = document.read_rows(subject.path)
                advance()
        _check_names(subjects, measured)
        for number, loadable, model in _by_base(subjects, settings):
            reporter.say(f"  {escape(loadable.name)}")
            measured[number] = [_measure(asked, loadable, model, settings, manager, first, reporter.bar)]
            del model  # the next one may be of another base
            advance()
    rows = [row for number in sorted(measured) for row in measured[number]]
    for row in rows[1:] if rows[0]["perplexity"] else ():
        known = row.get("not_compared") or (row.get("divergence") or {}).get("base") == rows[0]["name"]
        if row["perplexity"] and not known:
            row["not_compared"] = EARLIER
    return rows


def _check_names(subjects: Sequence[Subject | Earlier], earlier: Mapping[int, Sequence[document.Row]]) -> None:
    """EvaluationError for a name that two rows would have, those of earlier results counted."""
    names = [subject.name for subject in subjects if isinstance(subject, Subject)]
    names += [row["name"] for rows in earlier.values() for row in rows]
    check_once(names, "compare files and subjects of different names")


def _by_base(
    subjects: Sequence[Subject | Earlier], settings: loaded.Settings
) -> Iterator[tuple[int, Subject, loaded.Loaded]]:
    """Subjects with their numbers and the model that they are measured on, which is loaded once."""
    waiting = [(number, subject) for number, subject in enumerate(subjects) if isinstance(subject, Subject)]
    while waiting:
        base = waiting[0][1].base
        model = loaded.load(waiting[0][1], settings)
        yield from ((number, subject, model) for number, subject in waiting if subject.base == base)
        waiting = [(number, subject) for number, subject in waiting if subject.base != base]
        del model  # before the next one is loaded


def _measure(
    asked: EvalOptions,
    subject: Subject,
    model: loaded.Loaded,
    settings: loaded.Settings,
    manager: Any,
    reference: Reference | None,
    bar: Bar,
) -> document.Row:
    """One subject; reference: None where nothing is compared with what is measured first."""
    started = time.monotonic()
    torch.manual_seed(0)
    lm = loaded.lm_of(model, subject, settings)
    row: document.Row = {"name": subject.name, "of": subject.described(), "lm_eval": None, "perplexity": None}
    source = text_source(asked)
    if source is not None:
        window = min(WINDOW, lm.max_length) if asked.window is None else asked.window
        text = read_text(source, model.tokenizer, window, asked.stride)
        scorer = Scorer() if reference is None else reference.scorer(subject.name, text.tokens)
        row["perplexity"] = score_text(lm, text, settings.batch_size, scorer, bar)
        row["divergence"], row["not_compared"] = scorer.divergence(row["perplexity"]), scorer.missing
    if manager is not None:
        how: dict[str, Any] = {"limit": asked.limit, "num_fewshot": asked.num_fewshot, "model": subject.described()}
        row["lm_eval"] = evaluate_tasks(lm, asked.task_names, manager, bar=bar, **how)
    if model.dynamic is not None:
        model.dynamic.close()
        row["dynamic"] = model.dynamic.summary()
    row["cut_requests"] = dict(lm.cut)
    row["bytes"] = subject.whole_bytes()
    row["seconds"] = round(time.monotonic() - started, 3)
    return row
