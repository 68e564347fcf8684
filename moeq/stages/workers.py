"""Workers of a run: how many there are, and how parts of a stage are done by some that open the run for themselves.

`losses` hands its workers what they compute with (`losses_tasks`). Where a part of a stage is a whole pass of the model
instead, some of the text or one of the variants, a worker opens the run anew: the same recipe, the same directory, a
model of its own. That is for processes of this machine, whose memory has room for their models; a cluster's nodes need
not have the run's files, so there the run itself does such a stage.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moeq.artifacts.provenance import NamedModel
from moeq.engine.choice import open_engine
from moeq.engine.task import Engine, Task
from moeq.models.loading import memory_bytes
from moeq.progress import Reporter
from moeq.recipe import Recipe
from moeq.stages.context import Context
from moeq.tables import counted

ANY_GPU = ("auto", "cuda")  # devices of a recipe that choose no GPU
PROCESSES = "processes"
WORKER, SERVER = 80 << 20, 420 << 20  # bytes of a worker process of its own, and of what all are forked from
LIBRARIES = 300 << 20  # bytes of the classes of its model, the tokenizer and the text, where it opens the run
MEMORY_SHARE = 0.8  # of the machine's memory
PRELOAD = (__name__, "moeq.models.kinds", "numba")


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """So many threads of torch, None: as many as there are; then as many as before, for whoever calls from Python."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def worker_threads(recipe: Recipe) -> int:
    """Threads of one worker: those of the recipe, else one, however many workers there are."""
    return recipe.threads or 1


def gpus(device: torch.device) -> list[int]:
    """GPUs among which workers are divided where the model is on one, that one first; none where it is not."""
    there = range(torch.cuda.device_count() if device.type == "cuda" else 0)
    return sorted(there, key=lambda number: number != (device.index or 0))


def worker_count(recipe: Recipe, device: torch.device) -> int | None:
    """Workers of a run: those of the recipe, else one a GPU where there are several and none is chosen; None: none."""
    if recipe.workers is None and recipe.device in ANY_GPU and len(gpus(device)) > 1:
        return len(gpus(device))
    return recipe.workers


@contextmanager
def working(context: Context, count: int, preload: Sequence[str] = PRELOAD) -> Iterator[Engine]:
    """So many workers, ended with the block."""
    recipe, device = context.recipe, context.model.device
    threads = worker_threads(recipe)
    engine = open_engine(
        recipe.engine,
        count,
        threads=threads,
        beside=context.out,
        preload=preload,
        ram_bytes=memory_bytes(torch.device("cpu")),
        gpus=gpus(device),
    )
    try:
        own = "a GPU each" if gpus(device) else f"{counted(threads, 'thread')} each"
        context.reporter.say(f"  {count} workers ({recipe.engine}), {own}")
        context.reporter.workers = engine.doing
        yield engine
    finally:
        context.reporter.workers = list
        engine.close()


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What a worker opens a run by; text_digests: of the text that the run has read, which is the worker's, too."""

    recipe: Recipe
    model_name: str
    out: Path
    as_given: bool
    called: NamedModel | None
    unfinished: dict[str, Path]
    text_digests: dict[str, str]

    @classmethod
    def of(cls, context: Context) -> Opened:
        recipe = context.recipe
        if context.model.device.type == "cuda":  # a worker sees one GPU, its own
            recipe = recipe.model_copy(update={"device": "cuda"})
        return cls(
            recipe=recipe,
            model_name=context.model_name,
            out=context.out,
            as_given=context.as_given,
            called=context.called,
            unfinished=dict(context.unfinished),
            text_digests=dict(context.text_digests),
        )

    def context(self) -> Context:
        """The run in this worker, which keeps its model for further parts."""
        if not _opened or _opened[0][0] != self:
            _opened[:] = [(self, Context(reporter=Reporter(quiet=True), **vars(self)))]
        return _opened[0][1]


_opened: list[tuple[Opened, Context]] = []  # the one that this worker has done a part of


@dataclass(frozen=True, kw_only=True)
class Openers:
    """Workers that open the run for parts of a stage. held: bytes of main memory that they take, by what takes them;
    at_once: of them as many as compute side by side."""

    count: int
    held: dict[str, float]
    at_once: float

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device, parts: int, model: float) -> Openers | None:
        """As many as the recipe asks for and this machine's memory has room for, None where that is no two: the run
        does it itself then, as it does where workers are a cluster's. model: bytes of one's model, and of what it
        computes with, which on GPUs are a GPU's, one each."""
        count, gpu = min(worker_count(recipe, device) or 0, parts), device.type == "cuda"
        each = WORKER + LIBRARIES + (0 if gpu else model)
        count = min(count, int((MEMORY_SHARE * memory_bytes(torch.device("cpu")) - SERVER) / each))
        if not several(recipe, device) or count < 2:
            return None
        held = {"workers": count * (WORKER + LIBRARIES) + SERVER, "models of workers": 0 if gpu else count * model}
        cores = len(os.sched_getaffinity(0)) / worker_threads(recipe)
        return cls(count=count, held=held, at_once=count if gpu else max(1.0, min(count, cores)))


def several(recipe: Recipe, device: torch.device) -> bool:
    """Whether there are workers that can open the run, and more than one."""
    return recipe.engine == PROCESSES and (worker_count(recipe, device) or 0) > 1


@dataclass(frozen=True, kw_only=True)
class Crew:
    """Workers that open the run for parts of a stage."""

    count: int
    engine: Engine

    def did(
        self,
        function: Callable[[Any, Any], Any],
        parts: Sequence[tuple[str, Any]],
        advance: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """What a function of a module gives of every part [(name, arguments)], in their order."""
        engine, found = self.engine, []
        tickets = [engine.submit(Task(name=name, function=function, arguments=given)) for name, given in parts]
        for outcome in engine.gather(tickets):
            found.append(outcome.value)
            advance()
        return found


@contextmanager
def opening(context: Context, count: int) -> Iterator[Crew]:
    """So many workers that open the run, ended with the block; the run's own model is let go."""
    context.model.let_go()
    gc.collect()  # models refer to themselves
    if context.model.device.type == "cuda":  # one of them has the run's own GPU
        torch.cuda.empty_cache()
    with working(context, count) as engine:
        yield Crew(count=count, engine=engine)
