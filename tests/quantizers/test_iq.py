"""iq over a layer of 256 x 256: what is stored is what was measured, whatever the batches, and its scales are trained;
and runs for llama.cpp, whose native checkpoint and model.gguf have the same values.

Skipped where gguf is not installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pytest
import torch
from made_sources import IDS, save_model
from manifest_reader import read_expert
from one_layer import DEAD, SILU, layer_inputs, layer_of, layer_weights

from moeq import pipeline
from moeq.artifacts.assignment import read_assignment
from moeq.artifacts.losses import WHOLE
from moeq.artifacts.stage import read_record
from moeq.conversion import convert
from moeq.errors import QuantizationError, RecipeError
from moeq.exporters.gguf import FILE
from moeq.exporters.readers import open_packed
from moeq.folders import bytes_in
from moeq.models.experts import DOWN
from moeq.models.kinds import GATED
from moeq.options import BudgetOptions
from moeq.progress import Reporter
from moeq.quantizers.iq import QUANTIZER
from moeq.quantizers.layer import LayerResult, quantize_layer
from moeq.quantizers.layer_data import RoutedTokens
from moeq.quantizers.quantizer import BatchSizes
from moeq.quantizers.refine import LayerJob, refine_layer
from moeq.recipe import LossesSection, RefineSection, load_recipe
from moeq.stages import losses
from moeq.stages.context import Context
from moeq.stages.export import format_directory
from moeq.starting import context_of
from moeq_kernels import iq
from moeq_kernels.errors import ModelError
from moeq_kernels.iq_types import SETS
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import Encoding

WIDE = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 512, "intermediate_size": 512}
LESS = (
    "corpus.sequences=4", "corpus.sequence_length=24", "losses.layer_effects=null", "assign.layer_weighting=null",
    "eval.perplexity.sequences=2", "eval.perplexity.sequence_length=24", "eval.compare=[]", "losses.bits=[1, 2, 4, 8]",
)  # fmt: skip
LAYER = layer_of(256)
INPUTS = layer_inputs(LAYER, 40)


@pytest.fixture(autouse=True)
def _gguf() -> None:
    peers.module("gguf")


def section(**settings: Any) -> LossesSection:
    return LossesSection.model_validate({"bits": [2, 3], "methods": ["iq"], "min_tokens": 4} | settings)


def quantized(**settings: Any) -> LayerResult:
    return quantize_layer(INPUTS, layer_weights(LAYER), SILU, section(**settings))


def replica(result: LayerResult, bits: int, expert: int) -> dict[str, PackedWeight]:
    return {name: result.replicas[name][bits].map(lambda part: part[expert]) for name in GATED}


@pytest.fixture(scope="module")
def result() -> LayerResult:
    peers.module("gguf")
    return quantized(iq_set="xs")


def test_the_stored_values_are_the_measured_ones(result: LayerResult) -> None:
    """Bit for bit; more bits lose less, and an expert without tokens is given those of others."""
    rows = RoutedTokens.of(INPUTS, section()).routed(0, heldout=True)
    exact = {name: stack[0] for name, stack in layer_weights(LAYER).items()}
    losses = {(row["expert"], row["bits"]): row["loss"] for row in result.rows if row["projection"] == WHOLE}
    for bits in (2, 3):
        own = replica(result, bits, 0)
        assert {one.encoding for one in own.values()} == {Encoding.iq("iq-xs")}
        values = {name: one.dequantize() for name, one in own.items()}
        outputs = [SILU.output(SILU.intermediate(rows, one, {}), one[DOWN], None) for one in (values, exact)]
        assert losses[0, bits] == float((outputs[0] - outputs[1]).square().mean(1).mean())
    assert all(losses[expert, 3] < 0.7 * losses[expert, 2] for expert in range(2))
    assert {row["expert"] for row in result.rows if "borrowed_hessian" in row["fallback"]} == {DEAD}
    assert all(row["hessian_trace"] is not None for row in result.rows)


def test_the_same_bytes_whenever_at_whatever_widths_and_by_itself(result: LayerResult) -> None:
    alone, apart = quantized(bits=[3], iq_set="xs"), quantized(bits=[3], iq_set="xs", working_memory=1)
    for name in GATED:
        for part, wanted in result.replicas[name][3].parts().items():
            assert torch.equal(alone.replicas[name][3].parts()[part], wanted)
            same = apart.replicas[name][3].parts()[part] == wanted
            assert float(same.all(-1).float().mean()) > 0.9  # rows; factors are summed up in another order


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_one_error_that_names_the_expert(value: float) -> None:
    weights = layer_weights(LAYER)
    weights["up_proj"][1, 4, 2] = value
    with pytest.raises(QuantizationError, match=rf"{LAYER.name}, expert 1"):
        quantize_layer(INPUTS, weights, SILU, section(bits=[2]))


def test_training_a_layer_moves_scales_alone_and_loses_less(result: LayerResult) -> None:
    start = {expert: replica(result, 2, expert) for expert in range(2)}
    job = LayerJob(
        inputs=INPUTS, weights=layer_weights(LAYER), biases={}, math=SILU, behind=None, bits=(2, 2), group_size=256,
        symmetric=True,
    )  # fmt: skip
    trained = refine_layer(job, start, RefineSection(iterations=40))
    rows = INPUTS.hidden

    def off(own: dict[str, PackedWeight]) -> float:
        values = {name: one.dequantize() for name, one in own.items()}
        exact = {name: stack[0] for name, stack in layer_weights(LAYER).items()}
        outputs = [SILU.output(SILU.intermediate(rows, one, {}), one[DOWN], None) for one in (values, exact)]
        return float((outputs[0] - outputs[1]).square().mean())

    assert all(torch.equal(trained[0][name].codes, start[0][name].codes) for name in GATED)
    assert not torch.equal(trained[0][DOWN].scales, start[0][DOWN].scales)
    assert off(trained[0]) < off(start[0])


def test_memory_and_operations_grow_with_what_is_made() -> None:
    sections = section(bits=[2]), section(bits=[1, 2, 3, 4, 8])
    few, many = (BatchSizes(layer=LAYER, settings=one, experts=2, tokens=64, lent=16) for one in sections)
    assert max(QUANTIZER.memory(few)) < max(QUANTIZER.memory(many))
    assert QUANTIZER.operations(few) < 0.5 * QUANTIZER.operations(many)


def test_a_run_without_the_package_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = load_recipe(None, ["losses.methods=[iq]", "assign.quantizer=iq"])
    context = Context(recipe=recipe, model_name="bundled:tiny-mixtral", out=tmp_path, reporter=Reporter(quiet=True))
    with pytest.raises(RecipeError, match="iq takes multiples of 256"):
        losses.check(context)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RecipeError, match="the package gguf is not installed"):
        losses.check(context)
    with pytest.raises(ModelError, match=r"which has the tables of i-quants; pip install gguf"):
        iq.package()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    peers.module("gguf")
    return save_model(tmp_path_factory.mktemp("wide") / "model", "qwen3_moe", norm_topk_prob=True, **WIDE)


def ran(model: Path, out: Path, **given: str) -> tuple[Any, Path]:
    """The context of a run for llama.cpp, and what is written for it."""
    asked = BudgetOptions(for_="llama.cpp", what=str(model), out=out, set_=[*LESS], verify=False, quiet=True, **given)
    context = context_of(asked, "run")
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    return context, format_directory(out, "llama.cpp")


@pytest.fixture(scope="module")
def run(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run by default, and what it wrote for llama.cpp."""
    out = tmp_path_factory.mktemp("run") / "out"
    context, folder = ran(wide, out, bits="2.6")
    assert context.recipe.losses.methods == ["iq"]
    assert context.recipe.losses.iq_set == "s"
    return out, folder


