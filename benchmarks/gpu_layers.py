"""Expert layers of two models on a GPU, or tiny ones in Triton's interpreter: made, copied about, and timed.

`--interpret` among the arguments of the program that imports this: in the interpreter, which is chosen when Triton is.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import torch  # isort: skip
from torch import Tensor  # isort: skip

from moeq_kernels.description import DOWN, LayerOfExperts  # isort: skip
from moeq_kernels.gpu.kernel import TritonKernel, TritonLayer  # isort: skip
from moeq_kernels.packed import PackedWeight, packed_shapes  # isort: skip
from moeq_kernels.widths import Encoding

COLD = 4 * 60e6  # bytes that a graph goes through before it comes back: four times an H200's L2
REPLAYS = 15


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a model's expert layers."""

    name: str
    experts: int
    hidden: int
    inner: int
    each: int


MODELS = {
    "mixtral": Model(name="Mixtral 8x7B", experts=8, hidden=4096, inner=14336, each=2),
    "qwen3": Model(name="Qwen3-30B-A3B", experts=128, hidden=2048, inner=768, each=8),
}
TINY = Model(name="tiny", experts=4, hidden=128, inner=128, each=2)


@dataclass
class Bench:
    """One run. generator: of everything random; interpreted: without a GPU."""

    device: torch.device
    generator: torch.Generator

    @property
    def interpreted(self) -> bool:
        return self.device.type == "cpu"

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median time of one of the calls, which are captured one after the other in a graph."""
        for call in calls[:1] if self.interpreted else calls:
            call()  # compiles
        if self.interpreted:
            started = time.perf_counter()
            calls[0]()
            return time.perf_counter() - started
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        taken = []
        for _ in range(REPLAYS):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3 / len(calls))
        return statistics.median(taken[2:])

    def eager_seconds(self, call: Callable[[], object]) -> float:
        """Median time of a call that is not captured, with what the host does in it."""
        taken = []
        for _ in range(1 if self.interpreted else 7):
            started = time.perf_counter()
            call()
            if not self.interpreted:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    def copies(self, size: float) -> int:
        """Copies of what is `size` bytes large that do not fit the L2 together."""
        return 1 if self.interpreted else max(2, math.ceil(COLD / max(size, 1)))

    def matrix(self, rows: int, inputs: int, bits: int, encoding: Encoding) -> PackedWeight:
        """Random codes; scales of 0.01."""
        parts = {
            name: torch.full(shape, 0.01, dtype=dtype, device=self.device)
            if dtype.is_floating_point
            else torch.randint(0, 256, shape, dtype=dtype, device=self.device, generator=self.generator)
            for name, (shape, dtype) in packed_shapes(rows, inputs, bits, encoding).items()
        }
        return PackedWeight.of(parts, bits, inputs, encoding)

    def layer(self, model: Model, bits: Sequence[int], state_bits: int = 0) -> TritonLayer:
        """Experts of a model with these widths in turn; state_bits: of trellis codes, 0 for grids."""
        encoding = Encoding.trellis(state_bits) if state_bits else Encoding(group_size=128, symmetric=False)
        shapes = {"gate_proj": (model.inner, model.hidden), "up_proj": (model.inner, model.hidden)}
        shapes[DOWN] = (model.hidden, model.inner)
        matrices = [
            {name: self.matrix(*shape, bits[expert % len(bits)], encoding) for name, shape in shapes.items()}
            for expert in range(model.experts)
        ]
        return TritonKernel().layer(
            LayerOfExperts(matrices=matrices, biases=[], gate=lambda parts: parts["up_proj"], activation="silu")
        )

    def routing(self, model: Model, tokens: int) -> Tensor:
        """Random experts of each token, [T, k]."""
        scores = torch.rand(tokens, model.experts, generator=self.generator, device=self.device)
        return scores.topk(model.each).indices

    def copy_rate(self) -> float:
        """Bytes a second, read and written, of copying memory; the faster of a copy and of a kernel that does it.

        In a graph a copy may be the work of another engine than the multiprocessors, which reach more.
        """
        size = 1 << (20 if self.interpreted else 31)
        here, there = (torch.zeros(size // 8, dtype=torch.int64, device=self.device) for _ in range(2))
        ways = (lambda: there.copy_(here)), (lambda: torch.add(here, 1, out=there))
        return 2 * size / min(self.seconds([way]) for way in ways)


def another(layer: TritonLayer) -> TritonLayer:
    """The same layer elsewhere in memory."""
    made = copy.copy(layer)
    made.stack = layer.stack.elsewhere()
    return made


def copies_of(bench: Bench, first: TritonLayer, model: Model) -> list[TritonLayer]:
    """A layer, and as many more that one token's experts of all do not fit the L2."""
    some = first.nbytes * min(1.0, model.each / model.experts)
    return [first, *(another(first) for _ in range(bench.copies(some) - 1))]
