"""AWQ's layout, as AutoAWQ, GPTQModel and auto-round write it, and which layout their configurations declare.

qweight int32 [K, N*b/32], qzeros int32 [G, N*b/32]: words of eight codes of neighbouring rows, in the order of ORDER;
scales [G, N]. Zero points are as they are, groups consecutive inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moeq.bounded import shown
from moeq.exporters.readers.gptq import SECOND, AutoRound, Gptq
from moeq.exporters.readers.layout import FLOATS, Grid, Parts, Stored, expect, group_length, read_back
from moeq.models.source import TensorHeader
from moeq_kernels.widths import WORD, group_count

if TYPE_CHECKING:
    from torch import Tensor

AWQ, GEMM = "awq", "gemm"
BITS = 4  # for which alone the order is defined
ORDER = 0, 2, 4, 6, 1, 3, 5, 7  # the row, of eight, whose code lies at each place of a word
CALLED = {"bits": "w_bit", "group_size": "q_group_size"}


class _Interleaved(Gptq):
    """Matrices in this layout; whether one is packed its tensors say: `modules_to_not_convert` holds parts of names,
    which also fit names that are not meant (gate, gate_proj)."""

    widths: tuple[int, ...] = (BITS,)
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales")

    def shape(self, headers: Mapping[str, TensorHeader], grid: Grid) -> tuple[int, int]:
        packed = headers["qweight"].shape
        if len(packed) != 2:
            raise ValueError(f"qweight {list(packed)} is no matrix")
        return packed[1] * WORD // BITS, packed[0]

    def check(self, headers: Mapping[str, TensorHeader], grid: Grid, rows: int, inputs: int) -> None:
        if grid.bits not in self.widths:
            raise ValueError(f"moeq reads {BITS} bits of {self.name}")
        if rows * BITS % WORD:
            raise ValueError(f"{rows} codes of {BITS} bits are no whole number of {WORD}-bit words")
        groups = group_count(inputs, group_length(grid, inputs))
        expect(headers, "qweight", ("I32",), (inputs, rows * BITS // WORD))
        expect(headers, "qzeros", ("I32",), (groups, rows * BITS // WORD))
        expect(headers, "scales", FLOATS, (groups, rows))

    def read(self, parts: Parts, grid: Grid, rows: int, inputs: int) -> Stored:
        from moeq_kernels.packing import pack

        codes, zeros = (in_order(parts[name], rows) for name in ("qweight", "qzeros"))
        return read_back(pack(codes, BITS), parts["scales"].mT.contiguous(), zeros, grid, inputs, None)


class Awq(_Interleaved):
    """quant_method awq."""

    name = AWQ

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """ValueError for a version whose layout is another one."""
        version = next(
            (declared[name] for name in ("version", "checkpoint_format", "format") if name in declared), GEMM
        )
        if str(version).lower() != GEMM:
            raise ValueError(f"version {shown(version)}")
        named = {name: declared[called] for name, called in CALLED.items() if called in declared}
        super().__init__({**named, **declared, "checkpoint_format": SECOND})


class AutoRoundAwq(_Interleaved, AutoRound):
    """quant_method auto-round with the packing_format `auto_round:auto_awq`."""

    kinds = ("auto_awq",)


def of_gptqmodel(declared: Mapping[str, Any]) -> Gptq:
    """The layout of a checkpoint that GPTQModel loads; ValueError for what is not read."""
    return (Awq if declared.get("quant_method") == AWQ else Gptq)(declared)


def of_auto_round(declared: Mapping[str, Any]) -> AutoRound:
    """The layout of a checkpoint that auto-round loads; ValueError for what is not read."""
    interleaved = str(declared.get("packing_format", "")).partition(":")[2] in AutoRoundAwq.kinds
    return (AutoRoundAwq if interleaved else AutoRound)(declared)


def in_order(words: Tensor, rows: int) -> Tensor:
    """Words int32 [X, N*b/32] as codes uint8 [N, X]."""
    import torch

    from moeq.numerics.layouts import row_stream
    from moeq_kernels.packing import unpack

    codes = unpack(row_stream(words, BITS, rows), BITS, rows).view(len(words), -1, len(ORDER))
    return codes[..., torch.tensor(ORDER).argsort()].view(len(words), rows).mT.contiguous()
