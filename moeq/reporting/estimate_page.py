"""The page of `moeq estimate`: latency and throughput as bars, stated figures beside, terms, memory, assumptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from moeq.estimator.capacity import CapacityPlan, Memory
from moeq.estimator.cases import Case, EstimateDocument
from moeq.estimator.confidence import STEPS
from moeq.estimator.hit_rates import HitRates
from moeq.estimator.points import BWRULE, OPT, SUBJECT
from moeq.estimator.policies import titled
from moeq.estimator.result import Estimate, PolicyPoint
from moeq.estimator.stated import Comparison
from moeq.papers import CONTEXT_AWARE, named
from moeq.reporting import formats, speed
from moeq.reporting.bars import Beside, Series, beside_chart, grouped_bars
from moeq.reporting.frame import document
from moeq.reporting.html import Raw, Row, Section, details, element, figure, items, lead, paragraph, table
from moeq.tables import human_bytes


def render(estimates: EstimateDocument) -> str:
    """The page; its bytes depend only on the document."""
    sections = [*([_stated(estimates)] if estimates.stated else []), *_figures(estimates)]
    several = len(estimates.cases) > 1
    sections += [_case(case, f"case-{number}", several) for number, case in enumerate(estimates.cases, 1)]
    models = dict.fromkeys(model_text(case) for case in estimates.cases)
    beyond = dict.fromkeys(text for case in estimates.cases if (text := beyond_positions(case)))
    text = (
        f"Computed by a model of the hardware ({estimates.hardware}), not measured. Routing: {estimates.routing}. What "
        "the answer hangs on stands below every case."
    )
    top = [
        paragraph(f"Model: {'; '.join(models)}."),
        lead(text),
        *_warned([*beyond, *(f"Left out: {line}." for line in estimates.left_out)]),
    ]
    return document(f"{estimates.name} · moeq estimate", estimates.name, top, sections)


def model_text(case: Case) -> str:
    """The model's name and sizes."""
    sizes = case.geometry
    return (
        f"{sizes['name']} ({formats.count(sizes['num_layers'], 'MoE layer')} of {sizes['num_experts']} experts, "
        f"top {sizes['top_k']}, hidden size {sizes['hidden_size']:,})"
    )


def beyond_positions(case: Case) -> str:
    """A sentence where requests or the context are longer than what the model was made for; else nothing."""
    most = case.geometry.get("max_positions")
    longest = max(case.estimate.context, *(p.input_tokens + p.output_tokens for p in case.estimate.points))
    if most is None or longest <= most:
        return ""
    return (
        f"{case.geometry['name']} was made for {most:,} positions (max_position_embeddings), and {longest:,} tokens "
        "are asked about: times and bytes are as if it read so many, what it would answer is another matter."
    )


VARIED = "draws of all assumptions together"
OUTSIDE = "as assumed it lies outside, since what is assumed is the end of a range, as even routing is"


def interval_lines(case: Case) -> list[str]:
    """Where the headlines lie with all assumptions varied together, and which matter most."""
    lines = []
    for row in case.intervals:
        form = formats.milliseconds if row.figure == STEPS else formats.ratio
        unit = " ms" if row.figure == STEPS else ""
        most = ", ".join(key.removeprefix("policies.") for key, _ in row.most)
        span = f"{form(row.low)} to {form(row.high)}{unit}"
        line = f"{row.figure} {form(row.value)}{unit}; {span} in 90 % of {VARIED}, mostly by {most}"
        lines.append(line if row.low <= row.value <= row.high else f"{line}; {OUTSIDE}")
    return lines


def _warned(texts: Iterable[str]) -> list[Raw]:
    return [paragraph(text, kind="warning") for text in texts]


