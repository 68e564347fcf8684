"""What every estimator policy keeps to, moeq's own and another package's: shapes, units, laws, documentation."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cases import examples
from fork_server import Finished, ForkServer
from hypothesis import given, settings
from hypothesis import strategies as st
from placed_models import GEOMETRY, E, L, hardwares, placed, recorded, run
from strangers import on_path, write_package

from moeq.errors import EstimateError
from moeq.estimator import Hardware, Placement, load_hardware
from moeq.estimator.geometry import effective_bits
from moeq.estimator.policies import Policy, label, parameter, titled
from moeq.estimator.result import TermRow
from moeq.estimator.simulation import Simulation, build_simulation
from moeq.estimator.step import CHANNELS, TRAFFIC, Layers, Schedule, Work
from moeq.registry import POLICIES

STRANGER = """
import numpy as np

from moeq.estimator.devices import Parameter
from moeq.estimator.in_place import where_they_live
from moeq.estimator.policies import Policy, Variant, number


class Far(Policy):
    def decode(self, layers, work, variant):
        hot, bits = work.placed(layers)
        return where_they_live(layers, work, np.zeros_like(hot), bits * number(self, layers.hardware, "padding"))

    def prefill(self, layers, work, variant):
        return self.decode(layers, work, variant)


POLICY = Far(
    name="strangers",
    help="every expert computes near its memory, whatever the placement says",
    variants={"": Variant("all far", "all experts near their memory")},
    parameters={"padding": Parameter(default=1.0, source="assumption: none", minimum=1.0, alternative=2.0)},
)
"""
MODULES = {"strangers_policy": STRANGER}
ENTRIES = {"strangers": "strangers_policy:POLICY"}
NAMES = [*POLICIES.names(), *ENTRIES]


@pytest.fixture(autouse=True, scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Another package's policy is there; sensitivity's twenty other answers to every question are not asked for."""
    folder = tmp_path_factory.mktemp("strangers")
    write_package(folder, POLICIES.group, ENTRIES, MODULES)
    with on_path(folder, POLICIES, MODULES), pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("moeq.estimator.estimate")  # the package's name stands for the function
        patch.setattr(module, "sensitivity", lambda *_, **__: ((), None, ()))
        yield


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest) -> Policy:
    found: Policy = POLICIES.get(request.param)
    return found


def simulation(hardware: str = "h100-ndp-pcie4", *, traced: bool = False) -> Simulation:
    """Four layers of their own, some experts of each on the GPU."""
    popularity = np.random.default_rng(3).dirichlet(np.ones(E), L) + 1e-3
    return build_simulation(
        GEOMETRY,
        load_hardware(hardware),
        placed(3),
        group_size=128,
        zero_points=True,
        popularity=None if traced else popularity,
        context=512,
        samples=16,
        seed=0,
        trace=recorded(3) if traced else None,
    )


def test_it_says_what_it_is(policy: Policy) -> None:
    assert policy.help
    assert "\n" not in policy.help
    assert not policy.help.endswith(".")
    assert policy.variants
    for variant, title in policy.variants.items():
        assert titled(label(policy.name, variant)) is title
        assert title.short
        assert title.long


def test_parameters_have_sources_and_stand_in_hardware_files(policy: Policy, tmp_path: Path) -> None:
    text = Path(load_hardware("h100-ndp-pcie4").file).read_text("utf-8").partition("policies:")[0]
    for key, one in policy.parameters.items():
        assert one.source.strip()
        assert one.problem_with(one.default) is None
        assert one.alternative is None or one.problem_with(one.alternative) is None
        for value, is_right in ((one.default, True), ("nonsense", False)):
            file = tmp_path / f"{key}-{is_right}.yaml"
            entry = json.dumps({"value": value, "source": "a test"})
            file.write_text(f"{text}\npolicies:\n  {policy.name}:\n    {key}: {entry}\n", "utf-8")
            if is_right:
                hardware = load_hardware(file)
                assert parameter(policy, hardware, key) == value
                assert hardware.constant(f"policies.{policy.name}.{key}").source == "a test"
            else:
                with pytest.raises(EstimateError, match=f"policies.{policy.name}.{key}: 'nonsense' is not"):
                    load_hardware(file)


