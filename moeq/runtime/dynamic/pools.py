"""Memory of experts in two precisions: blocks of one size each, taken once, and an index of what lies in which.

Paper 001 (DynaExq), sections 3.4 and 3.5: nothing is allocated after the start, taking and giving back a block takes
constant time, and no more than a few experts have a second block while they change (the transient buffer).

Letters: L layers, E experts of a layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from moeq.errors import ModelError
from moeq.tables import human_bytes
from moeq_kernels.cpu.pages import zeros

LOW, HIGH = 0, 1
PAGE = 4096


class BlockPool:
    """Blocks of one size, by the place of their first byte."""

    def __init__(self, start: int, size: int, count: int) -> None:
        self.size, self.count = size, count
        self.starts = range(start, start + size * count, size)
        self._free = list(reversed(self.starts))
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    def take(self) -> int | None:
        """A block, None where all are taken."""
        with self._lock:
            if not self._free:
                return None
            block = self._free.pop()
            self._taken.add(block)
            return block

    def give_back(self, block: int) -> None:
        """A block that was taken; ValueError for one that was not."""
        with self._lock:
            if block not in self._taken:
                raise ValueError(f"block at {block} is not taken")
            self._taken.remove(block)
            self._free.append(block)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What fits: paper 001, 3.5, n_hot * S_hot + n_cold * S_cold <= M, with the transient buffer.

    low_bytes, high_bytes: of an expert in each precision; layers [L]: their experts; transient: experts that may have a
    second block, in each precision; other_bytes: of what else needs the memory, by name; memory_bytes: M with that.
    """

    low_bytes: int
    high_bytes: int
    layers: Sequence[int]
    transient: int
    memory_bytes: int
    other_bytes: dict[str, int]

    @property
    def least_bytes(self) -> int:
        """All experts in low precision, and the buffer."""
        return sum(self.layers) * self.low_bytes + self.transient * (self.low_bytes + self.high_bytes)

    @property
    def left_bytes(self) -> int:
        """What all else leaves for experts."""
        return self.memory_bytes - sum(self.other_bytes.values())

    @property
    def places(self) -> int:
        """n_hot: experts in high precision in every layer. ModelError where not even all in low precision fit."""
        spare = self.left_bytes - self.least_bytes
        if spare < 0:
            parts = {**self.other_bytes, "all experts in low precision": sum(self.layers) * self.low_bytes}
            parts["experts that change"] = self.transient * (self.low_bytes + self.high_bytes)
            told = " + ".join(f"{name} {human_bytes(size)}" for name, size in parts.items())
            what = f"{told} = {human_bytes(sum(parts.values()))}, more than {human_bytes(self.memory_bytes)}"
            raise ModelError(
                what, where="dynamic precision", do="give more memory, a lower precision or a shorter text"
            )
        each = len(self.layers) * (self.high_bytes - self.low_bytes)
        return min(min(self.layers), spare // each if each > 0 else min(self.layers))

    @property
    def pool_bytes(self) -> int:
        """Of both pools, as `Pools` takes them."""
        places = self.places
        low = sum(self.layers) - places * len(self.layers)
        return (low + self.transient) * self.low_bytes + (places * len(self.layers) + self.transient) * self.high_bytes


def resident(size: int) -> Tensor:
    """Zeros on the CPU, every page of them there from the start."""
    held = zeros(size)
    held[::PAGE] = 0  # pages are there when they are first written
    return held


class Pools:
    """Both pools in one buffer, every byte of it there from the start; its first bytes, `begin` of them, stay zeros."""

    def __init__(self, budget: Budget, begin: int, memory: Callable[[int], Tensor] = resident) -> None:
        """memory: where it comes from, uint8 zeros of so many bytes."""
        high = budget.places * len(budget.layers)
        counts = (sum(budget.layers) - high + budget.transient, high + budget.transient)
        sizes = (budget.low_bytes, budget.high_bytes)
        self.held = memory(begin + sum(count * size for count, size in zip(counts, sizes, strict=True)))
        self.pools = (
            BlockPool(begin, sizes[LOW], counts[LOW]),
            BlockPool(begin + counts[LOW] * sizes[LOW], sizes[HIGH], counts[HIGH]),
        )

    def bytes_of(self, version: int, block: int) -> Tensor:
        """The bytes of a block."""
        return self.held[block : block + self.pools[version].size]
