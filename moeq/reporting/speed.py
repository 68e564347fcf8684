"""The estimated speed, with every assumption that it hangs on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from moeq.estimator.points import BASELINES, BWRULE, OPT, SUBJECT
from moeq.estimator.policies import titled
from moeq.estimator.result import Estimate, SensitivityRow, TermRow
from moeq.papers import named
from moeq.reporting import formats
from moeq.reporting.html import Raw, Row, Section, details, element, items, lead, paragraph, table
from moeq.tables import human_bytes

if TYPE_CHECKING:
    from moeq.reporting.inputs import ReportInputs, SpeedInputs

BOUNDS = {"bytes": "bandwidth", "macs": "arithmetic", "latency": "latency", "none": ""}
ROUTING = {
    "uniform": "is assumed to be even over all experts",
    "profile": "is assumed to be as calibration counted it",
    "trace": "is that of calibration, step by step",
}
TOY = (
    "The model is so small that these times are of starting work, not of doing it: what they say of speed-ups does not "
    "hold for models of a size that is served."
)
CONTEXT = "the experts that are on the GPU chosen for every sequence from its own prefill"
SAME = 0.02  # a share by which a speed-up may move and still count as the same


def estimate(inputs: ReportInputs) -> Section:
    """Speed-ups, terms, capacity, assumptions and sensitivity of the exported assignment."""
    own = inputs.own_estimate
    parts = [lead(_lead(inputs.speed))]
    if not inputs.speed.geometry_is_the_models:
        parts.append(_other_geometry(inputs.speed, inputs.manifest.model.name))
    elif not inputs.speed.tells:
        parts.append(paragraph(TOY, kind="warning"))
    if own is None:
        parts.append(paragraph("The estimate holds no figures for the exported assignment."))
    else:
        parts += [
            speedups(own),
            *refused(own),
            requests(own),
            element("h3", "Where a decode step's time goes"),
            terms(own),
            element("h3", "Does it fit?"),
            _capacity(own),
            element("h3", "What these figures assume"),
            items(map(named, own.assumptions)),
            *sensitivity(own),
            *weakest(own),
            constants(own),
        ]
    return Section("estimate", "Estimated speed on GPU + near-data memory", parts)


def over() -> str:
    """What speed-ups are over, as `speedups_text` has them."""
    return " / ".join(titled(key).short for key in (BWRULE, OPT))


def speedups_text(found: Mapping[str, float]) -> str:
    """Decode speed-ups over both MoNDE baselines."""
    return " / ".join(formats.ratio(found[key]) for key in (BWRULE, OPT))


def _lead(speed: SpeedInputs) -> str:
    return (
        f"Computed by a model of the hardware ({speed.hardware}), not measured. Routing {ROUTING[speed.popularity]}. "
        f"{titled(SUBJECT).short}: this assignment, {CONTEXT}."
    )


def _other_geometry(speed: SpeedInputs, model: str) -> Raw:
    sizes = speed.geometry
    return paragraph(
        f"These speeds are for the sizes of {sizes['name']} ({sizes['num_layers']} layers, {sizes['num_experts']} "
        f"experts, top {sizes['top_k']}, hidden size {sizes['hidden_size']:,}) with this assignment's mix of bits. "
        f"They are not speeds of {model}.",
        kind="warning",
    )


def speedups(estimate: Estimate) -> Raw:
    """How much faster the context-aware placement is than every baseline, at every batch."""
    rows = []
    for batch, baseline in dict.fromkeys((row.batch, row.baseline) for row in estimate.speedups):
        over = estimate.speedups_over(baseline, batch=batch)
        decode = [row.decode for row in over]
        whole = formats.span([row.end_to_end for row in over], formats.ratio)
        cells = (titled(baseline).short, str(batch), formats.span(decode, formats.ratio), whole)
        rows.append(((batch, min(decode), baseline), cells))
    inputs = sorted({row.input_tokens for row in estimate.speedups})
    outputs = sorted({row.output_tokens for row in estimate.speedups})
    read = "the prompt and what was decoded so far" if estimate.kv_growth else f"{estimate.context:,} tokens"
    caption = (
        f"How many times as fast as each baseline, the hardest baseline first. Ranges run over {_listed(inputs)} "
        f"input and {_listed(outputs)} output tokens; the decode step attends to {read}."
    )
    return table(caption, ("baseline", "batch", "decode step", "whole request"), [cells for _, cells in sorted(rows)])


def _listed(numbers: list[int]) -> str:
    texts = [f"{number:,}" for number in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def terms(estimate: Estimate) -> Raw:
    """The terms of a decode step at the first batch, with what bounds each."""
    batch = estimate.points[0].batch
    rows: list[Row | tuple[str, ...]] = []
    steps = {point.policy: point.decode_seconds_per_token for point in estimate.points[::-1] if point.batch == batch}
    for policy in (name for name in (SUBJECT, *BASELINES) if name in steps):
        whole = (titled(policy).short, formats.milliseconds(steps[policy]), "", "", "")
        rows.append(Row(cells=whole, kind="group"))
        rows += [_term(row) for row in estimate.step_terms(policy, batch=batch).values() if row.seconds > 0]
    caption = (
        f"Milliseconds of one decode step over all layers at batch {batch}. GPU and NDP work at the same time, so the "
        "shares of one step can add up to more than 100 %. Terms that take no time are left out."
    )
    return table(caption, ("term", "ms", "share", "bytes moved", "bound by"), rows)


def _term(row: TermRow) -> tuple[str, ...]:
    return (
        row.term.replace("_", " ").replace("ndp", "NDP").replace("gpu", "GPU"),
        formats.milliseconds(row.seconds),
        formats.percent(row.share),
        human_bytes(row.bytes),
        BOUNDS.get(row.bound_by, row.bound_by),
    )


def _capacity(estimate: Estimate) -> Raw:
    c = estimate.capacity
    widths = ", ".join(map(str, c.replica_bits))
    fits = {True: "fits", False: "does not fit"}
    rows: list[Row | tuple[str, ...]] = [
        Row(cells=("GPU memory", human_bytes(c.gpu_capacity_bytes), fits[c.fits_gpu]), kind="group"),
        ("experts placed on the GPU", human_bytes(c.gpu_expert_bytes), ""),
        ("the rest of the model", human_bytes(c.gpu_non_expert_bytes), ""),
        ("keys and values at most", human_bytes(c.gpu_kv_cache_bytes), ""),
        Row(cells=("NDP memory", human_bytes(c.ndp_capacity_bytes), fits[c.fits_ndp]), kind="group"),
        ("experts placed on the NDP", human_bytes(c.ndp_expert_bytes), ""),
        (f"FP16 and the {widths}-bit replicas of all experts", human_bytes(c.replica_bytes), ""),
    ]
    return table(
        "What has to lie where. The NDP keeps every replica, so that the next sequence can be placed differently.",
        ("memory", "bytes", ""),
        rows,
    )


def effect(row: SensitivityRow, now: Mapping[str, float]) -> float:
    """How far a changed assumption moves any of these decode speed-ups, as a share of what it is."""
    changed = {key: row.decode_speedups[key] for key in now if key in row.decode_speedups}
    return max((abs(value / now[key] - 1) for key, value in changed.items()), default=0.0)


def assumed(estimate: Estimate) -> dict[str, float]:
    """The decode speed-up over each compared baseline at the grid's first point."""
    batch = estimate.points[0].batch
    there = {row.baseline for row in estimate.speedups if row.batch == batch}
    return {key: estimate.speedups_over(key, batch=batch)[0].decode for key in BASELINES if key in there}


