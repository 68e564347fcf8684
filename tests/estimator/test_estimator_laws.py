"""What must hold for single policies on every hardware: memory of K, overlap, energy; laws of all: conformance."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from placed_models import GEOMETRY, GRID, E, L, hardwares, placed, run

from moeq.estimator import Hardware, Placement, estimate, load_hardware


@pytest.fixture(autouse=True, scope="module")
def without_sensitivity() -> Iterator[None]:
    """Its twenty other answers to every question are not what is asked here."""
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("moeq.estimator.estimate")  # the package's name stands for the function
        patch.setattr(module, "sensitivity", lambda *_, **__: ((), None, ()))
        yield


@given(hardware=hardwares(), low=st.sampled_from([1, 2, 3]), seed=st.integers(0, 100))
@settings(max_examples=examples(15), deadline=None)
def test_narrower_misses_never_make_hobbit_slower(hardware: Hardware, low: int, seed: int) -> None:
    seconds = []
    for bits in (4, low):
        own = {"high_precision_fraction": 0.5, "low_precision_fraction": 0.4, "low_precision_bits": float(bits)}
        changed = hardware.model_copy(update={"policies": {"hobbit": own}})
        found = run(changed, placed(seed), seed)
        seconds.append(found.point("hobbit", batch=1, input_tokens=64, output_tokens=16).decode_seconds_per_token)
    assert seconds[1] <= seconds[0] * (1 + 1e-12)


@pytest.mark.full
@given(hardware=hardwares(), bits=st.integers(1, 4), seed=st.integers(0, 500), traced=st.booleans())
@settings(max_examples=examples(25), deadline=None)
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
@settings(max_examples=examples(40), deadline=None)
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
    """The sum is that of bytes and MACs of all phases, and of static power while they last."""
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
            point.end_to_end_seconds * (energy.gpu_static_watts + energy.ndp_static_watts)
            + point.bytes_moved["gpu_memory"] * energy.gpu_memory_joules_per_byte
            + point.bytes_moved["link"] * energy.link_joules_per_byte
            + point.bytes_moved["ndp_memory"] * energy.ndp_memory_joules_per_byte
            + macs["gpu"] * energy.gpu_compute_joules_per_mac
            + macs["ndp"] * energy.ndp_compute_joules_per_mac
        )
        assert point.energy_joules == pytest.approx(expected, rel=1e-9)
        assert point.energy_by_device is not None
        assert sum(point.energy_by_device.values()) == pytest.approx(expected, rel=1e-9)
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
