"""What must hold for every policy on every hardware: conservation of bytes and work, monotonicity, overlap."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeq.artifacts.trace import RoutingTrace
from moeq.estimator import Estimate, Grid, Hardware, ModelGeometry, Placement, estimate, load_hardware
from moeq.estimator.geometry import effective_bits
from moeq.estimator.result import TermRow

E, K, L = 6, 2, 4
GEOMETRY = ModelGeometry(
    name="small",
    num_layers=L,
    hidden_size=512,
    intermediate_size=1536,
    num_experts=E,
    top_k=K,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    non_expert_parameters=20_000_000,
)
GRID = Grid(inputs=(64,), outputs=(16,))
NAMES = st.sampled_from(["paper-ctxmoe", "h100-ndp-pcie4", "h100-cpu-pcie5", "rtx5090-host-pcie5", "rtx5090-ssd"])
CAPACITY = 120e6  # bytes of GPU memory: low precision fits for all experts, high precision for some


@pytest.fixture(autouse=True, scope="module")
def without_sensitivity() -> Iterator[None]:
    """Its twenty other answers to every question are not what is asked here."""
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("moeq.estimator.estimate")  # the package's name stands for the function
        patch.setattr(module, "sensitivity", lambda *_, **__: ((), None))
        yield


@st.composite
def hardwares(draw: st.DrawFn) -> Hardware:
    """Any bandwidth, rate and fixed time, far from those of real devices too."""
    factor, part = st.floats(0.02, 50), st.floats(0.3, 1)
    one = load_hardware(draw(NAMES))
    if one.ndp.computes:
        one = one.changed(
            "ndp",
            clock_hertz=one.ndp.clock_hertz * draw(factor),
            dataflow=draw(st.sampled_from(["ws", "os"])),
            low_bit_compute=draw(st.sampled_from(["scale", "const"])),
        )
    one = one.changed(
        "ndp",
        memory_bandwidth_bytes_per_second=one.ndp.memory_bandwidth_bytes_per_second * draw(factor),
        memory_efficiency=draw(part),
    )
    one = one.changed(
        "link",
        bandwidth_bytes_per_second=one.link.bandwidth_bytes_per_second * draw(factor),
        latency_seconds=draw(st.sampled_from([0.0, 1e-6, 1e-3])),
        efficiency=draw(part),
    )
    return one.changed(
        "gpu",
        memory_bandwidth_bytes_per_second=one.gpu.memory_bandwidth_bytes_per_second * draw(factor),
        memory_capacity_bytes=CAPACITY,
        peak_compute_flops_per_second=one.gpu.peak_compute_flops_per_second * draw(factor),
        layer_overhead_seconds=draw(st.sampled_from([0.0, 1e-5, 1e-3])),
    )


def placed(seed: int, *, hot: int | None = None, bits: int | None = None) -> Placement:
    """Random places and widths, or the first `hot` experts of each layer on the GPU and `bits` for the others."""
    generator = np.random.default_rng(seed)
    place = generator.random((L, E)) < 0.4 if hot is None else np.tile(np.arange(E) < hot, (L, 1))
    width = generator.integers(1, 5, (L, E)) if bits is None else np.full((L, E), bits)
    return Placement(name=f"random-{seed}", bits=np.where(place, 16, width), hot=place)


def recorded(seed: int) -> RoutingTrace:
    generator = np.random.default_rng(seed)
    experts = np.argsort(generator.random((80, L, E)) + generator.random((1, L, E)), axis=2)[..., :K]
    return RoutingTrace(
        layers=tuple(map(str, range(L))),
        num_experts=(E,) * L,
        top_k=K,
        experts=experts.astype(np.int16),
        lengths=np.array([30, 50], dtype=np.int32),
        prefill=np.array([10, 20], dtype=np.int32),
        domains=("a", "b"),
    )


def run(hardware: Hardware, placement: Placement, seed: int, *, batch: int = 1, traced: bool = False) -> Estimate:
    generator = np.random.default_rng(seed)
    return estimate(
        GEOMETRY,
        hardware,
        placement,
        popularity=None if traced else generator.dirichlet(np.ones(E), L) + 1e-3,
        trace=recorded(seed) if traced else None,
        grid=Grid(inputs=GRID.inputs, outputs=GRID.outputs, batches=(batch,)),
        monte_carlo_samples=24,
    )


def check_conserved(hardware: Hardware, terms: list[TermRow], seconds: float, least_bits: float) -> None:
    """No phase is shorter than what its bytes and MACs need at the derated rates.

    Nothing but copies crosses the link, and the NDP does nothing, during the dense parts.
    """
    gpu, link, ndp = hardware.gpu, hardware.link, hardware.ndp
    of = {one.term: one for one in terms}
    moved = {name: of[name].bytes if name in of else 0.0 for name in (*of, "fetch", "copies", "activations")}
    to_gpu = moved["fetch"] + moved["copies"]
    needs = {
        "gpu memory": (
            (moved.get("dense", 0.0) + moved.get("gpu_experts", 0.0) + to_gpu)
            / (gpu.memory_efficiency * gpu.memory_bandwidth_bytes_per_second)
        ),
        "ndp memory": (
            (moved.get("ndp_experts", 0.0) + to_gpu) / (ndp.memory_efficiency * ndp.memory_bandwidth_bytes_per_second)
        ),
        "link": (to_gpu + moved["activations"] / 2) / (link.efficiency * link.bandwidth_bytes_per_second),
        "gpu compute": (
            2
            * sum(of[name].macs for name in ("dense", "gpu_experts") if name in of)
            / (gpu.compute_efficiency * gpu.peak_compute_flops_per_second)
        ),
    }
    if "ndp_experts" in of and of["ndp_experts"].macs:
        gain = 16 / least_bits if ndp.low_bit_compute == "scale" else 1.0
        needs["ndp compute"] = of["ndp_experts"].macs / (ndp.peak_macs_per_second * gain)
    beside_dense = seconds if "dense" not in of or "copies" in of else seconds - of["dense"].seconds
    for name, need in needs.items():
        there = seconds if name.startswith("gpu") else beside_dense
        assert need <= there * (1 + 1e-9), (terms[0].policy, terms[0].phase, name)


@given(hardware=hardwares(), seed=st.integers(0, 500), batch=st.sampled_from([1, 2]), traced=st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_result_beats_a_bandwidth_or_a_rate(hardware: Hardware, seed: int, batch: int, traced: bool) -> None:
    placement = placed(seed)
    result = run(hardware, placement, seed, batch=batch, traced=traced)
    least = float(effective_bits(placement.bits, 128).min())
    for policy in result.policies:
        point = result.point(policy, batch=batch, input_tokens=64, output_tokens=16)
        decode = [one for one in result.terms if one.policy == policy]
        check_conserved(hardware, decode, point.decode_seconds_per_token, least)
        for phase, seconds in (("prefill", point.prefill_seconds), ("migration", point.migration_seconds)):
            terms = [one for one in result.earlier_terms if (one.policy, one.phase) == (policy, phase)]
            assert bool(terms) == (seconds > 0)
            if terms:
                check_conserved(hardware, terms, seconds, least)
        rates = {
            "gpu_memory": hardware.gpu.memory_bandwidth_bytes_per_second,
            "ndp_memory": hardware.ndp.memory_bandwidth_bytes_per_second,
            "link": 2 * hardware.link.bandwidth_bytes_per_second,
        }
        for channel, rate in rates.items():
            assert point.bytes_moved[channel] <= rate * point.end_to_end_seconds * (1 + 1e-9)  # type: ignore[index]
        assert 0 <= point.ndp_busy_share <= 1 + 1e-9
        assert 0 <= point.gpu_expert_share <= 1


FASTER = st.sampled_from(
    [
        ("gpu", "memory_bandwidth_bytes_per_second"),
        ("gpu", "peak_compute_flops_per_second"),
        ("link", "bandwidth_bytes_per_second"),
        ("ndp", "memory_bandwidth_bytes_per_second"),
        ("ndp", "clock_hertz"),
    ]
)


@given(
    hardware=hardwares(),
    where=FASTER,
    factor=st.floats(1, 20),
    seed=st.integers(0, 500),
    batch=st.sampled_from([1, 2]),
    traced=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_more_bandwidth_never_makes_a_policy_slower(
    hardware: Hardware, where: tuple[str, str], factor: float, seed: int, batch: int, traced: bool
) -> None:
    """MoNDE's bandwidth rule fetches more as the link gains on the NDP: it is compared where it fetches the same."""
    section, field = where
    old = getattr(getattr(hardware, section), field)
    fast = hardware.changed(section, **{field: old * factor}) if old else hardware
    before, after = (run(one, placed(seed), seed, batch=batch, traced=traced) for one in (hardware, fast))
    for mine, its in zip(before.points, after.points, strict=True):
        fetched = [one.step_terms(mine.policy, batch=batch).get("fetch") for one in (before, after)]
        if mine.policy == "monde_bwrule" and fetched[0].bytes != pytest.approx(fetched[1].bytes):  # type: ignore
            continue
        assert its.decode_seconds_per_token <= mine.decode_seconds_per_token * (1 + 1e-9), mine.policy
        assert its.prefill_seconds <= mine.prefill_seconds * (1 + 1e-9), mine.policy
        assert its.migration_seconds <= mine.migration_seconds * (1 + 1e-9)


