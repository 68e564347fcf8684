"""Simulated quantization: the same program in float64, by the real formulas.

With the program's own dyadic factors every whole number of it is that of the integer forward, exactly; with the real
numbers that the factors stand for (exact=False) it shows what fixed-point factors cost. Numbers are in units of
each value's scale; every rounding is floor(v + 1/2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeq.integers.arithmetic.fixed_point import OCTAVE_STEPS, UNIT_BITS, saturated
from moeq.integers.arithmetic.integer_norm import RECIPROCAL_BITS
from moeq.integers.arithmetic.integer_norm import UNIT_BITS as ROW_BITS
from moeq.integers.arithmetic.log_sqrt2 import ROOT, ROOT_BITS, STEPS
from moeq.integers.artifacts.integer import Operation
from moeq.integers.forward.program import Program, Roles
from moeq.integers.forward.run import Made, Steps


def simulate(program: Program, codes: Tensor, exact: bool = True) -> dict[str, Tensor]:
    """Every value of the simulated forward of pixel codes [B, C, H, W], float64.

    exact: with the program's dyadic factors; else with real ones, where values that are no codes (sums, rows,
    denominators) are real numbers in units of their own.
    """
    return _Simulation(program, exact).execute(program, codes.double())


def rounded(values: Tensor) -> Tensor:
    """floor(values + 1/2)."""
    return torch.floor(values + 0.5)


class _Simulation(Steps):
    """The steps of a program in float64: whatever is arithmetic of whole numbers has a formula of its own here."""

    def __init__(self, program: Program, exact: bool) -> None:
        self.reals, self.exact = program.reals, exact

    def factor(self, operation: Operation, prefix: str, held: Roles | None = None) -> Tensor:
        """A factor by name: multiplier * 2**-shift, of tensors where `held` is given, or the real one."""
        if not self.exact:
            return self.reals[f"{operation.name}.{prefix}factor"]
        if held is not None:
            return held[f"{prefix}multiplier"].double() * torch.exp2(-held[f"{prefix}shift"].double())
        multiplier, shift = operation.number(f"{prefix}multiplier"), operation.number(f"{prefix}shift")
        return torch.tensor(multiplier * 2.0**-shift, dtype=torch.float64)

    def sums(
        self, operation: Operation, held: Roles, values: Tensor, prefix: str = "", expert: Any = ...
    ) -> tuple[Tensor, Tensor]:
        bias = held[f"{prefix}bias"].double() if self.exact else self.reals[f"{operation.name}.{prefix}bias"]
        sums = values @ held[f"{prefix}weight"][expert].double().T + bias[expert]
        return sums, rounded(sums * self.factor(operation, prefix, held)[expert])

    def times(self, values: Tensor, operation: Operation, prefix: str) -> Tensor:
        return rounded(values * self.factor(operation, prefix))

    def shifted(self, values: Tensor, bits: int) -> Tensor:
        return rounded(values * 2.0**-bits)

    def layer_norm(self, operation: Operation, given: Roles, held: Roles) -> Made:
        """Mean and variance of the row, times D and D**2 so that they are whole; or as they are."""
        rows, size, bits = given["x"], given["x"].shape[-1], operation.number("bits")
        if not self.exact:
            gain, bias, epsilon = (self.reals[f"{operation.name}.{part}"] for part in ("gain", "bias", "epsilon"))
            spread = rows.var(-1, unbiased=False, keepdim=True) + epsilon / size**2
            unit = (rows - rows.mean(-1, keepdim=True)) / spread.sqrt()
            return {"rows": unit * 2.0**ROW_BITS, "out": saturated(rounded(unit * gain + bias), bits)}
        total = rows.sum(-1, keepdim=True)
        spread = size * rows.square().sum(-1, keepdim=True) - total.square() + operation.number("epsilon")
        up = torch.floor((52 - torch.frexp(spread).exponent) / 2.0)  # the root grows by 2**up
        reciprocal = torch.floor(2.0**RECIPROCAL_BITS / torch.floor(torch.sqrt(spread * torch.exp2(2 * up))))
        unit = rounded((size * rows - total) * reciprocal * torch.exp2(up - (RECIPROCAL_BITS - ROW_BITS)))
        scale = 2.0 ** -(operation.number("gain_bits") + ROW_BITS)
        return {"rows": unit, "out": saturated(rounded((unit * held["gain"] + held["bias"]) * scale), bits)}

    def powers(self, differences: Tensor, operation: Operation, held: Roles) -> Tensor:
        """exp(-difference) in units of 2**-15, by the table or as it is."""
        steps = differences * self.factor(operation, "power_")
        if not self.exact:
            return torch.exp2(-steps / OCTAVE_STEPS) * 2.0**UNIT_BITS
        steps = rounded(steps)
        octaves = torch.floor(steps / OCTAVE_STEPS)
        entries = held["power_table"].double()[(steps - octaves * OCTAVE_STEPS).long()]
        return torch.floor(entries * torch.exp2(-octaves))

    def log_attention(self, operation: Operation, given: Roles, held: Roles) -> Made:
        steps = STEPS[str(operation.attributes["softmax"])]
        scores, differences, values = self.heads(operation, given)
        top = 2 ** operation.number("attention_bits") - 1
        codes = self.times(differences, operation, "code_").clamp(max=top)
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
        bits = operation.number("reciprocal_bits")
        row = self.row(total, operation.number("unit_bits"), bits, operation, "out_")
        shift = operation.number("out_shift") - 16
        return {
            "scores": scores,
            "codes": codes,
            "even": even_sum,
            "odd": odd_sum,
            "denominator": total.squeeze(-1),
            "row": row.squeeze(-1),
            "out": self.whole(rounded(numerator * row / (unit * 2.0 ** (bits + shift))), operation),
        }

    def with_root(self, even: Tensor, odd: Tensor) -> Tensor:
        return even + (rounded(odd * (ROOT / 2**ROOT_BITS)) if self.exact else odd * 2**0.5)

    def reciprocal(self, total: Tensor, fractional_bits: int) -> Tensor:
        return torch.floor(2.0**fractional_bits / total)

    def row(self, total: Tensor, unit_bits: int, bits: int, operation: Operation, prefix: str) -> Tensor:
        if self.exact:
            return super().row(total, unit_bits, bits, operation, prefix)
        shift = operation.number(f"{prefix}shift") - 16
        return 2.0**unit_bits / total * self.factor(operation, prefix) * 2.0 ** (bits + shift)

    def shares(self, chosen: Tensor, every: Tensor, operation: Operation, held: Roles) -> Tensor:
        if self.exact:
            return super().shares(chosen, every, operation, held)
        total = self.powers(every, operation, held).sum(-1, keepdim=True)
        return rounded(self.powers(chosen, operation, held) / total * 2.0**UNIT_BITS)
