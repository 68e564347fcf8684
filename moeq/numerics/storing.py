"""What a quantizer made, as it is stored, and what is stored, as a quantizer has it.

Letters: E weights of a batch, N output rows, K inputs, G groups of inputs, b bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeq.numerics.gptq import Quantized
from moeq_kernels import grids
from moeq_kernels.packed import PackedWeight, middle_of
from moeq_kernels.packing import pack, unpack
from moeq_kernels.widths import Encoding


class NotStorable(ValueError):
    """A quantizer's result that no packed weight stands for exactly; `index`: the first of its weights that is so."""

    def __init__(self, what: str, index: int) -> None:
        super().__init__(what)
        self.index = index


def _refuse(wrong: Tensor, what: str) -> None:
    """NotStorable where anything is wrong, [E, ...] bool."""
    if bool(wrong.any()):
        raise NotStorable(what, int(wrong.flatten(1).any(1).nonzero()[0]))


def _packed_codes(what: str, codes: Tensor, bits: int) -> Tensor:
    """Codes (or zero points) [E, ..., K], of any type, as they are stored; NotStorable but for 0 to 2**b - 1."""
    if codes.is_floating_point():
        _refuse(codes != codes.round(), f"{what} that are no whole numbers")
        _refuse((codes < 0) | (codes >= 2**bits), f"{what} beyond 0 to {2**bits - 1}")
        codes = codes.to(torch.uint8)
    try:
        return pack(codes, bits)
    except ValueError:
        _refuse((codes < 0) | (codes >= 2**bits), f"{what} beyond 0 to {2**bits - 1}")
        raise


def _stored_scales(scale: Tensor) -> Tensor:
    """Scales [E, ...] as they are stored; NotStorable where that would change one."""
    _refuse(~torch.isfinite(scale), "scales that are not finite")
    half = scale.to(grids.SCALE_DTYPE)
    _refuse(half.to(scale.dtype) != scale, "scales that float16 does not hold")
    return half


def packed_of(quantized: Quantized, bits: int, symmetric: bool, nested: bool = False) -> PackedWeight:
    """Pack one width of a `Quantized` batch: parts are [E, N, ...]; it stands for exactly the batch's values.

    nested: the widths 2, 3 and 4 of the batch are what `nested.quantize` made. Raises NotStorable for what would
    have to be rounded: codes or zero points off the grid, scales that are not finite or have too many digits.
    """
    encoding = Encoding(group_size=quantized.group_size, symmetric=symmetric, nested=nested).at(bits)
    index = quantized.bits.index(bits)
    codes, scale, zero = (part[:, index] for part in (quantized.codes, quantized.scale, quantized.zero))
    if encoding.nested:
        scale, zero = grids.grid_of_nested(scale, zero, bits)
    parts = {"scales": _stored_scales(scale)}
    if encoding.has_zeros(bits):
        parts["zeros"] = _packed_codes("zero points", zero, encoding.grid_bits(bits))
    else:
        between = middle_of(bits, encoding)
        _refuse(zero != between, f"zero points other than {between:g}")
    return PackedWeight.of(parts | {"codes": _packed_codes("codes", codes, bits)}, bits, codes.shape[-1], encoding)


def unpacked(weight: PackedWeight) -> Quantized:
    """A stack [E, N, ...] as codes uint8 [E, 1, N, K] with scales and zero points [E, 1, N, G].

    ValueError as `PackedWeight.check`.
    """
    weight.check()
    scale, zero = weight.grid()
    zero = zero.float() if isinstance(zero, Tensor) else torch.full_like(scale, zero, dtype=torch.float32)
    return Quantized(
        codes=unpack(weight.codes, weight.bits, weight.inputs).unsqueeze(1),
        scale=scale.float().unsqueeze(1),
        zero=zero.unsqueeze(1),
        bits=(weight.bits,),
        group_size=weight.group_size,
    )
