"""A device that does what it is given when a test lets it: copies in their order, what is computed in its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from moeq_kernels.streams import Event, HostStreams


class LateEvent:
    """Done when the device has come to it."""

    def __init__(self, catch_up: Callable[[LateEvent], None]) -> None:
        self.reached = False
        self.waited = 0
        self._catch_up = catch_up

    def done(self) -> bool:
        return self.reached

    def wait(self) -> None:
        self.waited += not self.reached
        self._catch_up(self)


class LateStreams(HostStreams):
    """copies, steps: what waits; nothing of it is done before `copy`, `step` or an event that is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: deque[tuple[Callable[[], None], LateEvent]] = deque()
        self.steps: deque[LateEvent] = deque()
        self.most = 0  # copies that waited at once
        self._lock = threading.RLock()

    def beside(self, work: Callable[[], None]) -> Event:
        event = LateEvent(lambda event: self._until(event, self.copy))
        with self._lock:
            self.copies.append((work, event))
            self.most = max(self.most, len(self.copies))
        return event

    def now(self) -> Event:
        event = LateEvent(lambda event: self._until(event, self.step))
        with self._lock:
            self.steps.append(event)
        return event

    def copy(self) -> bool:
        """The next copy; whether there was one."""
        with self._lock:
            if not self.copies:
                return False
            work, event = self.copies.popleft()
            work()
            event.reached = True
        return True

    def step(self) -> bool:
        """What was launched until the next event; whether there was one."""
        with self._lock:
            if not self.steps:
                return False
            self.steps.popleft().reached = True
        return True

    def _until(self, event: LateEvent, one: Callable[[], bool]) -> None:
        while not event.reached:
            assert one(), "an event that nothing leads to"
