"""exl3 over a layer of 128 x 128: what is stored is what was measured, whatever the batches; who cannot is named.

Walks are found at once, and not the best (`greedy_walks`): those of 2**16 states take too long for a test.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from greedy_walks import walks
from one_layer import DEAD, SILU, layer_inputs, layer_of, layer_weights

from moeq.artifacts.losses import WHOLE
from moeq.errors import QuantizationError
from moeq.models.experts import DOWN
from moeq.models.kinds import GATED
from moeq.numerics import trellis
from moeq.quantizers.layer import LayerResult, quantize_layer
from moeq.quantizers.layer_data import RoutedTokens
from moeq.recipe import LossesSection
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import Encoding

LAYER = layer_of(128)
INPUTS = layer_inputs(LAYER, 24)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trellis, "walks", walks)


def section(**settings: Any) -> LossesSection:
    return LossesSection.model_validate({"bits": [2, 3], "methods": ["exl3"], "min_tokens": 4} | settings)


def quantized(**settings: Any) -> LayerResult:
    return quantize_layer(INPUTS, layer_weights(LAYER), SILU, section(**settings))


def replica(result: LayerResult, bits: int, expert: int) -> dict[str, PackedWeight]:
    return {name: result.replicas[name][bits].map(lambda part: part[expert]) for name in GATED}


def test_the_stored_values_are_the_measured_ones() -> None:
    """Bit for bit; codes are EXL3's, more bits lose less, and an expert without tokens is given those of others."""
    result = quantized()
    rows = RoutedTokens.of(INPUTS, section()).routed(0, heldout=True)
    exact = {name: stack[0] for name, stack in layer_weights(LAYER).items()}
    losses = {(row["expert"], row["bits"]): row["loss"] for row in result.rows if row["projection"] == WHOLE}
    for bits in (2, 3):
        own = replica(result, bits, 0)
        assert {one.encoding for one in own.values()} == {Encoding.exl3()}
        values = {name: one.dequantize() for name, one in own.items()}
        outputs = [SILU.output(SILU.intermediate(rows, one, {}), one[DOWN], None) for one in (values, exact)]
        assert losses[0, bits] == float((outputs[0] - outputs[1]).square().mean(1).mean())
    assert all(losses[expert, 3] < 0.5 * losses[expert, 2] for expert in range(2))
    borrowed = {row["expert"] for row in result.rows if "borrowed_hessian" in row["fallback"]}
    assert borrowed == {DEAD}
    assert all(row["hessian_trace"] is not None for row in result.rows)


def test_the_same_bytes_whenever_at_whatever_widths_and_by_itself() -> None:
    every, alone, apart = quantized(), quantized(bits=[3]), quantized(bits=[3], working_memory=1)
    for name in GATED:
        for part, wanted in every.replicas[name][3].parts().items():
            assert torch.equal(alone.replicas[name][3].parts()[part], wanted)
            assert part == "scales" or torch.equal(apart.replicas[name][3].parts()[part], wanted)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_one_error_that_names_the_expert(value: float) -> None:
    weights = layer_weights(LAYER)
    weights["up_proj"][1, 4, 2] = value
    with pytest.raises(QuantizationError, match=rf"{LAYER.name}, expert 1, "):
        quantize_layer(INPUTS, weights, SILU, section(bits=[2]))
