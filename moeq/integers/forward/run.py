"""The integer forward: every operation of a program on int64 tensors, as moeq/INTEGER.md defines it.

Letters: B images, S positions, T tokens (B*S), h heads, d head size, Q queries, K keys, E experts, k chosen experts,
I intermediate size, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from moeq.integers.forward.program import Program, Roles, Step, execute
from moeq.integers.forward.reference import patches_of

Made = dict[str, Tensor]


def run(program: Program, codes: Tensor) -> dict[str, Tensor]:
    """Every value of the integer forward of pixel codes int64 [B, C, H, W]."""
    return execute(program, codes, STEPS_OF)


def factor_of(operation: Operation, prefix: str) -> Dyadic:
    """A scalar dyadic factor among an operation's attributes."""
    multiplier, shift = operation.number(f"{prefix}multiplier"), operation.number(f"{prefix}shift")
    return Dyadic(multiplier=torch.tensor(multiplier), shift=torch.tensor(shift))


def _patches(operation: Operation, given: Roles, held: Roles) -> Made:
    return {"out": patches_of(given["x"], operation.number("patch_size"))}


def _sums(held: Roles, values: Tensor, prefix: str = "", expert: Any = ...) -> tuple[Tensor, Tensor]:
    """The sums of products of a linear, or of one expert's, and those times its factor, rounded."""
    weight, bias, multiplier, shift = (
        held[f"{prefix}{role}"][expert] for role in ("weight", "bias", "multiplier", "shift")
    )
    sums = values @ weight.T + bias
    return sums, scaled(sums, Dyadic(multiplier=multiplier, shift=shift))


def _linear(operation: Operation, given: Roles, held: Roles) -> Made:
    sums, out = _sums(held, given["x"])
    return {"accumulators": sums, "out": saturated(out, operation.number("bits"))}


def _tokens(operation: Operation, given: Roles, held: Roles) -> Made:
    patches = saturated(given["x"] + held["position"], operation.number("bits"))
    return {"out": torch.cat([held["prefix"].expand(len(patches), -1, -1), patches], 1)}


def _layer_norm(operation: Operation, given: Roles, held: Roles) -> Made:
    epsilon, gain_bits, bits = (operation.number(key) for key in ("epsilon", "gain_bits", "bits"))
    out = norm_codes(given["x"], held["gain"], held["bias"], gain_bits, epsilon, bits)
    return {"rows": normalized_rows(given["x"], epsilon), "out": out}


def heads(operation: Operation, given: Roles) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B, h, Q, K], their differences from the largest of each query, and values [B, h, K, d]."""
    parts = (given[part].unflatten(-1, (operation.number("heads"), -1)) for part in ("query", "key", "value"))
    query, key, value = (part.transpose(1, 2) for part in parts)
    scores = query @ key.mT
    return scores, scores.amax(-1, keepdim=True) - scores, value


def whole(mixed: Tensor, operation: Operation) -> Tensor:
    """Heads [B, h, Q, d] side by side again, [B, Q, D], saturated."""
    return saturated(mixed.transpose(1, 2).flatten(2), operation.number("bits"))


def _log_attention(operation: Operation, given: Roles, held: Roles) -> Made:
    kind: Logarithm = "log2" if operation.attributes["softmax"] == "log2" else "log-sqrt2"
    scores, differences, values = heads(operation, given)
    codes = numerator_codes(differences, factor_of(operation, "code_"), operation.number("attention_bits"))
    widths = Widths(
        left=operation.number("left"), dropped_from=None, reciprocal_bits=operation.number("reciprocal_bits")
    )
    shift, parity = shift_and_parity(codes, kind)
    even, odd = shifted_sums(shift, parity, values, widths.left)
    if operation.attributes["denominator"] == "exact":
        steps = scaled(differences, factor_of(operation, "power_"))
        denominator = power(steps, held["power_table"]).sum(-1, keepdim=True)
    else:
        denominator = joined(*shifted_sums(shift, parity, torch.ones_like(values[..., :1]), widths.left))
    out_factor = factor_of(operation, "out_")
    out, row = normalized(joined(even, odd), denominator, operation.number("unit_bits"), out_factor, widths)
    return {
        "scores": scores,
        "codes": codes,
        "even": even,
        "odd": odd,
        "denominator": denominator.squeeze(-1),
        "row": row.squeeze(-1),
        "out": whole(out, operation),
    }


def _uniform_attention(operation: Operation, given: Roles, held: Roles) -> Made:
    scores, differences, values = heads(operation, given)
    numerators = power(scaled(differences, factor_of(operation, "power_")), held["power_table"])
    denominator = numerators.sum(-1, keepdim=True)
    bits, code_factor = operation.number("reciprocal_bits"), factor_of(operation, "code_")
    reciprocal = torch.div(torch.tensor(1 << (UNIT_BITS + bits)), denominator, rounding_mode="floor")
    row = shift_half_up(reciprocal * code_factor.multiplier, 16)
    codes = shift_half_up(numerators * row, UNIT_BITS + bits + code_factor.shift - 16)
    codes = codes.clamp(max=2 ** operation.number("attention_bits") - 1)
    sums = codes @ values
    return {
        "scores": scores,
        "numerators": numerators,
        "denominator": denominator.squeeze(-1),
        "row": row.squeeze(-1),
        "codes": codes,
        "accumulators": sums,
        "out": whole(scaled(sums, factor_of(operation, "out_")), operation),
    }


def _looked_up(codes: Tensor, table: Tensor) -> Tensor:
    return table[codes.long() + len(table) // 2].to(codes.dtype)


def _table(operation: Operation, given: Roles, held: Roles) -> Made:
    return {"out": _looked_up(given["x"], held["table"])}


def _add(operation: Operation, given: Roles, held: Roles) -> Made:
    return {"out": saturated(given["x"] + given["y"], operation.number("bits"))}


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest logits [..., k] and their places; of equals the first."""
    ordered, places = torch.sort(logits, dim=-1, descending=True, stable=True)
    return ordered[..., :count], places[..., :count]


