"""Experts of a layer of which each has one of several versions, in blocks of a buffer that many layers share.

A block holds all matrices of one version of an expert, arranged as `arrangement` has them. Which block an expert is
computed from can change at any time, also while the layer is called in another thread: a call takes what was published
before it began, and blocks are not written again before the calls that may read them have ended (`quiet`).

Letters: E experts, V versions, C matrices of a stage.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from moeq_kernels.cpu.arrangement import ALIGNED, Shape, arrange
from moeq_kernels.cpu.forms import Form
from moeq_kernels.cpu.layer import PackedLayer, in_order
from moeq_kernels.cpu.matrices import Matrices, biases_of
from moeq_kernels.description import DOWN, LayerOfExperts, Matrix

MADE = ("_fused", "_stages")  # of a view from where its matrices lie
BEGIN = ALIGNED  # the first bytes of the buffer stay zeros: the zero points of grids without stored ones


class Block:
    """Where the matrices of one version lie within its block."""

    def __init__(self, matrices: Mapping[str, Matrix]) -> None:
        self.projections = in_order(matrices)
        self.shapes = {name: Shape.of(matrices[name]) for name in (*self.projections, DOWN)}
        self.starts, self.nbytes = {}, 0
        for name, shape in self.shapes.items():
            self.starts[name] = self.nbytes
            self.nbytes += shape.nbytes

    def write(self, matrices: Mapping[str, Matrix], into: Tensor) -> None:
        """Arrange an expert's matrices into a block's bytes; ValueError for those of another shape."""
        for name, shape in self.shapes.items():
            if Shape.of(matrices[name]) != shape:
                raise ValueError(f"{name} is {Shape.of(matrices[name])}, not {shape}")
        into[: self.nbytes].zero_()
        for name, shape in self.shapes.items():
            start = self.starts[name]
            arrange(matrices[name], shape, into[start : start + shape.nbytes])

    def bytes_of(self, name: str, held: Tensor) -> Tensor:
        """The bytes of one matrix in those of a block."""
        return held[self.starts[name] : self.starts[name] + self.shapes[name].nbytes]

    def places(self, names: Sequence[str], offset: int) -> tuple[list[Shape], list[int]]:
        """Shapes and offsets [C] of some matrices of a block at an offset of the buffer."""
        return [self.shapes[name] for name in names], [offset + self.starts[name] for name in names]


class _View(PackedLayer):
    """A layer whose matrices lie in a buffer already."""

    def __init__(
        self, layer: LayerOfExperts, form: Form, prefill: int, held: Tensor, blocks: Sequence[Block], places: Places
    ) -> None:
        self._given = held, blocks, places
        super().__init__(layer, form, prefill)

    def _arranged(self, layer: LayerOfExperts) -> tuple[Tensor, list[Matrices]]:
        held, blocks, places = self._given
        made = []
        for names in (self.projections, (DOWN,)):
            biases, where = biases_of(layer.biases, names, len(places))
            found = [blocks[version].places(names, offset) for version, offset in places]
            shapes, offsets = [shape for shape, _ in found], [offset for _, offset in found]
            matrices = Matrices(shapes=shapes, offsets=offsets, biases=biases, where=where, held=held)
            kinds = {(block.shapes[name].codes, block.shapes[name].unit) for block in blocks for name in names}
            matrices.__dict__["kinds"] = sorted(kinds)  # of all versions, whichever are there now
            made.append(matrices)
        return held, made

    def moved(self, places: Mapping[int, tuple[Block, int]]) -> _View:
        """The same with some experts in other blocks."""
        made = object.__new__(_View)
        held = self.__dict__.copy()  # at once: a call in another thread may make more
        made.__dict__.update({name: one for name, one in held.items() if name not in MADE})
        for stage, names in (("first", self.projections), ("second", (DOWN,))):
            there = {expert: block.places(names, offset) for expert, (block, offset) in places.items()}
            setattr(made, stage, getattr(self, stage).with_places(there))
        return made


Places = Sequence[tuple[int, int]]  # [E] version and offset in the buffer


class VersionedLayer:
    """The experts of a layer, each in the version and at the place that were published last."""

    def __init__(
        self, layer: LayerOfExperts, form: Form, prefill: int, held: Tensor, blocks: Sequence[Block], places: Places
    ) -> None:
        """layer: biases and what is computed between matrices; its matrices only say their names."""
        self.blocks = blocks
        self._view = _View(layer, form, prefill, held, blocks, places)
        self._places = list(places)
        self._lock = threading.Lock()
        self._calls: dict[int, int] = {}  # calls under way, by what was published when they began
        self._published = 0

    def places(self) -> list[tuple[int, int]]:
        """[E] version and offset, as published."""
        with self._lock:
            return list(self._places)

    def place(self, expert: int) -> tuple[int, int]:
        """Version and offset of one expert, as published."""
        with self._lock:
            return self._places[expert]

    def publish(self, places: Mapping[int, tuple[int, int]]) -> int:
        """From the next call on some experts are in another version, at another place; a number for `quiet`."""
        with self._lock:
            for expert, place in places.items():
                self._places[expert] = place
            self._view = self._view.moved(
                {expert: (self.blocks[version], offset) for expert, (version, offset) in places.items()}
            )
            self._published += 1
            return self._published

    def ready(self, wait: bool = False) -> bool:
        """Always."""
        return True

    def quiet(self, published: int, wait: bool = False) -> bool:
        """Whether no call is under way that began before something was published; calls are never waited for."""
        with self._lock:
            return all(began >= published for began in self._calls)

    def matrix(self, expert: int, projection: str) -> Matrix:
        """One matrix as it was given, bit for bit."""
        with self.reading() as view:
            return view.matrix(expert, projection)

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As `description.PreparedLayer`."""
        with self.reading() as view:
            return view(hidden, index, weights)

    @contextmanager
    def reading(self) -> Iterator[PackedLayer]:
        """The layer as it is now, whose blocks are not given back within."""
        with self._lock:
            view, began = self._view, self._published
            self._calls[began] = self._calls.get(began, 0) + 1
        try:
            yield view
        finally:
            with self._lock:
                self._calls[began] -= 1
                if not self._calls[began]:
                    del self._calls[began]
