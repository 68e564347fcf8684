"""Other libraries' kernels: what they compute where they are here, and what is said where they are not."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moeq.benching import bandwidth, peers, subject
from moeq.benching.llama_bench import llama_bench
from moeq.benching.peers import PEERS, AtenInt4, AutoRoundLib, Gemlite, Humming, TorchDense, group_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = [(64, 128), (128, 64)]


def test_the_registry_names_every_peer_once() -> None:
    names = [peer.name for peer in PEERS]
    assert names == ["torch dense", "aten int4", "auto-round-lib", "gemlite", "humming"]


def test_a_peer_that_is_not_here_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert AutoRoundLib().refusal(CPU, SHAPES) == "not installed (pip install auto-round-lib)"
    assert Gemlite().refusal(CUDA, SHAPES) == "not installed (pip install gemlite)"
    assert Humming().refusal(CUDA, SHAPES) == "not installed (pip install humming-kernels)"
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name.startswith("auto_round") else object())
    assert Gemlite().refusal(CPU, SHAPES) == "runs on cuda alone"
    assert Humming().refusal(CUDA, SHAPES) == "needs auto-round's linear for it (pip install auto-round)"
    assert AtenInt4().refusal(CUDA, SHAPES) == "runs on cpu alone"
    assert AtenInt4().refusal(CPU, [*SHAPES, (64, 40)]) == "takes no matrix of 64 x 40"
    assert TorchDense().refusal(CPU, SHAPES) is None


def test_aten_computes_what_its_codes_say() -> None:
    """So that what is timed is the product of a 4-bit matrix."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, 128), generator=generator, dtype=torch.int32)
    scales = torch.rand(128 // 32, 64, generator=generator)
    hidden = torch.randn(5, 128, generator=generator)
    linear = AtenInt4.of_codes(codes, torch.stack([scales, torch.zeros_like(scales)], -1), 32)
    weight = (codes - 8) * scales.t().repeat_interleave(32, 1)
    torch.testing.assert_close(linear(hidden), hidden @ weight.t(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("peer", [TorchDense(), AtenInt4()])
def test_linears_have_their_shape(peer: peers.Peer) -> None:
    made = peer.linear(64, 128, torch.bfloat16, CPU)(torch.zeros(3, 128, dtype=torch.bfloat16))
    assert (tuple(made.shape), made.dtype) == ((3, 64), torch.bfloat16)


def test_groups_divide() -> None:
    assert [group_of(inputs) for inputs in (768, 192, 96, 40)] == [128, 64, 32, 40]


def program(folder: Path, text: str) -> None:
    path = folder / "llama-bench"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_llama_bench_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the same lengths and threads; what goes wrong is said in one line."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    lengths = {"prompt_tokens": 64, "new_tokens": 16, "repeat": 2, "threads": 3}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert llama_bench(gguf, **lengths) == {"refusal": "not installed: llama-bench is not on PATH"}
    rows = [
        {"n_prompt": 64, "n_gen": 0, "avg_ts": 812.5, "model_type": "mixtral Q4_K", "build_commit": "abc"},
        {"n_prompt": 0, "n_gen": 16, "avg_ts": 41.25, "model_type": "mixtral Q4_K", "build_commit": "abc"},
    ]
    program(tmp_path, f"echo \"$@\" > {tmp_path}/words\necho '{json.dumps(rows)}'")
    found = llama_bench(gguf, **lengths)
    assert (found["prefill_tokens_per_second"], found["decode_tokens_per_second"]) == (812.5, 41.25)
    assert (found["model"], found["refusal"]) == ("mixtral Q4_K", None)
    assert (tmp_path / "words").read_text().split() == f"-m {gguf} -p 64 -n 16 -r 2 -t 3 -o json".split()
    program(tmp_path, "echo 'cannot load' >&2; exit 3")
    assert llama_bench(gguf, **lengths) == {"refusal": "failed with 3 (cannot load)"}
    program(tmp_path, "echo '[{}]'")
    assert llama_bench(gguf, **lengths)["refusal"].startswith("its JSON has another shape")


def test_the_buffer_is_larger_than_the_last_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "2M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(bandwidth, "CACHE_FILES", tmp_path)
    monkeypatch.setattr(bandwidth, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth, "RUNS", 1)
    assert bandwidth.last_cache_bytes() == 2 << 20
    found = bandwidth.read_bandwidth(CPU)
    assert found["buffer_bytes"] == 8 << 20
    assert found["bytes_per_second"] > 1e8
    monkeypatch.setattr(bandwidth, "CACHE_FILES", tmp_path / "none")
    assert bandwidth.last_cache_bytes() == 0


def test_what_kernels_hold_is_counted_and_named() -> None:
    """A module whose buffers are with a kernel has what the kernel states; one without says why."""
    module = torch.nn.Linear(4, 2, bias=False)
    assert subject._held([module]) == 32
    assert subject.computes(module) == "no kernel: unpacked, then multiplied"
    module.refused = "several devices"
    assert subject.computes(module) == "no kernel: unpacked, then multiplied (several devices)"
    kind = type("PackedLayer", (), {"__module__": "moeq_kernels.cpu.layer", "nbytes": 100})
    module.prepared = kind()
    assert subject._held([module]) == 132
    assert subject.computes(module) == "cpu"
    module.prepared.form = SimpleNamespace(name="avx2")
    assert subject.computes(module) == "cpu, avx2"