def check_schedule(schedule: Schedule, layers: Layers, work: Work) -> None:
    """Shapes as step.py says; seconds that hold all bytes; busy times that are within them."""
    shape = work.experts.shape
    assert schedule.seconds.shape == shape[:2]
    assert np.isfinite(schedule.seconds).all()
    assert (schedule.seconds >= 0).all()
    assert set(schedule.terms) <= set(TRAFFIC)
    rates = {"gpu_memory": layers.hardware.gpu, "ndp_memory": layers.hardware.ndp, "link": layers.hardware.link}
    carried = dict.fromkeys(CHANNELS, np.zeros(shape[:2]))
    for name, cost in schedule.terms.items():
        for values in (cost.seconds, cost.bytes, cost.macs):
            assert values.shape in (shape[:2], shape)
            assert np.isfinite(values).all()
            assert (values >= 0).all()
        for channel in TRAFFIC[name] if name != "copies" else ():  # which run beside whole steps
            carried[channel] = carried[channel] + cost.bytes.reshape(*shape[:2], -1).sum(-1)
    for channel in ("gpu_memory", "ndp_memory"):
        device = rates[channel]
        rate = device.memory_bandwidth_bytes_per_second * device.memory_efficiency  # type: ignore[union-attr]
        assert (schedule.seconds * (1 + 1e-9) >= carried[channel] / rate).all(), channel
    for span in schedule.spans():
        assert span.seconds.ndim == 3
        assert (span.seconds >= 0).all()
        if span.name != "copies":
            assert ((span.start + span.seconds).max(-1) <= schedule.seconds * (1 + 1e-9) + 1e-15).all(), span.name


@pytest.mark.parametrize("hardware", ["h100-ndp-pcie4", "rtx5090-host-pcie5", "rtx5090-ssd"])
@pytest.mark.parametrize("traced", [False, True], ids=["drawn", "traced"])
def test_decode_prefill_and_migration_are_whole(policy: Policy, hardware: str, traced: bool) -> None:
    one = simulation(hardware, traced=traced)
    batch = 2 if traced else 1
    for variant in policy.variants:
        for layers, work in one.chunks(batch, in_time=policy.in_time):
            first, again = (policy.decode(layers, work, variant) for _ in range(2))
            check_schedule(first, layers, work)
            np.testing.assert_array_equal(first.seconds, again.seconds)
            assert (first.windows is None) or policy.in_time
            moved = policy.migration(layers, variant)
            assert moved == policy.migration(layers, variant)
            assert moved.bytes >= 0
            assert moved.seconds >= 0
            assert (moved.bytes > 0) == (moved.seconds > 0)
        key = label(policy.name, variant)
        if key not in one.refusals(batch):
            steps = [one.prefill(batch, tokens, frozenset({key}))[key] for tokens in (32, 4096)]
            assert 0 < steps[0].seconds < steps[1].seconds
            assert all(math.isfinite(step.seconds) for step in steps)


def test_a_refusal_is_a_sum_in_words(policy: Policy) -> None:
    layers = simulation().layers
    for kv_cache_bytes in (0.0, 1e18):
        found = policy.refusal(layers, kv_cache_bytes)
        assert found is None or (isinstance(found, str) and found and "\n" not in found)
        assert found == policy.refusal(layers, kv_cache_bytes)
    without = layers.hardware.changed("gpu", memory_capacity_bytes=1.0)
    one = simulation()
    for key, reason in one.on(without).refusals(1).items():
        assert key not in one.on(without).decode(1, frozenset({key})), reason


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


