"""Widths of datapaths: nothing that the integer forward makes leaves them, and what is called reached is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from integer_models import made, pixels
from integers.test_integer_files import CASES, TEXT
from tiny_models import FULL
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from moeq.integers.arithmetic.fixed_point import power, power_table
from moeq.integers.arithmetic.integer_norm import normalized_rows, widest_row
from moeq.integers.arithmetic.log_sqrt2 import ROOT, joined, shifted_sums, widths
from moeq.integers.forward.description import describe
from moeq.integers.forward.program import Program, pixel_codes
from moeq.integers.forward.run import run
from moeq.integers.forward.saved import read
from moeq.integers.forward.schemes import program_of
from moeq.integers.hardware import from_program, registers
from moeq.integers.hardware.attention_kernel import UNIFORM_RECIPROCAL_BITS
from moeq.integers.hardware.interval import Interval, signed, symmetric, unsigned
from moeq.integers.hardware.registers import Registers, of_role
from moeq.recipe import IntegerSection

WHOLE = st.integers(-(2**60), 2**60)
WIDE = [(384, 6), (768, 12)]
SIZES = [(192, 197), (384, 197), (768, 197), (768, 577), (25, 17)]  # channels, positions
HEAD = 64


def bits_of(value: int, sign: bool) -> int:
    """The least width that holds a value, counted up."""
    return next(
        b
        for b in range(1, 80)
        if (signed(b) if sign else unsigned(b)).low <= value <= (signed(b) if sign else unsigned(b)).high
    )


def reaches(held: Registers, found: dict[str, list[int]]) -> None:
    """Every register that is called reached: within its interval, and with no bit to spare."""
    for one in held:
        if not one.reached:
            continue
        values = found[one.role]
        assert all(one.interval.low <= value <= one.interval.high for value in values), one
        needed = max(bits_of(value, one.interval.signed) for value in values)
        assert needed == one.bits, f"{one}: {values} needs {needed}"
        if one.bits > 1:
            less = signed(one.bits - 1) if one.interval.signed else unsigned(one.bits - 1)
            assert any(not less.low <= value <= less.high for value in values), "one bit less holds it"


@given(a=WHOLE, b=WHOLE, c=WHOLE, d=WHOLE, x=st.floats(0, 1), y=st.floats(0, 1), shift=st.integers(0, 40))
def test_intervals_hold_what_is_made_of_their_values(
    a: int, b: int, c: int, d: int, x: float, y: float, shift: int
) -> None:
    one, two = Interval(min(a, b), max(a, b)), Interval(min(c, d), max(c, d))
    left, right = (min(i.high, i.low + int((i.high - i.low) * t)) for i, t in ((one, x), (two, y)))
    for made_of, value in ((one + two, left + right), (one - two, left - right), (one * two, left * right)):
        assert made_of.low <= value <= made_of.high
    assert one.within(one | two)
    assert two.within(one | two)
    assert one.times(3).low <= 3 * left <= one.times(3).high
    half = (1 << shift) >> 1
    assert one.shifted(shift).low <= (left + half) >> shift <= one.shifted(shift).high
    register = signed(one.bits) if one.signed else unsigned(one.bits)
    assert one.within(register)
    assert one.bits == max(bits_of(end, one.signed) for end in (one.low, one.high))


@pytest.mark.parametrize("channels", [192, 384, 768])
@pytest.mark.parametrize("weight_bits", [4, 6, 8])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_linears_sums_need_every_bit(channels: int, weight_bits: int, bits: int) -> None:
    x, weight = signed(bits), registers.weights(weight_bits)
    sums = registers.sum_of_products(x, weight_bits, channels)
    held = registers.linear(x, weight, sums, bits, tight=True)
    codes, top = torch.full((channels,), x.low), weight.high
    products = int((codes * top).sum()), int((codes * -top).sum())
    reaches(held, {
        "x": [x.low, x.high], "weight": [-top, top], "product": [x.low * top, -x.low * top],
        "accumulators": [2 * one for one in products], "out": [x.low, x.high],
    })  # fmt: skip


@pytest.mark.parametrize(("channels", "positions"), SIZES)
def test_a_norms_registers_need_every_bit(channels: int, positions: int) -> None:
    row_bits = widest_row(channels)
    held = registers.layer_norm(channels, row_bits, 8)
    x = signed(row_bits)
    lows = torch.full((channels,), x.low)
    apart = lows.clone()
    apart[0] = x.high
    halves = lows.clone()
    halves[channels // 2 :] = x.high
    spread = channels * int((halves * halves).sum()) - int(halves.sum()) ** 2 + 1
    assert spread == of_role(held, "V").high, "the bound is the largest"
    assert spread < 2**51
    rows = normalized_rows(torch.stack([apart, -apart - 1]), 1)
    centred = channels * x.high - int(apart.sum())
    assert centred == of_role(held, "centred").high
    reaches(held, {
        "x": [x.low, x.high], "sum": [int(lows.sum())], "square": [x.low**2],
        "sum of squares": [int((lows * lows).sum())], "V": [spread], "centred": [centred, -centred],
        "rows": [int(rows.max()), int(rows.min())], "out": [-128, 127],
    })  # fmt: skip


@given(
    st.sampled_from([4, 25, 192]).flatmap(
        lambda n: st.lists(
            st.integers(-(2 ** (widest_row(n) - 1)), 2 ** (widest_row(n) - 1) - 1), min_size=n, max_size=n
        )
    ),
    st.integers(1, 2**20),
)
def test_no_row_leaves_the_registers_of_a_norm(row: list[int], epsilon: int) -> None:
    channels = len(row)
    held = registers.layer_norm(channels, widest_row(channels), 8, epsilon=epsilon)
    total, squares = sum(row), sum(value * value for value in row)
    spread = channels * squares - total * total + epsilon
    up = 52 - spread.bit_length() & ~1
    root = math.isqrt(spread << up)
    reciprocal = 2**50 // root
    rows = normalized_rows(torch.tensor(row), epsilon).tolist()
    found = {
        "sum": [total], "sum of squares": [squares], "V": [spread], "root": [root], "reciprocal": [reciprocal],
        "centred": [channels * value - total for value in row],
        "normalized product": [(channels * value - total) * reciprocal for value in row], "rows": rows,
    }  # fmt: skip
    for role, values in found.items():
        assert all(of_role(held, role).low <= value <= of_role(held, role).high for value in values), role


def test_a_norms_widest_product_needs_all_of_its_bits() -> None:
    """The widest product is a bound: one channel at an end, others just so that the reciprocal is largest."""
    channels = 192
    held = registers.layer_norm(channels, widest_row(channels), 8)
    x, best = signed(widest_row(channels)), 0
    for moved in range(0, 2000, 10):
        row = torch.full((channels,), x.low)
        row[0] = x.high
        row[1] += moved * 100
        spread = channels * int((row * row).sum()) - int(row.sum()) ** 2 + 1
        up = 52 - spread.bit_length() & ~1
        best = max(best, int(channels * row[0] - row.sum()) * (2**50 // math.isqrt(spread << up)))
    assert bits_of(best, True) == of_role(held, "normalized product").bits


def log_values(kind: str, bits: int, attention: int, keys: int, exact: bool) -> tuple[Registers, dict[str, list[int]]]:
    kept = widths(attention, kind, keys, bits, where="test")  # type: ignore[arg-type]
    held = registers.log_attention(
        activations=bits, attention=attention, kind=kind, head=HEAD, keys=keys, held=kept, exact=exact  # type: ignore[arg-type]
    )  # fmt: skip
    x = signed(bits)
    lowest, highest = torch.full((HEAD,), x.low), torch.full((HEAD,), x.high)
    scores = [int(lowest @ lowest), int(lowest @ highest)]
    values, ones = torch.full((keys, 1), x.low), torch.ones(keys, 1, dtype=torch.int64)
    zeros, no = torch.zeros(1, keys, dtype=torch.int64), torch.zeros(1, keys, dtype=torch.bool)
    even, none = shifted_sums(zeros, no, values, kept.left)
    odd_ones = torch.ones(1, keys, dtype=torch.bool)
    odd_ones[0, 0] = False
    code_one = odd_ones.to(torch.int64)
    _, odd = shifted_sums(code_one, odd_ones, values, kept.left)
    _, odd_weights = shifted_sums(code_one, odd_ones, ones, kept.left)
    total, _ = shifted_sums(zeros, no, ones, kept.left)
    unit = 15 if exact else kept.left
    largest = keys << 15 if exact else int(total)
    assert power(torch.tensor(0), power_table()) == 1 << 15
    return held, {
        "query": [x.low, x.high], "score product": [x.low**2], "scores": scores, "difference": [scores[0] - scores[1]],
        "codes": [2**attention - 1], "shifted value": [x.low << kept.left], "even": [int(even)], "odd": [int(odd)],
        "odd weights": [int(odd_weights)], "odd * sqrt2": [int(odd) * ROOT], "joined": [int(joined(even, none))],
        "denominator": [1 << unit, largest],
        "reciprocal": [(1 << unit + kept.reciprocal_bits) // one for one in (1 << unit, largest)],
        "out": [x.low, x.high],
    }  # fmt: skip


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["log-sqrt2", "log2"])
@pytest.mark.parametrize(
    ("bits", "attention", "keys"), [(8, 4, 197), (6, 4, 197), (4, 4, 197), (8, 4, 577), (8, 2, 17)]
)
def test_registers_of_a_log_softmax_need_every_bit(
    kind: str, bits: int, attention: int, keys: int, exact: bool
) -> None:
    held, found = log_values(kind, bits, attention, keys, exact)
    reaches(held, found)
    roles = {one.role for one in held}
    assert ("odd" in roles) == (kind == "log-sqrt2"), "powers of two have no odd codes"
    assert of_role(held, "even").bits <= 32


@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(-128, 127)), min_size=1, max_size=197),
    st.integers(2**15, 2**16 - 1),
    st.booleans(),
)
def test_no_codes_and_values_leave_the_registers_behind_the_reciprocal(
    pairs: list[tuple[int, int]], multiplier: int, exact: bool
) -> None:
    keys = len(pairs)
    kept = widths(4, "log-sqrt2", keys, 8, where="test")
    held = registers.log_attention(
        activations=8, attention=4, kind="log-sqrt2", head=HEAD, keys=keys, held=kept, exact=exact
    )
    codes = torch.tensor([[0, *(code for code, _ in pairs[1:])]])  # the largest score's is 0
    values = torch.tensor([[value] for _, value in pairs])
    odd = codes % 2 == 1
    even_sum, odd_sum = shifted_sums((codes + 1) // 2, odd, values, kept.left)
    whole = int(joined(even_sum, odd_sum))
    weights = int(joined(*shifted_sums((codes + 1) // 2, odd, torch.ones_like(values), kept.left)))
    denominator, unit = (max(2**15, weights >> 1), 15) if exact else (weights, kept.left)
    row = ((1 << unit + kept.reciprocal_bits) // denominator * multiplier + (1 << 15)) >> 16
    for role, value in (
        ("even", int(even_sum)),
        ("odd", int(odd_sum)),
        ("joined", whole),
        ("row", row),
        ("mixed", whole * row),
    ):
        assert of_role(held, role).low <= value <= of_role(held, role).high, role


@pytest.mark.parametrize(("bits", "attention", "keys"), [(8, 8, 197), (6, 4, 197), (4, 4, 17)])
def test_registers_of_a_uniform_softmax_need_every_bit(bits: int, attention: int, keys: int) -> None:
    held = registers.uniform_attention(
        activations=bits, attention=attention, head=HEAD, keys=keys, reciprocal_bits=UNIFORM_RECIPROCAL_BITS
    )
    x, top = signed(bits), 2**attention - 1
    scores = [HEAD * x.low**2, HEAD * x.low * x.high]
    reaches(held, {
        "query": [x.low, x.high], "score product": [x.low**2], "scores": scores, "difference": [scores[0] - scores[1]],
        "numerators": [1 << 15], "denominator": [keys << 15], "codes": [top], "value product": [top * x.low],
        "out": [x.low, x.high],
    })  # fmt: skip


def test_registers_of_routing_need_every_bit() -> None:
    sums = registers.linear(
        signed(8), registers.weights(8), registers.sum_of_products(signed(8), 8, 192), 16, tight=True
    )
    held = registers.router(sums, 4, 16)
    weight = ((1 << 15) * ((1 << 39) // (1 << 15)) + (1 << 23)) >> 24  # of one expert, the others far below
    logits = signed(16)
    products = 192 * 127 * 128
    reaches(held, {
        "x": [-128], "weight": [-127], "product": [128 * 127], "accumulators": [2 * products], "out": [logits.low],
        "difference": [logits.high - logits.low], "total": [4 << 15], "reciprocal": [(1 << 39) // (1 << 15)],
        "weights": [weight],
    })  # fmt: skip
    row = signed(18)
    reaches(registers.combined(18, 4), {"outputs": [row.low], "weighted": [row.low << 15]})
    reaches(registers.added(18), {"added": [2 * row.low]})
    reaches(registers.mean(8, 196), {"total": [-128 * 196]})


@given(st.lists(st.tuples(st.integers(0, 2**15), st.integers(-(2**17), 2**17 - 1)), min_size=2, max_size=4))
def test_no_experts_leave_the_register_of_their_sum(chosen: list[tuple[int, int]]) -> None:
    powers = [1 << 15, *(one for one, _ in chosen[1:])]
    reciprocal = (1 << 39) // sum(powers)
    weights = [(one * reciprocal + (1 << 23)) >> 24 for one in powers]
    total = sum(weight * value for weight, (_, value) in zip(weights, chosen, strict=True))
    held = of_role(registers.combined(18, len(chosen)), "combined")
    assert held.low <= total <= held.high


def forwards() -> Iterator[tuple[Program, dict[str, Tensor], dict[str, Registers]]]:
    for kind, section in CASES.values():
        model = made(kind)
        program = program_of(describe(model, 1 if kind == "tasks" else 0), pixels(model, 16), section)
        loud = pixels(model, 8, seed=3)
        values = run(program, pixel_codes(program, loud))
        values_of_noise = run(program, _noise(program))
        both = {name: torch.cat([value, values_of_noise[name]]) for name, value in values.items()}
        yield program, both, from_program.of_program(program)


def _noise(program: Program) -> Tensor:
    """Pixels at the ends of their codes, at random."""
    low, high = program.values["pixels"].ends
    generator = torch.Generator().manual_seed(7)
    return torch.where(torch.rand((16, *program.image_shape), generator=generator) < 0.5, low, high)


def within(program: Program, values: dict[str, Tensor], found: dict[str, Registers]) -> int:
    """How many values of a run lie within their registers, which are no wider than the manifest's."""
    compared = 0
    for operation in program.operations:
        held = {one.role: one.interval for one in found.get(operation.name, ())}
        for role, name in operation.outputs.items():
            interval = held.get(role)
            if interval is None:
                continue
            low, high = int(values[name].min()), int(values[name].max())
            assert interval.low <= low <= high <= interval.high, f"{name}: {low} to {high} of {interval}"
            assert interval.bits <= program.values[name].bits, f"{name}: {interval}"
            compared += 1
    return compared


