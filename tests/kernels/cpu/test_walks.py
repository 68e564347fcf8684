"""Trellis codes through the CPU's kernel: against the plain way, in every form, and back bit for bit."""

from __future__ import annotations

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as some
from numba.core.caching import NullCache
from packed_layers import reference, routed, silu_gate, trellis_of, values

from moeq_kernels import choice, measured, trellis
from moeq_kernels.cpu import compiled, kept_code, walks
from moeq_kernels.cpu.forms import AVX2_LANES, FORMS, forms, is_zen
from moeq_kernels.cpu.kernel import CpuKernel
from moeq_kernels.cpu.layer import PackedLayer, PackedLinear
from moeq_kernels.cpu.lookups import several
from moeq_kernels.cpu.matrices import form_of
from moeq_kernels.cpu.walks import table
from moeq_kernels.description import DOWN, LayerOfExperts
from moeq_kernels.packed import PackedWeight

BF16 = torch.bfloat16
CPU = torch.device("cpu")
WITH_AVX2 = [name for name in forms() if FORMS[name].lanes == AVX2_LANES]
SIZES = {"gate_proj": (48, 80), "up_proj": (48, 80), DOWN: (80, 48)}


def check(matrix: PackedWeight, count: int, form: str, dtype: torch.dtype = BF16) -> None:
    """Multiplied, and unpacked and multiplied, are what float64 gives but for the last rounding."""
    rows = torch.randn(count, matrix.inputs, generator=torch.Generator().manual_seed(count)).to(dtype)
    wanted = rows.double() @ values(matrix).T
    last, least = 2.0**-8 if dtype == BF16 else 0, 3e-6 * wanted.abs().max() + 1e-30
    found = CpuKernel(form, measured.NEVER).linear(matrix)(rows).double()
    assert ((found - wanted).abs() <= wanted.abs() * last + least).all()
    unpacked = CpuKernel(form, 1).linear(matrix)(rows).double()
    kept = dtype if FORMS[form].unpacks_bf16 else torch.float32
    rounded = rows.double() @ matrix.dequantize(kept).double().T
    assert ((unpacked - rounded).abs() <= rounded.abs() * last + least).all()


def layer_of_walks(widths: list[object], state_bits: int) -> LayerOfExperts:
    """A gated layer with an expert for each width, or {projection: width}; 16 is dense."""
    matrices = []
    for number, width in enumerate(widths):
        of = width if isinstance(width, dict) else dict.fromkeys(SIZES, width)
        matrices.append({
            name: torch.randn(*size, generator=torch.Generator().manual_seed(number)).to(BF16) * 0.05
            if of[name] == 16 else trellis_of(*size, of[name], state_bits, seed=number)
            for name, size in SIZES.items()
        })  # fmt: skip
    return LayerOfExperts(matrices=matrices, biases=[{}] * len(widths), gate=silu_gate, activation="silu")


@pytest.mark.cases(2)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("state_bits", [8, 10])
def test_what_is_looked_up(bits: int, state_bits: int) -> None:
    """Odd numbers of tiles and of rows, one row of activations."""
    check(trellis_of(33, 50, bits, state_bits), 1, forms()[0])


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "neon" and not FORMS[form].int8])
def test_every_form(form: str) -> None:
    if form not in forms():
        pytest.skip(f"this CPU has no {form}")
    check(trellis_of(32, 96, 3, 10), 4, form)


def test_few_rows_are_multiplied_as_bytes_where_there_are_pairs_of_bf16() -> None:
    """Beside grids and with other experts' many rows in one call; not where whole numbers cannot hold a row's sum."""
    pairs = FORMS["avx512_bf16"]
    if not (pairs.runs_here() and pairs.bytewise.runs_here() and walks.Walk(2, 8).in_registers(16)):
        pytest.skip("this CPU has no dot products of bf16 and of bytes, or no VBMI")
    taken = [form_of(pairs, codes, rows).name for codes in ("trellis2.8", "trellis8.8", "trellis2.11", "4")
             for rows in (4, 8)]  # fmt: skip
    assert taken == ["avx512_vnni", pairs.name] * 2 + [pairs.name] * 4
    layer = layer_of_walks([2, {"gate_proj": 3, "up_proj": 16, DOWN: 1}, 4], 8)
    hidden = torch.randn(12, 80, generator=torch.Generator().manual_seed(0)).to(BF16)
    index = torch.tensor([[0, 1]] * 9 + [[1, 2]] * 3)
    weights = torch.ones(12, 2, dtype=BF16)
    result = CpuKernel(pairs.name).layer(layer)(hidden, index, weights).double()
    wanted = reference(layer, hidden, index, weights)
    assert (result - wanted).abs().max() <= 2.0**-7 * wanted.abs().max()
    most = (2**31 - 1) // (128 * 255) // 32 * 32
    held, too_long = (CpuKernel(pairs.name).linear(trellis_of(16, inputs, 2, 8)) for inputs in (most, most + 32))
    assert (held.form, too_long.form) == (pairs, pairs.floats)


def test_float32_rows() -> None:
    check(trellis_of(32, 96, 3, 10), 1, forms()[0], torch.float32)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("bits", "state_bits"), [(1, 16), (2, 11), (3, 16), (4, 12), (2, 9)])
def test_more_states_than_registers_hold(bits: int, state_bits: int) -> None:
    for form in {forms()[0], *({"avx2"} & set(forms()))}:
        check(trellis_of(17, 64, bits, state_bits), 2, form)


