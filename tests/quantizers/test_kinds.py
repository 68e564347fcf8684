"""Losses of every kind of expert are those of the family's own arithmetic; every expert on all tokens where asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_models import VOCABULARY, build

from moeq.artifacts.losses import WHOLE
from moeq.models.corpus import Sequences
from moeq.models.experts import expert_math, find_expert_layers, stacked_biases, stacked_weights
from moeq.models.walk import LayerInputs, walk
from moeq.quantizers.layer import LayerResult, quantize_layer
from moeq.recipe import LossesSection
from moeq.runtime.packed_experts import FULL, PACKED
from moeq_kernels.widths import Encoding

CONFIG = LossesSection(group_size=16, bits=[2, 3], min_tokens=4)


def seen(family: str) -> tuple[Any, LayerInputs]:
    """A model and what its last MoE layer is given."""
    model = build(family)
    ids = torch.randint(20, VOCABULARY, (8, 24), generator=torch.Generator().manual_seed(5))
    corpus = Sequences(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), domains=("x",) * 8)
    return model, list(walk(model, find_expert_layers(model), corpus.batches(4), torch.device("cpu")))[-1]


def quantized(model: Any, inputs: LayerInputs, config: LossesSection = CONFIG) -> LayerResult:
    every = slice(None)
    weights, biases = stacked_weights(model, inputs.layer, every), stacked_biases(model, inputs.layer, every)
    return quantize_layer(inputs, weights, expert_math(model, inputs.layer), config, biases)


@pytest.mark.parametrize(
    "family", ["gpt_oss", "nemotron_h", "llama4_text", "muse_spark", "dbrx", "switch_transformers"]
)
def test_the_loss_is_that_of_the_familys_own_arithmetic(family: str) -> None:
    model, inputs = seen(family)
    layer = inputs.layer
    result = quantized(model, inputs)
    module = PACKED[layer.kind.name](
        layer, [FULL] * layer.num_experts, encoding=Encoding(group_size=16, symmetric=False),
        original=model.get_submodule(layer.name), dtype=torch.float32,
    )  # fmt: skip
    with torch.no_grad():
        for which in (layer.kind.weights, layer.kind.biases):
            for name, stack in which(model.get_submodule(layer.name), slice(None)).items():
                for expert in range(layer.num_experts):
                    linear = module.get_submodule(f"{expert}.{name}")
                    (linear.dense if which == layer.kind.weights else linear.bias).copy_(stack[expert])
        busiest = int(
            torch.bincount(inputs.experts.flatten(), minlength=layer.num_experts)[: layer.num_experts].argmax()
        )
        mine = (inputs.experts == busiest) & (inputs.sequence % 4 == 3).unsqueeze(1)
        assert mine.any(1).sum() >= CONFIG.min_tokens
        rows = inputs.hidden[mine.any(1)]
        if layer.kind.scales_inputs:
            rows = rows * inputs.weights[mine].unsqueeze(1)
        exact = module.expert(busiest, rows)
        for name in (*layer.projections, WHOLE):
            replaced = layer.projections if name == WHOLE else (name,)
            for projection in replaced:
                stored = result.replicas[projection][2].dequantize()[busiest]
                module.get_submodule(f"{busiest}.{projection}").dense.copy_(stored)
            wanted = float((module.expert(busiest, rows) - exact).square().mean())
            (found,) = (
                row["loss"]
                for row in result.rows
                if (row["expert"], row["projection"], row["method"], row["bits"]) == (busiest, name, "gptq", 2)
            )
            assert found == pytest.approx(wanted, rel=1e-3)
            weights = layer.kind.weights(model.get_submodule(layer.name), slice(None))
            for projection in replaced:
                module.get_submodule(f"{busiest}.{projection}").dense.copy_(weights[projection][busiest])


def test_every_expert_calibrates_on_all_tokens_where_the_recipe_says_so() -> None:
    model, inputs = seen("mixtral")
    idle = LayerInputs(**vars(inputs) | {"experts": inputs.experts.where(inputs.experts != 3, 2)})
    routed = quantized(model, idle)
    everyone = quantized(model, idle, CONFIG.model_copy(update={"tokens": "all", "borrow_tokens": 0}))
    fallbacks = [
        {row["fallback"] for row in result.rows if row["expert"] == 3 and row["method"] == "gptq"}
        for result in (routed, everyone)
    ]
    assert fallbacks == [{"borrowed_hessian"}, {"none"}]
    assert {row["calibration_tokens"] for row in everyone.rows if row["expert"] == 3} == {0}
    calibration = LayerInputs(
        **vars(idle) | {"experts": torch.full_like(idle.experts, 3)}  # all tokens are its own: the same replicas
    )
    own = quantized(model, calibration, CONFIG.model_copy(update={"borrow_tokens": 0}))
    for projection, widths in own.replicas.items():
        assert torch.equal(widths[2].codes[3], everyone.replicas[projection][2].codes[3])
