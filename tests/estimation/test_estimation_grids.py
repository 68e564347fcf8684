"""Grids and policies as the command line says them."""

from __future__ import annotations

import pytest

from moeq.errors import RecipeError
from moeq.estimation.grids import MOST_POINTS, parse_grid
from moeq.estimator import Grid


@pytest.mark.parametrize("texts", [["in=2048,128,128", "out=512", "batch=4,1"], ["batch=1,4 out=512 in=128,2048"]])
def test_a_grid_in_one_word_or_several(texts: list[str]) -> None:
    assert parse_grid(texts) == Grid(inputs=(128, 2048), outputs=(512,), batches=(1, 4))


def test_axes_that_are_left_out_keep_their_defaults() -> None:
    assert parse_grid([]) == Grid()
    assert parse_grid(["batch=2"]) == Grid(batches=(2,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("128", "'128' is no axis"),
        ("inn=128", "unknown axis 'inn'; did you mean 'in'"),
        ("zzz=128", "axes are in, out, batch"),
        ("in=1 in=2", "in is there twice"),
        ("in=", "'' is no whole number"),
        ("in=1,,2", "'' is no whole number"),
        ("in=1.5", "'1.5' is no whole number"),
        ("batch=-1", "'-1' is no whole number"),
        ("batch=0", "0 is out of reach"),
        ("batch=\N{ARABIC-INDIC DIGIT FOUR}", "is no whole number"),
        (f"out={'9' * 5000}", "is out of reach"),
        ("batch=100000", "give 1 to 4096"),
        (f"in={','.join(map(str, range(1, MOST_POINTS + 2)))} out=1", f"give at most {MOST_POINTS}"),
    ],
)
def test_a_grid_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as refused:
        parse_grid([text])
    assert str(refused.value).startswith("--grid")
    assert len(str(refused.value)) < 200