def _stated(estimates: EstimateDocument) -> Section:
    rows = estimates.stated
    beside = [
        Beside(
            name=f"{row.case}: {policy_words(row)}",
            stated=(row.stated_low, row.stated_high),
            estimate=(row.low, row.high),
            missed=row.missed,
            note=f"{formats.change(1 + row.deviation, 1)}{', missed' if row.missed else ''}",
        )
        for row in rows
    ]
    missed = [row for row in rows if row.missed]
    cells = [Row(cells=_stated_cells(row), kind="exported") if row.missed else _stated_cells(row) for row in rows]
    head = ("case", "figure", "source", "stated", "estimate", "farther end", "")
    parts = [
        figure(
            beside_chart("stated", "Estimates beside the figures that are stated", beside, "times as fast"),
            "Wide: what is stated. Narrow: the estimate over the same grid. The note is how far "
            "the end that is farther off differs.",
        ),
        table("Every stated figure. A range runs over the grid; missed ones are marked.", head, cells, texts=3),
    ]
    without = [f"{case.name}: {case.without_ndp.text()}" for case in estimates.cases if case.without_ndp is not None]
    parts += [paragraph("Beside every headline, what needs no near-data processor:", kind="reading"), items(without)]
    if missed:
        parts += [paragraph("Missed:", kind="reading"), items(map(miss_text, missed))]
    return Section("stated", "Beside what is stated", parts)


def _stated_cells(row: Comparison) -> tuple[str, ...]:
    return (
        row.case,
        policy_words(row),
        named(row.source),
        stated_text(row),
        formats.span([row.low, row.high], formats.ratio),
        formats.change(1 + row.deviation, 1),
        row.verdict,
    )


def stated_text(row: Comparison) -> str:
    """A stated range, or number, as it is printed."""
    low, high = f"{row.stated_low:g}", f"{row.stated_high:g}"
    text = low if low == high else f"{low} to {high}"
    return f"{'up to ' if row.only_largest else ''}{text}{formats.TIMES}"


def policy_words(row: Comparison) -> str:
    """A compared figure in words."""
    if row.over is None:
        return row.name
    return f"{row.figure.replace('_', ' ')} over {titled(row.over).short}"


def miss_text(row: Comparison) -> str:
    """A miss in one sentence."""
    estimate = formats.span([row.low, row.high], formats.ratio)
    end = " at its farther end" if row.stated_low != row.stated_high else ""
    off = formats.change(1 + row.deviation, 1)
    return f"{row.case}, {policy_words(row)}: {estimate} where {stated_text(row)} is stated ({off}{end})"


def _figures(estimates: EstimateDocument) -> list[Section]:
    """One section a model: end-to-end latency as in Figure 5 of paper 000, decode throughput as in its Figure 6."""
    groups: dict[str, list[Case]] = {}
    for case in estimates.cases:
        groups.setdefault(case.estimate.geometry, []).append(case)
    return [
        Section(f"figures-{number}", f"{model}: latency and throughput", _charts(model, cases))
        for number, (model, cases) in enumerate(groups.items(), 1)
    ]


def _charts(model: str, cases: Sequence[Case]) -> list[Raw]:
    parts = []
    there = [{point.at for point in case.estimate.points} for case in cases]
    both = set.intersection(*there)  # of cases of which not all points fit, what they have in common
    for batch in dict.fromkeys(batch for batch in cases[0].batches if any(at[0] == batch for at in both)):
        cases = [case.at(both) for case in cases]
        grid = [(p.input_tokens, p.output_tokens) for p in _points(cases[0], SUBJECT, batch)]
        groups = [f"{inputs} / {outputs}" for inputs, outputs in grid]
        latency = [
            Series(
                name=name,
                values=[p.end_to_end_seconds for p in points],
                inner=[p.ndp_seconds_per_layer * layers * p.output_tokens for p in points],
                own=own,
            )
            for name, points, layers, own in _lines(cases, batch)
        ]
        throughput = [
            Series(name=name, values=[p.decode_tokens_per_second for p in points], own=own)
            for name, points, _, own in _lines(cases, batch)
        ]
        key, what = f"{model}-{batch}", f"{model}, batch {batch}"
        inner = "near-data side, busy in decode"
        drawings = [
            figure(
                grouped_bars(f"latency-{key}", f"End-to-end latency of {what}", groups, latency, "seconds", inner),
                f"End-to-end latency at batch {batch}, as in Figure 5 of {CONTEXT_AWARE.short}: prefill, migration and "
                "every output token; in front of each bar, how much of it the near-data side computes in decode.",
            ),
            figure(
                grouped_bars(f"rate-{key}", f"Decode throughput of {what}", groups, throughput, "tokens a second"),
                f"Decode throughput at batch {batch}, as in Figure 6 of {CONTEXT_AWARE.short}; all sequences counted.",
            ),
        ]
        parts.append(element("div", *drawings, class_="figures"))
    return parts


