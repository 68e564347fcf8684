"""Every kind of operation of INTEGER.md as nodes of standard operators.

Letters: B images, S positions, h heads, Q queries, K keys, E experts, k slots, I intermediate size, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moeq.errors import FormatError
from moeq.integers.arithmetic.fixed_point import UNIT_BITS
from moeq.integers.arithmetic.integer_norm import RECIPROCAL_BITS
from moeq.integers.arithmetic.integer_norm import UNIT_BITS as ROW_BITS
from moeq.integers.arithmetic.log_sqrt2 import ROOT, ROOT_BITS
from moeq.integers.artifacts.integer import Operation
from moeq.integers.onnx_graph.graph import WHERE, Graph, Ints
from moeq_kernels.widths import EXACT_BITS

Constants = dict[str, Ints]


class Kinds:
    """A method for every kind; constants: those of the program, by name, and shapes: of values without the images."""

    def __init__(self, graph: Graph, constants: Constants, shapes: dict[str, tuple[int, ...]]) -> None:
        self.graph, self.constants, self.shapes = graph, constants, shapes

    def add(self, operation: Operation) -> None:
        """The nodes of one operation; FormatError naming one of a kind that is not known here."""
        made: Callable[[Operation], None] | None = getattr(self, f"_{operation.kind}", None)
        if made is None:
            raise FormatError(
                f"no ONNX operators are known for an operation of kind {operation.kind}",
                where=f"{WHERE}: {operation.name}",
                do="update moeq",
            )
        self.graph.operation = operation.name
        made(operation)

    # pieces

    def _held(self, operation: Operation, role: str) -> Ints:
        return self.constants[operation.tensors[role]]

    def _power_table(self, operation: Operation) -> str:
        return self.graph.constant(operation.tensors["power_table"], self._held(operation, "power_table"))

    def _scale(self, x: str, operation: Operation, prefix: str) -> str:
        return self.graph.scale(x, operation.number(f"{prefix}multiplier"), operation.number(f"{prefix}shift"))

    def _powers(self, differences: str, operation: Operation) -> str:
        return self.graph.power(self._scale(differences, operation, "power_"), self._power_table(operation))

    def _sums(self, x: str, register: str, operation: Operation, prefix: str = "", expert: int | None = None) -> str:
        """Sums of products of a linear, or of one expert's, with the bias."""
        graph, at = self.graph, ... if expert is None else expert
        weight, bias = (self._held(operation, f"{prefix}{role}")[at] for role in ("weight", "bias"))
        name = operation.tensors[f"{prefix}weight"] + ("" if expert is None else f".{expert}")
        sums = graph.product(x, graph.constant(name, weight.T.astype(np.int8)), register)
        made: str = graph.node("Add", sums, graph.constant(f"{name}.bias", bias.astype(np.int64)))
        return made

    def _requantized(self, sums: str, operation: Operation, prefix: str = "", expert: int | None = None) -> str:
        at = ... if expert is None else expert
        multiplier, shift = (self._held(operation, f"{prefix}{role}")[at] for role in ("multiplier", "shift"))
        name = operation.tensors[f"{prefix}multiplier"] + ("" if expert is None else f".{expert}")
        return self.graph.scale_rows(sums, name, multiplier, shift)

    def _looked_up(self, x: str, operation: Operation) -> str:
        graph, table = self.graph, self._held(operation, "table")
        held = graph.constant(operation.tensors["table"], table.astype(np.int64))
        made: str = graph.node("Gather", held, graph.node("Add", x, graph.number(len(table) // 2)), axis=0)
        return made

    def _reciprocal(self, total: str, bits: int) -> str:
        made: str = self.graph.node("Div", self.graph.number(1 << bits), total)
        return made

    def _row(self, total: str, unit_bits: int, operation: Operation, prefix: str) -> str:
        graph = self.graph
        reciprocal = self._reciprocal(total, unit_bits + operation.number("reciprocal_bits"))
        return graph.round_shift(
            graph.node("Mul", reciprocal, graph.number(operation.number(f"{prefix}multiplier"))), 16
        )

    # kinds

    def _patches(self, operation: Operation) -> None:
        graph, side = self.graph, operation.number("patch_size")
        channels, height, width = self.shapes[operation.inputs["x"]]
        cut = [0, channels, height // side, side, width // side, side]
        tall = graph.node("Reshape", operation.inputs["x"], graph.numbers(cut))
        rows = graph.node("Transpose", tall, perm=[0, 2, 4, 1, 3, 5])
        shape = graph.numbers([0, (height // side) * (width // side), channels * side * side])
        graph.keep(operation.outputs["out"], graph.node("Reshape", rows, shape))

    def _linear(self, operation: Operation) -> None:
        self._rows(operation, "out")

    def _rows(self, operation: Operation, role: str) -> str:
        """A linear: its sums and, as the role's value, what they are requantized to; the name of that as int64."""
        graph, x = self.graph, operation.inputs["x"]
        sums = self._sums(x, x, operation)
        graph.keep(operation.outputs["accumulators"], sums)
        made = graph.sat(self._requantized(sums, operation), operation.number("bits"))
        graph.keep(operation.outputs[role], made)
        return made

    def _tokens(self, operation: Operation) -> None:
        graph, x = self.graph, operation.inputs["x"]
        prefix, position = (self._held(operation, role) for role in ("prefix", "position"))
        moved = graph.node("Add", graph.wide(x), graph.constant(operation.tensors["position"], position))
        patches = graph.sat(moved, operation.number("bits"))
        images = graph.node("Slice", graph.node("Shape", x), graph.numbers([0]), graph.numbers([1]))
        shape = graph.node("Concat", images, graph.numbers(prefix.shape), axis=0)
        front = graph.node("Expand", graph.constant(operation.tensors["prefix"], prefix[None]), shape)
        graph.keep(operation.outputs["out"], graph.node("Concat", front, patches, axis=1))

    def _layer_norm(self, operation: Operation) -> None:
        graph, x = self.graph, operation.inputs["x"]
        rows, size = graph.wide(x), self.shapes[x][-1]
        total = graph.sum(rows, -1)
        squares = graph.node("Mul", graph.sum(graph.node("Mul", rows, rows), -1), graph.number(size))
        spread = graph.node("Sub", squares, graph.node("Mul", total, total))
        spread = graph.node("Add", spread, graph.number(operation.number("epsilon")))
        ladder = graph.constant("ladder", 2 ** np.arange(EXACT_BITS + 1, dtype=np.int64))
        bits = graph.sum(graph.cast(graph.node("GreaterOrEqual", spread, ladder), "I64"), -1)
        half_up = graph.node("Div", graph.node("Sub", graph.number(EXACT_BITS), bits), graph.number(2))  # u/2
        root = self._root(graph.node("Mul", spread, graph.powers_of_two(graph.node("Add", half_up, half_up))))
        reciprocal = graph.node("Div", graph.number(1 << RECIPROCAL_BITS), root)
        centred = graph.node("Sub", graph.node("Mul", rows, graph.number(size)), total)
        shift = graph.node("Sub", graph.number(RECIPROCAL_BITS - ROW_BITS), half_up)
        power = graph.powers_of_two(shift)
        unit = graph.rounded(graph.node("Mul", centred, reciprocal), power, graph.node("Div", power, graph.number(2)))
        graph.keep(operation.outputs["rows"], unit)
        gain, bias = (graph.constant(operation.tensors[role], self._held(operation, role)) for role in ("gain", "bias"))
        moved = graph.node("Add", graph.node("Mul", unit, gain), bias)
        out = graph.sat(graph.round_shift(moved, operation.number("gain_bits") + ROW_BITS), operation.number("bits"))
        graph.keep(operation.outputs["out"], out)

    def _root(self, x: str) -> str:
        """floor(sqrt(x)) of whole numbers under 2^52: double's root, put right by one on either side."""
        graph, one = self.graph, self.graph.number(1)
        near = graph.cast(graph.node("Sqrt", graph.node("Cast", x, to=11)), "I64")  # 11: double
        over = graph.cast(graph.node("Greater", graph.node("Mul", near, near), x), "I64")
        near = graph.node("Sub", near, over)
        more = graph.node("Add", near, one)
        under = graph.cast(graph.node("LessOrEqual", graph.node("Mul", more, more), x), "I64")
        made: str = graph.node("Add", near, under)
        return made

    def _heads(self, operation: Operation) -> tuple[str, str, str]:
        """Scores and differences [B, h, Q, K] int64, values [B, h, K, d] int8."""
        graph, heads = self.graph, operation.number("heads")
        parts = {}
        graph.inner = self.shapes[operation.inputs["key"]][-1] // heads
        for part, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
            name = operation.inputs[part]
            size = self.shapes[name][-1] // heads
            split = graph.node("Reshape", name, graph.numbers([0, 0, heads, size]))
            parts[part] = graph.node("Transpose", split, perm=order)
        scores = graph.product(
            parts["query"], parts["key"], operation.inputs["query"], right_value=operation.inputs["key"]
        )
        graph.keep(operation.outputs["scores"], scores)
        differences = graph.node("Sub", graph.node("ReduceMax", scores, axes=[-1], keepdims=1), scores)
        return scores, differences, parts["value"]

    def _whole(self, mixed: str, operation: Operation) -> None:
        """Heads side by side again, saturated, into the output."""
        graph = self.graph
        beside = graph.node("Transpose", mixed, perm=[0, 2, 1, 3])
        shape = graph.numbers([0, 0, self.shapes[operation.inputs["value"]][-1]])
        out = graph.sat(graph.node("Reshape", beside, shape), operation.number("bits"))
        graph.keep(operation.outputs["out"], out)

    def _queries(self, role: str, total: str, operation: Operation) -> None:
        """A value of every query [B, h, Q, 1] into its register without the last axis."""
        flat = self.graph.node("Squeeze", total, self.graph.numbers([-1]))
        self.graph.keep(operation.outputs[role], flat)

    def _joined(self, even: str, odd: str) -> str:
        graph = self.graph
        root = graph.round_shift(graph.node("Mul", odd, graph.number(ROOT)), ROOT_BITS)
        made: str = graph.node("Add", even, root)
        return made

    def _log_attention(self, operation: Operation) -> None:
        graph, left = self.graph, operation.number("left")
        _, differences, values = self._heads(operation)
        codes = graph.at_most(self._scale(differences, operation, "code_"), 2 ** operation.number("attention_bits") - 1)
        graph.keep(operation.outputs["codes"], codes)
        weights = self._weights(codes, operation)
        whole = graph.cast(values, "I32")
        sums = [graph.cast(graph.node("MatMul", graph.cast(part, "I32"), whole), "I64") for part in weights]
        for role, total in zip(("even", "odd"), sums, strict=True):
            graph.keep(operation.outputs[role], total)
        if operation.attributes["denominator"] == "exact":
            denominator = graph.sum(self._powers(differences, operation), -1)
        else:
            denominator = self._joined(*(graph.sum(part, -1) for part in weights))
        row = self._row(denominator, operation.number("unit_bits"), operation, "out_")
        self._queries("denominator", denominator, operation)
        self._queries("row", row, operation)
        last = left + operation.number("reciprocal_bits") + operation.number("out_shift") - 16
        mixed = graph.round_shift(graph.node("Mul", self._joined(*sums), row), last)
        self._whole(mixed, operation)

    def _weights(self, codes: str, operation: Operation) -> tuple[str, str]:
        """Weights of even and of odd codes, 2^(left - k), 0 where a code counts as 0."""
        graph, left, zero, dropped = self.graph, operation.number("left"), self.graph.number(0), None
        if operation.attributes["dropped_from"] is not None:
            dropped = operation.number("dropped_from")
        halves = operation.attributes["softmax"] == "log-sqrt2"
        shift = graph.node("Div", graph.node("Add", codes, graph.number(1)), graph.number(2)) if halves else codes
        exponent = graph.node("Max", graph.node("Sub", graph.number(left), shift), zero)
        weight = graph.powers_of_two(exponent)
        weight = graph.node("Where", graph.node("LessOrEqual", shift, graph.number(left)), weight, zero)
        if dropped is not None:
            weight = graph.node("Where", graph.node("Less", codes, graph.number(dropped)), weight, zero)
        if not halves:
            return weight, graph.node("Mul", weight, zero)
        odd = graph.node("Equal", graph.node("Mod", codes, graph.number(2)), graph.number(1))
        return graph.node("Where", odd, zero, weight), graph.node("Where", odd, weight, zero)

    def _uniform_attention(self, operation: Operation) -> None:
        graph, outputs = self.graph, operation.outputs
        _, differences, values = self._heads(operation)
        numerators = self._powers(differences, operation)
        graph.keep(outputs["numerators"], numerators)
        denominator = graph.sum(numerators, -1)
        self._queries("denominator", denominator, operation)
        row = self._row(denominator, UNIT_BITS, operation, "code_")
        self._queries("row", row, operation)
        shift = UNIT_BITS + operation.number("reciprocal_bits") + operation.number("code_shift") - 16
        codes = graph.round_shift(graph.node("Mul", numerators, row), shift)
        graph.keep(outputs["codes"], graph.at_most(codes, 2 ** operation.number("attention_bits") - 1))
        graph.inner = self.shapes[operation.inputs["value"]][0]
        sums = graph.product(outputs["codes"], values, outputs["codes"], right_value=operation.inputs["value"])
        graph.keep(outputs["accumulators"], sums)
        self._whole(self._scale(sums, operation, "out_"), operation)

    def _table(self, operation: Operation) -> None:
        graph = self.graph
        graph.keep(operation.outputs["out"], self._looked_up(graph.wide(operation.inputs["x"]), operation))

    def _add(self, operation: Operation) -> None:
        graph = self.graph
        total = graph.node("Add", graph.wide(operation.inputs["x"]), graph.wide(operation.inputs["y"]))
        graph.keep(operation.outputs["out"], graph.sat(total, operation.number("bits")))

    def _router(self, operation: Operation) -> None:
        graph, logits = self.graph, self._rows(operation, "logits")
        slots = graph.numbers([operation.number("top_k")])
        top, index = graph.node("TopK", logits, slots, outputs=2, axis=-1, largest=1, sorted=1)
        graph.keep(operation.outputs["index"], index)
        largest = graph.node("ReduceMax", logits, axes=[-1], keepdims=1)
        chosen = self._powers(graph.node("Sub", largest, top), operation)
        over = chosen
        if operation.attributes["over"] == "all":
            over = self._powers(graph.node("Sub", largest, logits), operation)
        bits = operation.number("reciprocal_bits")
        reciprocal = self._reciprocal(graph.sum(over, -1), UNIT_BITS + bits)
        weights = graph.round_shift(graph.node("Mul", chosen, reciprocal), bits)
        graph.keep(operation.outputs["weights"], weights)

    def _experts(self, operation: Operation) -> None:
        """Each expert is given the positions that chose it, and what it makes of them goes where they came from."""
        graph, x, outputs = self.graph, operation.inputs["x"], operation.outputs
        index, experts = graph.wide(operation.inputs["index"]), len(self._held(operation, "up_bias"))
        shape = graph.node("Shape", operation.inputs["index"])
        roles = ("up_accumulators", "hidden", "active", "down_accumulators", "outputs")
        made: dict[str, str] = {}
        for role in roles:
            width = graph.numbers([self.shapes[outputs[role]][-1]])
            zero = graph.node("Concat", shape, width, axis=0)
            made[role] = graph.node("Expand", graph.number(0), zero)
        for expert in range(experts):
            chose = graph.node("NonZero", graph.node("Equal", index, graph.number(expert)))
            places = graph.node("Transpose", chose, perm=[1, 0])  # [tokens, 3]: image, position, slot
            where = graph.node("Slice", places, graph.numbers([0]), graph.numbers([2]), graph.numbers([1]))
            found = self._expert(graph.node("GatherND", x, where), operation, expert)
            for role in roles:
                made[role] = graph.node("ScatterND", made[role], places, found[role])
        for role in roles:
            graph.keep(outputs[role], made[role])
        weights = graph.node("Unsqueeze", graph.wide(operation.inputs["weights"]), graph.numbers([-1]))
        total = graph.sum(graph.node("Mul", made["outputs"], weights), 2, keep=False)
        out = graph.sat(graph.round_shift(total, operation.number("unit_bits")), operation.number("bits"))
        graph.keep(outputs["out"], out)

    def _expert(self, tokens: str, operation: Operation, expert: int) -> dict[str, str]:
        """What an expert makes of its tokens [tokens, D], by role."""
        graph = self.graph
        up = self._sums(tokens, operation.inputs["x"], operation, "up_", expert)
        hidden = graph.sat(self._requantized(up, operation, "up_", expert), operation.number("hidden_bits"))
        active = self._looked_up(hidden, operation)
        register = operation.outputs["active"]
        narrow = graph.cast(active, graph.values[register].dtype)
        down = self._sums(narrow, register, operation, "down_", expert)
        outputs = graph.sat(self._requantized(down, operation, "down_", expert), operation.number("bits"))
        return {"up_accumulators": up, "hidden": hidden, "active": active, "down_accumulators": down,
                "outputs": outputs}  # fmt: skip

    def _first_token(self, operation: Operation) -> None:
        graph = self.graph
        first = graph.node("Gather", operation.inputs["x"], graph.number(0), axis=1)
        graph.keep(operation.outputs["out"], first)

    def _mean_tokens(self, operation: Operation) -> None:
        graph, prefix = self.graph, operation.number("prefix")
        ends = graph.numbers([prefix]), graph.numbers([self.shapes[operation.inputs["x"]][0]]), graph.numbers([1])
        rest = graph.node("Slice", graph.wide(operation.inputs["x"]), *ends)
        total = graph.sum(rest, 1, keep=False)
        graph.keep(operation.outputs["out"], graph.sat(self._scale(total, operation, ""), operation.number("bits")))
