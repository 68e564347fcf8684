"""Vectors of 32-bit lanes in LLVM's intermediate code: the few operations that the products are made of."""

from __future__ import annotations

from llvmlite import ir
from llvmlite.ir import Value

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


class Lanes:
    """Vectors of `count` lanes; addresses are whole numbers, offsets bytes, and nothing needs to be aligned."""

    def __init__(self, builder: ir.IRBuilder, count: int) -> None:
        self.builder, self.count = builder, count
        self.word_type, self.float_type = ir.VectorType(I32, count), ir.VectorType(F32, count)
        self.zero = ir.Constant(self.float_type, [0.0] * count)
        self.no_word = ir.Constant(self.word_type, [0] * count)

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

    def as_floats(self, words: Value) -> Value:
        """The same bits."""
        return self.builder.bitcast(words, self.float_type)

    def as_words(self, floats: Value) -> Value:
        """The same bits."""
        return self.builder.bitcast(floats, self.word_type)

    def to_floats(self, words: Value) -> Value:
        """The same numbers, signed; exact below 2**24."""
        return self.builder.sitofp(words, self.float_type)

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

    def prefetch(self, address: Value, offset: int) -> None:
        """Have a line come into the cache; an address where nothing lies does no harm."""
        place, last = self._pointer(address, offset, I8), [ir.Constant(I32, value) for value in (0, 3, 1)]
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
