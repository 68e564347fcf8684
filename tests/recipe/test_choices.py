"""The names that a recipe chooses among are those of what there is."""

from moeq import assigners, exporters
from moeq.artifacts import targets
from moeq.recipe import AssignSection
from moeq.recipe.choices import ALLOCATORS, FORMATS, TARGETS


def test_every_allocator_can_be_chosen_and_reads_keys_that_there_are() -> None:
    assert sorted(ALLOCATORS) == assigners.known_methods()
    keys = {key for allocator in ALLOCATORS.values() for key in (*allocator.budgets, *allocator.keys)}
    assert keys < set(AssignSection.model_fields)


def test_every_target_and_format_can_be_chosen() -> None:
    assert set(TARGETS) == set(targets.TARGETS)
    assert {exporters.NATIVE, *FORMATS} == {*targets.LOADED_BY, "dequantized"} == set(exporters.known_formats())
