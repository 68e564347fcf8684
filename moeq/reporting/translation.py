"""Translation quality of every variant, as paper 002's Table 2 has it."""

from __future__ import annotations

from collections.abc import Mapping

from moeq.artifacts.evaluation import Score, Translation
from moeq.papers import ELEPHANTS
from moeq.reporting import formats
from moeq.reporting.html import Section, lead, table

METRICS = {"bleu": "BLEU", "chrf": "chrF"}


def translation(measured: Translation, labels: Mapping[str, str]) -> Section:
    """BLEU and chrF with intervals, and the differences to the original; labels: what people read for a variant."""
    counted = "; ".join(f"{METRICS[name]} {text}" for name, text in measured.signatures.items())
    text = (
        f"{formats.count(measured.sentences, 'sentence')}; brackets: intervals of 95 % by Student's t, "
        "with the errors of resampled sentences, for differences to the original of the same; too few sentences have "
        f"none. A difference whose interval holds 0 may be chance. ({ELEPHANTS.short}, Table 2.) {counted}."
    )
    rows = [
        (
            f"{labels.get(variant.name, variant.name)}, beam {variant.beams}",
            *_cells(variant.bleu),
            *_cells(variant.chrf),
        )
        for variant in sorted(measured.scores, key=lambda variant: variant.beams)
    ]
    head = ("variant", "BLEU", "difference", "chrF", "difference")
    return Section("translation", "Translation", [lead(text), table("Higher is better, 100 at most.", head, rows)])


def _cells(metric: Score) -> tuple[str, str]:
    score = f"{metric.score:.2f}{_brackets(metric.low, metric.high, '.2f')}"
    if metric.difference is None:
        return score, formats.MISSING
    ends = _brackets(metric.difference_low, metric.difference_high, "+.3f")
    return score, f"{metric.difference:+.3f}{ends}"


def _brackets(low: float | None, high: float | None, form: str) -> str:
    """An interval; nothing where there is none."""
    return "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"
