"""Packed linears, embeddings and tied heads compute what their dequantized weights compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_models import build
from packed_layers import matrix_of, trellis_of
from torch import nn

from moeq.errors import ArtifactError
from moeq.models.experts import find_expert_layers
from moeq.numerics import gptq
from moeq.numerics.storing import packed_of
from moeq.runtime.packed_experts import PackedExperts
from moeq.runtime.packed_modules import (
    GUARD_SHAPE,
    PackedEmbedding,
    PackedModule,
    TiedHead,
    replace_modules,
)
from moeq_kernels import choice
from moeq_kernels.checkpoint import Others
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import DROPPED, Encoding


def packed_weight(weight: torch.Tensor, bits: int, symmetric: bool) -> PackedWeight:
    made = gptq.quantize(weight.detach().unsqueeze(0), None, bits=[bits], group_size=16, symmetric=symmetric)
    return packed_of(made, bits, symmetric).map(lambda part: part[0])


def fill(module: nn.Module, weight: PackedWeight) -> None:
    for part, tensor in weight.parts().items():
        buffer = module.get_buffer(part)
        assert (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)
        buffer.copy_(tensor)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_linear_is_its_dequantized_linear(bits: int, symmetric: bool, biased: bool) -> None:
    original = nn.Linear(40, 24, bias=biased)
    weight = packed_weight(original.weight, bits, symmetric)
    packed = PackedModule(original, bits, Encoding(group_size=16, symmetric=symmetric))
    fill(packed, weight)
    if biased:
        packed.get_buffer("bias").copy_(original.bias)
    with torch.no_grad():
        original.weight.copy_(weight.dequantize())
    for rows in (torch.randn(2, 5, 40), torch.randn(40), torch.randn(0, 3, 40)):
        assert torch.equal(packed.train()(rows), original(rows))
        torch.testing.assert_close(packed.eval()(rows), original(rows), rtol=1e-4, atol=1e-4)
    assert (packed.in_features, packed.out_features) == (40, 24)
    assert tuple(packed.state_dict()["weight"].shape) == GUARD_SHAPE
    assert ("zeros" in packed.state_dict()) == (not symmetric)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast_reaches_packed_modules_as_it_does_linears(dtype: torch.dtype, training: bool, compiled: bool) -> None:
    """The type of what a linear gives, and of a head that shares the embeddings, with and without gradients."""
    original = nn.Linear(64, 32, dtype=dtype)
    encoding = Encoding(group_size=16, symmetric=False)
    linear, embeddings = (
        PackedModule(original, 4, encoding),
        PackedEmbedding(nn.Embedding(32, 64, dtype=dtype), 4, encoding),
    )
    weight = packed_weight(original.weight.float(), 4, False)
    fill(linear, weight)
    fill(embeddings, weight)
    linear.get_buffer("bias").copy_(original.bias)
    with torch.no_grad():
        original.weight.copy_(weight.dequantize())
    head = TiedHead(nn.Linear(64, 32, bias=False), embeddings)
    for module in (linear, embeddings, head):
        module.train(training)
    rows = torch.randn(3, 64, dtype=dtype)
    for gradients in (False, True):
        given = rows.clone().requires_grad_(gradients)
        with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16):
            wanted = original(given)
            found = [(torch.compile(one, backend="eager") if compiled else one)(given) for one in (linear, head)]
        for one in found:
            assert one.dtype == wanted.dtype
            assert one.requires_grad == gradients
        torch.testing.assert_close(found[0], wanted, rtol=0.02, atol=0.02)
        torch.testing.assert_close(found[1], wanted - original.bias.to(wanted.dtype), rtol=0.02, atol=0.02)
        if gradients:
            found[0].sum().backward()
            torch.testing.assert_close(given.grad, original.weight.sum(0).expand(3, -1), rtol=0.02, atol=0.02)
    assert linear(rows).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_dequantizes_what_is_looked_up(dtype: torch.dtype) -> None:
    original = nn.Embedding(60, 40, padding_idx=2, dtype=dtype)
    weight = packed_weight(original.weight, 4, False)
    packed = PackedEmbedding(original, 4, Encoding(group_size=16, symmetric=False))
    fill(packed, weight)
    with torch.no_grad():
        original.weight.copy_(weight.dequantize())
    ids = torch.tensor([[3, 59, 0], [2, 2, 7]])
    found = packed(ids)
    assert found.dtype == dtype
    assert torch.equal(found, original(ids))
    assert packed.padding_idx == 2


def test_an_embedding_of_no_ids_is_empty() -> None:
    embeddings = PackedEmbedding(nn.Embedding(70, 50, dtype=torch.bfloat16), 2, Encoding.trellis(10))
    none = torch.zeros(2, 0, dtype=torch.int64)
    embeddings.prepared, _ = choice.prepared_linear(trellis_of(70, 50, 2, 10), None, torch.device("cpu"), "fixed")
    for _ in range(2):
        found = embeddings(none)
        assert (tuple(found.shape), found.dtype) == ((2, 0, 50), torch.bfloat16)
        embeddings.prepared = None


@pytest.mark.parametrize("state_bits", [0, 10])
def test_tokens_that_there_are_not_are_refused_as_by_an_embedding(state_bits: int) -> None:
    """Not the last row, nor what fills up the last block of a kernel."""
    encoding = Encoding.trellis(state_bits) if state_bits else Encoding(group_size=16, symmetric=False)
    embeddings = PackedEmbedding(nn.Embedding(50, 32), 2, encoding)
    weight = matrix_of(50, 32, 2, 16, state_bits=state_bits)
    assert isinstance(weight, PackedWeight)
    fill(embeddings, weight)
    embeddings.prepared, _ = choice.prepared_linear(weight, None, torch.device("cpu"), "fixed")
    for _ in range(2):
        assert embeddings(torch.tensor([0, 49])).any()
        for token in (-1, 50):
            with pytest.raises(IndexError, match=f"tokens {min(token, 0)} to {max(token, 0)}, of 50"):
                embeddings(torch.tensor([[0, token]]))
        embeddings.prepared = None


def test_a_tied_head_has_no_tensor_of_its_own() -> None:
    table, head = nn.Embedding(60, 40), nn.Linear(40, 60)
    weight = packed_weight(table.weight, 3, False)
    embeddings = PackedEmbedding(table, 3, Encoding(group_size=16, symmetric=False))
    fill(embeddings, weight)
    tied = TiedHead(head, embeddings)
    tied.get_buffer("bias").copy_(head.bias)
    rows = torch.randn(4, 40)
    wanted = nn.functional.linear(rows, weight.dequantize(), head.bias)
    assert torch.equal(tied(rows), wanted)
    assert set(tied.state_dict()) == {"bias"}
    assert not list(TiedHead(nn.Linear(40, 60, bias=False), embeddings).state_dict())


def widths(bits: dict[str, int], tied: dict[str, str] | None = None) -> Others:
    return Others(bits=bits, encoding=Encoding(group_size=16, symmetric=False), tied=tied or {})


def test_modules_are_put_in_place_and_no_longer_tied() -> None:
    model: Any = build("cohere2_moe")
    assert model.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    replace_modules(model, widths({"model.embed_tokens": 8}, {"model.embed_tokens": "lm_head"}))
    assert isinstance(model.get_input_embeddings(), PackedEmbedding)
    assert isinstance(model.get_output_embeddings(), TiedHead)
    assert model.all_tied_weights_keys == {}
    other: Any = build("cohere2_moe")
    replace_modules(other, widths({"model.layers.0.self_attn.q_proj": 4}))
    assert other.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("name", ["model.nowhere", "model.layers.0.input_layernorm", "model.layers.1.mlp.experts"])
def test_a_module_that_cannot_be_packed_is_refused(name: str) -> None:
    with pytest.raises(ArtifactError, match=f"config.json, {name}.*export the checkpoint again"):
        replace_modules(build("mixtral"), widths({name: 4}))


def test_a_printed_model_says_sizes_widths_and_encoding_of_what_is_packed() -> None:
    """Of a layer's experts in a line and one for each matrix, however many they are; a dropped one is counted."""
    grid = Encoding(group_size=16, symmetric=True)
    linear = PackedModule(nn.Linear(64, 32), 4, grid)
    assert repr(linear) == (
        "PackedModule(in_features=64, out_features=32, bias=True, bits=4, group_size=16, symmetric=True)"
    )
    embeddings = PackedEmbedding(nn.Embedding(96, 64), 2, Encoding.trellis(10))
    assert repr(embeddings) == "PackedEmbedding(in_features=64, out_features=96, bias=False, bits=2, state_bits=10)"
    head = TiedHead(nn.Linear(64, 96, bias=False), embeddings)
    assert repr(head) == "TiedHead(in_features=64, out_features=96, bias=False)"

    model = build("mixtral")
    layer = find_expert_layers(model)[0]
    original = model.get_submodule(layer.name)
    mixed = {"gate_proj": 2, "up_proj": 2, "down_proj": 16}
    widths = [DROPPED, mixed, *[3] * (layer.num_experts - 2)]
    experts = PackedExperts(layer, widths, encoding=grid, original=original, dtype=torch.float32)
    count = layer.num_experts - 2
    assert repr(experts).splitlines() == [
        "PackedExperts(",
        f"  {layer.num_experts} experts, 1 dropped, group_size=16, symmetric=True",
        f"  gate_proj: 1 of 2 bits, {count} of 3 bits",
        f"  up_proj: 1 of 2 bits, {count} of 3 bits",
        f"  down_proj: {count} of 3 bits, 1 of 16 bits",
        *(f"  ({name}): {child!r}" for name, child in original.named_children()),
        ")",
    ]
