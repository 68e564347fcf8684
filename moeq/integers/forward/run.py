"""The integer forward: every operation of a program on int64 tensors, as moeq/INTEGER.md defines it.

Letters: B images, S positions, T tokens (B*S), h heads, d head size, Q queries, K keys, E experts, k chosen experts,
I intermediate size, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeq.integers.arithmetic.fixed_point import UNIT_BITS, Dyadic, power, saturated, scaled, shift_half_up
from moeq.integers.arithmetic.integer_norm import norm_codes, normalized_rows
from moeq.integers.arithmetic.log_sqrt2 import (
    Logarithm,
    Widths,
    joined,
    normalized,
    numerator_codes,
    shift_and_parity,
    shifted_sums,
)
from moeq.integers.artifacts.integer import Operation
from moeq.integers.forward.program import Program, Roles
from moeq.integers.forward.reference import patches_of

Made = dict[str, Tensor]


def run(program: Program, codes: Tensor) -> dict[str, Tensor]:
    """Every value of the integer forward of pixel codes int64 [B, C, H, W]."""
    return Steps().execute(program, codes)


def factor_of(operation: Operation, prefix: str) -> Dyadic:
    """A scalar dyadic factor among an operation's attributes."""
    multiplier, shift = operation.number(f"{prefix}multiplier"), operation.number(f"{prefix}shift")
    return Dyadic(multiplier=torch.tensor(multiplier), shift=torch.tensor(shift))


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest logits [..., k] and their places; of equals the first."""
    ordered, places = torch.sort(logits, dim=-1, descending=True, stable=True)
    return ordered[..., :count], places[..., :count]


class Steps:
    """A method for every kind of operation: of an operation, its inputs and its constants, what it makes, by role.

    What only moves, adds and clips numbers serves the simulation, too, whose numbers are float64.
    """

    def execute(self, program: Program, codes: Tensor) -> dict[str, Tensor]:
        """Every value of a run by name, "pixels" (the codes given, [B, C, H, W]) first."""
        values = {"pixels": codes}
        for operation in program.operations:
            given = {role: values[name] for role, name in operation.inputs.items()}
            held = {role: program.constants[name] for role, name in operation.tensors.items()}
            made: Made = getattr(self, operation.kind)(operation, given, held)
            values.update({operation.outputs[role]: tensor for role, tensor in made.items()})
        return values

    def sums(
        self, operation: Operation, held: Roles, values: Tensor, prefix: str = "", expert: Any = ...
    ) -> tuple[Tensor, Tensor]:
        """The sums of products of a linear, or of one expert's, and those times its factor, rounded."""
        weight, bias, multiplier, shift = (
            held[f"{prefix}{role}"][expert] for role in ("weight", "bias", "multiplier", "shift")
        )
        sums = values @ weight.T + bias
        return sums, scaled(sums, Dyadic(multiplier=multiplier, shift=shift))

    def times(self, values: Tensor, operation: Operation, prefix: str) -> Tensor:
        """Values times a scalar factor of the operation, rounded."""
        return scaled(values, factor_of(operation, prefix))

    def shifted(self, values: Tensor, bits: int) -> Tensor:
        """values / 2**bits, rounded."""
        return shift_half_up(values, bits)

    def powers(self, differences: Tensor, operation: Operation, held: Roles) -> Tensor:
        """exp(-difference) in units of 2**-15, by the table."""
        return power(self.times(differences, operation, "power_"), held["power_table"])

    def reciprocal(self, total: Tensor, fractional_bits: int) -> Tensor:
        """2**fractional_bits / total, rounded down."""
        return torch.div(torch.tensor(1 << fractional_bits), total, rounding_mode="floor")

    def row(self, total: Tensor, unit_bits: int, bits: int, operation: Operation, prefix: str) -> Tensor:
        """A factor over a denominator of `unit_bits` fractional bits, with `bits` and the factor's shift less 16."""
        multiplier = operation.number(f"{prefix}multiplier")
        return self.shifted(self.reciprocal(total, unit_bits + bits) * multiplier, 16)

    def looked_up(self, codes: Tensor, table: Tensor) -> Tensor:
        return table[codes.long() + len(table) // 2].to(codes.dtype)

    def heads(self, operation: Operation, given: Roles) -> tuple[Tensor, Tensor, Tensor]:
        """Scores [B, h, Q, K], their differences from the largest of each query, and values [B, h, K, d]."""
        parts = (given[part].unflatten(-1, (operation.number("heads"), -1)) for part in ("query", "key", "value"))
        query, key, value = (part.transpose(1, 2) for part in parts)
        scores = query @ key.mT
        return scores, scores.amax(-1, keepdim=True) - scores, value

    def whole(self, mixed: Tensor, operation: Operation) -> Tensor:
        """Heads [B, h, Q, d] side by side again, [B, Q, D], saturated."""
        return saturated(mixed.transpose(1, 2).flatten(2), operation.number("bits"))

    def patches(self, operation: Operation, given: Roles, held: Roles) -> Made:
        return {"out": patches_of(given["x"], operation.number("patch_size"))}

    def linear(self, operation: Operation, given: Roles, held: Roles) -> Made:
        sums, out = self.sums(operation, held, given["x"])
        return {"accumulators": sums, "out": saturated(out, operation.number("bits"))}

    def tokens(self, operation: Operation, given: Roles, held: Roles) -> Made:
        patches = saturated(given["x"] + held["position"], operation.number("bits"))
        return {"out": torch.cat([held["prefix"].expand(len(patches), -1, -1), patches], 1)}

    def layer_norm(self, operation: Operation, given: Roles, held: Roles) -> Made:
        epsilon, gain_bits, bits = (operation.number(key) for key in ("epsilon", "gain_bits", "bits"))
        out = norm_codes(given["x"], held["gain"], held["bias"], gain_bits, epsilon, bits)
        return {"rows": normalized_rows(given["x"], epsilon), "out": out}

    def log_attention(self, operation: Operation, given: Roles, held: Roles) -> Made:
        kind: Logarithm = "log2" if operation.attributes["softmax"] == "log2" else "log-sqrt2"
        scores, differences, values = self.heads(operation, given)
        codes = numerator_codes(differences, factor_of(operation, "code_"), operation.number("attention_bits"))
        widths = Widths(
            left=operation.number("left"), dropped_from=None, reciprocal_bits=operation.number("reciprocal_bits")
        )
        shift, parity = shift_and_parity(codes, kind)
        dropped = operation.attributes["dropped_from"]
        kept = None if dropped is None else codes < operation.number("dropped_from")
        even, odd = shifted_sums(shift, parity, values, widths.left, kept)
        if operation.attributes["denominator"] == "exact":
            denominator = self.powers(differences, operation, held).sum(-1, keepdim=True)
        else:
            denominator = joined(*shifted_sums(shift, parity, torch.ones_like(values[..., :1]), widths.left, kept))
        out_factor = factor_of(operation, "out_")
        out, row = normalized(joined(even, odd), denominator, operation.number("unit_bits"), out_factor, widths)
        return {
            "scores": scores,
            "codes": codes,
            "even": even,
            "odd": odd,
            "denominator": denominator.squeeze(-1),
            "row": row.squeeze(-1),
            "out": self.whole(out, operation),
        }

    def uniform_attention(self, operation: Operation, given: Roles, held: Roles) -> Made:
        scores, differences, values = self.heads(operation, given)
        numerators = self.powers(differences, operation, held)
        denominator = numerators.sum(-1, keepdim=True)
        bits = operation.number("reciprocal_bits")
        row = self.row(denominator, UNIT_BITS, bits, operation, "code_")
        codes = self.shifted(numerators * row, UNIT_BITS + bits + operation.number("code_shift") - 16)
        codes = codes.clamp(max=2 ** operation.number("attention_bits") - 1)
        sums = codes @ values
        return {
            "scores": scores,
            "numerators": numerators,
            "denominator": denominator.squeeze(-1),
            "row": row.squeeze(-1),
            "codes": codes,
            "accumulators": sums,
            "out": self.whole(self.times(sums, operation, "out_"), operation),
        }

    def table(self, operation: Operation, given: Roles, held: Roles) -> Made:
        return {"out": self.looked_up(given["x"], held["table"])}

    def add(self, operation: Operation, given: Roles, held: Roles) -> Made:
        return {"out": saturated(given["x"] + given["y"], operation.number("bits"))}

    def router(self, operation: Operation, given: Roles, held: Roles) -> Made:
        sums, logits = self.sums(operation, held, given["x"])
        logits = saturated(logits, operation.number("bits"))
        top, index = largest(logits, operation.number("top_k"))
        over = top if operation.attributes["over"] == "chosen" else logits
        weights = self.shares(top[..., :1] - top, top[..., :1] - over, operation, held)
        return {"accumulators": sums, "logits": logits, "index": index, "weights": weights}

    def shares(self, chosen: Tensor, every: Tensor, operation: Operation, held: Roles) -> Tensor:
        """exp(-chosen) over the sum of exp(-every), both differences from the largest logit, in units of 2**-15."""
        bits, total = operation.number("reciprocal_bits"), self.powers(every, operation, held).sum(-1, keepdim=True)
        return self.shifted(self.powers(chosen, operation, held) * self.reciprocal(total, UNIT_BITS + bits), bits)

    def experts(self, operation: Operation, given: Roles, held: Roles) -> Made:
        """The chosen experts' values [B, S, k, ...], and the sum of their outputs by weight."""
        tokens, index = given["x"].flatten(0, -2), given["index"].flatten(0, -2)
        inner, size = held["up_bias"].shape[-1], held["down_bias"].shape[-1]
        up, hidden, active = (tokens.new_empty(*index.shape, inner) for _ in range(3))
        down, outputs = (tokens.new_empty(*index.shape, size) for _ in range(2))
        for expert in index.unique().tolist():
            at = torch.where(index == expert)
            up[at], made = self.sums(operation, held, tokens[at[0]], "up_", expert)
            hidden[at] = saturated(made, operation.number("hidden_bits"))
            active[at] = self.looked_up(hidden[at], held["table"])
            down[at], made = self.sums(operation, held, active[at], "down_", expert)
            outputs[at] = saturated(made, operation.number("bits"))
        total = (outputs * given["weights"].flatten(0, -2).unsqueeze(-1)).sum(1)
        out = saturated(self.shifted(total, operation.number("unit_bits")), operation.number("bits"))
        values = {"up_accumulators": up, "hidden": hidden, "active": active, "down_accumulators": down,
                  "outputs": outputs, "out": out}  # fmt: skip
        return {role: value.unflatten(0, given["x"].shape[:-1]) for role, value in values.items()}

    def first_token(self, operation: Operation, given: Roles, held: Roles) -> Made:
        return {"out": given["x"][:, 0]}

    def mean_tokens(self, operation: Operation, given: Roles, held: Roles) -> Made:
        total = given["x"][:, operation.number("prefix") :].sum(1)
        return {"out": saturated(self.times(total, operation, ""), operation.number("bits"))}
