"""What a running command says of itself: while it runs, truly, and without harm to the run."""

from __future__ import annotations

import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from moeq.artifacts import status
from moeq.artifacts.files import locked
from moeq.artifacts.status import MOST_WORKERS, Status, read_status, telling
from moeq.errors import StorageError
from moeq.progress import Counted, Reporter


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "SECONDS", 0.01)


def heard(folder: Path, **wanted: Any) -> Status:
    """What a run says as soon as it says this."""
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, f"it never says {wanted}"
        found = read_status(folder)
        if found is not None and all(getattr(found, name) == value for name, value in wanted.items()):
            return found


def test_what_is_known_is_said_until_the_end(tmp_path: Path) -> None:
    reporter = Reporter(quiet=True)
    assert read_status(tmp_path) is None
    with locked(tmp_path) as lock:
        assert read_status(tmp_path) is None
        with telling(lock, reporter, "org/model", ["profile", "losses"]):
            found = heard(tmp_path, stages=("profile", "losses"))
            assert (found.model, found.pid, found.host) == ("org/model", os.getpid(), platform.node())
            assert (found.stage, found.counted, found.workers) == (None, (), ())
            assert found.resident_bytes > 1 << 20
            assert 0 <= time.time() - found.began < 60
            reporter.stage = Counted("losses", 1)
            reporter.workers = lambda: ["layer 3, expert 1", "waiting"]
            with reporter.bar("losses", 4) as advance, reporter.bar("inner", 2):
                advance()
                found = heard(tmp_path, workers=("layer 3, expert 1", "waiting"))
                assert [(step.title, step.done, step.total) for step in found.counted] == [
                    ("losses", 1, 4),
                    ("inner", 0, 2),
                ]
                assert found.counted[0].left is not None
                assert found.counted[1].left is None
                assert found.stage is not None
                assert found.stage.title == "losses"
            assert heard(tmp_path, counted=()).stage is not None
        assert (tmp_path / ".lock").read_bytes() == b""
        assert reporter.stage is None
    assert read_status(tmp_path) is None


def test_a_bar_that_breaks_off_is_counted_no_more() -> None:
    reporter = Reporter(quiet=True)
    with pytest.raises(KeyError), reporter.bar("losses", 3):
        raise KeyError
    assert reporter.counted == []


def test_who_is_refused_the_lock_leaves_what_is_said(tmp_path: Path) -> None:
    with locked(tmp_path) as lock, telling(lock, Reporter(quiet=True), "org/model", []):
        heard(tmp_path)
        for _ in range(20):
            with pytest.raises(StorageError, match="another moeq run"), locked(tmp_path):
                pass
            assert (tmp_path / ".lock").read_bytes() != b""


def test_many_workers_are_counted(tmp_path: Path) -> None:
    reporter = Reporter(quiet=True)
    reporter.workers = lambda: ["waiting"] * (MOST_WORKERS + 7)
    with locked(tmp_path) as lock, telling(lock, reporter, "org/model", []):
        assert heard(tmp_path).workers[-2:] == ("waiting", "7 more")


def test_a_run_that_is_gone_says_nothing(tmp_path: Path) -> None:
    """Killed, also where its number was given to another process, or on another machine and silent; and what is no
    status."""
    said: dict[str, Any] = {
        "host": platform.node(), "pid": os.getpid(), "model": "m", "began": 0.0, "said": time.time(), "stages": [],
        "stage": None, "counted": [], "workers": [], "resident_bytes": 1,
    }  # fmt: skip
    lock = tmp_path / ".lock"
    for changed, there in (
        ({}, True), ({"pid": 2**22 + 1}, False), ({"host": "elsewhere"}, True),
        ({"host": "elsewhere", "said": time.time() - 60}, False), ({"pid": "one"}, False), ({"more": 1}, False),
        ({"said": time.time() - 1e8}, False),  # its number is another process's now
    ):  # fmt: skip
        written = Status.model_construct(**(said | changed)) if "more" not in changed else None
        lock.write_text(written.model_dump_json(warnings=False) if written is not None else "{}")
        assert (read_status(tmp_path) is not None) == there, changed


@pytest.mark.parametrize("harm", ["disk", "thread"])
def test_a_run_goes_on_where_nothing_can_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    def refuse(*_: Any) -> None:
        raise OSError if harm == "disk" else RuntimeError("can't start new thread")

    monkeypatch.setattr(*((os, "pwrite") if harm == "disk" else (threading.Thread, "start")), refuse)
    done = []
    with locked(tmp_path) as lock, telling(lock, Reporter(quiet=True), "org/model", []):
        done.append(read_status(tmp_path))
    assert done == [None]
