"""EXL3's stored form, by a reader of its own, from the documented layout; codes that lose what their width allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import examples
from exl3_reader import read, read_value, read_word
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_layers import any_codes

from moeq.numerics import exl3_ldlq, trellis, trellis_device
from moeq_kernels import exl3
from moeq_kernels.exl3 import Exl3Weight
from moeq_kernels.packed import PackedWeight, joined, row_range, some_inputs
from moeq_kernels.reference import some_rows
from moeq_kernels.widths import TRELLIS_BITS, Encoding


def random_weight(rows: int, inputs: int, bits: int, codebook: str) -> Exl3Weight:
    generator = torch.Generator().manual_seed(bits)
    shape = inputs // 16, rows // 16, 16 * bits
    return Exl3Weight(
        trellis=torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16),
        suh=torch.randn(inputs, generator=generator).half(),
        svh=torch.randn(rows, generator=generator).half(),
        codebook=codebook,
    )


@pytest.mark.parametrize("codebook", exl3.CODEBOOKS)
def test_every_word_has_the_value_that_the_kernels_compute(codebook: str) -> None:
    wanted = np.array([read_value(word, codebook) for word in range(0, 1 << 16, 7)])
    assert np.array_equal(exl3.word_values(codebook)[::7].numpy(), wanted)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("bits", "codebook"), [*((k, "mul1") for k in exl3.BITS), (2, "3inst"), (3, "mcg"), (8, "3inst")]
)
def test_any_words_are_read_as_the_layout_says_bit_for_bit(bits: int, codebook: str) -> None:
    weight = random_weight(128, 256, bits, codebook)
    inner, whole = read(*(part.numpy() for part in (weight.trellis, weight.suh, weight.svh)), codebook)
    assert np.array_equal(weight.inner().numpy(), inner)
    assert np.array_equal(weight.dequantize().numpy(), whole)


@pytest.mark.parametrize("bits", exl3.BITS)
def test_packing_has_a_way_back(bits: int) -> None:
    steps = torch.randint(0, 1 << bits, (2, 3, 256)).to(torch.uint8)
    stored = exl3.packed(steps, bits)
    assert (stored.shape, stored.dtype) == ((3, 2, 16 * bits), torch.int16)
    assert torch.equal(exl3.unpacked(stored, bits), steps)


def coded(weight: torch.Tensor, hessian: torch.Tensor, bits: int) -> PackedWeight:
    """The first of some weights [E, N, K]."""
    factor = exl3_ldlq.factorize_turned(hessian, 0.01)
    return exl3_ldlq.quantize(weight, factor, hessian, [bits])[0].map(lambda part: part[0])


@pytest.mark.cases(1)
@pytest.mark.parametrize(("bits", "most"), [(1, 0.31), (2, 0.075), (3, 0.0195), (4, 0.0052)])
def test_codes_of_normal_weights_lose_what_their_width_allows(bits: int, most: float) -> None:
    """Of 128 x 128 normal weights with an even Hessian, relative; no code of k bits has less than 4^-k."""
    weight = torch.randn(1, 128, 128, generator=torch.Generator().manual_seed(3)) * 0.02
    made = coded(weight, torch.eye(128)[None], bits)
    error = float((made.dequantize() - weight[0]).square().mean() / weight.square().mean())
    assert 4.0**-bits < error < most


def test_rows_of_small_weights_lose_no_more_than_others() -> None:
    """Rows whose scales are subnormal in float16, beside rows of 1."""
    rows = torch.ones(128).index_fill(0, torch.arange(0, 128, 2), 1e-5)
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(3)) * rows[:, None]
    left = (coded(weight[None], torch.eye(128)[None], 4).dequantize() - weight).square().mean(-1)
    error = left / weight.square().mean(-1)
    assert float(error[::2].mean()) == pytest.approx(float(error[1::2].mean()), rel=0.1)


def test_eight_bits_are_walked_too() -> None:
    tiles = torch.randn(16, 256, generator=torch.Generator().manual_seed(3)) * exl3_ldlq.SPREAD[8]
    nearest = trellis.walks(tiles, exl3.state_values("mul1"), 8)[1]
    assert float((nearest - tiles).square().mean()) < 4e-5


def correlated(inputs: int) -> torch.Tensor:
    seen = torch.randn(4 * inputs, inputs, generator=torch.Generator().manual_seed(1))
    seen *= torch.logspace(-1, 1, inputs)
    seen = seen + 2 * seen.roll(1, 1) + seen.mean(1, keepdim=True)
    return seen.T @ seen / len(seen)


def test_errors_are_made_up_for_by_the_hessian() -> None:
    """Rows of many sizes: the loss by the Hessian is far below that of codes that know nothing of it."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(1, 128, 128, generator=generator) * torch.logspace(-1, 1, 128)[:, None]
    hessian = correlated(128)[None]
    losses = []
    for known in (hessian, torch.eye(128)[None]):
        left = coded(weight, known, 2).dequantize() - weight[0]
        losses.append(float((left @ hessian[0] * left).sum()))
    assert losses[0] < 0.5 * losses[1]


