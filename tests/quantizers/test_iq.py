"""iq over a layer of 256 x 256: what is stored is what was measured, whatever the batches, and its scales are trained.

Skipped where gguf is not installed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from one_layer import DEAD, SILU, layer_inputs, layer_of, layer_weights

from moeq.artifacts.losses import WHOLE
from moeq.errors import QuantizationError, RecipeError
from moeq.models.experts import DOWN
from moeq.models.kinds import GATED
from moeq.progress import Reporter
from moeq.quantizers.iq import QUANTIZER
from moeq.quantizers.layer import LayerResult, quantize_layer
from moeq.quantizers.layer_data import RoutedTokens
from moeq.quantizers.quantizer import BatchSizes
from moeq.quantizers.refine import LayerJob, refine_layer
from moeq.recipe import LossesSection, RefineSection, load_recipe
from moeq.stages import losses
from moeq.stages.context import Context
from moeq_kernels import iq
from moeq_kernels.errors import ModelError
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import Encoding

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
