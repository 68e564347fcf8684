"""Section 6: the estimated speed, with every assumption that it hangs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeq.estimator.result import Estimate, TermRow
from moeq.reporting import formats
from moeq.reporting.html import Raw, Row, Section, details, element, items, paragraph, table
from moeq.reporting.inputs import ReportInputs, SpeedInputs
from moeq.tables import human_bytes

OWN = "context_aware"
POLICIES = {
    OWN: "this assignment, context-aware placement",
    "gpu_only": "GPU only: experts fetched on demand",
    "hobbit": "HOBBIT: mixed precision, fetched on demand",
    "monde_bwrule": "MoNDE, bandwidth rule",
    "monde_hotset": "MoNDE, hot set fetched",
    "monde_opt": "MoNDE, cost-optimal",
}
TERMS_OF = (OWN, "monde_bwrule", "monde_opt", "hobbit")
BOUNDS = {"bytes": "bandwidth", "macs": "arithmetic", "latency": "latency", "none": ""}


def estimate(inputs: ReportInputs) -> Section:
    """Speed-ups, terms, capacity, assumptions and sensitivity of the exported assignment."""
    one = inputs.own_estimate
    parts = [paragraph(_lead(inputs.speed), kind="lead")]
    if not inputs.speed.geometry_is_the_models:
        parts.append(_other_geometry(inputs.speed, inputs.manifest.model.name))
    if one is None:
        parts.append(paragraph("The estimate holds no figures for the exported assignment."))
    else:
        parts += [
            speedups(one),
            element("h3", "Where a decode step's time goes"),
            terms(one),
            element("h3", "Does it fit?"),
            _capacity(one),
            element("h3", "What these figures assume"),
            items(one.assumptions),
            sensitivity(one, inputs.speed.decode_speedups.get(one.placement, {})),
            *weakest(one),
            constants(one),
        ]
    return Section(anchor="estimate", title="Estimated speed on GPU + near-data memory", parts=parts)


def _lead(speed: SpeedInputs) -> str:
    return (
        f"Computed by a model of the hardware ({speed.hardware}), not measured. Routing is assumed to be "
        f"{'even over all experts' if speed.popularity == 'uniform' else 'as calibration counted it'}."
    )


def _other_geometry(speed: SpeedInputs, model: str) -> Raw:
    return paragraph(
        f"These speeds are for the sizes of {speed.geometry['name']} ({_sizes(speed.geometry)}) with this assignment's "
        f"mix of bits. They are not speeds of {model}.",
        kind="warning",
    )


def _sizes(geometry: Mapping[str, Any]) -> str:
    layers, experts, top_k = (geometry[key] for key in ("num_layers", "num_experts", "top_k"))
    return f"{layers} layers, {experts} experts, top {top_k}, hidden size {geometry['hidden_size']:,}"


def speedups(one: Estimate) -> Raw:
    """How much faster the context-aware placement is than every baseline, at every batch."""
    keys = dict.fromkeys((row.batch, row.baseline) for row in one.speedups)
    rows = []
    for batch, baseline in keys:
        found = one.speedups_over(baseline, batch=batch)
        least = min(row.decode for row in found)
        cells = (
            POLICIES.get(baseline, baseline),
            str(batch),
            formats.span([row.decode for row in found], formats.ratio),
            formats.span([row.end_to_end for row in found], formats.ratio),
        )
        rows.append(((batch, least, baseline), cells))
    inputs = sorted({row.input_tokens for row in one.speedups})
    outputs = sorted({row.output_tokens for row in one.speedups})
    caption = (
        f"How many times as fast as each baseline, the hardest baseline first. Ranges run over {_listed(inputs)} "
        f"input and {_listed(outputs)} output tokens; the decode step attends to {one.context:,} tokens."
    )
    return table(caption, ("baseline", "batch", "decode step", "whole request"), [cells for _, cells in sorted(rows)])


def _listed(numbers: list[int]) -> str:
    texts = [f"{number:,}" for number in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def terms(one: Estimate) -> Raw:
    """The terms of a decode step at the first batch, with what bounds each."""
    batch = one.points[0].batch
    rows: list[Row | tuple[str, ...]] = []
    for policy in (name for name in TERMS_OF if name in one.policies):
        step = next(p.decode_seconds_per_token for p in one.points if (p.policy, p.batch) == (policy, batch))
        whole = (POLICIES[policy], formats.milliseconds(step), "", "", "")
        rows.append(Row(cells=whole, kind="group"))
        rows += [_term(row) for row in one.step_terms(policy, batch=batch).values() if row.seconds > 0]
    caption = (
        f"Milliseconds of one decode step over all layers at batch {batch}. GPU and NDP work at the same time, so the "
        "shares of one step can add up to more than 100 %. Terms that take no time are left out."
    )
    return table(caption, ("term", "ms", "share", "bytes moved", "bound by"), rows)


def _term(row: TermRow) -> tuple[str, ...]:
    return (
        row.term.replace("_", " ").replace("ndp", "NDP").replace("gpu", "GPU"),
        formats.milliseconds(row.seconds),
        f"{100 * row.share:.1f}{formats.NARROW_SPACE}%",
        human_bytes(row.bytes),
        BOUNDS.get(row.bound_by, row.bound_by),
    )


def _capacity(one: Estimate) -> Raw:
    c = one.capacity
    widths = ", ".join(map(str, c.replica_bits))
    rows: list[Row | tuple[str, ...]] = [
        Row(cells=("GPU memory", human_bytes(c.gpu_capacity_bytes), _fits(c.fits_gpu)), kind="group"),
        ("experts placed on the GPU", human_bytes(c.gpu_expert_bytes), ""),
        ("the rest of the model, FP16", human_bytes(c.gpu_non_expert_bytes), ""),
        ("keys and values of the largest batch", human_bytes(c.gpu_kv_cache_bytes), ""),
        Row(cells=("NDP memory", human_bytes(c.ndp_capacity_bytes), _fits(c.fits_ndp)), kind="group"),
        ("experts placed on the NDP", human_bytes(c.ndp_expert_bytes), ""),
        (f"FP16 and the {widths}-bit replicas of all experts", human_bytes(c.replica_bytes), ""),
    ]
    return table(
        "What has to lie where. The NDP keeps every replica, so that the next sequence can be placed differently.",
        ("memory", "bytes", ""),
        rows,
    )


def _fits(fits: bool) -> str:
    return "fits" if fits else "does not fit"


def sensitivity(one: Estimate, assumed: Mapping[str, float]) -> Raw:
    pair = ("monde_bwrule", "monde_opt")
    first = Row(cells=("as assumed above", "", *(formats.ratio(assumed.get(key)) for key in pair)), kind="group")
    rows = [
        (
            row.assumption,
            row.change.replace("->", "→"),
            formats.ratio(row.decode_speedup_over_monde_bwrule),
            formats.ratio(row.decode_speedup_over_monde_opt),
        )
        for row in one.sensitivity
    ]
    return table(
        "The decode speed-up over MoNDE with one assumption changed at a time: a figure that falls to about 1 says "
        "that the gain rests on that assumption.",
        ("assumption", "change", "over bandwidth rule", "over cost-optimal"),
        [first, *rows],
        texts=2,
    )


def weakest(one: Estimate) -> list[Raw]:
    """The changed assumption that leaves the least of the speed-up."""
    if not one.sensitivity:
        return []
    weakest = min(one.sensitivity, key=lambda row: row.decode_speedup_over_monde_opt)
    change, least = weakest.change.replace("->", "→"), formats.ratio(weakest.decode_speedup_over_monde_opt)
    return [
        paragraph(
            f"The speed-up over the cost-optimal baseline is smallest, {least}, "
            f"with {weakest.assumption} changed ({change}).",
            kind="warning",
        )
    ]


def constants(one: Estimate) -> Raw:
    """Every constant of the hardware with its source, folded away."""
    rows = [(c.key, c.text, "fitted" if c.is_fitted else "", c.source) for c in one.hardware_constants]
    fitted = sum(c.is_fitted for c in one.hardware_constants)
    caption = (
        "Every constant of the hardware file. Fitted ones were tuned to the results that they are meant to explain."
    )
    return details(
        f"All {len(rows)} constants of {one.hardware} and their sources ({fitted} fitted)",
        table(caption, ("constant", "value", "", "source"), rows, texts=4),
    )
