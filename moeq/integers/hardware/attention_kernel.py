"""The streaming attention kernel of paper 004 (4.2.1, 4.3) and the LayerNorm before it: cycles, multipliers, memories.

Attention, a head and `queries` queries at a time: keys go to all held queries, `lanes` channels a cycle (pass 1: scores
and their maximum); codes, sums of weights, and values by shifts, `lanes` channels a cycle (passes 2 and 3, which the
paper fuses); at the end a reciprocal a query, and `ends` outputs a cycle. Scores of the next queries are made while
values of the last are summed, so that a group takes N * ceil(d / lanes) cycles. Quantized evenly, weights wait for
their sum, and values are a third stage with multipliers.

LayerNorm: sums over a row, then root and reciprocal, a bit a cycle each, then the row again; three rows are under way
at once. The paper does not say where its norms are computed: a unit of its own here, before the linears that it feeds.

Letters: N positions, D channels, h heads, d channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from moeq.integers.arithmetic.integer_norm import widest_row
from moeq.integers.arithmetic.log_sqrt2 import ROOT, widths
from moeq.integers.hardware import registers
from moeq.integers.hardware.interval import Interval
from moeq.integers.hardware.parts import (
    SLICE_STAGES,
    Arithmetic,
    Layer,
    Memory,
    Multiplier,
    Parallelism,
    levels,
    products,
    up,
)
from moeq.integers.hardware.registers import MULTIPLIER, POWER, ROOTS, Registers, of_role
from moeq.integers.hardware.slices import array_slices, constant_slices
from moeq.integers.hardware.vision import VisionSizes

UNIFORM_RECIPROCAL_BITS = 24
ROOT_CYCLES = ROOTS.bits  # a bit of the root a cycle; its reciprocal has as many


@cache
def attention_registers(sizes: VisionSizes, arithmetic: Arithmetic) -> Registers:
    """The datapath of attention; QuantizationError where no accumulator of 32 bits holds these widths."""
    a, attention = arithmetic.activations, arithmetic.attention
    if arithmetic.softmax == "uniform":
        return registers.uniform_attention(
            activations=a,
            attention=attention,
            head=sizes.head,
            keys=sizes.positions,
            reciprocal_bits=UNIFORM_RECIPROCAL_BITS,
        )
    held = widths(attention, arithmetic.softmax, sizes.positions, a, where="attention")
    return registers.log_attention(
        activations=a,
        attention=attention,
        kind=arithmetic.softmax,
        head=sizes.head,
        keys=sizes.positions,
        held=held,
        exact=arithmetic.denominator == "exact",
    )


@cache
def norm_registers(sizes: VisionSizes, arithmetic: Arithmetic) -> Registers:
    """The datapath of a LayerNorm over the residual stream, as wide as an exact one allows."""
    return registers.layer_norm(sizes.hidden, widest_row(sizes.hidden), arithmetic.activations)


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """Attention of given sizes and widths at a parallelism."""

    sizes: VisionSizes
    arithmetic: Arithmetic
    at: Parallelism

    @property
    def registers(self) -> Registers:
        """Its datapath."""
        return attention_registers(self.sizes, self.arithmetic)

    @property
    def uniform(self) -> bool:
        """Whether weights are quantized evenly, and values multiplied."""
        return self.arithmetic.softmax == "uniform"

    @property
    def steps(self) -> int:
        """Cycles of a key: its channels in `lanes`."""
        return up(self.sizes.head, self.at.lanes)

    @property
    def stage_cycles(self) -> int:
        """Cycles in which a group of queries passes a stage: all keys, or all outputs divided."""
        ends = self.at.queries * up(self.sizes.head, self.at.ends)
        return max(self.sizes.positions * self.steps, ends)

    @property
    def fill_cycles(self) -> int:
        """Cycles behind the last pass: scores, codes and shifts in flight, the reciprocal bit by bit, outputs."""
        reciprocal = of_role(self.registers, "reciprocal").bits
        tree = SLICE_STAGES + levels(self.at.lanes) + levels(self.steps)
        outputs = self.at.queries * up(self.sizes.head, self.at.ends)
        return tree + 2 * SLICE_STAGES + reciprocal + 2 * SLICE_STAGES + outputs

    @property
    def cycles(self) -> int:
        """Cycles of one block's attention: every group of every head, and the stages that it is ahead."""
        groups = up(self.sizes.positions, self.at.queries) * self.sizes.heads
        return (groups + (2 if self.uniform else 1)) * self.stage_cycles + self.fill_cycles

    @property
    def multipliers(self) -> tuple[Multiplier, ...]:
        """All products of a cycle."""
        return tuple(self._multipliers())

    def _multipliers(self) -> Iterator[Multiplier]:
        at, made = self.at, self.registers
        a = of_role(made, "query")
        scores, packing = array_slices(a, a, at.queries, 1)
        yield Multiplier(
            kernel="attention",
            what="query * key",
            count=at.queries * at.lanes,
            left_bits=a.bits,
            right_bits=a.bits,
            slices=at.lanes * scores,
            packed=1 if packing is None else packing.products,
        )
        a_score = up(at.queries, self.steps)  # of each query one in `steps` cycles
        difference = of_role(made, "difference")
        if not self.uniform:
            yield products("attention", "codes", a_score, difference, MULTIPLIER)
        if self.uniform or self.arithmetic.denominator == "exact":
            yield products("attention", "powers", a_score, difference, MULTIPLIER)
        reciprocal, row = of_role(made, "reciprocal"), of_role(made, "row")
        yield products("attention", "reciprocal * factor", 1, reciprocal, MULTIPLIER)
        if self.uniform:
            yield from self._uniform(a, a_score, row)
            return
        if self.arithmetic.softmax == "log-sqrt2":
            root = Interval(0, ROOT)
            yield products("attention", "parity: odd * sqrt2", at.ends, of_role(made, "odd"), root)
            if self.arithmetic.denominator == "quantized":
                yield products("attention", "parity: weights * sqrt2", 1, of_role(made, "odd weights"), root)
        yield products("attention", "mean * reciprocal", at.ends, of_role(made, "joined"), row)

    def _uniform(self, a: Interval, a_score: int, row: Interval) -> Iterator[Multiplier]:
        at, made = self.at, self.registers
        codes = of_role(made, "codes")
        yield products("attention", "codes", a_score, POWER, row)
        values, packing = array_slices(codes, a, at.queries, 1)
        yield Multiplier(
            kernel="attention",
            what="weight * value",
            count=at.queries * at.lanes,
            left_bits=codes.bits,
            right_bits=a.bits,
            slices=at.lanes * values,
            packed=1 if packing is None else packing.products,
        )
        yield products("attention", "mean * factor", at.ends, of_role(made, "accumulators"), MULTIPLIER)

    @property
    def accumulator_bits(self) -> int:
        """Bits that the sums of one output over keys take, even and odd ones together."""
        names = ("accumulators",) if self.uniform else ("even", "odd")
        return sum(one.bits for one in self.registers if one.role in names)

    @property
    def memories(self) -> tuple[Memory, ...]:
        """Queries, keys and values twice, while one is filled; scores of a group twice; sums of a group."""
        at, a = self.at, self.arithmetic.activations
        words = self.sizes.positions * self.sizes.heads * self.steps
        scores = of_role(self.registers, "scores").bits
        kept = scores if not self.uniform else scores + POWER.bits
        return (
            *(
                Memory(kernel="attention", what=name, width=at.lanes * a, depth=words, copies=2)
                for name in ("queries", "keys", "values")
            ),
            Memory(
                kernel="attention", what="held queries", width=at.queries * at.lanes * a, depth=self.steps, copies=2
            ),
            Memory(kernel="attention", what="scores", width=at.queries * kept, depth=self.sizes.positions, copies=2),
            Memory(
                kernel="attention",
                what="sums of values",
                width=at.queries * at.lanes * self.accumulator_bits,
                depth=self.steps,
                copies=2,
            ),
            Memory(kernel="attention", what="attention's output", width=at.lanes * a, depth=words),
        )

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every block's attention."""
        n, d = self.sizes.positions, self.sizes.hidden
        made = self.registers
        layer = Layer(
            name="attention",
            kernel="attention",
            count=self.sizes.blocks,
            tokens=n,
            inputs=d,
            outputs=d,
            left_bits=self.arithmetic.activations,
            right_bits=self.arithmetic.activations,
            accumulator_bits=max(one.bits for one in made if one.role in ("scores", "accumulators", "even")),
            macs=2 * n * n * d,
            slices=sum(one.slices for one in self.multipliers),
            block_rams=0.0,
            compute_cycles=self.cycles,
        )
        return (layer,)


