"""i-quants: the time of quantizing and what is lost by the Hessian, beside llama.cpp's own quantizer with an importance
matrix, every type at its own bits.

    python benchmarks/iq_quantize.py [--rows 256] [--inputs 1024] [--peer .peers/llama-cpp-python] [--json PATH]

One matrix of normal weights and inputs that lean on their neighbours. Processor time of one thread, median of three
rounds, what is compiled apart; of llama.cpp its function for rows, `ggml_quantize_chunk`, with the Hessian's diagonal
as the importance that its command takes of an imatrix. Loss: of the Hessian, over that of the weights themselves.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path

import figures
import torch
from ggml_products import _Library
from torch import Tensor

from moeq.numerics import iq_ldlq
from moeq.numerics.factor import factorize
from moeq.numerics.ggml_types import IQ_NUMBERS, TYPES
from moeq_kernels import iq
from moeq_kernels.iq_types import SETS, type_of

WHOLE = 8  # bits that are GPTQ's
CODES = {
    type_of(bits, codebook): (codebook, bits) for codebook, widths in SETS.items() for bits in widths if bits != WHOLE
}
LOSS_GOAL = 0.9  # of llama.cpp's


def problem(rows: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Weights [1, N, K] and the Hessian [1, K, K] of inputs, each of which is most of its neighbour."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(1, rows, inputs, generator=draw) * 0.03
    seen = torch.randn(4 * inputs, inputs, generator=draw)
    seen = seen + 0.9 * seen.roll(1, -1)
    return weight, (seen.T @ seen / len(seen))[None]


def loss(made: Tensor, weight: Tensor, hessian: Tensor) -> float:
    left = made - weight
    return float((left @ hessian * left).sum() / (weight @ hessian * weight).sum())


class LlamaCpp:
    """llama.cpp's quantizer of rows."""

    def __init__(self) -> None:
        self.call = _Library()

    def quantized(self, name: str, weight: Tensor, importance: Tensor) -> Tensor:
        """Blocks uint8 [N, bytes] of weights [N, K], importance [K]."""
        rows, inputs = weight.shape
        blocks = torch.empty(rows, TYPES[name].row_bytes(inputs), dtype=torch.uint8)
        places = [ctypes.c_void_p(one.data_ptr()) for one in (weight, blocks, importance)]
        written = self.call("ggml_quantize_chunk", IQ_NUMBERS[name], *places[:2], 0, rows, inputs, places[2])
        assert written == blocks.numel(), (written, blocks.shape)
        return blocks


def peer(folder: Path) -> LlamaCpp | None:
    """llama.cpp's quantizer, of llama-cpp-python here or in the environment of a folder."""
    sys.path += map(str, folder.glob("lib/python*/site-packages"))
    try:
        return LlamaCpp()
    except (AssertionError, OSError):
        return None


def main() -> int:
    made = figures.parser(__doc__, rows=(256, 64), inputs=(1024, 512))
    made.add_argument("--peer", type=Path, default=figures.ROOT / ".peers" / "llama-cpp-python")
    options: argparse.Namespace = figures.parsed(made)
    torch.set_num_threads(1)
    results = figures.Figures(options)
    other = peer(options.peer)
    if other is None:
        results.left_out("llama.cpp", f"llama-cpp-python is neither here nor in {options.peer}: make peers")
    weight, hessian = problem(options.rows, options.inputs)
    factor, importance = factorize(hessian), hessian[0].diagonal().contiguous()
    every = weight.numel() / 1e6
    results.table(["type", "bits", "s a Mweight", "llama.cpp", "of its time", "loss", "llama.cpp", "of its loss"])
    for name, (codebook, bits) in sorted(CODES.items(), key=lambda item: TYPES[item[0]].bytes):

        def ours(rows: Tensor = weight, codebook: str = codebook, bits: int = bits) -> Tensor:
            (found,) = iq_ldlq.quantize(rows, factor, hessian, [bits], codebook)
            return found.dequantize()

        ours(weight[:, :8])  # compiles
        seconds, lost = figures.processor_seconds(ours, 3) / every, loss(ours(), weight, hessian)
        stored = f"{8 * TYPES[name].bytes / TYPES[name].length:.4g}"
        if other is None:
            results.row(name, stored, f"{seconds:.3f}", "-", "-", f"{lost:.5f}", "-", "-")
            continue

        def theirs(name: str = name) -> Tensor:
            return other.quantized(name, weight[0], importance)

        time = figures.processor_seconds(theirs, 3) / every
        beside = loss(iq.decoded(theirs(), name)[None], weight, hessian)
        shown = f"{time:.3f}", f"{seconds / time:.2f}", f"{lost:.5f}", f"{beside:.5f}", f"{lost / beside:.2f}"
        results.row(name, stored, f"{seconds:.3f}", *shown)
        results.add(f"{name}, of llama.cpp's loss", lost / beside, at_most=LOSS_GOAL)
        results.add(f"{name}, of llama.cpp's time", seconds / time)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
