"""Tensors as vLLM and SGLang hand them over: what does not go with config.json is refused, not cut to fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moeq_kernels.parts import LayerParts, LinearParts
from moeq_kernels.widths import DROPPED, FULL, Encoding

GRID = Encoding(group_size=16, symmetric=False)


@pytest.mark.parametrize("shape", [(40, 32), (24, 32), (32, 48)])
def test_a_dense_matrix_of_a_fused_layer_with_another_shape(shape: tuple[int, int]) -> None:
    layer, parts = nn.Module(), LinearParts("attn.qkv", GRID, {"attn.q": FULL}, [32], 32, torch.float32)
    parts.place(layer)
    parts.take("weight", layer.get_parameter("weight"), torch.ones(*shape), "q")
    with pytest.raises(ValueError, match=rf"moeq: attn.q: dense is \[{shape[0]}, {shape[1]}\], not \[32, 32\]; export"):
        parts.finish(layer)


def test_a_matrix_that_comes_again() -> None:
    """As where a running server is to have other weights."""
    layer, parts = nn.Module(), LinearParts("attn.qkv", GRID, {"attn.q": FULL}, [32], 32, torch.float32)
    parts.place(layer)
    given = ("weight", layer.get_parameter("weight"), torch.ones(32, 32), "q")
    parts.take(*given)
    parts.finish(layer)
    with pytest.raises(ValueError, match=r"moeq: attn.qkv: packed weights .*; start the server again"):
        parts.take(*given)


@pytest.mark.parametrize("wrong", [("gate_proj", "dense"), ("down_proj", "bias"), None])
def test_dense_experts_and_biases_with_other_shapes(wrong: tuple[str, str] | None) -> None:
    """On a device that has the first half of gate's and up's rows."""
    parts = LayerParts(
        "layers.0", GRID, [FULL, DROPPED], 2, (32, 64), torch.float32, lambda made: made["gate_proj"] * made["up_proj"],
        None, mine=slice(0, 32), biased=True,
    )  # fmt: skip
    sizes = {"gate_proj": (64, 32), "up_proj": (64, 32), "down_proj": (32, 64)}
    given = {(name, "dense"): torch.ones(*size) for name, size in sizes.items()}
    given |= {(name, "bias"): torch.ones(rows) for name, (rows, _) in sizes.items()}
    if wrong is not None:
        given[wrong] = torch.cat([given[wrong], given[wrong][:8]])
    *before, ((name, part), last) = given.items()
    for (projection, of), tensor in before:
        parts.take(0, projection, of, tensor)
    if wrong is None:
        parts.take(0, name, part, last)
        assert parts.finish() is not None
        with pytest.raises(ValueError, match=r"moeq: layers.0: packed weights .*; start the server again"):
            parts.take(0, name, part, last)
        return
    with pytest.raises(ValueError, match=rf"moeq: layers.0.0.\w+_proj: {wrong[1]} is .*; export the checkpoint again"):
        parts.take(0, name, part, last)
