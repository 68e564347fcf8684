"""Blocks of 16 rows multiplied by AMX's tiles: many rows of activations at the price of few.

Two blocks stand side by side. Of each a unit of 32 inputs becomes a tile of pairs of bf16 in memory that stays in the
first level of cache, one unit ahead of the tiles that are multiplied, so that vectors unpack while tiles multiply.
Values are those of `codes.Codes.pair`, which bf16 holds exactly; scale and zero point come in once a group, in float32.

Activations lie as [units, rows, 32] in bf16: a tile of them is 16 rows of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from llvmlite.ir import Value

from moeq_kernels.cpu.emit import ARGUMENTS, LINE_BYTES, WORD_BYTES, Blocks, Number, Spec
from moeq_kernels.cpu.lanes import I8, I64

SIDE = 2  # blocks side by side
AHEAD_BYTES = 1 << 12  # that are asked for before they are needed
TILE_ROWS, TILE_BYTES, TILE_LINE = 16, 1024, 64
SUMS, GIVEN, VALUES = 0, 4, 6  # the first tile of products, of activations and of values


class Tiles(Blocks):
    """The code of one spec whose rows are multiplied by tiles; its units are of 32 inputs."""

    def __init__(self, builder: ir.IRBuilder, spec: Spec, argument: dict[str, Value]) -> None:
        super().__init__(builder, spec, argument)
        self.rows = spec.rows
        self.tiles = range(-(-spec.rows // TILE_ROWS))  # of rows
        self.high = min(spec.rows, TILE_ROWS)  # rows of a tile
        self.sides = range(SIDE)
        self.dense = not self.codes.affine
        none = ir.Constant(I64, 0)
        self.places = [Number(builder, none) for _ in self.sides]
        self.scale_at = [Number(builder, none) for _ in self.sides]
        self.zero_at = [Number(builder, none) for _ in self.sides]
        self.given = Number(builder, none)
        self.slot = Number(builder, none)
        self.values = self._space(2 * SIDE * TILE_BYTES)
        self.sums = self._space(SIDE * self.rows * TILE_LINE)
        self.totals = self._space(SIDE * self.rows * TILE_LINE)

    def _tile(self, name: str, *arguments: Value | int) -> None:
        """An instruction on tiles; numbers of tiles are known now, the others are an address and a stride."""
        given = [ir.Constant(I8, one) if isinstance(one, int) else one for one in arguments]
        if name in ("tileloadd64", "tilestored64", "ldtilecfg"):
            at = 0 if name == "ldtilecfg" else 1
            given[at] = self.builder.inttoptr(given[at], I8.as_pointer())
        module, kind = self.builder.module, ir.FunctionType(ir.VoidType(), [one.type for one in given])
        name = f"llvm.x86.{name}"
        self.builder.call(module.globals.get(name) or ir.Function(module, kind, name), given)

    def _configure(self) -> None:
        """All tiles have 64 bytes in a line; those of activations and products have as many lines as there are rows."""
        config = bytearray(64)
        config[0] = 1
        for tile in range(8):
            config[16 + 2 * tile] = TILE_LINE
            config[48 + tile] = TILE_ROWS if tile >= VALUES else self.high
        space = self._space(64)
        for at in range(0, 64, 8):
            word = ir.Constant(I64, int.from_bytes(config[at : at + 8], "little"))
            self.builder.store(word, self.builder.inttoptr(self._plus(space, at), I64.as_pointer()))
        self._tile("ldtilecfg", space)

    def multiply(self) -> None:
        """As `Blocks.multiply`, but that activations lie as the top of this file says."""
        self._configure()
        builder, argument = self.builder, self.argument
        count, stride, one = argument["blocks"], argument["stride"], ir.Constant(I64, 1)
        with self._times(builder.ashr(builder.add(count, one), one)) as index:
            first = builder.shl(index.get(), one)
            second = builder.add(first, one)
            second = builder.select(builder.icmp_signed("<", second, count), second, first)  # the last one twice
            blocks = [builder.add(argument["codes"], builder.mul(which, stride)) for which in (first, second)]
            outs = [builder.add(argument["out"], builder.shl(which, ir.Constant(I64, 6))) for which in (first, second)]
            self._multiply_pair(blocks, outs)
        self._tile("tilerelease")

    def _multiply_pair(self, blocks: Sequence[Value], outs: Sequence[Value]) -> None:
        builder, argument = self.builder, self.argument
        none = ir.Constant(I64, 0)
        shared = builder.icmp_signed("==", argument["zero_stride"], none)
        for side, block in enumerate(blocks):
            moved = builder.sub(block, argument["codes"])
            self.places[side].set(block)
            self.scale_at[side].set(builder.add(argument["scales"], moved))
            self.zero_at[side].set(builder.add(argument["zeros"], builder.select(shared, none, moved)))
        self.given.set(argument["activations"])
        self.slot.set(none)
        last = builder.sub(builder.add(blocks[0], builder.sub(argument["scales"], argument["codes"])),
                           ir.Constant(I64, self._unit_bytes))  # fmt: skip
        if not self.dense:
            for line in range(SIDE * self.rows):
                self.lanes.store(self.lanes.zero, self.totals, line * TILE_LINE)
            self._unpack_tiles(none)
        with self._times(argument["groups"]) as index:
            group = index.get()
            for tile in range(SIDE * len(self.tiles)):
                self._tile("tilezero", SUMS + tile)
            with self._times(self._units_of(group)):
                self._multiply_tiles(last)
            if not self.dense:
                self._end(group)
        for side in self.sides:
            for tile in self.tiles if self.dense else ():
                to = builder.add(outs[side], builder.mul(argument["out_stride"], ir.Constant(I64, tile * TILE_ROWS)))
                self._tile("tilestored64", SUMS + tile * SIDE + side, to, argument["out_stride"])
            for row in () if self.dense else range(self.rows):
                to = builder.add(outs[side], builder.mul(argument["out_stride"], ir.Constant(I64, row)))
                self.lanes.store(self._line(self.totals, side, row), to, 0)

    def _line(self, space: Value, side: int, row: int) -> Value:
        place = self.builder.inttoptr(self._plus(space, (side * self.rows + row) * TILE_LINE),
                                      self.lanes.float_type.as_pointer())  # fmt: skip
        loaded = self.builder.load(place)
        loaded.align = LINE_BYTES
        return loaded

    def _unpack_tiles(self, slot: Value) -> None:
        """The units that places point to, to a slot."""
        to = self.builder.add(self.values, slot)
        for side in self.sides:
            words = self._words(self.places[side].get(), 0)
            for place in range(self.spec.unit // 2):
                self.lanes.store(self.codes.pair(self.lanes, words, place), to, side * TILE_BYTES + place * TILE_LINE)

    def _multiply_tiles(self, last: Value) -> None:
        """One unit, while the next one is unpacked."""
        builder, line = self.builder, ir.Constant(I64, TILE_LINE)
        for side in self.sides:
            ahead = builder.add(self.places[side].get(), ir.Constant(I64, AHEAD_BYTES))
            for offset in range(0, self._unit_bytes, LINE_BYTES):
                self.lanes.prefetch(ahead, offset)
        slot = self.slot.get()
        if self.dense:
            starts = [place.get() for place in self.places]
        else:
            starts = [self._plus(builder.add(self.values, slot), side * TILE_BYTES) for side in self.sides]
        more = builder.icmp_unsigned("<", self.places[0].get(), last)
        step = builder.select(more, ir.Constant(I64, self._unit_bytes), ir.Constant(I64, 0))
        for place in self.places:
            place.add(step)
        other = builder.xor(slot, ir.Constant(I64, SIDE * TILE_BYTES))
        if not self.dense:
            self._unpack_tiles(other)
        self.slot.set(other)
        given = self.given.get()
        for tile in self.tiles:
            self._tile("tileloadd64", GIVEN + tile, self._plus(given, tile * TILE_BYTES), line)
        for side in self.sides:
            self._tile("tileloadd64", VALUES + side, starts[side], line)
            for tile in self.tiles:
                self._tile("tdpbf16ps", SUMS + tile * SIDE + side, GIVEN + tile, VALUES + side)
        self.given.add(self.rows * TILE_LINE)

    def _end(self, group: Value) -> None:
        """Scale and zero point of a group."""
        builder, lanes, line = self.builder, self.lanes, ir.Constant(I64, TILE_LINE)
        at_sums = builder.add(self.argument["sums"], builder.mul(group, ir.Constant(I64, self.rows * WORD_BYTES)))
        for side in self.sides:
            for tile in self.tiles:
                to = self._plus(self.sums, (side * self.rows + tile * TILE_ROWS) * TILE_LINE)
                self._tile("tilestored64", SUMS + tile * SIDE + side, to, line)
        for side in self.sides:
            self.scales, self.zeros = self.scale_at[side], self.zero_at[side]
            scale, zero = self._grid(group, 0, self.codes.values(True))
            below = builder.fneg(zero)
            for row in range(self.rows):
                value = lanes.fma(
                    below, lanes.float_in_all(at_sums, row * WORD_BYTES), self._line(self.sums, side, row)
                )
                total = lanes.fma(scale, value, self._line(self.totals, side, row))
                lanes.store(total, self.totals, (side * self.rows + row) * TILE_LINE)


def emit(builder: ir.IRBuilder, spec: Spec, arguments: Sequence[Value]) -> None:
    """As `emit.emit`, for the rows of a form with tiles."""
    Tiles(builder, spec, dict(zip(ARGUMENTS, arguments, strict=True))).multiply()
