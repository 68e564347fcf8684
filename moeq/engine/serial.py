"""The engine of one process: tasks run where they are submitted, on the tensors themselves."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator
from itertools import count

from torch import Tensor

from moeq.engine.task import Closing, Outcome, Shared, Task, Tensors


class SerialEngine(Closing):
    """Runs a task when it is submitted; an error is raised there, as without an engine."""

    name = "serial"
    workers = 1

    def __init__(self) -> None:
        self._numbers = count()
        self._done: dict[int, Outcome] = {}

    def put(self, tensors: Tensors) -> Shared:
        """Nothing is copied: what is put must stay as it is until it is dropped."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return Shared(key=f"serial-{next(self._numbers)}", place=dict(tensors), bytes=size)

    def drop(self, shared: Shared) -> None:
        shared.place.clear()

    def submit(self, task: Task) -> int:
        started = time.perf_counter()
        tensors: dict[str, Tensor] = {name: tensor for one in task.shared for name, tensor in one.place.items()}
        value, made = task.function(task.arguments, tensors)
        ticket = next(self._numbers)
        seconds = time.perf_counter() - started
        self._done[ticket] = Outcome(value=value, tensors=dict(made), host=platform.node(), seconds=seconds)
        return ticket

    def gather(self, tickets: Iterable[int]) -> Iterator[Outcome]:
        for ticket in tickets:
            yield self._done.pop(ticket)

    def doing(self) -> list[str]:
        return []

    def close(self) -> None:
        self._done.clear()
