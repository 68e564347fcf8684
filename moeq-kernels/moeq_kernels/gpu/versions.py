"""Experts of a layer of which each has one of several versions, in blocks of a buffer on a GPU that many layers share.

A block holds all matrices of one version of an expert as the Triton kernel reads them. Where each expert's lie, their
widths and grids, and what a row of them costs stand in one small piece of the device's memory (`State`), which programs
read: one copy in the order of the stream changes all of it between two launches, so that a layer that runs, or a
captured graph of it, sees one consistent set of versions. Nothing waits: where the copies that were made last are not
done yet, the next one is put off (`ready`).

A layer is to be called, and versions published, on one stream: what was launched before a version was published is then
done when its event is, and blocks are not written again before (`quiet`).

Letters: E experts, V versions, S projections, DOWN last.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from moeq_kernels.description import LayerOfExperts, Matrix
from moeq_kernels.gpu.kernel import Stack, TritonLayer, refusal
from moeq_kernels.gpu.stored import BIAS_UNIT, COLUMNS, Place, Stored, cost_of, in_order, placed, put, shape_of
from moeq_kernels.packed import PackedWeight
from moeq_kernels.streams import DONE, Event, Streams

BEGIN = 0  # bytes of the buffer before its first block
BLOCK_ALIGNED = 256  # bytes, as the device's own allocations
STAGES = 2  # copies of a layer's state on their way at once
GRID = 3  # numbers of a matrix's grid

Places = Sequence[tuple[int, int]]  # [E] version and offset in the buffer


class Block:
    """Where the matrices of one version lie within its block; ValueError for what cannot lie there."""

    def __init__(self, matrices: Mapping[str, Matrix]) -> None:
        self.names = in_order(matrices)
        self.projections = self.names[:-1]
        self.shapes: dict[str, Place] = {}
        size = 0
        for name in self.names:
            self.shapes[name], size = placed(matrices[name], None, size)
        self.places = list(self.shapes.values())
        self.nbytes = -(-size // BLOCK_ALIGNED) * BLOCK_ALIGNED
        if any(place.trained for place in self.places):
            raise ValueError("trellis codes with trained values have no blocks on a GPU")

    def write(self, matrices: Mapping[str, Matrix], into: Tensor) -> None:
        """An expert's matrices in a block's bytes, wherever they lie; ValueError for those of another shape."""
        self.check(matrices)
        into[: self.nbytes].zero_()
        for name, place in self.shapes.items():
            put(into, matrices[name], None, place)

    def check(self, matrices: Mapping[str, Matrix]) -> None:
        """ValueError for matrices of another shape than this block's."""
        for name, place in self.shapes.items():
            if (given := _kind(matrices[name])) != _like(place):
                raise ValueError(f"{name} is {given}, not {_like(place)}")

    def at(self, offset: int, biases: Sequence[int | None]) -> list[Place]:
        """Where the matrices [S] of a block at an offset of the buffer lie, and their biases."""
        return [_moved(place, offset, bias) for place, bias in zip(self.places, biases, strict=True)]


def _moved(place: Place, offset: int, bias: int | None) -> Place:
    scales = None if place.scales is None else place.scales + offset
    zeros = None if place.zeros is None else place.zeros + offset
    return replace(place, codes=place.codes + offset, scales=scales, zeros=zeros, bias=bias)


def _kind(matrix: Matrix) -> str:
    """What blocks of one version have in common of a matrix."""
    rows, inputs = shape_of(matrix)
    return _described(rows, inputs, matrix if isinstance(matrix, PackedWeight) else matrix.dtype)


def _like(place: Place) -> str:
    return _described(place.rows, place.inputs, place.like)


def _described(rows: int, inputs: int, like: PackedWeight | torch.dtype) -> str:
    if not isinstance(like, PackedWeight):
        return f"{rows} x {inputs} of {like}"
    kinds = ("nested", like.nested), ("symmetric", like.symmetric), ("with zeros", like.zeros is not None)
    said = "".join(f" {name}" for name, there in kinds if there)
    states = f" of {like.state_bits}-bit states" if like.state_bits else ""
    return f"{rows} x {inputs} of {like.bits} bits in groups of {like.group_size}{said}{states}"


