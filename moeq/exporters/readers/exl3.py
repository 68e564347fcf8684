"""EXL3 (quant_method exl3), which exllamav3 reads: what a Linear is, its own tensors say, not config.json.

trellis int16 [K/16, N/16, 16*k], suh float16 [K], svh float16 [N], and mul1 or mcg, int32 of no dimension, which holds
the codebook's multiplier. Linears of moeq's own have its signs (moeq_kernels/exl3.py) and are held as they are; those
of exllamav3's converter, whose suh are scales, too, are read as values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moeq.bounded import shown
from moeq.exporters.readers.layout import Grid, Parts, Stored, expect
from moeq.models.source import TensorHeader
from moeq_kernels.widths import EXL3_CODEBOOKS, EXL3_SIDE, SUPPORTED_BITS

if TYPE_CHECKING:
    from moeq_kernels.exl3 import Exl3Weight

TILE = 16
CODEBOOKS = ("mul1", "mcg")  # tensors that tell it; without one it is 3inst
OLDER = ("su", "sv")  # signs as bits, of the first exllamav3
OWN = Grid(bits=0, group_size=-1, symmetric=True)  # which each Linear's own tensors say


class Exl3:
    """Every Linear that has a trellis."""

    anchor = "trellis"
    parts: tuple[str, ...] = ("trellis", "suh", "svh", *CODEBOOKS, *OLDER)

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """ValueError for a codebook that there is not."""
        codebook = declared.get("codebook", CODEBOOKS[0])
        if codebook not in (*CODEBOOKS, "3inst"):
            raise ValueError(f"codebook {shown(codebook)}")

    def grid(self, names: Sequence[str]) -> Grid | None:
        return OWN

    def shape(self, headers: Mapping[str, TensorHeader], grid: Grid) -> tuple[int, int]:
        sides = [headers[part].shape if part in headers else () for part in ("svh", "suh")]
        if any(len(side) != 1 for side in sides):
            raise ValueError("suh or svh is missing, or no vector")
        return sides[0][0], sides[1][0]

    def check(self, headers: Mapping[str, TensorHeader], grid: Grid, rows: int, inputs: int) -> None:
        if rows % EXL3_SIDE or inputs % EXL3_SIDE:
            raise ValueError(f"a weight of {rows} x {inputs}; EXL3 takes multiples of {EXL3_SIDE}")
        if any(part in headers for part in OLDER):
            raise ValueError("signs as bits (su, sv), of the first exllamav3; convert it again")
        trellis = headers["trellis"].shape
        bits = trellis[-1] // TILE if trellis else 0
        if bits not in SUPPORTED_BITS:
            raise ValueError(f"trellis {list(trellis)} is of no 1 to 8 bits")
        expect(headers, "trellis", ("I16",), (inputs // TILE, rows // TILE, TILE * bits))
        expect(headers, "suh", ("F16",), (inputs,))
        expect(headers, "svh", ("F16",), (rows,))
        told = [part for part in CODEBOOKS if part in headers]
        if len(told) > 1:
            raise ValueError("it has two codebooks")
        for part in told:
            expect(headers, part, ("I32",), ())

    def read(self, parts: Parts, grid: Grid, rows: int, inputs: int) -> Stored:
        import torch

        from moeq_kernels import exl3
        from moeq_kernels.packed import PackedWeight
        from moeq_kernels.widths import Encoding

        weight = _weight(parts)
        if not bool(torch.isfinite(weight.suh).all() & torch.isfinite(weight.svh).all()):
            raise ValueError("has scales that are not finite")
        try:
            own = exl3.parts_of(weight)
        except ValueError:
            return Stored(weight=None, of=weight.dequantize())
        if weight.codebook not in EXL3_CODEBOOKS:
            return Stored(weight=None, of=weight.dequantize())
        stored = {"codes": own["codes"], "scales": own["scales"].unsqueeze(-1)}
        return Stored(weight=PackedWeight.of(stored, weight.bits, inputs, Encoding.exl3(weight.codebook)))


def _weight(parts: Parts) -> Exl3Weight:
    """ValueError for a multiplier that is no codebook's."""
    import torch

    from moeq_kernels.exl3 import MULTIPLIERS, Exl3Weight

    codebook = next((part for part in CODEBOOKS if part in parts), "3inst")
    if codebook in parts and int(parts[codebook].view(torch.uint32)) != MULTIPLIERS[codebook]:
        raise ValueError(f"the multiplier of {codebook} is {int(parts[codebook])}, of another codebook")
    return Exl3Weight(trellis=parts["trellis"], suh=parts["suh"], svh=parts["svh"], codebook=codebook)
