"""Which code counts as 0: the errors of attention at real numbers of keys, and the choice of calibration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from integer_models import made, pixels
from integer_reader import replay as independent_replay
from torch import Tensor

from moeq.integers.arithmetic.dropped_codes import drop_errors
from moeq.integers.arithmetic.fixed_point import dyadic
from moeq.integers.arithmetic.log_sqrt2 import (
    STEPS,
    Logarithm,
    joined,
    normalized,
    numerator_codes,
    shift_and_parity,
    shifted_sums,
    widths,
)
from moeq.integers.forward.description import describe
from moeq.integers.forward.dropping import dropped_codes
from moeq.integers.forward.from_model import lines, make
from moeq.integers.forward.schemes import program_of
from moeq.recipe import IntegerSection

QUERIES, SIZE = 200, 64


def drawn(keys: int, deviation: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores [Q, K] of a standard deviation and values [K, d], float64."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(QUERIES, keys, generator=generator).double() * deviation
    return scores, torch.randn(keys, SIZE, generator=generator).double()


def by_definition(scores: Tensor, values: Tensor, code: int | None, *, kind: Logarithm, exact: bool = False) -> float:
    """The relative error by equations 18 and 19, weights of codes from `code` on being 0."""
    steps = STEPS[kind]
    numerators = (scores - scores.amax(-1, keepdim=True)).exp()
    codes = (-steps * numerators.log2() + 0.5).floor().clamp(0, 15)
    weights = torch.exp2(-codes / steps)
    if code is not None:
        weights[codes >= code] = 0
    total = (numerators if exact else weights).sum(-1, keepdim=True)
    wanted = scores.softmax(-1) @ values
    return float((weights / total @ values - wanted).norm() / wanted.norm())


def in_integers(scores: Tensor, values: Tensor, code: int | None) -> float:
    """The relative error of the whole-number arithmetic on 8-bit values: 4-bit log-sqrt2, quantized denominator."""
    unit, held = 2.0**-12, widths(4, "log-sqrt2", len(values), 8, where="attention")
    whole = (values / values.abs().max() * 127).round().to(torch.int64)
    differences = ((scores.amax(-1, keepdim=True) - scores) / unit).round().to(torch.int64)
    codes = numerator_codes(differences, dyadic(2 * unit / math.log(2)), 4)
    kept = None if code is None else codes < code
    split = shift_and_parity(codes, "log-sqrt2")
    sums = joined(*shifted_sums(*split, whole, held.left, kept))
    total = joined(*shifted_sums(*split, torch.ones_like(whole[:, :1]), held.left, kept))
    found = normalized(sums, total, held.left, dyadic(64.0), held)[0] / 64
    wanted = scores.softmax(-1) @ whole.double()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("keys", "most", "printed", "log2"),
    [(17, 0.045, 0.04, 0.05), (65, 0.055, 0.13, 0.06), (197, 0.078, 0.30, 0.075), (577, 0.115, 0.50, 0.075)],
)
def test_at_every_number_of_keys_the_chosen_code_keeps_the_error_low(
    keys: int, most: float, printed: float, log2: float
) -> None:
    """Scores of standard deviation 3: chosen under `most`, the printed form over `printed`, log2 over `log2`."""
    scores, values = drawn(keys, 3.0)
    found = drop_errors(scores, values, 4, "log-sqrt2", None, exact=False)
    code = found.best()
    assert code is not None
    chosen = found.relative(code)
    assert chosen < most
    assert found.relative(None) > printed
    assert chosen < found.relative(None) / (1.2 if keys < 65 else 3)
    assert chosen == pytest.approx(by_definition(scores, values, code, kind="log-sqrt2"), rel=1e-6)
    assert found.relative(None) == pytest.approx(by_definition(scores, values, None, kind="log-sqrt2"), rel=1e-6)
    assert in_integers(scores, values, code) == pytest.approx(chosen, abs=0.004)
    assert in_integers(scores, values, None) == pytest.approx(found.relative(None), abs=0.004)
    other = drop_errors(scores, values, 4, "log2", None, exact=False).relative(None)
    assert other > log2
    assert (chosen < other) == (keys < 577)


@pytest.mark.parametrize("kind", ["log-sqrt2", "log2"])
@pytest.mark.parametrize("exact", [False, True])
def test_every_candidate_has_the_error_of_its_definition(kind: Logarithm, exact: bool) -> None:
    scores, values = drawn(40, 2.0, seed=1)
    found = drop_errors(scores, values, 4, kind, None, exact=exact)
    wanted = [by_definition(scores, values, code, kind=kind, exact=exact) for code in range(1, 16)]
    assert [found.relative(code) for code in range(1, 16)] == pytest.approx(wanted, rel=1e-6)
    best = min(range(15), key=lambda place: wanted[place])
    printed = by_definition(scores, values, None, kind=kind, exact=exact)
    assert found.best() == (best + 1 if wanted[best] < printed else None)


def test_where_scores_lie_close_the_printed_form_stays() -> None:
    scores, values = drawn(197, 1.0)
    found = drop_errors(scores, values, 4, "log-sqrt2", None, exact=False)
    assert found.best() is None
    flat = drop_errors(torch.zeros(3, 5).double(), torch.ones(5, 2).double(), 4, "log2", None, exact=False)
    assert (flat.best(), flat.relative(None)) == (None, 0.0)


def test_errors_of_images_add_up_and_codes_without_room_are_no_choice() -> None:
    scores, values = drawn(60, 3.0)
    whole = drop_errors(scores, values, 8, "log-sqrt2", 25, exact=False)
    halves = [drop_errors(part, values, 8, "log-sqrt2", 25, exact=False) for part in scores.split(QUERIES // 2)]
    both = halves[0] + halves[1]
    assert len(whole.dropped) == 24
    assert both.relative(20) == pytest.approx(whole.relative(20))
    assert both.best() == whole.best()


def sharp(kind: str) -> Any:
    """A tiny model whose scores lie far apart."""
    model = made(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "qkv.weight" in name or "q_proj.weight" in name:
                parameter.mul_(3)
    return model


@pytest.mark.parametrize("softmax", ["log-sqrt2", "log2"])
@pytest.mark.parametrize("denominator", ["quantized", "exact"])
def test_the_program_holds_the_choice_of_every_block(softmax: str, denominator: str) -> None:
    model = sharp("moe")
    vit, images = describe(model), pixels(model, 12)
    section = IntegerSection(softmax=softmax, denominator=denominator)
    rows = dropped_codes(vit, images, section)
    program = program_of(vit, images, section)
    held = {step.name: step.attributes["dropped_from"] for step in program.operations if step.kind == "log_attention"}
    assert [row.block for row in rows] == ["blocks.0", "blocks.1"]
    assert held == {f"{row.block}.attention": row.dropped_from for row in rows}
    assert all(row.error <= row.printed_error for row in rows)
    printed = section.model_copy(update={"dropping": "printed"})
    for row, as_printed in zip(rows, dropped_codes(vit, images, printed), strict=True):
        assert (as_printed.dropped_from, as_printed.error) == (None, row.printed_error)
    assert dropped_codes(vit, images, IntegerSection(softmax="uniform")) == ()


def test_a_chosen_code_is_in_the_files_and_the_figures_and_read_by_others(tmp_path: Any) -> None:
    model = sharp("moe")
    images, labels = pixels(model, 12), torch.zeros(12, dtype=torch.int64)
    section = IntegerSection(schemes=False, vectors=2)
    mine = make(model, images, images, labels, section, tmp_path / "mine")
    printed = section.model_copy(update={"dropping": "printed"})
    theirs = make(model, images, images, labels, printed, tmp_path / "theirs")
    assert any(row.dropped_from is not None for row in mine.dropped)
    assert all(row.dropped_from is None for row in theirs.dropped)
    assert [row.printed_error for row in mine.dropped] == [row.error for row in theirs.dropped]
    assert mine.integer.logit_error != theirs.integer.logit_error
    assert [independent_replay(tmp_path / name)[0] for name in ("mine", "theirs")] == [[], []]
    text = "\n".join(lines(mine))
    assert "codes that count as 0 (in how many blocks): " in text
    assert f"as printed by {sum(row.printed_error for row in mine.dropped) / 2:.3f}" in text
