"""What an allocator is: a method that gives every expert its width and its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeq.artifacts.assignment import Assignment, Width
from moeq.assigners.inputs import AssignInputs
from moeq.assigners.limits import Limit
from moeq.recipe import SHARED, AssignSection, MethodSettings

Widths = Sequence[Sequence[Width]]  # of every expert of every layer
Cost = Callable[[int, int], int]  # bytes of one expert, by layer and width


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """A method of `assign`, called as its module or another package's entry point.

    help: one line; label: what reports call it, none: its name; settings: its own keys of the section; budgets: keys of
    which one must be given; reads: others of `SHARED` that it reads; weighs: keys of every method's that decide what it
    does with no expert on the GPU, none: all of them; implied: what keys stand for where they are not
    given; widths: what it always chooses among, none: what the section names or was measured; within_target: whether it
    chooses among what `assign.target` loads alone, so that its budget must have room for that.

    assign: the assignment of inputs; AssignmentError where there is none.
    trials: label and keys of what a frontier shows, by the averages to be shown (in code bits); none: each of these as
    its budget, or its defaults where it takes none. at_bytes: label and widths of what it shows beside, at the bytes
    of every other.
    remark: what is to be said of an assignment that it made; none: nothing.
    refuse: raises what it would of these inputs whatever is measured, before it is, beside what `limit_of` raises.
    foreseen: widths of the experts off the GPU, by their number in every layer, as far as they follow from a section
    alone; the most expensive ones, or None.
    """

    name: str
    help: str
    assign: Callable[[AssignInputs], Assignment]
    label: str = ""
    settings: type[MethodSettings] = MethodSettings
    budgets: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    weighs: tuple[str, ...] | None = None
    implied: Mapping[str, Any] = field(default_factory=dict)
    widths: tuple[int, ...] = ()
    within_target: bool = False
    trials: Callable[[AssignInputs, Sequence[str]], Iterable[tuple[str, Mapping[str, Any]]]] | None = None
    at_bytes: Callable[[AssignInputs, int], Iterable[tuple[str, Widths]]] | None = None
    remark: Callable[[AssignInputs, Assignment], str | None] | None = None
    refuse: Callable[[AssignInputs, Limit], None] | None = None
    foreseen: Callable[[AssignSection, Sequence[int], Cost], list[list[int]] | None] | None = None

    def __post_init__(self) -> None:
        """ValueError for keys that are not there, or are every method's."""
        own = set(self.settings.model_fields)
        if own & {*AssignSection.model_fields, "name"}:
            raise ValueError(f"settings have keys of all methods: {sorted(own & set(AssignSection.model_fields))}")
        if unknown := {*self.budgets, *self.reads} - own - set(SHARED):
            raise ValueError(f"there are no keys {sorted(unknown)}")