@given(hardware=hardwares(), seed=st.integers(0, 500), batch=st.sampled_from([1, 2]), traced=st.booleans())
@settings(max_examples=40, deadline=None)
def test_fewer_bits_never_make_a_policy_slower(hardware: Hardware, seed: int, batch: int, traced: bool) -> None:
    """All but DynaExq, whose pools fill what memory they are given: narrower experts leave room for wide ones."""
    generator, wide = np.random.default_rng(seed), placed(seed)
    bits = np.where(wide.hot, wide.bits, np.maximum(1, wide.bits - generator.integers(0, 3, wide.bits.shape)))
    narrow = Placement(name="narrow", bits=np.sort(bits, axis=1) if traced else bits, hot=wide.hot)
    if traced:  # widths go by rank there: compare sorted ones
        order = np.argsort(wide.hot, axis=1, kind="stable")
        hot = np.take_along_axis(wide.hot, order, axis=1)
        wide = Placement(name="wide", bits=np.sort(wide.bits, axis=1), hot=hot)
        narrow = Placement(name="narrow", bits=np.sort(bits, axis=1), hot=hot)
    slow, fast = (run(hardware, one, seed, batch=batch, traced=traced) for one in (wide, narrow))
    for mine in slow.points:
        if mine.policy not in fast.policies or mine.policy == "dynaexq":
            continue
        its = fast.point(mine.policy, batch=batch, input_tokens=64, output_tokens=16)
        assert its.decode_seconds_per_token <= mine.decode_seconds_per_token * (1 + 1e-9), mine.policy
        assert its.end_to_end_seconds <= mine.end_to_end_seconds * (1 + 1e-9), mine.policy