def sensitivity(estimate: Estimate) -> list[Raw]:
    """The speed-ups with one assumption changed at a time, those that hardly move folded away."""
    now = assumed(estimate)
    telling = [_changed(row, now) for row in estimate.sensitivity if effect(row, now) >= SAME]
    others = [_changed(row, now) for row in estimate.sensitivity if effect(row, now) < SAME]
    head = ("assumption", "change", "step, ms", *(f"over {titled(key).short}" for key in now))
    step = next(point.decode_seconds_per_token for point in estimate.points if point.policy == SUBJECT)
    whole = ("as assumed above", "", formats.milliseconds(step), *map(formats.ratio, now.values()))
    reading = (
        "The decode speed-up with one assumption changed at a time: a figure that falls to about 1 says that the "
        "gain rests on that assumption. Step: a decode step of this assignment."
    )
    parts = [table(reading, head, [Row(cells=whole, kind="group"), *telling], texts=2)]
    if others:
        summary = f"{formats.count(len(others), 'more change')} that move these figures by less than {100 * SAME:g} %"
        reading = "Changed one at a time. What leaves these figures alone may move whole requests, or other policies."
        parts.append(details(summary, table(reading, head, others, texts=2)))
    return parts


def _changed(row: SensitivityRow, names: Iterable[str]) -> tuple[str, ...]:
    speedups = (formats.ratio(row.decode_speedups.get(name)) for name in names)
    return row.assumption, row.change.replace("->", "→"), formats.milliseconds(row.decode_seconds_per_token), *speedups


