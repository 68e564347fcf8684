"""What differs where experts that change their precision lie: on the CPU, or on a GPU with the Triton kernel.

MOEQ_KERNEL=triton with TRITON_INTERPRET=1 runs the GPU's form on the CPU, slowly.

Letters: L layers, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from moeq.errors import ModelError
from moeq.runtime.dynamic.host import HostCache
from moeq.runtime.dynamic.pools import Budget, Pools
from moeq.runtime.dynamic.seen import SeenHere, Statistics
from moeq.runtime.dynamic.transfer import NestedPlanes, Read, Transfer, Whole
from moeq_kernels import choice
from moeq_kernels.cpu import versions as on_cpu
from moeq_kernels.description import Matrix
from moeq_kernels.freed import return_memory
from moeq_kernels.names import VARIABLE
from moeq_kernels.streams import HostStreams, Streams, streams_of

Versions = Sequence[Sequence[Mapping[str, Matrix]]]  # [L][version]: matrices of an expert
BESIDE = "tables of the kernel"


class BlockOf(Protocol):
    """Where the matrices of one version lie within its block."""

    nbytes: int

    def write(self, matrices: Mapping[str, Matrix], into: Tensor) -> None:
        """An expert's matrices in a block's bytes; ValueError for those of another shape."""


class Form(Protocol):
    """How experts lie, are brought, and are counted."""

    streams: Streams

    def block(self, matrices: Mapping[str, Matrix]) -> BlockOf:
        """Of experts of the same shapes as this one."""

    def pools(self, budget: Budget) -> Pools:
        """Of the budget."""

    def beside(self, versions: Versions, biases: Sequence[Mapping[str, Tensor]], experts: Sequence[int]) -> int:
        """Bytes of the device that are taken beside blocks; biases [L]: of an expert; experts [L]."""

    def transfer(self, read: Read, blocks: Sequence[Sequence[Any]], planes: bool) -> Transfer:
        """Of blocks [L][version]; planes: where it can be, only what is not there yet is brought."""

    def host(self, limit: int, sizes: Sequence[int], experts: int) -> HostCache:
        """Where versions wait."""

    def statistics(self, experts: Sequence[int], ema: float) -> Statistics:
        """Of layers of so many experts."""

    def freed(self) -> None:
        """Memory that was freed goes back to where others can take it."""


class CpuForm:
    def __init__(self) -> None:
        self.streams: Streams = HostStreams()

    def block(self, matrices: Mapping[str, Matrix]) -> on_cpu.Block:
        return on_cpu.Block(matrices)

    def pools(self, budget: Budget) -> Pools:
        return Pools(budget, on_cpu.BEGIN)

    def beside(self, versions: Versions, biases: Sequence[Mapping[str, Tensor]], experts: Sequence[int]) -> int:
        return 0

    def transfer(self, read: Read, blocks: Sequence[Sequence[Any]], planes: bool) -> Transfer:
        return (NestedPlanes if planes and NestedPlanes.fits(blocks) else Whole)(read, blocks)

    def host(self, limit: int, sizes: Sequence[int], experts: int) -> HostCache:
        return HostCache(limit, sizes, experts)

    def statistics(self, experts: Sequence[int], ema: float) -> Statistics:
        return SeenHere(experts, ema)

    def freed(self) -> None:
        return_memory()


class GpuForm:
    """planes: whether it may bring planes alone, for which there is a piece of memory."""

    def __init__(self, streams: Streams, planes: bool) -> None:
        from moeq.runtime.dynamic import on_gpu
        from moeq_kernels.gpu import versions

        self.streams, self.planes = streams, planes
        self._there, self._versions = on_gpu, versions

    def block(self, matrices: Mapping[str, Matrix]) -> BlockOf:
        try:
            return self._versions.Block(matrices)
        except ValueError as error:
            do = "give --device cpu (device=), or quantize without them"
            raise ModelError(str(error), where="dynamic precision", do=do) from error

    def pools(self, budget: Budget) -> Pools:
        return Pools(budget, self._versions.BEGIN, self._there.on_device(self.streams))

    def beside(self, versions: Versions, biases: Sequence[Mapping[str, Tensor]], experts: Sequence[int]) -> int:
        blocks: Any = [[self.block(one) for one in of_layer] for of_layer in versions]
        tables = sum(
            self._versions.beside_bytes(of_layer[0], count, [added] * count)
            for of_layer, added, count in zip(blocks, biases, experts, strict=True)
        )
        planes = self._there.PlanesThere
        pieces = planes.size_of(blocks) if self.planes and planes.fits(blocks) else 0
        return tables + self._there.SeenThere.size_of(experts) + pieces

    def transfer(self, read: Read, blocks: Sequence[Sequence[Any]], planes: bool) -> Transfer:
        there = self._there
        kind = there.PlanesThere if planes and there.PlanesThere.fits(blocks) else there.WholeThere
        made: Transfer = kind(read, blocks, self.streams)
        return made

    def host(self, limit: int, sizes: Sequence[int], experts: int) -> HostCache:
        return HostCache(limit, sizes, experts, self.streams.waiting)

    def statistics(self, experts: Sequence[int], ema: float) -> Statistics:
        return self._there.SeenThere(experts, ema, self.streams)

    def freed(self) -> None:
        return_memory()
        if self.streams.device.type == "cuda":
            torch.cuda.empty_cache()


def form_of(device: torch.device, planes: bool = True) -> Form:
    """Of experts on a device; ModelError for one that no form is of."""
    if choice.takes_triton(device):
        return GpuForm(streams_of(device), planes)
    if device.type == "cuda":
        what = f"{choice.named()} does not compute on {device}"
        raise ModelError(what, where=VARIABLE, do="leave it out")
    if device.type != "cpu":
        what = f"precision follows the workload on a CPU or a CUDA GPU, and this is {device}"
        raise ModelError(what, where="dynamic precision", do="give --device cpu or cuda (device=)")
    return CpuForm()
