"""Whole runs on a GPU: what lies where, which no kernel's test sees; on a pretended one, see `pretended_gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import family_models
import pytest
from pyarrow import parquet

from moeq.integers.artifacts.reparam import read_reparam

SMALL = (
    "corpus.source=bundled", "corpus.sequences=8", "corpus.sequence_length=32", "losses.bits=[2,4]",
    "assign.bits_per_weight=3.5", "eval.perplexity={source: bundled, sequence_length: 32, sequences: 2}",
    "eval.compare=[]",
)  # fmt: skip
PRETENDED = Path(__file__).parents[1] / "pretended_gpu.py"


def on(device: str, *words: str) -> None:
    """moeq in a process of its own, on the CPU or on the pretended GPU."""
    start = [str(PRETENDED)] if device == "cuda" else ["-m", "moeq"]
    done = subprocess.run([sys.executable, *start, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def settings(*keys: str) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("mixtral", ("stream=never", "others={attention: 4, embeddings: 8, head: 8}")),
        ("deepseek_v3", ("stream=always", "others={attention: 4, dense: 4, shared: 4, embeddings: 8}")),
        ("qwen3_moe", ("losses.methods=[trellis]", "losses.layer_effects={}", "quantize.tune={}", "assign.drop=true")),
        ("gpt_oss", ("losses.methods=[signround,gptq]", "assign.quantizer=best", "assign.bits_per_weight=4.5")),
        ("mixtral", ("losses.methods=[gptq]", "losses.clip=mse", "quantize.refine={}")),
        ("mixtral", ("losses.methods=[gptq]", "losses.act_order=false", "losses.nested=true", "quantize.replicas=all")),
    ],
)
def test_a_run_on_a_gpu_is_that_on_the_cpu(family: str, more: tuple[str, ...], tmp_path: Path) -> None:
    """From profile to report; losses differ by the order of sums alone, and so do the figures of what is exported."""
    model, losses, figures = family_models.save(family, tmp_path / "model"), [], []
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        on(device, "run", str(model), "--out", str(out), "--device", device, *settings(*SMALL, *more))
        statement = json.loads((out / "checkpoint" / "provenance.json").read_text())
        made_on = statement["predicate"]["runDetails"]["builder"]["version"]["device"]
        assert made_on == {"cpu": "cpu", "cuda": "Pretended GPU"}[device]
        losses.append(sum(parquet.read_table(out / "losses" / "losses.parquet").column("loss").to_pylist()))
        rows = json.loads((out / "eval" / "eval.json").read_text())["rows"]
        figures.append([row["perplexity"] for row in rows])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert figures[1] == pytest.approx(figures[0], rel=0.02)


def test_norms_are_folded_on_a_gpu(tmp_path: Path) -> None:
    """Routers gain biases, which zero points go into."""
    small = ("corpus.source=digits", "corpus.sequences=16", "reparam.samples=8")
    on("cuda", "reparam", "bundled:tiny-moe-vit", "--out", str(tmp_path), "--device", "cuda", *settings(*small))
    report = read_reparam(tmp_path / "reparam")
    assert report.stored.error < 1e-3
    assert {norm.mode for norm in report.norms} == {"asymmetric"}
