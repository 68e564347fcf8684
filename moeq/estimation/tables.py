"""Estimates on the terminal: a table for each question, in windows of any width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from moeq.estimator.capacity import CapacityPlan
from moeq.estimator.cases import Case, EstimateDocument
from moeq.estimator.hit_rates import HitRates
from moeq.estimator.points import BASELINES, BWRULE, OPT, SUBJECT
from moeq.estimator.policies import titled
from moeq.estimator.result import Estimate, TermRow
from moeq.papers import named, terms_in
from moeq.progress import PlainConsole
from moeq.reporting import formats, speed
from moeq.reporting.estimate_page import beyond_positions, fits, interval_lines, miss_text, policy_words, stated_text
from moeq.tables import human_bytes

if TYPE_CHECKING:
    from moeq.estimator.sheets import Cell
    from moeq.estimator.sheets import Table as Sheet

SMALL = 64  # columns below which a table leaves out what its other columns imply
MOST_CHANGES = 5  # assumptions that are printed of each of several cases
ROWS = 9  # of the table of what fits beside K experts


def print_document(document: EstimateDocument, paths: Mapping[str, Path]) -> None:
    """Every case, or what is stated beside the estimates; then where the files are."""
    console = PlainConsole()
    if document.stated:
        _print_stated(console, document)
    else:
        if len(document.cases) > 1:
            _print_side_by_side(console, document.cases)
        for case in document.cases:
            _print_case(console, document, case)
    for line in document.left_out:
        console.print(f"left out  {line}")
    for name, path in paths.items():
        console.print(f"{name:9} {path}", soft_wrap=True)


def _table(titles: Sequence[str], texts: int = 1) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index < texts else "right", overflow="fold")
    return table


def _print_stated(console: Console, document: EstimateDocument) -> None:
    small = console.width < SMALL
    titles = ["case", "figure", "stated", "estimate", "off", *([] if small else [""])]
    table = _table(titles, texts=2)
    for row in document.stated:
        cells = [row.case, policy_words(row), stated_text(row), _span([row.low, row.high], formats.ratio)]
        cells += [formats.change(1 + row.deviation, 1), *([] if small else [row.verdict])]
        table.add_row(*cells, style="yellow" if row.missed else None)
    console.print(table)
    console.print(
        "off: how far the farther end of the range is; missed: farther than estimate.figures.miss_beyond. Computed "
        f"by a model of the hardware ({document.hardware}), not measured.",
        style="dim",
    )
    for row in document.stated:
        if row.missed:
            console.print(f"missed  {miss_text(row)}")
    for case in document.cases:
        console.print(f"\n{case.name}", style="bold")
        _print_without(console, case)
        _print_sensitivity(console, case.estimate, most=MOST_CHANGES)


def _print_side_by_side(console: Console, cases: Sequence[Case]) -> None:
    """What a decode step of each case gives, at the first batch that all have."""
    batches = set.intersection(*(set(case.batches) for case in cases))
    if not batches:
        return
    batch = min(batches)
    console.print(f"tokens a second in decode at batch {batch}", style="bold")
    table = _table(("case", SUBJECT, "the fastest", "", "J/token"), texts=1)
    table.columns[2].justify = "left"
    for case in cases:
        points = [point for point in case.estimate.points if point.batch == batch]
        own = next(point for point in points if point.policy == SUBJECT)
        best = min(points, key=lambda point: (point.decode_seconds_per_token, point.end_to_end_seconds))
        joules = best.energy_joules
        cells = [case.name, formats.number(own.decode_tokens_per_second), best.policy]
        cells.append(formats.number(best.decode_tokens_per_second))
        each = "-" if joules is None else formats.number(joules / (best.batch * best.output_tokens))
        table.add_row(*cells, each)
    console.print(table)
    console.print("J/token: of a request of the fastest, prefill and static power included.\n", style="dim")


def _print_case(console: Console, document: EstimateDocument, case: Case) -> None:
    estimate, plan = case.estimate, case.capacity
    routing = f"routing {document.routing}; computed by a model of the hardware, not measured"
    console.print(f"{case.name}; hardware {estimate.hardware}", style="bold")
    console.print(routing, style="dim")
    if beyond := beyond_positions(case):
        console.print(beyond, style="yellow")
    for batch in case.batches:
        _print_batch(console, estimate, batch)
    for line in dict.fromkeys(f"{row.policy}: cannot run, {row.reason}" for row in estimate.refused):
        console.print(line, style="yellow")
    for line in estimate.unfit_lines:
        console.print(line, style="yellow")
    error = estimate.sampling_error
    sampled = f"; standard error of any time by sampling at most {formats.percent(error)}" if error else ""
    of_ours = f"of ours: time of a request over that of {SUBJECT}, the placement that is asked about"
    console.print(f"{of_ours}{sampled}", style="dim")
    _print_without(console, case)
    _print_words(console, estimate)
    if case.hit_rates is not None:
        _print_hit_rates(console, case.hit_rates)
    _print_requests(console, estimate)
    if case.served:
        _print_served(console, case)
    console.print(f"\nmemory at batch {plan.batch} x {plan.context:,} tokens", style="bold")
    for memory in (plan.gpu, plan.ndp):
        console.print(f"{memory.sum_text()}: {fits(memory)}")
    console.print("\nwhat it hangs on", style="bold")
    for line in estimate.assumptions:
        console.print(f"- {named(line)}")
    console.print()
    _print_sensitivity(console, estimate)


def _print_without(console: Console, case: Case) -> None:
    """What needs no near-data processor beside the headline, and how far this can be off."""
    if case.without_ndp is not None:
        console.print(case.without_ndp.text())
    for line in interval_lines(case):
        console.print(line)


def _print_words(console: Console, estimate: Estimate) -> None:
    """What the policies' names mean, and the papers that they are of."""
    names = " ".join(["NDP", *(titled(policy).short for policy in dict.fromkeys(p.policy for p in estimate.points))])
    for term in terms_in(names):
        whose = "" if term.paper is None else f" ({term.paper.short}, {term.paper.link})"
        console.print(f"{term.name}: {term.meaning}{whose}", style="dim")