class State:
    """What programs read of a layer besides its blocks, in one piece: table int64 [E, S, 8], grids float32 [E, S, 3],
    costs int32 [E] of each launch; the same on the host, and the copies that are on their way."""

    def __init__(self, experts: int, slots: int, launches: Sequence[tuple[int, ...]], streams: Streams) -> None:
        self.streams, self.launches = streams, list(launches)
        self.shape = experts, slots
        size = self.size_of(experts, slots, len(launches))
        self.there = torch.zeros(size, dtype=torch.uint8, device=streams.device)
        self.here = torch.zeros(size, dtype=torch.uint8)
        self._stages = [streams.waiting(size) for _ in range(STAGES)]
        self._sent: list[Event] = [DONE] * STAGES
        self._next = 0

    @staticmethod
    def size_of(experts: int, slots: int, launches: int) -> int:
        """Bytes of it on the device."""
        return experts * (slots * (8 * len(COLUMNS) + 4 * GRID) + 4 * launches)

    def parts(self, held: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Views: table, grids, and the costs of every launch."""
        experts, slots = self.shape
        table, grids = 8 * experts * slots * len(COLUMNS), 4 * experts * slots * GRID
        costs = held[table + grids :].view(torch.int32).view(len(self.launches), experts)
        return (
            held[:table].view(torch.int64).view(experts, slots, len(COLUMNS)),
            held[table : table + grids].view(torch.float32).view(experts, slots, GRID),
            list(costs),
        )

    def set(self, expert: int, places: Sequence[Place]) -> None:
        """One expert's matrices [S], on the host."""
        table, grids, costs = self.parts(self.here)
        table[expert] = torch.tensor([one.row() for one in places])
        grids[expert] = torch.tensor([one.grid() for one in places])
        for slots, of_launch in zip(self.launches, costs, strict=True):
            of_launch[expert] = cost_of([places[slot] for slot in slots])

    def ready(self, wait: bool = False) -> bool:
        """Whether there is a stage to send from; wait: until there is."""
        if wait:
            self._sent[self._next].wait()
        return self._sent[self._next].done()

    def send(self) -> Event:
        """What is on the host to the device, in the order of the current stream."""
        stage = self._stages[self._next]
        stage.copy_(self.here)
        self.there.copy_(stage, non_blocking=True)
        event = self._sent[self._next] = self.streams.now()
        self._next = (self._next + 1) % STAGES
        return event


class _Held(Stored):
    """Matrices in blocks of a buffer that is there already; biases in a tensor of their own."""

    def __init__(
        self, held: Tensor, blocks: Sequence[Block], places: Places, biases: Sequence[Mapping[str, Tensor]],
        streams: Streams,
    ) -> None:  # fmt: skip
        self.blocks, self.buffer = blocks, held
        shapes = {tuple((name, one.rows, one.inputs) for name, one in block.shapes.items()) for block in blocks}
        if len(shapes) != 1:
            raise ValueError("versions have other shapes than each other")
        self.shapes = [(one.rows, one.inputs) for one in blocks[0].places]
        kinds = {one.like for block in blocks for one in block.places if not isinstance(one.like, PackedWeight)}
        if len(kinds) > 1:
            raise ValueError(f"dense matrices are of {len(kinds)} types")
        self.dense = next(iter(kinds), None)
        self.computed, self.values = True, {}
        self.biases, self.bias_at = _biases(biases, blocks[0].names, len(places), held.device)
        self.state = State(len(places), len(self.shapes), self.launches(), streams)
        self.places = [blocks[of].at(at, self.bias_at[expert]) for expert, (of, at) in enumerate(places)]
        for expert, every in enumerate(self.places):
            self.state.set(expert, every)
        self.state.there.copy_(self.state.here)
        self.table, self.grids, self.launch_costs = self.state.parts(self.state.there)

    @property
    def kinds(self) -> list[list[Place]]:
        """Of all versions, whichever are there now: what is compiled, and captured, serves them all."""
        return [block.places for block in self.blocks]

    @property
    def nbytes(self) -> int:
        """Of the experts as they are now, and of what is kept beside the blocks."""
        return sum(one.nbytes for every in self.places for one in every) + self.beside_bytes

    @property
    def beside_bytes(self) -> int:
        """Of what is kept on the device beside the blocks."""
        return self.state.there.nbytes + self.biases.nbytes

    def singles(self) -> Tensor:
        return self.biases

    def bias(self, expert: int, slot: int) -> Tensor | None:
        at = self.bias_at[expert][slot]
        return None if at is None else self.biases[at // BIAS_UNIT :][: self.shapes[slot][0]]

    def move(self, expert: int, version: int, offset: int) -> None:
        """On the host alone."""
        self.places[expert] = self.blocks[version].at(offset, self.bias_at[expert])
        self.state.set(expert, self.places[expert])


def _biases(
    biases: Sequence[Mapping[str, Tensor]], names: Sequence[str], experts: int, device: torch.device
) -> tuple[Tensor, list[list[int | None]]]:
    """All biases one after the other, float32, and where those [E][S] begin, in bytes."""
    every: list[Tensor] = []
    at: list[list[int | None]] = []
    size = 0
    for expert in range(experts):
        mine = biases[expert] if biases else {}
        at.append([None] * len(names))
        for slot, name in enumerate(names):
            if name in mine:
                every.append(mine[name].float().flatten().to(device))
                at[-1][slot] = size
                size += every[-1].nbytes
    return torch.cat(every) if every else torch.zeros(1, dtype=torch.float32, device=device), at


class _Stack(Stack):
    """With what programs divide work by where everything else of a layer lies."""

    stored: _Held

    def costs(self, slots: tuple[int, ...]) -> Tensor:
        wanted = tuple(sorted(slots))
        return self.stored.launch_costs[self.stored.state.launches.index(wanted)]


class VersionedTritonLayer:
    """The experts of a layer, each in the version and at the place that were published last."""

    def __init__(
        self, layer: LayerOfExperts, held: Tensor, blocks: Sequence[Block], places: Places, streams: Streams
    ) -> None:
        """layer: biases and what is computed between matrices; its matrices only say their names."""
        self.blocks = blocks
        self._held = _Held(held, blocks, places, layer.biases, streams)
        named = replace(layer, matrices=[dict.fromkeys(blocks[0].names, torch.empty(0))])
        self.layer = TritonLayer(named, _Stack(self._held))
        self._places = list(places)
        self._lock = threading.RLock()  # of launches, so that none of a call lies behind a version that others lack
        self._events: dict[int, Event] = {}
        self._published = 0

    @property
    def projections(self) -> list[str]:
        """Without DOWN."""
        return self.blocks[0].projections

    @property
    def beside_bytes(self) -> int:
        """Of what is kept on the device beside the blocks."""
        return self._held.beside_bytes

    def places(self) -> list[tuple[int, int]]:
        """[E] version and offset, as published."""
        with self._lock:
            return list(self._places)

    def place(self, expert: int) -> tuple[int, int]:
        """Version and offset of one expert, as published."""
        with self._lock:
            return self._places[expert]

    def ready(self, wait: bool = False) -> bool:
        """Whether something can be published now; wait: until it can."""
        return self._held.state.ready(wait)

    def publish(self, places: Mapping[int, tuple[int, int]]) -> int:
        """From the next call on some experts are in another version, at another place; a number for `quiet`.

        On the stream of the calls, where `ready`.
        """
        with self._lock:
            for expert, (version, offset) in places.items():
                self._places[expert] = version, offset
                self._held.move(expert, version, offset)
            self._published += 1
            self._events[self._published] = self._held.state.send()
            return self._published

    def quiet(self, published: int, wait: bool = False) -> bool:
        """Whether the device has done all that was launched before something was published; wait: until it has."""
        with self._lock:
            event = self._events.get(published, DONE)
        if wait:
            event.wait()
        if not event.done():
            return False
        with self._lock:
            for number in [one for one in self._events if one <= published]:
                del self._events[number]
        return True

    def matrix(self, expert: int, projection: str) -> Matrix:
        """One matrix as it was given, bit for bit."""
        return self.layer.matrix(expert, projection)

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As `description.PreparedLayer`."""
        with self._lock:
            return self.layer(hidden, index, weights)

    @contextmanager
    def reading(self) -> Iterator[VersionedTritonLayer]:
        """The layer as it is now, of which nothing is published within."""
        with self._lock:
            yield self


def versioned_layer(
    layer: LayerOfExperts, versions: Sequence[Mapping[str, Matrix]], held: Tensor, places: Places, streams: Streams
) -> VersionedTritonLayer:
    """A layer whose experts have one of several versions each; ValueError for what the kernel does not take.

    versions: an expert of each, of which all others have the shapes, wherever it lies.
    """
    why = refusal([matrix for matrices in versions for matrix in matrices.values()], held.device)
    if why is not None:
        raise ValueError(why)
    return VersionedTritonLayer(layer, held, [Block(matrices) for matrices in versions], places, streams)


def beside_bytes(block: Block, experts: int, biases: Sequence[Mapping[str, Tensor]]) -> int:
    """What a layer keeps on the device beside its blocks."""
    shapes = [(one.rows, one.inputs) for one in block.places]
    launches = len(shapes) + (len(shapes) > 1 and shapes[0] == shapes[1])
    added = sum(4 * bias.numel() for of_expert in biases for bias in of_expert.values())
    return State.size_of(experts, len(shapes), launches) + max(4, added)
