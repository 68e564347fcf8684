"""What the lowering of every operation needs: scales, constants, proven widths, linears."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moeq.integers.arithmetic.fixed_point import ACCUMULATOR_BITS, check_fits, dyadic, power_table
from moeq.integers.arithmetic.integer_norm import widest_row
from moeq.integers.artifacts.integer import Attribute, Operation, Value
from moeq.integers.forward.description import Linear, ViT
from moeq.recipe import IntegerSection

HEADROOM = 2.0  # of residual stream, router logits and logits over calibration
PIXEL_BITS = 8
LARGEST_BIAS = 2.0**30


class Builder:
    """Collects operations, constants, values and the real numbers behind them."""

    def __init__(
        self, vit: ViT, ranges: dict[str, float], section: IntegerSection, norm_scales: dict[str, float]
    ) -> None:
        self.vit, self.ranges, self.section, self.norm_scales = vit, ranges, section, norm_scales
        self.operations: list[Operation] = []
        self.constants: dict[str, Tensor] = {"power_table": power_table()}
        self.reals: dict[str, Tensor] = {}
        bits = widest_row(len(vit.head.weight[0]))
        self.residual = Value(bits=bits, scale=self.scale_of("residual", bits, HEADROOM))
        self.values: dict[str, Value] = {
            "pixels": Value(bits=PIXEL_BITS, scale=self.scale_of("pixels", PIXEL_BITS))
            if vit.pixel_scale is None
            else Value(bits=PIXEL_BITS, signed=False, scale=vit.pixel_scale)
        }

    def scale_of(self, name: str, bits: int, headroom: float = 1.0) -> float:
        """By what codes of `bits` bits reach the measured range of a name."""
        return self.ranges[name] * headroom / float(2 ** (bits - 1) - 1)

    def value(self, name: str, bits: int, headroom: float = 1.0) -> Value:
        """A register for what was measured under a name."""
        return Value(bits=bits, scale=self.scale_of(name, bits, headroom))

    def add(
        self,
        name: str,
        kind: str,
        inputs: dict[str, str],
        values: dict[str, Value],
        *,
        tensors: dict[str, str] | None = None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> str:
        """An operation and what it makes, by role: `out` has the operation's name, the others add their role to it."""
        outputs = {role: name if role == "out" else f"{name}.{role}" for role in values}
        given = {"inputs": inputs, "outputs": outputs, "tensors": tensors or {}, "attributes": dict(attributes or {})}
        self.operations.append(Operation(name=name, kind=kind, **given))
        self.values.update({outputs[role]: value for role, value in values.items()})
        return name

    def constant(self, name: str, tensor: Tensor) -> str:
        self.constants[name] = tensor.to(torch.int64)
        return name

    def factor(self, name: str, prefix: str, factor: float) -> dict[str, Attribute]:
        """The attributes of a scalar dyadic factor of the operation `name`."""
        nearest = dyadic(factor, where=name)
        self.reals[f"{name}.{prefix}factor"] = torch.tensor(factor, dtype=torch.float64)
        return {f"{prefix}multiplier": int(nearest.multiplier), f"{prefix}shift": int(nearest.shift)}

    def weights(
        self, name: str, prefix: str, linear: Linear, source: Value, out_scale: float, bits: int
    ) -> dict[str, str]:
        """The constants of a linear: weight, bias, multiplier and shift, [..., out, in] and [..., out].

        A row whose bias outweighs all of its weights has the scale of that bias.
        """
        top, in_scale = 2 ** (bits - 1) - 1, source.known_scale
        scale = torch.maximum(linear.weight.abs().amax(-1) / top, linear.bias.abs() / (in_scale * LARGEST_BIAS))
        scale = torch.where(scale > 0, scale, out_scale / in_scale)
        codes = torch.floor(linear.weight / scale.unsqueeze(-1) + 0.5)
        bias = linear.bias / (in_scale * scale)
        worst = int((codes.abs().sum(-1) * max(map(abs, source.ends)) + bias.abs() + 1).max())
        check_fits(worst, ACCUMULATOR_BITS, what="a sum of products", where=f"{name}.{prefix}weight")
        factor = in_scale * scale / out_scale
        nearest = dyadic(factor, where=name)
        self.reals |= {f"{name}.{prefix}factor": factor, f"{name}.{prefix}bias": bias}
        made = {
            "weight": codes,
            "bias": torch.floor(bias + 0.5),
            "multiplier": nearest.multiplier,
            "shift": nearest.shift,
        }
        return {prefix + role: self.constant(f"{name}.{prefix}{role}", tensor) for role, tensor in made.items()}

    def linear(self, name: str, linear: Linear, source: str, out: Value, bits: int) -> str:
        """The operation of a linear; bits: of its weights."""
        return self.add(
            name,
            "linear",
            {"x": source},
            {"accumulators": Value(bits=ACCUMULATOR_BITS), "out": out},
            tensors=self.weights(name, "", linear, self.values[source], out.known_scale, bits),
            attributes={"bits": out.bits},
        )
