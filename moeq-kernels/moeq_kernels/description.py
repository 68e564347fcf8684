"""What a kernel is given and what it gives: the experts of one layer, rearranged once, then called with routed tokens.

Letters: E experts, T tokens, k experts a token, P = T*k rows, H hidden size, I intermediate size, N rows and K inputs
of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moeq_kernels.packed import PackedWeight

Matrix = PackedWeight | Tensor  # [N, K]; a tensor is dense: 16 bits, or as the checkpoint has it
Gate = Callable[[dict[str, Tensor]], Tensor]
DOWN = "down_proj"


@dataclass(frozen=True, kw_only=True)
class LayerOfExperts:
    """All experts of one layer, each matrix in a width of its own.

    matrices: of every expert {projection: [N, K]}, DOWN among them; {} for one that is dropped, of which no kernel
    hears (see `dropped`); biases: of every expert {projection: [N]}, empty where there are none; gate: {projection:
    [P, I]} of all projections but DOWN -> [P, I]; activation: its name (silu, gelu, gelu_pytorch_tanh, relu, ...) where
    the gate is exactly act(gate_proj) * up_proj, or act(up_proj) without a gate_proj, so that a kernel may compute it
    in the same pass, None where only `gate` knows; finish: what is done to the rows [P, H] after DOWN before they are
    weighted, None for nothing.
    """

    matrices: Sequence[Mapping[str, Matrix]]
    biases: Sequence[Mapping[str, Tensor]]
    gate: Gate
    activation: str | None = None
    finish: Callable[[Tensor], Tensor] | None = None


class PreparedLayer(Protocol):
    """A layer in a kernel's own arrangement, which holds what is stored once and nothing expanded."""

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, scales, zero points, dense matrices, biases and the table."""

    def matrix(self, expert: int, projection: str) -> Matrix:
        """One matrix as it was given, bit for bit: the arrangement can be undone."""

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, H], index and weights [T, k] -> sum over each token's experts of weight times output, [T, H].

        An index of E or more, or below 0, is no expert (the sentinels of expert parallelism): it adds nothing.
        """


class Versioned(Protocol):
    """A layer each of whose experts is computed from one of several versions, in blocks of a buffer."""

    def places(self) -> list[tuple[int, int]]:
        """[E] version and offset, as published."""

    def place(self, expert: int) -> tuple[int, int]:
        """Version and offset of one expert, as published."""

    def ready(self, wait: bool = False) -> bool:
        """Whether something can be published without waiting; wait: until it can."""

    def publish(self, places: Mapping[int, tuple[int, int]]) -> int:
        """From the next call on some experts are in another version, at another place; a number for `quiet`."""

    def quiet(self, published: int, wait: bool = False) -> bool:
        """Whether nothing reads what was in use before something was published; wait: for a device, until so."""

    def matrix(self, expert: int, projection: str) -> Matrix:
        """One matrix as it was given, bit for bit."""

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As `PreparedLayer`."""


class PreparedLinear(Protocol):
    """One matrix in a kernel's own arrangement."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def matrix(self) -> Matrix:
        """As it was given, bit for bit."""

    def some(self, rows: Tensor) -> Matrix:
        """Some rows [n] of it, in any order and with repetitions, as they were given: what an embedding looks up."""

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [T, K] -> [T, N] in the rows' dtype."""


class Kernel(Protocol):
    """One way to compute with packed matrices."""

    name: str

    def refusal(self, layer: LayerOfExperts) -> str | None:
        """Why this kernel cannot compute this layer on this machine, None if it can."""

    def layer(self, layer: LayerOfExperts) -> PreparedLayer:
        """Rearranged; needs at most the layer's own bytes more while it works."""

    def linear(self, matrix: Matrix, bias: Tensor | None = None) -> PreparedLinear:
        """One matrix alone (attention, dense, head) through the same code; ValueError for one that it cannot take."""
