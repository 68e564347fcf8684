"""Replicas and losses of all experts of one layer, in memory-bounded batches of experts.

Letters: T tokens, E experts, e experts of one batch, H hidden size, I intermediate size, B bit widths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeq.artifacts.losses import WHOLE
from moeq.errors import QuantizationError
from moeq.models.experts import DOWN, ExpertLayer, ExpertMath, first_products
from moeq.models.walk import LayerInputs
from moeq.numerics import gptq, nested
from moeq.numerics.factor import Factor, act_order, factorize
from moeq.numerics.grids import decode
from moeq.numerics.packed import PackedWeight, packed_bytes
from moeq.numerics.slab import Slab
from moeq.numerics.widths import NESTED_BITS
from moeq.quantizers.memory import working_memory
from moeq.quantizers.signround import Training, sign_round
from moeq.quantizers.training_rows import Rows
from moeq.recipe import LossesSection

SAMPLE_TOKENS = 1024  # of a layer's tokens, run through every expert for what a rarely routed one borrows
GPTQ, RTN, SIGNROUND = "gptq", "rtn", "signround"
MSE = "mse"  # losses.clip
PART_BYTES = 2**30  # of rows that are multiplied at once: all tokens' can be more than a GPU holds
STORED = (GPTQ, SIGNROUND)  # methods whose replicas are kept


@dataclass(frozen=True, kw_only=True)
class LayerResult:
    """Rows of the loss table; the packed replicas of the stored method, {projection: {bits: stack over experts}}."""

    rows: list[dict[str, Any]]
    replicas: dict[str, dict[int, PackedWeight]]


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """One layer's tokens: calibration and held-out rows, samples of both, and their routing."""

    hidden: Tensor  # [T, H] float32
    experts: Tensor  # [T, k]
    scores: Tensor | None  # [T, k] what multiplies an expert's input, where a family does that
    weights: Tensor  # [T, k] what multiplies an expert's output: routing weights, or ones
    heldout: Tensor  # [T] bool
    everyone: bool  # whether every expert calibrates on all tokens
    sample: Tensor  # [<= SAMPLE_TOKENS, H] of the calibration rows
    heldout_sample: Tensor
    left_out: int  # tokens that are not among them, since their activations are not finite

    @classmethod
    def of(cls, inputs: LayerInputs, config: LossesSection) -> _Tokens:
        hidden = inputs.hidden.float()
        stride = heldout_stride(config.heldout_fraction)
        heldout = (inputs.sequence % stride == stride - 1).to(hidden.device)
        if bool(heldout.all()) or not bool(heldout.any()):
            lacking = "calibration" if bool(heldout.all()) else "held-out"
            raise QuantizationError(
                f"no {lacking} tokens: of {inputs.left_out:,} the activations are not finite",
                where=inputs.layer.name,
                do="use dtype: float32, or more corpus.sequences",
            )
        scores = inputs.weights.to(hidden) if inputs.layer.kind.scales_inputs else None
        samples = [
            _weighed(hidden, scores, thin(side.nonzero().squeeze(1), SAMPLE_TOKENS)) for side in (~heldout, heldout)
        ]
        return cls(
            hidden=hidden,
            experts=inputs.experts,
            scores=scores,
            weights=inputs.weights.to(hidden) if scores is None else torch.ones_like(scores),
            heldout=heldout,
            everyone=config.tokens == "all",
            sample=samples[0],
            heldout_sample=samples[1],
            left_out=inputs.left_out,
        )

    def count(self, expert: int) -> int:
        """How many calibration tokens were routed to an expert."""
        return int(((self.experts == expert).any(1) & ~self.heldout).sum())

    def routed(self, expert: int, heldout: bool) -> Tensor:
        """The expert's inputs [n, H]: its own tokens, or all calibration tokens where the recipe says so."""
        side = self.heldout if heldout else ~self.heldout
        chosen = self.experts == expert
        mine = side if self.everyone and not heldout else chosen.any(1) & side
        if self.scores is None:
            return self.hidden[mine]
        own = (self.scores * chosen).sum(1)
        scale = torch.where(chosen.any(1), own, self.scores.mean(1))
        return self.hidden[mine] * scale[mine].unsqueeze(1)

    def squared_weights(self, expert: int) -> Tensor:
        """Squared weight [n] that multiplies the expert's output at each of its held-out tokens, as `routed` has them.

        Without any, the mean over all that the layer's experts were given.
        """
        chosen = self.experts == expert
        mine = (self.weights * chosen).sum(1).square()[chosen.any(1) & self.heldout]
        return mine if len(mine) else self.weights.square().mean().reshape(1)

    def shared(self) -> Tensor:
        """Mean of x x^T over the calibration tokens, [H, H]."""
        mine = (~self.heldout).nonzero().squeeze(1)
        parts = mine.split(part_rows(self.hidden.shape[1]))
        return _products(_weighed(self.hidden, self.scores, part) for part in parts) / len(mine)


