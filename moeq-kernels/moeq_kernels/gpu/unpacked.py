"""Many rows an expert: its matrices are unpacked once, into memory of bounded size, and multiplied by torch.

Unlike the kernel this asks the device how many rows each expert has (one synchronisation a call), so it is not for CUDA
graphs. Weights are rounded once to the rows' dtype. Letters as in `kernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from moeq_kernels.description import DOWN, Gate
from moeq_kernels.gpu.stored import Stored

_GROUPED = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
SCRATCH_BYTES = 512 << 20  # of unpacked matrices at a time, or one expert's


class Matrices(Protocol):
    """Matrices of the experts of a layer in one buffer (`kernel.Stack`)."""

    stored: Stored
    experts: int

    def unpacked(self, slot: int, experts: Tensor, dtype: torch.dtype) -> Tensor:
        """One projection of some experts [e], int32, as dense matrices [e, N, K]."""


class Layer(Protocol):
    """What is computed with them (`kernel.TritonLayer`); names: of the projections, DOWN last."""

    names: list[str]
    gate: Gate
    finish: Callable[[Tensor], Tensor] | None

    @property
    def stack(self) -> Matrices:
        """The matrices."""


def expert_of(index: Tensor, experts: int) -> Tensor:
    """Experts of rows, E for every number that no expert has, also for those below 0."""
    return index.clamp(-1, experts).remainder(experts + 1)


def rows_of_experts(layer: Layer, hidden: Tensor, index: Tensor, each: int) -> Tensor:
    """Each row's expert's output [P, H], not weighted; index [P]: rows without an expert are left as they are."""
    experts = layer.stack.experts
    keys = expert_of(index, experts)
    order = torch.argsort(keys, stable=True)
    counts = torch.bincount(keys, minlength=experts + 1)[:experts].tolist()
    out = torch.empty((len(index), layer.stack.stored.shapes[-1][0]), dtype=hidden.dtype, device=hidden.device)
    start = 0
    for some in portions(layer, counts, hidden.dtype):
        number = sum(counts[expert] for expert in some)
        pairs = order[start : start + number]
        out[pairs] = _outputs(layer, hidden[pairs // each], some, [counts[expert] for expert in some])
        start += number
    return out


def portions(layer: Layer, counts: Sequence[int], dtype: torch.dtype) -> list[list[int]]:
    """Experts that have rows, in order, as many at a time as SCRATCH_BYTES hold when they are unpacked."""
    size = dtype.itemsize * sum(rows * inputs for rows, inputs in layer.stack.stored.shapes)
    most = max(1, SCRATCH_BYTES // size)
    active = [expert for expert, count in enumerate(counts) if count]
    return [active[start : start + most] for start in range(0, len(active), most)]


def _outputs(layer: Layer, rows: Tensor, experts: list[int], counts: list[int]) -> Tensor:
    """Outputs [p, H] of rows [p, H] of some experts, one expert's after the other's."""
    which = torch.tensor(experts, dtype=torch.int32, device=rows.device)
    made = {
        name: _product(layer, slot, rows, which, experts, counts)
        for slot, name in enumerate(layer.names)
        if name != DOWN
    }
    last = _product(layer, len(layer.names) - 1, layer.gate(made), which, experts, counts)
    return last if layer.finish is None else layer.finish(last)


def _product(layer: Layer, slot: int, rows: Tensor, which: Tensor, experts: list[int], counts: list[int]) -> Tensor:
    """Rows [p, K] times one projection of their experts, with its biases: [p, N]."""
    weights = layer.stack.unpacked(slot, which, rows.dtype)
    made = grouped_product(rows, weights, counts)
    biases = [layer.stack.stored.bias(expert, slot) for expert in experts]
    for part, bias in zip(made.split(counts), biases, strict=True):
        if bias is not None:
            part += bias.to(part.dtype)
    return made


def grouped_product(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows [p, K], counts of them for each of the matrices [e, N, K]: [p, N]; by torch's grouped product if it can."""
    fits = rows.dtype == torch.bfloat16 and rows.device.type == "cuda"  # what it takes, of rows of 16 bytes
    if _GROUPED is not None and fits and not any(size * rows.element_size() % 16 for size in weights.shape[1:]):
        return with_torchs_own(rows, weights, counts)
    made = rows.new_empty((len(rows), weights.shape[1]))
    for one, out, weight in zip(rows.split(list(counts)), made.split(list(counts)), weights, strict=True):
        torch.mm(one, weight.T, out=out)
    return made


def with_torchs_own(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """The same in one call."""
    ends = torch.tensor([*accumulate(counts)], dtype=torch.int32, device=rows.device)
    made: Tensor = _GROUPED(rows.contiguous(), weights.transpose(1, 2), offs=ends)  # type: ignore[misc]
    return made
