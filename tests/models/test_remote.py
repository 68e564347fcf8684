"""Models in object stores: the digests of a local copy, with a small cache, with requests that fail and come short."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from buckets import bucket
from safetensors import safe_open

from moeq import pipeline
from moeq.artifacts import remote
from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.remote import Store, listed
from moeq.errors import MissingError, ModelError, RecipeError, StorageError
from moeq.models import loading
from moeq.models.experts import find_expert_layers
from moeq.models.remote_source import RemoteTensor
from moeq.models.single import ExpertReader
from moeq.models.source import ModelSource, open_source
from moeq.models.weights import plain_chunks
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "losses.group_size=16", "losses.bits=[2,3]", "threads=1",
    "assign={method: uniform, bits: 2}", "eval.compare=[]", "stream=always",
)  # fmt: skip
STAGES = ("profile", "losses", "assign", "quantize")
FIRST_WAIT = remote.FIRST_WAIT  # before tests have it shorter


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of this test's, and no waiting between requests."""
    monkeypatch.setenv("MOEQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)


def digests(model: str, out: Path, *overrides: str) -> tuple[dict[str, str], Context]:
    context = Context(
        recipe=load_recipe(None, [*SMALL, *overrides]), model_name=model, out=out, reporter=Reporter(quiet=True)
    )
    outcomes = pipeline.run(context, STAGES)
    return {outcome.stage: outcome.record.digest for outcome in outcomes}, context


def store_of(source: ModelSource) -> Store:
    file: Any = source.files[0]
    found: Store = file.store
    return found


def flaky(system: Any, monkeypatch: pytest.MonkeyPatch, share: float, seconds: float = 0.0) -> None:
    """Let a share of a file system's requests fail, half of them by coming short; all of them take some time."""
    chance, real, lock = random.Random(3), system.cat_file, threading.Lock()

    def cat_file(path: str, start: int | None = None, end: int | None = None, **more: Any) -> Any:
        time.sleep(seconds)
        with lock:
            drawn = chance.random()
        if drawn < share / 2:
            raise OSError("connection reset")
        data = real(path, start=start, end=end, **more)
        return data[:-1] if drawn < share else data

    monkeypatch.setattr(system, "cat_file", cat_file)


@pytest.fixture
def sharded(tiny_mixtral: Path, tmp_path: Path) -> Path:
    """The model in several shards with an index."""
    from transformers import MixtralForCausalLM

    folder = tmp_path / "sharded"
    MixtralForCausalLM.from_pretrained(tiny_mixtral).save_pretrained(folder, max_shard_size="200KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_mixtral / name).read_bytes())
    return folder


def test_a_run_has_the_digests_of_a_local_copy(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache of a tenth of the weights, and one of ten requests failing."""
    size = sum(path.stat().st_size for path in sharded.glob("*.safetensors"))
    monkeypatch.setattr(remote, "LEAST_BLOCK_BYTES", 1 << 12)
    monkeypatch.setenv(remote.VARIABLE, str(size // 10))
    wanted, _ = digests(str(sharded), tmp_path / "local")
    import fsspec

    flaky(fsspec.filesystem("file"), monkeypatch, 0.1)
    found, context = digests(f"file://{sharded}", tmp_path / "remote")
    assert found == wanted
    store = store_of(context.model.source)
    assert store.retried > 0
    assert store.held_bytes <= size // 10
    assert store.fetched > size


def test_tensors_and_rows_are_read_by_their_ranges(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LEAST_BLOCK_BYTES", 64)
    monkeypatch.setenv(remote.VARIABLE, str(64 * 1000))
    source = open_source(f"file://{sharded}")
    local = open_source(str(sharded))
    assert source.name == local.name == sharded.name
    assert source.tensors.keys() == local.tensors.keys()
    for key, header in list(local.tensors.items())[::7]:
        with safe_open(header.file, "pt") as handle:
            wanted = handle.get_tensor(key)
        found = RemoteTensor(source.tensors[key])
        assert (found.get_shape(), found.get_dtype()) == (list(wanted.shape), header.dtype)
        assert torch.equal(found[...], wanted)
        assert torch.equal(found[:], wanted)
        assert torch.equal(found[1:3], wanted[1:3])
        assert torch.equal(found[5:2], wanted[5:2])
        assert torch.equal(found[-1], wanted[-1])
        assert b"".join(plain_chunks(source, key)) == b"".join(plain_chunks(local, key))
    key = max(source.tensors, key=lambda key: source.tensors[key].bytes)
    before, rows = store_of(source).fetched, source.tensors[key].shape[0]
    one = RemoteTensor(source.tensors[key])[rows // 2 : rows // 2 + 1]
    assert one.shape[0] == 1
    assert store_of(source).fetched - before <= source.tensors[key].bytes // rows + 2 * store_of(source).block_bytes


def test_digests_are_known_again_by_the_version_of_an_object(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = open_source(str(sharded)).file_digests()
    source = open_source(f"file://{sharded}")
    assert source.file_digests() == wanted
    assert source.stamp() == open_source(str(sharded)).stamp()
    fetched = store_of(source).fetched
    monkeypatch.setattr(remote, "SMALL_BYTES", 0, raising=False)
    file: Any = source.files[0]
    assert digest_of_file(file, cached=True) == wanted[file.name]
    assert store_of(source).fetched - fetched <= file.size
    monkeypatch.setattr(remote, "FRESH_SECONDS", 0.0)
    before = file.stat()
    os.utime(sharded / file.name, (1, 1))
    assert file.stat().st_ino != before.st_ino


def test_a_request_that_always_fails_is_an_error_of_one_line(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    source = open_source(f"file://{sharded}")
    header = next(iter(source.tensors.values()))
    store = store_of(source)
    store._blocks.clear()
    waited: list[float] = []
    monkeypatch.setattr(remote, "FIRST_WAIT", FIRST_WAIT)
    monkeypatch.setattr(remote.time, "sleep", waited.append)
    flaky(fsspec.filesystem("file"), monkeypatch, 1.0)
    with pytest.raises(StorageError, match=r"file:///.*: bytes 0 to \d+ cannot be read, 8 times: .*; check the netw"):
        RemoteTensor(header)[...]
    assert [seconds for seconds in waited if seconds] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5]


def test_what_is_prefetched_is_asked_for_once(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setattr(remote, "BLOCK_BYTES", 1 << 14)
    source = open_source(f"file://{sharded}")
    store, header = store_of(source), max(source.tensors.values(), key=lambda header: header.bytes)
    flaky(fsspec.filesystem("file"), monkeypatch, 0.0, seconds=0.02)
    file: Any = header.file
    before = store.fetched
    started = time.monotonic()
    for _ in range(3):
        store.follow([(file, header.offset, header.offset + header.bytes)])
    assert time.monotonic() - started < 0.5
    data = store.read(file, header.offset, header.offset + header.bytes)
    assert bytes(data) == (sharded / file.name).read_bytes()[header.offset : header.offset + header.bytes]
    assert store.fetched - before <= header.bytes + 2 * store.block_bytes


@pytest.mark.cases(1)
@pytest.mark.parametrize(("step", "seconds"), [(100, 0.001), (10, 0.0)])
def test_what_follows_is_fetched_before_it_is_read_within_three_quarters_of_the_cache(
    sharded: Path, monkeypatch: pytest.MonkeyPatch, step: int, seconds: float
) -> None:
    """However much follows; and all of it once, however often a block is read before the next."""
    import fsspec

    monkeypatch.setattr(remote, "LEAST_BLOCK_BYTES", 1 << 8)
    monkeypatch.setenv(remote.VARIABLE, str(1 << 12))
    source = open_source(f"file://{sharded}")
    store, header = store_of(source), max(source.tensors.values(), key=lambda header: header.bytes)
    file: Any = header.file
    flaky(fsspec.filesystem("file"), monkeypatch, 0.1, seconds=seconds)
    most, before, asked = store.most_bytes * 3 // 4 // store.block_bytes, store.fetched, []
    begin = store._begin
    monkeypatch.setattr(store, "_begin", lambda at, number: asked.append(number) or begin(at, number))
    stops = range(header.offset, header.offset + header.bytes, step)
    whole = (sharded / file.name).read_bytes()
    store.follow([(file, start, start + step) for start in stops])
    first = len(asked)
    for start in stops:
        assert bytes(store.read(file, start, start + step)) == whole[start : start + step]
        assert len(store._ahead) <= most
        assert store.held_bytes <= store.most_bytes
    assert first == most
    assert len(asked) == len(set(asked)) == -(-(stops[-1] + step) // 256) - header.offset // 256
    assert not store._following
    assert store.fetched - before <= 256 * len(asked)


def test_what_no_longer_follows_makes_room(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LEAST_BLOCK_BYTES", 1 << 8)
    monkeypatch.setenv(remote.VARIABLE, str(1 << 12))
    source = open_source(f"file://{sharded}")
    store, header = store_of(source), max(source.tensors.values(), key=lambda header: header.bytes)
    file: Any = header.file
    for start in (header.offset, header.offset + header.bytes // 2):
        store.follow([(file, start, header.offset + header.bytes)])
        deadline = time.monotonic() + 60
        while len(store._ahead) < store.most_bytes // 2 // store.block_bytes or store._coming:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert (file.key, start // store.block_bytes) in store._ahead


def test_blocks_that_are_still_to_be_read_leave_last(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LEAST_BLOCK_BYTES", 1 << 8)
    monkeypatch.setenv(remote.VARIABLE, str(1 << 12))
    source = open_source(f"file://{sharded}")
    store, header = store_of(source), max(source.tensors.values(), key=lambda header: header.bytes)
    file: Any = header.file
    first = -(-header.offset // store.block_bytes)
    start, ahead = first * store.block_bytes, store.most_bytes // 2
    assert header.bytes > 5 * ahead
    store.follow([(file, start, start + ahead)])
    for at in range(start + ahead, start + 4 * ahead, store.block_bytes):
        store.read(file, at, at + store.block_bytes)
    deadline = time.monotonic() + 60
    while store._coming:
        assert time.monotonic() < deadline
    there = {(file.key, first + number) for number in range(ahead // store.block_bytes)}
    assert there == store._ahead
    assert there <= store._blocks.keys()


def test_experts_are_fetched_before_they_are_read(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, they are those of the disk; all but the very first have been asked for before."""
    monkeypatch.setattr(remote, "LEAST_BLOCK_BYTES", 1 << 8)
    monkeypatch.setattr(remote, "BLOCK_BYTES", 1 << 8)
    readers = []
    for name in (f"file://{sharded}", str(sharded)):
        source = open_source(name)
        readers.append(ExpertReader(source, loading.skeleton(source, torch.float32)))
    store, waited = store_of(readers[0].source), list[int]()
    ask = store._ask

    def asking(file: Any, number: int) -> Any:
        if (file.key, number) not in store._blocks and (file.key, number) not in store._coming:
            waited.append(number)
        return ask(file, number)

    monkeypatch.setattr(store, "_ask", asking)
    for layer in find_expert_layers(readers[0].model):
        for expert in range(layer.num_experts):
            before = len(waited)
            (found, _), (wanted, _) = (reader.read(layer, expert) for reader in readers)
            assert all(torch.equal(found[name], wanted[name]) for name in layer.projections)
            assert (layer.index, expert) == (0, 0) or len(waited) == before


def test_what_cannot_be_is_refused(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingError, match="nothing there"):
        open_source(f"file://{tmp_path}/elsewhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no files of a model"):
        open_source(f"file://{tmp_path}/empty")
    source = open_source(f"file://{sharded}")
    with pytest.raises(ModelError, match="lies in an object store, and is not read whole"):
        loading.load_model(source, torch.float32, torch.device("cpu"))
    with pytest.raises(RecipeError, match="is read layer by layer"):
        digests(f"file://{sharded}", tmp_path / "run", "stream=never")
    monkeypatch.setenv(remote.VARIABLE, "much")
    with pytest.raises(RecipeError, match="MOEQ_REMOTE_CACHE: not a size"):
        open_source(f"file://{sharded}")
    shard = sorted(sharded.glob("*.safetensors"))[0]
    monkeypatch.delenv(remote.VARIABLE)
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ModelError, match="truncated"):
        open_source(f"file://{sharded}")
    shard.unlink()
    with pytest.raises(MissingError, match="shard is missing"):
        open_source(f"file://{sharded}")
    if find_spec("s3fs") is None:
        with pytest.raises(RecipeError, match=r"s3:// needs another package.*moeq\[s3\]"):
            list(listed("s3://bucket/model"))


@pytest.fixture
def in_bucket(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The model in a bucket."""
    with bucket("models", monkeypatch) as system:
        for path in sharded.iterdir():
            system.put_file(str(path), f"models/tiny/{sharded.name}/{path.name}")
        yield f"s3://models/tiny/{sharded.name}"


def test_an_s3_bucket_has_the_digests_of_a_local_copy(
    in_bucket: str, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With requests that are throttled, fail and come late."""
    import fsspec

    wanted, _ = digests(str(sharded), tmp_path / "local")
    system, _ = fsspec.core.url_to_fs(in_bucket)
    flaky(system, monkeypatch, 0.05, seconds=0.01)
    found, context = digests(in_bucket, tmp_path / "remote")
    assert found == wanted
    assert store_of(context.model.source).retried > 0
    assert all(file.version for file in context.model.source.files)  # type: ignore[attr-defined]
    with pytest.raises(MissingError, match="nothing there"):
        open_source("s3://models/elsewhere")
