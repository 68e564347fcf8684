"""The names that a recipe chooses among are those of what there is."""

from typing import get_args

from moeq.recipe.choices import Format, Native, Target
from moeq.runtimes import NATIVE, runtimes, written


def test_every_runtime_can_be_chosen() -> None:
    names = {key: get_args(get_args(key)[0]) for key in (Target, Format, Native)}
    assert names[Target] == tuple(runtimes())
    assert names[Format] == written()
    assert names[Native] == (NATIVE,)