def refused(estimate: Estimate) -> list[Raw]:
    """Policies that cannot run the model, each with the sum that does not fit, and points of the grid that do not."""
    reasons = {(row.policy, row.reason): row.batch for row in reversed(estimate.refused)}  # at the smallest batch
    texts = [
        f"{titled(policy).short}: {f'not from batch {batch} on; ' if batch > 1 else ''}{reason}"
        for (policy, reason), batch in sorted(reasons.items())
    ]
    texts += estimate.unfit_lines
    return [paragraph("Left out, since they cannot run:", kind="reading"), items(texts)] if texts else []


def requests(estimate: Estimate) -> Raw:
    """What one request of the grid's last point moves and takes at the first batch, by policy."""
    batch = estimate.points[0].batch
    last = [point for point in estimate.points if point.batch == batch][-1]
    at = (batch, last.input_tokens, last.output_tokens)
    points = [point for point in estimate.points if (point.batch, point.input_tokens, point.output_tokens) == at]
    joules = any(point.energy_joules is not None for point in points)
    channels = {"gpu_memory": "GPU memory", "link": "link", "ndp_memory": "near-data memory", "disk": "disk"}
    shown = {channel: name for channel, name in channels.items() if channel in points[0].bytes_moved}
    head = ("policy", "seconds", *shown.values(), "near-data side busy", "tokens on the GPU")
    rows = [
        (
            titled(point.policy).short,
            formats.number(point.end_to_end_seconds),
            *(human_bytes(point.bytes_moved[channel]) for channel in shown),
            formats.percent(point.ndp_busy_share),
            formats.percent(point.gpu_expert_share),
            *(formats.number(each) for each in (point.energy_by_device or {}).values()),
        )
        for point in points
    ]
    caption = (
        f"A request of {last.input_tokens:,} input and {last.output_tokens:,} output tokens at batch {batch}: what "
        "crosses each memory and the link, how long the near-data side computes, and how many expert tokens the GPU "
        f"serves in decode{', and what energy each takes, static power included' if joules else ''}."
    )
    return table(caption, (*head, *(("J, GPU", "J, link", "J, near-data side") if joules else ())), rows)


def weakest(estimate: Estimate) -> list[Raw]:
    """The changed assumption that leaves the least of the speed-up."""
    if not estimate.sensitivity:
        return []
    weakest = min(estimate.sensitivity, key=lambda row: row.decode_speedup_over_monde_opt)
    change, least = weakest.change.replace("->", "→"), formats.ratio(weakest.decode_speedup_over_monde_opt)
    text = f"The speed-up over the cost-optimal baseline is smallest, {least}, with {weakest.assumption} changed"
    return [paragraph(f"{text} ({change}).", kind="warning")]


def constants(estimate: Estimate) -> Raw:
    """Every constant of the hardware with its source, folded away."""
    rows = [(c.key, c.text, "fitted" if c.is_fitted else "", named(c.source)) for c in estimate.hardware_constants]
    fitted = sum(c.is_fitted for c in estimate.hardware_constants)
    reading = (
        "Every constant of the hardware file. Fitted ones were tuned to the results that they are meant to explain."
    )
    summary = f"All {len(rows)} constants of {estimate.hardware} and their sources ({fitted} fitted)"
    return details(summary, table(reading, ("constant", "value", "", "source"), rows, texts=4))
