"""Every quantizer of the registry: what is stored is what was measured, and what its file declares is so.

One that takes no matrices of 37 x 23 makes its codes in a test of its own (tests/quantizers/test_exl3.py).
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeq.artifacts.losses import WHOLE
from moeq.errors import QuantizationError, RecipeError
from moeq.models.experts import DOWN, ExpertLayer, ExpertMath
from moeq.models.kinds import GATED
from moeq.models.kinds.base import ActThenMultiply
from moeq.models.walk import LayerInputs
from moeq.numerics import storing
from moeq.numerics.gptq import Quantized
from moeq.quantizers.layer import LayerResult, expert_batches, made_on_demand, quantize_layer
from moeq.quantizers.layer_data import SAMPLE_TOKENS, RoutedTokens
from moeq.quantizers.quantizer import BatchSizes, Quantizer
from moeq.recipe import LossesSection, load_recipe
from moeq.registry import QUANTIZERS
from moeq_kernels.grids import decode
from moeq_kernels.packed import PackedWeight

LAYER = ExpertLayer(index=3, name="layers.3.experts", num_experts=4, hidden_size=37, intermediate_size=23)
DEAD, RARE = 2, 3  # experts without a token, and with one to calibrate on
SILU = ExpertMath(gate=ActThenMultiply(nn.SiLU()))
TOKENS, SEQUENCES = 24, 8
GROUP = 16  # divides neither size

every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda one: one.name)
ANY_SIDES = [one for one in QUANTIZERS if one.sides == 1]
every_one_here = pytest.mark.parametrize("quantizer", ANY_SIDES, ids=lambda one: one.name)


def section(quantizer: Quantizer, **settings: Any) -> LossesSection:
    few = {key: 3 for key in quantizer.settings.model_fields if key.endswith("_iterations")}
    common = {
        "bits": quantizer.widths,
        "methods": [quantizer.name],
        "group_size": GROUP,
        "min_tokens": 4,
        "clip": "minmax",
    }
    return LossesSection.model_validate(common | few | settings)


def options() -> list[Any]:
    """Every quantizer on every grid that it declares, and with what else it declares."""
    found = []
    for one in ANY_SIDES:
        grids = {
            grid: {} if grid == "asymmetric" else {"symmetric": True, "symmetric_range": grid} for grid in one.grids
        }
        more: dict[str, dict[str, Any]] = {
            "whole rows": {"group_size": -1},
            "clip": {"clip": "mse"} if one.clip else {},
            "symmetric, clip": {"clip": "mse", "symmetric": True} if one.clip and "even" in one.grids else {},
            "act_order": {"act_order": True} if one.act_order else {},
            "act_order, clip": {"act_order": True, "clip": "mse"} if one.act_order and one.clip else {},
            "nested": {"nested": True} if one.nested else {},
            "nested, symmetric, clip": {"nested": True, "symmetric": True, "clip": "mse"} if one.nested else {},
        }
        there = grids | {name: settings for name, settings in more.items() if settings}
        found += [pytest.param(one, settings, id=f"{one.name}, {name}") for name, settings in there.items()]
    return found


def layer_inputs(hidden: Tensor | None = None) -> LayerInputs:
    """Tokens of two busy experts; one calibration token of RARE, none of DEAD."""
    generator = torch.Generator().manual_seed(0)
    count = TOKENS * SEQUENCES
    experts = torch.randint(2, (count, 1), generator=generator)
    experts[5] = RARE
    index = torch.arange(count)
    hidden = torch.randn(count, LAYER.hidden_size, generator=generator) if hidden is None else hidden
    return LayerInputs(
        layer=LAYER, hidden=hidden + 0.8 * hidden.roll(1, -1), experts=experts, weights=torch.ones(count, 1),
        sequence=index // TOKENS, position=index % TOKENS,
    )  # fmt: skip


def layer_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: 0.1 * torch.randn(LAYER.num_experts, *LAYER.shape(name), generator=generator) for name in GATED}


def quantized(quantizer: Quantizer, **settings: Any) -> LayerResult:
    return quantize_layer(layer_inputs(), layer_weights(), SILU, section(quantizer, **settings))


def replica(
    quantizer: Quantizer, result: LayerResult, config: LossesSection, bits: int, expert: int
) -> dict[str, PackedWeight]:
    """One expert as it is kept, or as it is made again."""
    if quantizer.stored:
        return {name: result.replicas[name][bits].map(lambda part: part[expert]) for name in GATED}
    exact = {name: stack[expert] for name, stack in layer_weights().items()}
    return made_on_demand(quantizer.name, exact, config, bits, layer=LAYER, expert=expert)


def codes(quantizer: Quantizer, **settings: Any) -> bytes:
    """All parts of all replicas, on end."""
    config = section(quantizer, **settings)
    result = quantize_layer(layer_inputs(), layer_weights(), SILU, config)
    found = [
        part
        for bits in config.bits
        for expert in range(LAYER.num_experts)
        for packed in replica(quantizer, result, config, bits, expert).values()
        for part in packed.parts().values()
    ]
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in found)


def expert_loss(replaced: dict[str, Tensor], exact: dict[str, Tensor], rows: Tensor) -> float:
    outputs = [SILU.output(SILU.intermediate(rows, one, {}), one[DOWN], None) for one in (replaced, exact)]
    return float((outputs[0] - outputs[1]).square().mean(1).mean())


@pytest.mark.cases(9)
@pytest.mark.parametrize(("quantizer", "settings"), options())
def test_the_stored_values_are_the_measured_ones(
    monkeypatch: pytest.MonkeyPatch, quantizer: Quantizer, settings: dict[str, Any]
) -> None:
    """Bit for bit: packing changes no value, and the same products of the stored weights give the very losses."""
    packings: list[tuple[Quantized, int, PackedWeight]] = []
    pack = storing.packed_of

    def recorded(made: Quantized, bits: int, *grid: Any) -> PackedWeight:
        packings.append((made, bits, pack(made, bits, *grid)))
        return packings[-1][2]

    monkeypatch.setattr(storing, "packed_of", recorded)
    inputs, config = layer_inputs(), section(quantizer, **settings)
    result = quantize_layer(inputs, layer_weights(), SILU, config)
    packed_here = quantizer.encoding is None  # others pack what they make by themselves
    assert len(packings) == packed_here * len(GATED) * len(quantizer.widths)
    for made, bits, packed in packings:
        at = made.bits.index(bits)
        own = decode(made.codes[:, at], made.scale[:, at], made.zero[:, at], made.group_size)
        assert torch.equal(packed.dequantize(), own), bits
    rows = RoutedTokens.of(inputs, config).routed(1, heldout=True)
    exact = {name: stack[1] for name, stack in layer_weights().items()}
    table = {(row["expert"], row["bits"], row["projection"]): row["loss"] for row in result.rows}
    for bits in config.bits:
        stored = {name: one.dequantize() for name, one in replica(quantizer, result, config, bits, 1).items()}
        for projection in (WHOLE, *GATED):
            replaced = stored if projection == WHOLE else exact | {projection: stored[projection]}
            assert table[1, bits, projection] == expert_loss(replaced, exact, rows), (bits, projection)


@every_one_here
def test_experts_with_one_token_or_none_get_finite_losses(quantizer: Quantizer) -> None:
    rows = [row for row in quantized(quantizer).rows if row["projection"] == WHOLE]
    assert {row["expert"]: row["calibration_tokens"] for row in rows}.items() >= {DEAD: 0, RARE: 1}.items()
    for row in rows:
        assert 0 <= row["loss"] < float("inf")
        assert (row["hessian_trace"] is None) == (not quantizer.knows_hessians)
        borrowed = "borrowed_hessian" in row["fallback"]
        assert borrowed == (quantizer.knows_hessians and row["expert"] in (DEAD, RARE))
    widths = quantizer.widths
    most, least = ([row["loss"] for row in rows if row["bits"] == bits] for bits in (max(widths), max(2, min(widths))))
    assert sum(most) < sum(least)


@pytest.mark.cases(2)
@every_one_here
def test_the_same_bytes_whenever_and_at_whatever_widths(quantizer: Quantizer) -> None:
    every = codes(quantizer)
    assert codes(quantizer) == every
    assert b"".join(codes(quantizer, bits=[bits]) for bits in quantizer.widths) == every


@pytest.mark.cases(3)
@every_one_here
def test_batches_of_experts_change_nothing(quantizer: Quantizer) -> None:
    """To the bit where replicas are made on demand, an expert at a time, of what was measured in batches."""
    assert len(list(expert_batches(LAYER, section(quantizer, working_memory=1)))) == LAYER.num_experts
    together, apart = ([row["loss"] for row in quantized(quantizer, **one).rows] for one in ({}, {"working_memory": 1}))
    assert apart == (pytest.approx(together, rel=2e-2) if quantizer.stored else together)


@pytest.mark.cases(8)
@every_one_here
@pytest.mark.parametrize(("key", "value"), [("act_order", True), ("clip", "mse")])
def test_its_codes_hang_on_what_it_says_they_do(quantizer: Quantizer, key: str, value: object) -> None:
    bits = [one for one in quantizer.widths if one in (2, 3)] or list(quantizer.widths)
    assert (codes(quantizer, bits=bits, **{key: value}) != codes(quantizer, bits=bits)) == getattr(quantizer, key)


@pytest.mark.cases(17)
@every_one_here
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["weights", "tokens"])
def test_numbers_that_are_none_are_one_error_that_names_the_expert(
    quantizer: Quantizer, value: float, where: str
) -> None:
    weights, inputs = layer_weights(), layer_inputs()
    if where == "weights":
        weights["up_proj"][1, 4, 2] = value
    else:
        inputs.hidden[inputs.experts[:, 0] == 1] = value
    with pytest.raises(QuantizationError, match=rf"{LAYER.name}, expert {1 if where == 'weights' else '[0-3]'}, "):
        quantize_layer(inputs, weights, SILU, section(quantizer))


@every_quantizer
def test_what_it_cannot_do_is_refused_with_the_recipe(quantizer: Quantizer) -> None:
    recipe = [f"losses.methods=[{quantizer.name}]", f"assign.quantizer={quantizer.name}", "eval.compare=[]"]
    recipe += [f"losses.bits={list(quantizer.widths)}"]
    for grid in ("narrow", "full"):
        asked = [*recipe, "losses.symmetric=true", f"losses.symmetric_range={grid}"]
        if grid in quantizer.grids:
            load_recipe(None, asked)
        else:
            with pytest.raises(RecipeError, match=f"symmetric_range: {grid} cannot go with {quantizer.name}"):
                load_recipe(None, asked)
    if not quantizer.nested:
        with pytest.raises(RecipeError, match=f"nested cannot go with {quantizer.name}; leave"):
            load_recipe(None, [*recipe, "losses.nested=true"])


@every_quantizer
def test_it_is_documented(quantizer: Quantizer) -> None:
    module = import_module(quantizer.quantize.__module__)
    assert quantizer.label
    assert quantizer.help
    assert len(quantizer.help) <= 100
    assert "\n" not in quantizer.help
    for found in (module, quantizer.quantize, quantizer.memory):
        assert inspect.getdoc(found), found
    for name, field in quantizer.settings.model_fields.items():
        assert field.description, name
        assert name in LossesSection.model_fields


@pytest.mark.cases(1)
@every_one_here
def test_memory_is_near_what_it_says(quantizer: Quantizer) -> None:
    """Against torch's own count of a CPU's tensors; the working memory and the column loop's are bounds."""
    layer = ExpertLayer(index=0, name="layers.0.experts", num_experts=6, hidden_size=384, intermediate_size=320)
    count, generator = 48 * SEQUENCES, torch.Generator().manual_seed(0)
    inputs = LayerInputs(
        layer=layer, hidden=torch.randn(count, layer.hidden_size, generator=generator),
        experts=torch.arange(count)[:, None] % 6, weights=torch.ones(count, 1),
        sequence=torch.arange(count) // 48, position=torch.arange(count) % 48,
    )  # fmt: skip
    weights = {name: 0.1 * torch.randn(6, *layer.shape(name), generator=generator) for name in GATED}
    bits = [one for one in quantizer.widths if one in (2, 4)]
    config = section(quantizer, bits=bits, working_memory=2**26, per_projection=False)
    sizes = BatchSizes(layer=layer, settings=config, experts=6, tokens=count // 6, lent=min(count, SAMPLE_TOKENS))
    said = 4 * sum(map(Tensor.numel, weights.values())) + max(
        max(part.memory(sizes)) for part in quantizer.chain()
    )  # a batch's weights, and what is held beside them
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        quantize_layer(inputs, weights, SILU, config)
    events = [one for one in profile.profiler.kineto_results.events() if one.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert said / 4 < peak < 2 * said


def test_declarations_import_no_torch() -> None:
    code = (
        "import sys\n"
        "import moeq.recipe\n"
        "from moeq.registry import QUANTIZERS\n"
        "assert [one.label for one in QUANTIZERS]\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