def _router(operation: Operation, given: Roles, held: Roles) -> Made:
    sums, logits = _sums(held, given["x"])
    logits = saturated(logits, operation.number("bits"))
    top, index = largest(logits, operation.number("top_k"))
    over = top if operation.attributes["over"] == "chosen" else logits
    first, factor = top[..., :1], factor_of(operation, "power_")
    total = power(scaled(first - over, factor), held["power_table"]).sum(-1, keepdim=True)
    bits = operation.number("reciprocal_bits")
    reciprocal = torch.div(torch.tensor(1 << (UNIT_BITS + bits)), total, rounding_mode="floor")
    weights = shift_half_up(power(scaled(first - top, factor), held["power_table"]) * reciprocal, bits)
    return {"accumulators": sums, "logits": logits, "index": index, "weights": weights}


def experts(
    operation: Operation,
    given: Roles,
    held: Roles,
    sums: Callable[[Tensor, str, int], tuple[Tensor, Tensor]],
    shift: Callable[[Tensor, int], Tensor],
) -> Made:
    """The chosen experts' values [B, S, k, ...] and the sum of their outputs by weight; of int64, or of float64.

    sums: of values, the prefix of a linear's constants and an expert, as `_sums`; shift: as `shift_half_up`.
    """
    tokens, index = given["x"].flatten(0, -2), given["index"].flatten(0, -2)
    inner, size = held["up_bias"].shape[-1], held["down_bias"].shape[-1]
    up, hidden, active = (tokens.new_empty(*index.shape, inner) for _ in range(3))
    down, outputs = (tokens.new_empty(*index.shape, size) for _ in range(2))
    for expert in index.unique().tolist():
        at = torch.where(index == expert)
        up[at], made = sums(tokens[at[0]], "up_", expert)
        hidden[at] = saturated(made, operation.number("hidden_bits"))
        active[at] = _looked_up(hidden[at], held["table"])
        down[at], made = sums(active[at], "down_", expert)
        outputs[at] = saturated(made, operation.number("bits"))
    total = (outputs * given["weights"].flatten(0, -2).unsqueeze(-1)).sum(1)
    out = saturated(shift(total, operation.number("unit_bits")), operation.number("bits"))
    values = {"up_accumulators": up, "hidden": hidden, "active": active, "down_accumulators": down,
              "outputs": outputs, "out": out}  # fmt: skip
    return {role: value.unflatten(0, given["x"].shape[:-1]) for role, value in values.items()}


def _experts(operation: Operation, given: Roles, held: Roles) -> Made:
    return experts(operation, given, held, partial(_sums, held), shift_half_up)


def _first_token(operation: Operation, given: Roles, held: Roles) -> Made:
    return {"out": given["x"][:, 0]}


def _mean_tokens(operation: Operation, given: Roles, held: Roles) -> Made:
    total = given["x"][:, operation.number("prefix") :].sum(1)
    return {"out": saturated(scaled(total, factor_of(operation, "")), operation.number("bits"))}


STEPS_OF: dict[str, Step] = {
    "patches": _patches,
    "linear": _linear,
    "tokens": _tokens,
    "layer_norm": _layer_norm,
    "log_attention": _log_attention,
    "uniform_attention": _uniform_attention,
    "table": _table,
    "add": _add,
    "router": _router,
    "experts": _experts,
    "first_token": _first_token,
    "mean_tokens": _mean_tokens,
}
