"""The page's section on folded norms: what was folded, what it is worth, the integer forward of every task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from moeq.integers.artifacts.integer_report import DroppedRow, IntegerFigures, IntegerReport, QualityRow, SchemeRow
from moeq.integers.artifacts.reparam import ConsumerRow, ErrorRow, NormRow, PerplexityRow, ReparamReport
from moeq.reporting.inputs import ReportInputs
from moeq.reporting.page import render


def norm(path: str, why: str | None) -> NormRow:
    return NormRow(
        path=path, kind="RMSNorm", eps=1e-6, plus_one=False, mode="asymmetric" if why is None else "scale-only",
        why=why, scale=0.5, r1=(0.25, 2), r2=(0, 0), low=(-3, -1), high=(1, 4),
        consumers=tuple(ConsumerRow(weight=f"{path}.{leaf}", axis=1, bias=None) for leaf in "qk"),
    )  # fmt: skip


def folded() -> ReparamReport:
    return ReparamReport(
        bits=8, range="percentile", percentile=99.5, samples=32, tokens=999, dtype="auto",
        norms=(norm("a.norm", None), norm("b.norm", "b.q has no <bias>")), left={"c": "its output is added"},
        float32=ErrorRow(error=3e-7, sequences=32, left_out=1, changed_tokens=2),
        stored=ErrorRow(error=1e-3, sequences=32, left_out=2, changed_tokens=3),
        perplexity=PerplexityRow(original=20, w8a8=25, w8a8_folded=21, tokens=1234),
    )  # fmt: skip


def figures(error: float, scheme: str) -> IntegerFigures:
    quality = {"accuracy": 0.875, "cross_entropy": 0.25, "logit_error": error}
    row = QualityRow(**quality)
    return IntegerFigures(
        widths="8/8/4", softmax="log-sqrt2", denominator="quantized", calibration_images=32, images=360,
        description_error=1e-7, integer=row, folded=row, real_factors=row, equal_to_simulation=True,
        differing_code_share=0.3, differing_code_share_first=0.001, logit_error_of_factors=0.03,
        saturated_code_share=0.002, saturated_residuals=1, vectors=4, replay="equal",
        schemes=(SchemeRow(name=scheme, widths="6/6/4", **quality),),
    )  # fmt: skip


@pytest.fixture
def section(make: Callable[..., ReportInputs]) -> str:
    integer = IntegerReport(tasks={"task-0": figures(0.0623, "first"), "task-1": figures(0.0711, "second")})
    page = render(replace(make(), reparam=folded(), integer=integer))
    start = page.index('id="reparam"')
    return page[start : page.index("</section>", start)]


def test_it_says_what_was_folded_and_what_it_costs(section: str) -> None:
    assert "2 norms folded into 4 weights, 1 with zero points and 1 by scales alone" in section
    assert "by the 99.5th percentile over 32 samples. 1 norm left: its output is added." in section
    assert "scale-only: b.q has no &lt;bias&gt;" in section
    for figure in ("3.00e-07", ">0.001<", ">31<", ">30<", "W8A8 with the fold", "+25.0", "+5.0", "1,234 tokens"):
        assert figure in section


def test_every_task_has_its_integer_forward_and_schemes(section: str) -> None:
    for figure in ("The forward of task-0", "The forward of task-1", "1 number of residual stream or logits was"):
        assert figure in section
    assert "6.23" in section
    assert section.index("first</th>") < section.index("7.11") < section.index("second</th>")


def test_a_page_of_a_run_without_it_has_no_such_section(make: Callable[..., ReportInputs]) -> None:
    assert 'id="reparam"' not in render(make())


@pytest.mark.full
def test_codes_that_count_as_0_stand_beside_the_printed_form(make: Callable[..., ReportInputs]) -> None:
    rows = (
        DroppedRow(block="blocks.0", dropped_from=15, error=0.0714, printed_dropped_from=None, printed_error=0.3353),
        DroppedRow(block="blocks.1", dropped_from=None, error=0.0812, printed_dropped_from=None, printed_error=0.0812),
    )
    found = figures(0.06, "first").model_copy(update={"dropped": rows})
    page = render(replace(make(), reparam=folded(), integer=IntegerReport(tasks={"task-0": found})))
    section = page[page.index("Codes that count as 0") :]
    for text in ("blocks.1", "from 15", "7.14", "33.5", "8.12"):
        assert text in section
    without = render(replace(make(), reparam=folded(), integer=IntegerReport(tasks={"task-0": figures(0.06, "first")})))
    assert "Codes that count as 0" not in without
