"""Hardware files: units, sources, bounds, unknown keys; every bundled file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from moeq.errors import EstimateError, MissingError
from moeq.estimator import hardware as hardware_module
from moeq.estimator import known_hardware, load_hardware, units
from moeq.estimator.terms import expert_seconds, t_ndp
from moeq.estimator.units import parse_quantity

BUNDLED = Path(hardware_module.__file__).with_name("hardware")
DELETE = object()


def edited(tmp_path: Path, key: str, value: Any, of: str = "paper-ctxmoe") -> Path:
    """A copy of a bundled file with the entry of a dotted key replaced or deleted."""
    tree = yaml.safe_load((BUNDLED / f"{of}.yaml").read_text())
    *parents, last = key.split(".")
    branch = tree
    for parent in parents:
        branch = branch[parent]
    if value is DELETE:
        del branch[last]
    else:
        branch[last] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize("name", known_hardware())
def test_every_bundled_file_loads_with_sources(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert hardware.description
    assert all(len(one.source) > 5 for one in hardware.constants)
    assert load_hardware(BUNDLED / f"{name}.yaml") == hardware


def test_the_preset_in_si_units() -> None:
    hardware = load_hardware("paper-ctxmoe")
    assert hardware.gpu.memory_bandwidth_bytes_per_second == pytest.approx(3.35e12)
    assert hardware.gpu.peak_compute_flops_per_second == pytest.approx(989.4e12)
    assert hardware.gpu.layer_overhead_seconds == pytest.approx(0.33e-3)
    assert hardware.link.bandwidth_bytes_per_second == pytest.approx(64e9)
    assert hardware.link.latency_seconds == pytest.approx(5e-6)
    assert hardware.ndp.clock_hertz == pytest.approx(1e9)
    fitted = {one.key for one in hardware.constants if one.is_fitted}
    assert fitted == {"link.bandwidth", "gpu.layer_overhead", "policies.hobbit.high_precision_fraction"}


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        ("512 GB/s", "byte/second", 512e9),
        ("512GB/s", "byte/second", 512e9),
        ("1.5e3 MiB/s", "byte/second", 1.5e3 * 2**20),
        ("256 Gbit/s", "byte/second", 32e9),
        ("80 GiB", "byte", 80 * 2**30),
        ("0.33 ms", "second", 0.33e-3),
        ("5 µs", "second", 5e-6),
        ("989.4 TFLOP/s", "flop/second", 989.4e12),
        ("1 TMAC/s", "flop/second", 2e12),
        ("1.2 GHz", "hertz", 1.2e9),
        ("5 pJ/bit", "joule/byte", 40e-12),
        ("1.4 pJ/MAC", "joule/mac", 1.4e-12),
        ("0.7 pJ/FLOP", "joule/mac", 1.4e-12),
        ("1 J/GB", "joule/byte", 1e-9),
        ("312 TFLOPS", "flop/second", 312e12),
        ("1979 TOPS", "flop/second", 1979e12),
        ("1.5 PFLOPS", "flop/second", 1.5e15),
        ("300 mW", "watt", 0.3),
    ],
)
def test_quantities(text: str, unit: str, expected: float) -> None:
    assert parse_quantity(text, unit) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("unit", "written"), [(unit, text) for unit in units.USUAL for text in units.USUAL[unit]])
def test_usual_units_are_to_the_last_bit_as_in_pint(unit: str, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{number} {written}" for number in ("1", "3", "0.7", "989.4", "936.2", "1e-3", "131072", "-5")]
    known = [parse_quantity(text, unit) for text in texts]
    monkeypatch.setattr(units, "USUAL", {})
    assert known == [parse_quantity(text, unit) for text in texts]


@pytest.mark.parametrize(("text", "unit"), [("80 mB", "byte"), ("512 mB/s", "byte/second"), ("1 mHz", "hertz")])
def test_thousandths_of_a_byte_are_refused(text: str, unit: str) -> None:
    with pytest.raises(ValueError, match="M is mega, m is milli"):
        parse_quantity(text, unit)


def test_files_that_come_with_moeq_need_no_pint() -> None:
    code = (
        "import sys\n"
        "from moeq.estimator import known_hardware, load_hardware\n"
        "assert [load_hardware(name) for name in known_hardware()]\n"
        "assert 'pint' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        ("ndp.memory_bandwidth", {"value": "512 GHz", "source": "s"}, "'512 GHz' has the wrong dimension"),
        ("ndp.memory_bandwidth", {"value": "512 GB", "source": "s"}, "wrong dimension"),
        ("ndp.clock", {"value": "1 GB/s", "source": "s"}, "wrong dimension"),
        ("link.latency", {"value": 5e-6, "source": "s"}, "has no unit"),
        ("link.latency", {"value": "5", "source": "s"}, "'5' has no unit"),
        ("link.latency", {"value": "5 parsecs", "source": "s"}, "unknown unit"),
        ("link.latency", {"value": "five us", "source": "s"}, "not a number with a unit"),
        ("link.latency", {"value": "5 us/(", "source": "s"}, "unit that cannot be read"),
        ("link.latency", {"value": "-5 us", "source": "s"}, "give 0 or more"),
        ("link.bandwidth", {"value": "0 GB/s", "source": "s"}, "give a number above 0"),
        ("link.bandwidth", {"value": "1e999 GB/s", "source": "s"}, "not finite"),
        ("link.bandwidth", {"value": "64 GB/s"}, "no source"),
        ("link.bandwidth", {"source": "s"}, "no value"),
        ("link.bandwidth", {"value": "64 GB/s", "sauce": "s"}, "did you mean 'source'"),
        ("link.bandwidth", "64 GB/s", "not a constant with a source"),
        ("gpu.compute_efficiency", {"value": 1.2, "source": "s"}, "give 1 or less"),
        ("gpu.compute_efficiency", {"value": True, "source": "s"}, "not a number"),
        ("ndp.arrays", {"value": 2.5, "source": "s"}, "give a whole number"),
        ("ndp.dataflow", {"value": "is", "source": "s"}, "'ws', 'os' or 'none'"),
        ("policies.hobbit.low_precision_bits", {"value": "int4", "source": "s"}, "not a number"),
        ("policies.hobbit.high_precision_fraction", {"value": 2, "source": "s"}, "not between 0 and 1"),
        ("policies.monde.prefill_split", {"value": "best", "source": "s"}, "not one of opt, bwrule"),
    ],
)
def test_a_bad_constant_names_file_and_key(tmp_path: Path, key: str, entry: Any, message: str) -> None:
    path = edited(tmp_path, key, entry)
    with pytest.raises(EstimateError, match=re.escape(message)) as caught:
        load_hardware(path)
    assert str(path) in str(caught.value)
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.do


@pytest.mark.parametrize(
    ("of", "key", "entry", "message"),
    [
        (
            "h100-ndp-cxl",
            "energy.link",
            {"value": "6 pJ", "source": "s"},
            "'6 pJ' has the wrong dimension",
        ),
        ("h100-ndp-cxl", "energy.link", {"value": "6 pJ/MAC", "source": "s"}, "wrong dimension"),
        ("h100-ndp-cxl", "energy.gpu_compute", {"value": "-1 pJ/MAC", "source": "s"}, "give 0 or more"),
        ("h100-ndp-cxl", "energy.ndp_memory", DELETE, "missing key 'energy.ndp_memory'"),
        ("h100-ndp-cxl", "energy.gpu", {"value": "6 pJ/MAC", "source": "s"}, "unknown key 'energy.gpu'"),
        ("h100-ndp-cxl", "ndp.arrays", DELETE, "missing key 'ndp.arrays'"),
        ("h100-ndp-cxl", "ndp.low_bit_compute", DELETE, "missing key 'ndp.low_bit_compute'"),
        ("a100-host-pcie4", "ndp.dataflow", DELETE, "missing key 'ndp.arrays'"),
        ("a100-host-pcie4", "ndp.dataflow", {"value": "ws", "source": "s"}, "missing key 'ndp.arrays'"),
        ("a100-host-pcie4", "ndp.arrays", {"value": 4, "source": "s"}, "unknown key 'ndp.arrays'"),
        ("a100-host-pcie4", "ndp.memory_bandwidth", {"value": "-1 GB/s", "source": "s"}, "give a number above 0"),
    ],
)
def test_energies_and_memories_that_only_hold(tmp_path: Path, of: str, key: str, entry: Any, message: str) -> None:
    with pytest.raises(EstimateError, match=re.escape(message)) as caught:
        load_hardware(edited(tmp_path, key, entry, of))
    assert "mine.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_energies_are_optional(tmp_path: Path) -> None:
    assert load_hardware("paper-ctxmoe").energy is None
    energy = load_hardware("h100-ndp-cxl").energy
    assert energy is not None
    assert energy.gpu_memory_joules_per_byte == pytest.approx(40e-12)
    assert energy.ndp_compute_joules_per_mac == pytest.approx(1.5e-12)
    assert load_hardware(edited(tmp_path, "energy", DELETE, "h100-ndp-cxl")).energy is None


def test_some_memories_only_hold_experts() -> None:
    only_hold = {name for name in known_hardware() if not load_hardware(name).ndp.computes}
    assert {"a100-host-pcie4", "h200-host-pcie5", "rtx5090-host-pcie5", "rtx5090-ssd", "a6000-host-pcie4"} <= only_hold
    assert load_hardware("rtx5090-ssd").ndp.peak_macs_per_second == 0
    with pytest.raises(EstimateError, match="experts do not compute beside this memory"):
        expert_seconds(1000, 4, load_hardware("rtx5090-ssd"), group_size=64, zero_points=False)


def test_a_host_of_cores_multiplies_at_its_peak() -> None:
    cpu = load_hardware("h100-cpu-pcie5").ndp
    assert cpu.peak_macs_per_second == pytest.approx(56 * 512 * 2e9)
    cost = t_ndp(10**9, 16, np.array([1600, 16000]), cpu)
    assert cost.seconds == pytest.approx(10**9 * np.array([1600, 16000]) / cpu.peak_macs_per_second)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("ndp.memory_bandwith", "ndp.memory_bandwidth"),
        ("gpuss", "gpus"),
        ("policies.hobit", "policies.hobbit"),
        ("policies.hobbit.cached_expert", "policies.hobbit.cached_experts"),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, key: str, nearest: str) -> None:
    path = edited(tmp_path, key, {"value": "1 GB/s", "source": "s"})
    with pytest.raises(EstimateError, match=f"unknown key '{key}'; did you mean '{nearest}'") as caught:
        load_hardware(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("key", ["ndp.clock", "link"])
def test_a_missing_key_is_an_error(tmp_path: Path, key: str) -> None:
    with pytest.raises(EstimateError, match=f"missing key '{key}'"):
        load_hardware(edited(tmp_path, key, DELETE))


def test_files_that_are_no_hardware(tmp_path: Path) -> None:
    with pytest.raises(EstimateError, match="did you mean 'paper-ctxmoe'"):
        load_hardware("paper-ctxmo")
    with pytest.raises(MissingError, match="no such file or directory"):
        load_hardware(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    for text, message in (("gpu: [", "not valid YAML"), ("- 1", "not a mapping"), ("gpu: 3\nlink: 1\nndp: 2", "gpu")):
        broken.write_text(text)
        with pytest.raises(EstimateError, match=message):
            load_hardware(broken)
    broken.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(EstimateError, match="UTF-8"):
        load_hardware(broken)


def test_policies_are_optional(tmp_path: Path) -> None:
    assert load_hardware(edited(tmp_path, "policies", DELETE)).policies == {}


def test_a_change_is_noted_as_its_source() -> None:
    changed = load_hardware("paper-ctxmoe").changed("link", bandwidth_bytes_per_second=32e9)
    assert changed.link.bandwidth_bytes_per_second == 32e9
    assert changed.constant("link.bandwidth").source == "changed from 64 GB/s"


def test_importing_the_estimator_is_light() -> None:
    code = "import sys, moeq.estimator; print({'torch', 'transformers', 'pint', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
