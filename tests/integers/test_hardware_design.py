"""Paper 004's two kernels: packed products are exact, cycles are counted, memories hold, the fastest is found."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeq.errors import EstimateError, ModelError, QuantizationError
from moeq.estimator.sheets import paper_004
from moeq.integers.hardware import registers
from moeq.integers.hardware.attention_kernel import AttentionKernel, NormUnit
from moeq.integers.hardware.design import Design, candidates, device, fastest
from moeq.integers.hardware.interval import Interval, signed, unsigned
from moeq.integers.hardware.linear_kernel import LinearKernel, shares
from moeq.integers.hardware.parts import Arithmetic, Parallelism
from moeq.integers.hardware.slices import (
    BLOCK_SHAPES,
    array_slices,
    block_rams,
    constant_slices,
    digits,
    packings,
    slices,
)
from moeq.integers.hardware.vision import KNOWN, Mixture, VisionSizes, from_config, known

AT = Parallelism(queries=4, lanes=8, units=3, inputs=8, outputs=16, norm=4, ends=2)
SMALL = VisionSizes(
    name="small", hidden=24, blocks=2, heads=3, intermediate=40, positions=10, patch_inputs=12, classes=5
)
SPARSE = replace(SMALL, name="sparse", mixture=Mixture(num_experts=5, top_k=2, inner=12, blocks=1))


def design(sizes: VisionSizes = KNOWN["vit-tiny"], at: Parallelism = AT, **arithmetic: object) -> Design:
    return Design(sizes=sizes, arithmetic=Arithmetic(**arithmetic), at=at, device=device("zcu102"))  # type: ignore[arg-type]


OPERANDS = {f"{w} x {a}": (registers.weights(w), signed(a)) for w in (2, 4, 6, 8) for a in (4, 6, 8)} | {
    "both with a sign": (signed(8), signed(8)), "codes": (unsigned(4), signed(8)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERANDS)
def test_packed_products_are_taken_out_exactly(name: str) -> None:
    left, right = OPERANDS[name]
    for way in packings(left, right):
        ends = [(left.low, left.high), (right.low, right.high)]
        for lefts in list(product(ends[0], repeat=way.lefts))[:16]:
            for rights in list(product(ends[1], repeat=way.rights))[:16]:
                a = sum(one << place * way.distance for place, one in enumerate(lefts))
                b = sum(one << place * way.distance * way.lefts for place, one in enumerate(rights))
                assert -(2**26) <= a < 2**26 or -(2**17) <= a < 2**17
                assert min(a.bit_length(), b.bit_length()) < 18, "one of them fits the narrow port"
                assert max(a.bit_length(), b.bit_length()) < 27
                whole = a * b
                for q in range(way.rights):
                    for p in range(way.lefts):
                        field = (whole + (1 << way.distance - 1)) % (1 << way.distance) - (1 << way.distance - 1)
                        assert field == lefts[p] * rights[q], (way, lefts, rights)
                        whole = (whole - field) >> way.distance
                assert whole == 0


def test_products_of_a_slice_by_width() -> None:
    """Two INT8 products, as AMD's white papers pack them; narrower ones closer, without spare bits between them."""
    most = {name: max(way.products for way in packings(*OPERANDS[name])) for name in OPERANDS}
    assert (most["8 x 8"], most["both with a sign"], most["6 x 6"], most["4 x 8"], most["4 x 4"]) == (2, 2, 2, 3, 6)
    for tight in ("8 x 8", "4 x 8"):
        left, right = OPERANDS[tight]
        best = max(packings(left, right), key=lambda way: way.products)
        closer = best.distance - 1
        assert not -(1 << closer - 1) <= (left * right).high < 1 << closer - 1, "one bit closer and a product is cut"


@given(st.integers(1, 60), st.integers(1, 60))
def test_wide_products_are_cut_into_digits_of_26_and_17_bits(a: int, b: int) -> None:
    taken = slices(signed(a), signed(b))
    assert taken == slices(signed(b), signed(a))
    assert taken >= max(1, (a - 1) * (b - 1) / (26 * 17))
    assert (taken == 1) == ((a <= 27 and b <= 18) or (a <= 18 and b <= 27))


