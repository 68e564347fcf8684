"""Chrome traces: the events that about:tracing and Perfetto ask for."""

from __future__ import annotations

import json

import pytest

from moeq.estimator.timeline import Interval
from moeq.reporting.chrome_trace import chrome_trace

STEP = [
    Interval(resource="ndp", name="ndp_experts", layer=0, expert=3, start_seconds=2e-3, seconds=5e-4),
    Interval(resource="gpu", name="dense", layer=0, expert=None, start_seconds=0.0, seconds=2e-3),
    Interval(resource="to_gpu", name="fetch", layer=1, expert=0, start_seconds=3e-3, seconds=1e-6),
]


def test_events_have_what_viewers_ask_for() -> None:
    found = json.loads(json.dumps(chrome_trace({"one": STEP, "two": STEP[:2]}, {"model": "m"}), allow_nan=False))
    assert set(found) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert found["otherData"] == {"model": "m"}
    whole = [event for event in found["traceEvents"] if event["ph"] == "X"]
    named = [event for event in found["traceEvents"] if event["ph"] == "M"]
    assert len(whole) + len(named) == len(found["traceEvents"])
    for event in whole:
        assert {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"} == set(event)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    processes = {event["pid"]: event["args"]["name"] for event in named if event["name"] == "process_name"}
    assert processes == {1: "one", 2: "two"}
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in named if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in whole} == set(threads)
    assert len(set(threads.values())) == 3


def test_times_are_microseconds_in_order() -> None:
    events = [event for event in chrome_trace({"one": STEP}, {})["traceEvents"] if event["ph"] == "X"]
    assert [event["ts"] for event in events] == pytest.approx([0, 2000, 3000])
    assert [event["dur"] for event in events] == pytest.approx([2000, 500, 1])
    assert [event["args"] for event in events] == [{"layer": 0}, {"layer": 0, "expert": 3}, {"layer": 1, "expert": 0}]
