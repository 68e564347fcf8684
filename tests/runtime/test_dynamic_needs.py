"""What a model needs beside its experts: weights once, caches by their kind, activations that grow with the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_models import build
from packed_layers import matrix_of

from moeq.models.experts import find_expert_layers
from moeq.models.forward import cache_name
from moeq.runtime.dynamic.needs import (
    ACTIVATIONS,
    CACHE,
    WEIGHTS,
    activation_bytes,
    kept_bytes,
    other_bytes,
    weights_bytes,
)
from moeq.runtime.packed_modules import PackedModule
from moeq_kernels.widths import Encoding


def held(model: Any, tokens: int) -> int:
    """Bytes of the keys and values after a text, as the model's cache has them."""
    with torch.no_grad():
        cache = getattr(model(input_ids=torch.randint(0, 30, (1, tokens)), use_cache=True), cache_name(model))
    return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_keys_and_values_are_what_the_cache_holds(family: str) -> None:
    model = build(family, sliding_window=None) if family != "deepseek_v3" else build(family)
    assert kept_bytes(model, 40) == held(model, 40)


def test_states_beside_a_caches_layers_are_kept_too() -> None:
    """MiniMax: one layer of three has a state of 4 heads, 8 by 8 numbers in float32; no layer of the cache has it."""
    model = build("minimax", sliding_window=None)
    assert kept_bytes(model, 40) == 4 * 4 * 8 * 8 + 2 * 40 * 2 * 2 * 8 * 4


def test_a_sliding_window_keeps_no_more_than_it_is_long() -> None:
    whole = build("mixtral", sliding_window=None)
    for window in (8, 16):
        model = build("mixtral", sliding_window=window)
        for tokens in (6, 14, 100):  # transformers keeps one token less, and a few bytes that say where it is
            least, most = (kept_bytes(whole, min(tokens, window + more)) for more in (-1, 0))
            assert least <= kept_bytes(model, tokens) <= max(most, kept_bytes(whole, window)) + 64


def test_all_of_it_by_name() -> None:
    model = build("qwen3_moe")
    layers = find_expert_layers(model)
    experts = sum(one.nbytes for layer in layers for one in model.get_submodule(layer.name).parameters())
    every = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    one, two = (other_bytes(model, layers, context=64, batch=batch) for batch in (1, 2))
    assert set(one) == {WEIGHTS, CACHE, ACTIVATIONS}
    assert one[WEIGHTS] == two[WEIGHTS] == every - experts
    assert two[CACHE] == 2 * one[CACHE] == 2 * kept_bytes(model, 64)
    assert two[ACTIVATIONS] > one[ACTIVATIONS]


def test_packed_weights_beside_the_experts_are_counted_as_a_kernel_holds_them() -> None:
    """Small groups of few bits take twice what is stored, each filled up to whole units."""
    model = build("mixtral")
    layers, name = find_expert_layers(model), "model.layers.0.self_attn.q_proj"
    original = model.get_submodule(name)
    packed = PackedModule(original, 3, Encoding(group_size=8, symmetric=False))
    matrix = matrix_of(*original.weight.shape, 3, 8)
    for part, tensor in matrix.parts().items():
        packed.get_buffer(part).copy_(tensor)
    beside = weights_bytes(model, layers) - original.weight.nbytes
    model.set_submodule(name, packed)
    model.eval()
    found = weights_bytes(model, layers)
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    assert packed.prepared is not None
    assert found == beside + packed.get_buffer("weight").nbytes + packed.prepared.nbytes > beside + 2 * matrix.nbytes
    assert weights_bytes(model, layers) == found


def test_activations_grow_with_the_text_and_hold_the_stream() -> None:
    model = build("mixtral")
    short, long = activation_bytes(model, 64), activation_bytes(model, 4096)
    assert short > 64 * model.config.hidden_size * 4
    assert long > 32 * short
