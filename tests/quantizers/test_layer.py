"""Replicas and losses of one layer: held-out measuring, borrowing, batching, and GPTQ against RTN on a real model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moeq.artifacts.losses import WHOLE
from moeq.errors import QuantizationError
from moeq.models.experts import ExpertLayer, ExpertMath
from moeq.models.kinds import GATED, KINDS
from moeq.models.kinds.base import ActThenMultiply
from moeq.models.walk import LayerInputs
from moeq.quantizers.layer import LayerResult, expert_batches, quantize_layer
from moeq.quantizers.layer_data import ExpertBatch, RoutedTokens
from moeq.quantizers.statistics import Note, Statistics
from moeq.recipe import LossesSection, load_recipe
from moeq.stages import losses as losses_stage
from moeq.stages.context import Context
from moeq.stages.replicas import load_losses
from moeq_kernels.packed import packed_bytes
from moeq_kernels.widths import Encoding

LAYER = ExpertLayer(index=0, name="layers.0.experts", num_experts=5, hidden_size=40, intermediate_size=24)
SILU = ExpertMath(gate=ActThenMultiply(nn.SiLU()))
CONFIG = LossesSection(group_size=16, min_tokens=8, clip="minmax")
TOKENS = 64  # a sequence
SEQUENCES = 8


def layer_inputs(seed: int = 0, never: int | None = 4) -> LayerInputs:
    generator = torch.Generator().manual_seed(seed)
    count = TOKENS * SEQUENCES
    hidden = torch.randn(count, LAYER.hidden_size, generator=generator) * torch.linspace(0.2, 2, LAYER.hidden_size)
    hidden = hidden + 0.8 * hidden.roll(1, -1)
    scores = torch.rand(count, LAYER.num_experts, generator=generator)
    if never is not None:
        scores[:, never] = -1
    weights, experts = scores.topk(2, -1)
    index = torch.arange(count)
    return LayerInputs(
        layer=LAYER, hidden=hidden, experts=experts, weights=weights, sequence=index // TOKENS, position=index % TOKENS
    )


def layer_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: 0.1 * torch.randn(LAYER.num_experts, *LAYER.shape(name), generator=generator) for name in GATED}


def row(result: LayerResult, **wanted: object) -> dict[str, object]:
    found = [r for r in result.rows if all(r[key] == value for key, value in wanted.items())]
    assert len(found) == 1, wanted
    return found[0]


def expert_output(weights: dict[str, Tensor], expert: int, rows: Tensor) -> Tensor:
    gate, up, down = (weights[name][expert] for name in GATED)
    return (nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T


def test_loss_is_the_mean_squared_error_on_heldout_tokens() -> None:
    inputs, weights = layer_inputs(), layer_weights()
    result = quantize_layer(inputs, weights, SILU, CONFIG)
    heldout = (inputs.sequence % 4 == 3) & (inputs.experts == 1).any(1)
    rows = inputs.hidden[heldout]
    exact = expert_output(weights, 1, rows)
    stored = {name: result.replicas[name][2].dequantize() for name in GATED}
    wanted = float((expert_output(stored, 1, rows) - exact).square().mean())
    found = row(result, expert=1, projection=WHOLE, method="gptq", bits=2)
    assert found["loss"] == pytest.approx(wanted, rel=1e-4)
    assert found["relative_loss"] == pytest.approx(wanted / float(exact.square().mean()), rel=1e-4)
    assert found["heldout_tokens"] == int(heldout.sum())
    only_up = {**weights, "up_proj": stored["up_proj"]}
    wanted = float((expert_output(only_up, 1, rows) - exact).square().mean())
    assert row(result, expert=1, projection="up_proj", method="gptq", bits=2)["loss"] == pytest.approx(wanted, rel=1e-4)
    size = sum(packed_bytes(*LAYER.shape(name), 2, Encoding(group_size=16, symmetric=False)) for name in GATED)
    assert found["bytes"] == size == sum(result.replicas[name][2].nbytes for name in GATED) // 5


def test_heldout_tokens_do_not_reach_the_replicas() -> None:
    inputs, weights = layer_inputs(), layer_weights()
    first = quantize_layer(inputs, weights, SILU, CONFIG)
    inputs.hidden[inputs.sequence % 4 == 3] *= -3.0
    second = quantize_layer(inputs, weights, SILU, CONFIG)
    for name in GATED:
        assert torch.equal(first.replicas[name][3].codes, second.replicas[name][3].codes)
    pick = {"expert": 0, "projection": WHOLE, "method": "gptq", "bits": 3}
    assert row(first, **pick)["loss"] != row(second, **pick)["loss"]


def test_an_expert_that_is_never_chosen_borrows_and_says_so() -> None:
    result = quantize_layer(layer_inputs(), layer_weights(), SILU, CONFIG)
    idle = row(result, expert=4, projection=WHOLE, method="gptq", bits=2)
    assert (idle["calibration_tokens"], idle["heldout_tokens"]) == (0, 0)
    assert idle["fallback"] == "borrowed_hessian"
    assert idle["measured_on"] == "borrowed"
    assert 0 < idle["loss"] < row(result, expert=4, projection=WHOLE, method="rtn", bits=2)["loss"]
    busy = row(result, expert=0, projection=WHOLE, method="gptq", bits=2)
    assert (busy["fallback"], busy["measured_on"]) == ("none", "heldout")


def test_an_expert_without_tokens_and_without_borrowing_is_rounded() -> None:
    config = CONFIG.model_copy(update={"borrow_tokens": 0})
    result = quantize_layer(layer_inputs(), layer_weights(), SILU, config)
    same = (row(result, expert=4, projection=WHOLE, method=method, bits=3)["loss"] for method in ("gptq", "rtn"))
    assert next(same) == next(same)


def test_batches_of_experts_change_nothing() -> None:
    inputs, weights = layer_inputs(), layer_weights()
    whole = quantize_layer(inputs, weights, SILU, CONFIG)
    small = CONFIG.model_copy(update={"working_memory": 1})
    assert len(list(expert_batches(LAYER, CONFIG))) == 1
    assert len(list(expert_batches(LAYER, small))) == LAYER.num_experts
    single = quantize_layer(inputs, weights, SILU, small)
    for a, b in zip(whole.rows, single.rows, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-2)
        assert (a["expert"], a["bits"], a["projection"], a["method"]) == (
            b["expert"],
            b["bits"],
            b["projection"],
            b["method"],
        )


@pytest.mark.parametrize("scales_inputs", [False, True])
def test_sums_in_parts_are_the_sums_of_all(monkeypatch: pytest.MonkeyPatch, scales_inputs: bool) -> None:
    """More tokens than are multiplied at once: the Hessians, and what an expert without tokens borrows of them."""
    inputs, weights = layer_inputs(), layer_weights()
    if scales_inputs:
        kind = next(one for one in KINDS if one.scales_inputs)
        inputs = replace(inputs, layer=replace(LAYER, kind=kind))
    whole = quantize_layer(inputs, weights, SILU, CONFIG)
    monkeypatch.setattr("moeq.quantizers.layer_data.PART_BYTES", 3 * 4 * LAYER.hidden_size * 7)
    parts = quantize_layer(inputs, weights, SILU, CONFIG)
    traces = [[one["hessian_trace"] for one in found.rows if one["hessian_trace"]] for found in (whole, parts)]
    assert traces[1] == pytest.approx(traces[0], rel=1e-5)
    assert [one["loss"] for one in parts.rows] == pytest.approx([one["loss"] for one in whole.rows], rel=2e-2)


def test_weights_that_are_not_numbers_name_the_matrix() -> None:
    weights = layer_weights()
    weights["up_proj"][2, 0, 0] = torch.nan
    with pytest.raises(QuantizationError, match=r"layers\.0\.experts, expert 2, up_proj, 1 bit: gptq gave scales"):
        quantize_layer(layer_inputs(), weights, SILU, CONFIG)


@pytest.mark.full
def test_gptq_beats_rtn_on_the_bundled_model(tmp_path: Path) -> None:
    """At every width, in the mean over experts and in nearly every single one, and more bits lose less."""
    overrides = ["corpus.sequences=48", "corpus.sequence_length=256", "losses.group_size=64"]
    recipe = load_recipe(None, overrides)
    context = Context(recipe=recipe, model_name="bundled:tiny-mixtral", out=tmp_path)
    losses_stage.run(context)
    table = load_losses(context)
    gptq, rtn = ([*table.matrix(method, "relative_loss")] for method in ("gptq", "rtn"))
    previous = np.inf
    for bits in (1, 2, 3, 4, 8):
        mine = np.concatenate([layer[bits] for layer in gptq])
        other = np.concatenate([layer[bits] for layer in rtn])
        assert mine.mean() < 0.8 * other.mean(), bits
        assert (mine < other).mean() > 0.9, bits
        assert mine.mean() < previous
        previous = mine.mean()


def test_act_order_changes_all_widths_but_one_bit_and_loses_little_or_less() -> None:
    inputs, weights = layer_inputs(), layer_weights()
    plain = quantize_layer(inputs, weights, SILU, CONFIG)
    ordered = quantize_layer(inputs, weights, SILU, CONFIG.model_copy(update={"act_order": True}))
    for name in GATED:
        same = [torch.equal(plain.replicas[name][b].codes, ordered.replicas[name][b].codes) for b in (1, 2, 3, 4, 8)]
        assert same == [True, False, False, False, False]
    for bits in (2, 3, 4):
        losses = [
            sum(r["loss"] for r in result.rows if (r["projection"], r["method"], r["bits"]) == (WHOLE, "gptq", bits))
            for result in (ordered, plain)
        ]
        assert losses[0] < 1.05 * losses[1]


def test_clipping_loses_less_at_few_bits_and_leaves_one_bit_alone() -> None:
    inputs, weights = layer_inputs(), layer_weights()
    whole = quantize_layer(inputs, weights, SILU, CONFIG)
    clipped = quantize_layer(inputs, weights, SILU, CONFIG.model_copy(update={"clip": "mse"}))
    for name in GATED:
        same = [torch.equal(whole.replicas[name][b].codes, clipped.replicas[name][b].codes) for b in (1, 2, 3)]
        assert same == [True, False, False]

    def total(result: LayerResult, method: str, bits: int) -> float:
        return sum(r["loss"] for r in result.rows if (r["projection"], r["method"], r["bits"]) == (WHOLE, method, bits))

    for method in ("gptq", "rtn"):
        assert total(clipped, method, 2) < 0.9 * total(whole, method, 2)
        for bits in (3, 4, 8):
            assert total(clipped, method, bits) < 1.1 * total(whole, method, bits)


@pytest.mark.parametrize("everyone", [False, True])
def test_hessians_are_weighted_by_squared_routing_weights(everyone: bool) -> None:
    """As an expert's error enters the layer's output; for a token that is not its own the mean weight stands in."""
    inputs, weights = layer_inputs(), layer_weights()
    wanted = {"hessian_weighting": "squared", "borrow_tokens": 0, "tokens": "all" if everyone else "routed"}
    config = CONFIG.model_copy(update=wanted)
    tokens = RoutedTokens.of(inputs, config)
    batch = ExpertBatch(which=slice(1, 3), weights={n: w[1:3] for n, w in weights.items()}, biases={}, math=SILU)
    first, second = Statistics(tokens=tokens, batch=batch, settings=config, notes=[Note(), Note()]).hessians()
    for place, expert in enumerate((1, 2)):
        chosen = inputs.experts == expert
        rows = (inputs.sequence % 4 != 3) & (chosen.any(1) | everyone)
        squared = torch.where(chosen.any(1), (inputs.weights * chosen).sum(1), inputs.weights.mean(1)).square()[rows]
        hidden = inputs.hidden[rows]
        gate, up, _ = (weights[name][expert] for name in GATED)
        inner = nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)
        for found, of in ((first[place], hidden), (second[place], inner)):
            torch.testing.assert_close(found, (of * squared[:, None]).T @ of / squared.sum(), rtol=1e-4, atol=1e-5)


def test_a_routing_weight_that_multiplies_inputs_is_counted_once() -> None:
    """Where inputs were multiplied by it, outputs are not: weighted Hessians are the others."""
    kind = next(one for one in KINDS if one.scales_inputs)
    inputs = replace(layer_inputs(), layer=replace(LAYER, kind=kind))
    plain, weighted = (
        quantize_layer(inputs, layer_weights(), SILU, CONFIG.model_copy(update={"hessian_weighting": how}))
        for how in ("none", "squared")
    )
    for name in GATED:
        assert torch.equal(plain.replicas[name][2].codes, weighted.replicas[name][2].codes)


def test_weighted_hessians_lose_less_of_the_layers_output() -> None:
    """Tokens of two kinds, of different inputs, of which one kind has a tenth of the other's routing weight."""
    inputs, weights = layer_inputs(never=None), layer_weights()
    faint = torch.arange(len(inputs.hidden)) % 2 == 1
    inputs.hidden[faint] = 4 * inputs.hidden[faint].flip(1)
    inputs = replace(inputs, weights=torch.where(faint[:, None], 0.1, 1.0).expand(-1, 2))
    totals = []
    for how in ("none", "squared"):
        found = quantize_layer(inputs, weights, SILU, CONFIG.model_copy(update={"hessian_weighting": how})).rows
        here = (one for one in found if (one["projection"], one["method"], one["bits"]) == (WHOLE, "gptq", 2))
        totals.append(sum(float(one["weighted_loss"]) for one in here))
    assert totals[1] < 0.9 * totals[0]
