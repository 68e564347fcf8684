"""Translation quality of every variant, as paper 002's Table 2 has it."""

from __future__ import annotations

from moeq.artifacts.evaluation import Score, Translation
from moeq.reporting import formats
from moeq.reporting.html import Section, lead, table

METRICS = {"bleu": "BLEU", "chrf": "chrF"}


def translation(measured: Translation) -> Section:
    """BLEU and chrF with intervals, and the differences to the original."""
    counted = "; ".join(f"{METRICS[name]} {text}" for name, text in measured.signatures.items())
    text = (
        f"{formats.count(measured.sentences, 'sentence')}; brackets: intervals of 95 % of the bootstrap over "
        "sentences, of differences to the original on the same resamples. A difference whose interval holds 0 may be "
        f"chance. (Paper 002, Table 2.) {counted}."
    )
    rows = [
        (f"{variant.name}, beam {variant.beams}", *_cells(variant.bleu), *_cells(variant.chrf))
        for variant in sorted(measured.scores, key=lambda variant: variant.beams)
    ]
    head = ("variant", "BLEU", "difference", "chrF", "difference")
    return Section("translation", "Translation", [lead(text), table("Higher is better, 100 at most.", head, rows)])


def _cells(metric: Score) -> tuple[str, str]:
    score = f"{metric.score:.2f} [{metric.low:.2f}, {metric.high:.2f}]"
    if None in (metric.difference, metric.difference_low, metric.difference_high):
        return score, formats.MISSING
    return score, f"{metric.difference:+.3f} [{metric.difference_low:+.3f}, {metric.difference_high:+.3f}]"
