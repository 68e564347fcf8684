"""Foretold peaks of memory against those of a process that runs the stages."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moeq.planning.batch import batch_bytes
from moeq.planning.make import make_plan
from moeq.planning.memory import Memory, peak
from moeq.planning.sizes import Work, model_sizes, work_sizes
from moeq.quantizers.layer import expert_batches
from moeq.recipe import load_recipe
from moeq.stages.context import Context

ROOT = Path(__file__).parents[2]
SMALL = (
    "corpus.sequences=16", "corpus.sequence_length=64", "corpus.batch_size=8", "losses.methods=[rtn]",
    "losses.bits=[2,3,4]", "losses.per_projection=false", "assign={method: uniform, bits: 3, quantizer: rtn}",
    "eval.compare=[]", "eval.perplexity.sequences=16", "eval.perplexity.sequence_length=64",
    "estimate.grid.inputs=[128]", "estimate.grid.outputs=[512]",
)  # fmt: skip
SIZES = {  # hidden and intermediate size, experts, layers
    "60 MB": (256, 256, 18, 8),
    "400 MB": (768, 768, 18, 6),
}


def make(folder: Path, size: str) -> Path:
    """The random Mixtral of the memory benchmark, whose logits stand up to bfloat16."""
    spec = importlib.util.spec_from_file_location("memory_benchmark", ROOT / "benchmarks" / "memory.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    hidden, inner, experts, layers = SIZES[size]
    options = argparse.Namespace(hidden=hidden, intermediate=inner, experts=experts)
    found: Path = benchmark.make(folder, layers, options)
    return found


def measured(model: Path, out: Path, overrides: tuple[str, ...]) -> dict[str, dict[str, float]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "plan.py"), "--one", str(model), "", str(out), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("size", "stream"),
    [
        ("60 MB", "never"),
        pytest.param("60 MB", "always", marks=pytest.mark.full),
        pytest.param("400 MB", "never", marks=pytest.mark.full),
        pytest.param("400 MB", "always", marks=pytest.mark.full),
    ],
)
def test_peaks_are_bounded_and_not_far_off(size: str, stream: str, tmp_path: Path) -> None:
    model = make(tmp_path / "model", size)
    overrides = (*SMALL, f"stream={stream}")
    plan = make_plan(
        Context(recipe=load_recipe(None, list(overrides)), model_name=str(model), out=tmp_path / "none"), probe=False
    )
    found = measured(model, tmp_path / "run", overrides)
    for need in plan.stages:
        taken = found[need.stage]["ram_bytes"]
        assert 0.95 * taken <= need.ram <= 1.4 * taken, (need.stage, taken, need.ram, need.ram_terms)


def terms(context: Context, stage: str, work: Work | None = None) -> dict[str, int]:
    recipe, sizes = context.recipe, model_sizes(context)
    gpu = context.model.device.type == "cuda"
    model = Memory(sizes, work or work_sizes(context), recipe, streams=context.model.streams, gpu=gpu, placed=0)
    return {term.what: term.bytes for term in peak(model.moments(stage), gpu=False)}


def test_memory_grows_with_what_it_hangs_on(sparse_small: Path, tmp_path: Path) -> None:
    def of(stage: str, *overrides: str) -> int:
        recipe = load_recipe(None, ["stream=always", *overrides])
        context = Context(recipe=recipe, model_name=str(sparse_small), out=tmp_path)
        return sum(terms(context, stage).values())

    tokens = 128 * 512 * 4096
    more = of("profile", "corpus.sequences=256") - of("profile")
    assert 5 * 2 * tokens * 0.9 < more < 5 * 2 * tokens * 1.5  # five copies of every token in bfloat16, and routing
    less = of("losses") - of("losses", "losses.working_memory=1GiB")
    assert 0 < less < 4 * 2**30
    shorter = of("eval") - of("eval", "eval.perplexity.batch_size=4")
    logits = 12 * 512 * 151936 * 14
    assert 0.5 * logits < shorter < 1.5 * logits
    refined = of("quantize", "quantize.refine={}") - of("quantize")
    assert 8 * 2 * tokens + 2 * 2**30 < refined < 24 * 2 * tokens + 8 * 2**30  # two runs' tokens, and the training
    whole = of("profile", "stream=never")
    assert whole > 18 * 2**30 > of("profile")


def test_a_batch_of_experts_stays_near_the_working_memory(sparse_small: Path, tmp_path: Path) -> None:
    for memory in ("1GiB", "4GiB", "16GiB"):
        recipe = load_recipe(None, [f"losses.working_memory={memory}"])
        layer = model_sizes(Context(recipe=recipe, model_name=str(sparse_small), out=tmp_path)).layers[0]
        assert 0.3 < batch_bytes(layer, recipe, 4096) / recipe.losses.working_memory < 3


def test_a_batch_holds_on_a_cpu_what_its_column_loop_leaves(sparse_small: Path, tmp_path: Path) -> None:
    """Weights, their codes, a copy of gate and up, and Hessians a few times: no float32 tensor of all widths."""
    recipe = load_recipe(None, ["losses.working_memory=4GiB", "losses.methods=[gptq]"])
    layer = model_sizes(Context(recipe=recipe, model_name=str(sparse_small), out=tmp_path)).layers[0]
    first = next(expert_batches(layer, recipe.losses))
    weights = (first.stop - first.start) * layer.parameters_per_expert
    hessians = 4 * (first.stop - first.start) * (layer.hidden_size**2 + layer.intermediate_size**2)
    codes = len(recipe.losses.bits) * weights
    tensors = 4 * weights + 4 * weights + 3 * hessians + codes
    assert 0.8 * tensors < batch_bytes(layer, recipe, 512) < 1.1 * tensors < batch_bytes(layer, recipe, 512, gpu=True)


def test_a_gpu_holds_what_computes_and_the_machine_the_rest(tiny_mixtral: Path, tmp_path: Path) -> None:
    context: Any = Context(recipe=load_recipe(None, list(SMALL)), model_name=str(tiny_mixtral), out=tmp_path)
    sizes, work = model_sizes(context), work_sizes(context)
    model = Memory(sizes, work, context.recipe, streams=False, gpu=True, placed=1000)
    for stage in ("profile", "losses", "eval"):
        gpu = {term.what for term in peak(model.moments(stage), gpu=True)}
        ram = {term.what for term in peak(model.moments(stage), gpu=False)}
        assert "program" in ram - gpu
        assert gpu
        assert not gpu & {"program", "text", "headers", "loss table and profile"}


@pytest.mark.parametrize("effects", ["layer_effects", "expert_effects"])
def test_outputs_that_are_compared_count_and_shrink_with_the_working_memory(
    tiny_mixtral: Path, tmp_path: Path, effects: str
) -> None:
    def compared(memory: str) -> int:
        options = ("corpus.sequences=64", "corpus.sequence_length=64", "eval.perplexity=null", "eval.compare=[]")
        recipe = load_recipe(None, [*options, f"losses.{effects}={{}}", f"losses.working_memory={memory}"])
        context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=tmp_path / "run")
        model = Memory(model_sizes(context), work_sizes(context), recipe, streams=False, gpu=False, placed=0)
        terms = [term for moment in model.moments("losses") for term in moment]
        return max(term.bytes for term in terms if term.what == "outputs that are compared")

    assert compared("1GiB") == pytest.approx(16 * compared("1MB"), rel=0.01)  # 16 held-out sequences, or one at a time