@given(hardware=hardwares(), low=st.sampled_from([1, 2, 3]), seed=st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_narrower_misses_never_make_hobbit_slower(hardware: Hardware, low: int, seed: int) -> None:
    seconds = []
    for bits in (4, low):
        own = {"high_precision_fraction": 0.5, "low_precision_fraction": 0.4, "low_precision_bits": float(bits)}
        changed = hardware.model_copy(update={"policies": {"hobbit": own}})
        found = run(changed, placed(seed), seed)
        seconds.append(found.point("hobbit", batch=1, input_tokens=64, output_tokens=16).decode_seconds_per_token)
    assert seconds[1] <= seconds[0] * (1 + 1e-12)


@given(hardware=hardwares(), bits=st.integers(1, 4), seed=st.integers(0, 500), traced=st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_larger_k_never_raises_the_ndp_term(hardware: Hardware, bits: int, seed: int, traced: bool) -> None:
    """The term of what is not on the GPU: the NDP's, or the fetches from a memory that only holds."""
    term = "ndp_experts" if hardware.ndp.computes else "fetch"
    batch = 2 if traced else 1
    terms = [
        run(hardware, placed(seed, hot=hot, bits=bits), seed, batch=batch, traced=traced).step_terms(
            "context_aware", batch=batch
        )[term]
        for hot in range(E + 1)
    ]
    for smaller, larger in itertools.pairwise(terms):
        assert larger.seconds <= smaller.seconds * (1 + 1e-9)
        assert larger.bytes <= smaller.bytes * (1 + 1e-9)
    assert terms[-1].seconds == 0


@given(hardware=hardwares(), seed=st.integers(0, 500), first=st.integers(0, E - 1), second=st.integers(0, E - 1))
@settings(max_examples=40, deadline=None)
def test_overlap_equals_the_longer_side(hardware: Hardware, seed: int, first: int, second: int) -> None:
    """Two experts that are always chosen: a step is the dense part and the longer of GPU and NDP with activations."""
    if first == second or not hardware.ndp.computes:
        return
    popularity = np.zeros(E)
    popularity[[first, second]] = 1
    generator = np.random.default_rng(seed)
    hot = np.tile(generator.random((1, E)) < 0.5, (L, 1))
    placement = Placement(name="same", bits=np.where(hot, 16, 3), hot=hot)
    result = estimate(GEOMETRY, hardware, placement, popularity=popularity, grid=GRID)
    terms = result.step_terms("context_aware", batch=1)
    far = terms["ndp_experts"].seconds + terms["activations"].seconds
    longer = max(terms["gpu_experts"].seconds, far)
    point = result.point("context_aware", batch=1, input_tokens=64, output_tokens=16)
    assert point.decode_seconds_per_token == pytest.approx(terms["dense"].seconds + longer, rel=1e-9)


@pytest.mark.parametrize("name", ["h100-ndp-cxl", "rtx5090-host-pcie5"])
def test_energy_is_that_of_bytes_and_macs(name: str) -> None:
    """Twice every energy gives twice the joules; the sum is that of bytes and MACs of all phases."""
    hardware = load_hardware(name)
    result = run(hardware, placed(1), 1)
    energy = hardware.energy
    assert energy is not None
    for point in result.points:
        decode = [one for one in result.terms if one.policy == point.policy]
        before = [one for one in result.earlier_terms if one.policy == point.policy]
        macs = dict.fromkeys(("gpu", "ndp"), 0.0)
        for rows, times in ((before, 1), (decode, 16)):
            for one in rows:
                macs["ndp" if one.term == "ndp_experts" else "gpu"] += times * one.macs
        expected = (
            point.bytes_moved["gpu_memory"] * energy.gpu_memory_joules_per_byte
            + point.bytes_moved["link"] * energy.link_joules_per_byte
            + point.bytes_moved["ndp_memory"] * energy.ndp_memory_joules_per_byte
            + macs["gpu"] * energy.gpu_compute_joules_per_mac
            + macs["ndp"] * energy.ndp_compute_joules_per_mac
        )
        assert point.energy_joules == pytest.approx(expected, rel=1e-9)
    assert all(one.energy_joules is None for one in run(load_hardware("paper-ctxmoe"), placed(1), 1).points)


def test_activations_return_after_the_fetches_in_their_direction() -> None:
    """A link so slow, and a GPU so fast, that the way back of the activations decides."""
    hardware = load_hardware("h100-ndp-pcie4").changed("link", bandwidth_bytes_per_second=1e8)
    hardware = hardware.changed("gpu", memory_bandwidth_bytes_per_second=1e15, peak_compute_flops_per_second=1e18)
    result = run(hardware, placed(1), 1)
    terms = result.step_terms("monde_bwrule", batch=1)
    point = result.point("monde_bwrule", batch=1, input_tokens=64, output_tokens=16)
    assert terms["fetch"].bytes > 0
    assert terms["activations"].bytes > 0
    carried = (terms["fetch"].bytes + terms["activations"].bytes / 2) / 1e8
    assert point.decode_seconds_per_token == pytest.approx(terms["dense"].seconds + carried, rel=1e-12)
