"""Experts that change their precision on a GPU: what routers choose counted there, versions brought on a stream.

Nothing here waits for the device but what is told to: counts come back by a copy whose event is asked for, a version
counts as brought when the event of its copy is done. Everything runs in Triton's interpreter on the CPU too.

Letters: L layers, E experts of a layer, T tokens, k experts a token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from moeq.runtime.dynamic.pools import HIGH, LOW
from moeq.runtime.dynamic.seen import Gained
from moeq.runtime.dynamic.transfer import Read
from moeq_kernels.gpu.planes import are_nested, narrow, plane_bytes, widen, write_planes
from moeq_kernels.gpu.versions import Block
from moeq_kernels.streams import Event, Streams, launching_on

EXPERTS, ROWS = 16, 128  # of a program that counts, and choices that it compares at once


class SeenThere:
    """`Statistics` on the device: of each layer float32 [2 E + 1], S, Q and steps since they were last read."""

    def __init__(self, experts: Sequence[int], ema: float, streams: Streams) -> None:
        self.experts, self.ema, self.streams = list(experts), ema, streams
        self.held = torch.zeros(self.size_of(experts) // 4, dtype=torch.float32, device=streams.device)
        self._waiting = streams.waiting(self.held.nbytes)
        self._read = self._waiting.view(torch.float32)
        self._event: Event | None = None
        self._lock = threading.Lock()
        sizes = [2 * count + 1 for count in self.experts]
        self._notes = [_Notes(self, part, count) for part, count in zip(self.held.split(sizes), experts, strict=True)]

    @staticmethod
    def size_of(experts: Sequence[int]) -> int:
        """Bytes of it on the device."""
        return 4 * sum(2 * count + 1 for count in experts)

    def of(self, layer: int) -> _Notes:
        return self._notes[layer]

    def add(self, held: Tensor, experts: int, index: Tensor, weights: Tensor) -> None:
        """One step of one layer, in one launch, which a graph may capture."""
        from moeq_kernels.gpu.version_programs import add_choices

        share = 1 / max(1, len(index))
        given = index.contiguous(), weights.detach().contiguous()
        with self._lock, launching_on(self.held.device):
            add_choices[(-(-experts // EXPERTS),)](
                *given, held, index.numel(), experts, share, self.ema, 1 - self.ema, BLOCK=EXPERTS, EVERY=ROWS
            )

    def ask(self) -> None:
        """In the order of the current stream: copied out, and zero from there on."""
        if self._event is None:
            with self._lock:
                self._read.copy_(self.held, non_blocking=True)
                self.held.zero_()
                self._event = self.streams.now()

    def answered(self, wait: bool) -> list[Gained] | None:
        if self._event is None:
            return None
        if wait:
            self._event.wait()
        if not self._event.done():
            return None
        read, self._event = self._read.double().numpy(), None
        every = np.split(read, np.cumsum([2 * count + 1 for count in self.experts])[:-1])
        return [
            (one[None, :count], round(one[-1]), one[None, count:-1])
            for one, count in zip(every, self.experts, strict=True)
        ]


class _Notes:
    """Of one layer."""

    def __init__(self, seen: SeenThere, held: Tensor, experts: int) -> None:
        self.seen, self.held, self.experts = seen, held, experts

    def add(self, index: Tensor, weights: Tensor) -> None:
        self.seen.add(self.held, self.experts, index, weights)


class WholeThere:
    """Every version is brought as it is, from host memory on the copies' stream."""

    planes = False

    def __init__(self, read: Read, blocks: Sequence[Sequence[Block]], streams: Streams) -> None:
        self.read, self.blocks, self.streams = read, blocks, streams
        self.host_sizes = max(of[LOW].nbytes for of in blocks), max(of[HIGH].nbytes for of in blocks)

    def stage(self, layer: int, expert: int, version: int, into: Tensor) -> None:
        self.blocks[layer][version].write(self.read(layer, expert, version), into)

    def place(self, layer: int, version: int, staged: Tensor | None, old: Tensor, into: Tensor) -> tuple[int, Event]:
        size = self.blocks[layer][version].nbytes
        assert staged is not None
        given = staged[:size]
        return size, self.streams.beside(lambda: _copied(given, into[:size]))


class PlanesThere:
    """A promotion brings two bits a weight, a demotion nothing: the device makes the rest of the block that an expert
    has. Planes come through one piece of its memory, one after the other."""

    planes = True

    def __init__(self, read: Read, blocks: Sequence[Sequence[Block]], streams: Streams) -> None:
        self.read, self.blocks, self.streams = read, blocks, streams
        self.host_sizes = (0, self.size_of(blocks))
        self._arriving = torch.zeros(self.host_sizes[HIGH], dtype=torch.uint8, device=streams.device)

    @staticmethod
    def size_of(blocks: Sequence[Sequence[Block]]) -> int:
        """Bytes of the piece."""
        return max(plane_bytes(of[LOW]) for of in blocks)

    @staticmethod
    def fits(blocks: Sequence[Sequence[Block]]) -> bool:
        """Whether low precision is the leading bits of high precision everywhere."""
        pairs = (pair for of in blocks for pair in zip(of[LOW].places, of[HIGH].places, strict=True))
        return all(are_nested(low, high) for low, high in pairs)

    def stage(self, layer: int, expert: int, version: int, into: Tensor) -> None:
        low, high = self.blocks[layer]
        matrices = self.read(layer, expert, version)
        high.check(matrices)
        write_planes(low, matrices, into)

    def place(self, layer: int, version: int, staged: Tensor | None, old: Tensor, into: Tensor) -> tuple[int, Event]:
        low, high = self.blocks[layer]
        if version == LOW:
            return 0, self.streams.beside(lambda: narrow(high, low, old, into))
        assert staged is not None
        size = plane_bytes(low)
        given, arriving = staged[:size], self._arriving[:size]

        def work() -> None:
            _copied(given, arriving)
            widen(low, high, old, arriving, into)

        return size, self.streams.beside(work)


def _copied(given: Tensor, into: Tensor) -> None:
    into.copy_(given, non_blocking=True)


def on_device(streams: Streams) -> Callable[[int], Tensor]:
    """Zeros of its memory."""
    return lambda size: torch.zeros(size, dtype=torch.uint8, device=streams.device)