def _print_batch(console: Console, estimate: Estimate, batch: int) -> None:
    """Every policy at one batch, over all input and output lengths, and what bounds its decode step."""
    small = console.width < SMALL
    console.print(f"\nbatch {batch}", style="bold")
    titles = ["policy", "first token", "step", *([] if small else ["tokens/s"]), "request", "of ours"]
    joules = not small and all(point.energy_joules is not None for point in estimate.points)
    titles += ["J/token"] if joules else []
    table = _table(titles)
    table.columns[0].no_wrap = True
    at_batch = [point for point in estimate.points if point.batch == batch]
    steps = {p.policy: [q for q in at_batch if q.policy == p.policy] for p in at_batch}
    own = steps[SUBJECT]
    for policy, points in sorted(steps.items(), key=lambda item: item[1][0].decode_seconds_per_token):
        cells = [policy, _span([p.time_to_first_token_seconds for p in points], _seconds)]
        cells += [_span([p.decode_seconds_per_token for p in points], _seconds)]
        cells += [] if small else [_span([p.decode_tokens_per_second for p in points], formats.number)]
        cells += [_span([p.end_to_end_seconds for p in points], _seconds)]
        times = [p.end_to_end_seconds / q.end_to_end_seconds for p, q in zip(points, own, strict=True)]
        each = [(p.energy_joules or 0.0) / (p.batch * p.output_tokens) for p in points]
        cells += [_span(times, formats.ratio), *([_span(each, formats.number)] if joules else [])]
        table.add_row(*cells, style="bold" if policy == SUBJECT else None)
    console.print(table)
    for policy in steps:
        terms = _most(estimate.step_terms(policy, batch=batch).values())
        console.print(f"{policy}: {terms}", style="dim")


