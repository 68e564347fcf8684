"""What `make test` leaves out is what its marks say, and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import examples, left_for_long


class Item(SimpleNamespace):
    """Is itself alone, as pytest's are."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def item(name: str, **marks: tuple[int, ...]) -> Any:
    """A test of a file, with marks {name: arguments}."""
    found = {mark: SimpleNamespace(args=arguments) for mark, arguments in marks.items()}
    return Item(path=Path("a.py"), name=name, get_closest_marker=found.get)


def left(*items: Any) -> list[str]:
    gone = left_for_long(items)
    return [one.name for one in items if one in gone]


def test_only_so_many_cases_stay_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEQ_CASES", raising=False)
    plain, full = item("plain"), item("full", full=())
    assert left(plain, full) == ["full"]
    some = [item(f"some[{number}-x]", cases=(3,)) for number in range(9)]
    assert left(plain, *some) == [f"some[{number}-x]" for number in (1, 2, 4, 5, 7, 8)]
    assert left(*some[4:5]) == [], "a case that is asked for runs"
    assert left(*some[:2]) == []
    on_gpu = item("some[gpu]", cases=(3,), cuda=())
    assert left(*some[:3], on_gpu) == []
    assert left(item("none[0]", cases=(0,)), item("none[1]", cases=(0,))) == ["none[0]", "none[1]"]


def test_all_cases_stay_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEQ_CASES", "all")
    assert left(*(item(f"some[{number}]", cases=(1,)) for number in range(3)), item("full", full=())) == ["full"]


@pytest.mark.parametrize(("variable", "value"), [("MOEQ_FULL", "1"), ("MOEQ_CASES", "all"), (None, "")])
def test_long_sweeps_try_twice_the_examples(monkeypatch: pytest.MonkeyPatch, variable: str | None, value: str) -> None:
    for name in ("MOEQ_FULL", "MOEQ_CASES"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, value)
    assert examples(60) == (30 if variable is None else 60)
