"""The engine of a Ray cluster: an existing one by its address, or a local one of processes of this machine.

Which worker does what, retries, spilling of what does not fit into memory and the dashboard are Ray's. Tensors lie in
its object store, in the layout of `arrays`, and are read there without a copy. moeq must be installed on every node.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np

from moeq.engine.arrays import decode, encode
from moeq.engine.task import Closing, Failure, Function, Outcome, Shared, Task, Tensors
from moeq.errors import PlanError, RecipeError
from moeq.tables import counted, human_bytes

RETRIES = 20  # of a task whose worker or node was lost; Ray counts them
PATIENCE = 600.0  # seconds that a cluster which grows has until it has a node for a task
ADDRESS = "RAY_ADDRESS"  # Ray's own variable: the cluster that is taken where none is named


class RayEngine(Closing):
    """Tasks on a Ray cluster.

    address: as `ray.init` takes it ("auto", HOST:PORT, ray://HOST:PORT); None: that of $RAY_ADDRESS, else a local
    cluster with one CPU for every thread of `workers` workers. On an existing cluster as many tasks run at once as its
    CPUs and memory allow. RecipeError where Ray is not installed or the cluster does not answer; PlanError for a task
    that no node can take.
    """

    name = "ray"

    def __init__(self, workers: int, *, threads: int, address: str | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise RecipeError("ray is not installed", where="engine: ray", do="pip install 'moeq[ray]'") from None
        self._ray, self.workers, self.threads = ray, workers, threads
        self._numbers = count()
        self._running: dict[int, tuple[Any, Task]] = {}
        self._ours = not ray.is_initialized()
        address = address or os.environ.get(ADDRESS)
        if self._ours:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a local cluster tells nobody of itself
            where = {"num_cpus": workers * threads} if address is None else {"address": address}
            try:
                with _path_for_local_workers():
                    ray.init(log_to_driver=False, configure_logging=False, **where)
            except Exception as error:  # of Ray, of gRPC, of the system
                what = f"no Ray cluster: {' '.join(str(error).split())[:300]}"
                do = "start one (`ray start --head`), or leave the address out for a local one"
                raise RecipeError(what, where=f"engine: ray:{address or 'local'}", do=do) from None
        self._run = ray.remote(_run)

    def put(self, tensors: Tensors) -> Shared:
        encoded = encode(None, tensors)
        memory = np.empty(encoded.nbytes, np.uint8)
        encoded.write(memoryview(memory))  # type: ignore[arg-type]
        reference = self._ray.put(memory)
        return Shared(key=reference.hex(), place=[reference], bytes=encoded.nbytes)

    def drop(self, shared: Shared) -> None:
        shared.place.clear()  # Ray frees what nobody refers to

    def submit(self, task: Task) -> int:
        ticket, takes = next(self._numbers), task.resources
        options = {"num_cpus": self.threads, "max_retries": RETRIES, "name": task.name}
        if takes.ram_bytes:
            options["memory"] = takes.ram_bytes
        if takes.gpu_bytes:
            options["num_gpus"] = 1
        given = [reference for shared in task.shared for reference in shared.place]
        reference = self._run.options(**options).remote(task.function, task.arguments, self.threads, *given)
        self._running[ticket] = (reference, task)
        return ticket

    def gather(self, tickets: Iterable[int]) -> Iterator[Outcome]:
        for ticket in tickets:
            reference, task = self._running[ticket]
            name = task.name
            try:
                while not self._ray.wait([reference], timeout=PATIENCE)[0]:
                    self._check_there_is_room(task)
                found = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                what = f"Ray gave it up: {' '.join(str(error).split())[:300]}"
                do = "see Ray's dashboard and logs; `moeq plan` says what workers take"
                raise PlanError(what, where=name, do=do) from None
            del self._running[ticket]
            if isinstance(found, Failure):
                raise found.error(name)
            (value, host, seconds), tensors = decode(found)
            yield Outcome(value=value, tensors=tensors, host=host, seconds=seconds)

    def _check_there_is_room(self, task: Task) -> None:
        """PlanError where no node, even if it did nothing else, has what a task asks for: Ray would wait for one."""
        takes = task.resources
        asked = {"CPU": self.threads, "memory": takes.ram_bytes, "GPU": 1 if takes.gpu_bytes else 0}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0) >= amount for name, amount in asked.items()) for node in nodes):
            cpus, memory = f"{counted(self.threads, 'CPU')}", f"{human_bytes(takes.ram_bytes)} of memory"
            words = {"CPU": cpus, "memory": memory, "GPU": "a GPU"}
            what = f"no node of the Ray cluster has {' and '.join(words[name] for name in asked if asked[name])}"
            do = "start one that has, or choose other threads, losses.working_memory or device"
            raise PlanError(what, where=task.name, do=do)

    def doing(self) -> list[str]:
        return [task.name for _, task in list(self._running.values())]

    def close(self) -> None:
        """Leave the cluster; a local one ends."""
        for reference, _ in self._running.values():
            self._ray.cancel(reference, force=True)
        self._running.clear()
        if self._ours and self._ray.is_initialized():
            self._ray.shutdown()


@contextmanager
def _path_for_local_workers() -> Iterator[None]:
    """While a local cluster starts, its processes are told where this one finds modules."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _run(function: Function, arguments: Any, threads: int, *memories: np.ndarray) -> np.ndarray | Failure:
    """A task on a worker of Ray's."""
    import torch

    from moeq.engine.worker import run

    try:
        torch.set_num_threads(threads)
        tensors = {name: tensor for memory in memories for name, tensor in decode(memory)[1].items()}
        value, made, seconds = run(function, arguments, tensors)
        encoded = encode((value, platform.node(), seconds), made)
        memory = np.empty(encoded.nbytes, np.uint8)
        encoded.write(memoryview(memory))  # type: ignore[arg-type]
        return memory
    except Exception as error:
        return Failure.of(error)
