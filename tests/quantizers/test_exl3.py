"""exl3 over a layer of 128 x 128: what is stored is what was measured, whatever the batches; who cannot is named.

Walks are found at once, and not the best (`greedy_walks`): those of 2**16 states take too long for a test.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from greedy_walks import walks
from torch import Tensor, nn

from moeq.artifacts.losses import WHOLE
from moeq.errors import QuantizationError
from moeq.models.experts import DOWN, ExpertLayer, ExpertMath
from moeq.models.kinds import GATED
from moeq.models.kinds.base import act_then_multiply
from moeq.models.walk import LayerInputs
from moeq.numerics import trellis
from moeq.quantizers.layer import LayerResult, quantize_layer
from moeq.quantizers.layer_data import RoutedTokens
from moeq.recipe import LossesSection
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import Encoding

LAYER = ExpertLayer(index=3, name="layers.3.experts", num_experts=2, hidden_size=128, intermediate_size=128)
DEAD = 1  # an expert without a token
SILU = ExpertMath(gate=act_then_multiply(nn.SiLU()))
TOKENS, SEQUENCES = 24, 8


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trellis, "walks", walks)


def section(**settings: Any) -> LossesSection:
    return LossesSection.model_validate({"bits": [2, 3], "methods": ["exl3"], "min_tokens": 4} | settings)


def layer_inputs() -> LayerInputs:
    generator = torch.Generator().manual_seed(0)
    count = TOKENS * SEQUENCES
    hidden = torch.randn(count, LAYER.hidden_size, generator=generator)
    index = torch.arange(count)
    return LayerInputs(
        layer=LAYER, hidden=hidden + 0.8 * hidden.roll(1, -1), experts=torch.zeros(count, 1, dtype=torch.long),
        weights=torch.ones(count, 1), sequence=index // TOKENS, position=index % TOKENS,
    )  # fmt: skip


def layer_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: 0.1 * torch.randn(LAYER.num_experts, *LAYER.shape(name), generator=generator) for name in GATED}


def quantized(**settings: Any) -> LayerResult:
    return quantize_layer(layer_inputs(), layer_weights(), SILU, section(**settings))


def replica(result: LayerResult, bits: int, expert: int) -> dict[str, PackedWeight]:
    return {name: result.replicas[name][bits].map(lambda part: part[expert]) for name in GATED}


def test_the_stored_values_are_the_measured_ones() -> None:
    """Bit for bit; codes are EXL3's, more bits lose less, and an expert without tokens is given those of others."""
    result = quantized()
    rows = RoutedTokens.of(layer_inputs(), section()).routed(0, heldout=True)
    exact = {name: stack[0] for name, stack in layer_weights().items()}
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
    weights = layer_weights()
    weights["up_proj"][1, 4, 2] = value
    with pytest.raises(QuantizationError, match=rf"{LAYER.name}, expert 1, "):
        quantize_layer(layer_inputs(), weights, SILU, section(bits=[2]))