def _lines(cases: Sequence[Case], batch: int) -> list[tuple[str, list[PolicyPoint], int, bool]]:
    """Name, points, layers and whether it is the subject: the baselines of the first case, then the subject of each."""
    first, layers = cases[0], cases[0].estimate.num_layers
    there = {point.policy: None for point in first.estimate.points if point.batch == batch}
    baselines = [policy for policy in there if policy != SUBJECT]
    several = len({case.estimate.hardware for case in cases}) > 1
    whose = f" on {first.estimate.hardware}" if several else ""
    lines = [(f"{titled(policy).short}{whose}", _points(first, policy, batch), layers, False) for policy in baselines]
    own = [(case.name if len(cases) > 1 else titled(SUBJECT).short, case) for case in cases]
    return lines + [(name, _points(case, SUBJECT, batch), layers, True) for name, case in own]


def _points(case: Case, policy: str, batch: int) -> list[PolicyPoint]:
    return [point for point in case.estimate.points if (point.policy, point.batch) == (policy, batch)]


def _case(case: Case, anchor: str, several: bool) -> Section:
    """What bounds one case; several: whether there are others, so that it names its model."""
    estimate = case.estimate
    beyond = beyond_positions(case)
    parts = [
        *([lead(f"Model: {model_text(case)}.")] if several else []),
        *_warned([beyond] if beyond and several else []),
        *([] if case.without_ndp is None else [paragraph(case.without_ndp.text(), kind="reading")]),
        _policies(estimate.points, estimate.sampling_error),
        *([_served(case)] if case.served else []),
        *([] if case.hit_rates is None else [_hit_table(case.hit_rates)]),
        speed.speedups(estimate),
        *speed.refused(estimate),
        speed.requests(estimate),
        speed.terms(estimate),
        details("Terms of prefill and migration", _earlier(estimate)),
        _capacity(case.capacity),
        paragraph("What these figures assume:", kind="reading"),
        items(map(named, estimate.assumptions)),
        *([paragraph("How far it can be off:", kind="reading"), items(interval_lines(case))] if case.intervals else []),
        *speed.sensitivity(estimate),
        *speed.weakest(estimate),
        speed.constants(estimate),
    ]
    return Section(anchor, f"{case.name}: what bounds it, and what it hangs on", parts)


def _policies(points: Sequence[PolicyPoint], error: float) -> Raw:
    groups: dict[tuple[int, str], list[PolicyPoint]] = {}
    for point in points:
        groups.setdefault((point.batch, point.policy), []).append(point)
    forms: dict[str, Callable[[float], str]] = {
        "time_to_first_token_seconds": _milliseconds,
        "decode_seconds_per_token": _milliseconds,
        "decode_tokens_per_second": formats.number,
        "end_to_end_seconds": formats.number,
    }
    rows = []
    for (batch, policy), same in groups.items():
        spans = [formats.span([getattr(point, field) for point in same], form) for field, form in forms.items()]
        rows.append((titled(policy).short, str(batch), *spans))
    return table(
        "Every policy over all input and output lengths. A decode step gives a token to every sequence of the batch. "
        f"Standard error of any of these times by sampling: at most {formats.percent(error)}.",
        ("policy", "batch", "first token, ms", "decode step, ms", "tokens a second", "whole request, s"),
        rows,
    )


