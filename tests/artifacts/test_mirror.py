"""Copies of run directories in object stores: what the list names is whole, whatever fails when."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from buckets import bucket

from moeq.artifacts import mirror, remote
from moeq.artifacts.mirror import LIST, Holder, Mirror, mirrored
from moeq.errors import ArtifactError, ModelError, MoeqError, RecipeError, StorageError
from moeq.progress import Reporter

WRITES = ("put_file", "pipe_file", "rm_file")
READS = ("get_file", "cat_file")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.0)
    monkeypatch.setattr(remote, "MOST_WAIT", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with stages, a store, and what is not finished."""
    out = tmp_path / "run"
    for name, data in {
        "recipe.yaml": b"model: m", "profile/stage.json": b"{}", "profile/profile.safetensors": b"1" * 1000,
        "checkpoint/a/b.bin": b"2" * 5000, "checkpoint/stage.json": b"{}", "store/store.json": b"{}",
        "store/set/layer-000.safetensors": b"3" * 100, "store/set/losses/layer-000.gptq.json": b"[]",
        ".lock": b"x", "losses.begun/part": b"x", "assign.partial/part": b"x", "store/set/.lock": b"",
        "store/set/layer-001.safetensors.partial": b"4",
    }.items():  # fmt: skip
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return out


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/far/away"


def opened(url: str, out: Path) -> Mirror:
    return Mirror(url, out, Reporter(quiet=True))


def whole(out: Path) -> dict[str, bytes]:
    """Finished files below a run directory."""
    found = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    unfinished = (".partial", ".begun")
    return {
        path.as_posix(): data
        for path, data in found.items()
        if not any(part.startswith(".") or part.endswith(unfinished) for part in path.parts)
    }


def listed(tmp_path: Path) -> dict[str, bytes]:
    """What the list in the mirror names, after its bytes were held against it."""
    far = tmp_path / "far" / "away"
    if not (far / LIST).exists():
        return {}
    files = json.loads((far / LIST).read_bytes())["files"]
    found = {name: (far / name).read_bytes() for name in files}
    for name, data in found.items():
        assert files[name] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return found


def failing(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], fails: Callable[[], bool]) -> None:
    """Let calls of the file system fail; a write that fails has written half."""
    system, lock = fsspec.filesystem("file"), threading.Lock()
    for name in names:
        real = getattr(system, name)

        def call(*given: Any, name: str = name, real: Any = real, **more: Any) -> Any:
            with lock:
                wrong = fails()
            if wrong and name == "put_file":
                Path(given[1]).write_bytes(Path(given[0]).read_bytes()[:-1])
            if wrong:
                raise OSError("connection reset")
            return real(*given, **more)

        monkeypatch.setattr(system, name, call)


def test_what_is_sent_is_brought_elsewhere(run: Path, url: str, tmp_path: Path) -> None:
    opened(url, run).send()
    assert listed(tmp_path) == whole(run)
    other = tmp_path / "other"
    other.mkdir()
    (other / "checkpoint").symlink_to("nothing")  # which a run without a mirror replaces, too
    opened(url, other).fetch()
    assert whole(other) == {name: data for name, data in whole(run).items() if name != "recipe.yaml"}
    assert not list(other.glob("*.partial"))
    assert opened(url, other).fetch() is None


def test_what_lies_beside_the_recipe_is_not_lost_with_the_machine(run: Path, url: str, tmp_path: Path) -> None:
    (run / "notes.md").write_bytes(b"mine")
    opened(url, run).send()
    other = opened(url, tmp_path / "other")
    other.out.mkdir()
    other.fetch()
    assert (other.out / "notes.md").read_bytes() == b"mine"
    assert not (other.out / "recipe.yaml").exists()
    other.send()
    assert listed(tmp_path)["notes.md"] == b"mine"


