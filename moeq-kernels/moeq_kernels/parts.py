"""Stored tensors as vLLM and SGLang hand them over, one at a time, until a matrix, or a layer's experts, are complete.

They find the place of a tensor by the name of a parameter; those of packed weights are empty, and their loaders keep
what comes. Letters: N output rows, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moeq_kernels.checkpoint import DENSE, Grid
from moeq_kernels.description import DOWN, Gate, LayerOfExperts, Matrix
from moeq_kernels.packed import has_zeros, some_inputs
from moeq_kernels.widths import FULL, PARTS, Width, width_of

GATE, UP = "gate_proj", "up_proj"
PROJECTIONS = {"w1": GATE, "w3": UP, "w2": DOWN}  # by the runtimes' names
STEMS = ("w13", "w2")  # of their parameters
GUARD = "weight"  # of a packed module in the checkpoint; the weight itself where the module is dense
Loader = Callable[..., Any]


class Parts:
    """What came of one matrix [rows, inputs] of `bits` bits."""

    def __init__(self, bits: int, grid: Grid, rows: int, inputs: int, biased: bool = False) -> None:
        self.bits, self.grid, self.rows, self.inputs = bits, grid, rows, inputs
        stored = ("codes", "scales", *(("zeros",) if has_zeros(bits, grid.symmetric) else ()))
        self.wanted = {*((DENSE,) if bits == FULL else stored), *(("bias",) if biased else ())}
        self.found: dict[str, Tensor] = {}

    def take(self, part: str, tensor: Tensor, name: str) -> None:
        """Keep one part; ValueError for one that a matrix of this width has not."""
        if part not in self.wanted:
            raise ValueError(f"moeq: {name} is no part of a matrix of {self.bits} bits; export the checkpoint again")
        self.found[part] = tensor

    @property
    def complete(self) -> bool:
        return self.wanted == self.found.keys()

    def matrix(self, dtype: torch.dtype, name: str) -> Matrix:
        """The matrix as it is stored; ValueError where parts are missing or have other shapes than config.json says."""
        if not self.complete:
            missing = ", ".join(sorted(self.wanted - self.found.keys()))
            raise ValueError(f"moeq: {name}: {missing} did not come with the checkpoint; export it again")
        if self.bits == FULL:
            return self.found[DENSE].to(dtype)
        try:
            weight = self.grid.weight(self.found, self.bits, self.inputs)
        except ValueError as error:
            raise ValueError(f"moeq: {name}: {error}; export the checkpoint again") from None
        if weight.codes.shape[0] != self.rows:
            raise ValueError(f"moeq: {name} has {weight.codes.shape[0]} rows, not {self.rows}; export it again")
        return weight


class LayerParts:
    """What came of a layer's experts on one device, which has the rows `mine` of gate and up, and those inputs of down.

    widths: {number on this device: of the expert}; sizes: hidden and intermediate, of whole matrices; leads: whether
    this device, of those whose outputs are added, is the one that adds down's biases.
    """

    def __init__(
        self,
        name: str,
        grid: Grid,
        widths: Mapping[int, Width],
        sizes: tuple[int, int],
        mine: slice,
        *,
        biased: bool = False,
        leads: bool = True,
    ) -> None:
        hidden, whole = sizes
        shapes = {GATE: (whole, hidden), UP: (whole, hidden), DOWN: (hidden, whole)}
        self.name, self.mine, self.leads = name, mine, leads
        self.parts = {
            (expert, projection): Parts(width_of(width, projection), grid, *shape, biased)
            for expert, width in widths.items()
            for projection, shape in shapes.items()
        }
        self.count = 0  # of those that are complete

    def take(self, expert: int, shard: str, part: str, tensor: Tensor, name: str) -> bool:
        """Keep one tensor of an expert, by its number on this device and w1, w2 or w3; whether it was the last."""
        parts = self.parts[expert, PROJECTIONS[shard]]
        parts.take(part, tensor, name)
        self.count += parts.complete
        return self.count == len(self.parts)

    def layer(self, dtype: torch.dtype, gate: Gate, activation: str | None) -> LayerOfExperts:
        """All of it, as kernels take it; ValueError where tensors never came or have other shapes."""
        experts = 1 + max((expert for expert, _ in self.parts), default=-1)
        matrices: list[dict[str, Matrix]] = [{} for _ in range(experts)]
        biases: list[dict[str, Tensor]] = [{} for _ in range(experts)]
        for (expert, projection), parts in self.parts.items():
            name = f"{self.name}.{expert}.{projection}"
            matrix = parts.matrix(dtype, name)
            every = slice(0, parts.inputs if projection != DOWN else parts.rows)
            rows, inputs = (self.mine, every) if projection != DOWN else (every, self.mine)
            matrices[expert][projection] = sliced(matrix, rows, inputs, name)
            if "bias" in parts.found:
                bias = parts.found["bias"].to(dtype)
                if projection != DOWN:
                    biases[expert][projection] = bias[self.mine].contiguous()
                else:
                    biases[expert][projection] = bias if self.leads else torch.zeros_like(bias)
        return LayerOfExperts(matrices=matrices, biases=biases, gate=gate, activation=activation)


def sliced(matrix: Matrix, rows: slice, inputs: slice, name: str) -> Matrix:
    """Some rows and inputs of a matrix [N, K], as one of several devices has them.

    ValueError where the inputs are neither whole groups of the grid nor all in one.
    """
    if isinstance(matrix, Tensor):
        return matrix[rows, inputs].contiguous()
    if rows != slice(0, matrix.codes.shape[0]):
        matrix = matrix.map(lambda part: part[rows].contiguous())
    if inputs == slice(0, matrix.inputs):
        return matrix
    try:
        return some_inputs(matrix, inputs.start, inputs.stop - inputs.start)
    except ValueError as error:
        raise ValueError(
            f"moeq: {name} cannot be divided among these devices ({error}); take fewer; "
            "--enable-expert-parallel leaves experts whole"
        ) from None


def placeholder(layer: nn.Module, name: str, loader: Loader) -> torch.device:
    """An empty parameter under a name by which a tensor's place is looked up; the device that it is on."""
    parameter = nn.Parameter(torch.empty(0), requires_grad=False)
    parameter.weight_loader = loader  # type: ignore[attr-defined]
    layer.register_parameter(name, parameter)
    return parameter.device


def drop(layer: nn.Module, *names: str) -> None:
    """Placeholders are done with."""
    for name in names:
        delattr(layer, name)


ALL_PARTS = (*PARTS, DENSE)
