"""What an estimate hangs on, in words."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moeq.estimator.devices import Hardware
from moeq.estimator.from_disk import on_disk
from moeq.estimator.geometry import ModelGeometry
from moeq.estimator.points import BWRULE, OPT, SUBJECT
from moeq.estimator.replay import Replay
from moeq.estimator.simulation import Simulation
from moeq.estimator.step import Step


def assumptions(
    simulation: Simulation,
    *,
    steps: Mapping[str, Step],
    batches: tuple[int, ...],
    assigned_layers: int,
    popularity_given: bool,
    kv_growth: bool,
    ndp_speedup: float,
    sampled_steps: int | None,
) -> tuple[str, ...]:
    """One line for every assumption that the answer hangs on.

    `steps` are those of the first batch; `sampled_steps`: of a trace, how many the sensitivity was taken from (None:
    all).
    """
    hardware, geometry = simulation.layers.hardware, simulation.layers.geometry
    subject = steps[SUBJECT].seconds
    over = {key: f"{steps[key].seconds / subject:.2f}x" for key in (BWRULE, OPT)}
    lines = [f"{fitted.key} = {fitted.text}: {fitted.source}" for fitted in hardware.constants if fitted.is_fitted]
    lines += [*_gpus_lines(hardware), *_disk_lines(simulation), *_ndp_lines(hardware, ndp_speedup)]
    lines += [
        f"baseline: decode at batch {batches[0]} is {over[BWRULE]} MoNDE with its bandwidth rule (at least one fetch a "
        f"layer), {over[OPT]} a cost-optimal MoNDE",
        *_routing_lines(simulation, batches, popularity_given, sampled_steps),
        "prefill: FP16 experts by their expected tokens, a batch together, of fewer than "
        f"{simulation.drawn_below} tokens by routing that is drawn; one migration a batch",
        "decode: keys and values of the prompt and what was decoded so far"
        if kv_growth
        else f"decode: keys and values of {simulation.context} tokens at every step",
        _kept_line(geometry, simulation.kv_tokens if kv_growth else simulation.context, hardware.count),
    ]
    if geometry.other_bits != 16:
        lines.append(f"all but the experts at {geometry.other_bits:.2f} bits a weight, under every policy")
    lines += _policy_lines(simulation)
    if encoder := geometry.encoder_layers:
        decoder = geometry.num_layers - encoder
        lines.append(
            f"encoder-decoder: prompts go through {encoder} MoE layers, decode steps through the other {decoder}"
        )
    if looped := sum(times > 1 for times in geometry.times):
        lines.append(
            f"{looped} of {geometry.num_layers} MoE layers run up to {max(geometry.times)} times a token: each time by "
            "routing of its own, copies between memories as often"
        )
    if assigned_layers != geometry.num_layers:
        lines.append(f"the placement's {assigned_layers} layer(s) are repeated evenly over {geometry.num_layers}")
    return tuple(lines)


def _kept_line(geometry: ModelGeometry, context: int, gpus: int) -> str:
    """What is kept of a text, by all GPUs together."""
    each = float(geometry.kv_bytes(context)) / max(1, context)
    width = "FP16" if geometry.cache_bits == 16 else f"{geometry.cache_bits:g} bits"
    line = f"keys and values in {width}: {each:,.0f} bytes a token of {context}"
    line += f" on {gpus} GPUs together" if gpus > 1 else ""
    for kind in geometry.kept:
        if kind.window is not None:
            line += f"; in {kind.layers} layers of {'a chunk of' if kind.chunked else 'the last'} {kind.window} tokens"
        if kind.selected is not None:
            line += f"; in {kind.layers} layers at most {kind.selected} are selected and read"
        if kind.state_bytes:
            also = "beside them" if kind.token_bytes else "instead"
            line += f"; in {kind.layers} layers a state of {kind.state_bytes:,.0f} bytes {also}"
    return line


def _gpus_lines(hardware: Hardware) -> list[str]:
    if hardware.gpus is None:
        return []
    gpus = hardware.gpus
    how = {"tensor": "every matrix in equal parts", "expert": "experts whole, in order, all else in equal parts"}
    return [
        f"{gpus.count} GPUs, {how[gpus.parallel]}; activations of all tokens are exchanged twice a layer, by a ring or "
        "at once, and not beside compute; memory is that of all of them, keys and values that a head cannot be divided "
        "from are on several"
    ]


def _disk_lines(simulation: Simulation) -> list[str]:
    """How many experts of a layer every policy has to leave on the disk while it decodes."""
    layers = simulation.layers
    if layers.hardware.disk is None:
        return []
    shares = {}
    for key, policy, _ in simulation.wanted():
        there = on_disk(layers, policy.reads_near(layers)).sum(axis=1)
        shares[key] = float(np.average(there, weights=layers.repeats))
    found = ", ".join(f"{key} {share:.3g}" for key, share in shares.items() if share)
    kept = f"in decode so many experts of a layer: {found}" if found else "nothing in decode"
    return [
        "disk: what the memory beside the GPU does not hold of the versions that a phase reads, the least popular "
        f"experts; every use reads it before the layer goes on; {kept}"
    ]


def _ndp_lines(hardware: Hardware, ndp_speedup: float) -> list[str]:
    ndp = hardware.ndp
    dataflow = f"ndp.dataflow = {ndp.dataflow}: {hardware.constant('ndp.dataflow').source}"
    if not ndp.computes:
        return [f"{dataflow}; experts are held there and fetched, at their bits by the context-aware placement"]
    what = "grows as 16/bits" if ndp.low_bit_compute == "scale" else "is the same at every width"
    return [
        f"ndp.low_bit_compute = {ndp.low_bit_compute}: the MAC rate ({ndp.peak_macs_per_second / 1e12:.2f} TMAC/s peak "
        f"at 16 bits) {what}; experts on the NDP are {ndp_speedup:.2f}x faster than in FP16",
        dataflow,
    ]


def _routing_lines(
    simulation: Simulation, batches: tuple[int, ...], popularity_given: bool, sampled_steps: int | None
) -> list[str]:
    if simulation.replay is not None:
        return _trace_lines(simulation.replay, batches, popularity_given, sampled_steps)
    kind = "by popularity" if popularity_given else "uniform"
    seed = f"seed {simulation.seed}"
    how = {"exact": "enumerated exactly", "monte-carlo": f"{simulation.samples} Monte Carlo samples, {seed}"}
    methods = "; ".join(f"batch {batch} {how[simulation.routing_method(batch)]}" for batch in batches)
    lines = [f"routing: {kind}, tokens independent, without replacement; {methods}"]
    if drawn := [key for key, policy, _ in simulation.wanted() if policy.in_time]:
        lines.append(f"{', '.join(drawn)}: {simulation.samples} steps drawn one after the other, {seed}")
    return lines


def _trace_lines(
    replay: Replay, batches: tuple[int, ...], popularity_given: bool, sampled_steps: int | None
) -> list[str]:
    trace = replay.trace
    steps = ", ".join(f"{len(replay.steps(batch).rows)} at batch {batch}" for batch in batches)
    model = "a model" if trace.model is None else trace.model.name
    popularity = "as given" if popularity_given else "that of all prompts of the trace"
    lines = [
        f"routing: as recorded from {model} ({trace.num_sequences} sequences, {trace.num_tokens} "
        f"tokens), decode steps in order: {steps}",
        f"hot experts and widths follow from the prompts of the sequences that decode; popularity for what is static: "
        f"{popularity}",
    ]
    if sampled_steps is not None:
        lines.append(f"sensitivity: from {sampled_steps} steps, in blocks spread evenly over the trace")
    return lines


def _policy_lines(simulation: Simulation) -> list[str]:
    """Parameters of policies that neither a fit nor the hardware file sets, so that a default applies."""
    lines = []
    for policy in {policy.name: policy for _, policy, _ in simulation.wanted()}.values():
        given, parameters = simulation.layers.hardware.policies.get(policy.name, {}), policy.parameters.items()
        free = [f"{key} = {number.default} ({number.source})" for key, number in parameters if key not in given]
        if free:
            lines.append(f"{policy.name} by default: {', '.join(free)}")
    return lines