@dataclass(frozen=True, kw_only=True)
class NormUnit:
    """LayerNorms of given sizes and widths, `norm` channels a cycle."""

    sizes: VisionSizes
    arithmetic: Arithmetic
    at: Parallelism

    @property
    def registers(self) -> Registers:
        """Its datapath."""
        return norm_registers(self.sizes, self.arithmetic)

    @property
    def row_bits(self) -> int:
        """Bits of the residual stream."""
        return of_role(self.registers, "x").bits

    @property
    def cycles(self) -> int:
        """Cycles of one norm of all positions: rows follow each other at the slowest of their three stages."""
        passes = up(self.sizes.hidden, self.at.norm)
        fill = 2 * passes + 2 * ROOT_CYCLES + 4 * SLICE_STAGES + levels(self.at.norm)
        return (self.sizes.positions - 1) * max(passes, ROOT_CYCLES) + fill

    @property
    def multipliers(self) -> tuple[Multiplier, ...]:
        """Products a channel (square, by the reciprocal, by the gain) and a row (S^2, D times the squares)."""
        made, count, channels = self.registers, self.at.norm, self.sizes.hidden
        x, total, squares = (of_role(made, role) for role in ("x", "sum", "sum of squares"))
        by_constant = Interval(0, channels)
        found = [
            products("norm", "square", count, x, x),
            products("norm", "sum of a row, squared", 1, total, total),
            products("norm", "centred * reciprocal", count, of_role(made, "centred"), of_role(made, "reciprocal")),
            products("norm", "row * gain", count, of_role(made, "rows"), of_role(made, "gain")),
        ]
        for what, times, by in (("D * x", count, x), ("D * squares", 1, squares)):
            if constant_slices(by, channels):
                found.append(products("norm", what, times, by, by_constant))
        return tuple(found)

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The residual stream, rows under way, gains and biases."""
        made, at = self.registers, self.at
        x, words = of_role(made, "x").bits, up(self.sizes.hidden, at.norm)
        held = of_role(made, "gain").bits + of_role(made, "gained").bits
        return (
            Memory(kernel="norm", what="residual stream", width=at.norm * x, depth=self.sizes.positions * words),
            Memory(kernel="norm", what="rows under way", width=at.norm * x, depth=words, copies=3),
            Memory(kernel="norm", what="gains and biases", width=at.norm * held, depth=words, copies=2),
        )

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every norm: two of a block, and the head's."""
        layer = Layer(
            name="norm",
            kernel="norm",
            count=2 * self.sizes.blocks + 1,
            tokens=self.sizes.positions,
            inputs=self.sizes.hidden,
            outputs=self.sizes.hidden,
            left_bits=of_role(self.registers, "x").bits,
            right_bits=of_role(self.registers, "gain").bits,
            accumulator_bits=of_role(self.registers, "V").bits,
            macs=0,
            slices=sum(one.slices for one in self.multipliers),
            block_rams=0.0,
            compute_cycles=self.cycles,
        )
        return (layer,)
