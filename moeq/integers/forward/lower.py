"""From a description and measured ranges to a program of integer operations.

Scales: weights symmetric a row; activations symmetric a tensor; the residual stream, and all that is added to it, one
scale for the whole network with a bit of headroom over calibration, in as many bits (at most 20) as an exact LayerNorm
has room for. GELU is a table over 10-bit codes. Every width is proven here: QuantizationError where a register would
not hold the worst case.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from moeq.errors import QuantizationError
from moeq.integers.arithmetic.fixed_point import (
    ACCUMULATOR_BITS,
    EXACT_BITS,
    MAX_SHIFT,
    UNIT_BITS,
    check_fits,
    power_factor,
    saturated,
)
from moeq.integers.arithmetic.integer_norm import UNIT_BITS as ROW_BITS
from moeq.integers.arithmetic.integer_norm import gain_and_bias
from moeq.integers.arithmetic.log_sqrt2 import STEPS, widths
from moeq.integers.artifacts.integer import Attribute, Operation, Value
from moeq.integers.forward.builder import HEADROOM, Builder
from moeq.integers.forward.description import Activation, Block, Mixture, Norm, ViT
from moeq.integers.forward.program import Program
from moeq.integers.forward.settings import Settings

TABLE_BITS = 10
ROUTER_BITS = 16
LOGIT_BITS = 24
RECIPROCAL_BITS = 24


def lower(vit: ViT, ranges: dict[str, float], settings: Settings, norm_scales: dict[str, float]) -> Program:
    """The program of a description; norm_scales: s~ of the norms that were folded, by name ("blocks.0.norm1").

    ranges: as `measured` gives them for the same description.
    """
    lowering = _Lowering(vit, ranges, settings, norm_scales)
    lowering.embedding()
    for number, block in enumerate(vit.blocks):
        lowering.block(block, f"blocks.{number}")
    lowering.end()
    return Program(
        operations=tuple(lowering.operations),
        constants=lowering.constants,
        values=lowering.values,
        reals=lowering.reals,
        image_shape=vit.image_shape,
    )


class _Lowering(Builder):
    """The operations in order; `hidden` is the name of the residual stream's newest value."""

    hidden = "tokens"

    def embedding(self) -> None:
        pixels = self.values["pixels"]
        cut = Operation(
            name="patches",
            kind="patches",
            inputs={"x": "pixels"},
            outputs={"out": "patches"},
            attributes={"patch_size": self.vit.patch_size},
        )
        self.add(cut, out=pixels)
        patch = replace(self.vit.patch, bias=torch.zeros_like(self.vit.patch.bias))
        self.linear("embedding", patch, "patches", self.residual, self.settings.end_weights)
        # the bias joins the positions: pixels' products are coarser than the residual stream
        wide = {"prefix": self.vit.prefix, "position": self.vit.position + self.vit.patch.bias}
        held = {
            role: self.constant(f"tokens.{role}", torch.floor(tensor / self.residual_scale + 0.5))
            for role, tensor in wide.items()
        }
        for role, key in held.items():
            worst = int(self.constants[key].abs().max())
            check_fits(worst, self.residual_bits, what=f"a {role} embedding", where="tokens")
        tokens = Operation(
            name="tokens",
            kind="tokens",
            inputs={"x": "embedding"},
            outputs={"out": "tokens"},
            tensors=held,
            attributes={"bits": self.residual_bits},
        )
        self.add(tokens, out=self.residual)

    def norm(self, name: str, norm: Norm) -> str:
        bits = self.settings.activations
        scale = self.norm_scales.get(name) or self.scale_of(name, bits)
        gain, bias, gain_bits = gain_and_bias(norm.weight, norm.bias, scale, where=norm.path)
        spread = norm.epsilon * (len(norm.weight) / self.residual_scale) ** 2
        if spread >= 2.0 ** (EXACT_BITS - 2):
            raise QuantizationError(f"epsilon {norm.epsilon:g} outweighs the residual stream", where=norm.path)
        self.reals |= {
            f"{name}.gain": norm.weight / scale,
            f"{name}.bias": norm.bias / scale,
            f"{name}.epsilon": torch.tensor(spread, dtype=torch.float64),
        }
        operation = Operation(
            name=name,
            kind="layer_norm",
            inputs={"x": self.hidden},
            outputs={"rows": f"{name}.rows", "out": name},
            tensors={"gain": self.constant(f"{name}.gain", gain), "bias": self.constant(f"{name}.bias", bias)},
            attributes={"epsilon": max(1, round(spread)), "gain_bits": gain_bits, "bits": bits},
        )
        rows = Value(bits=ACCUMULATOR_BITS, scale=2.0**-ROW_BITS)
        self.add(operation, rows=rows, out=Value(bits=bits, scale=scale))
        return name

    def block(self, block: Block, name: str) -> None:
        bits = self.settings.activations
        normed = self.norm(f"{name}.norm1", block.norm1)
        for part, linear in {"query": block.query, "key": block.key, "value": block.value}.items():
            out = Value(bits=bits, scale=self.scale_of(f"{name}.{part}", bits))
            self.linear(f"{name}.{part}", linear, normed, out, self.settings.weights)
        if self.settings.softmax == "uniform":
            self.uniform_attention(f"{name}.attention")
        else:
            self.log_attention(f"{name}.attention")
        update = self.linear(f"{name}.proj", block.proj, f"{name}.attention", self.residual, self.settings.weights)
        self.sum(f"{name}.middle", update)
        normed = self.norm(f"{name}.norm2", block.norm2)
        if isinstance(block.update, Mixture):
            self.mixture(name, block.update, normed)
        else:
            hidden = Value(bits=TABLE_BITS, scale=self.scale_of(f"{name}.up", TABLE_BITS))
            self.linear(f"{name}.up", block.update.up, normed, hidden, self.settings.weights)
            self.activation(name, block.update.activation)
            self.linear(f"{name}.down", block.update.down, f"{name}.active", self.residual, self.settings.weights)
        self.sum(f"{name}.out", f"{name}.down")

    def sum(self, name: str, update: str) -> None:
        operation = Operation(
            name=name,
            kind="add",
            inputs={"x": self.hidden, "y": update},
            outputs={"out": name},
            attributes={"bits": self.residual_bits},
        )
        self.add(operation, out=self.residual)
        self.hidden = name

    def attention_parts(self, name: str) -> tuple[dict[str, str], dict[str, Attribute], float, float, Value]:
        """Inputs and common attributes, the scale of scores, s_v over the output's scale, and the output."""
        block = name.removesuffix(".attention")
        inputs = {part: f"{block}.{part}" for part in ("query", "key", "value")}
        size = len(self.vit.blocks[0].query.weight) // self.vit.num_heads
        bits = self.settings.activations
        check_fits(2 * size * 4 ** (bits - 1), ACCUMULATOR_BITS, what="a difference of scores", where=name)
        scores = self.known_scale(inputs["query"]) * self.known_scale(inputs["key"]) / math.sqrt(size)
        out = Value(bits=bits, scale=self.scale_of(name, bits))
        assert out.scale is not None
        common: dict[str, Attribute] = {
            "heads": self.vit.num_heads,
            "attention_bits": self.settings.attention,
            "bits": bits,
            **self.factor(name, "power_", power_factor(scores)),
        }
        return inputs, common, scores, self.known_scale(inputs["value"]) / out.scale, out

    def log_attention(self, name: str) -> None:
        kind = self.settings.softmax
        assert kind != "uniform"
        inputs, common, scores, ratio, out = self.attention_parts(name)
        keys = len(self.vit.prefix) + len(self.vit.position)
        held = widths(self.settings.attention, kind, keys, self.settings.activations, where=name)
        exact = self.settings.denominator == "exact"
        attributes = {
            **common,
            "softmax": kind,
            "denominator": self.settings.denominator,
            "unit_bits": UNIT_BITS if exact else held.left,
            "left": held.left,
            "dropped_from": held.dropped_from,
            "reciprocal_bits": held.reciprocal_bits,
            **self.factor(name, "code_", STEPS[kind] * scores / math.log(2)),
            **self.factor(name, "out_", ratio),
        }
        last = held.left + held.reciprocal_bits + int(attributes["out_shift"]) - 16  # type: ignore[arg-type]
        if not 0 <= last <= MAX_SHIFT:
            raise QuantizationError("scales of values and of their mean lie too far apart", where=name)
        roles = ("scores", "codes", "even", "odd", "denominator", "row")
        operation = Operation(
            name=name,
            kind="log_attention",
            inputs=inputs,
            outputs={role: f"{name}.{role}" for role in roles} | {"out": name},
            tensors={"power_table": "power_table"},
            attributes=attributes,
        )
        wide = Value(bits=ACCUMULATOR_BITS)
        self.add(
            operation,
            scores=Value(bits=ACCUMULATOR_BITS, scale=scores),
            codes=Value(bits=self.settings.attention, signed=False),
            even=wide,
            odd=wide,
            denominator=Value(bits=ACCUMULATOR_BITS, signed=False),
            row=wide,
            out=out,
        )

    def uniform_attention(self, name: str) -> None:
        inputs, common, scores, ratio, out = self.attention_parts(name)
        top = 2**self.settings.attention - 1
        step = min(1.0, self.ranges[f"{name}_weights"]) / top
        keys = len(self.vit.prefix) + len(self.vit.position)
        worst = keys * top * 2 ** (self.settings.activations - 1)
        check_fits(worst, ACCUMULATOR_BITS, what="a sum of products", where=name)
        roles = ("scores", "numerators", "denominator", "row", "codes", "accumulators")
        operation = Operation(
            name=name,
            kind="uniform_attention",
            inputs=inputs,
            outputs={role: f"{name}.{role}" for role in roles} | {"out": name},
            tensors={"power_table": "power_table"},
            attributes={
                **common,
                "reciprocal_bits": RECIPROCAL_BITS,
                **self.factor(name, "code_", 1 / step),
                **self.factor(name, "out_", step * ratio),
            },
        )
        wide = Value(bits=ACCUMULATOR_BITS)
        self.add(
            operation,
            scores=Value(bits=ACCUMULATOR_BITS, scale=scores),
            numerators=Value(bits=UNIT_BITS + 1, signed=False, scale=2.0**-UNIT_BITS),
            denominator=Value(bits=ACCUMULATOR_BITS, signed=False, scale=2.0**-UNIT_BITS),
            row=wide,
            codes=Value(bits=self.settings.attention, signed=False, scale=step),
            accumulators=wide,
            out=out,
        )

    def table(self, name: str, activation: Activation, hidden_scale: float, out_scale: float) -> str:
        """The constant of an activation: entry c + 512 is the code of activation(c*hidden_scale)."""
        top = 2 ** (TABLE_BITS - 1)
        values = activation(torch.arange(-top, top, dtype=torch.float64) * hidden_scale) / out_scale
        return self.constant(name, saturated(torch.floor(values + 0.5), self.settings.activations))

    def activation(self, name: str, activation: Activation) -> None:
        out = Value(bits=self.settings.activations, scale=self.scale_of(f"{name}.active", self.settings.activations))
        assert out.scale is not None
        table = self.table(f"{name}.active.table", activation, self.known_scale(f"{name}.up"), out.scale)
        operation = Operation(
            name=f"{name}.active",
            kind="table",
            inputs={"x": f"{name}.up"},
            outputs={"out": f"{name}.active"},
            tensors={"table": table},
        )
        self.add(operation, out=out)

    def mixture(self, name: str, mixture: Mixture, normed: str) -> None:
        self.router(f"{name}.router", mixture, normed)
        bits, experts = self.settings.activations, f"{name}.down"
        hidden = Value(bits=TABLE_BITS, scale=self.scale_of(f"{name}.up", TABLE_BITS))
        active = Value(bits=bits, scale=self.scale_of(f"{name}.active", bits))
        assert hidden.scale is not None
        assert active.scale is not None
        self.values |= {f"{experts}.hidden": hidden, f"{experts}.active": active}
        up = self.weights(experts, "up_", mixture.up, normed, hidden.scale, self.settings.weights)
        down = self.weights(
            experts, "down_", mixture.down, f"{experts}.active", self.residual_scale, self.settings.weights
        )
        table = self.table(f"{experts}.table", mixture.activation, hidden.scale, active.scale)
        roles = ("up_accumulators", "hidden", "active", "down_accumulators", "outputs")
        operation = Operation(
            name=experts,
            kind="experts",
            inputs={"x": normed, "index": f"{name}.router.index", "weights": f"{name}.router.weights"},
            outputs={role: f"{experts}.{role}" for role in roles} | {"out": experts},
            tensors={**up, "table": table, **down},
            attributes={"hidden_bits": TABLE_BITS, "bits": self.residual_bits, "unit_bits": UNIT_BITS},
        )
        sums = Value(bits=ACCUMULATOR_BITS)
        self.add(
            operation,
            up_accumulators=sums,
            hidden=hidden,
            active=active,
            down_accumulators=sums,
            outputs=self.residual,
            out=self.residual,
        )

    def router(self, name: str, mixture: Mixture, normed: str) -> None:
        scale = self.scale_of(name, ROUTER_BITS, HEADROOM)
        operation = Operation(
            name=name,
            kind="router",
            inputs={"x": normed},
            outputs={role: f"{name}.{role}" for role in ("accumulators", "logits", "index", "weights")},
            tensors={
                **self.weights(name, "", mixture.router, normed, scale, self.settings.end_weights),
                "power_table": "power_table",
            },
            attributes={
                "bits": ROUTER_BITS,
                "top_k": mixture.top_k,
                "over": mixture.over,
                "reciprocal_bits": RECIPROCAL_BITS,
                **self.factor(name, "power_", power_factor(scale)),
            },
        )
        self.add(
            operation,
            accumulators=Value(bits=ACCUMULATOR_BITS),
            logits=Value(bits=ROUTER_BITS, scale=scale),
            index=Value(bits=16, signed=False),
            weights=Value(bits=UNIT_BITS + 1, signed=False, scale=2.0**-UNIT_BITS),
        )

    def end(self) -> None:
        normed = self.norm("norm", self.vit.norm)
        kind, out = "first_token", self.values[normed]
        attributes: dict[str, Attribute] = {}
        if self.vit.pooling == "mean":
            bits = self.settings.activations
            kind, out = "mean_tokens", Value(bits=bits, scale=self.scale_of("pooled", bits))
            assert out.scale is not None
            mean = self.known_scale(normed) / (len(self.vit.position) * out.scale)
            attributes = {"prefix": len(self.vit.prefix), "bits": bits, **self.factor("pooled", "", mean)}
        pool = Operation(
            name="pooled", kind=kind, inputs={"x": normed}, outputs={"out": "pooled"}, attributes=attributes
        )
        self.add(pool, out=out)
        logits = Value(bits=LOGIT_BITS, scale=self.scale_of("logits", LOGIT_BITS, HEADROOM))
        self.linear("logits", self.vit.head, "pooled", logits, self.settings.end_weights)
