"""The replica store's files: appended to, shared by processes, never half-written, damage found."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from moeq.artifacts import replica_store, replicas
from moeq.artifacts.replicas import LayerReplicas, add_replicas, add_rows, drop_replicas, layer_file, read_rows
from moeq.errors import ArtifactError, StorageError
from moeq_kernels.packed import PackedWeight, packed_shapes
from moeq_kernels.widths import Encoding

PROJECTIONS = {"gate_proj": (24, 40), "down_proj": (40, 24)}
EXPERTS = 3


def name(method: str, bits: int) -> str:
    return f"{method}.{bits}.{'0' * 16}"


def weights(bits: int, seed: int = 0, symmetric: bool = False) -> dict[str, PackedWeight]:
    generator = torch.Generator().manual_seed(100 * seed + bits)
    found = {}
    for projection, shape in PROJECTIONS.items():
        parts = {
            part: torch.randint(256, (EXPERTS, *size), generator=generator).to(dtype)
            for part, (size, dtype) in packed_shapes(*shape, bits, Encoding(group_size=16, symmetric=symmetric)).items()
        }
        zeros = parts.get("zeros")
        found[projection] = PackedWeight(
            codes=parts["codes"], scales=parts["scales"], zeros=zeros, bits=bits, group_size=16, inputs=shape[1],
            symmetric=symmetric,
        )  # fmt: skip
    return found


def assert_holds(there: LayerReplicas, entry: str, wanted: dict[str, PackedWeight]) -> None:
    for projection, stack in wanted.items():
        for expert in range(EXPERTS):
            found = there.expert(entry, projection, expert)
            assert (found.bits, found.inputs, found.group_size) == (stack.bits, stack.inputs, stack.group_size)
            one = stack.map(lambda part, expert=expert: part[expert]).parts()
            assert found.parts().keys() == one.keys()
            assert all(torch.equal(found.parts()[part], tensor) for part, tensor in one.items())


def test_what_is_appended_in_pieces_is_the_file_of_one_write(tmp_path: Path) -> None:
    entries = {name(method, bits): weights(bits, seed) for seed, method in enumerate(("a", "b")) for bits in (1, 3, 8)}
    add_replicas(tmp_path / "whole", 7, entries)
    for entry, made in reversed(entries.items()):
        there = add_replicas(tmp_path / "pieces", 7, {entry: made})
        assert there.is_sound(entry)
    whole, pieces = (layer_file(tmp_path / folder, 7).read_bytes() for folder in ("whole", "pieces"))
    assert whole == pieces
    for entry, made in entries.items():
        assert_holds(there, entry, made)
        there.check({entry: there.entries[entry]["sha256"]})
    with safe_open(layer_file(tmp_path / "pieces", 7), "pt") as others:  # a plain safetensors file
        assert f"{name('a', 3)}.gate_proj.codes" in set(others.keys())


def test_a_reader_of_a_file_that_has_grown_since_reads_it_as_it_is(tmp_path: Path) -> None:
    """And remembers no digest of other bytes than those of the entry."""
    made = weights(3)
    reader = add_replicas(tmp_path, 0, {name("rtn", 3): made})
    later = LayerReplicas(tmp_path, 0)
    add_replicas(tmp_path, 0, {name("a", 2): weights(2)})  # before it in the file
    assert later.is_sound(name("rtn", 3))
    assert_holds(reader, name("rtn", 3), made)
    assert LayerReplicas(tmp_path, 0).is_sound(name("rtn", 3), cached=True)


def test_a_sound_entry_is_never_replaced_and_a_damaged_one_is(tmp_path: Path) -> None:
    entry, other = name("gptq", 2), name("gptq", 4)
    there = add_replicas(tmp_path, 0, {entry: weights(2), other: weights(4)})
    path = layer_file(tmp_path, 0)
    before = path.read_bytes()
    add_replicas(tmp_path, 0, {entry: weights(2, seed=5)})
    assert path.read_bytes() == before
    data = bytearray(before)
    data[there.tensors[f"{entry}.down_proj.codes"].offset] ^= 1
    path.write_bytes(data)
    there = LayerReplicas(tmp_path, 0)
    assert (there.is_sound(entry), there.is_sound(other)) == (False, True)
    with pytest.raises(ArtifactError, match=f"layer-000.safetensors: replicas {entry} are damaged"):
        there.check({other: there.entries[other]["sha256"], entry: there.entries[entry]["sha256"]})
    add_replicas(tmp_path, 0, {entry: weights(2)})
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["truncated", "header", "empty", "no entries"])
def test_a_file_that_cannot_be_read_is_named_and_replaced(tmp_path: Path, damage: str) -> None:
    add_replicas(tmp_path, 0, {name("gptq", 2): weights(2)})
    path = layer_file(tmp_path, 0)
    whole = path.read_bytes()
    broken = {
        "truncated": whole[:-10],
        "header": whole[:12] + b"\xff" + whole[13:],
        "empty": b"",
        "no entries": whole.replace(b'\\"bits\\"', b'\\"bots\\"'),
    }
    path.write_bytes(broken[damage])
    with pytest.raises(ArtifactError, match=r"layer-000\.safetensors: damaged.*run `moeq losses` again"):
        LayerReplicas(tmp_path, 0)
    add_replicas(tmp_path, 0, {name("gptq", 2): weights(2)})
    assert path.read_bytes() == whole


def test_a_link_that_leads_to_nothing_is_named_where_the_store_should_be(tmp_path: Path) -> None:
    """To run `moeq losses` again, as for a file that is missing, would be refused."""
    (tmp_path / "store").symlink_to("nothing")
    with pytest.raises(StorageError, match="store: a link that leads to nothing; remove it, or make what it names"):
        LayerReplicas(tmp_path / "store" / ("0" * 64), 0)
    (tmp_path / "layer-000.safetensors").symlink_to("nothing")
    with pytest.raises(ArtifactError, match=r"layer-000.safetensors: no such file; run `moeq losses` again"):
        LayerReplicas(tmp_path, 0)  # which writes another in its place


def test_other_digests_and_missing_entries_are_refused(tmp_path: Path) -> None:
    there = add_replicas(tmp_path, 0, {name("gptq", 2): weights(2)})
    with pytest.raises(ArtifactError, match="no replicas rtn"):
        there.check({name("rtn", 2): "0" * 64})
    with pytest.raises(ArtifactError, match="are damaged"):
        there.check({name("gptq", 2): "0" * 64})


def test_digests_of_entries_that_are_gone_are_refused(tmp_path: Path) -> None:
    """As where somebody deletes a store while a run works with it."""
    made, gone = name("rtn", 2), name("gptq", 2)
    add_replicas(tmp_path, 0, {made: weights(2)})
    assert set(replicas.digests(tmp_path, 0, [made])) == {made}
    assert replicas.digests(tmp_path, 7, []) == {}
    with pytest.raises(ArtifactError, match=f"no replicas {gone}"):
        replicas.digests(tmp_path, 0, [made, gone])


def test_dropping_keeps_the_rest(tmp_path: Path) -> None:
    entries = {name("gptq", bits): weights(bits) for bits in (2, 3, 4)}
    add_replicas(tmp_path, 0, entries)
    drop_replicas(tmp_path, 0, [name("gptq", 3)])
    there = LayerReplicas(tmp_path, 0)
    assert list(there.entries) == [name("gptq", 3)]
    assert_holds(there, name("gptq", 3), entries[name("gptq", 3)])
    drop_replicas(tmp_path, 0, [])
    assert not layer_file(tmp_path, 0).exists()


def _append(directory: Path, seed: int, barrier: object) -> None:
    torch.set_num_threads(1)
    barrier.wait()  # type: ignore[attr-defined]
    for bits in (1, 2, 3, 4, 8):
        add_replicas(directory, 0, {name(f"m{seed}", bits): weights(bits, seed)})
        add_replicas(directory, 0, {name("shared", bits): weights(bits, 9)})
        add_rows(directory, 0, f"m.{bits}", [{"expert": 0, "loss": 0.1 * bits}])


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    running = [context.Process(target=_append, args=(tmp_path, seed, barrier)) for seed in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
        assert process.exitcode == 0
    there = LayerReplicas(tmp_path, 0)
    wanted = {name(f"m{seed}", bits): weights(bits, seed) for seed in range(3) for bits in (1, 2, 3, 4, 8)}
    wanted |= {name("shared", bits): weights(bits, 9) for bits in (1, 2, 3, 4, 8)}
    assert set(there.entries) == set(wanted)
    for entry, made in wanted.items():
        assert there.is_sound(entry)
        assert_holds(there, entry, made)
    assert read_rows(tmp_path, 0, "m.3") == [{"expert": 0, "loss": 0.1 * 3}]


def _die_at_rename(directory: Path) -> None:
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    add_replicas(directory, 0, {name("gptq", 4): weights(4)})


def test_killed_while_appending_the_old_file_stays(tmp_path: Path) -> None:
    add_replicas(tmp_path, 0, {name("gptq", 2): weights(2)})
    before = layer_file(tmp_path, 0).read_bytes()
    process = multiprocessing.get_context("fork").Process(target=_die_at_rename, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert layer_file(tmp_path, 0).read_bytes() == before
    there = add_replicas(tmp_path, 0, {name("gptq", 4): weights(4)})  # the dead process's lock is free
    assert set(there.entries) == {name("gptq", 2), name("gptq", 4)}
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("damage", ["flipped", "truncated", "another version"])
def test_damaged_rows_count_as_missing(tmp_path: Path, damage: str) -> None:
    rows = [{"expert": 1, "loss": 0.1, "fallback": "none"}, {"expert": 2, "loss": 1e-300, "fallback": "rounded"}]
    add_rows(tmp_path, 4, "x.2", rows)
    assert read_rows(tmp_path, 4, "x.2") == rows
    assert read_rows(tmp_path, 5, "x.2") is None
    path = replicas.rows_file(tmp_path, 4, "x.2")
    text = path.read_text()
    changed = {
        "flipped": text.replace("0.1", "0.2"),
        "truncated": text[:-9],
        "another version": text.replace('"schema_version":2', '"schema_version":3'),
    }
    path.write_text(changed[damage])
    assert read_rows(tmp_path, 4, "x.2") is None
    add_rows(tmp_path, 4, "x.2", rows)
    assert path.read_text() == text


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not a replica store"):
        replica_store.check_store(tmp_path)
    replica_store.open_store(tmp_path / "store", tmp_path)
    replica_store.check_store(tmp_path / "store")
    assert list(replica_store.noted_runs(tmp_path / "store").values()) == [tmp_path]
    marker = tmp_path / "store" / replica_store.MARKER
    marker.write_text(marker.read_text().replace("2", "3"))
    with pytest.raises(ArtifactError, match="schema version 3"):
        replica_store.check_store(tmp_path / "store")


@pytest.mark.parametrize("damage", [None, "{", '{"kind": "moeq replica ztore", "schema_version": 2}'])
def test_a_stores_mark_is_made_again(tmp_path: Path, damage: str | None) -> None:
    store, marker = tmp_path / "store", tmp_path / "store" / replica_store.MARKER
    replica_store.open_store(store)
    whole = marker.read_bytes()
    assert replica_store.is_marked(store)
    marker.unlink()
    if damage is not None:
        marker.write_text(damage)
    assert not replica_store.is_marked(store)
    with pytest.raises(ArtifactError, match=r"not a replica store|store\.json: damaged"):
        replica_store.check_store(store)
    replica_store.open_store(store)
    assert marker.read_bytes() == whole
    marker.write_text(whole.decode().replace("2", "3"))
    with pytest.raises(ArtifactError, match="schema version 3"):
        replica_store.open_store(store)


def test_a_run_of_the_first_schema_version_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"replicas\.json: no index .*schema version 1.*run `moeq losses` again"):
        replicas.read_index(tmp_path)