def test_what_lies_here_stays_and_the_rest_is_brought(run: Path, url: str, tmp_path: Path) -> None:
    opened(url, run).send()
    other = tmp_path / "other"
    (other / "profile").mkdir(parents=True)
    (other / "profile" / "stage.json").write_bytes(b"own")
    (other / "store" / "set").mkdir(parents=True)
    (other / "store" / "set" / "layer-000.safetensors").write_bytes(b"own")
    opened(url, other).fetch()
    found = whole(other)
    assert found.pop("profile/stage.json") == b"own"
    assert found.pop("store/set/layer-000.safetensors") == b"own"
    assert found == {
        name: data
        for name, data in whole(run).items()
        if name.startswith(("checkpoint/", "store/")) and name != "store/set/layer-000.safetensors"
    }


def test_stages_behind_links_are_of_the_run_and_a_store_there_is_not(run: Path, url: str, tmp_path: Path) -> None:
    opened(url, run).send()
    before = listed(tmp_path)
    for name in ("checkpoint", "store"):
        (run / name).rename(tmp_path / name)
        (run / name).symlink_to(tmp_path / name)
    (run / "model").symlink_to(tmp_path / "store")
    for only_store in (False, True):
        opened(url, run).send(only_store=only_store)
        assert listed(tmp_path) == {name: data for name, data in before.items() if not name.startswith("store/")}


