"""Versions of experts that wait in the machine's memory, beside those that a model computes with.

One buffer, reserved once, of slots of one size for each version; what was used last stays. Its pages are taken as slots
are first written, so that resident memory grows up to `nbytes` and never beyond; beside a GPU it is pinned, all of it
from the start, and a slot from which a copy is on its way is not written before that has arrived (`hold`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from moeq_kernels.streams import Event

Key = tuple[int, int, int]  # layer, expert, version


def _pages(size: int) -> Tensor:
    """Memory of which no page is taken before it is written."""
    return torch.from_numpy(np.zeros(size, np.uint8))


class HostCache:
    """Slots for versions of experts; a size of 0: this version is never kept. For one thread at a time."""

    def __init__(
        self, limit: int, sizes: Sequence[int], experts: int, memory: Callable[[int], Tensor] = _pages
    ) -> None:
        """limit: bytes of all slots, as many of each size, but one of each at least and no more than experts; memory:
        where it comes from, uint8 of so many bytes."""
        count = max(1, min(experts, limit // max(1, sum(sizes))))
        self.sizes, self.slots = tuple(sizes), count
        self.nbytes = count * sum(sizes)
        self._held = memory(self.nbytes)
        starts = [count * sum(sizes[:version]) for version in range(len(sizes))]
        self._free = [[start + n * size for n in range(count)] for start, size in zip(starts, sizes, strict=True)]
        self._kept: list[OrderedDict[Key, int]] = [OrderedDict() for _ in sizes]
        self._ahead: set[Key] = set()
        self._under_way: dict[Key, Event] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._kept[key[2]]

    @property
    def kept_bytes(self) -> int:
        """Of the slots that hold a version."""
        return sum(len(kept) * size for kept, size in zip(self._kept, self.sizes, strict=True))

    def take(self, key: Key) -> tuple[Tensor | None, bool]:
        """The bytes kept under a key, None where there are none, and whether they came ahead of their first use."""
        kept = self._kept[key[2]]
        if key not in kept:
            return None, False
        kept.move_to_end(key)
        ahead = key in self._ahead
        self._ahead.discard(key)
        return self._bytes(key[2], kept[key]), ahead

    def fill(self, key: Key, write: Callable[[Tensor], None], *, ahead: bool = False) -> Tensor:
        """Keep what `write` puts into a slot, in the place of what was used longest ago; a slot is free again where
        `write` fails."""
        version = key[2]
        if not self._free[version]:
            oldest = self._oldest(version)
            if (event := self._under_way.pop(oldest, None)) is not None:
                event.wait()
            self._ahead.discard(oldest)
            self._free[version].append(self._kept[version].pop(oldest))
        slot = self._free[version].pop()
        held = self._bytes(version, slot)
        try:
            write(held)
        except BaseException:
            self._free[version].append(slot)
            raise
        self._kept[version][key] = slot
        if ahead:
            self._ahead.add(key)
        return held

    def room_ahead(self, version: int, wanted: Collection[Key]) -> bool:
        """Whether something may come ahead of its use: into a free slot, or one that nobody waits for."""
        if self._free[version]:
            return True
        oldest = self._oldest(version)
        return oldest not in wanted and (oldest not in self._under_way or self._under_way[oldest].done())

    def hold(self, key: Key, until: Event) -> None:
        """What is kept under a key is read until then; the last one that was given counts."""
        self._under_way[key] = until

    def _oldest(self, version: int) -> Key:
        """What is given up next: what was used longest ago of that which nothing reads any more, if there is any."""
        kept = self._kept[version]
        idle = (key for key in kept if key not in self._under_way or self._under_way[key].done())
        return next(idle, next(iter(kept)))

    def clear(self) -> None:
        """Keep nothing, and give the memory back once nothing reads it."""
        for event in self._under_way.values():
            event.wait()
        self._under_way.clear()
        self._held = torch.empty(0, dtype=torch.uint8)
        self._free = [[] for _ in self.sizes]
        for kept in self._kept:
            kept.clear()

    def _bytes(self, version: int, slot: int) -> Tensor:
        return self._held[slot : slot + self.sizes[version]]
