"""Pages with what only some runs have: routing of a trace, curves of low precision, translations."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from estimator.test_estimator_trace import made_trace

from moeq.analysis.routing import analyse
from moeq.artifacts.evaluation import Score, Translation, TranslationScore
from moeq.artifacts.low_precision import Curve, LowPrecisionReport, Point, Sweep
from moeq.reporting.inputs import ReportInputs
from moeq.reporting.page import render
from moeq.reporting.routing import domain_maps, modality_maps, routing_maps

Make = Callable[..., ReportInputs]
HOSTILE = "<script>alert('$x$')</script>\x00"


@pytest.fixture(scope="module")
def inputs(make: Make) -> ReportInputs:
    trace = replace(made_trace((9, 7, 8, 6), (4, 3, 5, 2)), domains=(HOSTILE, "a b", "a_b", HOSTILE))
    trace = replace(trace, images=(np.arange(trace.num_tokens) % 2).astype(np.uint8))
    curves = [
        Curve(order=order, number=number, points=tuple(
            Point(share=share, low_experts=round(15 * share), perplexity=20 + index + 10 * share)
            for share in (0.0, 0.4, 1.0)
        ))
        for index, (order, number) in enumerate([("coldest", None), ("hottest", None), ("random", 0), ("random", 1)])
    ]  # fmt: skip
    sweep = Sweep(low_bits=2, high_bits=4, quantizer="gptq", experts=15, sequences=4, tokens=9, curves=tuple(curves))
    found = make()
    scores = [
        TranslationScore(name=name, beams=beams, bleu=bleu, chrf=bleu)
        for beams in (2, 1)
        for name, bleu in (
            ("original", Score(score=31.25, low=30, high=32)),
            ("int4", Score(score=31, low=29, high=33, difference=-0.25, difference_low=-0.5, difference_high=0.125)),
        )
    ]
    translated = Translation(
        sentences=40, baseline="original", signatures={"bleu": "tok:13a", "chrf": "nc:6"}, scores=tuple(scores)
    )
    evaluation = found.evaluation.model_copy(update={"translation": translated})
    return replace(
        found,
        routing=analyse(trace),
        low_precision=LowPrecisionReport(sweeps=(sweep, sweep)),
        evaluation=evaluation,
    )


@pytest.fixture(scope="module")
def page(inputs: ReportInputs) -> str:
    return render(inputs)


@pytest.mark.full
def test_the_sections_stand_in_their_places(page: str) -> None:
    anchors = re.findall(r'<section id="([^"]+)"', page)
    assert anchors == [
        "summary", "size", "warnings", "variants", "translation", "activation", "routing", "losses", "sensitivity",
        "bits", "estimate", "low-precision", "provenance",
    ]  # fmt: skip


@pytest.mark.full
def test_drawings_are_xml_and_their_ids_unique(page: str, inputs: ReportInputs) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    for drawing in drawings:
        assert len(ElementTree.fromstring(drawing).attrib["aria-label"]) > 20
    assert page.count("<figure") == page.count("<figcaption>") == len(drawings)
    plain = len(re.findall(r"<svg", render(replace(inputs, routing=None, low_precision=None))))
    assert len(drawings) - plain == 1 + 3 + 2 + 4 + 2  # similarity; domains, modalities, two sequences; two sweeps
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "<script" not in page
    assert "\x00" not in page


def test_maps_have_files_of_their_own_and_a_common_scale(inputs: ReportInputs) -> None:
    assert inputs.routing is not None
    keys = [one.key for one in routing_maps(inputs.routing)]
    assert len(set(keys)) == len(keys) == 1 + 3 + 2 + 4
    assert all(re.fullmatch(r"[\w.+-]+", key) for key in keys)
    for some in (domain_maps(inputs.routing), modality_maps(inputs.routing)):
        assert len({one.scale for one in some}) == 1
        largest = max(float(np.nanmax(row)) for one in some for row in one.values)
        assert some[0].scale is not None
        assert some[0].scale.largest == pytest.approx(largest)


def test_figures_are_in_the_tables(page: str) -> None:
    rows = re.findall(r"<tr.*?</tr>", page)
    beams = [row for row in rows if ", beam" in row]
    assert [re.sub(r"<.*?>", " ", row).split()[:3] for row in beams] == [
        ["original,", "beam", "1"], ["int4,", "beam", "1"], ["original,", "beam", "2"], ["int4,", "beam", "2"]
    ]  # fmt: skip
    assert "-0.250 [-0.500, +0.125]" in beams[1]
    assert any("random 2" in row and "27.00" in row and "33.00" in row for row in rows)
    assert "BLEU tok:13a; chrF nc:6" in page
