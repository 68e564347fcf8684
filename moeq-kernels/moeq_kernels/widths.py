"""Widths, limits and the names of formats: what is known of packed codes and whole numbers without any tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NotRequired, Protocol, TypedDict

from moeq_kernels import iq_types

FULL = 16  # stands for an expert or a matrix as the checkpoint has it
WIDTHS = (1, 2, 3, 4, 8, FULL)  # of an expert, or of one of its matrices
DROPPED = 0  # stands for an expert of which nothing is stored: whatever it is given, it adds nothing
SUPPORTED_BITS = (1, 2, 3, 4, 5, 6, 7, 8)
NESTED_BITS = (2, 3, 4)  # widths whose codes can be one code's leading bits, the widest last
WORD = 32
PARTS = ("codes", "scales", "zeros", "unit")  # tensors of a packed weight
METHOD = "moeq"  # quant_method of checkpoints in the native format
LAYOUT = "moeq-bitstream"
LAYOUT_VERSION = 1
NESTED_VERSION = 2  # where weights are nested
TRELLIS_VERSION = 3  # where experts have trellis codes
EXL3_VERSION = 4  # where they have EXL3's codes
FLOAT_VERSION = 5  # where their codes are floating-point numbers
IQ_VERSION = 6  # where they are llama.cpp's i-quants
TRELLIS_BITS = (1, 2, 3, 4, 8)  # widths of trellis codes; those of 8 bits are the values themselves
STATE_BITS = range(8, 17)  # L of trellis codes of 2**L states
EXL3_CODEBOOKS = ("mul1",)  # of EXL3's codes in moeq's own checkpoints
EXL3_STATE_BITS = 16
EXL3_SIDE = 128  # of what rows and inputs of EXL3's codes are multiples
FLOAT_GROUPS = {
    "nvfp4": 16,
    "mxfp4": 32,
}  # {codes that are floating-point numbers: inputs that share a scale at 4 bits}
FLOAT_BITS = (4, 8)  # widths of these
CODEBOOKS = ("", *EXL3_CODEBOOKS, *FLOAT_GROUPS, *iq_types.SETS)  # of codes that have one, and of others
ROUNDING: Literal["half_up"] = "half_up"
MULTIPLIER_BITS = 16
EXACT_BITS = 52  # whole numbers up to 2**52, and half of one more, are exact in float64
MAX_SHIFT = 62

Width = int | Mapping[str, int]  # of an expert: one for all of its matrices, or {projection: bits}


class _Said(Protocol):
    @property
    def group_size(self) -> int: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def nested(self) -> bool: ...


Codes = Literal["grid", "trellis", "exl3", "nvfp4", "mxfp4", "iq"]  # what codes are of


class EncodingKeys(TypedDict):
    """The fields of an `Encoding`, as functions take them: `vars(encoding)`."""

    group_size: int
    symmetric: bool
    nested: NotRequired[bool]
    state_bits: NotRequired[int]
    codebook: NotRequired[str]


MORE = ("state_bits", "codebook")  # fields of what is no grid


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How the codes of packed weights stand for values, whatever their width: what decides their parts and sizes.

    group_size: inputs that share a scale, -1 for all of a row; symmetric: no zero points are stored; nested: the codes
    of 2 and 3 bits are the leading bits of those of 4; state_bits: L of trellis codes of 2**L states, 0 for grids, see
    `moeq_kernels.trellis`: of them a scale a row is all that is stored beside the codes; codebook: of EXL3's, which are
    trellis codes of 2**16 states between Hadamard transforms, see `moeq_kernels.exl3`, and of those that are
    floating-point numbers, see `moeq_kernels.floats`, whose groups of 4 bits it decides; at 8 bits they are whole rows;
    and of i-quants, see `moeq_kernels.iq`: which set, whose blocks are the groups.
    """

    group_size: int
    symmetric: bool
    nested: bool = False
    state_bits: int = 0
    codebook: str = ""

    @classmethod
    def trellis(cls, state_bits: int) -> Encoding:
        """Trellis codes of 2**L states."""
        return cls(group_size=-1, symmetric=True, state_bits=state_bits)

    @classmethod
    def exl3(cls, codebook: str = EXL3_CODEBOOKS[0]) -> Encoding:
        """EXL3's codes."""
        return replace(cls.trellis(EXL3_STATE_BITS), codebook=codebook)

    @classmethod
    def floating(cls, codebook: str) -> Encoding:
        """Codes that are floating-point numbers: nvfp4 or mxfp4."""
        return cls(group_size=FLOAT_GROUPS[codebook], symmetric=True, codebook=codebook)

    @classmethod
    def iq(cls, codebook: str) -> Encoding:
        """llama.cpp's i-quants of a set."""
        return cls(group_size=iq_types.BLOCK, symmetric=True, codebook=codebook)

    @classmethod
    def of(cls, said: _Said) -> Encoding:
        """That of an assignment, of a recipe's section `losses`, of a packed weight."""
        more = {name: getattr(said, name) for name in MORE if hasattr(said, name)}  # what knows of grids alone has none
        return cls(group_size=said.group_size, symmetric=said.symmetric, nested=said.nested, **more)

    @classmethod
    def described(cls, said: Mapping[str, Any]) -> Encoding:
        """The inverse of `describe`; what else is said there is not looked at."""
        more = {name: said[name] for name in MORE if name in said}
        nested = bool(said.get("nested", False))
        return cls(group_size=said["group_size"], symmetric=said["symmetric"], nested=nested, **more)

    def describe(self) -> dict[str, Any]:
        """As files say it: nested only where it is, state_bits only of trellis codes, codebook only of what has one."""
        more = {"nested": self.nested} | {name: getattr(self, name) for name in MORE}
        said: dict[str, Any] = {"group_size": self.group_size, "symmetric": self.symmetric}
        return said | {name: value for name, value in more.items() if value}

    @property
    def codes(self) -> Codes:
        """What the codes are of."""
        if self.floats:
            return "nvfp4" if self.codebook == "nvfp4" else "mxfp4"
        if self.codebook in iq_types.SETS:
            return "iq"
        return "exl3" if self.codebook else "trellis" if self.state_bits else "grid"

    @property
    def floats(self) -> bool:
        """Whether codes are floating-point numbers."""
        return self.codebook in FLOAT_GROUPS

    @property
    def layout_version(self) -> int:
        """Of the layout that such weights are written in."""
        grid = NESTED_VERSION if self.nested else LAYOUT_VERSION
        return {"grid": grid, "trellis": TRELLIS_VERSION, "exl3": EXL3_VERSION, "iq": IQ_VERSION}.get(
            self.codes, FLOAT_VERSION
        )

    def at(self, bits: int) -> Encoding:
        """That of weights of one width: others than 2, 3 and 4 bits are never nested; FP8 has a scale a row, i-quants
        of 8 bits have one for 32 weights."""
        if self.floats:
            return replace(self, group_size=-1 if bits == FLOAT_BITS[-1] else FLOAT_GROUPS[self.codebook])
        if self.codes == "iq" and bits in iq_types.WIDTHS:
            return replace(self, group_size=iq_types.BLOCKS[iq_types.type_of(bits, self.codebook)][0])
        return replace(self, nested=False) if self.nested and bits not in NESTED_BITS else self

    def has_zeros(self, bits: int) -> bool:
        """Whether zero points are stored."""
        return bits > 1 and not self.symmetric

    def parts(self, bits: int) -> tuple[str, ...]:
        """The tensors that are stored of a weight that is not dropped."""
        unit = self.codebook == "nvfp4" and bits == FLOAT_BITS[0]
        return ("codes", "scales", *(("zeros",) if self.has_zeros(bits) else ()), *(("unit",) if unit else ()))

    def grid_bits(self, bits: int) -> int:
        """The width of the grid that a weight of `bits` bits is stored with: that of the widest where it is nested."""
        return NESTED_BITS[-1] if self.nested and bits in NESTED_BITS else bits


def width_of(widths: Width, projection: str) -> int:
    """The width of one matrix of an expert."""
    return widths if isinstance(widths, int) else widths[projection]


def group_count(num_inputs: int, group_size: int) -> int:
    """Groups along the inputs; the last may be shorter; group_size -1 means one group for the whole row."""
    return 1 if group_size == -1 else -(-num_inputs // group_size)


def resolved_group_size(num_inputs: int, group_size: int) -> int:
    """The number of inputs in a full group (group_size, or the whole row for -1 and for shorter rows)."""
    return num_inputs if group_size == -1 else min(group_size, num_inputs)