def test_a_run_for_llama_cpp_makes_them_within_its_budget(run: tuple[Path, Path]) -> None:
    out, folder = run
    tensors = [one for one in peers.module("gguf").GGUFReader(folder / FILE).tensors if "_exps" in one.name]
    assert {one.tensor_type.name for one in tensors} <= {*SETS["iq-s"].values()}
    bits = float(8 * sum(int(one.n_bytes) for one in tensors) / sum(int(one.n_elements) for one in tensors))
    assert 2.2 < bits <= 2.6
    said = read_record(out / "assign", "assign").summary
    assert said["loads_in"]["llama.cpp"] is None
    assert read_assignment(out / "assign" / "assignment.json").encoding.codebook == "iq-s"


def test_the_native_checkpoint_beside_it_has_the_same_values(run: tuple[Path, Path], tmp_path: Path) -> None:
    """And the same bytes of experts; transformers runs it, and it converts to what the run wrote."""
    out, folder = run
    from transformers import AutoConfig, AutoModelForCausalLM

    native, other = open_packed(out / "checkpoint"), open_packed(folder, as_values=True)
    for layer, theirs in zip(native.layers, other.layers, strict=True):
        for expert in range(layer.num_experts):
            there = other.expert(theirs, expert)[0]
            for name, matrix in native.expert(layer, expert)[0].items():
                assert isinstance(matrix, PackedWeight)
                assert torch.equal(there[name], matrix.dequantize())
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(out / "checkpoint", dtype=torch.float32)(input_ids=IDS).logits
    convert(out / "checkpoint", "llama.cpp", tmp_path / "again")
    assert (tmp_path / "again" / FILE).read_bytes() == (folder / FILE).read_bytes()
    config = AutoConfig.from_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, config=config, dtype=torch.float32)
    with torch.no_grad():
        wanted = plain.eval()(input_ids=IDS).logits
    assert float((logits - wanted).norm() / wanted.norm()) < 1e-3


def test_the_manifest_says_how_to_read_them(run: tuple[Path, Path]) -> None:
    checkpoint = run[0] / "checkpoint"
    manifest = json.loads((checkpoint / "placement.json").read_text("utf-8"))
    native = open_packed(checkpoint)
    for layer, placed in zip(native.layers, manifest["layers"], strict=True):
        (replica,) = placed["experts"][2]["replicas"]
        read = read_expert(checkpoint, placed, replica, manifest["layout"])
        for name, matrix in native.expert(layer, 2)[0].items():
            assert isinstance(matrix, PackedWeight)
            assert np.array_equal(read[name], matrix.dequantize().numpy())


@pytest.mark.full
@pytest.mark.parametrize(("bits", "name"), [("2.4", "xs"), ("2.1", "xxs"), ("1.8", "xxs")])
def test_small_budgets_have_the_set_that_fits(bits: str, name: str, wide: Path, tmp_path: Path) -> None:
    context, folder = ran(wide, tmp_path / "run", bits=bits)
    assert context.recipe.losses.iq_set == name
    tensors = [one for one in peers.module("gguf").GGUFReader(folder / FILE).tensors if "_exps" in one.name]
    assert sum(int(one.n_bytes) * 8 for one in tensors) <= float(bits) * sum(int(one.n_elements) for one in tensors)


@pytest.mark.full
def test_a_size_is_that_of_the_files_directory(wide: Path, tmp_path: Path) -> None:
    _, plenty = ran(wide, tmp_path / "plenty", bits="8.5")
    size = round(0.8 * bytes_in(plenty))
    _, folder = ran(wide, tmp_path / "run", size=str(size))
    assert 0.5 * size < bytes_in(folder) <= size
