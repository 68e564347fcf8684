"""The unified linear kernel of paper 004 (4.2.2): dense and sparse linears, cycles, multipliers, memories, weights.

`units` compute units take as many patches at once; all of them multiply with the same tile of `inputs` x `outputs`
weights, each with its own patch. One router streams the patches in, a tile a cycle, so that a tile of inputs lasts at
least as many cycles as there are units. Of experts, the patches of one expert are such patches, one expert after the
other. Weights are fetched once an image, of every expert too, while the matrix before is computed; or stay on chip.

Weights, or pixels, that are wider than the kernel's take several passes, a digit each: 8-bit ends of a model of 4-bit
weights take three of three bits and a sign. Pixels without a sign are taken less 128, which the bias makes up for.
Sums are added in logic; every sum that is finished is multiplied by its row's factor, as many a cycle as the shortest
row of inputs finishes.

Letters: N positions, D hidden size, I inputs, O outputs, E experts, k of them a position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from moeq.errors import QuantizationError
from moeq.integers.arithmetic.fixed_point import ACCUMULATOR_BITS
from moeq.integers.arithmetic.integer_norm import widest_row
from moeq.integers.hardware import registers
from moeq.integers.hardware.interval import Interval, signed
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
from moeq.integers.hardware.registers import MULTIPLIER, Registers, of_role
from moeq.integers.hardware.slices import array_slices, block_rams
from moeq.integers.hardware.vision import VisionSizes
from moeq_kernels.widths import MAX_SHIFT, MULTIPLIER_BITS

END_BITS = 8  # weights of patch embedding, router and head, and pixels: INTEGER.md's choices
TABLE_BITS = 10  # inputs of the activation function's table
ROUTER_BITS, LOGIT_BITS = 16, 24
TABLE_PORTS = 2  # lookups of a block RAM a cycle


@dataclass(frozen=True, kw_only=True)
class Linear:
    """`count` equal linears; tokens: rows, one number an expert where there are several, in equal shares.

    weight_bits, input_bits: of the codes; bits: of what it gives; sums: what its accumulators hold where weights are
    known, None: by sizes alone.
    """

    name: str
    count: int
    tokens: tuple[int, ...]
    inputs: int
    outputs: int
    weight_bits: int
    input_bits: int
    bits: int
    parts: int = 1
    sums: Interval | None = None

    @property
    def rows(self) -> int:
        """Rows of all experts."""
        return sum(self.tokens)

    @cached_property
    def registers(self) -> Registers:
        """Its datapath."""
        x = signed(self.input_bits)
        sums = self.sums or registers.sum_of_products(x, self.weight_bits, self.inputs)
        return registers.linear(x, registers.weights(self.weight_bits), sums, self.bits, tight=True)

    @cached_property
    def accumulators(self) -> Interval:
        """What its sums hold."""
        return of_role(self.registers, "accumulators")


def shares(slots: int, experts: int) -> tuple[int, ...]:
    """Slots in as equal shares as whole numbers allow."""
    each, more = divmod(slots, experts)
    return tuple(each + (index < more) for index in range(experts))


@cache
def linears(sizes: VisionSizes, arithmetic: Arithmetic) -> tuple[Linear, ...]:
    """All linears of an image in order, equal ones once. query, key and value are three of D rows each."""
    n, d, w, a = sizes.positions, sizes.hidden, arithmetic.weights, arithmetic.activations
    row, mixture = widest_row(d), sizes.mixture
    sparse = 0 if mixture is None else mixture.blocks

    def of(
        name: str,
        count: int,
        tokens: tuple[int, ...],
        shape: tuple[int, int],
        bits: int,
        weight_bits: int = w,
        input_bits: int = a,
        parts: int = 1,
    ) -> Linear:
        return Linear(
            name=name,
            count=count,
            tokens=tokens,
            inputs=shape[0],
            outputs=shape[1],
            weight_bits=weight_bits,
            input_bits=input_bits,
            bits=bits,
            parts=parts,
        )

    found = [
        of("patch embedding", 1, (n - sizes.prefix,), (sizes.patch_inputs, d), row, END_BITS, END_BITS),
        of("query, key, value", sizes.blocks, (n,), (d, d), a, parts=3),
        of("projection", sizes.blocks, (n,), (d, d), row),
    ]
    if sizes.blocks > sparse:
        found += [
            of("MLP up", sizes.blocks - sparse, (n,), (d, sizes.intermediate), TABLE_BITS),
            of("MLP down", sizes.blocks - sparse, (n,), (sizes.intermediate, d), row),
        ]
    if mixture is not None:
        slots = shares(n * mixture.top_k, mixture.num_experts)
        found += [
            of("router", sparse, (n,), (d, mixture.num_experts), ROUTER_BITS, END_BITS),
            of("experts up", sparse, slots, (d, mixture.inner), TABLE_BITS),
            of("experts down", sparse, slots, (mixture.inner, d), row),
        ]
    return (*found, of("head", 1, (1,), (d, sizes.classes), LOGIT_BITS, END_BITS))


@dataclass(frozen=True, kw_only=True)
class LinearKernel:
    """The linear kernel of given sizes and widths at a parallelism.

    bytes_per_cycle: off chip, None where all weights stay on chip; sums: of linears whose weights are known, by name.
    """

    sizes: VisionSizes
    arithmetic: Arithmetic
    at: Parallelism
    bytes_per_cycle: float | None
    sums: Mapping[str, Interval] = field(default_factory=dict)

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """What it computes; QuantizationError naming one whose sums 32 bits don't hold."""
        found = tuple(replace(one, sums=self.sums.get(one.name)) for one in linears(self.sizes, self.arithmetic))
        for one in found:
            if one.accumulators.bits > ACCUMULATOR_BITS:
                raise QuantizationError(
                    f"sums of {one.inputs} products take {one.accumulators.bits} bits, {ACCUMULATOR_BITS} are there",
                    where=one.name,
                    do="use fewer bits for weights or activations",
                )
        return found

    def passes(self, linear: Linear) -> int:
        """Digits of its weights times digits of its inputs; a digit has one bit less than the kernel's width."""
        by_weight = up(linear.weight_bits - 1, self.arithmetic.weights - 1)
        return by_weight * up(linear.input_bits - 1, self.arithmetic.activations - 1)

    def _tiles(self, linear: Linear) -> int:
        """Tiles of its weights as they lie in memory, digits apart."""
        digits = up(linear.weight_bits - 1, self.arithmetic.weights - 1)
        return up(linear.inputs, self.at.inputs) * up(linear.outputs, self.at.outputs) * digits

    def _groups(self, linear: Linear, tokens: int) -> int:
        """Cycles of so many patches: full groups, and what is left over."""
        columns = up(linear.outputs, self.at.outputs)
        full, rest = divmod(tokens, self.at.units)
        rows = up(linear.inputs, self.at.inputs) * self.passes(linear)
        return rows * (full * max(columns, self.at.units) + (max(columns, rest) if rest else 0))

    @property
    def fill_cycles(self) -> int:
        """Cycles from the last tile to the last output: product, sum, factor, table."""
        return 2 * SLICE_STAGES + levels(self.at.inputs) + 2

    def compute_cycles(self, linear: Linear) -> int:
        """Cycles of one of its blocks."""
        used = [tokens for tokens in linear.tokens if tokens]
        return linear.parts * sum(self._groups(linear, tokens) + self.fill_cycles for tokens in used)

    def worst_cycles(self, linear: Linear) -> int | None:
        """Cycles when every expert's last group is the smallest, a bound over all routings; None without experts."""
        if len(linear.tokens) == 1:
            return None
        slots, at = linear.rows, self.at
        used = min(slots, len(linear.tokens))
        groups = used + (slots - used) // at.units
        rows = up(linear.inputs, at.inputs) * self.passes(linear)
        return groups * rows * max(up(linear.outputs, at.outputs), at.units) + used * self.fill_cycles

    def fetch_cycles(self, linear: Linear) -> int:
        """Cycles of its weights, of all experts, over the off-chip memory; 0 where they stay on chip."""
        if self.bytes_per_cycle is None:
            return 0
        matrices = linear.parts * len(linear.tokens)
        constants = linear.outputs * self._constant_bits(linear)
        bits = matrices * (linear.inputs * linear.outputs * linear.weight_bits + constants)
        return -int(-bits / 8 // self.bytes_per_cycle)

    @staticmethod
    def _constant_bits(linear: Linear) -> int:
        """Bias, multiplier and shift of an output."""
        return linear.accumulators.bits + MULTIPLIER_BITS + MAX_SHIFT.bit_length()

    def finished(self, linear: Linear) -> int:
        """Sums that are finished in a cycle, at most."""
        return up(self.at.units * self.at.outputs, up(linear.inputs, self.at.inputs) * self.passes(linear))

    def _array(self) -> tuple[int, int]:
        """Slices of the array, and products of one of them."""
        weight, x = registers.weights(self.arithmetic.weights), signed(self.arithmetic.activations)
        tile, packing = array_slices(weight, x, self.at.outputs, self.at.units)
        return self.at.inputs * tile, 1 if packing is None else packing.products

    @property
    def multipliers(self) -> tuple[Multiplier, ...]:
        """The array, the factors of finished sums, and of a router the few of a softmax."""
        return tuple(self._multipliers())

    def _multipliers(self) -> Iterator[Multiplier]:
        weight, x = registers.weights(self.arithmetic.weights), signed(self.arithmetic.activations)
        taken, packed = self._array()
        count = self.at.units * self.at.inputs * self.at.outputs
        yield Multiplier(
            kernel="linear",
            what="weight * x",
            count=count,
            left_bits=weight.bits,
            right_bits=x.bits,
            slices=taken,
            packed=packed,
        )
        sums = max((one.accumulators for one in self.linears), key=lambda held: held.bits)
        yield products("linear", "sum * factor", max(map(self.finished, self.linears)), sums, MULTIPLIER)
        mixture = self.sizes.mixture
        if mixture is not None:
            made = registers.router(
                next(one for one in self.linears if one.name == "router").registers,
                mixture.top_k,
                mixture.num_experts,
            )
            yield products("linear", "router's powers", 1, of_role(made, "difference"), MULTIPLIER)
            yield products("linear", "router's weights", 1, registers.POWER, of_role(made, "reciprocal"))
            outputs = signed(widest_row(self.sizes.hidden))
            yield products("linear", "expert * weight", self.at.outputs, outputs, registers.POWER)

    @property
    def word(self) -> int:
        """Bits of a tile of weights."""
        return self.at.inputs * self.at.outputs * self.arithmetic.weights

    @property
    def memories(self) -> tuple[Memory, ...]:
        """Weights, constants of rows, patches of the units, what lies between linears, tables."""
        at, a, n = self.at, self.arithmetic.activations, self.sizes.positions
        every = self.linears
        on_chip = self.bytes_per_cycle is None
        tiles = [one.count * one.parts * len(one.tokens) * self._tiles(one) for one in every]
        columns = max(up(one.outputs, at.outputs) for one in every)
        constants = at.outputs * max(map(self._constant_bits, every))
        largest = max(map(self._tiles, every))
        inner = max(one.rows * up(one.outputs, at.inputs) for one in every if one.bits == TABLE_BITS)
        lookups = max(self.finished(one) for one in every if one.bits == TABLE_BITS)
        width = at.inputs * a
        return (
            Memory(
                kernel="linear",
                what="weights",
                width=self.word,
                depth=sum(tiles) if on_chip else largest,
                copies=1 if on_chip else 2,
                small_too=True,
            ),
            Memory(kernel="linear", what="biases and factors", width=constants, depth=columns, copies=2),
            Memory(
                kernel="linear",
                what="patches of the units",
                width=at.units * width,
                depth=max(up(one.inputs, at.inputs) for one in every),
                copies=2,
            ),
            Memory(kernel="linear", what="norm's output", width=width, depth=n * up(self.sizes.hidden, at.inputs)),
            Memory(kernel="linear", what="hidden activations", width=width, depth=inner),
            Memory(
                kernel="linear",
                what="activation table",
                width=a,
                depth=1 << TABLE_BITS,
                copies=up(lookups, TABLE_PORTS),
            ),
        )

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every linear."""
        return tuple(self._layer(one) for one in self.linears)

    def _layer(self, linear: Linear) -> Layer:
        taken, _ = self._array()
        factors = products("linear", "", self.finished(linear), linear.accumulators, MULTIPLIER)
        matrices = linear.parts * len(linear.tokens)
        return Layer(
            name=linear.name,
            kernel="linear",
            count=linear.count,
            tokens=linear.rows,
            inputs=linear.inputs,
            outputs=linear.outputs * linear.parts,
            left_bits=linear.weight_bits,
            right_bits=linear.input_bits,
            accumulator_bits=linear.accumulators.bits,
            macs=linear.rows * linear.inputs * linear.outputs * linear.parts,
            slices=taken + factors.slices,
            block_rams=block_rams(self.word, matrices * self._tiles(linear), small_too=True),
            compute_cycles=self.compute_cycles(linear),
            fetch_cycles=self.fetch_cycles(linear),
            worst_cycles=self.worst_cycles(linear),
        )
