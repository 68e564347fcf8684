"""From a description and measured ranges to a program of integer operations.

Scales: weights symmetric a row; activations symmetric a tensor; the residual stream, and all that is added to it, one
scale for the whole network with a bit of headroom over calibration, in as many bits (at most 20) as an exact LayerNorm
has room for. GELU is a table over 10-bit codes. Every width is proven here: QuantizationError where a register would
not hold the worst case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from moeq.errors import QuantizationError
from moeq.integers.arithmetic.fixed_point import ACCUMULATOR_BITS, UNIT_BITS, check_fits, power_factor, saturated
from moeq.integers.arithmetic.integer_norm import UNIT_BITS as ROW_BITS
from moeq.integers.arithmetic.integer_norm import gain_and_bias
from moeq.integers.arithmetic.log_sqrt2 import STEPS, Logarithm, widths
from moeq.integers.artifacts.integer import Attribute, Value
from moeq.integers.artifacts.integer_report import DroppedRow
from moeq.integers.forward.builder import HEADROOM, Builder
from moeq.integers.forward.description import Activation, Block, Mixture, Norm, ViT
from moeq.integers.forward.program import Program
from moeq.recipe import IntegerSection
from moeq_kernels.widths import EXACT_BITS, MAX_SHIFT

TABLE_BITS = 10
END_BITS = 8  # of the weights of patch embedding, router and head, the sensitive ends
ROUTER_BITS = 16
LOGIT_BITS = 24
RECIPROCAL_BITS = 24
SUMS = Value(bits=ACCUMULATOR_BITS)
POWERS = {"power_table": "power_table"}


def lower(
    vit: ViT,
    ranges: dict[str, float],
    section: IntegerSection,
    norm_scales: dict[str, float],
    dropped: Sequence[DroppedRow] = (),
) -> Program:
    """The program of a description; norm_scales: s~ of the norms that were folded, by name ("blocks.0.norm1").

    ranges, dropped: as `measured` and `dropped_codes` give them for the same description; without the latter, log
    softmaxes are as printed.
    """
    lowering = _Lowering(vit, ranges, section, norm_scales)
    lowering.dropped = {row.block: row.dropped_from for row in dropped}
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
        dropped=tuple(dropped),
    )


class _Lowering(Builder):
    """The operations in order; `hidden` is the name of the residual stream's newest value."""

    hidden = "tokens"
    dropped: Mapping[str, int | None] = {}

    def embedding(self) -> None:
        patches = {"patch_size": self.vit.patch_size}
        self.add("patches", "patches", {"x": "pixels"}, {"out": self.values["pixels"]}, attributes=patches)
        patch = replace(self.vit.patch, bias=torch.zeros_like(self.vit.patch.bias))
        self.linear("embedding", patch, "patches", self.residual, END_BITS)
        # the bias joins the positions: pixels' products are coarser than the residual stream
        wide = {"prefix": self.vit.prefix, "position": self.vit.position + self.vit.patch.bias}
        held = {
            role: self.constant(f"tokens.{role}", torch.floor(tensor / self.residual.known_scale + 0.5))
            for role, tensor in wide.items()
        }
        for role, key in held.items():
            worst = int(self.constants[key].abs().max())
            check_fits(worst, self.residual.bits, what=f"a {role} embedding", where="tokens")
        bits = {"bits": self.residual.bits}
        self.add("tokens", "tokens", {"x": "embedding"}, {"out": self.residual}, tensors=held, attributes=bits)

    def norm(self, name: str, norm: Norm) -> str:
        bits = self.section.activations
        scale = self.norm_scales.get(name) or self.scale_of(name, bits)
        gain, bias, gain_bits = gain_and_bias(norm.weight, norm.bias, scale, where=norm.path)
        spread = norm.epsilon * (len(norm.weight) / self.residual.known_scale) ** 2
        if spread >= 2.0 ** (EXACT_BITS - 2):
            raise QuantizationError(f"epsilon {norm.epsilon:g} outweighs the residual stream", where=norm.path)
        self.reals |= {
            f"{name}.gain": norm.weight / scale,
            f"{name}.bias": norm.bias / scale,
            f"{name}.epsilon": torch.tensor(spread, dtype=torch.float64),
        }
        return self.add(
            name,
            "layer_norm",
            {"x": self.hidden},
            {"rows": Value(bits=ACCUMULATOR_BITS, scale=2.0**-ROW_BITS), "out": Value(bits=bits, scale=scale)},
            tensors={"gain": self.constant(f"{name}.gain", gain), "bias": self.constant(f"{name}.bias", bias)},
            attributes={"epsilon": max(1, round(spread)), "gain_bits": gain_bits, "bits": bits},
        )

    def block(self, block: Block, name: str) -> None:
        bits, activations = self.section.weights, self.section.activations
        normed = self.norm(f"{name}.norm1", block.norm1)
        for part, linear in {"query": block.query, "key": block.key, "value": block.value}.items():
            self.linear(f"{name}.{part}", linear, normed, self.value(f"{name}.{part}", activations), bits)
        if self.section.softmax == "uniform":
            self.uniform_attention(f"{name}.attention")
        else:
            self.log_attention(f"{name}.attention", self.section.softmax)
        self.sum(f"{name}.middle", self.linear(f"{name}.proj", block.proj, f"{name}.attention", self.residual, bits))
        normed = self.norm(f"{name}.norm2", block.norm2)
        if isinstance(block.update, Mixture):
            self.mixture(name, block.update, normed)
        else:
            self.linear(f"{name}.up", block.update.up, normed, self.value(f"{name}.up", TABLE_BITS), bits)
            self.activation(name, block.update.activation)
            self.linear(f"{name}.down", block.update.down, f"{name}.active", self.residual, bits)
        self.sum(f"{name}.out", f"{name}.down")

    def sum(self, name: str, update: str) -> None:
        bits = {"bits": self.residual.bits}
        self.hidden = self.add(name, "add", {"x": self.hidden, "y": update}, {"out": self.residual}, attributes=bits)

    def attention_parts(self, name: str) -> tuple[dict[str, str], dict[str, Attribute], Value, float, Value]:
        """Inputs and common attributes, the register of scores, s_v over the output's scale, and the output."""
        block = name.removesuffix(".attention")
        inputs = {part: f"{block}.{part}" for part in ("query", "key", "value")}
        query, key, value = (self.values[source].known_scale for source in inputs.values())
        size = len(self.vit.blocks[0].query.weight) // self.vit.num_heads
        bits = self.section.activations
        check_fits(2 * size * 4 ** (bits - 1), ACCUMULATOR_BITS, what="a difference of scores", where=name)
        scores = query * key / math.sqrt(size)
        out = self.value(name, bits)
        common: dict[str, Attribute] = {
            "heads": self.vit.num_heads,
            "attention_bits": self.section.attention,
            "bits": bits,
            **self.factor(name, "power_", power_factor(scores)),
        }
        return inputs, common, Value(bits=ACCUMULATOR_BITS, scale=scores), value / out.known_scale, out

    def log_attention(self, name: str, kind: Logarithm) -> None:
        inputs, common, scores, ratio, out = self.attention_parts(name)
        keys = len(self.vit.prefix) + len(self.vit.position)
        held = widths(self.section.attention, kind, keys, self.section.activations, where=name)
        exact = self.section.denominator == "exact"
        attributes = {
            **common,
            "softmax": kind,
            "denominator": self.section.denominator,
            "unit_bits": UNIT_BITS if exact else held.left,
            "left": held.left,
            "dropped_from": self.dropped.get(name.removesuffix(".attention"), held.dropped_from),
            "reciprocal_bits": held.reciprocal_bits,
            **self.factor(name, "code_", STEPS[kind] * scores.known_scale / math.log(2)),
            **self.factor(name, "out_", ratio),
        }
        last = held.left + held.reciprocal_bits + int(attributes["out_shift"]) - 16  # type: ignore[arg-type]
        if not 0 <= last <= MAX_SHIFT:
            raise QuantizationError("scales of values and of their mean lie too far apart", where=name)
        values = {
            "scores": scores,
            "codes": Value(bits=self.section.attention, signed=False),
            "even": SUMS,
            "odd": SUMS,
            "denominator": Value(bits=ACCUMULATOR_BITS, signed=False),
            "row": SUMS,
            "out": out,
        }
        self.add(name, "log_attention", inputs, values, tensors=POWERS, attributes=attributes)

    def uniform_attention(self, name: str) -> None:
        inputs, common, scores, ratio, out = self.attention_parts(name)
        top = 2**self.section.attention - 1
        step = min(1.0, self.ranges[f"{name}_weights"]) / top
        keys = len(self.vit.prefix) + len(self.vit.position)
        worst = keys * top * 2 ** (self.section.activations - 1)
        check_fits(worst, ACCUMULATOR_BITS, what="a sum of products", where=name)
        attributes = {
            **common,
            "reciprocal_bits": RECIPROCAL_BITS,
            **self.factor(name, "code_", 1 / step),
            **self.factor(name, "out_", step * ratio),
        }
        values = {
            "scores": scores,
            "numerators": Value(bits=UNIT_BITS + 1, signed=False, scale=2.0**-UNIT_BITS),
            "denominator": Value(bits=ACCUMULATOR_BITS, signed=False, scale=2.0**-UNIT_BITS),
            "row": SUMS,
            "codes": Value(bits=self.section.attention, signed=False, scale=step),
            "accumulators": SUMS,
            "out": out,
        }
        self.add(name, "uniform_attention", inputs, values, tensors=POWERS, attributes=attributes)

    def table(self, name: str, activation: Activation, hidden: Value, active: Value) -> dict[str, str]:
        """The constant of an activation: entry c + 512 is the code of activation(c * the scale of `hidden`)."""
        top = 2 ** (TABLE_BITS - 1)
        codes = torch.arange(-top, top, dtype=torch.float64)
        values = activation(codes * hidden.known_scale) / active.known_scale
        return {"table": self.constant(name, saturated(torch.floor(values + 0.5), active.bits))}

    def activation(self, block: str, activation: Activation) -> None:
        name, source = f"{block}.active", f"{block}.up"
        active = self.value(name, self.section.activations)
        table = self.table(f"{name}.table", activation, self.values[source], active)
        self.add(name, "table", {"x": source}, {"out": active}, tensors=table)

    def mixture(self, block: str, mixture: Mixture, normed: str) -> None:
        name, router = f"{block}.down", self.router(f"{block}.router", mixture, normed)
        hidden = self.value(f"{block}.up", TABLE_BITS)
        active = self.value(f"{block}.active", self.section.activations)
        bits = self.section.weights
        up = self.weights(name, "up_", mixture.up, self.values[normed], hidden.known_scale, bits)
        down = self.weights(name, "down_", mixture.down, active, self.residual.known_scale, bits)
        self.add(
            name,
            "experts",
            {"x": normed, "index": f"{router}.index", "weights": f"{router}.weights"},
            {
                "up_accumulators": SUMS,
                "hidden": hidden,
                "active": active,
                "down_accumulators": SUMS,
                "outputs": self.residual,
                "out": self.residual,
            },
            tensors={**up, **self.table(f"{name}.table", mixture.activation, hidden, active), **down},
            attributes={"hidden_bits": TABLE_BITS, "bits": self.residual.bits, "unit_bits": UNIT_BITS},
        )

    def router(self, name: str, mixture: Mixture, normed: str) -> str:
        logits = self.value(name, ROUTER_BITS, HEADROOM)
        scale = logits.known_scale
        return self.add(
            name,
            "router",
            {"x": normed},
            {
                "accumulators": SUMS,
                "logits": logits,
                "index": Value(bits=16, signed=False),
                "weights": Value(bits=UNIT_BITS + 1, signed=False, scale=2.0**-UNIT_BITS),
            },
            tensors=self.weights(name, "", mixture.router, self.values[normed], scale, END_BITS) | POWERS,
            attributes={
                "bits": ROUTER_BITS,
                "top_k": mixture.top_k,
                "over": mixture.over,
                "reciprocal_bits": RECIPROCAL_BITS,
                **self.factor(name, "power_", power_factor(scale)),
            },
        )

    def end(self) -> None:
        normed = self.norm("norm", self.vit.norm)
        kind, out = "first_token", self.values[normed]
        attributes: dict[str, Attribute] = {}
        if self.vit.pooling == "mean":
            bits = self.section.activations
            kind, out = "mean_tokens", self.value("pooled", bits)
            mean = self.values[normed].known_scale / (len(self.vit.position) * out.known_scale)
            attributes = {"prefix": len(self.vit.prefix), "bits": bits, **self.factor("pooled", "", mean)}
        self.add("pooled", kind, {"x": normed}, {"out": out}, attributes=attributes)
        self.linear("logits", self.vit.head, "pooled", self.value("logits", LOGIT_BITS, HEADROOM), END_BITS)
