"""The names that a recipe chooses among are those of what there is."""

from typing import get_args

from moeq.artifacts.targets import targets
from moeq.recipe.choices import Format, Native, Target
from moeq.registry import EXPORTERS, NATIVE, converted


def test_every_target_and_format_can_be_chosen() -> None:
    assert set(get_args(Target)) == set(targets())
    assert get_args(Format) == converted()
    assert {*get_args(Native), *get_args(Format)} == set(EXPORTERS.names())
    assert get_args(Native) == (NATIVE,)