def test_only_what_is_new_is_sent(run: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(url, run).send()
    sent = []
    system = fsspec.filesystem("file")
    real = system.put_file
    monkeypatch.setattr(system, "put_file", lambda *given: sent.append(Path(given[0]).name) or real(*given))
    again = opened(url, run)
    again.send()
    assert sent == []
    (run / "store/set/layer-001.safetensors").write_bytes(b"5")
    (run / "profile/profile.safetensors").write_bytes(b"6")
    again.send(only_store=True)
    assert sent == ["layer-001.safetensors"]
    shutil.rmtree(run / "checkpoint")
    again.send()
    assert sent[1:] == ["profile.safetensors"]
    assert listed(tmp_path) == whole(run)
    assert not (tmp_path / "far/away/checkpoint/a/b.bin").exists()


def test_requests_that_fail_are_made_again(
    run: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(11)
    failing(monkeypatch, (*WRITES, *READS), lambda: chance.random() < 0.2)
    opened(url, run).send()
    (tmp_path / "other").mkdir()
    opened(url, tmp_path / "other").fetch()
    assert listed(tmp_path) == whole(run)
    assert whole(tmp_path / "other") == {name: data for name, data in whole(run).items() if name != "recipe.yaml"}


def test_whatever_is_the_last_request_the_list_is_true(
    run: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files replaced, removed and new ones; the same command afterwards ends with all of it."""
    count, stop = [0], [0]

    def fails() -> bool:
        count[0] += 1
        return count[0] > stop[0]

    last = 0
    for stop[0] in range(40):
        shutil.rmtree(tmp_path / "far", ignore_errors=True)
        for name in ("profile/stage.json", "checkpoint/stage.json"):
            (run / name).write_bytes(b"{}")
        (run / "estimate").mkdir(exist_ok=True)
        (run / "estimate" / "stage.json").write_bytes(b"{}")
        opened(url, run).send()
        before = whole(run)
        (run / "profile/stage.json").write_bytes(b"changed")
        shutil.rmtree(run / "estimate")
        (run / "store/set/layer-002.safetensors").write_bytes(b"7")
        after = whole(run)
        with monkeypatch.context() as patch:
            count[0] = 0
            failing(patch, WRITES, fails)
            with suppress(StorageError):
                opened(url, run).send()
                last = last or stop[0]
        for name, data in listed(tmp_path).items():
            assert data in (before.get(name), after.get(name))
        opened(url, run).send()
        assert listed(tmp_path) == after
        (run / "store/set/layer-002.safetensors").unlink()
        if last:
            break
    assert last > 3


def test_what_is_not_what_the_list_says_is_refused(run: Path, url: str, tmp_path: Path) -> None:
    opened(url, run).send()
    (tmp_path / "far/away/checkpoint/a/b.bin").write_bytes(b"9" * 5000)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ArtifactError, match=r"checkpoint/a/b\.bin: is not what mirror\.json says; remove it"):
        opened(url, other).fetch()
    assert not (other / "checkpoint").exists()
    (tmp_path / "far/away/checkpoint/a/b.bin").unlink()
    with pytest.raises(MoeqError, match="nothing there"):
        opened(url, other).fetch()
    for wrong in ("[]", "{", '{"files": {"../x": {"bytes": 1, "sha256": "0"}}, "schema_version": 1}', '{"files": 1}'):
        (tmp_path / "far/away" / LIST).write_text(wrong)
        with pytest.raises(ArtifactError, match=r"mirror\.json: is no list of a run's files"):
            opened(url, other)


def test_replicas_are_sent_while_the_block_runs(
    run: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it breaks off; and not other files, which a stage may be in the midst of replacing."""
    monkeypatch.setattr(mirror, "SECONDS", 0.01)
    arrived = tmp_path / "far/away/store/set/layer-003.safetensors"

    def broken_off() -> None:
        with mirrored(url, run, Reporter(quiet=True)):
            (run / "store/set/layer-003.safetensors").write_bytes(b"8")
            for _ in until(arrived.exists):
                pass
            monkeypatch.setattr(mirror, "SECONDS", 1000.0)
            (run / "store/set/layer-004.safetensors").write_bytes(b"9")
            raise KeyError

    with pytest.raises(KeyError):
        broken_off()
    assert all(name.startswith("store/") for name in listed(tmp_path))
    assert (tmp_path / "far/away/store/set/layer-004.safetensors").read_bytes() == b"9"
    with mirrored(None, run, Reporter(quiet=True)) as send:
        send()


def test_a_bucket_has_the_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket("runs", monkeypatch) as system:
        opened("s3://runs/a/b", run).send()
        (run / "profile/stage.json").write_bytes(b"changed")
        shutil.rmtree(run / "checkpoint")
        (run / "store/set/layer-002.safetensors").write_bytes(b"7" * (6 << 20))
        opened("s3://runs/a/b", run).send()
        (tmp_path / "other").mkdir()
        opened("s3://runs/a/b", tmp_path / "other").fetch()
        assert whole(tmp_path / "other") == {name: data for name, data in whole(run).items() if name != "recipe.yaml"}
        system.invalidate_cache()
        assert {path.removeprefix("runs/a/b/") for path in system.find("runs/a/b")} == {LIST, *whole(run)}
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    with pytest.raises(StorageError, match=r"s3://runs/a/b/mirror\.json: cannot be read, 2 times"):
        opened("s3://runs/a/b", run)


def until(condition: Callable[[], bool]) -> Iterator[None]:
    for _ in range(6000):
        if condition():
            return
        yield
        threading.Event().wait(0.01)
    raise AssertionError("it never comes")


def test_what_is_no_address_is_refused(run: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(RecipeError, match="mirror: not an address: 'somewhere'; give one such as s3"),
        mirrored("somewhere", run, Reporter(quiet=True)),
    ):
        pass
    (tmp_path / "file").touch()
    with pytest.raises((StorageError, ModelError)):
        opened(f"file://{tmp_path}/file/below", run).send()


def held(url: str, out: Path, holder: Holder) -> None:
    """Have a mirror say that somebody works on it."""
    one = opened(url, out)
    one._own = holder
    one._write_list(one.files)


def holder_of(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "far" / "away" / LIST).read_bytes())["holder"]


def test_one_command_works_on_it_and_leaves_it(run: Path, url: str, tmp_path: Path) -> None:
    with mirrored(url, run, Reporter(quiet=True)) as send:
        assert (holder_of(tmp_path)["host"], holder_of(tmp_path)["pid"]) == (platform.node(), os.getpid())
        send()
        assert holder_of(tmp_path)["words"] >= 2
    assert holder_of(tmp_path) is None
    assert listed(tmp_path) == whole(run)


def test_a_command_of_this_machine_that_lives_is_in_the_way(run: Path, url: str, tmp_path: Path) -> None:
    held(url, run, Holder(host=platform.node(), pid=os.getppid(), place=mirror.here()))
    with pytest.raises(StorageError, match="works on it"), mirrored(url, run, Reporter(quiet=True)):
        pass
    assert holder_of(tmp_path)["pid"] == os.getppid()
    ended = subprocess.Popen(["true"])
    ended.wait()
    for pid in (ended.pid, os.getpid()):  # the same number again
        held(url, run, Holder(host=platform.node(), pid=pid, place=mirror.here()))
        with mirrored(url, run, Reporter(quiet=True)) as send:
            send()
        assert listed(tmp_path) == whole(run)


@pytest.mark.parametrize("pid", [os.getpid(), 2**22 + 5], ids=["a number of both", "nobody's here"])
def test_a_container_of_the_same_name_is_another_machine(
    pid: int, run: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command is not seen from here, and has the mirror though its number may be this command's own."""
    own = mirror.here()
    (tmp_path / "ns").symlink_to("pid:[7]")
    with monkeypatch.context() as there:
        there.setattr(mirror, "NUMBERS", str(tmp_path / "ns"))
        mirror.here.cache_clear()
        other = Holder(host=platform.node(), pid=pid, place=mirror.here())
    mirror.here.cache_clear()
    assert mirror.here() == own
    held(url, run, other)
    waited: list[float] = []
    spoken = other.model_copy(update={"words": 5})
    monkeypatch.setattr(mirror.time, "sleep", lambda seconds: (waited.append(seconds), held(url, run, spoken)))
    first = opened(url, run)
    with pytest.raises(StorageError, match="works on it"):
        first.take()
    assert waited == [90]
    first._own = Holder(host=platform.node(), pid=os.getpid(), place=own)
    with pytest.raises(StorageError, match="has taken it"):
        first.tell()


@pytest.mark.parametrize("speaks", [True, False])
def test_one_of_another_machine_is_waited_for(
    run: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speaks: bool
) -> None:
    """Whatever the clocks say: who said nothing for a while is gone."""
    other = Holder(host="elsewhere", pid=1)
    held(url, run, other)
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if speaks:
            held(url, run, other.model_copy(update={"words": 5}))

    monkeypatch.setattr(mirror.time, "sleep", wait)
    if speaks:
        with pytest.raises(StorageError, match=r"'elsewhere' \(process 1\) works on it"):
            opened(url, run).take()
        assert holder_of(tmp_path)["host"] == "elsewhere"
    else:
        with mirrored(url, run, Reporter(quiet=True)) as send:
            send()
        assert holder_of(tmp_path) is None
        assert listed(tmp_path) == whole(run)
    assert waited == [90]


def test_it_is_said_while_a_large_file_is_sent(
    run: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or another machine would take it for gone; whoever reads the list finds a whole one."""
    monkeypatch.setattr(mirror, "SECONDS", 0.01)
    system: Any = fsspec.filesystem("file")
    real = system.put_file

    def slow(*given: Any) -> Any:
        before = holder_of(tmp_path)["words"]
        until = time.monotonic() + 20
        while holder_of(tmp_path)["words"] < before + 3:
            assert time.monotonic() < until
        return real(*given)

    with mirrored(url, run, Reporter(quiet=True)) as send:
        monkeypatch.setattr(system, "put_file", slow)
        send()
    assert listed(tmp_path) == whole(run)


def test_who_was_silent_and_lost_it_undoes_nothing(run: Path, url: str, tmp_path: Path) -> None:
    with mirrored(url, run, Reporter(quiet=True)) as send:
        send()
        held(url, run, Holder(host="elsewhere", pid=1))
        (run / "recipe.yaml").write_bytes(b"model: other")
        with pytest.raises(StorageError, match="has taken it"):
            send()
    assert holder_of(tmp_path)["host"] == "elsewhere"
    assert listed(tmp_path)["recipe.yaml"] == b"model: m"
