"""Widths of every datapath of the integer forward, by interval arithmetic over moeq/INTEGER.md.

What a register can hold follows from the widths of what it is made of; where two operands hang together (a reciprocal
and the sum that it is of), from that, too. `reached` says that inputs exist that need every bit of a register, so that
one bit less overflows (tests build them); the others are bounds. Of sizes alone, weights are as large
as their bits allow, and a bias no larger than what it is added to; of a finished program (from_program.py) both are
its own.

Letters: D channels, I inputs of a linear, N positions, d channels of a head, k chosen experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from moeq.integers.arithmetic.fixed_point import UNIT_BITS
from moeq.integers.arithmetic.integer_norm import GAIN_BITS, RECIPROCAL_BITS
from moeq.integers.arithmetic.integer_norm import UNIT_BITS as ROW_BITS
from moeq.integers.arithmetic.log_sqrt2 import ROOT, STEPS, Logarithm, Widths
from moeq.integers.hardware.interval import Interval, signed, symmetric, unsigned
from moeq_kernels.widths import EXACT_BITS, MULTIPLIER_BITS

MULTIPLIER = unsigned(MULTIPLIER_BITS)
POWER = Interval(0, 1 << UNIT_BITS)
ROOTS = Interval(1 << EXACT_BITS // 2 - 1, (1 << EXACT_BITS // 2) - 1)  # of 51 or 52 bits
ROUTER_RECIPROCAL_BITS = 24


@dataclass(frozen=True, kw_only=True)
class Register:
    """What one register holds; role: its name in INTEGER.md, or what it is there."""

    role: str
    interval: Interval
    reached: bool = False

    @property
    def bits(self) -> int:
        """Its width."""
        return self.interval.bits


Registers = tuple[Register, ...]


def of_role(registers: Registers, role: str) -> Interval:
    """What the register of a role holds."""
    return next(register.interval for register in registers if register.role == role)


def weights(bits: int) -> Interval:
    """Weight codes: symmetric, so that the lowest code of two's complement is not among them."""
    return symmetric((1 << (bits - 1)) - 1)


def sum_of_products(x: Interval, weight_bits: int, inputs: int) -> Interval:
    """A linear's sums by sizes alone: I products, and a bias no larger than they are."""
    return symmetric(2 * inputs * weights(weight_bits).magnitude * x.magnitude)


def linear(x: Interval, weight: Interval, accumulators: Interval, bits: int, *, tight: bool) -> Registers:
    """A linear's datapath; accumulators: `sum_of_products`, or a program's own; bits: of its output."""
    return (
        Register(role="x", interval=x, reached=True),
        Register(role="weight", interval=weight, reached=True),
        Register(role="product", interval=weight * x, reached=True),
        Register(role="accumulators", interval=accumulators, reached=tight),
        Register(role="scaled", interval=accumulators * MULTIPLIER),
        Register(role="out", interval=signed(bits), reached=True),
    )


