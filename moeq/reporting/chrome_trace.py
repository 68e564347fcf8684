"""Timelines in Chrome's trace event format, which about:tracing and Perfetto load: a process a policy, a thread a
resource, a complete event an interval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moeq.estimator.timeline import Interval

RESOURCES = {
    "gpu": "GPU",
    "ndp": "near-data side",
    "to_gpu": "link, to the GPU",
    "to_ndp": "link, to the near-data side",
    "disk": "disk",
}
MICROSECONDS = 1e6


def chrome_trace(timelines: Mapping[str, Iterable[Interval]], about: Mapping[str, str]) -> dict[str, Any]:
    """The JSON of a trace file: `timelines` by process name; `about` is kept beside the events. Times in us."""
    events: list[dict[str, Any]] = []
    for process, (title, intervals) in enumerate(timelines.items(), start=1):
        events.append(_named("process_name", title, process, 0))
        by_start = sorted(intervals, key=lambda interval: interval.start_seconds)  # as viewers like them
        known = [resource for resource in RESOURCES if any(interval.resource == resource for interval in by_start)]
        threads = {resource: number for number, resource in enumerate(known, start=1)}
        events += [_named("thread_name", RESOURCES[name], process, number) for name, number in threads.items()]
        events += [_event(interval, process, threads[interval.resource]) for interval in by_start]
    return {"displayTimeUnit": "ms", "otherData": dict(about), "traceEvents": events}


def _named(kind: str, title: str, process: int, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": title}}


def _event(interval: Interval, process: int, thread: int) -> dict[str, Any]:
    """A complete event."""
    return {
        "name": interval.name.replace("_", " "),
        "cat": interval.resource,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": interval.start_seconds * MICROSECONDS,
        "dur": interval.seconds * MICROSECONDS,
        "args": {"layer": interval.layer} | ({} if interval.expert is None else {"expert": interval.expert}),
    }
