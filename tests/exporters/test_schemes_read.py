"""Which scheme of a compressed-tensors configuration is a module's, where several are: the library's own answer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch import nn

from moeq.exporters.readers.compressed import CompressedTensors

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PLACES = [f"model.layers.{layer}.mlp.experts.{expert}.{name}" for layer in (0, 1) for expert in (0, 1, 2)
          for name in PROJECTIONS]  # fmt: skip
NAMES = [*PLACES, "model.layers.1.self_attn.q_proj", "lm_head"]
TARGETS = [
    "Linear", "Module", "re:.*experts.*", "re:.*down_proj", r"re:.*layers\.0.*", "re:model.*gate_proj$", "re:experts",
    "lm_head", "re:.*self_attn.*", "re:.*1.*up_proj", *PLACES[:6],
]  # fmt: skip


def model() -> nn.Module:
    whole = nn.Module()
    for name in NAMES:
        module, (*path, leaf) = whole, name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.add_module(leaf, nn.Linear(32, 32, bias=False))
    return whole


def drawn(draw: random.Random) -> dict[str, Any]:
    """Groups of which several are for one module; some with the same target."""
    groups = {
        f"group_{number}": {
            "targets": draw.sample(TARGETS, draw.randint(1, 4)),
            "weights": {
                "num_bits": draw.choice([2, 3, 4, 8]), "type": "int", "symmetric": draw.random() < 0.5,
                "group_size": draw.choice([8, 16, 32]), "strategy": "group",
            },
        }
        for number in range(draw.randint(1, 4))
    }  # fmt: skip
    ignore = draw.sample(TARGETS[2:], draw.randint(0, 2)) if draw.random() < 0.9 else ["Linear"]
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "initialized",
        "config_groups": groups, "ignore": ignore,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_the_scheme_of_every_module_is_the_library_s(seed: int) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="pip install compressed-tensors")
    draw = random.Random(seed)
    for _ in range(15):
        declared, made = drawn(draw), model()
        quantization.apply_quantization_config(made, quantization.QuantizationConfig(**declared), show_progress=False)
        layout = CompressedTensors(declared)
        for name in NAMES:
            scheme, grid = getattr(made.get_submodule(name), "quantization_scheme", None), layout.grid((name, name))
            wanted = None if scheme is None else scheme.weights
            stated = None if wanted is None else (wanted.num_bits, wanted.group_size, wanted.symmetric)
            assert (None if grid is None else (grid.bits, grid.group_size, grid.symmetric)) == stated, (name, declared)
