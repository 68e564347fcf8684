"""Digests of files: what is remembered, what is not, and what a cache cannot do."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from moeq.artifacts import digests
from moeq.artifacts.digests import digest_of_file, digests_of_files, remember, remembered, spent
from moeq.artifacts.files import copy_file, place
from moeq.artifacts.tensor_files import TensorFile, write_in_chunks, write_tensors
from moeq.errors import ArtifactError, StorageError
from moeq.progress import Reporter
from moeq_kernels import caches

BYTES = digests.SMALL_BYTES + 300


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(251)) * (BYTES // 251) + b"end")
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(caches.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "digests"


def fresh() -> None:
    """As in another process: only the cache on disk is left."""
    digests._known.clear()


def reads(path: Path, *, cached: bool) -> int:
    """Bytes that asking for a digest takes."""
    before = spent()
    assert digest_of_file(path, cached=cached) == sha256(path)
    return spent().since(before).bytes


def test_a_file_is_read_once_and_whenever_that_is_wanted(file: Path) -> None:
    size = file.stat().st_size
    assert reads(file, cached=True) == size
    fresh()
    assert reads(file, cached=True) == 0
    assert reads(file, cached=False) == size


def test_a_bit_that_turned_is_seen_though_size_and_time_are_the_same(file: Path) -> None:
    reads(file, cached=True)
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    with file.open("r+b") as stream:
        stream.write(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert reads(file, cached=True) == before.st_size


def test_small_files_are_always_read(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_text("text")
    reads(path, cached=True)
    assert reads(path, cached=True) == 4
    assert remembered(path) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"1-2-3-4-5:": 7}', "[" * 100_000])
def test_a_damaged_cache_is_ignored_and_mended(file: Path, own_cache: Path, text: str) -> None:
    reads(file, cached=True)
    for shard in own_cache.glob("*.json"):
        shard.write_text(text)
    fresh()
    assert reads(file, cached=True) == file.stat().st_size
    fresh()
    assert reads(file, cached=True) == 0


def test_no_place_for_a_cache_is_no_error(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no folder").write_text("")
    monkeypatch.setenv(caches.VARIABLE, str(tmp_path / "no folder"))
    assert reads(file, cached=True) == file.stat().st_size
    assert reads(file, cached=True) == 0, "within a process it is still known"


def test_processes_that_write_the_cache_at_once_lose_nothing(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for number in range(6):
        files.append(tmp_path / f"{number}.bin")
        files[-1].write_bytes(bytes([number]) * BYTES)
    program = (
        "import sys; from pathlib import Path; from moeq.artifacts import digests; digests.SHARDS = 1\n"
        "for name in sys.argv[1:]: digests.digest_of_file(Path(name))"
    )
    started = [subprocess.Popen([sys.executable, "-c", program, *map(str, files[part::3])]) for part in range(3)]
    assert [one.wait() for one in started] == [0, 0, 0]
    monkeypatch.setattr(digests, "SHARDS", 1)
    assert [remembered(path) for path in files] == [sha256(path) for path in files]
    assert sorted(path.name for path in own_cache.iterdir()) == ["00.json", "00.lock"]


def test_the_cache_keeps_the_newest(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "SHARDS", 1)
    monkeypatch.setattr(digests, "MOST_ENTRIES", 2)
    files = [tmp_path / f"{number}.bin" for number in range(4)]
    for path in files:
        path.write_bytes(path.name.encode() * BYTES)
        digest_of_file(path)
    fresh()
    assert [remembered(path) is not None for path in files] == [False, False, True, True]


def test_what_a_writer_wrote_is_not_read_again(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(600_000, dtype=torch.int32), "b": torch.ones(3, dtype=torch.uint8)}
    write_tensors(tmp_path / "one.safetensors", tensors)
    copy_file(tmp_path / "one.safetensors", tmp_path / "two.safetensors", sha256(tmp_path / "one.safetensors"))
    place(tmp_path / "one.safetensors", tmp_path / "three.safetensors")
    chunk = bytes(2 << 20)
    write_in_chunks(tmp_path / "four.safetensors", {"a": ("U8", (2 << 20,), 2 << 20)}, lambda name: [chunk])
    stream = TensorFile(tmp_path / "five.safetensors", ["a", "b"], {"format": "pt"})
    for name, tensor in tensors.items():
        stream.add(name, tensor)
    stream.finish()
    stream.check()
    for path in sorted(tmp_path.glob("*.safetensors")):
        assert reads(path, cached=True) == 0, path.name
    assert torch.equal(load_file(tmp_path / "five.safetensors")["a"], tensors["a"])


def test_a_copy_of_other_bytes_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"weights\.bin: changed while it was copied"):
        copy_file(file, tmp_path / "copy", "0" * 64)


def test_a_bit_that_turns_between_writing_and_reading_back_is_seen(tmp_path: Path) -> None:
    stream = TensorFile(tmp_path / "a.safetensors", ["a"], {})
    stream.add("a", torch.arange(400_000, dtype=torch.int32))
    stream.finish()
    with (tmp_path / "a.safetensors").open("r+b") as damaged:
        damaged.seek(-5, os.SEEK_END)
        damaged.write(b"\x07")
    with pytest.raises(StorageError, match="reads otherwise than it was written"):
        stream.check()
    assert remembered(tmp_path / "a.safetensors") is None


def test_a_file_that_changes_while_it_is_read_is_not_remembered(file: Path) -> None:
    def read() -> str:
        with file.open("r+b") as stream:
            stream.write(b"other")
        return "0" * 64

    assert digests.digest_of_part(file, "", read) == "0" * 64
    assert remembered(file) is None


def test_parts_of_a_file_are_known_by_name(file: Path) -> None:
    remember(file, "1" * 64, part="gptq.3-x")
    fresh()
    assert (remembered(file, "gptq.3-x"), remembered(file)) == ("1" * 64, None)


def test_much_to_read_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(digests, "BAR_BYTES", 8 << 20)
    monkeypatch.setattr("moeq.progress.LINE_SECONDS", 0)
    files = [tmp_path / "a", tmp_path / "b"]
    for path in files:
        path.write_bytes(bytes(5 << 20))
    reporter, told = Reporter(), io.StringIO()
    reporter.console = Console(file=told, width=200)
    found = digests_of_files(files, reporter=reporter, title="hashing the model")
    assert found == {path: sha256(path) for path in files}
    assert told.getvalue().count("hashing the model") == 10
    assert "hashing the model 10/10" in told.getvalue()
    digests_of_files(files, cached=True, reporter=reporter, title="again")
    assert "again" not in told.getvalue()


def test_only_what_is_much_to_read_starts_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "THREAD_BYTES", 1 << 10)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    seen: list[int] = []
    monkeypatch.setattr(digests, "digest_of_file", lambda path, **_: seen.append(threading.get_ident()) or path.name)
    for size, threads in ((500, 1), (600, 2)):
        files = [tmp_path / "a", tmp_path / "b"]
        for path in files:
            path.write_bytes(bytes(size))
        seen.clear()
        assert digests_of_files(files) == {path: path.name for path in files}
        assert len(seen) == 2
        assert (threading.get_ident() in seen) == (threads == 1)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"gone: cannot read"):
        digest_of_file(tmp_path / "gone")
