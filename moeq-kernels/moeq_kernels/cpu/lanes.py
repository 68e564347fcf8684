"""Vectors of 32-bit lanes in LLVM's intermediate code: the few operations that the products are made of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from llvmlite import ir
from llvmlite.ir import Value

I1 = ir.IntType(1)
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


class _Pointers(ir.Type):  # type: ignore[misc]
    """A vector of LLVM's pointers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def _to_string(self) -> str:
        return f"<{self.count} x ptr>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pointers) and other.count == self.count

    def __hash__(self) -> int:
        return hash((_Pointers, self.count))


class Lanes:
    """Vectors of `count` lanes; addresses are whole numbers, offsets bytes, and nothing needs to be aligned."""

    def __init__(self, builder: ir.IRBuilder, count: int) -> None:
        self.builder, self.count = builder, count
        self.word_type, self.float_type = ir.VectorType(I32, count), ir.VectorType(F32, count)
        self.zero = ir.Constant(self.float_type, [0.0] * count)
        self.no_word = ir.Constant(self.word_type, [0] * count)
        self._kept: dict[Hashable, Value] = {}

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What is made when it is first asked for by a key, which holds a value of the same basic block."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def _pointer(self, address: Value, offset: int, kind: ir.Type) -> Value:
        place = self.builder.add(address, ir.Constant(I64, offset)) if offset else address
        return self.builder.inttoptr(place, kind.as_pointer())

    def _load(self, address: Value, offset: int, kind: ir.Type, align: int) -> Value:
        loaded = self.builder.load(self._pointer(address, offset, kind))
        loaded.align = align
        return loaded

    def _constant(self, word: int) -> Value:
        return ir.Constant(self.word_type, [word] * self.count)

    def _spread(self, scalar: Value, kind: ir.VectorType) -> Value:
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, undefined, self._constant(0))

    def words(self, address: Value, offset: int) -> Value:
        """One word a lane."""
        return self._load(address, offset, self.word_type, 4)

    def word_in_all(self, address: Value, offset: int) -> Value:
        """One word in every lane."""
        return self._spread(self._load(address, offset, I32, 4), self.word_type)

    def float_in_all(self, address: Value, offset: int) -> Value:
        """One float32 in every lane."""
        return self._spread(self._load(address, offset, F32, 4), self.float_type)

    def in_all(self, scalar: Value) -> Value:
        """A float32 in every lane."""
        return self._spread(scalar, self.float_type)

    def halves(self, address: Value, offset: int) -> Value:
        """One float16 a lane, as float32."""
        return self.builder.fpext(self._load(address, offset, ir.VectorType(F16, self.count), 2), self.float_type)

    def of_halves(self, words: Value) -> Value:
        """The lower 16 bits of each word, a float16, as float32."""
        short = self.builder.trunc(words, ir.VectorType(I16, self.count))
        return self.builder.fpext(self.builder.bitcast(short, ir.VectorType(F16, self.count)), self.float_type)

    def bytes(self, address: Value, offset: int) -> Value:
        """One byte a lane, as float32."""
        return self.builder.uitofp(self._load(address, offset, ir.VectorType(I8, self.count), 1), self.float_type)

    def shifted(self, words: Value, places: int) -> Value:
        """Each word `places` bits to the right, to the left where it is negative."""
        if places == 0:
            return words
        move = self.builder.lshr if places > 0 else self.builder.shl
        return move(words, self._constant(abs(places)))

    def masked(self, words: Value, mask: int) -> Value:
        return self.builder.and_(words, self._constant(mask))

    def with_bits(self, words: Value, bits: int) -> Value:
        return self.builder.or_(words, self._constant(bits))

    def either(self, words: Value, others: Value) -> Value:
        return self.builder.or_(words, others)

    def mixed(self, mask: int, words: Value, others: Value) -> Value:
        """The bits of words where the mask has ones, those of others where it has none."""
        return self.either(self.masked(words, mask), self.masked(others, ~mask & 0xFFFFFFFF))

    def as_floats(self, words: Value) -> Value:
        """The same bits."""
        return self.builder.bitcast(words, self.float_type)

    def as_words(self, floats: Value) -> Value:
        """The same bits."""
        return self.builder.bitcast(floats, self.word_type)

    def to_floats(self, words: Value) -> Value:
        """The same numbers, signed; exact below 2**24."""
        return self.builder.sitofp(words, self.float_type)

    def after(self, words: Value, before: Value) -> Value:
        """Each lane's word from the lane before it; the first one's is the last of `before`."""
        places = ir.Constant(self.word_type, [2 * self.count - 1, *range(self.count - 1)])
        return self.builder.shuffle_vector(words, before, places)

    def gathered(self, address: Value, offsets: Value) -> Value:
        """The word at each lane's offset in bytes from an address; offsets are not negative."""
        longs = ir.VectorType(I64, self.count)
        places = self.builder.add(self._spread(address, longs), self.builder.zext(offsets, longs))
        pointers, every = self.builder.inttoptr(places, _Pointers(self.count)), ir.VectorType(I1, self.count)
        mask, none = ir.Constant(every, [1] * self.count), ir.Constant(self.word_type, [0] * self.count)
        name = f"llvm.masked.gather.v{self.count}i32.v{self.count}p0"
        return self._call(name, self.word_type, pointers, ir.Constant(I32, 1), mask, none)

    # four bytes a lane, of 16 lanes where VBMI's instructions are meant

    @property
    def _bytes(self) -> ir.VectorType:
        return ir.VectorType(I8, 4 * self.count)

    def moved_bytes(self, words: Value, places: Sequence[int]) -> Value:
        """Every byte from the place that is told for it."""
        given = self.builder.bitcast(words, self._bytes)
        mask = ir.Constant(ir.VectorType(I32, 4 * self.count), list(places))
        return self.builder.bitcast(self.builder.shuffle_vector(given, given, mask), self.word_type)

    def with_flipped_signs(self, words: Value) -> Value:
        """Words with the highest bit of every byte flipped."""
        return self.builder.xor(words, self._constant(0x80808080))

    def cut_bytes(self, words: Value, lowest: Sequence[int]) -> Value:
        """Eight bits of each lane's word from each of four places on, as four bytes; what would come from beyond the
        word is any bits."""
        places = [(low + 32 * (lane % 2)) % 64 for lane in range(self.count) for low in lowest]
        given = self.builder.bitcast(words, self._bytes)
        return self._call("llvm.x86.avx512.pmultishift.qb.512", self._bytes, ir.Constant(self._bytes, places), given)

    def doubled_bytes(self, given: Value) -> Value:
        return self.builder.add(given, given)

    def top_bits(self, given: Value) -> Value:
        """Of every byte, as a mask."""
        return self.builder.icmp_signed("<", given, ir.Constant(self._bytes, [0] * 4 * self.count))

    def chosen(self, mask: Value, ones: Value, others: Value) -> Value:
        """By a mask: where it is set, and where it is not."""
        return self.builder.select(mask, ones, others)

    def from_one(self, table: Sequence[int], places: Value) -> Value:
        """Bytes of a table of 64 by the low 6 bits of each byte."""
        return self._call("llvm.x86.avx512.permvar.qi.512", self._bytes, self._table(table), places)

    def from_two(self, table: Sequence[int], other: Sequence[int], places: Value) -> Value:
        """Bytes of two tables of 64, one after the other, by the low 7 bits of each byte."""
        name = "llvm.x86.avx512.vpermi2var.qi.512"
        return self._call(name, self._bytes, self._table(table), places, self._table(other))

    # four bytes a lane, of 8 lanes where AVX2's instructions are meant

    def as_bytes(self, words: Value) -> Value:
        """The same bits."""
        return self.builder.bitcast(words, self._bytes)

    def shifted_bytes(self, words: Value, lowest: Sequence[int]) -> Value:
        """As `cut_bytes`, as words: by a shift for every different distance of the places from their bytes."""
        count, found = 4 * self.count, None
        moves = [low - 8 * place for place, low in enumerate(lowest)]
        for move in dict.fromkeys(moves):
            part = self.as_bytes(self.shifted(words, move))
            mask = [at + count * (moves[at % 4] == move) for at in range(count)]
            kind = ir.VectorType(I32, count)
            found = part if found is None else self.builder.shuffle_vector(found, part, ir.Constant(kind, mask))
        return self.builder.bitcast(found, self.word_type)

    def from_sixteen(self, table: Sequence[int], places: Value) -> Value:
        """Bytes of a table of 16 by the low 4 bits of each byte of words, 0 where its highest bit is set."""
        return self._call("llvm.x86.avx2.pshuf.b", self._bytes, self._table([*table, *table]), self.as_bytes(places))

    def sum_of_bytes(self, words: Value) -> Value:
        """Of the four of each lane, without sign."""
        shorts = ir.VectorType(I16, 2 * self.count)
        ones = ir.Constant(self._bytes, [1] * 4 * self.count), ir.Constant(shorts, [1] * 2 * self.count)
        pairs = self._call("llvm.x86.avx2.pmadd.ub.sw", shorts, self.as_bytes(words), ones[0])
        return self._call("llvm.x86.avx2.pmadd.wd", self.word_type, pairs, ones[1])

    def plus(self, words: Value, number: int) -> Value:
        return self.builder.add(words, self._constant(number))

    def times_plus(self, words: Value, factor: int, added: int) -> Value:
        """In 32 bits."""
        return self.plus(self.builder.mul(words, self._constant(factor)), added)

    def _table(self, values: Sequence[int]) -> Value:
        return ir.Constant(self._bytes, [int(value) for value in values])

    def _call(self, name: str, result: ir.Type, *arguments: Value) -> Value:
        module, kind = self.builder.module, ir.FunctionType(result, [argument.type for argument in arguments])
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return self.builder.call(function, arguments)

    def fma(self, one: Value, other: Value, added: Value) -> Value:
        return self._call(f"llvm.fma.v{self.count}f32", self.float_type, one, other, added)

    def dot_pairs(self, total: Value, words: Value, others: Value) -> Value:
        """total + low * low + high * high of two bf16 a lane, in float32 (of 16 lanes)."""
        pairs = ir.VectorType(_BFloat(), 2 * self.count)
        given = (self.builder.bitcast(part, pairs) for part in (words, others))
        return self._call("llvm.x86.avx512bf16.dpbf16ps.512", self.float_type, total, *given)

    def dot_quads(self, total: Value, codes: Value, others: Value) -> Value:
        """total + the sum of four products of an unsigned and a signed byte a lane, in int32 (of 8 or 16 lanes)."""
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self.count}"
        return self._call(name, self.word_type, total, codes, others)

    def dot_bytes(self, codes: Value, others: Value) -> Value:
        """Sums of two products of an unsigned and a signed byte, two a lane in int16 (of 8 lanes), which saturate."""
        given = (self.builder.bitcast(part, self._bytes) for part in (codes, others))
        return self._call("llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 2 * self.count), *given)

    def dot_shorts(self, total: Value, shorts: Value, factor: int) -> Value:
        """total + the sum of two int16 a lane, each times a factor, in int32 (of 8 lanes)."""
        factors = ir.Constant(shorts.type, [factor] * 2 * self.count)
        return self.builder.add(total, self._call("llvm.x86.avx2.pmadd.wd", self.word_type, shorts, factors))

    def added_shorts(self, one: Value, other: Value) -> Value:
        """The sums of int16, in the order in which they are asked for: a compiler that changes it needs more registers
        than there are."""
        added = self.builder.add(one, other)
        return self.builder.asm(ir.FunctionType(added.type, [added.type]), "", "=x,0", [added], False)

    def fence(self) -> None:
        """Nothing that was loaded before is kept for what comes after; not an instruction."""
        self.builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)

    def prefetch(self, address: Value, offset: int, level: int = 1) -> None:
        """Have a line come into a level of the cache; an address where nothing lies does no harm."""
        place, last = self._pointer(address, offset, I8), [ir.Constant(I32, value) for value in (0, 4 - level, 1)]
        module, kind = self.builder.module, ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
        name = "llvm.prefetch.p0"
        self.builder.call(module.globals.get(name) or ir.Function(module, kind, name), [place, *last])

    def store(self, values: Value, address: Value, offset: int) -> None:
        stored = self.builder.store(values, self._pointer(address, offset, values.type))
        stored.align = values.type.element.width // 8 if isinstance(values.type.element, ir.IntType) else 4

    def to_bf16(self, floats: Value, native: bool) -> Value:
        """Rounded to nearest, halves to even, as 16-bit words; for finite numbers. native: by the CPU's instruction,
        which makes those below 2**-126 zeros."""
        if native:
            shorter = self.builder.fptrunc(floats, ir.VectorType(_BFloat(), self.count))
            return self.builder.bitcast(shorter, ir.VectorType(I16, self.count))
        words = self.as_words(floats)
        odd = self.masked(self.shifted(words, 16), 1)
        rounded = self.builder.add(self.builder.add(words, odd), self._constant(0x7FFF))
        return self.builder.trunc(self.shifted(rounded, 16), ir.VectorType(I16, self.count))