def test_a_constant_of_few_digits_takes_no_slice() -> None:
    for constant in range(1, 500):
        best = min(n for n in range(1, 8) if _reachable(constant, n))
        assert digits(constant) == best
    assert [constant_slices(signed(18), size) for size in (192, 384, 768)] == [0, 0, 0]
    assert constant_slices(signed(18), 0b1010101010101) == 1


def _reachable(value: int, terms: int) -> bool:
    """Whether a value is a sum of so many signed powers of two."""
    if terms == 0 or value == 0:
        return value == 0 and terms >= 0
    if value % 2 == 0:
        return _reachable(value // 2, terms)
    return _reachable(value - 1, terms - 1) or _reachable(value + 1, terms - 1)


@pytest.mark.parametrize(
    ("width", "depth"), [(8, 1024), (36, 512), (37, 512), (72, 512), (16, 4096), (2048, 96), (1, 70)]
)
def test_a_memory_fits_into_its_block_rams(width: int, depth: int) -> None:
    taken = block_rams(width, depth)
    assert 2 * taken * 18 * 1024 >= width * depth, "bits"
    assert any(2 * taken == -(-width // wide) * -(-depth // deep) for wide, deep in BLOCK_SHAPES)
    assert block_rams(width, 64) == 0
    assert block_rams(width, 64, small_too=True) == -(-width // 36) / 2


def counted(kernel: LinearKernel, name: str) -> int:
    """Cycles of a linear, one tile of weights after the other, for one group of patches after the other."""
    linear = next(one for one in kernel.linears if one.name == name)
    cycles, at = 0, kernel.at
    for tokens in linear.tokens * linear.parts:
        left = tokens
        while left > 0:
            group = min(left, at.units)
            left -= group
            for _first in range(0, linear.inputs, at.inputs):
                for _digit in range(kernel.passes(linear)):
                    tiles = len(range(0, linear.outputs, at.outputs))
                    cycles += max(tiles, group)  # the router brings one patch's tile a cycle
        cycles += kernel.fill_cycles if tokens else 0
    return cycles


@pytest.mark.parametrize("weights", [4, 6, 8])
@pytest.mark.parametrize("sizes", [SMALL, SPARSE, KNOWN["m3vit-tiny"]], ids=lambda sizes: sizes.name)
def test_cycles_of_linears_are_those_of_the_loops(sizes: VisionSizes, weights: int) -> None:
    kernel = design(sizes, weights=weights).linear
    for linear in kernel.linears:
        assert kernel.compute_cycles(linear) == counted(kernel, linear.name), linear.name
        work = linear.rows * linear.inputs * linear.outputs * linear.parts * kernel.passes(linear)
        assert kernel.compute_cycles(linear) * AT.units * AT.inputs * AT.outputs >= work, "no more than all multipliers"
    ends = next(one for one in kernel.linears if one.name == "head")
    assert kernel.passes(ends) == {4: 3, 6: 2, 8: 1}[weights], "8-bit weights in digits of the kernel's width"


def test_no_routing_takes_more_cycles_than_the_worst() -> None:
    kernel = design(SPARSE).linear
    linear = next(one for one in kernel.linears if one.name == "experts up")
    slots = linear.rows
    worst = kernel.worst_cycles(linear)
    assert worst is not None
    found = [
        kernel.compute_cycles(replace(linear, tokens=(*given, slots - sum(given))))
        for given in product(range(SMALL.positions + 1), repeat=4)
        if 0 <= slots - sum(given) <= SMALL.positions
    ]
    assert kernel.compute_cycles(linear) <= max(found) <= worst
    assert sum(shares(slots, 5)) == slots
    assert max(shares(slots, 5)) - min(shares(slots, 5)) <= 1


@pytest.mark.parametrize("softmax", ["log-sqrt2", "log2", "uniform"])
def test_cycles_of_attention_are_those_of_its_groups(softmax: str) -> None:
    kernel = design(SMALL, softmax=softmax).attention
    stage = SMALL.positions * 1  # 8 channels of a head, 8 lanes
    groups = 3 * 3  # heads, and 10 queries in fours
    late = 2 if softmax == "uniform" else 1
    assert kernel.stage_cycles == max(stage, AT.queries * 4)
    assert kernel.cycles == (groups + late) * kernel.stage_cycles + kernel.fill_cycles
    work = SMALL.positions**2 * SMALL.hidden
    assert kernel.cycles * AT.queries * AT.lanes >= work
    even = replace(AT, queries=2, lanes=8)
    ideal = AttentionKernel(sizes=SMALL, arithmetic=kernel.arithmetic, at=replace(even, ends=8))
    assert (ideal.cycles - ideal.fill_cycles - late * ideal.stage_cycles) * even.queries * even.lanes == work


def test_values_take_multipliers_only_where_weights_are_no_powers() -> None:
    log, even, two = (design(softmax=softmax) for softmax in ("log-sqrt2", "uniform", "log2"))
    assert any(one.what == "weight * value" for one in even.multipliers)
    assert not any(one.what == "weight * value" for one in (*log.multipliers, *two.multipliers))
    parity = [one for one in log.multipliers if one.what.startswith("parity")]
    assert log.dsps - two.dsps == sum(one.slices for one in parity) > 0
    assert log.attention.accumulator_bits > two.attention.accumulator_bits == 32
    exact = design(softmax="log-sqrt2", denominator="exact")
    assert [one.what for one in exact.multipliers].count("powers") == 1


def test_what_a_width_costs() -> None:
    """Fewer bits never take more multipliers or wider sums at the same parallelism; the ends take more cycles."""
    designs = {
        text: design(weights=w, activations=a)
        for text, w, a in (("8/8", 8, 8), ("6/6", 6, 6), ("4/8", 4, 8), ("4/4", 4, 4))
    }
    arrays = {text: one.linear.multipliers[0].slices for text, one in designs.items()}
    assert arrays == {"8/8": 8 * 24, "6/6": 8 * 24, "4/8": 8 * 18, "4/4": 8 * 12}
    sums = {
        text: max(one.accumulators.bits for one in held.linear.linears if one.name == "MLP down")
        for text, held in designs.items()
    }
    assert sums == {"8/8": 26, "6/6": 22, "4/8": 22, "4/4": 18}
    assert designs["4/8"].cycles > designs["8/8"].cycles
    words = {
        text: next(memory.width for memory in one.memories if memory.what == "weights") for text, one in designs.items()
    }
    assert words["8/8"] == 2 * words["4/8"]


def test_norms_go_on_while_roots_are_taken() -> None:
    unit = NormUnit(sizes=KNOWN["vit-tiny"], arithmetic=Arithmetic(), at=AT)
    assert unit.cycles >= 197 * 48
    wide = replace(unit, at=replace(AT, norm=64))
    assert 196 * 26 < wide.cycles < unit.cycles, "a root of 26 bits takes 26 cycles"


def test_weights_are_fetched_or_stay() -> None:
    streamed = design()
    kept = replace(streamed, weights="preloaded")
    assert all(layer.fetch_cycles == 0 for layer in kept.layers)
    slow = replace(streamed, device=replace(streamed.device, bytes_per_second=1e6))
    bits = sum(layer.count * layer.inputs * layer.outputs * layer.left_bits for layer in slow.linear.layers)
    fetched = sum(layer.count * layer.fetch_cycles for layer in slow.layers)
    assert fetched >= bits / 8 / (1e6 / 300e6)
    assert slow.cycles > streamed.cycles
    assert kept.block_rams * 36 * 1024 >= bits


def test_macs_are_those_of_the_sheet_and_of_the_printed_throughput() -> None:
    for run in paper_004.runs():
        name = {"ViT-T": "vit-tiny", "ViT-S": "vit-small"}[str(run.row.model)]
        sizes = KNOWN[name if run.model.experts is None else f"m3{name}"]
        assert sizes.macs == run.model.macs
        assert 2 * sizes.macs / run.row.seconds / 1e9 == pytest.approx(run.row.gops, rel=0.004)


def test_the_fastest_is_no_slower_than_any_that_fits() -> None:
    start = replace(design(SPARSE), device=replace(device("zcu102"), dsps=150, block_rams=40))
    found = fastest(start, {"inputs": 8})
    assert found.shortage is None
    others = [replace(start, at=at) for at in candidates(SPARSE, {"inputs": 8, "queries": 2})]
    fitting = [one for one in others if one.shortage is None]
    assert len(fitting) > 5
    assert found.cycles <= min(one.cycles for one in fitting)
    again = fastest(start, {"inputs": 8, "queries": found.at.queries})
    assert again == found


def test_a_design_that_does_not_fit_says_by_how_much() -> None:
    large = design(KNOWN["vit-base"], replace(AT, units=16, inputs=32, outputs=32))
    error = large.refusal()
    assert isinstance(error, EstimateError)
    assert f"vit-base at 8/8/4 does not fit zcu102: {large.dsps:,} of 2,520 DSPs" in str(error)
    assert "weight * x takes " in str(error)
    tight = replace(design(), weights="preloaded")
    assert "of 912 block RAMs; weights takes" in str(tight.refusal())
    assert design().refusal() is None
    with pytest.raises(EstimateError, match=r"unknown FPGA 'zcu103'; did you mean 'zcu102'\?"):
        device("zcu103")


def test_sums_that_leave_their_registers_are_refused_by_name() -> None:
    huge = replace(SMALL, hidden=1 << 18)
    with pytest.raises(
        QuantizationError, match="query, key, value: sums of 262144 products take 34 bits, 32 are there"
    ):
        design(huge).linear.linears  # noqa: B018
    with pytest.raises(QuantizationError, match="attention: log2 attention of 4 bits over 1048576 keys"):
        design(replace(SMALL, positions=1 << 20), softmax="log2").attention.registers  # noqa: B018


CONFIG = {
    "model_type": "moe_vit", "hidden_size": 24, "num_attention_heads": 3, "patch_size": 2, "num_hidden_layers": 2,
    "image_size": 6, "intermediate_size": 40, "num_channels": 3, "id2label": {str(n): "" for n in range(5)},
    "moe_layers": [1], "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
}  # fmt: skip


def test_sizes_of_a_configuration() -> None:
    assert from_config(CONFIG, "sparse") == SPARSE
    dense = {key: value for key, value in CONFIG.items() if not key.startswith("moe")} | {"model_type": "deit"}
    found = from_config(dense, "small")
    assert (found.positions, found.prefix, found.mixture) == (11, 2, None)
    assert known("vit-base").macs == pytest.approx(17.56e9, rel=0.01)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ({"num_labels": 10}, 10),
        ({"num_labels": [7, 3]}, 7),
        ({"num_labels": 10, "id2label": {"0": "a", "1": "b", "2": "c"}}, 3),
        ({}, 2),
    ],
)
def test_classes_are_those_that_a_configuration_states(labels: dict[str, object], classes: int) -> None:
    bare = {key: value for key, value in CONFIG.items() if key != "id2label"}
    assert from_config(bare | labels, "vit").classes == classes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "model_type is 'mixtral', no vision transformer"),
        ({"hidden_size": 25}, "sizes of heads or patches do not divide"),
        ({"hidden_size": "24"}, "hidden_size is '24', a whole number from 1 is wanted"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"image_size": [6, 8]}, "image_size is [6, 8]"),
        ({"moe_layers": [0, 1, 2]}, "moe_layers is [0, 1, 2]"),
        ({"num_experts_per_tok": 6}, "6 experts of 5 for a position"),
        ({"id2label": {}, "num_labels": []}, "num_labels is []"),
    ],
)
def test_sizes_that_are_none_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError) as error:
        from_config(CONFIG | change, "config.json")
    assert message in str(error.value)


def test_an_array_takes_what_its_packing_says() -> None:
    taken, way = array_slices(registers.weights(4), signed(4), 16, 4)
    assert way is not None
    assert taken == -(-16 // way.lefts) * -(-4 // way.rights)
    assert array_slices(Interval(-(2**30), 2**30), signed(8), 2, 3) == (12, None)
