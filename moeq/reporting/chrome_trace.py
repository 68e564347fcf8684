"""Timelines in Chrome's trace event format, which about:tracing and Perfetto load: a process a policy, a thread a
resource, a complete event an interval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

RESOURCES = {
    "gpu": "GPU",
    "ndp": "near-data side",
    "to_gpu": "link, to the GPU",
    "to_ndp": "link, to the near-data side",
}
MICROSECONDS = 1e6


class Interval(Protocol):
    """What `moeq.estimator.timeline` gives: a resource at work on a term of one layer, of one expert or of several."""

    @property
    def resource(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def layer(self) -> int: ...
    @property
    def expert(self) -> int | None: ...
    @property
    def start_seconds(self) -> float: ...
    @property
    def seconds(self) -> float: ...


def chrome_trace(timelines: Mapping[str, Iterable[Interval]], about: Mapping[str, str]) -> dict[str, Any]:
    """The JSON of a trace file: `timelines` by process name; `about` is kept beside the events. Times in us."""
    events: list[dict[str, Any]] = []
    for process, (title, intervals) in enumerate(timelines.items(), start=1):
        events.append(_named("process_name", title, process, 0))
        found = list(intervals)
        known = [one for one in RESOURCES if any(interval.resource == one for interval in found)]
        threads = {name: number for number, name in enumerate(known, start=1)}
        events += [_named("thread_name", RESOURCES[name], process, number) for name, number in threads.items()]
        events += _events(found, process, threads)
    return {"displayTimeUnit": "ms", "otherData": dict(about), "traceEvents": events}


def _named(kind: str, title: str, process: int, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": title}}


def _events(intervals: Sequence[Interval], process: int, threads: Mapping[str, int]) -> list[dict[str, Any]]:
    """Complete events by start, as viewers like them."""
    return [
        {
            "name": one.name.replace("_", " "),
            "cat": one.resource,
            "ph": "X",
            "pid": process,
            "tid": threads[one.resource],
            "ts": one.start_seconds * MICROSECONDS,
            "dur": one.seconds * MICROSECONDS,
            "args": {"layer": one.layer} | ({} if one.expert is None else {"expert": one.expert}),
        }
        for one in sorted(intervals, key=lambda one: one.start_seconds)
    ]
