"""What is refined is what is stored, bit for bit; what cannot be stored is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from quantizers.test_layer import LAYER, SILU, expert_output, layer_inputs, layer_weights
from quantizers.test_refine import job, rounded
from torch import Tensor

from moeq.errors import QuantizationError
from moeq.models.experts import DOWN
from moeq.numerics import gptq, storing
from moeq.numerics.gptq import Quantized
from moeq.numerics.storing import NotStorable, packed_of
from moeq.quantizers.layer import quantize_layer
from moeq.quantizers.refine import refine_layer
from moeq.recipe import LossesSection, RefineSection
from moeq_kernels.grids import decode
from moeq_kernels.packed import PackedWeight


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Quantized, int, PackedWeight]]:
    """Everything that is packed: the quantizer's result, the width, and the packed weight."""
    found: list[tuple[Quantized, int, PackedWeight]] = []
    pack: Callable[..., PackedWeight] = storing.packed_of

    def recorded(quantized: Quantized, bits: int, *settings: Any) -> PackedWeight:
        found.append((quantized, bits, pack(quantized, bits, *settings)))
        return found[-1][2]

    monkeypatch.setattr(storing, "packed_of", recorded)
    return found


def own_values(quantized: Quantized, bits: int) -> Tensor:
    """What the quantizer itself takes its codes to stand for."""
    at = quantized.bits.index(bits)
    return decode(quantized.codes[:, at], quantized.scale[:, at], quantized.zero[:, at], quantized.group_size)


@pytest.mark.parametrize("symmetric", [False, True])
def test_refined_weights_have_the_trained_values(
    packings: list[tuple[Quantized, int, PackedWeight]], symmetric: bool
) -> None:
    start = rounded(job(symmetric))
    packings.clear()
    refine_layer(job(symmetric), start, RefineSection(iterations=4))
    assert packings
    for quantized, bits, packed in packings:
        assert torch.equal(packed.dequantize(), own_values(quantized, bits)), bits


def off_grid(made: Quantized) -> Quantized:
    return replace(made, zero=made.zero + 0.3 * (made.zero < 1))


def beyond(made: Quantized) -> Quantized:
    codes = made.codes.clone()
    codes[-1, 0, 0, 0] = 255
    return replace(made, codes=codes)


def between(made: Quantized) -> Quantized:
    return replace(made, codes=made.codes + 0.25 * (made.codes == 1))


def infinite(made: Quantized) -> Quantized:
    return replace(made, scale=made.scale.masked_fill(made.scale == made.scale.amax(), torch.inf))


def finer(made: Quantized) -> Quantized:
    return replace(made, scale=made.scale * 1.0001)


ROGUES: dict[str, tuple[Callable[[Quantized], Quantized], str]] = {
    "fractional zero points": (off_grid, "zero points that are no whole numbers"),
    "codes out of range": (beyond, "codes beyond 0 to 3"),
    "fractional codes": (between, "codes that are no whole numbers"),
    "infinite scales": (infinite, "scales that are not finite"),
    "scales between those of float16": (finer, "scales that float16 does not hold"),
}


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("case", ROGUES)
def test_what_cannot_be_stored_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, method: str, case: str) -> None:
    """Rounding it silently, the table said a loss (fractional zero points: a lower one) that no checkpoint had."""
    spoil, message = ROGUES[case]
    honest = gptq.quantize
    monkeypatch.setattr(gptq, "quantize", lambda *given, **settings: spoil(honest(*given, **settings)))
    config = LossesSection(bits=[2, 4], methods=[method], group_size=16, min_tokens=8, clip="minmax")
    with pytest.raises(QuantizationError) as caught:
        quantize_layer(layer_inputs(), layer_weights(), SILU, config)
    expert = LAYER.num_experts - 1 if case == "codes out of range" else r"\d"
    where = rf"layers\.0\.experts, expert {expert}, gate_proj, 2 bits"
    assert re.match(f"{where}: {method} gave {message}, which cannot be stored; ", str(caught.value)), caught.value


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_zero_point_that_is_not_stored_must_be_the_middle(symmetric: bool) -> None:
    made = gptq.quantize(torch.randn(2, 4, 32), None, bits=[1, 4], group_size=16, symmetric=symmetric)
    moved = replace(made, zero=made.zero + 1)
    for bits, middle in ((1, 0.5), (4, 8)):
        if bits == 1 or symmetric:
            with pytest.raises(NotStorable, match=f"zero points other than {middle}"):
                packed_of(moved, bits, symmetric)


def test_expert_output_is_the_familys(packings: list[tuple[Quantized, int, PackedWeight]]) -> None:
    """The oracle of these tests computes what the expert does."""
    weights, rows = layer_weights(), torch.randn(7, LAYER.hidden_size)
    one = {name: stack[1] for name, stack in weights.items()}
    wanted = expert_output(weights, 1, rows)
    torch.testing.assert_close(SILU.output(SILU.intermediate(rows, one, {}), one[DOWN], None), wanted)
