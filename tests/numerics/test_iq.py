"""i-quants: blocks as gguf reads them, entries that lose least, feedback, and their packed form.

Skipped where gguf is not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import peers
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeq.numerics import iq_ldlq, iq_search
from moeq.numerics.factor import Factor, factorize
from moeq.numerics.iq_blocks import KINDS, MIDDLE, SHIFTED, blocks, table
from moeq.numerics.vectors import LANES
from moeq.quantizers.tune import units_of
from moeq_kernels import iq
from moeq_kernels.iq_types import BLOCKS, SETS, WIDTHS, stored_bits, type_of
from moeq_kernels.packed import PackedWeight, joined, packed_bytes, row_range, some_inputs
from moeq_kernels.widths import Encoding

CODES = [(codebook, bits) for codebook, widths in SETS.items() for bits in widths]
ONCE = {type_of(bits, codebook): (codebook, bits) for codebook, bits in reversed(CODES)}


@pytest.fixture(autouse=True)
def _gguf() -> None:
    peers.module("gguf")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights(experts: int = 2, rows: int = 20, inputs: int = 512, seed: int = 0) -> Tensor:
    return torch.randn(experts, rows, inputs, generator=generator(seed)) * 0.03


def hessian(inputs: int = 512, experts: int = 2) -> Tensor:
    rows = torch.randn(experts, 2 * inputs, inputs, generator=generator(1))
    rows = rows + 0.9 * rows.roll(1, -1)
    return rows.mT @ rows / rows.shape[1]


def plain(inputs: int = 512, experts: int = 2) -> Factor:
    """Without feedback."""
    return factorize(torch.eye(inputs).expand(experts, -1, -1).contiguous())


def made(bits: int, codebook: str, weight: Tensor | None = None, seen: Tensor | None = None) -> PackedWeight:
    weight = weights() if weight is None else weight
    seen = hessian(weight.shape[-1], len(weight)) if seen is None else seen
    (found,) = iq_ldlq.quantize(weight, factorize(seen), seen, [bits], codebook)
    found.check()
    return found


def loss(found: PackedWeight, weight: Tensor, seen: Tensor) -> float:
    left = found.dequantize() - weight
    return float((left @ seen * left).sum() / (weight @ seen * weight).sum())


def contents(name: str, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Entries, signs and steps of some blocks, any that the type can have."""
    kind, random = KINDS[name], generator(3)
    entries = torch.randint(0, kind.entries, (count, 256 // kind.length), generator=random)
    signs = torch.randint(0, 256, (count, 32), generator=random)
    if kind.signs == "even":
        odd = sum(signs >> bit & 1 for bit in range(8)) % 2
        signs ^= 128 * odd
    steps = torch.randint(
        0, kind.steps * (2 if kind.signs == "shifted" else 1), (count, 256 // kind.run), generator=random
    )
    return entries, signs.to(torch.uint8), steps.to(torch.uint8)


@pytest.mark.parametrize("name", list(KINDS))
def test_blocks_stand_for_what_they_were_made_of(name: str) -> None:
    kind, (entries, signs, steps) = KINDS[name], contents(name, 5)
    scales = torch.rand(5, 1, generator=generator(4)).half()
    data = iq.joined(blocks(name, entries, signs, steps), scales)
    values = table(name)[:, entries].permute(1, 2, 0).reshape(5, 256)
    if kind.signs == "shifted":
        shift = torch.where(steps >= SHIFTED, -1 / SHIFTED, 1 / SHIFTED)
        values, steps = values + shift.repeat_interleave(kind.run, 1), steps % SHIFTED
    elif kind.signs != "levels":
        negative = (signs.unsqueeze(-1) >> torch.arange(8)) & 1
        values = values * (1 - 2 * negative.flatten(1).float())
    factors = kind.factors[steps.long()].repeat_interleave(kind.run, 1)
    assert torch.equal(iq.decoded(data, name), scales.float() * factors * values)


def test_tables_are_those_of_gguf() -> None:
    shapes = {name: tuple(table(name).shape) for name in KINDS}
    assert shapes == {name: (kind.length, kind.entries) for name, kind in KINDS.items()}
    assert table("IQ2_S").unique().tolist() == [8, 25, 43]
    assert table("IQ1_S").unique().tolist() == [-1, 0, 1]
    assert table("IQ4_XS")[0, [0, 8, 15]].tolist() == [-127, 1, 113]
    for name in ("IQ2_XXS", "IQ2_S", "IQ3_S", "IQ1_S"):
        assert len(table(name).T.unique(dim=0)) == KINDS[name].entries
    assert float(KINDS["IQ4_XS"].factors[MIDDLE + 1]) == 1


@pytest.mark.parametrize(("codebook", "bits"), CODES)
def test_bits_are_counted_and_feedback_loses_less(codebook: str, bits: int) -> None:
    seen, weight = hessian(), weights()
    found = made(bits, codebook)
    (alone,) = iq_ldlq.quantize(weight, plain(), torch.eye(512).expand(2, -1, -1), [bits], codebook)
    assert loss(found, weight, seen) < 0.8 * loss(alone, weight, seen)
    rate = stored_bits(bits, codebook)
    assert found.nbytes * 8 == rate * weight.numel() == 16 * packed_bytes(20, 512, bits, Encoding.iq(codebook))
    ideal = 2 ** (-2 * rate)  # of normal weights, what no code of so many bits stays below
    lost = loss(alone, weight, torch.eye(512).expand(2, -1, -1))
    assert ideal < lost < (16 if bits == 8 else 3) * ideal


def test_more_bits_lose_less() -> None:
    seen, weight = hessian(), weights()
    every = {stored_bits(bits, codebook): loss(made(bits, codebook), weight, seen) for codebook, bits in CODES}
    losses = [every[rate] for rate in sorted(every)]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == len(KINDS) + 1


def test_each_expert_is_what_it_is_alone() -> None:
    seen, weight = hessian(), weights()
    for codebook, bits in ONCE.values():
        both = made(bits, codebook)
        for expert in range(2):
            alone = made(bits, codebook, weight[expert : expert + 1], seen[expert : expert + 1])
            assert torch.equal(alone.codes[0], both.codes[expert])
            assert torch.equal(alone.scales[0], both.scales[expert])


SIDE_BY_SIDE = """
import torch
from moeq.numerics import iq_ldlq
from moeq.numerics.factor import factorize

draw = torch.Generator().manual_seed(5)
seen = torch.randn(3, 600, 256, generator=draw)
hessian, weight = seen.mT @ seen / 600, torch.randn(3, 264, 256, generator=draw)
made = []
for threads in (1, 4):
    torch.set_num_threads(threads)
    made.append([p.codes for b in (2, 4) for p in iq_ldlq.quantize(weight, factorize(hessian), hessian, [b], "iq-s")])
assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))
"""


@pytest.mark.full
def test_threads_that_share_an_arena_of_memory_do_not_share_their_rooms() -> None:
    """What a thread has freed too early is at once another's."""
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    for _ in range(3):
        subprocess.run([sys.executable, "-c", SIDE_BY_SIDE], env=environment, check=True)


def test_each_row_is_what_it_is_alone() -> None:
    """However many rows are worked on at once, and beside whichever."""
    seen, weight = hessian(experts=1), weights(1, 20)
    for codebook, bits in ONCE.values():
        every, some = made(bits, codebook, weight, seen), made(bits, codebook, weight[:, 3:12], seen)
        assert torch.equal(some.codes, every.codes[:, 3:12])
        assert torch.equal(some.scales, every.scales[:, 3:12])


def best(target: Tensor, counts: Tensor, name: str, scale: float) -> float:
    """The least weighted error of an eight over all entries and signs at a scale."""
    kind = KINDS[name]
    total = 0.0
    for part in range(8 // kind.length):
        own = slice(part * kind.length, (part + 1) * kind.length)
        wanted = target[own].abs().unsqueeze(1)
        total += float((counts[own].unsqueeze(1) * (wanted - scale * table(name)) ** 2).sum(0).min())
    return total


@pytest.mark.parametrize("name", ["IQ2_S", "IQ3_S"])
def test_entries_are_the_nearest_ones_where_nothing_is_fed_back(name: str) -> None:
    kind, weight = KINDS[name], weights(1, LANES, 256)
    columns, counts = weight.mT.contiguous(), 0.5 + torch.rand(256, generator=generator(5))
    metric = torch.diag_embed(counts.view(1, 32, 8))
    inverse = torch.eye(8).expand(1, 32, 8, 8).contiguous()
    given, upper = torch.zeros(1, 256, LANES), torch.eye(256)[None].contiguous()
    ideal = iq_search.fitted(name, columns, given, 0, inverse, metric)
    scale = (ideal.amax(1) / float(kind.factors[-1])).half().float()
    residual = torch.empty_like(columns)
    parts = inverse, metric, counts[None].contiguous()
    entries, signs, steps = iq_search.swept(name, columns, given, upper, 0, parts, scale, ideal, residual, 0)
    for row, eight in product(range(LANES), range(32)):
        own = slice(eight * 8, eight * 8 + 8)
        size = float(scale[0, row] * kind.factors[int(steps[0, row, eight * 8 // kind.run])])
        error = float((counts[own] * residual[0, own, row] ** 2).sum())
        assert error <= best(weight[0, row, own], counts[own], name, size) * 1.001 + 1e-9
        assert int(signs[0, row, eight]) == sum(1 << at for at in range(8) if weight[0, row, eight * 8 + at] < 0)
    packed = blocks(name, entries[0], signs[0], steps[0])
    values = iq.decoded(iq.joined(packed, scale[0].half().unsqueeze(1)), name)
    assert torch.allclose(values, weight[0] - residual[0].T, atol=1e-7)


@given(
    st.sampled_from(sorted(ONCE)), st.integers(1, 3), st.integers(1, 40), st.integers(1, 3),
    st.sampled_from([0.0, 1e-6, 1.0, 1e4]), st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=examples(12), deadline=None)
def test_any_weights_become_codes_that_lose_no_more_than_zeros(
    name: str, experts: int, rows: int, blocks_of_row: int, size: float, seed: int
) -> None:
    codebook, bits = ONCE[name]
    inputs = 256 * blocks_of_row
    weight = torch.randn(experts, rows, inputs, generator=generator(seed)) * size
    weight[:, ::3] = 0
    seen = torch.randn(experts, inputs // 2, inputs, generator=generator(seed + 1))
    seen = seen.mT @ seen / inputs
    seen[:, 5] = seen[:, :, 5] = 0
    found = made(bits, codebook, weight, seen)
    assert found.are_numbers()
    left = found.dequantize() - weight
    assert float((left @ seen * left).sum()) <= float((weight @ seen * weight).sum()) + 1e-12


def test_scales_are_fitted_to_the_loss_together() -> None:
    seen, weight = hessian(), weights()
    found = made(2, "iq-xxs")
    for expert in range(2):
        rounded, scales = found.dequantize()[expert] * 1.3, found.scales[expert] * 1.3
        again = iq_ldlq.fitted_scales(weight[expert], rounded, scales, seen[expert], 0.0)
        assert torch.allclose(again.float(), found.scales[expert].float(), rtol=2e-3)
    zero = torch.zeros(3, 512)
    kept = torch.full((3, 2), 0.5).half()
    assert torch.equal(iq_ldlq.fitted_scales(zero, zero, kept, seen[0], 0.0), kept)


def test_codes_do_not_hang_on_the_size_of_activations() -> None:
    weight, seen = weights(1), hessian(experts=1)
    for codebook, bits in ONCE.values():
        wanted = made(bits, codebook, weight, seen).parts()
        for unit in (2.0**-84, 2.0**84):
            found = made(bits, codebook, weight, seen * unit).parts()
            assert all(torch.equal(found[part], wanted[part]) for part in wanted)


def test_as_many_tokens_as_a_row_has_blocks_do_not_make_its_scales() -> None:
    weight, rows = weights(1, 64, 1024), torch.randn(1, 4, 1024, generator=generator(6))
    left = made(2, "iq-xxs", weight, rows.mT @ rows / 4).dequantize() - weight
    assert float((left.square().sum(-1) / weight.square().sum(-1)).max()) < 1


def test_packed_weights_are_cut_and_joined() -> None:
    for codebook, bits in ONCE.values():
        found = made(bits, codebook)
        first, second = (found.map(lambda part: part[expert]) for expert in range(2))  # noqa: B023
        values = found.dequantize()
        assert torch.equal(joined([first, second], 0).dequantize(), values.flatten(0, 1))
        assert torch.equal(row_range(first, 3, 5).dequantize(), values[0, 3:8])
        assert torch.equal(some_inputs(first, 256, 256).dequantize(), values[0, :, 256:])
        assert torch.equal(
            units_of(first).float() * first.scales.float().repeat_interleave(BLOCKS[type_of(bits, codebook)][0], 1),
            values[0],
        )
        with pytest.raises(ValueError, match="no whole groups"):
            some_inputs(first, 16, 256)
        with pytest.raises(ValueError, match="stand for no grid"):
            first.grid()


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="260 inputs are no multiple of 256"):
        iq_ldlq.quantize(weights(1, 2, 260), plain(260, 1), torch.eye(260)[None], [2], "iq-s")
    with pytest.raises(ValueError, match="iq-s has no codes of 5 bits"):
        type_of(5, "iq-s")
    with pytest.raises(ValueError, match="no set of i-quants has no codes of 2 bits"):
        type_of(2, "")
    found = made(2, "iq-s")
    with pytest.raises(ValueError, match="scales of a packed weight are"):
        PackedWeight.of({"codes": found.codes, "scales": found.scales[..., :1]}, 2, 512, Encoding.iq("iq-s")).check()
    assert Encoding.iq("iq-s").at(8).group_size == 32
    assert WIDTHS == (1, 2, 3, 4, 8)
