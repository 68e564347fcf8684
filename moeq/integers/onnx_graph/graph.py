"""Builds an ONNX graph of whole numbers: nodes, constants, and the arithmetic of INTEGER.md in standard operators.

Registers between operations have the type that the manifest states; arithmetic in between is int64, in which no
product reaches 2^52. Division of ONNX truncates, shifts of INTEGER.md round down: x >> n is (x - Mod(x, 2^n)) / 2^n,
since Mod of whole numbers has the divisor's sign. MatMulInteger is only given signed bytes: onnxruntime's products of
unsigned with signed ones saturate on CPUs without VNNI. Unsigned ones are moved by 128, which its zero point undoes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from moeq.errors import FormatError
from moeq.integers.artifacts.integer import Value
from moeq.integers.onnx_graph import qonnx

OPSET = 17
IR_VERSION = 8  # of opset 17
BYTE_BITS = 8
MOST_SHIFT = 62
WHERE = "--format onnx"
TYPES = {"I8": TensorProto.INT8, "U8": TensorProto.UINT8, "I16": TensorProto.INT16, "I32": TensorProto.INT32,
         "I64": TensorProto.INT64}  # fmt: skip
Ints = NDArray[np.integer[Any] | np.floating[Any]]


class Graph:
    """Nodes and constants as they are added; every method that computes returns the name of its result.

    values: registers by name. A name that is given to a method stands for an int64 tensor, unless it says otherwise.
    qonnx: whether operands of products pass QONNX's Quant; products: how many do.
    """

    def __init__(self, values: dict[str, Value], *, qonnx: bool = False) -> None:
        self.values, self.qonnx, self.products = values, qonnx, 0
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.operation = ""
        self.inner = 1  # products of a sum of two registers
        self._count = 0

    def fresh(self, what: str) -> str:
        """A name that is not there yet."""
        self._count += 1
        return f"{self.operation}/{what}_{self._count}"

    def node(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """A node of an operator; the name of its output, or names where there are several."""
        made = [self.fresh(kind) for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), made, name=made[0], **attributes))
        return made[0] if outputs == 1 else made

    def constant(self, name: str, array: Ints) -> str:
        """A tensor of the graph under a name of its own."""
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.asarray(array, order="C"), name)
        return name

    def number(self, value: int) -> str:
        """A single number, int64."""
        return self.constant(f"number/{value}", np.array(value, np.int64))

    def numbers(self, values: Sequence[int]) -> str:
        """A shape, axes or a list, int64."""
        return self.constant("numbers/" + "_".join(map(str, values)), np.array(values, np.int64))

    def cast(self, x: str, to: str) -> str:
        """x in a type of safetensors."""
        made: str = self.node("Cast", x, to=TYPES[to])
        return made

    def wide(self, name: str) -> str:
        """A register as int64."""
        return name if self.values[name].dtype == "I64" else self.cast(name, "I64")

    def keep(self, name: str, x: str) -> str:
        """Give a result, int64, to the register of a name, in its type."""
        self.nodes.append(helper.make_node("Cast", [x], [name], name=name, to=TYPES[self.values[name].dtype]))
        return name

    # arithmetic

    def powers_of_two(self, exponents: str) -> str:
        """2^exponents, of exponents from 0 to 62."""
        table = self.constant("powers_of_two", 2 ** np.arange(MOST_SHIFT + 1, dtype=np.int64))
        made: str = self.node("Gather", table, exponents, axis=0)
        return made

    def rounded(self, x: str, power: str, half: str) -> str:
        """floor(x / power + 1/2), power a power of two and half its half, 0 of 1."""
        moved = self.node("Add", x, half)
        made: str = self.node("Div", self.node("Sub", moved, self.node("Mod", moved, power)), power)
        return made

    def round_shift(self, x: str, shift: int) -> str:
        """round_shift of INTEGER.md by a fixed number of bits."""
        return x if shift == 0 else self.rounded(x, self.number(1 << shift), self.number(1 << shift >> 1))

    def scale(self, x: str, multiplier: int, shift: int) -> str:
        """scale of INTEGER.md by one factor."""
        return self.round_shift(self.node("Mul", x, self.number(multiplier)), shift)

    def scale_rows(self, x: str, name: str, multiplier: Ints, shift: Ints) -> str:
        """scale by a factor for each of the last axis; name: of the constants that are made."""
        powers = np.left_shift(np.int64(1), shift.astype(np.int64))
        product = self.node("Mul", x, self.constant(f"{name}.multiplier", multiplier.astype(np.int64)))
        held = self.constant(f"{name}.power", powers), self.constant(f"{name}.half", powers >> 1)
        return self.rounded(product, *held)

    def sat(self, x: str, bits: int) -> str:
        """sat of INTEGER.md."""
        made: str = self.node("Clip", x, self.number(-(1 << bits - 1)), self.number((1 << bits - 1) - 1))
        return made

    def at_most(self, x: str, most: int) -> str:
        made: str = self.node("Min", x, self.number(most))
        return made

    def power(self, steps: str, table: str) -> str:
        """power of INTEGER.md; table: the constant of its 256 entries."""
        octaves = self.at_most(self.node("Div", steps, self.number(256)), MOST_SHIFT)
        entries = self.node("Gather", table, self.node("Mod", steps, self.number(256)), axis=0)
        made: str = self.node("Div", entries, self.powers_of_two(octaves))
        return made

    def sum(self, x: str, axis: int, keep: bool = True) -> str:
        made: str = self.node("ReduceSum", x, self.numbers([axis]), keepdims=int(keep))
        return made

    # products of bytes

    def product(self, left: str, right: str, register: str, *, right_value: str | None = None) -> str:
        """left @ right in 32 bits, as int64; left: a tensor that holds what `register` does, in its type.

        right: int8; right_value: the register that it comes from, None of a constant. FormatError where either does not
        fit into a byte.
        """
        if self.qonnx:
            return self._quant_product(left, right, register, right_value)
        held = self.values[register]
        for name, one in ((register, held), *([(right_value, self.values[right_value])] if right_value else [])):
            if one.bits > BYTE_BITS:
                raise FormatError(
                    f"value {name} has {one.bits} bits, ONNX's MatMulInteger takes 8",
                    where=f"{WHERE}: {self.operation}",
                    do="make the integer forward with activations of 8 bits or fewer",
                )
        if held.signed:
            return self.cast(self.node("MatMulInteger", left, right), "I64")
        moved = self.node("Sub", self.cast(left, "I32"), self.constant("half_byte", np.array(128, np.int32)))
        zero = self.constant("zero_point", np.array(-128, np.int8))
        return self.cast(self.node("MatMulInteger", self.cast(moved, "I8"), right, zero), "I64")

    def _quant_product(self, left: str, right: str, register: str, right_value: str | None) -> str:
        """left @ right of operands that pass Quant, as int64; FormatError where float32 would not be exact."""
        held = self.values[register]
        largest = max(map(abs, held.ends))
        if right_value is None:
            codes = np.abs(numpy_helper.to_array(self.constants[right]).astype(np.int64))
            top = max(1, int(codes.max(initial=0)))
            other = Value(bits=top.bit_length() + 1)
            most = largest * int(codes.sum(0).max(initial=0))
        else:
            other = self.values[right_value]
            most = largest * max(map(abs, other.ends)) * self.inner
        if most > qonnx.EXACT_SUMS:
            raise FormatError(
                f"its sums can reach {most:,}, float32 of QONNX's Quant is exact to {qonnx.EXACT_SUMS:,}",
                where=f"--format qonnx: {self.operation}",
                do="use fewer bits for weights or activations, or --format onnx",
            )
        self.products += 1
        operands = self._quant(left, held, narrow=False), self._quant(right, other, narrow=right_value is None)
        return self.cast(self.node("MatMul", *operands), "I64")

    def _quant(self, x: str, held: Value, *, narrow: bool) -> str:
        """x, whole numbers of a register, through Quant of its width."""
        whole = self.node("Cast", x, to=TensorProto.FLOAT)
        one, zero, bits = (
            self.constant(f"quant/{number}", np.array(number, np.float32)) for number in (1, 0, held.bits)
        )
        made = self.fresh(qonnx.QUANT)
        attributes = {"signed": int(held.signed), "narrow": int(narrow), "rounding_mode": "ROUND"}
        self.nodes.append(
            helper.make_node(
                qonnx.QUANT, [whole, one, zero, bits], [made], name=made, domain=qonnx.DOMAIN, **attributes
            )
        )
        return made
