"""What a model needs beside its experts: weights once, caches by their kind, activations that grow with the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_models import build

from moeq.models.experts import find_expert_layers
from moeq.runtime.dynamic.needs import ACTIVATIONS, CACHE, WEIGHTS, activation_bytes, kept_bytes, other_bytes


def held(model: Any, tokens: int) -> int:
    """Bytes of the keys and values after a text, as the model's cache has them."""
    with torch.no_grad():
        cache = model(input_ids=torch.randint(0, 30, (1, tokens)), use_cache=True).past_key_values
    return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_keys_and_values_are_what_the_cache_holds(family: str) -> None:
    model = build(family, sliding_window=None) if family != "deepseek_v3" else build(family)
    assert kept_bytes(model, 40) == held(model, 40)


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


def test_activations_grow_with_the_text_and_hold_the_stream() -> None:
    model = build("mixtral")
    short, long = activation_bytes(model, 64), activation_bytes(model, 4096)
    assert short > 64 * model.config.hidden_size * 4
    assert long > 32 * short
