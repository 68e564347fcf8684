"""What an estimate hangs on: its assumptions in words, and the speed-ups that other assumptions give."""

from __future__ import annotations

from moeq.estimator.devices import Hardware
from moeq.estimator.policies import known_policies
from moeq.estimator.result import SensitivityRow
from moeq.estimator.simulation import Simulation
from moeq.estimator.step import Step

SUBJECT = "context_aware"
BWRULE, OPT = "monde_bwrule", "monde_opt"
SENSITIVITY_BATCHES = (4, 16)
_COMPARED = frozenset({SUBJECT, BWRULE, OPT})


def sensitivity(simulation: Simulation, batch: int) -> tuple[SensitivityRow, ...]:
    """Decode speed-ups over MoNDE at `batch` with one assumption changed at a time, and at batch 4 and 16."""
    hardware = simulation.layers.hardware
    text = {key: hardware.constant(key).text for key in _CHANGES}
    rows = [
        _row(simulation.on(hardware.changed(section, **fields)).decode(batch, _COMPARED), key, f"{text[key]} -> {new}")
        for key, (section, fields, new) in _CHANGES.items()
    ]
    batches = [
        _row(simulation.decode(other, _COMPARED), "batch", f"{batch} -> {other}") for other in SENSITIVITY_BATCHES
    ]
    return (*rows, *batches)


_CHANGES: dict[str, tuple[str, dict[str, float | str], str]] = {
    "gpu.layer_overhead": ("gpu", {"layer_overhead_seconds": 0.0}, "0 s (tau = 0)"),
    "link.bandwidth": ("link", {"bandwidth_bytes_per_second": 32e9}, "32 GB/s (PCIe Gen4 x16)"),
    "ndp.low_bit_compute": ("ndp", {"low_bit_compute": "const"}, "const"),
    "ndp.dataflow": ("ndp", {"dataflow": "os"}, "os"),
}


def _row(steps: dict[str, Step], assumption: str, change: str) -> SensitivityRow:
    return SensitivityRow(
        assumption=assumption,
        change=change,
        decode_speedup_over_monde_bwrule=steps[BWRULE].seconds / steps[SUBJECT].seconds,
        decode_speedup_over_monde_opt=steps[OPT].seconds / steps[SUBJECT].seconds,
    )


def assumptions(
    simulation: Simulation,
    *,
    steps: dict[str, Step],
    ndp_speedup: float,
    assigned_layers: int,
    batches: tuple[int, ...],
    uniform_routing: bool,
) -> tuple[str, ...]:
    """One line for every assumption that the answer hangs on; `steps` are those of the first batch."""
    hardware, geometry = simulation.layers.hardware, simulation.layers.geometry
    subject = steps[SUBJECT].seconds
    over = {key: f"{steps[key].seconds / subject:.2f}x" for key in (BWRULE, OPT)}
    lines = [f"{one.key} = {one.text}: {one.source}" for one in hardware.constants if one.is_fitted]
    lines += [
        _low_bit_line(hardware, ndp_speedup),
        f"ndp.dataflow = {hardware.ndp.dataflow}: {hardware.constant('ndp.dataflow').source}",
        f"baseline: decode at batch {batches[0]} is {over[BWRULE]} MoNDE with its bandwidth rule (at least one fetch a "
        f"layer), {over[OPT]} a cost-optimal MoNDE",
        _routing_line(simulation, batches, uniform_routing),
        "prefill: FP16 experts by their expected tokens, a batch together; one migration a batch",
        f"decode: keys and values of {simulation.context} tokens at every step",
    ]
    lines += _policy_lines(hardware)
    if assigned_layers != geometry.num_layers:
        lines.append(f"the placement's {assigned_layers} layer(s) are repeated evenly over {geometry.num_layers}")
    return tuple(lines)


def _low_bit_line(hardware: Hardware, ndp_speedup: float) -> str:
    ndp = hardware.ndp
    what = "grows as 16/bits" if ndp.low_bit_compute == "scale" else "is the same at every width"
    return (
        f"ndp.low_bit_compute = {ndp.low_bit_compute}: the MAC rate ({ndp.peak_macs_per_second / 1e12:.2f} TMAC/s peak "
        f"at 16 bits) {what}; experts on the NDP are {ndp_speedup:.2f}x faster than in FP16"
    )


def _routing_line(simulation: Simulation, batches: tuple[int, ...], uniform: bool) -> str:
    kind = "uniform" if uniform else "by popularity"
    how = {
        "exact": "enumerated exactly",
        "monte-carlo": f"{simulation.samples} Monte Carlo samples, seed {simulation.seed}",
    }
    methods = "; ".join(f"batch {batch} {how[simulation.routing_method(batch)]}" for batch in batches)
    return f"routing: {kind}, tokens independent, without replacement; {methods}"


def _policy_lines(hardware: Hardware) -> list[str]:
    """Parameters of policies that neither a fit nor the hardware file sets, so that a default applies."""
    lines = []
    for name, policy in known_policies().items():
        given = hardware.policies.get(name, {})
        free = [f"{key} = {one.default} ({one.source})" for key, one in policy.parameters.items() if key not in given]
        if free:
            lines.append(f"{name} by default: {', '.join(free)}")
    return lines