@pytest.mark.full
@given(hardware=hardwares(), seed=st.integers(0, 500), batch=st.sampled_from([1, 2]), traced=st.booleans())
@settings(max_examples=examples(60), deadline=None)
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


@pytest.mark.full
@given(
    hardware=hardwares(),
    where=FASTER,
    factor=st.floats(1, 20),
    seed=st.integers(0, 500),
    batch=st.sampled_from([1, 2]),
    traced=st.booleans(),
)
@settings(max_examples=examples(60), deadline=None)
def test_more_bandwidth_never_makes_a_policy_slower(
    hardware: Hardware, where: tuple[str, str], factor: float, seed: int, batch: int, traced: bool
) -> None:
    """One that is not monotone (a rule that fetches more as the link gains) is compared where it fetches the same."""
    section, field = where
    old = getattr(getattr(hardware, section), field)
    fast = hardware.changed(section, **{field: old * factor}) if old else hardware
    before, after = (run(one, placed(seed), seed, batch=batch, traced=traced) for one in (hardware, fast))
    for mine, its in zip(before.points, after.points, strict=True):
        fetched = [one.step_terms(mine.policy, batch=batch).get("fetch") for one in (before, after)]
        if not titled(mine.policy).monotone and fetched[0].bytes != pytest.approx(fetched[1].bytes):  # type: ignore
            continue
        assert its.decode_seconds_per_token <= mine.decode_seconds_per_token * (1 + 1e-9), mine.policy
        assert its.prefill_seconds <= mine.prefill_seconds * (1 + 1e-9), mine.policy
        assert its.migration_seconds <= mine.migration_seconds * (1 + 1e-9)


@pytest.mark.full
@given(hardware=hardwares(), seed=st.integers(0, 500), batch=st.sampled_from([1, 2]), traced=st.booleans())
@settings(max_examples=examples(40), deadline=None)
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


@pytest.mark.full
def test_another_packages_policy_is_estimated(moeq_anew: ForkServer, tmp_path: Path) -> None:
    """From the command line to the page, its parameter's sensitivity and the timeline; a broken one is told."""
    modules = MODULES | {"strangers_broken": "import no_such_module\n"}
    entries = ENTRIES | {"broken": "strangers_broken:POLICY"}
    write_package(tmp_path / "there", POLICIES.group, entries, modules)
    estimate = ("estimate", "--model", "mixtral-8x7b", "--grid", "in=64", "out=16")

    def moeq_estimate(*options: str) -> Finished:
        return moeq_anew.run(*estimate, *options, package=tmp_path / "there")

    done = moeq_estimate("--policy", "strangers", "--out", str(tmp_path / "out"), "--json")
    assert done.code == 0, done.stderr
    assert done.stderr.splitlines() == [
        "left out: strangers 1.0: entry point broken = strangers_broken:POLICY of moeq.policies cannot be used "
        "(ModuleNotFoundError: No module named 'no_such_module'); update or remove that package"
    ]
    (case,) = json.loads(done.stdout)["cases"]
    assert "strangers" in {point["policy"] for point in case["estimate"]["points"]}
    assert "policies.strangers.padding" in {row["assumption"] for row in case["estimate"]["sensitivity"]}
    written = {path.name: path.read_text("utf-8") for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert "all far" in "".join(text for name, text in written.items() if name.endswith(".html"))
    failing = STRANGER.replace("hot, bits = work.placed(layers)", "1 / 0")
    tmp_path.joinpath("there", "strangers_policy.py").write_text(failing)
    failed = moeq_estimate("--quiet")
    assert failed.code == 10
    assert failed.stderr == (
        "moeq: strangers 1.0: policy 'strangers' failed at decode() (ZeroDivisionError: division by zero); report it "
        "to the authors of that package, or use another policy\n"
    )
    refused = moeq_estimate("--policy", "broken")
    assert refused.code == 10
    assert len(refused.stderr.splitlines()) == 1
    assert "strangers 1.0: entry point broken" in refused.stderr
