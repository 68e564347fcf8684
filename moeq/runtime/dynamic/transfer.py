"""How a version of an expert comes into a block: whole, or, of nested experts, only the bits that are not there yet.

What waits in the machine's memory is arranged already, so that a copy of what is there is one pass over its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from moeq.runtime.dynamic.pools import HIGH, LOW
from moeq_kernels.cpu.nested_planes import are_nested, low_plane, narrowed, plane_bytes, widened
from moeq_kernels.cpu.pages import zeros
from moeq_kernels.cpu.versions import Block
from moeq_kernels.description import Matrix
from moeq_kernels.streams import DONE, Event

Read = Callable[[int, int, int], Mapping[str, Matrix]]  # layer, expert, version -> its matrices
Blocks = Sequence[Sequence[Block]]  # [L][version]


class Transfer(Protocol):
    """host_sizes: bytes of what waits for a version, 0 for one that is made of what is there; planes: whether a
    promotion brings only what is not there yet."""

    host_sizes: tuple[int, int]
    planes: bool

    def stage(self, layer: int, expert: int, version: int, into: Tensor) -> None:
        """Read what a copy needs beside the block that the expert has."""

    def place(self, layer: int, version: int, staged: Tensor | None, old: Tensor, into: Tensor) -> tuple[int, Event]:
        """Write an expert's block of a version; old: the block that it has. The bytes that were brought for it, and
        when they are there."""


class Whole:
    """Every version is brought as it is."""

    planes = False

    def __init__(self, read: Read, blocks: Blocks) -> None:
        self.read, self.blocks = read, blocks
        self.host_sizes = max(of[LOW].nbytes for of in blocks), max(of[HIGH].nbytes for of in blocks)

    def stage(self, layer: int, expert: int, version: int, into: Tensor) -> None:
        self.blocks[layer][version].write(self.read(layer, expert, version), into)

    def place(self, layer: int, version: int, staged: Tensor | None, old: Tensor, into: Tensor) -> tuple[int, Event]:
        size = self.blocks[layer][version].nbytes
        assert staged is not None
        into[:size] = staged[:size]
        return size, DONE


class NestedPlanes:
    """A promotion brings two bits a weight, a demotion nothing: the rest is in the block that the expert has."""

    planes = True

    def __init__(self, read: Read, blocks: Blocks) -> None:
        self.read, self.blocks = read, blocks
        self._names = [tuple(of[LOW].shapes) for of in blocks]
        self._sizes = [{name: plane_bytes(of[LOW].shapes[name]) for name in of[LOW].shapes} for of in blocks]
        self.host_sizes = (0, max(sum(sizes.values()) for sizes in self._sizes))
        self._arranged = zeros(max(of[HIGH].nbytes for of in blocks))
        self._compile()

    def _compile(self) -> None:
        """What a first copy would otherwise compile beside the model that runs, and rest thrice as long for it."""
        low, high = self.blocks[0]
        narrow, plane = zeros(low.nbytes), zeros(self.host_sizes[HIGH])
        for name, into in self._planes(0, plane).items():
            low_plane(high.bytes_of(name, self._arranged), high.shapes[name], low.shapes[name], into)
        self.place(0, HIGH, plane, narrow, self._arranged)
        self.place(0, LOW, None, self._arranged, narrow)

    @staticmethod
    def fits(blocks: Blocks) -> bool:
        """Whether low precision is the leading bits of high precision everywhere."""
        return all(are_nested(of[LOW].shapes[name], of[HIGH].shapes[name]) for of in blocks for name in of[LOW].shapes)

    def stage(self, layer: int, expert: int, version: int, into: Tensor) -> None:
        low, high = self.blocks[layer]
        high.write(self.read(layer, expert, version), self._arranged[: high.nbytes])
        for name, plane in self._planes(layer, into).items():
            wide = high.bytes_of(name, self._arranged)
            low_plane(wide, high.shapes[name], low.shapes[name], plane)

    def place(self, layer: int, version: int, staged: Tensor | None, old: Tensor, into: Tensor) -> tuple[int, Event]:
        low, high = self.blocks[layer]
        if version == LOW:
            for name in self._names[layer]:
                narrowed(high.bytes_of(name, old), high.shapes[name], low.shapes[name], low.bytes_of(name, into))
            return 0, DONE
        assert staged is not None
        for name, plane in self._planes(layer, staged).items():
            widened(low.bytes_of(name, old), plane, low.shapes[name], high.shapes[name], high.bytes_of(name, into))
        return sum(self._sizes[layer].values()), DONE

    def _planes(self, layer: int, held: Tensor) -> dict[str, Tensor]:
        """Of every matrix, one after the other."""
        found, at = {}, 0
        for name, size in self._sizes[layer].items():
            found[name] = held[at : at + size]
            at += size
        return found
