"""Layers some of whose experts are dropped: kernels compute the others, and what goes to these adds nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moeq_kernels.choice import prepared_layer
from moeq_kernels.description import DOWN, LayerOfExperts, Matrix
from moeq_kernels.dropped import WithoutDropped
from moeq_kernels.packed import PackedWeight, packed_shapes, widened
from moeq_kernels.parts import LayerParts
from moeq_kernels.widths import DROPPED, Encoding

EXPERTS, HIDDEN, INTER, TOKENS, CHOSEN = 6, 32, 48, 9, 3
ENCODING = Encoding(group_size=16, symmetric=True)
SHAPES = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), DOWN: (HIDDEN, INTER)}
CPU = torch.device("cpu")
POLICIES = ("reference", "fixed")


def gate(parts: dict[str, Tensor]) -> Tensor:
    return torch.nn.functional.silu(parts["gate_proj"]) * parts["up_proj"]


def layer(gone: set[int], *, biased: bool = False) -> LayerOfExperts:
    """The same matrices for the same expert, whichever others are dropped."""
    matrices, biases = [], []
    for expert in range(EXPERTS):
        generator = torch.Generator().manual_seed(expert)
        own: dict[str, Matrix] = {}
        for name, (rows, inputs) in SHAPES.items():
            shapes = packed_shapes(rows, inputs, 4, ENCODING)
            parts = {
                "codes": torch.randint(0, 256, shapes["codes"][0], generator=generator, dtype=torch.uint8),
                "scales": torch.rand(shapes["scales"][0], generator=generator).half() / 10,
            }
            own[name] = PackedWeight.of(parts, 4, inputs, ENCODING)
        own_biases = {name: torch.randn(rows, generator=generator) for name, (rows, _) in SHAPES.items()}
        matrices.append({} if expert in gone else own)
        biases.append(own_biases if biased and expert not in gone else {})
    return LayerOfExperts(matrices=matrices, biases=biases, gate=gate, activation="silu")


def routed() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(TOKENS)])
    hidden, weights = torch.randn(TOKENS, HIDDEN, generator=generator), torch.rand(TOKENS, CHOSEN, generator=generator)
    return hidden, index, weights


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gone", [{2}, {0, 5}, {0, 1, 2, 3, 4}, set(range(EXPERTS))])
@pytest.mark.parametrize("biased", [False, True])
def test_what_goes_to_dropped_experts_adds_nothing(policy: str, gone: set[int], biased: bool) -> None:
    hidden, index, weights = routed()
    whole, _ = prepared_layer(layer(set(), biased=biased), CPU, policy)  # type: ignore[arg-type]
    mine, why = prepared_layer(layer(gone, biased=biased), CPU, policy)  # type: ignore[arg-type]
    assert isinstance(mine, WithoutDropped), why
    assert whole is not None
    beyond = index.clone()
    beyond[0], beyond[1, 0] = torch.tensor([EXPERTS + 3, -2, -1])[:CHOSEN], -1  # no experts either
    kept = weights * ~torch.isin(beyond, torch.tensor([*gone, EXPERTS + 3, -2, -1]))
    wanted = whole(hidden, beyond.clamp(min=0, max=EXPERTS - 1), kept)
    torch.testing.assert_close(mine(hidden, beyond, weights), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(mine(hidden, beyond.int(), weights), mine(hidden, beyond, weights))


def test_only_what_is_left_is_held() -> None:
    mine, _ = prepared_layer(layer({1, 3}), CPU, "fixed")
    whole, _ = prepared_layer(layer(set()), CPU, "fixed")
    assert mine is not None
    assert whole is not None
    assert mine.nbytes <= whole.nbytes * 4 / 6 * 1.02
    given = layer({1, 3}).matrices[4]["up_proj"]
    found = mine.matrix(4, "up_proj")
    assert isinstance(given, PackedWeight)
    assert isinstance(found, PackedWeight)
    assert torch.equal(found.codes, given.codes)
    with pytest.raises(KeyError):
        mine.matrix(3, "up_proj")
    nothing, _ = prepared_layer(layer(set(range(EXPERTS))), CPU, "fixed")
    assert nothing is not None
    assert nothing.nbytes == 0


def test_matrices_of_no_bits_are_as_good_as_none() -> None:
    given = layer({2})
    zeros = {name: PackedWeight.dropped(*shape, ENCODING) for name, shape in SHAPES.items()}
    marked = replace(given, matrices=[own if own else zeros for own in given.matrices])
    hidden, index, weights = routed()
    first, second = (prepared_layer(one, CPU, "fixed")[0] for one in (given, marked))
    assert first is not None
    assert second is not None
    assert torch.equal(first(hidden, index, weights), second(hidden, index, weights))


def test_a_matrix_of_no_bits() -> None:
    nothing = PackedWeight.dropped(3, 5, Encoding.trellis(8))
    assert (nothing.parts(), nothing.nbytes, nothing.bits) == ({}, 0, DROPPED)
    assert packed_shapes(3, 5, DROPPED, ENCODING) == packed_shapes(3, 5, DROPPED, Encoding.trellis(8)) == {}
    values = nothing.dequantize(torch.bfloat16)
    assert values.dtype == torch.bfloat16
    assert torch.equal(values, torch.zeros(3, 5, dtype=torch.bfloat16))
    assert nothing.map(lambda part: part.clone()).dequantize().shape == (3, 5)
    assert nothing.map(lambda part: torch.stack([part, part])).dequantize().shape == (2, 3, 5)
    for codes in (torch.zeros(3, 1, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="of a matrix that has none"):
            replace(nothing, codes=codes).dequantize()


@pytest.mark.parametrize("group_size", [-1, 2])
def test_a_matrix_of_no_bits_is_zeros_in_a_wider_grid(group_size: int) -> None:
    nothing = PackedWeight.dropped(3, 5, Encoding(group_size=group_size, symmetric=False))
    for bits in (2, 3, 8):
        found = widened(nothing, bits)
        found.check()
        assert (found.bits, found.symmetric, found.group_size) == (bits, True, group_size)
        assert torch.equal(found.dequantize(), torch.zeros(3, 5))
    with pytest.raises(ValueError, match="no symmetric grid of 1 bits"):  # whose two values are not zero
        widened(nothing, 1)


@pytest.mark.full
def test_runtimes_that_hand_tensors_over_hand_none_over_of_dropped_experts() -> None:
    """As vLLM and SGLang load a layer: what is dropped is not waited for, and a tensor of it is refused."""
    given = layer({0, 4})
    widths = [4 if own else DROPPED for own in given.matrices]
    sizes = (HIDDEN, INTER)
    parts = LayerParts("layers.0", ENCODING, widths, EXPERTS, sizes, torch.float32, gate, "silu")
    with pytest.raises(ValueError, match="the expert is dropped"):
        parts.take(4, "gate_proj", "codes", torch.empty(0))
    for expert, own in enumerate(given.matrices):
        for name, matrix in own.items():
            assert isinstance(matrix, PackedWeight)
            for part, tensor in matrix.parts().items():
                assert parts.take(expert, name, part, tensor)
    prepared = parts.finish()
    wanted, _ = prepared_layer(given, CPU, "fixed")
    assert isinstance(prepared, WithoutDropped)
    assert wanted is not None
    torch.testing.assert_close(prepared(*routed()), wanted(*routed()), rtol=1e-5, atol=1e-5)