def test_what_is_stored_is_what_the_walk_chose() -> None:
    """A tile's values, found by moeq's walk with EXL3's values, are those of its words; on any device."""
    tiles = torch.randn(16, 256, generator=torch.Generator().manual_seed(2))
    values = exl3.state_values("mul1")
    steps, nearest = trellis.walks(tiles, values, 2)
    stored = exl3.packed(steps.view(1, 16, 256), 2).squeeze(1)
    words = stored.numpy().view(np.uint32)
    found = [[read_value(read_word(words[tile], step, 2), "mul1") for step in range(256)] for tile in range(2)]
    assert np.array_equal(np.array(found, np.float32), nearest[:2].numpy())
    other = trellis_device.walks(tiles[:2], values, 2)[1]
    errors = [float((one - tiles[:2]).square().sum()) for one in (nearest[:2], other)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_wide_steps_find_what_plain_torch_finds() -> None:
    """5 bits and more go through loops instead of written-out ways; 2^10 states here."""
    tiles = torch.randn(20, 256, generator=torch.Generator().manual_seed(4))
    values = torch.randn(1 << 10, generator=torch.Generator().manual_seed(5))
    one, other = (form.walks(tiles, values, 5)[1] for form in (trellis, trellis_device))
    assert float((one - tiles).square().sum()) == pytest.approx(float((other - tiles).square().sum()), rel=1e-4)


def test_the_tensors_of_a_checkpoint() -> None:
    weight = random_weight(128, 128, 3, "mul1")
    stored = weight.tensors("model.layers.0.mlp.experts.1.up_proj")
    assert sorted(name.rpartition(".")[2] for name in stored) == ["mul1", "suh", "svh", "trellis"]
    (multiplier,) = (tensor for name, tensor in stored.items() if name.endswith(".mul1"))
    assert (multiplier.dtype, multiplier.shape) == (torch.int32, ())
    assert int(multiplier.view(torch.uint32)) == 0x83DCD12D
    assert sorted(random_weight(128, 128, 3, "3inst").tensors("x")) == ["x.suh", "x.svh", "x.trellis"]
    assert weight.nbytes == 128 * 128 * 3 // 8 + 2 * (128 + 128)


def test_what_has_no_place_is_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 128"):
        coded(torch.randn(1, 64, 128), torch.eye(128)[None], 2)
    with pytest.raises(ValueError, match="multiples of 128"):
        coded(torch.randn(1, 128, 64), torch.eye(64)[None], 2)
    with pytest.raises(ValueError, match="no codebook of EXL3"):
        exl3.word_values("1mad")
    weight = random_weight(128, 128, 2, "mul1")
    for wrong in (
        {"suh": weight.suh.float()}, {"svh": weight.svh[:64]}, {"trellis": weight.trellis[:, :4]},
        {"trellis": weight.trellis[..., :24]}, {"suh": weight.suh[None]}, {"codebook": "2mad"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"128|trellis|dimension|codebook"):
            Exl3Weight(**{**vars(weight), **wrong}).check()


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_moeqs_own_form_has_the_values_of_exl3s(bits: int) -> None:
    """Signs that are always the same are left out, and put back; a stack is what its matrices are."""
    stack = [any_codes(128, 256, bits, Encoding.exl3(), seed=seed) for seed in range(2)]
    for one in stack:
        weight = exl3.weight_of(one.codes, one.scales.squeeze(-1), bits, 256, "mul1")
        assert torch.equal(weight.dequantize(), one.dequantize())
        again = exl3.parts_of(weight)
        assert torch.equal(again["codes"], one.codes)
        assert torch.equal(again["scales"], one.scales.squeeze(-1))
    whole = joined([one.map(lambda part: part.unsqueeze(0)) for one in stack])
    assert torch.equal(whole.dequantize(), torch.stack([one.dequantize() for one in stack]))


def test_signs_that_are_others_are_no_form_of_moeqs() -> None:
    with pytest.raises(ValueError, match="other signs"):
        exl3.parts_of(random_weight(128, 128, 2, "mul1"))


@given(
    row=st.integers(0, 1), rows=st.integers(1, 2), some=st.integers(0, 1), inputs=st.integers(1, 2),
    bits=st.sampled_from(TRELLIS_BITS),
)  # fmt: skip
@settings(deadline=None, max_examples=examples(20))
def test_parts_of_a_weight_are_blocks_of_it(row: int, rows: int, some: int, inputs: int, bits: int) -> None:
    one = any_codes(256, 256, bits, Encoding.exl3())
    rows, inputs = min(rows, 2 - row), min(inputs, 2 - some)
    part = some_inputs(row_range(one, 128 * row, 128 * rows), 128 * some, 128 * inputs)
    wanted = one.dequantize()[128 * row :, 128 * some :][: 128 * rows, : 128 * inputs]
    assert torch.equal(part.dequantize(), wanted)
    looked_up = torch.tensor([3, 200, 128 * row, 3])
    found = some_rows(one, looked_up)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, one.dequantize()[looked_up])
    with pytest.raises(ValueError, match="no whole tiles of 128"):
        row_range(one, 16, 128)
    with pytest.raises(ValueError, match="no whole tiles of 128"):
        some_inputs(one, 0, 64)
