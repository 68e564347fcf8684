"""What a run with an engine takes, and what binds it, from its task graph and rates: without running it.

The driver runs a layer's text, hands the layer out, and goes on; workers do its tasks; a layer is gathered and stored
when `ahead` later ones are out. Threads that compute at the same time share the cores there are. On several nodes what
is handed out goes over the driver's link: what all tasks of a layer read to every other node, the rest to one of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

DONE = 1e-12  # seconds of work that are none


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """One layer. forward_seconds: of the driver until its inputs are there, reading included; tasks: seconds of each on
    a worker of its own; common_bytes: that every task reads; own_bytes: that one task each reads, all of them together;
    made_bytes: what comes back and is stored."""

    forward_seconds: float
    tasks: Sequence[float]
    common_bytes: float = 0.0
    own_bytes: float = 0.0
    made_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the work runs on. cores: that driver and workers share (infinite: each has its own); nodes: over which
    workers are spread, the driver on one of them; task_seconds: that an engine takes for one task; start_seconds: until
    workers are there; bytes a second: copied for workers, over the driver's link, stored."""

    workers: int
    cores: float = math.inf
    nodes: int = 1
    ahead: int = 1
    task_seconds: float = 0.0
    start_seconds: float = 0.0
    copied_bytes_per_second: float = math.inf
    link_bytes_per_second: float = math.inf
    stored_bytes_per_second: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Seconds of the whole, and of them the share in which each resource was busy: of workers the mean."""

    seconds: float
    busy: dict[str, float]

    @property
    def binds(self) -> str:
        """The resource that is busy most of the time."""
        return max(self.busy, key=lambda name: self.busy[name])


class _Run:
    """The clock, the workers and the link while a run is simulated."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.now = cluster, 0.0
        self.coming: deque[tuple[float, int, list[float]]] = deque()  # when tasks are there, their layer, their seconds
        self.queue: deque[tuple[int, float]] = deque()
        self.running: list[list[float]] = []  # [layer, seconds left]
        self.left: dict[int, int] = {}  # tasks of a layer that are not done
        self.busy = {"driver": 0.0, "workers": 0.0, "link": 0.0, "storage": 0.0, "start": 0.0}
        self.link_free = 0.0

    def hand_out(self, number: int, layer: LayerWork) -> None:
        """Tasks of a layer, there when their bytes have gone over the link."""
        nodes = self.cluster.nodes
        size = (nodes - 1) * layer.common_bytes + layer.own_bytes * (nodes - 1) / nodes
        seconds = size / self.cluster.link_bytes_per_second
        self.link_free = max(self.now, self.link_free) + seconds
        self.busy["link"] += seconds
        tasks = [seconds + self.cluster.task_seconds for seconds in layer.tasks]
        self.coming.append((self.link_free, number, tasks))
        self.left[number] = len(tasks)

    def go_on(self, driver: float, until: int | None = None, *, busy: str = "driver") -> None:
        """Let the driver work so many seconds, or wait until a layer's tasks are done; the workers go on meanwhile.

        busy: the resource that its work takes; only as "driver" it needs a core.
        """
        computing = busy == "driver"
        while driver > DONE or (until is not None and self.left[until]):
            self._start()
            active = len(self.running) + (computing and driver > DONE)
            rate = min(1.0, self.cluster.cores / active) if active else 1.0
            steps = [left / rate for _, left in self.running]
            if driver > DONE:
                steps.append(driver / (rate if computing else 1.0))
            if self.coming:
                steps.append(self.coming[0][0] - self.now)
            step = max(0.0, min(steps))
            self.now += step
            self.busy["workers"] += step * len(self.running) / self.cluster.workers
            if driver > DONE:
                self.busy[busy] += step
                driver -= step * (rate if computing else 1.0)
            for task in self.running:
                task[1] -= step * rate
            for number, _ in [task for task in self.running if task[1] <= DONE]:
                self.left[int(number)] -= 1
            self.running = [task for task in self.running if task[1] > DONE]

    def _start(self) -> None:
        while self.coming and self.coming[0][0] <= self.now + DONE:
            _, number, tasks = self.coming.popleft()
            self.queue.extend((number, seconds) for seconds in tasks)
        while self.queue and len(self.running) < self.cluster.workers:
            self.running.append([*self.queue.popleft()])


def simulate(layers: Sequence[LayerWork], cluster: Cluster) -> Simulated:
    """The run of some layers on a cluster."""
    run, out = _Run(cluster), deque[int]()

    def finish(left: int) -> None:
        while len(out) > left:
            number = out.popleft()
            run.go_on(0.0, number)
            run.go_on(layers[number].made_bytes / cluster.stored_bytes_per_second, busy="storage")

    run.go_on(cluster.start_seconds, busy="start")
    for number, layer in enumerate(layers):
        run.go_on(layer.forward_seconds)
        run.go_on((layer.common_bytes + layer.own_bytes) / cluster.copied_bytes_per_second)
        run.hand_out(number, layer)
        out.append(number)
        finish(cluster.ahead)
    finish(0)
    return Simulated(seconds=run.now, busy={name: seconds / run.now for name, seconds in run.busy.items()})
