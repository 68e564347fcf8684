"""What the lowering of every operation needs: scales, constants, proven widths, linears."""

from __future__ import annotations

import torch
from torch import Tensor

from moeq.integers.arithmetic.fixed_point import ACCUMULATOR_BITS, check_fits, dyadic, power_table
from moeq.integers.arithmetic.integer_norm import widest_row
from moeq.integers.artifacts.integer import Attribute, Operation, Value
from moeq.integers.forward.description import Linear, ViT
from moeq.integers.forward.settings import Settings

HEADROOM = 2.0  # of residual stream, router logits and logits over calibration
PIXEL_BITS = 8
LARGEST_BIAS = 2.0**30


class Builder:
    """Collects operations, constants, values and the real numbers behind them."""

    def __init__(self, vit: ViT, ranges: dict[str, float], settings: Settings, norm_scales: dict[str, float]) -> None:
        self.vit, self.ranges, self.settings, self.norm_scales = vit, ranges, settings, norm_scales
        self.operations: list[Operation] = []
        self.constants: dict[str, Tensor] = {"power_table": power_table()}
        self.reals: dict[str, Tensor] = {}
        self.residual_bits = widest_row(len(vit.head.weight[0]))
        self.residual_scale = ranges["residual"] * HEADROOM / (2 ** (self.residual_bits - 1) - 1)
        own = vit.pixel_scale
        pixels = (
            Value(bits=PIXEL_BITS, scale=ranges["pixels"] / (2 ** (PIXEL_BITS - 1) - 1))
            if own is None
            else Value(bits=PIXEL_BITS, signed=False, scale=own)
        )
        self.values: dict[str, Value] = {"pixels": pixels}

    def scale_of(self, name: str, bits: int, headroom: float = 1.0) -> float:
        return self.ranges[name] * headroom / float(2 ** (bits - 1) - 1)

    def known_scale(self, name: str) -> float:
        scale = self.values[name].scale
        assert scale is not None
        return scale

    def add(self, operation: Operation, **values: Value) -> None:
        """An operation and what it makes, by role."""
        self.operations.append(operation)
        assert set(values) == set(operation.outputs)
        self.values.update({operation.outputs[role]: value for role, value in values.items()})

    def constant(self, name: str, tensor: Tensor) -> str:
        self.constants[name] = tensor.to(torch.int64)
        return name

    def factor(self, name: str, prefix: str, factor: float) -> dict[str, Attribute]:
        """The attributes of a scalar dyadic factor of the operation `name`."""
        found = dyadic(factor, where=name)
        self.reals[f"{name}.{prefix}factor"] = torch.tensor(factor, dtype=torch.float64)
        return {f"{prefix}multiplier": int(found.multiplier), f"{prefix}shift": int(found.shift)}

    def weights(
        self, name: str, prefix: str, linear: Linear, source: str, out_scale: float, bits: int
    ) -> dict[str, str]:
        """The constants of a linear: weight, bias, multiplier and shift, [..., out, in] and [..., out].

        A row whose bias outweighs all of its weights has the scale of that bias.
        """
        given, top = self.values[source], 2 ** (bits - 1) - 1
        in_scale = self.known_scale(source)
        scale = torch.maximum(linear.weight.abs().amax(-1) / top, linear.bias.abs() / (in_scale * LARGEST_BIAS))
        scale = torch.where(scale > 0, scale, out_scale / in_scale)
        codes = torch.floor(linear.weight / scale.unsqueeze(-1) + 0.5)
        bias = linear.bias / (in_scale * scale)
        largest = 2 ** (given.bits - 1) if given.signed else 2**given.bits - 1
        worst = int((codes.abs().sum(-1) * largest + bias.abs() + 1).max())
        check_fits(worst, ACCUMULATOR_BITS, what="a sum of products", where=f"{name}.{prefix}weight")
        factor = in_scale * scale / out_scale
        found = dyadic(factor, where=name)
        self.reals |= {f"{name}.{prefix}factor": factor, f"{name}.{prefix}bias": bias}
        made = {
            "weight": codes,
            "bias": torch.floor(bias + 0.5),
            "multiplier": found.multiplier,
            "shift": found.shift,
        }
        return {prefix + role: self.constant(f"{name}.{prefix}{role}", tensor) for role, tensor in made.items()}

    def linear(self, name: str, linear: Linear, source: str, out: Value, bits: int) -> str:
        assert out.scale is not None
        operation = Operation(
            name=name,
            kind="linear",
            inputs={"x": source},
            outputs={"accumulators": f"{name}.accumulators", "out": name},
            tensors=self.weights(name, "", linear, source, out.scale, bits),
            attributes={"bits": out.bits},
        )
        self.add(operation, accumulators=Value(bits=ACCUMULATOR_BITS), out=out)
        return name

    @property
    def residual(self) -> Value:
        return Value(bits=self.residual_bits, scale=self.residual_scale)
