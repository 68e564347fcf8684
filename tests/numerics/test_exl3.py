"""EXL3's stored form: read by a reader of its own, from the documented layout; codes that lose what their width allows.

The reader below shares nothing with moeq: it goes from the packed words to weights bit by bit, as exllamav3's kernels
do (codebook.cuh, exl3_dq.cuh, pack.cu, exl3.py of turboderp-org/exllamav3 at 4f8ad01), in numpy.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeq.numerics import exl3_ldlq, trellis, trellis_device
from moeq_kernels import exl3
from moeq_kernels.exl3 import Exl3Weight
from moeq_kernels.packed import PackedWeight


def read_word(words: np.ndarray, step: int, bits: int) -> int:
    """The 16 bits that end with a step, of a tile's little-endian words of 32 bits, most significant bit first."""
    found = 0
    for place in range((step + 1) * bits - 16, (step + 1) * bits):
        at = place % (256 * bits)
        found = found << 1 | int(words[at // 32]) >> 31 - at % 32 & 1
    return found


def half(bits: int) -> np.float16:
    return np.uint16(bits).view(np.float16)


def read_value(word: int, codebook: str) -> np.float16:
    if codebook == "mul1":
        product = word * 0x83DCD12D % 2**32
        total = 0x6400 + sum(product >> shift & 0xFF for shift in (0, 8, 16, 24))  # bits of a half, 1024 and more
        exact = float(half(total)) * float(half(0x1EEE)) + float(half(0xC931))
        return np.float16(exact)
    product = (word * 0xCBAC1FED if codebook == "mcg" else word * 89226354 + 64248484) % 2**32
    both = product & 0x8FFF8FFF ^ 0x3B603B60
    return np.float16(float(half(both & 0xFFFF)) + float(half(both >> 16)))


def read(trellis: np.ndarray, suh: np.ndarray, svh: np.ndarray, codebook: str) -> tuple[np.ndarray, np.ndarray]:
    """V float16 [K, N], and the weight float32 [N, K]."""
    bits, words = trellis.shape[2] // 16, trellis.view(np.uint32)
    inner = np.empty((len(suh), len(svh)), np.float16)
    for k, n in np.ndindex(*trellis.shape[:2]):
        for step in range(256):
            thread, own = step // 8, step % 8  # eight weights of each of 32 threads: the fragment of a tensor core
            row = 2 * (thread % 4) + (0, 1, 8, 9, 0, 1, 8, 9)[own]
            column = thread // 4 + (0, 0, 0, 0, 8, 8, 8, 8)[own]
            inner[16 * k + row, 16 * n + column] = read_value(read_word(words[k, n], step, bits), codebook)
    plus = np.array([[1 - 2 * ((i & j).bit_count() % 2) for j in range(128)] for i in range(128)], np.float64)
    whole = inner.astype(np.float64)
    for start in range(0, len(suh), 128):
        whole[start : start + 128] = plus @ whole[start : start + 128]
    for start in range(0, len(svh), 128):
        whole[:, start : start + 128] = whole[:, start : start + 128] @ plus
    whole = whole / 128 * suh.astype(np.float64)[:, None] * svh.astype(np.float64)
    return inner, whole.T.astype(np.float32)


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


@pytest.mark.parametrize(("bits", "most"), [(1, 0.31), (2, 0.075), (3, 0.0195), (4, 0.0052)])
def test_codes_of_normal_weights_lose_what_their_width_allows(bits: int, most: float) -> None:
    """Of 128 x 128 normal weights with an even Hessian, relative; no code of k bits has less than 4^-k."""
    weight = torch.randn(1, 128, 128, generator=torch.Generator().manual_seed(3)) * 0.02
    made = coded(weight, torch.eye(128)[None], bits)
    error = float((made.dequantize() - weight[0]).square().mean() / weight.square().mean())
    assert 4.0**-bits < error < most


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
    for given in (hessian, torch.eye(128)[None]):
        left = coded(weight, given, 2).dequantize() - weight[0]
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