def _weighed(hidden: Tensor, scores: Tensor | None, rows: Tensor) -> Tensor:
    """Tokens [n, H] at some rows [n], times the mean of what multiplies an expert's input, where a family does that."""
    return hidden[rows] if scores is None else hidden[rows] * scores[rows].mean(1, keepdim=True)


def heldout_stride(fraction: float) -> int:
    """Every how-many-th sequence is kept for measuring."""
    return max(2, round(1 / fraction))


def thin(rows: Tensor, count: int) -> Tensor:
    """At most `count` rows, evenly spaced."""
    if len(rows) <= count:
        return rows
    return rows[torch.arange(count, device=rows.device) * len(rows) // count]


@dataclass(frozen=True, kw_only=True)
class _Experts:
    """A batch of experts: matrices [e, rows, inputs] and biases [e, rows] in float32, what else they compute."""

    which: slice
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    math: ExpertMath

    def one(self, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Matrices and biases of one expert of the batch."""
        return tuple({name: stack[index] for name, stack in of.items()} for of in (self.weights, self.biases))  # type: ignore[return-value]

    def numbers(self) -> range:
        return range(self.which.start, self.which.stop)


@torch.no_grad()
def quantize_layer(
    inputs: LayerInputs,
    weights: dict[str, Tensor],
    math: ExpertMath,
    config: LossesSection,
    biases: dict[str, Tensor] | None = None,
) -> LayerResult:
    """Replicas of every expert at every width and what each one loses on held-out tokens.

    weights: {projection: [E, rows, inputs]} of the layer's projections; biases: {projection: [E, rows]}, which stay as
    they are. Of config.methods one at most is stored (GPTQ or SignRound, which starts from GPTQ's codes). Raises
    QuantizationError naming layer and expert when a loss is not a number.
    """
    layer = inputs.layer
    stored = [method for method in config.methods if method in STORED]
    if len(stored) > 1:
        raise ValueError(f"one stored method at a time, not {stored}")
    tokens = _Tokens.of(inputs, config)
    shared = tokens.shared()
    rows: list[dict[str, Any]] = []
    slab = Slab()
    stacks: dict[str, dict[int, list[PackedWeight]]] = {p: {b: [] for b in config.bits} for p in layer.projections}
    for which in expert_batches(layer, config, tokens.hidden.device):
        batch = _Experts(
            which=which,
            weights={name: stack[which].float() for name, stack in weights.items()},
            biases={name: stack[which].float() for name, stack in (biases or {}).items()},
            math=math,
        )
        notes = [{"calibration_tokens": tokens.count(expert)} for expert in batch.numbers()]
        candidates: dict[str, dict[str, gptq.Quantized]] = {}
        if stored:
            result = _gptq_batch(tokens, batch, shared, config, notes)
            result = result if stored == [GPTQ] else _sign_round(tokens, batch, config, result)
            candidates[stored[0]] = result
            for projection, quantized in result.items():
                for bits in config.bits:
                    stacks[projection][bits].append(_packed(quantized, bits, config).map(slab.keep))
        if RTN in config.methods:
            candidates[RTN] = rtn_batch(batch.weights, config)
        for index in range(len(notes)):
            rows += _measure(tokens, batch, candidates, index, notes[index], layer, config)
    replicas: dict[str, dict[int, PackedWeight]] = {projection: {} for projection in stacks}
    if stored:  # popped, so that the store is not held twice
        for projection, widths in stacks.items():
            replicas[projection] = {bits: _join(widths.pop(bits)) for bits in config.bits}
    return LayerResult(rows=rows, replicas=replicas)


def _sign_round(
    tokens: _Tokens, batch: _Experts, config: LossesSection, start: dict[str, gptq.Quantized]
) -> dict[str, gptq.Quantized]:
    """SignRound of a batch of experts from GPTQ's codes."""
    numbers = batch.numbers()
    return sign_round(
        lambda index: Rows(hidden=tokens.routed(numbers[index], heldout=False)),
        tokens.sample,
        batch.weights,
        batch.biases,
        batch.math,
        bits=config.bits,
        group_size=config.group_size,
        symmetric=config.symmetric,
        training=Training(
            iterations=config.signround_iterations,
            lend=config.borrow_tokens,
            working_memory=working_memory(config.working_memory, tokens.hidden.device),
        ),
        start=start,
        numbers=numbers,
    )


def expert_batches(layer: ExpertLayer, config: LossesSection, device: torch.device | str = "cpu") -> Iterator[slice]:
    """Slices of experts whose Hessians, residuals and codes fit into the working memory (at least one expert)."""
    hidden, inter, widths = layer.hidden_size, layer.intermediate_size, len(config.bits)
    hessians = 4 * 3 * (hidden**2 + inter**2)
    results = len(layer.projections) * hidden * inter * (4 + widths * (4 + 1 + 1 + 4))
    step = max(1, working_memory(config.working_memory, device) // (hessians + results))
    for start in range(0, layer.num_experts, step):
        yield slice(start, min(start + step, layer.num_experts))


def rtn_batch(
    batch: dict[str, Tensor], config: LossesSection, bits: Sequence[int] | None = None
) -> dict[str, gptq.Quantized]:
    """Rounding of a batch of experts without calibration, at `bits` or at all of the section's widths."""
    found = {}
    for projection, weight in batch.items():
        importance = weight.new_ones(len(weight), weight.shape[2]) if config.clip == MSE else None
        found[projection] = _quantized(weight, None, config, bits or config.bits, importance=importance)
    return found


def _quantized(
    weight: Tensor,
    factor: Tensor | None,
    config: LossesSection,
    bits: Sequence[int],
    importance: Tensor | None,
    order: Tensor | None = None,
) -> gptq.Quantized:
    """Codes and grids of one weight at some widths; nested ones share their codes where the recipe says so."""
    group, symmetric = config.group_size, config.symmetry()

    def alone(widths: Sequence[int]) -> gptq.Quantized:
        return gptq.quantize(
            weight, factor, bits=widths, group_size=group, symmetric=symmetric, order=order, importance=importance
        )

    if not config.nested or not set(bits) & set(NESTED_BITS):
        return alone(bits)
    found = {0: nested.quantize(weight, factor, group_size=group, symmetric=symmetric, importance=importance)}
    others = [width for width in bits if width not in NESTED_BITS]
    if others:
        found[1] = alone(others)
    return _by_width(found, bits)


def _packed(quantized: gptq.Quantized, bits: int, config: LossesSection) -> PackedWeight:
    return PackedWeight.of(quantized, bits, config.symmetric, config.nested)


def _gptq_batch(
    tokens: _Tokens, batch: _Experts, shared: Tensor, config: LossesSection, notes: list[dict[str, Any]]
) -> dict[str, gptq.Quantized]:
    """GPTQ of a batch of experts: gate and up share one Hessian, down has its own; fills the notes' fallbacks.

    H_e <- (n_e*H_e + lambda*H_layer) / (n_e + lambda), H as means over tokens; for down, H_layer runs a sample of the
    layer's tokens through the expert itself.
    """
    first, second = [], []
    lend = config.borrow_tokens
    for index, expert in enumerate(batch.numbers()):
        mine = tokens.routed(expert, heldout=False)
        own, borrowed = (_inner_products(batch, index, rows) for rows in (mine, tokens.sample))
        total = max(len(mine) + lend, 1e-9)
        first.append((mine.T @ mine + lend * shared) / total)
        second.append((own + lend * borrowed / len(tokens.sample)) / total)
        stood_in = {"borrowed_hessian": len(mine) < config.min_tokens, "left_out_tokens": tokens.left_out > 0}
        notes[index]["fallback"] = [name for name, here in stood_in.items() if here]
        notes[index]["hessian_trace"] = [float(one[-1].diagonal().sum()) for one in (first, second)]
    names = [name for name in batch.weights if name != DOWN]
    stack = torch.cat([batch.weights[name] for name in names], 1)
    both = _gptq(stack, torch.stack(first), config, notes)
    found = {DOWN: _gptq(batch.weights[DOWN], torch.stack(second), config, notes)}
    rows = stack.shape[1] // len(names)
    return {name: _rows(both, slice(i * rows, (i + 1) * rows)) for i, name in enumerate(names)} | found


def part_rows(features: int) -> int:
    """Rows of so many float32 features that are multiplied at once; a gated product has them three times over."""
    return max(1, PART_BYTES // (3 * 4 * features))


def _products(parts: Iterable[Tensor]) -> Tensor:
    """Sum [K, K] of x x^T over rows that come in parts [n, K], at least one."""
    rest = iter(parts)
    first = next(rest)
    total = first.T @ first
    for part in rest:
        total.addmm_(part.T, part)
    return total


def _inner_products(batch: _Experts, index: int, rows: Tensor) -> Tensor:
    """Sum [I, I] of y y^T over what an expert's down projection is given at some rows [n, H]."""
    weights, biases = batch.one(index)
    parts = rows.split(part_rows(weights[DOWN].shape[1]))
    return _products(batch.math.intermediate(part, weights, biases) for part in parts)


def _gptq(weight: Tensor, hessian: Tensor, config: LossesSection, notes: list[dict[str, Any]]) -> gptq.Quantized:
    """GPTQ of weights [E, N, K] that share Hessians [E, K, K], at all widths.

    With act_order, 1 bit keeps the order of the columns: its scale is worth much less when it is not taken from what
    earlier columns made of the group.
    """
    ordered = [bits for bits in config.bits if config.act_order and bits > 1]
    plain = [bits for bits in config.bits if bits not in ordered]
    found: dict[int, gptq.Quantized] = {}
    for widths in (ordered, plain):
        if widths:
            order, work = act_order(hessian) if widths is ordered else (None, hessian)
            factor = factorize(work, config.damping)
            _note(notes, factor, config.damping)
            importance = _importance(factor, order) if config.clip == MSE else None
            found[widths[0]] = _quantized(weight, factor.unit_upper, config, widths, order=order, importance=importance)
    return next(iter(found.values())) if len(found) == 1 else _by_width(found, config.bits)


def _importance(factor: Factor, order: Tensor | None) -> Tensor:
    """What the square of each column's error counts in clipping, [E, K], columns as they lie."""
    return factor.pivots if order is None else factor.pivots.gather(1, order.argsort(-1))


def _by_width(found: dict[int, gptq.Quantized], bits: Sequence[int]) -> gptq.Quantized:
    """Results at some widths each, as one at `bits`."""
    places = [(one, one.bits.index(width)) for width in bits for one in found.values() if width in one.bits]
    first = places[0][0]
    return gptq.Quantized(
        codes=torch.stack([one.codes[:, index] for one, index in places], 1),
        scale=torch.stack([one.scale[:, index] for one, index in places], 1),
        zero=torch.stack([one.zero[:, index] for one, index in places], 1),
        bits=tuple(bits),
        group_size=first.group_size,
    )


def _note(notes: list[dict[str, Any]], factor: Factor, damping: float) -> None:
    """Record what the factorization of each expert fell back to."""
    for index, note in enumerate(notes):
        found = {
            "rounded": bool(factor.failed[index]),
            "raised_damping": float(factor.damping[index]) > damping and not bool(factor.failed[index]),
            "float64": bool(factor.float64[index]),
        }
        note["fallback"] += [name for name, here in found.items() if here and name not in note["fallback"]]


def _rows(quantized: gptq.Quantized, rows: slice) -> gptq.Quantized:
    return gptq.Quantized(
        codes=quantized.codes[:, :, rows],
        scale=quantized.scale[:, :, rows],
        zero=quantized.zero[:, :, rows],
        bits=quantized.bits,
        group_size=quantized.group_size,
    )


def _join(parts: list[PackedWeight]) -> PackedWeight:
    first = parts[0]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return PackedWeight(
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat(zeros) if zeros else None,
        bits=first.bits,
        group_size=first.group_size,
        inputs=first.inputs,
        symmetric=first.symmetric,
        nested=first.nested,
    )


def _measure(
    tokens: _Tokens,
    batch: _Experts,
    candidates: dict[str, dict[str, gptq.Quantized]],
    index: int,
    note: dict[str, Any],
    layer: ExpertLayer,
    config: LossesSection,
) -> list[dict[str, Any]]:
    """Rows of one expert: its output error with each projection, and all of them, replaced."""
    expert = batch.numbers()[index]
    own = tokens.routed(expert, heldout=True)
    enough = len(own) >= config.min_tokens
    rows = thin(own if enough else tokens.heldout_sample, config.max_measured_tokens)
    squared = tokens.squared_weights(expert)
    squared = thin(squared, config.max_measured_tokens) if enough else squared.mean().expand(len(rows))
    exact, biases = batch.one(index)
    gate, down_bias = batch.math.gate, biases.get(DOWN)
    products = first_products(rows, exact, biases)
    inner = gate(products)
    target = batch.math.output(inner, exact[DOWN], down_bias)
    energy = float(target.square().mean())
    common = {
        "layer": layer.index,
        "layer_name": layer.name,
        "expert": expert,
        "group_size": config.group_size,
        "symmetric": config.symmetric,
        "calibration_tokens": note["calibration_tokens"],
        "heldout_tokens": len(own),
        "measured_on": "heldout" if enough else "borrowed",
    }
    found: list[dict[str, Any]] = []
    for method, quantized in candidates.items():
        fallback = "+".join(note["fallback"]) if method in STORED and note["fallback"] else "none"
        for bits in config.bits:
            values = {name: _values(quantized[name], index, bits) for name in layer.projections}
            replaced = first_products(rows, values, biases)
            outputs = {WHOLE: batch.math.output(gate(replaced), values[DOWN], down_bias)}
            if config.per_projection:
                for name in replaced:
                    one = gate({**products, name: replaced[name]})
                    outputs[name] = batch.math.output(one, exact[DOWN], down_bias)
                outputs[DOWN] = batch.math.output(inner, values[DOWN], down_bias)
            for projection, output in outputs.items():
                errors = (output - target).square().mean(1)
                loss = float(errors.mean())
                if not math.isfinite(loss) or not math.isfinite(energy):
                    raise QuantizationError(
                        f"the {bits}-bit {method} loss is not a number",
                        where=f"{layer.name}, expert {expert}, {projection}",
                        do="use dtype: float32 or raise losses.damping",
                    )
                names = layer.projections if projection == WHOLE else (projection,)
                stored = (
                    packed_bytes(*layer.shape(n), bits, config.group_size, config.symmetric, config.nested)
                    for n in names
                )
                found.append(
                    common
                    | {
                        "projection": projection,
                        "method": method,
                        "bits": bits,
                        "loss": loss,
                        "relative_loss": loss / energy if energy > 0 else 0.0,
                        "fallback": fallback,
                        "bytes": sum(stored),
                        "weighted_loss": float((squared * errors).mean()),
                        "hessian_trace": _trace(note, names) if method in STORED else None,
                    }
                )
    return found


def _trace(note: dict[str, Any], names: Sequence[str]) -> float:
    """Trace of the Hessians of some matrices; gate and up share one."""
    first, down = note["hessian_trace"]
    return float(sum(down if name == DOWN else first for name in names))


def _values(quantized: gptq.Quantized, index: int, bits: int) -> Tensor:
    """Dequantized values of one expert's matrix, exactly as they will be stored."""
    width = quantized.bits.index(bits)
    return decode(
        quantized.codes[index, width], quantized.scale[index, width], quantized.zero[index, width], quantized.group_size
    )