def _served(case: Case) -> Raw:
    """What a server sees under the rate that was asked about."""
    first = case.served[0]
    rows = [
        (
            titled(row.policy).short,
            *(formats.number(value) if row.keeps_up else formats.MISSING for value in row.first_seconds),
            *(_milliseconds(value) if row.keeps_up else formats.MISSING for value in row.token_seconds),
            f"{row.mean_batch:.1f} of {row.largest_batch}",
            formats.percent(row.busy_share),
            formats.number(row.most_rate),
        )
        for row in case.served
    ]
    head = (
        "policy", "first token, s", "p90", "p99", "later ones, ms", "p90", "p99", "batch", "busy", "most requests/s",
    )  # fmt: skip
    return table(
        f"{first.rate:g} requests a second of {first.input_tokens:,} and {first.output_tokens:,} tokens that arrive at "
        "random, batched continuously: medians and quantiles, waiting included. A dash: the queue grows for good.",
        head,
        rows,
    )


def _milliseconds(seconds: float) -> str:
    return formats.number(1e3 * seconds)


def _earlier(estimate: Estimate) -> Raw:
    """Terms of prefill and migration at the first batch, of the subject and both MoNDE baselines."""
    batch = estimate.points[0].batch
    rows = [
        (
            titled(row.policy).short,
            row.phase if row.input_tokens is None else f"{row.phase}, {row.input_tokens:,} tokens",
            row.term.replace("_", " "),
            formats.milliseconds(row.seconds),
            formats.percent(row.share),
            human_bytes(row.bytes),
            speed.BOUNDS[row.bound_by],
        )
        for row in estimate.earlier_terms
        if row.batch == batch and row.policy in (SUBJECT, BWRULE, OPT) and row.seconds > 0
    ]
    return table(
        f"Milliseconds before the first decode step at batch {batch}; terms that overlap add up to more than 100 %.",
        ("policy", "phase", "term", "ms", "share", "bytes moved", "bound by"),
        rows,
        texts=3,
    )


def _hit_table(measured: HitRates) -> Raw:
    """Hit rates by domain."""
    names = {
        "context_aware": "context-aware",
        "static": "static",
        "static_of_domain": "static of the domain",
        "static_in_hindsight": "static in hindsight",
        "oracle": "oracle",
    }
    rows = [
        (row.domain, f"{row.sequences:,}", *(formats.percent(row.rates[name]) for name in names))
        for row in measured.rows
    ]
    return table(
        "Share of the decode's expert tokens that find their expert on the GPU, with "
        f"{'/'.join(map(str, sorted(set(measured.gpu_experts))))} experts a layer there. Context-aware: chosen for "
        f"every sequence from its own prefill. Static ones learn from {measured.training_sequences} other sequences; "
        "hindsight and oracle know the decode.",
        ("domain", "sequences", *names.values()),
        rows,
    )


def _capacity(plan: CapacityPlan) -> Raw:
    """What has to lie where at the largest batch and context."""
    rows: list[Row | tuple[str, ...]] = []
    for memory in (plan.gpu, plan.ndp):
        rows.append(Row(cells=(memory.name, human_bytes(memory.capacity_bytes), fits(memory)), kind="group"))
        rows += [(part.name, human_bytes(part.bytes), "") for part in memory.parts]
    return table(
        f"What has to lie where at batch {plan.batch} and {plan.context:,} tokens a sequence. The near-data side keeps "
        "every replica, so that the next sequence can be placed differently.",
        ("memory", "bytes", ""),
        rows,
    )


def fits(memory: Memory) -> str:
    """Whether it fits, and what is left or lacking."""
    room = memory.room_bytes
    return f"fits, {human_bytes(room)} left" if memory.fits else f"does not fit, {human_bytes(-room)} too much"
