"""Compiled code on disk: many processes may write it at once, and what is damaged or of other sources is not run."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from numba import types

from moeq_kernels.cpu import compiled, kept_code
from moeq_kernels.cpu.kept_code import callback, digest_of
from moeq_kernels.errors import ModelError

SOURCE = """
from moeq_kernels.cpu.kept_code import compiler
from moeq_kept_other import STEP

@compiler()
def f(x):
    return x + STEP
"""
WRITERS, ENTRIES, ROUNDS = 4, 5, 12


def test_writers_at_once_never_leave_one_the_code_of_another(tmp_path: Path) -> None:
    """With numba's files some of these entries hold those of another writer."""
    (source := tmp_path / "f.py").write_text("")
    keys = [(writer, entry) for writer in range(WRITERS) for entry in range(ENTRIES)]
    for attempt in range(ROUNDS):
        (folder := tmp_path / str(attempt)).mkdir()
        start = threading.Barrier(WRITERS)

        def write(writer: int, folder: Path = folder, start: threading.Barrier = start) -> None:
            start.wait()
            for entry in range(ENTRIES):
                kept_code._Files(str(folder), "f", str(source)).save((writer, entry), (writer, entry))

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [kept_code._Files(str(folder), "f", str(source)).load(key) for key in keys] == keys


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "moeq_kept_other.py").write_text("STEP = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    yield loaded(tmp_path)
    sys.modules.pop("moeq_kept_other", None)


def loaded(folder: Path) -> ModuleType:
    (file := folder / "moeq_kept.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("moeq_kept", file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    kept_code._source.cache_clear()
    digest_of.cache_clear()
    sys.modules.pop("moeq_kept_other", None)
    importlib.invalidate_caches()
    spec.loader.exec_module(found)
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("moeq_kept.f-*.nb?"))


def hits(module: ModuleType) -> int:
    return sum(module.f.stats.cache_hits.values())


def test_code_is_kept_and_found_again_for_each_signature(module: ModuleType, tmp_path: Path) -> None:
    assert [module.f(1), module.f(1.5)] == [2, 2.5]
    assert hits(module) == 0
    assert len(files(tmp_path)) == 2
    again = loaded(tmp_path)
    assert [again.f(1.5), again.f(1)] == [2.5, 2]
    assert hits(again) == 2


@pytest.mark.parametrize("size", [0, 1, 40, -1, -40])
def test_a_damaged_file_is_compiled_again(module: ModuleType, tmp_path: Path, size: int) -> None:
    module.f(1)
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    again = loaded(tmp_path)
    assert again.f(1) == 2
    assert hits(again) == 0
    assert files(tmp_path) == [file]
    assert hits(loaded(tmp_path)) == 0
    after = loaded(tmp_path)
    assert after.f(1) == 2
    assert hits(after) == 1


def test_the_file_of_another_key_is_not_taken(module: ModuleType, tmp_path: Path) -> None:
    module.f(1)
    (first,) = files(tmp_path)
    module.f(1.5)
    (second,) = set(files(tmp_path)) - {first}
    second.write_bytes(first.read_bytes())
    again = loaded(tmp_path)
    assert again.f(1.5) == 2.5
    assert hits(again) == 0


def test_a_change_in_what_is_imported_is_a_change_of_the_code(module: ModuleType, tmp_path: Path) -> None:
    """And files of the source before it are removed, numba's own among them."""
    module.f(1)
    (before,) = files(tmp_path)
    stale = before.with_name(before.name.split(".py")[0] + f".py{sys.version_info[0]}{sys.version_info[1]}.1.nbc")
    stale.write_bytes(b"")
    (tmp_path / "moeq_kept_other.py").write_text("STEP = 10\n")
    os.utime(tmp_path / "moeq_kept_other.py", (1, 1))
    again = loaded(tmp_path)
    assert again.f(1) == 11
    assert hits(again) == 0
    (after,) = files(tmp_path)
    assert after != before


def test_flushing_forgets_all(module: ModuleType, tmp_path: Path) -> None:
    module.f(1)
    module.f._cache.flush()
    assert not files(tmp_path)


def test_the_digest_reaches_all_that_emits_the_code_of_blocks() -> None:
    reached = {Path(file).stem for file in kept_code._reached(compiled.__file__)}
    assert reached >= {
        "byte_pairs",
        "codes",
        "emit",
        "forms",
        "lanes",
        "lookups",
        "panels",
        "plain",
        "row_walks",
        "tiles",
    }
    assert reached >= {"compiled", "trellis", "trellis_tables", "walks"}


def test_that_code_is_compiled_is_told_once_and_not_where_it_is_kept(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(logging.getLogger("moeq.kernels"), "info", lambda text, *more: told.append(text % more))
    kept_code._tell.cache_clear()
    module.f(1)
    module.f(1.5)
    assert [text.partition(",")[0] for text in told] == ["compiling code for this CPU"]
    kept_code._tell.cache_clear()
    assert loaded(tmp_path).f(1) == 2
    assert len(told) == 1


def unwritable(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("lacking", ["space", "folders"])
def test_code_that_cannot_be_kept_runs_all_the_same(
    lacking: str, module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(logging.getLogger("moeq.kernels"), "warning", lambda text, *more: told.append(text % more))
    kept_code._tell_unkept.cache_clear()
    if lacking == "space":
        monkeypatch.setattr(kept_code._Files, "_open_for_write", unwritable)
    else:
        monkeypatch.setattr("numba.core.caching.tempfile.TemporaryFile", unwritable)  # what locators try
    again = loaded(tmp_path)
    assert [again.f(1), again.f(1.5)] == [2, 2.5]
    assert [text.partition(";")[0] for text in told] == ["compiled code cannot be kept"]
    assert not files(tmp_path)


def test_a_numba_that_is_to_compile_nothing_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    with pytest.raises(ModelError, match="NUMBA_DISABLE_JIT: numba is told to compile nothing; leave it out"):
        kept_code.compiler()


COMPILED = """
from numba.core import event
class Listener(event.Listener):
    def on_start(self, started):
        function = started.data["dispatcher"].py_func
        if function.__module__.startswith("moeq_kernels"):
            print(function.__module__, function.__name__)
    def on_end(self, ended):
        pass
event.register("numba:compile", Listener())
from moeq_kernels.cpu import calls, schedule
from moeq_kernels.cpu.compiled import call, entry
for work in (calls.experts, calls.matrix, calls.products):
    call(work)
for work in (schedule.stages, schedule.alone, schedule.unpack):
    entry(work)
"""


@pytest.mark.full
def test_what_calls_are_made_of_is_compiled_once(tmp_path: Path) -> None:
    """A plain number where others hand on a computed one is a type of its own, for which a function and all that it
    calls is compiled again: half of the first minute of a new installation went there."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    made = subprocess.check_output([sys.executable, "-c", COMPILED], text=True, env=environment).splitlines()
    assert len(made) > 25
    assert sorted(made) == sorted(set(made))


@pytest.mark.full
def test_a_callback_is_kept_too(tmp_path: Path) -> None:
    """In a process of its own, twice: the second finds what the first compiled."""
    script = (
        "from numba import types\nfrom moeq_kernels.cpu.kept_code import callback\n"
        "def g(x):\n    return x * 3\n"
        "made = callback(types.int64(types.int64), g)\nprint(made.ctypes(14), made.cache_hits)\n"
    )
    (file := tmp_path / "g.py").write_text(script)
    for wanted in ("42 0", "42 1"):
        assert subprocess.check_output([sys.executable, str(file)], text=True).strip() == wanted


def test_a_callback_computes() -> None:
    def twice(x: int) -> int:
        return 2 * x

    assert callback(types.int64(types.int64), twice).ctypes(21) == 42
