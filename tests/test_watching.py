"""moeq watch: a run that goes on elsewhere, one that is finished, one that was killed; and what is no run."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from robustness.runs import save_short_corpus, tiny_recipe, write_recipe

from moeq import watching
from moeq.artifacts.run import STAGES
from moeq.artifacts.status import Status, Step
from moeq.errors import MissingError
from moeq.watching import View, lines, look, page


def view(out: Path, **changed: Any) -> View:
    """A run that is quantizing."""
    now = time.time()
    said = {
        "host": platform.node(), "pid": os.getpid(), "model": "org/<model>", "began": now - 700, "said": now,
        "stages": ("profile", "losses", "assign"), "stage": Step(title="losses", total=1, done=0, began=now - 600),
        "counted": (Step(title="losses", total=48, done=12, began=now - 600),), "resident_bytes": 3 << 30,
        "workers": ("layer 12, experts 0 to 3", "waiting"),
    } | changed  # fmt: skip
    status = Status(**said)
    rows = tuple(watching._row(out, name, status) for name in status.stages)
    return View(out=out, rows=rows, sizes={"store": 5 << 30}, status=status)


def test_lines_of_a_run(tmp_path: Path) -> None:
    found = lines(view(tmp_path))
    assert re.fullmatch(r"org/<model>, process \d+ on .*, 11\.7 min, memory 3\.00 GiB", found[0])
    assert found[1] == "[dim]profile   waiting[/]"
    assert found[2] == "[bold]losses    10.0 min, about 30.0 min left[/]"
    assert found[3] == "  █████░░░░░░░░░░░░░░░ 12/48 losses"
    assert found[5:] == ["2 workers", "  layer 12, experts 0 to 3", "  waiting", "on the disk: store 5.00 GiB"]
    many = lines(view(tmp_path, workers=("waiting",) * 40))
    assert many[-2] == "  and 24 more"


def test_a_killed_run_is_over_whoever_has_the_number_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that began later is another one; one that is stopped says nothing, and is there."""
    (tmp_path / "losses.begun").mkdir()
    (tmp_path / "recipe.yaml").write_text("model: bundled:tiny-mixtral\n")
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    now = time.time()
    for silent, pid, said, is_there in (
        (30, os.getpid(), now, True),
        (0, os.getpid(), now, True),
        (30, os.getpid(), now - 1e6, False),
        (30, zombie.pid, now, False),
    ):
        monkeypatch.setattr("moeq.artifacts.status.SILENT_SECONDS", silent)
        status = view(tmp_path, pid=pid, said=said).status
        assert status is not None
        assert status.is_alive == is_there, (silent, pid, said)
        (tmp_path / ".lock").write_text(status.model_dump_json())
        assert [row.state for row in look(tmp_path).rows if row.stage == "losses"] == [
            "running" if is_there else "broken off"
        ]
    zombie.wait()


def test_a_page_is_read_again_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = page(view(tmp_path))
    assert '<meta http-equiv="refresh" content="5">' in written
    assert "org/&lt;model&gt;" in written
    assert "losses 12 of 48" in written
    assert "layer 12, experts 0 to 3" in written
    ended = page(View(out=tmp_path, rows=(), sizes={}, status=None))
    assert "refresh" not in ended
    assert "nothing runs here" in ended
    monkeypatch.chdir(tmp_path)
    assert f"<h1>{tmp_path.name}</h1>" in page(view(Path()))


@pytest.mark.full
def test_a_run_is_watched_from_elsewhere(moeq: ForkServer, tiny_mixtral: Path, tmp_path: Path) -> None:
    """While it runs, when it was killed, and when it has ended."""
    out, html = tmp_path / "run", tmp_path / "page.html"
    recipe = tiny_recipe(tiny_mixtral, save_short_corpus(tmp_path / "corpus.jsonl"), threads=1)
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    running = moeq.start("run", path, "--out", out, "--quiet", "--workers", "2")
    stage, deadline = "", time.monotonic() + 240
    while stage != "losses":  # which takes seconds, as workers start
        assert time.monotonic() < deadline, stage
        status = look(out).status if (out / "recipe.yaml").exists() else None
        stage = status.stage.title if status is not None and status.stage is not None else ""
    found = moeq.run("watch", out, "--once", "--json", "--html", html)
    assert (found.code, found.stderr) == (0, "")
    said = json.loads(found.stdout)
    assert [row["stage"] for row in said["stages"]] == [name for name in STAGES if name != "reparam"]
    assert said["stages"][0]["state"] == "done"
    assert said["bytes"]["profile"] > 0
    if said["running"] is not None:
        assert said["running"]["pid"] == running.pid
        assert "refresh" in html.read_text("utf-8")
    killed = look(out).status is not None
    running.signal(signal.SIGKILL)
    running.wait()
    states = {row.stage: row.state for row in look(out).rows}
    assert look(out).status is None
    assert not killed or "broken off" in states.values() or "waiting" not in states.values()
    assert moeq.run("run", path, "--out", out, "--quiet").code == 0
    ended = moeq.run("watch", out)
    assert ended.code == 0
    assert f"{out}: nothing runs here" in ended.stdout
    assert len(re.findall(r"^\w+ +done in \d", ended.stdout, re.MULTILINE)) == len(STAGES) - 1
    assert (out / ".lock").read_bytes() == b""


def test_what_is_no_run_is_refused(moeq: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        look(tmp_path / "nowhere")
    found = moeq.run("watch", tmp_path)
    assert (found.code, found.stdout) == (7, "")
    assert found.stderr == f"moeq: {tmp_path}: this is no run; give the directory of a run\n"
