"""The section on folded norms and the forward in whole numbers, where the run has them (paper 004)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moeq.integers.artifacts.integer_report import DroppedRow, IntegerFigures, IntegerReport, QualityRow, SchemeRow
from moeq.integers.artifacts.reparam import PerplexityRow, ReparamReport
from moeq.papers import COQMOE
from moeq.reporting import formats
from moeq.reporting.html import Raw, Section, details, lead, paragraph, table

QUALITY = ("accuracy", "cross-entropy", "logit error")


def reparam(report: ReparamReport, integer: IntegerReport | None) -> Section:
    """What was folded into what, how far that is off, what it is worth, and every integer forward."""
    parts = [
        lead(_lead(report)),
        _errors(report),
        *([] if report.perplexity is None else [_perplexity(report.perplexity)]),
        details("Every folded norm", _norms(report)),
    ]
    if integer is not None:
        for task, figures in integer.tasks.items():
            parts += _integer(f" of {task}" if len(integer.tasks) > 1 else "", figures)
    return Section("reparam", "Reparameterization", parts)


def _lead(report: ReparamReport) -> str:
    full = sum(norm.mode == "asymmetric" for norm in report.norms)
    weights = sum(len(norm.consumers) for norm in report.norms)
    ends = "min-max" if report.percentile is None else f"the {report.percentile:g}th percentile"
    left = Counter(report.left.values())
    text = (
        f"{formats.count(len(report.norms), 'norm')} folded into {formats.count(weights, 'weight')}, {full} with zero "
        f"points and {len(report.norms) - full} by scales alone, so that one scale serves what a norm gives at "
        f"{formats.count(report.bits, 'bit')} ({COQMOE.short}, section 3.1); ranges of channels by {ends} over "
        f"{formats.count(report.samples, 'sample')}."
    )
    reasons = "".join(f" {formats.count(number, 'norm')} left: {why}." for why, number in sorted(left.items()))
    return f"{text}{reasons} Everything else on this page is of the folded model, which it calls the original."


def _errors(report: ReparamReport) -> Raw:
    rows = [
        (name, formats.number(check.error), f"{check.sequences - check.left_out:,}", f"{check.left_out:,}")
        for name, check in (("in float32, before anything is rounded", report.float32), ("as stored", report.stored))
    ]
    return table(
        "Distance of the folded model's logits from the given one's, relative; samples in which a tie of the router "
        "broke another way are left out.",
        ("folded model", "relative error", "samples", "left out"),
        rows,
    )


def _perplexity(measured: PerplexityRow) -> Raw:
    original, plain, folded = measured.original, measured.w8a8, measured.w8a8_folded
    rows = [
        ("original", formats.perplexity(original), ""),
        ("W8A8", formats.perplexity(plain), formats.change(plain, original)),
        ("W8A8 with the fold", formats.perplexity(folded), formats.change(folded, original)),
    ]
    if (written := measured.w8a8_written) is not None:
        rows.append(("the checkpoint in W8A8", formats.perplexity(written), formats.change(written, original)))
    return table(
        f"Perplexity of {measured.tokens:,} tokens with int8 weights and statically scaled int8 activations, "
        "simulated; the two versions differ in the fold alone.",
        ("version", "perplexity", "change"),
        rows,
    )


def _norms(report: ReparamReport) -> Raw:
    rows = [
        (
            norm.path,
            norm.kind,
            norm.mode if norm.why is None else f"{norm.mode}: {norm.why}",
            str(len(norm.consumers)),
            formats.number(norm.scale),
            formats.span(norm.r1, formats.number),
            formats.span((norm.low[0], norm.high[1]), formats.number),
        )
        for norm in report.norms
    ]
    head = ("norm", "kind", "mode", "weights", "scale", "r1", "low and high")
    return table("r1: factors of the channels; low and high: ends of their ranges.", head, rows, texts=3)


def _integer(of: str, forward: IntegerFigures) -> list[Raw]:
    """The integer forward of one task, and the schemes."""
    clipped = forward.saturated_residuals
    text = (
        f"The forward{of} in whole numbers (W/A/Attn {forward.widths}, {forward.softmax} softmax) equals its "
        f"simulation in every value, on {formats.count(forward.images, 'image')}; vectors of "
        f"{formats.count(forward.vectors, 'image')} replay from its files. "
        f"{formats.share(forward.saturated_code_share)} of codes lie at the ends of their range, "
        f"{formats.count(clipped, 'number')} of residual stream or logits {'was' if clipped == 1 else 'were'} clipped."
    )
    versions = {
        "folded model, float": forward.folded,
        "with real-valued factors": forward.real_factors,
        "in whole numbers": forward.integer,
    }
    rows = [(name, *_quality(figures)) for name, figures in versions.items()]
    reading = "Logit error: distance of the logits from the folded float model's, relative."
    parts = [paragraph(text), table(reading, ("version", *QUALITY), rows)]
    if forward.dropped:
        parts.append(details(f"Codes{of} that count as 0", _dropped(forward.dropped)))
    if forward.schemes is not None:
        reading = f"Schemes of {COQMOE.short}, Table 1{of}, simulated; logit error against the model before its fold."
        schemes = [(scheme.name, scheme.widths, *_quality(scheme)) for scheme in forward.schemes]
        parts.append(table(reading, ("scheme", "W/A/Attn", *QUALITY), schemes))
    return parts


def _dropped(rows: Sequence[DroppedRow]) -> Raw:
    def first(code: int | None) -> str:
        return "none" if code is None else f"from {code}"

    head = ("block", "code", "error", "code as printed", "error as printed")
    return table(
        "Codes of the softmax that count as 0, by the relative error of attention's outputs on calibration images.",
        head,
        [
            (row.block, first(row.dropped_from), formats.share(row.error),
             first(row.printed_dropped_from), formats.share(row.printed_error))
            for row in rows
        ],
    )  # fmt: skip


def _quality(figures: QualityRow | SchemeRow) -> tuple[str, str, str]:
    accuracy, error = formats.percent(figures.accuracy), formats.share(figures.logit_error)
    return accuracy, formats.cross_entropy(figures.cross_entropy), error
