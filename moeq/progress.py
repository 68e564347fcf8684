"""Progress and messages on standard error; standard output is left to results."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from moeq.bounded import CONTROL, shortened
from moeq.tables import human_seconds
from moeq.windows import fitted

LINE_SECONDS = 15  # between two lines of progress where there is no terminal
BAR, LEAST_BAR, BESIDE_BAR = 24, 4, 29  # columns of a terminal: of the longest bar, the shortest, the figures beside it
Bar = Callable[[str, int], AbstractContextManager[Callable[[], None]]]  # `Reporter.bar`, or what stands for it


class PlainConsole(Console):
    """A console that shows control characters, which names in other people's files may hold, and does not obey them.

    Nor does it read rich's markup in them unless that is asked for, or `:train:` as a picture. What goes to a file or a
    pipe has a line for a paragraph, which can be searched, unless COLUMNS asks for a width.
    """

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, emoji=False, highlight=False, **options)
        if not self.width:  # COLUMNS=0, as some shells and CI have it: rich would print nothing
            self.width = shutil.get_terminal_size().columns

    @property
    def wraps(self) -> bool:
        """Whether there is a window, or a width was asked for."""
        return self.is_terminal or os.environ.get("COLUMNS", "").lstrip("0").isdigit()

    def print(self, *objects: Any, **options: Any) -> None:
        objects = tuple(fitted(one, self.width) if isinstance(one, Table) else one for one in objects)
        if not self.wraps and all(isinstance(one, str) for one in objects):
            options.setdefault("soft_wrap", True)
        super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Nobody reads any more: the error itself goes on, where rich ends the program with a code of its own."""
        raise

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            shown = text if control else CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
            yield Segment(shown, style, control)


@contextmanager
def no_bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Where nobody looks: as `Reporter.bar`."""
    yield lambda: None


@dataclass
class Counted:
    """Something that goes on: how much of it is done, since when (seconds since 1970)."""

    title: str
    total: int
    done: int = 0
    began: float = field(default_factory=time.time)


class _Told(logging.Handler):
    """What the kernels tell users, said by a reporter."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(logging.INFO)
        self._reporter = reporter

    @classmethod
    def to(cls, reporter: Reporter) -> None:
        """From now on by this one."""
        told = logging.getLogger("moeq.kernels")
        told.handlers = [one for one in told.handlers if not isinstance(one, cls)] + [cls(reporter)]
        told.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Where its standard error has been closed since, nothing: a remark is no reason for a kernel to fail."""
        with suppress(OSError, ValueError):
            self._reporter.say(f"[dim]{escape(record.getMessage())}[/dim]")


class Reporter:
    """Prints lines and progress bars; with quiet=True, nothing but errors.

    What others may look at meanwhile: the stage that runs, since when, what is counted in it, the innermost last, and
    what its workers do.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.stage: Counted | None = None
        self.counted: list[Counted] = []
        self.workers: Callable[[], list[str]] = list
        if not quiet:
            _Told.to(self)
        # bound to today's stderr, so that a library's redirected output does not take the bar with it
        self.console = PlainConsole(file=sys.stderr, markup=True)

    def say(self, text: str) -> None:
        """One line for the user (rich markup)."""
        if not self.quiet:
            self.console.print(text, soft_wrap=True)  # the terminal's to break, so that a log has whole lines

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """Show progress with the time left while the block runs; yields the function that advances it by one.

        A bar on a terminal; elsewhere (CI logs) a line at most every 15 seconds.
        """
        counted = Counted(title, total)
        self.counted.append(counted)

        def count() -> None:
            counted.done += 1
            advance()

        try:
            with self._shown(title, total) as advance:
                yield count
        finally:
            self.counted.remove(counted)

    @contextmanager
    def _shown(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """What is seen of a bar."""
        if self.quiet:
            yield lambda: None
        elif not self.console.is_terminal:
            yield self._lines(title, total)
        else:
            room = self.console.width - BESIDE_BAR
            title = shortened(title, max(1, room - LEAST_BAR))
            columns = (
                TextColumn("  {task.description}"),
                BarColumn(bar_width=max(LEAST_BAR, min(BAR, room - len(title)))),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("left"),
            )
            with Progress(*columns, console=self.console, transient=True) as progress:
                task = progress.add_task(title, total=total)
                yield lambda: progress.advance(task)

    def _lines(self, title: str, total: int) -> Callable[[], None]:
        started = last = time.monotonic()
        done = 0

        def advance() -> None:
            nonlocal done, last
            done += 1
            now = time.monotonic()
            if now - last >= LINE_SECONDS:
                last = now
                left = (now - started) / done * (total - done)
                self.say(f"  {title} {done}/{total}, {human_seconds(left)} left")

        return advance
