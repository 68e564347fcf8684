"""What stands for `Reporter.bar` in tests: how much there was of everything, and how much of it was counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Bars:
    """found: {title: (total, counted)}."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, int]] = {}

    @contextmanager
    def __call__(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        self.found[title] = total, 0

        def advance() -> None:
            self.found[title] = total, self.found[title][1] + 1

        yield advance
