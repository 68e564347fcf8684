"""lm-eval through its Python API, on task names or local task YAML."""

from __future__ import annotations

import contextlib
import difflib
import io
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moeq.bounded import YAML_BYTES, read_bounded
from moeq.bundled import bundled_path
from moeq.errors import EvaluationError, MoeqError, missing
from moeq.evaluation.results import kept, members, scores_of
from moeq.folders import expanded
from moeq.models.messages import quiet_transformers
from moeq.progress import Bar, no_bar

BUNDLED_TASK = "moeq_continuation"
GENERATED = 256  # tokens that lm-eval generates where a task names no limit
BOOTSTRAP = 1000  # resamples, for the standard errors of metrics that have no formula
KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")  # of requests


def open_tasks(names: list[str], include_path: str | None) -> Any:
    """lm-eval's task manager, with every named task known to it and its data at hand.

    Raises EvaluationError for an unknown task or folder, and for data that cannot be had.
    """
    folder = None if include_path is None else expanded(include_path)
    folders = [str(bundled_path("corpus/lm_eval_tasks"))]
    if folder is not None:
        if not folder.is_dir():
            raise missing(folder, "give a folder of task YAML files to --include-path (eval.include_path)")
        _check_files(folder)
        folders.append(str(folder))
    from lm_eval.tasks import TaskManager

    with _lm_eval_errors(names):
        manager = TaskManager(include_path=folders, include_defaults=False)
        if not all(name in manager.all_tasks for name in names):  # lm-eval's own thousands take seconds to index
            manager = TaskManager(include_path=folders, include_defaults=True)
    for name in names:
        if name not in manager.all_tasks:
            close = difflib.get_close_matches(name, manager.all_tasks, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "see `lm-eval ls tasks`"
            if Path(name).suffix in (".yaml", ".yml"):
                hint = "give the `task:` that the file names, and its folder with --include-path"
            raise EvaluationError(f"no lm-eval task {name!r}", do=hint)
    for name in names:
        with _lm_eval_errors([name]):
            manager.load([name])
    return manager


def _check_files(folder: Path) -> None:
    """EvaluationError for YAML that lm-eval, which reads all of the folder, would wait for or read without end."""
    for path in sorted(folder.rglob("*.yaml")):
        try:
            read_bounded(path, YAML_BYTES)
        except (OSError, ValueError) as error:
            what = f"no task file ({error})"
            raise EvaluationError(what, where=str(path), do="take it out of the folder of tasks") from None


@contextlib.contextmanager
def _lm_eval_errors(names: list[str]) -> Iterator[None]:
    """Silence lm-eval and its data loaders; what they raise becomes one line."""
    for logger in ("lm_eval", "lm-eval", "datasets"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured), contextlib.redirect_stdout(captured):
            yield
    except MoeqError:
        raise
    except Exception as error:  # task code and dataset loaders raise anything
        away = re.search(r"Couldn't reach '([^']+)'", str(error))
        if away is not None:
            raise EvaluationError(
                f"needs the data set {away[1]} of the hub, which is neither in the cache nor within reach",
                where=", ".join(names),
                do="fetch it where there is a network, or give a task file with dataset_path: json and its data_files "
                "(--include-path)",
            ) from error
        reason = str(error).strip().split("\n")[0]
        raise EvaluationError(
            f"lm-eval failed ({type(error).__name__}: {reason})",
            where=", ".join(names),
            do="check the task's data; hub data sets need a network or a cache",
        ) from error


def task_requests(manager: Any, names: list[str], limit: int | None) -> list[tuple[int, int]]:
    """Characters (context and continuation) and generated tokens of every request that the tasks make of a model.

    Raises EvaluationError when a task cannot build its requests.
    """
    requests: list[tuple[int, int]] = []
    with _lm_eval_errors(names):
        for task in manager.load(names)["tasks"].values():
            task.build_all_requests(limit=_countable(limit), rank=0, world_size=1)
            for request in task.instances:
                text = sum(len(part) for part in request.args if isinstance(part, str))
                options = next((part for part in request.args if isinstance(part, dict)), {})
                new = options.get("max_gen_toks", GENERATED) if request.request_type == "generate_until" else 0
                requests.append((text, int(new)))
    return requests


def evaluate_tasks(
    lm: Any,
    names: list[str],
    manager: Any,
    *,
    limit: int | None = None,
    num_fewshot: int | Mapping[str, int] | None = None,
    chat_template: bool = False,
    model: dict[str, Any] | None = None,
    bar: Bar = no_bar,
) -> dict[str, Any]:
    """What lm-eval finds of a model for it (see harness_models), in its own JSON form, samples included.

    num_fewshot: examples in the context, of tasks that do not set it to 0 themselves, or {task or group: examples};
    chat_template: items are turns of a conversation; model: what stands in the configuration; bar: counts the answers
    of every kind. The same evaluation gives the same JSON. Raises EvaluationError when a task cannot be run.
    """
    import lm_eval
    import lm_eval.evaluator

    # these run git and pip, which takes half a second and complains on the user's terminal
    lm_eval.evaluator.get_git_commit_hash = lambda: None
    lm_eval.evaluator.add_env_info = lambda storage: None
    with _lm_eval_errors(names), quiet_transformers(), _counted(lm, bar):
        results = lm_eval.simple_evaluate(
            model=lm,
            tasks=_with_examples(names, manager, num_fewshot) if isinstance(num_fewshot, Mapping) else names,
            task_manager=manager,
            limit=_countable(limit),
            num_fewshot=None if isinstance(num_fewshot, Mapping) else num_fewshot,
            apply_chat_template=chat_template,
            bootstrap_iters=BOOTSTRAP,
            log_samples=True,
            verbosity="ERROR",
        )
    return kept(results, model or {})


@contextlib.contextmanager
def _counted(lm: Any, bar: Bar) -> Iterator[None]:
    """Show how many requests of a model were answered: it hands every answer to its cache, if it has one."""
    from lm_eval.api.model import CacheHook

    class Counting(CacheHook):  # type: ignore[misc]
        def __init__(self, advance: Callable[[], None]) -> None:
            super().__init__(None)
            self.advance = advance

        def add_partial(self, attr: str, req: Any, res: Any) -> None:
            self.advance()

    def counted(kind: str) -> Callable[..., Any]:
        answers = getattr(lm, kind)

        def answered(requests: list[Any], **options: Any) -> Any:
            with bar(kind, len(requests)) as advance:
                lm.cache_hook = Counting(advance)
                return answers(requests, **options)

        return answered

    before = lm.cache_hook
    for kind in KINDS:
        setattr(lm, kind, counted(kind))
    try:
        yield
    finally:
        lm.cache_hook = before
        for kind in KINDS:
            delattr(lm, kind)


def _countable(limit: int | None) -> int | None:
    """As many items as Python can count: lm-eval takes no larger number."""
    return None if limit is None else min(limit, sys.maxsize)


def _with_examples(names: list[str], manager: Any, num_fewshot: Mapping[str, int]) -> list[Any]:
    """The tasks and groups of these names with their numbers of examples; others keep their own."""
    chosen: list[Any] = []
    for name in names:
        loaded = manager.load([name])
        for task in loaded["tasks"].values():
            if name in num_fewshot and task.get_config("num_fewshot") != 0:
                task.set_config(key="num_fewshot", value=num_fewshot[name])
        chosen += [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())
    return chosen


def task_scores(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Scores {task: {metric: value}} of lm-eval's results; standard errors end in `_stderr`, groups stand for their
    members."""
    hidden = members(results)
    return {name: scores_of(result) for name, result in results["results"].items() if name not in hidden}


def headline(scores: dict[str, dict[str, float]]) -> tuple[float | None, float | None]:
    """Mean accuracy over the tasks that have one, and its standard error where every one of them has one."""
    values, errors = [], []
    for own in scores.values():
        metric = "acc" if "acc" in own else "acc_norm"
        values += [own[metric]] if metric in own else []
        errors += [own[f"{metric}_stderr"]] if metric in own and f"{metric}_stderr" in own else []
    if not values:
        return None, None
    return sum(values) / len(values), math.hypot(*errors) / len(values) if len(errors) == len(values) else None