def test_no_value_of_the_integer_forward_leaves_its_register() -> None:
    assert sum(within(*each) for each in forwards()) > 200


def test_the_document_names_the_sums_of_products_that_stay_within_32_bits() -> None:
    named = set(re.findall(r"`(\w+)`", TEXT.partition("2^52, and ")[2].partition("stay within 32 bits")[0]))
    assert {"accumulators", "scores"} < named
    held = [one for _, _, found in forwards() for own in found.values() for one in own]
    assert max(one.interval.magnitude for one in held) < 2**52
    sums = {one for one in held if one.role in named | {"sum of squares", "combined"}}
    assert {one.role for one in sums if one.bits <= 32} >= named
    assert {one.role for one in sums if one.bits > 32} == {"sum of squares", "combined"}
    outputs = max(one.bits for one in held if one.role == "outputs")
    assert max(one.bits for one in held if one.role == "combined") <= outputs + 16


@pytest.mark.parametrize(
    ("hidden", "heads"),
    [(192, 3), *(pytest.param(*size, marks=pytest.mark.skipif(not FULL, reason="MOEQ_FULL=1")) for size in WIDE)],
)
def test_no_value_of_a_vit_at_197_tokens_leaves_its_register(hidden: int, heads: int) -> None:
    config = ViTConfig(
        hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=1, intermediate_size=4 * hidden, num_labels=10
    )
    torch.manual_seed(0)
    model = ViTForImageClassification(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            one = "norm" in name and name.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * (0.2 if one else hidden**-0.5) + one)
    images = torch.randn(1, 3, 224, 224)
    program = program_of(describe(model), images, IntegerSection())
    values = run(program, pixel_codes(program, images))
    by_sizes = registers.sum_of_products(signed(8), 8, 4 * hidden)
    found = from_program.of_program(program)
    assert within(program, values, found) > 15
    known = from_program.known(program, "vit")
    assert (known.sizes.positions, known.sizes.patch_inputs) == (197, 768)
    assert known.sums["MLP down"].bits < by_sizes.bits, "weights are not all as large as they can be"


