"""Translation quality of every variant, as paper 002's Table 2 has it."""

from __future__ import annotations

from moeq.artifacts.evaluation import Score, Translation
from moeq.reporting import formats
from moeq.reporting.html import Section, paragraph, table

METRICS = {"bleu": "BLEU", "chrf": "chrF"}


def translation(found: Translation) -> Section:
    """BLEU and chrF with intervals, and the differences to the original."""
    counted = "; ".join(f"{METRICS[name]} {text}" for name, text in found.signatures.items())
    lead = (
        f"{formats.count(found.sentences, 'sentence')}; brackets: intervals of 95 % of the bootstrap over sentences, "
        "of differences to the original on the same resamples. A difference whose interval holds 0 may be chance. "
        f"(Paper 002, Table 2.) {counted}."
    )
    rows = [
        (f"{one.name}, beam {one.beams}", *(cell(score) for score in (one.bleu, one.chrf) for cell in CELLS))
        for one in sorted(found.scores, key=lambda one: one.beams)
    ]
    head = ("variant", "BLEU", "difference", "chrF", "difference")
    return Section(
        anchor="translation",
        title="Translation",
        parts=[paragraph(lead, kind="lead"), table("Higher is better, 100 at most.", head, rows)],
    )


def _score(one: Score) -> str:
    return f"{one.score:.2f} [{one.low:.2f}, {one.high:.2f}]"


def _difference(one: Score) -> str:
    if one.difference is None or one.difference_low is None or one.difference_high is None:
        return formats.MISSING
    return f"{one.difference:+.3f} [{one.difference_low:+.3f}, {one.difference_high:+.3f}]"


CELLS = (_score, _difference)