def layer_norm(
    channels: int, row_bits: int, bits: int, *, epsilon: int = 1, gain: int = 1 << GAIN_BITS, bias: int | None = None
) -> Registers:
    """A LayerNorm's datapath; row_bits: of the residual stream; gain, bias: largest magnitudes, None: that of y * gain.

    V = D * sum(x^2) - S^2 is largest where half of the channels are at either end; D*x - S where one is. Of that
    follow the bounds of what is normalized, |D*x - S| <= sqrt((D - 1) * V).
    """
    x = signed(row_bits)
    span = x.high - x.low
    total = x.times(channels)
    square = Interval(0, x.low**2)
    centred = symmetric((channels - 1) * span)
    spread = Interval(epsilon, (channels // 2) * (channels - channels // 2) * span**2 + epsilon)
    reciprocal = Interval((1 << RECIPROCAL_BITS) // ROOTS.high, (1 << RECIPROCAL_BITS) // ROOTS.low)
    product = centred * reciprocal
    # sqrt(D - 1) where one channel stands apart; floors of root and reciprocal add 2**-24 of it at most
    rows = symmetric(math.isqrt((channels - 1) << 2 * ROW_BITS) + (math.isqrt(channels) >> 6) + 3)
    gained = rows * symmetric(gain)
    offset = symmetric(gained.magnitude if bias is None else bias)
    return (
        Register(role="x", interval=x, reached=True),
        Register(role="sum", interval=total, reached=True),
        Register(role="square", interval=square, reached=True),
        Register(role="sum of squares", interval=square.times(channels), reached=True),
        Register(role="V", interval=spread, reached=True),
        Register(role="root", interval=ROOTS),
        Register(role="reciprocal", interval=reciprocal),
        Register(role="centred", interval=centred, reached=True),
        Register(role="normalized product", interval=product),
        Register(role="rows", interval=rows, reached=True),
        Register(role="gain", interval=symmetric(gain)),
        Register(role="gained", interval=gained + offset),
        Register(role="out", interval=signed(bits), reached=True),
    )


def _scores(activations: int, head: int) -> tuple[Interval, Interval]:
    x = signed(activations)
    scores = (x * x).times(head)
    return scores, Interval(0, scores.high - scores.low)


def log_attention(
    *, activations: int, attention: int, kind: Logarithm, head: int, keys: int, held: Widths, exact: bool
) -> Registers:
    """The datapath of log_attention; held: its shift and reciprocal (`log_sqrt2.widths`); exact: the denominator.

    Every pair is even or odd, so that |even| + sqrt2 * |odd| takes no more than all pairs at code 0: `joined` needs no
    bit beyond `even`. A quantized denominator is the same sum of weights alone: |joined| <= 2^(bits-1) *
    (denominator + 1/2) + 1/2, and the products behind its reciprocal stay as narrow as one value.
    """
    x = signed(activations)
    scores, difference = _scores(activations, head)
    even = x.times(keys << held.left)
    # the largest score's own code is 0: one key fewer, and half its weight
    odd = x.times((keys - 1) << max(0, held.left - 1)) if STEPS[kind] == 2 else None
    weight_sum = Interval(1 << held.left, keys << held.left)
    odd_weights = Interval(0, (keys - 1) << max(0, held.left - 1))
    denominator = POWER.times(keys) if exact else weight_sum
    unit = UNIT_BITS if exact else held.left
    low = 1 << unit
    reciprocal = Interval((1 << unit + held.reciprocal_bits) // denominator.high, 1 << held.reciprocal_bits)
    row = Interval(0, (reciprocal.high * MULTIPLIER.high + (1 << 15)) >> 16)
    product = even * row
    if not exact:
        tied = max(_tied(x.magnitude, den, low << held.reciprocal_bits) for den in (low, weight_sum.high))
        product = symmetric(min(tied, product.magnitude))
    found = [
        Register(role="query", interval=x, reached=True),
        Register(role="score product", interval=x * x, reached=True),
        Register(role="scores", interval=scores, reached=True),
        Register(role="difference", interval=difference, reached=True),
        Register(role="scaled difference", interval=difference * MULTIPLIER),
        Register(role="codes", interval=unsigned(attention), reached=True),
        Register(role="shifted value", interval=x.times(1 << held.left), reached=True),
        Register(role="even", interval=even, reached=True),
    ]
    if odd is not None:
        found += [
            Register(role="odd", interval=odd, reached=True),
            Register(role="odd weights", interval=odd_weights, reached=True),
            Register(role="odd * sqrt2", interval=odd.times(ROOT), reached=True),
        ]
    return (
        *found,
        Register(role="joined", interval=even, reached=True),
        Register(role="denominator", interval=Interval(low, denominator.high), reached=True),
        Register(role="reciprocal", interval=reciprocal, reached=True),
        Register(role="row", interval=row),
        Register(role="mixed", interval=product),
        Register(role="out", interval=x, reached=True),
    )


def _tied(largest: int, denominator: int, unit: int) -> int:
    """The largest |joined| * row of a denominator; unit: what its reciprocal is of. Convex, so that ends suffice."""
    joined = largest * (denominator + Fraction(1, 2)) + Fraction(1, 2)
    row = Fraction(unit, denominator) * Fraction(MULTIPLIER.high, 1 << 16) + Fraction(1, 2)
    return math.ceil(joined * row)


def uniform_attention(*, activations: int, attention: int, head: int, keys: int, reciprocal_bits: int) -> Registers:
    """The datapath of uniform_attention."""
    x = signed(activations)
    scores, difference = _scores(activations, head)
    denominator = Interval(POWER.high, POWER.high * keys)
    row = Interval(0, ((1 << reciprocal_bits) * MULTIPLIER.high + (1 << 15)) >> 16)
    codes = unsigned(attention)
    accumulators = (codes * x).times(keys)
    return (
        Register(role="query", interval=x, reached=True),
        Register(role="score product", interval=x * x, reached=True),
        Register(role="scores", interval=scores, reached=True),
        Register(role="difference", interval=difference, reached=True),
        Register(role="scaled difference", interval=difference * MULTIPLIER),
        Register(role="numerators", interval=POWER, reached=True),
        Register(role="denominator", interval=denominator, reached=True),
        Register(role="reciprocal", interval=Interval((1 << reciprocal_bits) // keys, 1 << reciprocal_bits)),
        Register(role="row", interval=row),
        Register(role="scaled numerator", interval=POWER * row),
        Register(role="codes", interval=codes, reached=True),
        Register(role="value product", interval=codes * x, reached=True),
        Register(role="accumulators", interval=accumulators),
        Register(role="scaled", interval=accumulators * MULTIPLIER),
        Register(role="out", interval=x, reached=True),
    )


def router(sums: Registers, top_k: int, experts: int, *, over_all: bool = False) -> Registers:
    """A router's datapath behind its linear (`linear`): differences of logits, powers, weights of the chosen."""
    logits = of_role(sums, "out")
    difference = Interval(0, logits.high - logits.low)
    total = Interval(POWER.high, POWER.high * (experts if over_all else top_k))
    reciprocal = Interval((1 << UNIT_BITS + ROUTER_RECIPROCAL_BITS) // total.high, 1 << ROUTER_RECIPROCAL_BITS)
    return (
        *sums,
        Register(role="difference", interval=difference, reached=True),
        Register(role="scaled difference", interval=difference * MULTIPLIER),
        Register(role="total", interval=total, reached=True),
        Register(role="reciprocal", interval=reciprocal, reached=True),
        Register(role="scaled power", interval=Interval(0, POWER.high << ROUTER_RECIPROCAL_BITS)),
        Register(role="weights", interval=POWER, reached=True),
    )


def combined(row_bits: int, top_k: int) -> Registers:
    """The sum of the chosen experts' outputs: their weights together are 2^15, each rounded up by less than one."""
    outputs = signed(row_bits)
    total = outputs.times((1 << UNIT_BITS) + top_k // 2)
    return (
        Register(role="outputs", interval=outputs, reached=True),
        Register(role="weighted", interval=outputs * POWER, reached=True),
        Register(role="combined", interval=total),
    )


def added(row_bits: int) -> Registers:
    """The residual addition before it is saturated."""
    return (Register(role="added", interval=signed(row_bits).times(2), reached=True),)


def mean(activations: int, positions: int) -> Registers:
    """mean_tokens: the sum over positions, and that times its factor."""
    total = signed(activations).times(positions)
    return (
        Register(role="total", interval=total, reached=True),
        Register(role="scaled", interval=total * MULTIPLIER),
    )


def widest(registers: Sequence[Register]) -> int:
    """The most bits among registers."""
    return max(register.bits for register in registers)
