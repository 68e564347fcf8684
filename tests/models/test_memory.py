"""What must not stay in memory from one layer to the next."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import memory
import pytest
import torch

from moeq import pipeline
from moeq.models.streaming import StreamedModel
from moeq.models.walk import LayerInputs
from moeq.progress import Reporter
from moeq.quantizers.layer import LayerResult
from moeq.recipe import load_recipe
from moeq.stages import quantize
from moeq.stages.context import Context

BENCHMARKS = str(Path(memory.__file__).parent)
MANY_SHAPES = """
import moeq, re, torch
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
weight = torch.ones(64, 64, dtype=torch.bfloat16)
def go(rows):
    for count in rows:
        torch.nn.functional.linear(torch.ones(count, 64, dtype=torch.bfloat16), weight)
go(range(1, 200))
start = anonymous()
go(range(200, 800))
print(anonymous() - start)
"""

STAGES_GIVE_BACK = """
import argparse, contextlib, ctypes, json, re, sys
from pathlib import Path
import moeq
sys.path.insert(0, sys.argv[1])
import figures, memory
from moeq import pipeline
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context
from moeq.verification import reference

folder = Path(sys.argv[2])
left = {}
def look(where):
    held = figures.resident()["RssAnon"]
    ctypes.CDLL(None).malloc_trim(0)
    left[where] = max(left.get(where, 0), held - figures.resident()["RssAnon"])

class Watching(Reporter):
    @contextlib.contextmanager
    def bar(self, title, total):
        def advance():
            if title in ("quantize", "traces"):
                look(f"a layer of {title}")
        with figures.Peaks() as watch:
            yield advance
        peaks[title] = max(peaks.get(title, 0), watch.highest["RssAnon"] - start)

reference.GROUP_BYTES = 16 << 20
peaks, start = {}, 0
recipe = load_recipe(None, [*memory.OVERRIDES, "corpus.sequences=4", "corpus.sequence_length=64"])
context = Context(recipe=recipe, model_name=str(folder), out=folder.parent / "run", reporter=Watching(quiet=True))
for stage in ("profile", "losses", "assign", "quantize", "export"):
    before = figures.resident()["RssAnon"]
    pipeline.run(context, (stage,))
    if stage == "assign":
        start = figures.resident()["RssAnon"]
    look(stage)
print(json.dumps([left, peaks["comparing"]]))
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="no /proc here")
def test_what_layers_and_stages_freed_is_given_back(tmp_path: Path) -> None:
    """Or every layer and stage would begin on top of it: export has room for two layers as they are on disk."""
    (tmp_path / "model").mkdir()
    sizes = argparse.Namespace(hidden=1024, intermediate=1024, experts=12)
    memory.make(tmp_path / "model", 2, sizes)
    command = [sys.executable, "-c", STAGES_GIVE_BACK, BENCHMARKS, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left, compared = json.loads(done.stdout.splitlines()[-1])
    assert set(left) == {
        "profile",
        "losses",
        "assign",
        "quantize",
        "export",
        "a layer of quantize",
        "a layer of traces",
    }
    assert max(left.values()) < 6e6, left
    layer = 2 * 3 * sizes.experts * sizes.hidden * sizes.intermediate
    assert compared < 2 * layer, compared


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="no /proc here")
def test_memory_does_not_grow_with_every_number_of_rows() -> None:
    done = subprocess.run([sys.executable, "-c", MANY_SHAPES], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50 << 20  # 300 MiB where oneDNN and ideep keep all of them


def test_nothing_of_a_layer_is_held_while_the_next_is_read(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    reads: list[str] = []
    read, make = StreamedModel.load, quantize.layer_tensors

    def watched_read(self: StreamedModel, block: str) -> None:
        if block not in self.loaded:
            assert not [found for found in gc.get_objects() if type(found) in (LayerInputs, LayerResult)]
            reads.append(block)
        read(self, block)

    def watched_make(*arguments: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        assert not [tensor for tensor in made if tensor() is not None]
        placed, extra = make(*arguments)
        made.extend(weakref.ref(tensor) for tensor in (placed | extra).values())
        return placed, extra

    monkeypatch.setattr(StreamedModel, "load", watched_read)
    monkeypatch.setattr(quantize, "layer_tensors", watched_make)
    recipe = load_recipe(
        None,
        [
            "stream=always", "corpus.sequences=8", "corpus.sequence_length=32", "losses.group_size=16",
            "assign.quantizer=rtn", "quantize.replicas=all",
        ],
    )  # fmt: skip
    context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=tmp_path / "out", reporter=Reporter(quiet=True))
    pipeline.run(context, ("profile", "losses", "assign", "quantize"))
    assert context.model.streamed is not None
    assert len(reads) == 2 * len(context.model.streamed.blocks)
    assert made
