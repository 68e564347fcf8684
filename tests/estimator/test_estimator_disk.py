"""A disk behind the memory beside the GPU: what lies there, what reading it takes, who reads what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeq.errors import EstimateError
from moeq.estimator import Grid, Hardware, estimate, load_geometry, load_hardware, uniform_placement
from moeq.estimator.capacity import plan_capacity
from moeq.estimator.from_disk import on_disk
from moeq.estimator.simulation import Simulation, build_simulation
from moeq.estimator.timeline import timeline

MIXTRAL = load_geometry("mixtral-8x7b")
WHOLE = MIXTRAL.num_layers * MIXTRAL.expert_bytes(16, None)  # one expert of every layer
NAME = "rtx5090-host-ssd"


def hardware(experts: float, *, disk: bool = True) -> Hardware:
    """Whose memory beside the GPU has room for so many FP16 experts of every layer."""
    found = load_hardware(NAME).changed("ndp", memory_capacity_bytes=max(experts * WHOLE, 1.0))
    return found if disk else found.model_copy(update={"disk": None})


def simulated(found: Hardware, *, hot: int = 0, bits: float = 16, popularity: object = None) -> Simulation:
    placement = uniform_placement(MIXTRAL, bits=bits, hot_experts=hot)
    return build_simulation(MIXTRAL, found, placement, group_size=None, popularity=popularity)


def test_every_use_of_what_lies_on_the_disk_reads_it_before_the_layer_goes_on() -> None:
    beside, without = (
        simulated(hardware(5, disk=disk)).decode(1)["gpu_only"] for disk in (True, False)
    )  # three of eight lie on the disk
    disk = hardware(5).disk
    assert disk is not None
    uses = MIXTRAL.num_layers * 2 * 3 / 8
    seconds = uses * (MIXTRAL.expert_bytes(16, None) / disk.rate + disk.latency_seconds)
    assert beside.seconds - without.seconds == pytest.approx(seconds)
    assert beside.terms["disk"].bytes == pytest.approx(uses * MIXTRAL.expert_bytes(16, None))
    assert beside.terms["disk"].bound_by == "bytes"


@pytest.mark.parametrize("policy", ["gpu_only", "hobbit", "monde_opt", "monde_bwrule", "context_aware"])
def test_memory_that_holds_all_reads_nothing(policy: str) -> None:
    beside, without = (simulated(hardware(8, disk=disk)) for disk in (True, False))
    assert beside.decode(1)[policy] == without.decode(1)[policy]
    assert beside.prefill(1, 64)[policy] == without.prefill(1, 64)[policy]


def test_a_phase_reads_the_versions_that_it_computes_with() -> None:
    """Room for two FP16 experts, or for all cold ones at 4 bits: only the context-aware prefill waits."""
    found = simulated(hardware(2), hot=2, bits=4)
    assert "disk" not in found.decode(1)["context_aware"].terms
    assert "disk" not in found.decode(1)["static_placement"].terms
    assert "disk" not in found.prefill(1, 64)["static_placement"].terms
    read = found.prefill(1, 1024)["context_aware"].terms["disk"]  # a prompt that reaches every expert
    assert read.bytes == pytest.approx(6 * WHOLE)


def test_the_least_popular_lie_on_the_disk() -> None:
    popularity = np.array([0.3, 0.02, 0.2, 0.03, 0.2, 0.05, 0.1, 0.1])
    found = simulated(hardware(5), popularity=popularity)
    near = np.full((1, 8), MIXTRAL.expert_bytes(16, None))
    assert np.flatnonzero(on_disk(found.layers, near)[0]).tolist() == [1, 3, 5]
    assert not on_disk(simulated(hardware(5, disk=False)).layers, near).any()
    uniform = simulated(hardware(5)).decode(1)["gpu_only"].terms["disk"].bytes
    assert found.decode(1)["gpu_only"].terms["disk"].bytes < 0.4 * uniform


def test_widths_decide_how_many_the_memory_holds() -> None:
    found = simulated(hardware(2), bits=4)
    bits = np.array([[4, 16, 4, 16, 4, 16, 4, 16.0]])
    assert np.flatnonzero(on_disk(found.layers, MIXTRAL.expert_parameters / 8 * bits)[0]).tolist() == [3, 4, 5, 6, 7]


def test_a_disk_counts_for_what_fits() -> None:
    placement = uniform_placement(MIXTRAL, bits=4, hot_experts=0)
    for disk, fits in ((True, True), (False, False)):
        plan = plan_capacity(
            MIXTRAL, hardware(2, disk=disk), placement, batch=1, context=64, group_size=128, zero_points=False
        )
        assert plan.ndp.fits == fits
    assert plan_capacity(
        MIXTRAL, hardware(2), placement, batch=1, context=64, group_size=128, zero_points=False
    ).ndp.name.endswith("and disk")


def test_estimates_say_it_and_timelines_show_it() -> None:
    placement, grid = uniform_placement(MIXTRAL, bits=16, hot_experts=0), Grid(inputs=(64,), outputs=(8,))
    found = estimate(MIXTRAL, hardware(5), placement, grid=grid, policies=("gpu_only",), group_size=None)
    assert any("gpu_only 3" in line and line.startswith("disk: ") for line in found.assumptions)
    assert all(set(point.bytes_moved) == {"gpu_memory", "link", "ndp_memory", "disk"} for point in found.points)
    intervals = timeline(MIXTRAL, hardware(0), placement, policy="gpu_only", group_size=None)
    reads = [one for one in intervals if one.resource == "disk" and one.layer == 0]
    fetches = [one for one in intervals if one.name == "fetch" and one.layer == 0]
    assert len(reads) == len(fetches) == 2
    assert max(one.start_seconds + one.seconds for one in reads) <= min(one.start_seconds for one in fetches) + 1e-12


def test_energy_of_a_disk_is_not_worked_out(tmp_path: Path) -> None:
    text = Path(load_hardware(NAME).file).read_text("utf-8") + "energy: {}\n"
    (tmp_path / "mine.yaml").write_text(text, "utf-8")
    with pytest.raises(EstimateError, match="energy of a disk is not worked out"):
        load_hardware(tmp_path / "mine.yaml")