@pytest.mark.cases(1)
@pytest.mark.parametrize("state_bits", [9, 10])
def test_the_other_way_to_look_up_in_registers(state_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of CPUs whose permutations of two registers take twice as long, on a Zen, and that of a Zen elsewhere."""
    if not walks.Walk(2, state_bits).in_registers(16):
        pytest.skip("this CPU has no VBMI")
    other = not is_zen()
    monkeypatch.setattr(walks, "is_zen", lambda: other)
    monkeypatch.setattr(compiled, "_blocks", {})
    monkeypatch.setattr(kept_code, "_kept", lambda function: NullCache())
    assert walks.Walk(2, state_bits).in_pairs == other
    check(trellis_of(33, 50, 2, state_bits), 1, "avx512_vnni")


@pytest.mark.cases(1)
@pytest.mark.parametrize(("bits", "state_bits"), [(1, 8), (2, 8), (3, 8), (4, 8), (1, 10), (3, 10), (2, 9), (4, 16)])
def test_every_way_of_avx2_to_find_values(bits: int, state_bits: int) -> None:
    """Shuffles, tables of two and four steps, and arithmetic; one row alone and several. Unpacked, they are exact."""
    if not WITH_AVX2:
        pytest.skip("this CPU has no AVX2")
    matrix = trellis_of(33, 80, bits, state_bits, seed=bits)
    for form in WITH_AVX2:
        for count in (1, 3):
            check(matrix, count, form)
    unpacked = CpuKernel(WITH_AVX2[0], 1).linear(matrix)(torch.eye(80))
    assert torch.equal(unpacked.T, matrix.dequantize())


@pytest.mark.parametrize("state_bits", [8, 10])
@pytest.mark.parametrize("steps", [2, 4])
def test_a_table_of_several_steps_has_the_values_of_each(state_bits: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    for bits in (1, 2):
        codes = torch.randint(0, 1 << bits, (9, trellis.STEPS), generator=generator)
        states = trellis.states(codes, bits, state_bits).long()
        values = table(bits, state_bits)
        found = several(values, bits, state_bits, steps)
        for first in range(0, trellis.STEPS - steps + 1, steps):
            place = states[:, first]
            for step in range(1, steps):
                place = place | codes[:, first + step].long() << state_bits + bits * (step - 1)
            wanted = torch.from_numpy(values)[states[:, first : first + steps]]
            assert torch.equal(torch.from_numpy(found)[place], wanted)


@settings(max_examples=examples(25), deadline=None)
@given(
    rows=some.integers(1, 70),
    inputs=some.integers(1, 140),
    count=some.sampled_from([0, 1, 4, 33, 70]),
    seed=some.integers(0, 9),
)
def test_any_shape_and_number_of_rows(rows: int, inputs: int, count: int, seed: int) -> None:
    if count:
        check(trellis_of(rows, inputs, 3, 10, seed=seed), count, forms()[0])
    else:
        empty = CpuKernel().linear(trellis_of(rows, inputs, 3, 10))(torch.zeros(0, inputs, dtype=BF16))
        assert empty.shape == (0, rows)


@settings(max_examples=examples(40), deadline=None)
@given(
    rows=some.integers(1, 40),
    inputs=some.integers(1, 140),
    bits=some.sampled_from([1, 2, 3, 4, 8]),
    state_bits=some.integers(8, 16),
)
def test_stored_parts_come_back_bit_for_bit(rows: int, inputs: int, bits: int, state_bits: int) -> None:
    matrix = trellis_of(rows, inputs, bits, state_bits)
    found = CpuKernel().linear(matrix).matrix()
    assert isinstance(found, PackedWeight)
    assert (found.bits, found.inputs, found.encoding) == (bits, inputs, matrix.encoding)
    assert torch.equal(found.codes, matrix.codes)
    assert torch.equal(found.scales, matrix.scales)


@pytest.mark.cases(1)
@pytest.mark.parametrize("tokens", [1, 6])
def test_a_layer_of_mixed_widths_in_one_call(tokens: int) -> None:
    layer = layer_of_walks([2, 3, {"gate_proj": 3, "up_proj": 2, DOWN: 4}, 16, 8], 10)
    given = routed(tokens, 5, 2, 80, BF16)
    prepared, why = choice.prepared_layer(layer, CPU, "fixed")
    assert why is None
    assert isinstance(prepared, PackedLayer)
    found, wanted = prepared(*given).double(), reference(layer, *given)
    assert (found - wanted).abs().max() < 2.0**-7 * wanted.abs().max()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_hardly_more_bytes_than_are_stored(bits: int) -> None:
    matrix = trellis_of(256, 512, bits, 10)
    prepared = CpuKernel().linear(matrix)
    assert matrix.nbytes <= prepared.nbytes <= 1.1 * matrix.nbytes


def test_some_rows_are_looked_up_as_values() -> None:
    matrix, rows = trellis_of(70, 50, 2, 10), torch.tensor([69, 3, 3, 17])
    wanted = matrix.dequantize()[rows]
    for policy in ("fixed", "reference"):
        prepared, _ = choice.prepared_linear(matrix, None, CPU, policy)  # type: ignore[arg-type]
        assert policy == "reference" or isinstance(prepared, PackedLinear)
        assert prepared is not None
        found = prepared.some(rows)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, wanted)
