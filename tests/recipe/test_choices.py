"""The names that a recipe chooses among are those of what there is."""

from moeq import exporters
from moeq.artifacts import targets
from moeq.recipe.choices import FORMATS, TARGETS


def test_every_target_and_format_can_be_chosen() -> None:
    assert set(TARGETS) == set(targets.TARGETS)
    assert {exporters.NATIVE, *FORMATS} == {*targets.LOADED_BY, "dequantized"} == set(exporters.known_formats())