def test_accumulators_of_a_program_are_reached_by_inputs_at_their_ends() -> None:
    weight = torch.tensor([[3, -7, 2], [7, 7, -7]])
    bias = torch.tensor([5, -1])
    held = from_program.sums(weight, bias, signed(8))
    inputs = [torch.where(row > 0, end, other) for row in weight for end, other in ((127, -128), (-128, 127))]
    found = [int(one) for x in inputs for one in weight @ x + bias]
    assert (min(found), max(found)) == (held.low, held.high)


def test_a_program_is_a_model_of_its_own_sizes(tmp_path: Path) -> None:
    from integers.test_integer_files import written

    _, program, _ = read(written(tmp_path / "out", *CASES["moe"]))
    found = from_program.known(program, "moe")
    config = made("moe").config
    sizes = found.sizes
    assert (sizes.hidden, sizes.blocks, sizes.heads, sizes.positions) == (24, 2, 3, config.num_positions)
    assert sizes.mixture is not None
    assert (sizes.mixture.num_experts, sizes.mixture.top_k, sizes.mixture.inner, sizes.mixture.blocks) == (5, 2, 12, 1)
    assert found.arithmetic.text == "8/8/4"
    by_sizes = registers.sum_of_products(signed(8), 8, 24)
    for layer in ("query, key, value", "projection", "router", "experts up"):
        assert symmetric(found.sums[layer].magnitude).bits <= by_sizes.bits, "real weights take no more than any"
    assert set(found.sums) == {"patch embedding", "query, key, value", "projection", "MLP up", "MLP down", "router",
                               "experts up", "experts down", "head"}  # fmt: skip
