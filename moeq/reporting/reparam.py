"""The section on folded norms and the forward in whole numbers, where the run has them (paper 004)."""

from __future__ import annotations

from collections import Counter

from moeq.integers.artifacts.integer_report import IntegerFigures, IntegerReport
from moeq.integers.artifacts.reparam import NormRow, ReparamReport
from moeq.reporting import formats
from moeq.reporting.html import Raw, Section, details, paragraph, table


def reparam(found: ReparamReport, integer: IntegerReport | None) -> Section:
    """What was folded into what, how far that is off, what it is worth, and every integer forward."""
    parts = [
        paragraph(_lead(found), kind="lead"),
        _errors(found),
        *([] if found.perplexity is None else [_perplexity(found)]),
        details("Every folded norm", _norms(found)),
    ]
    if integer is not None:
        for task, figures in integer.tasks.items():
            parts += _integer(f" of {task}" if len(integer.tasks) > 1 else "", figures)
    return Section(anchor="reparam", title="Reparameterization", parts=parts)


def _lead(found: ReparamReport) -> str:
    full = sum(norm.mode == "asymmetric" for norm in found.norms)
    weights = sum(len(norm.consumers) for norm in found.norms)
    ends = "min-max" if found.percentile is None else f"the {found.percentile:g}th percentile"
    left = Counter(found.left.values())
    text = (
        f"{formats.count(len(found.norms), 'norm')} folded into {formats.count(weights, 'weight')}, {full} with zero "
        f"points and {len(found.norms) - full} by scales alone, so that one scale serves what a norm gives at "
        f"{formats.count(found.bits, 'bit')} (paper 004, section 3.1); ranges of channels by {ends} over "
        f"{formats.count(found.samples, 'sample')}."
    )
    reasons = "".join(f" {formats.count(number, 'norm')} left: {why}." for why, number in sorted(left.items()))
    return f"{text}{reasons} Everything else on this page is of the folded model, which it calls the original."


def _errors(found: ReparamReport) -> Raw:
    rows = [
        (name, formats.number(one.error), f"{one.sequences - one.left_out:,}", f"{one.left_out:,}")
        for name, one in (("in float32, before anything is rounded", found.float32), ("as stored", found.stored))
    ]
    return table(
        "Distance of the folded model's logits from the given one's, relative; samples in which a tie of the router "
        "broke another way are left out.",
        ("folded model", "relative error", "samples", "left out"),
        rows,
    )


def _perplexity(found: ReparamReport) -> Raw:
    one = found.perplexity
    assert one is not None
    rows = [
        ("original", formats.perplexity(one.original), ""),
        ("W8A8", formats.perplexity(one.w8a8), formats.change(one.w8a8, one.original)),
        ("W8A8 with the fold", formats.perplexity(one.w8a8_folded), formats.change(one.w8a8_folded, one.original)),
    ]
    return table(
        f"Perplexity of {one.tokens:,} tokens with int8 weights and statically scaled int8 activations, simulated; the "
        "two versions differ in the fold alone.",
        ("version", "perplexity", "change"),
        rows,
    )


def _norms(found: ReparamReport) -> Raw:
    return table(
        "r1: factors of the channels; low and high: ends of their ranges.",
        ("norm", "kind", "mode", "weights", "scale", "r1", "low and high"),
        [_norm(norm) for norm in found.norms],
        texts=3,
    )


def _norm(norm: NormRow) -> tuple[str, ...]:
    mode = norm.mode if norm.why is None else f"{norm.mode}: {norm.why}"
    spans = (formats.span(norm.r1, formats.number), formats.span((norm.low[0], norm.high[1]), formats.number))
    return (norm.path, norm.kind, mode, str(len(norm.consumers)), formats.number(norm.scale), *spans)


def _integer(of: str, found: IntegerFigures) -> list[Raw]:
    """The integer forward of one task, and the schemes."""
    clipped = found.saturated_residuals
    text = (
        f"The forward{of} in whole numbers (W/A/Attn {found.widths}, {found.softmax} softmax) equals its simulation in "
        f"every value, on {formats.count(found.images, 'image')}; vectors of {formats.count(found.vectors, 'image')} "
        f"replay from its files. {formats.share(found.saturated_code_share)} of codes lie at the ends of their range, "
        f"{formats.count(clipped, 'number')} of residual stream or logits {'was' if clipped == 1 else 'were'} clipped."
    )
    versions = {
        "folded model, float": found.folded,
        "with real-valued factors": found.real_factors,
        "in whole numbers": found.integer,
    }
    rows = [(name, *_quality(one.accuracy, one.cross_entropy, one.logit_error)) for name, one in versions.items()]
    measured = table(
        "Logit error: distance of the logits from the folded float model's, relative.",
        ("version", *QUALITY),
        rows,
    )
    parts = [paragraph(text), measured]
    if found.schemes is not None:
        parts.append(
            table(
                f"Schemes of paper 004's Table 1{of}, simulated; logit error against the model before its fold.",
                ("scheme", "W/A/Attn", *QUALITY),
                [
                    (one.name, one.widths, *_quality(one.accuracy, one.cross_entropy, one.logit_error))
                    for one in found.schemes
                ],
            )
        )
    return parts


QUALITY = ("accuracy", "cross-entropy", "logit error")


def _quality(accuracy: float, cross_entropy: float, logit_error: float) -> tuple[str, str, str]:
    return formats.percent(accuracy), formats.cross_entropy(cross_entropy), formats.share(logit_error)
