"""What a reader should know before trusting a figure of the page: one line each, with where it stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pyarrow.compute

from moeq.artifacts.evaluation import EvalRow
from moeq.artifacts.losses import WHOLE
from moeq.reporting import atlas, formats
from moeq.reporting.html import Raw, Section, element, items, join, paragraph
from moeq.reporting.inputs import ReportInputs
from moeq.reporting.names import domain_label, never_chosen

MOST_NAMED = 6  # experts
UNEVEN = 2.0  # times the whole text's loss, from which on a domain is named
LOOSE = 1e-3  # relative error of the exported logits, from which on it is named


def cautions(inputs: ReportInputs) -> Section:
    """The warning list."""
    lines = [
        element("span", text, " ", element("a", where, href=f"#{anchor}")) for text, where, anchor in _lines(inputs)
    ]
    if not lines:
        return Section("warnings", "Warnings", [paragraph("None.")])
    return Section("warnings", f"Warnings ({len(lines)})", [element("div", items(lines), class_="warning")])


def _lines(inputs: ReportInputs) -> Iterator[tuple[str, str, str]]:
    """(text, what it links to, its anchor) of each."""
    for gate in inputs.gates:
        if not gate.holds:
            yield f"A gate failed: {gate.text()}.", "What was decided", "summary"
    for stage, other in inputs.mixed.items():
        text = (
            f"{stage} was made from another result of {other} than is there now: their figures are of different runs."
        )
        yield text, "Provenance", "provenance"
    if inputs.left is not None:
        yield f"{inputs.left.capitalize()}.", "Provenance", "provenance"
    yield from ((text, "Variants", "variants") for text in _quality(inputs))
    yield from ((text, "Losses", "losses") for text in _calibration(inputs))
    if not inputs.speed.geometry_is_the_models:
        text = f"Speeds are those of {inputs.speed.geometry['name']}, not of {inputs.manifest.model.name}."
        yield text, "Estimated speed", "estimate"


def _quality(inputs: ReportInputs) -> Iterator[str]:
    exported, original = inputs.exported, inputs.original
    if exported is None:
        yield "The exported checkpoint was not evaluated."
        return
    if (better := _better(inputs)) is not None:
        yield f"The exported checkpoint is dominated: {better} is no larger and no worse."
    if exported.perplexity is None and not inputs.classifies:
        yield "No perplexity was measured."
    if original is not None and original.perplexity and exported.perplexity:
        whole = exported.perplexity / original.perplexity - 1
        for domain, value in exported.perplexity_by_domain.items():
            before = original.perplexity_by_domain.get(domain)
            if before and value / before - 1 > UNEVEN * max(whole, 0.005):
                name = domain_label(domain, inputs.domains)
                yield (
                    f"Perplexity on {name} rises by {formats.change(value, before)}, on the whole text by "
                    f"{formats.change(exported.perplexity, original.perplexity)}: calibration may lack such text."
                )
    if any(change.low is None for change in exported.changes.values()):
        yield "Too few items were measured for an interval of some difference from the original."
    if inputs.evaluation.export_logit_error > LOOSE:
        error = f"{inputs.evaluation.export_logit_error:.1e}"
        yield f"The exported checkpoint's logits differ from those of the dequantized weights by {error}, relative."


def _better(inputs: ReportInputs) -> str | None:
    """What people read for a variant that beats the exported one in size and quality; None where none does."""
    own = inputs.exported
    if own is None or not (costs := _costs(inputs, own)):
        return None
    for row in inputs.evaluation.rows:
        theirs = _costs(inputs, row)
        if row.assignment is None or row is own or len(theirs) != len(costs):
            continue
        pairs = list(zip((row.expert_bytes, *theirs), (own.expert_bytes, *costs), strict=True))
        if all(other <= mine for other, mine in pairs) and any(other < mine for other, mine in pairs):
            return inputs.label(row.name)
    return None


def _costs(inputs: ReportInputs, row: EvalRow) -> list[float]:
    """What is known of what a row loses: perplexity and KL, of which one by itself may fall by chance, or of images the
    error of its logits."""
    kl = None if row.divergence is None else row.divergence.kl
    known = (row.logit_error,) if inputs.classifies else (row.perplexity, kl)
    return [cost for cost in known if cost is not None]


def _calibration(inputs: ReportInputs) -> Iterator[str]:
    coverage, profile = inputs.coverage, inputs.profile
    below, every = sum(coverage.below), sum(coverage.experts)
    if below:
        seen = f"{below:,} of {formats.count(every, 'expert')} saw fewer than {coverage.min_tokens:,} tokens"
        yield f"{seen} in calibration; their figures are less certain (corpus.until_covered goes on until they have)."
    _, never = never_chosen(profile, MOST_NAMED)
    if never:
        yield f"Never chosen in calibration: {never}."
    field = pyarrow.compute.field
    once = (field("projection") == WHOLE) & (field("method") == atlas.main_method(inputs))
    once &= field("bits") == inputs.losses.bits()[0]
    rows = inputs.losses.table.filter(once).select(["fallback"]).to_pylist()
    fallbacks = Counter(name for row in rows for name in row["fallback"].split("+") if name != "none")
    if fallbacks:
        told = ", ".join(f"{name.replace('_', ' ')} ({number:,})" for name, number in sorted(fallbacks.items()))
        yield f"Quantized with a fallback: {told} of {formats.count(len(rows), 'expert')}."


def summary_line(inputs: ReportInputs) -> Raw:
    """How many there are, for the top of the page; nothing where there are none."""
    number = sum(1 for _ in _lines(inputs))
    if not number:
        return Raw("")
    return paragraph(join([element("a", formats.count(number, "warning"), href="#warnings"), " below."]))
