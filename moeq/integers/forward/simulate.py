"""Simulated quantization: the same program in float64, by the real formulas.

With the program's own dyadic factors every whole number of it is that of the integer forward, exactly; with the real
numbers that the factors stand for (exact=False) it shows what fixed-point factors cost. Numbers are in units of
each value's scale; every rounding is floor(v + 1/2).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moeq.integers.arithmetic.fixed_point import OCTAVE_STEPS, UNIT_BITS
from moeq.integers.arithmetic.integer_norm import RECIPROCAL_BITS
from moeq.integers.arithmetic.integer_norm import UNIT_BITS as ROW_BITS
from moeq.integers.arithmetic.log_sqrt2 import ROOT, ROOT_BITS, STEPS
from moeq.integers.artifacts.integer import Operation
from moeq.integers.forward.program import Program, Roles, Step, execute
from moeq.integers.forward.reference import patches_of
from moeq.integers.forward.run import largest

Made = dict[str, Tensor]


def simulate(program: Program, codes: Tensor, exact: bool = True) -> dict[str, Tensor]:
    """Every value of the simulated forward of pixel codes [B, C, H, W], float64.

    exact: with the program's dyadic factors; else with real ones, where values that are no codes (sums, rows,
    denominators) are real numbers in units of their own.
    """
    steps: Mapping[str, Step] = _Simulation(program, exact).steps()
    return execute(program, codes.double(), steps)


def rounded(values: Tensor) -> Tensor:
    """floor(values + 1/2)."""
    return torch.floor(values + 0.5)


def clipped(values: Tensor, bits: int) -> Tensor:
    return values.clamp(-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1)


class _Simulation:
    """The steps of a program in float64."""

    def __init__(self, program: Program, exact: bool) -> None:
        self.reals, self.exact = program.reals, exact

    def steps(self) -> dict[str, Step]:
        return {
            "patches": lambda operation, given, _: {"out": patches_of(given["x"], operation.number("patch_size"))},
            "linear": self.linear,
            "tokens": self.tokens,
            "layer_norm": self.layer_norm if self.exact else self.real_layer_norm,
            "log_attention": self.log_attention,
            "uniform_attention": self.uniform_attention,
            "table": lambda _, given, held: {"out": self.looked_up(given["x"], held["table"])},
            "add": lambda operation, given, _: {"out": clipped(given["x"] + given["y"], operation.number("bits"))},
            "router": self.router,
            "experts": self.experts,
            "first_token": lambda _, given, held: {"out": given["x"][:, 0]},
            "mean_tokens": self.mean_tokens,
        }

    def factor(self, operation: Operation, prefix: str, held: Roles | None = None) -> Tensor:
        """A factor by name: multiplier * 2**-shift, of tensors where `held` is given, or the real one."""
        if not self.exact:
            return self.reals[f"{operation.name}.{prefix}factor"]
        if held is not None:
            return held[f"{prefix}multiplier"].double() * torch.exp2(-held[f"{prefix}shift"].double())
        multiplier, shift = operation.number(f"{prefix}multiplier"), operation.number(f"{prefix}shift")
        return torch.tensor(multiplier * 2.0**-shift, dtype=torch.float64)

    def sums(
        self, operation: Operation, values: Tensor, held: Roles, prefix: str = "", expert: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The sums of products of a linear, or of one expert's, and those times its factor, rounded."""
        weight, factor = held[f"{prefix}weight"].double(), self.factor(operation, prefix, held)
        bias = held[f"{prefix}bias"].double() if self.exact else self.reals[f"{operation.name}.{prefix}bias"]
        if expert is not None:
            weight, factor, bias = weight[expert], factor[expert], bias[expert]
        sums = values @ weight.T + bias
        return sums, rounded(sums * factor)

    def looked_up(self, codes: Tensor, table: Tensor) -> Tensor:
        return table.double()[codes.long() + len(table) // 2]

    def linear(self, operation: Operation, given: Roles, held: Roles) -> Made:
        sums, out = self.sums(operation, given["x"], held)
        return {"accumulators": sums, "out": clipped(out, operation.number("bits"))}

    def tokens(self, operation: Operation, given: Roles, held: Roles) -> Made:
        patches = clipped(given["x"] + held["position"], operation.number("bits"))
        return {"out": torch.cat([held["prefix"].double().expand(len(patches), -1, -1), patches], 1)}

    def layer_norm(self, operation: Operation, given: Roles, held: Roles) -> Made:
        """Mean and variance of the row, times D and D**2 so that they are whole."""
        rows, size = given["x"], given["x"].shape[-1]
        total = rows.sum(-1, keepdim=True)
        spread = size * rows.square().sum(-1, keepdim=True) - total.square() + operation.number("epsilon")
        up = torch.floor((52 - torch.frexp(spread).exponent) / 2.0)  # the root grows by 2**up
        reciprocal = torch.floor(2.0**RECIPROCAL_BITS / torch.floor(torch.sqrt(spread * torch.exp2(2 * up))))
        unit = rounded((size * rows - total) * reciprocal * torch.exp2(up - (RECIPROCAL_BITS - ROW_BITS)))
        scale = 2.0 ** -(operation.number("gain_bits") + ROW_BITS)
        out = rounded((unit * held["gain"] + held["bias"]) * scale)
        return {"rows": unit, "out": clipped(out, operation.number("bits"))}

    def real_layer_norm(self, operation: Operation, given: Roles, held: Roles) -> Made:
        rows, size = given["x"], given["x"].shape[-1]
        gain, bias, epsilon = (self.reals[f"{operation.name}.{part}"] for part in ("gain", "bias", "epsilon"))
        spread = rows.var(-1, unbiased=False, keepdim=True) + epsilon / size**2
        unit = (rows - rows.mean(-1, keepdim=True)) / spread.sqrt()
        return {"rows": unit * 2.0**ROW_BITS, "out": clipped(rounded(unit * gain + bias), operation.number("bits"))}

    def heads(self, operation: Operation, given: Roles) -> tuple[Tensor, Tensor, Tensor]:
        """Scores [B, h, Q, K], differences from the largest, values [B, h, K, d]."""
        heads = operation.number("heads")
        query, key, value = (given[part].unflatten(-1, (heads, -1)).transpose(1, 2) for part in
                             ("query", "key", "value"))  # fmt: skip
        scores = query @ key.mT
        return scores, scores.amax(-1, keepdim=True) - scores, value

    def whole(self, mixed: Tensor, operation: Operation) -> Tensor:
        return clipped(rounded(mixed).transpose(1, 2).flatten(2), operation.number("bits"))

    def powers(self, differences: Tensor, operation: Operation, held: Roles) -> Tensor:
        """exp(-difference) in units of 2**-15, by the table or as it is."""
        steps = differences * self.factor(operation, "power_")
        if not self.exact:
            return torch.exp2(-steps / OCTAVE_STEPS) * 2.0**UNIT_BITS
        steps = rounded(steps)
        whole = torch.floor(steps / OCTAVE_STEPS)
        entries = held["power_table"].double()[(steps - whole * OCTAVE_STEPS).long()]
        return torch.floor(entries * torch.exp2(-whole))

    def log_attention(self, operation: Operation, given: Roles, held: Roles) -> Made:
        steps = STEPS[str(operation.attributes["softmax"])]
        scores, differences, values = self.heads(operation, given)
        top = 2 ** operation.number("attention_bits") - 1
        codes = rounded(differences * self.factor(operation, "code_")).clamp(max=top)
        dropped = operation.attributes["dropped_from"]
        odd = torch.remainder(codes, 2) == 1 if steps == 2 else torch.zeros_like(codes, dtype=torch.bool)
        weight = torch.exp2(-torch.ceil(codes / steps))
        if dropped is not None:
            weight = torch.where(codes >= float(dropped), 0.0, weight)
        unit = 2.0 ** operation.number("left")
        parts = [torch.where(odd, 0.0, weight) * unit, torch.where(odd, weight, 0.0) * unit]
        even_sum, odd_sum = (part @ values for part in parts)
        numerator = self.with_root(even_sum, odd_sum)
        if operation.attributes["denominator"] == "exact":
            total = self.powers(differences, operation, held).sum(-1, keepdim=True)
        else:
            total = self.with_root(*(part.sum(-1, keepdim=True) for part in parts))
        bits, base = operation.number("reciprocal_bits"), 2.0 ** operation.number("unit_bits")
        row = self.row(total, base, bits, operation, "out_")
        shift = operation.number("out_shift") - 16
        return {
            "scores": scores,
            "codes": codes,
            "even": even_sum,
            "odd": odd_sum,
            "denominator": total.squeeze(-1),
            "row": row.squeeze(-1),
            "out": self.whole(numerator * row / (unit * 2.0 ** (bits + shift)), operation),
        }

    def with_root(self, even: Tensor, odd: Tensor) -> Tensor:
        return even + (rounded(odd * (ROOT / 2**ROOT_BITS)) if self.exact else odd * 2**0.5)

    def row(self, total: Tensor, base: float, bits: int, operation: Operation, prefix: str) -> Tensor:
        """The factor over the denominator, with `bits` plus the shift less 16 fractional bits."""
        if not self.exact:
            shift = operation.number(f"{prefix}shift") - 16
            return base / total * self.factor(operation, prefix) * 2.0 ** (bits + shift)
        reciprocal = torch.floor(base * 2.0**bits / total)
        return rounded(reciprocal * (operation.number(f"{prefix}multiplier") * 2.0**-16))

    def uniform_attention(self, operation: Operation, given: Roles, held: Roles) -> Made:
        scores, differences, values = self.heads(operation, given)
        numerators = self.powers(differences, operation, held)
        total = numerators.sum(-1, keepdim=True)
        bits = operation.number("reciprocal_bits")
        row = self.row(total, 2.0**UNIT_BITS, bits, operation, "code_")
        shift = UNIT_BITS + bits + operation.number("code_shift") - 16
        codes = rounded(numerators * row * 2.0**-shift).clamp(max=2 ** operation.number("attention_bits") - 1)
        sums = codes @ values
        return {
            "scores": scores,
            "numerators": numerators,
            "denominator": total.squeeze(-1),
            "row": row.squeeze(-1),
            "codes": codes,
            "accumulators": sums,
            "out": self.whole(sums * self.factor(operation, "out_"), operation),
        }

    def router(self, operation: Operation, given: Roles, held: Roles) -> Made:
        sums, logits = self.sums(operation, given["x"], held)
        logits = clipped(logits, operation.number("bits"))
        top, index = largest(logits, operation.number("top_k"))
        over = top if operation.attributes["over"] == "chosen" else logits
        total = self.powers(top[..., :1] - over, operation, held).sum(-1, keepdim=True)
        weights = self.powers(top[..., :1] - top, operation, held)
        if self.exact:
            bits = operation.number("reciprocal_bits")
            weights = weights * torch.floor(2.0 ** (UNIT_BITS + bits) / total) * 2.0**-bits
        else:
            weights = weights / total * 2.0**UNIT_BITS
        return {"accumulators": sums, "logits": logits, "index": index, "weights": rounded(weights)}

    def experts(self, operation: Operation, given: Roles, held: Roles) -> Made:
        tokens, index = given["x"].flatten(0, -2), given["index"].flatten(0, -2)
        inner, size = held["up_bias"].shape[-1], held["down_bias"].shape[-1]
        up, hidden, active = (tokens.new_empty(*index.shape, inner) for _ in range(3))
        down, outputs = (tokens.new_empty(*index.shape, size) for _ in range(2))
        for e in index.unique().tolist():
            at = torch.where(index == e)
            up[at], made = self.sums(operation, tokens[at[0]], held, "up_", e)
            hidden[at] = clipped(made, operation.number("hidden_bits"))
            active[at] = self.looked_up(hidden[at], held["table"])
            down[at], made = self.sums(operation, active[at], held, "down_", e)
            outputs[at] = clipped(made, operation.number("bits"))
        shares = given["weights"].flatten(0, -2).unsqueeze(-1) * 2.0 ** -operation.number("unit_bits")
        out = clipped(rounded((outputs * shares).sum(1)), operation.number("bits"))
        found = {"up_accumulators": up, "hidden": hidden, "active": active, "down_accumulators": down,
                 "outputs": outputs, "out": out}  # fmt: skip
        return {role: values.unflatten(0, given["x"].shape[:-1]) for role, values in found.items()}

    def mean_tokens(self, operation: Operation, given: Roles, held: Roles) -> Made:
        total = given["x"][:, operation.number("prefix") :].sum(1)
        return {"out": clipped(rounded(total * self.factor(operation, "")), operation.number("bits"))}
