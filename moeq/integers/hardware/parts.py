"""What kernels are made of: settings of the arithmetic, parallelism, multipliers, memories, layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from moeq.integers.hardware.interval import Interval
from moeq.integers.hardware.slices import block_rams, slices
from moeq.recipe import Denominator, Softmax

Kernel = Literal["attention", "linear", "norm"]
SLICE_STAGES = 4  # registers of a multiplier slice that runs at full clock (UG579): two operands, product, sum


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Widths in bits and the softmax, as `reparam.integer` has them; W/A/Attn of paper 004's Table 1."""

    weights: int = 8
    activations: int = 8
    attention: int = 4
    softmax: Softmax = "log-sqrt2"
    denominator: Denominator = "quantized"

    @property
    def text(self) -> str:
        """W/A/Attn."""
        return f"{self.weights}/{self.activations}/{self.attention}"


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How much is computed in a cycle; the paper's N_PE, N_L and T_s are `queries`, `units` and `ends` (4.2, 4.3).

    queries: queries that are held while keys go to all of them, each with `lanes` channels a cycle; ends: outputs of
    attention that are divided a cycle; units: compute units of the linear kernel, each with `inputs` x `outputs`
    weights a cycle, the same for all units; norm: channels of a LayerNorm a cycle.
    """

    queries: int
    lanes: int
    units: int
    inputs: int
    outputs: int
    norm: int
    ends: int


@dataclass(frozen=True, kw_only=True)
class Multiplier:
    """`count` equal products a cycle, their operands' widths in bits, and the slices that all of them take."""

    kernel: Kernel
    what: str
    count: int
    left_bits: int
    right_bits: int
    slices: int
    packed: int = 1


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A memory of `copies` banks: words of `width` bits, `depth` of them a bank.

    small_too: in block RAM however few words there are, as weights are, whose words are wide.
    """

    kernel: Kernel
    what: str
    width: int
    depth: int
    copies: int = 1
    small_too: bool = False

    @property
    def block_rams(self) -> float:
        """Block RAMs of 36 Kibit, in halves, of all banks."""
        return self.copies * block_rams(self.width, self.depth, small_too=self.small_too)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A step of an image that `count` blocks have alike; figures are of one of them.

    tokens: rows of the left matrix (of experts all slots); accumulator_bits: of the sums; slices: multiplier slices
    that it keeps busy; block_rams: of its weights alone, in words of the kernel; cycles: with its fetch, whichever
    takes longer; worst_cycles: with the worst routing, None where there is none.
    """

    name: str
    kernel: Kernel
    count: int
    tokens: int
    inputs: int
    outputs: int
    left_bits: int
    right_bits: int
    accumulator_bits: int
    macs: int
    slices: int
    block_rams: float
    compute_cycles: int
    fetch_cycles: int = 0
    worst_cycles: int | None = None

    @property
    def cycles(self) -> int:
        """Cycles of one of them."""
        return max(self.compute_cycles, self.fetch_cycles)


def up(whole: int, part: int) -> int:
    """whole / part, rounded up."""
    return -(-whole // part)


def levels(terms: int) -> int:
    """Levels of a tree of adders, a register each."""
    return math.ceil(math.log2(max(1, terms)))


def products(kernel: Kernel, what: str, count: int, left: Interval, right: Interval) -> Multiplier:
    """`count` products a cycle that share nothing."""
    return Multiplier(
        kernel=kernel,
        what=what,
        count=count,
        left_bits=left.bits,
        right_bits=right.bits,
        slices=count * slices(left, right),
    )