def _span(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The range of values, with the unit once where both ends have the same."""
    low, high = form(min(values)), form(max(values))
    if low == high:
        return low
    unit = low.lstrip("0123456789.,e+-")
    return f"{low.removesuffix(unit)}-{high}" if unit == high.lstrip("0123456789.,e+-") else f"{low}-{high}"


def _most(rows: Iterable[TermRow]) -> str:
    """The terms that take a tenth of the time or more, the longest first, each with what bounds it."""
    most = [row for row in sorted(rows, key=lambda row: -row.seconds) if row.share >= 0.1]
    return ", ".join(f"{row.term.replace('_', ' ')} {row.share:.0%} ({row.bound_by})" for row in most)


def _earlier(estimate: Estimate, batch: int) -> dict[str, list[TermRow]]:
    """The subject's terms before its first decode step: of the shortest and the longest prompt, and the migration."""
    own = [row for row in estimate.earlier_terms if (row.policy, row.batch) == (SUBJECT, batch)]
    lengths = sorted({row.input_tokens for row in own if row.input_tokens is not None})
    ends = sorted({*lengths[:1], *lengths[-1:]})
    phases = {f"prefill of {n:,}": [row for row in own if row.input_tokens == n] for n in ends}
    moved = [row for row in own if row.phase == "migration"]
    return phases | ({"migration": moved} if moved else {})


def _print_requests(console: Console, estimate: Estimate) -> None:
    """The subject's request at every grid point, and how much faster it is than both MoNDE baselines."""
    console.print(f"\na whole request, {SUBJECT}", style="bold")
    small = console.width < SMALL
    titles = ["batch", "in", "out", *([] if small else ["first token"]), "request", "over bwrule", "over opt"]
    table = _table(titles, texts=0)
    over = {(r.baseline, r.batch, r.input_tokens, r.output_tokens): r.end_to_end for r in estimate.speedups}
    for point in (point for point in estimate.points if point.policy == SUBJECT):
        times = [point.end_to_end_seconds] if small else [point.time_to_first_token_seconds, point.end_to_end_seconds]
        cells = [
            *map(str, point.at),
            *map(_seconds, times),
            *(formats.ratio(over[key, *point.at]) for key in (BWRULE, OPT)),
        ]
        table.add_row(*cells)
    console.print(table)
    for batch in dict.fromkeys(point.batch for point in estimate.points):
        for phase, rows in _earlier(estimate, batch).items():
            console.print(f"{phase} at batch {batch}: {_most(rows)}", style="dim")
    console.print(
        "over: how many times as fast as MoNDE by its bandwidth rule (monde_bwrule) and as a cost-optimal one "
        "(monde_opt), whole requests compared. Other policies' requests are in the files of --out and in --json.",
        style="dim",
    )


def _print_served(console: Console, case: Case) -> None:
    """What a server sees: waiting and batches at the rate that was asked about."""
    first, small = case.served[0], console.width < SMALL
    console.print(f"\nserved: {first.rate:g} requests a second", style="bold")
    titles = ["policy", "first token", "at p99", "later ones", *([] if small else ["at p99", "batch"]), "busy", "most"]
    table = _table(titles)
    table.columns[0].no_wrap = True
    for row in sorted(case.served, key=lambda row: (not row.keeps_up, row.first_seconds[0])):
        most = f"{formats.number(row.most_rate, 3)}/s"
        if not row.keeps_up:
            dashes = ["-"] * (len(titles) - 3)
            table.add_row(row.policy, *dashes, "all", most, style="yellow")
            continue
        cells = [_seconds(row.first_seconds[0]), _seconds(row.first_seconds[-1]), _seconds(row.token_seconds[0])]
        cells += [] if small else [_seconds(row.token_seconds[-1]), f"{row.mean_batch:.1f}"]
        table.add_row(row.policy, *cells, f"{100 * row.busy_share:.0f} %", most)
    console.print(table)
    console.print(
        f"requests of {first.input_tokens:,} + {first.output_tokens:,} tokens that arrive at random, batched "
        "continuously; medians and p99, waiting included; most: requests a second that keep it busy for good, beyond "
        "which the queue grows",
        style="dim",
    )


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{formats.number(value, 3)} s"
    return f"{formats.number(1e3 * value, 3)} ms"


def _print_hit_rates(console: Console, rates: HitRates) -> None:
    """Share of the decode's expert tokens that the GPU serves, by domain."""
    console.print("\nexpert tokens that the GPU serves, by domain", style="bold")
    shown = ("context_aware", "static", "oracle")
    table = _table(("domain", "sequences", *(name.replace("_", "-") for name in shown), "gain"))
    for row in rates.rows:
        shares = [formats.percent(row.rates[name]) for name in shown]
        table.add_row(row.domain, str(row.sequences), *shares, formats.points(row.rates[shown[0]], row.rates[shown[1]]))
    console.print(table)
    most = sorted(set(rates.gpu_experts))
    console.print(
        f"{'/'.join(map(str, most))} experts a layer on the GPU; static learns from {rates.training_sequences} other "
        "sequences, oracle knows what each sequence will use",
        style="dim",
    )


def _print_sensitivity(console: Console, estimate: Estimate, most: int | None = None) -> None:
    """The decode speed-up over the baselines with one assumption changed at a time; the `most` that move it most."""
    small, now = console.width < SMALL, speed.assumed(estimate)
    names = [key for key in ((BWRULE, OPT) if small else BASELINES) if key in now]
    table = _table(("assumption", "change", "step", *(f"over {key.removeprefix('monde_')}" for key in names)), texts=2)
    own = next(point.decode_seconds_per_token for point in estimate.points if point.policy == SUBJECT)
    table.add_row("as assumed", "", _seconds(own), *(formats.ratio(now[key]) for key in names), style="bold")
    rows = sorted(estimate.sensitivity, key=lambda row: -speed.effect(row, now))
    telling = [row for row in rows if speed.effect(row, now) >= speed.SAME][:most]
    for row in telling:
        cells = (formats.ratio(row.decode_speedups.get(key)) for key in names)
        name = row.assumption.removeprefix("policies.").replace("_", " ")
        table.add_row(name, row.change, _seconds(row.decode_seconds_per_token), *cells)
    console.print(table)
    left = len(rows) - len(telling)
    console.print(
        f"decode at batch {estimate.points[0].batch}, {SUBJECT} over the baselines, one assumption changed at a time, "
        "the weightiest first: a figure that falls to about 1 hangs on it"
        f"{f'; {left} changes that move them less are in the files of --out' if left else ''}",
        style="dim",
    )


def print_capacity(plan: CapacityPlan) -> None:
    """What lies where, and what room every number of FP16 experts a layer leaves for keys and values."""
    console = PlainConsole()
    console.print(f"{plan.geometry}, {plan.placement}; hardware {plan.hardware}", style="bold")
    table = _table(("memory", "bytes", ""))
    for memory in (plan.gpu, plan.ndp):
        table.add_row(memory.name, human_bytes(memory.capacity_bytes), fits(memory), style="bold")
        for part in memory.parts:
            table.add_row(f"  {part.name}", human_bytes(part.bytes), "")
    console.print(table)
    most = plan.largest_gpu_experts
    at = f"{plan.batch} x {plan.context:,} tokens"
    console.print(
        f"most {plan.experts_text} a layer on the GPU at {at}: {'none fits, not even 0' if most is None else most}\n",
    )
    rooms = _table(("experts a layer", "room for KV", f"batch at {plan.context}", f"tokens at batch {plan.batch}"))
    every = plan.by_gpu_experts
    shown = min(ROWS, len(every))
    kept = {round(index * (len(every) - 1) / max(1, shown - 1)) for index in range(shown)}
    for index in sorted(kept):
        row = every[index]
        cells = (human_bytes(row.room_bytes), f"{row.largest_batch:,}", f"{row.largest_context:,}")
        rooms.add_row(str(row.gpu_experts), *cells)
    if every:
        console.print(rooms)


def print_sheet(sheets: Sequence[Sheet], most: int | None = None) -> None:
    """The tables of a paper's sheet or of a fit, each with its notes; at most so many rows of each (None: all)."""
    console = PlainConsole()
    for number, sheet in enumerate(sheets):
        console.print(f"{chr(10) if number else ''}{sheet.title}", style="bold")
        shown = [list(map(_cell, row)) for row in sheet.rows[:most]]
        table = _table(sheet.columns, texts=0)
        for index, column in enumerate(table.columns):
            if not any(isinstance(row[index], (int, float)) for row in sheet.rows):
                column.justify = "left"
        for row in shown:
            table.add_row(*row)
        console.print(table)
        if most is not None and len(sheet.rows) > most:
            console.print(f"- {len(sheet.rows) - most} more rows with --json", style="dim")
        for note in sheet.notes:
            console.print(f"- {note}", style="dim")


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    return formats.number(value) if isinstance(value, float) else str(value)
