"""What is free: the machine's memory or the cgroup's, whichever is less."""

from __future__ import annotations

from pathlib import Path

import torch

from moeq.artifacts.replicas import ReplicaIndex, write_index
from moeq.planning import machine


def test_the_cgroup_limit_counts_where_it_is_lower(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:  8000 kB\n")
    assert machine.available_ram(tmp_path / "none", meminfo) == 8000 * 1024
    path = Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":", 2)
    folder = (tmp_path if not path[1] else tmp_path / "memory") / path[2].lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if path[1] else ("memory.max", "memory.current")
    if path[1] and "memory" not in path[1].split(","):
        return
    (folder / names[1]).write_text("3000000\n")
    (folder / names[0]).write_text("max\n")
    assert machine.available_ram(tmp_path, meminfo) == 8000 * 1024
    (folder / names[0]).write_text("5000000\n")
    assert machine.available_ram(tmp_path, meminfo) == 2_000_000
    (folder / "memory.stat").write_text("anon 5\ninactive_file 400000\nactive_file 100000\n")
    assert machine.available_ram(tmp_path, meminfo) == 2_500_000


def test_an_earlier_run_counts_as_free_disk(tmp_path: Path) -> None:
    out = tmp_path / "run"
    before = machine.machine(out, torch.device("cpu"))
    assert before.disk_path == str(tmp_path)
    assert before.gpu is None
    assert before.ram > 0
    out.mkdir()
    (out / "shard").write_bytes(b"x" * (40 << 20))
    after = machine.machine(out, torch.device("cpu"))
    assert after.disk >= before.disk - (500 << 20)
    assert list(machine._replaced(out)) == [out / "shard"]
    kept = {name: out / "store" / (name * 64) / "layer-000.safetensors" for name in "ab"}
    for path in kept.values():
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    assert list(machine._replaced(out)) == [out / "shard"], "a store keeps what it has until it is cleaned"
    write_index(out / "losses", ReplicaIndex(set="a" * 64, made=()))
    assert set(machine._replaced(out)) == {out / "shard", out / "losses" / "replicas.json", kept["a"]}
    assert not list(tmp_path.glob(".moeq*"))


def test_what_has_two_names_is_freed_once_and_only_with_both(tmp_path: Path) -> None:
    for name in ("quantize", "checkpoint", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "quantize/both").write_bytes(b"x" * 100_000)
    (tmp_path / "checkpoint/both").hardlink_to(tmp_path / "quantize/both")
    (tmp_path / "quantize/shared").write_bytes(b"y" * 100_000)
    (tmp_path / "elsewhere/shared").hardlink_to(tmp_path / "quantize/shared")
    going = [path for name in ("quantize", "checkpoint") for path in (tmp_path / name).iterdir()]
    assert machine._freed(going) == (tmp_path / "quantize/both").stat().st_blocks * 512
