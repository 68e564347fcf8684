"""What the replicas of an expert lose: the error of its output on held-out tokens, from the values that are stored.

Letters: n rows of one expert, H hidden size, I intermediate size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moeq.artifacts.losses import WHOLE
from moeq.errors import QuantizationError
from moeq.models.experts import DOWN, ExpertLayer, ExpertMath, first_products
from moeq.quantizers.layer_data import ExpertBatch, RoutedTokens, thin
from moeq.quantizers.statistics import Note
from moeq.quantizers.stored import Packed
from moeq.recipe import LossesSection
from moeq_kernels.grids import beyond_float16


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What one method made of a batch of experts, packed as it would be stored, and a note of each."""

    packed: Packed
    notes: Sequence[Note]


def measured(
    tokens: RoutedTokens,
    batch: ExpertBatch,
    candidates: Mapping[str, Candidate],
    index: int,
    layer: ExpertLayer,
    config: LossesSection,
) -> list[dict[str, Any]]:
    """Rows of one expert: its output error with each projection, and all of them, replaced by what is stored.

    candidates: {method: what it made}; index: which expert of the batch. Raises QuantizationError naming
    layer, expert and projection when a loss is not a number.
    """
    expert = batch.numbers()[index]
    exact = _Exact.of(tokens, batch, index, config)
    common = {
        "layer": layer.index,
        "layer_name": layer.name,
        "expert": expert,
        "group_size": config.encoding.group_size,
        "symmetric": config.encoding.symmetric,
        "calibration_tokens": tokens.count(expert),
        "heldout_tokens": exact.own_tokens,
        "measured_on": "heldout" if exact.enough else "borrowed",
    }
    rows: list[dict[str, Any]] = []
    for method, candidate in candidates.items():
        packed, note = candidate.packed, candidate.notes[index]
        for bits in config.bits:
            stored = {
                name: packed[name][bits].map(lambda part: part[index].to(exact.rows.device))
                for name in layer.projections
            }
            beyond = {name: beyond_float16(weight.scales) for name, weight in stored.items()}
            values = {name: weight.dequantize() for name, weight in stored.items()}
            for projection, output in exact.outputs(values, config.per_projection):
                names = layer.projections if projection == WHOLE else (projection,)
                lacks = dict.fromkeys(what for name in names for what in beyond[name])
                row = common | {
                    "projection": projection,
                    "method": method,
                    "bits": bits,
                    "fallback": "+".join([*note.fallback, *lacks]) or "none",
                    "bytes": sum(stored[name].nbytes for name in names),
                    "hessian_trace": _trace(note, names),
                }
                losses = exact.losses(output)
                if losses is None:
                    raise QuantizationError(
                        f"the {bits}-bit {method} loss is not a number",
                        where=f"{layer.name}, expert {expert}, {projection}",
                        do="use dtype: float32 or raise losses.damping",
                    )
                rows.append(row | losses)
    return rows


@dataclass(frozen=True, kw_only=True)
class _Exact:
    """One expert in full precision on the rows [n, H] that its replicas are measured on."""

    math: ExpertMath
    rows: Tensor
    squared: Tensor  # [n] squared routing weights
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    products: dict[str, Tensor]  # what the projections but down make of the rows, [n, I]
    inner: Tensor  # [n, I]
    target: Tensor  # [n, H]
    energy: float  # mean square of the target
    own_tokens: int
    enough: bool  # of its own tokens to measure on; else those of others stand in

    @classmethod
    def of(cls, tokens: RoutedTokens, batch: ExpertBatch, index: int, config: LossesSection) -> _Exact:
        expert = batch.numbers()[index]
        own = tokens.routed(expert, heldout=True)
        enough = len(own) >= config.min_tokens
        rows = thin(own if enough else tokens.heldout_sample, config.max_measured_tokens)
        squared = tokens.squared_weights(expert)
        squared = thin(squared, config.max_measured_tokens) if enough else squared.mean().expand(len(rows))
        weights, biases = batch.one(index)
        products = first_products(rows, weights, biases)
        inner = batch.math.gate(products)
        target = batch.math.output(inner, weights[DOWN], biases.get(DOWN))
        return cls(
            math=batch.math,
            rows=rows,
            squared=squared,
            weights=weights,
            biases=biases,
            products=products,
            inner=inner,
            target=target,
            energy=float(target.square().mean()),
            own_tokens=len(own),
            enough=enough,
        )

    def outputs(self, values: dict[str, Tensor], per_projection: bool) -> Iterator[tuple[str, Tensor]]:
        """The outputs [n, H] with all matrices replaced, and with each one alone where wanted."""
        gate, bias = self.math.gate, self.biases.get(DOWN)
        replaced = first_products(self.rows, values, self.biases)
        yield WHOLE, self.math.output(gate(replaced), values[DOWN], bias)
        if per_projection:
            for name in replaced:
                inner = gate({**self.products, name: replaced[name]})
                yield name, self.math.output(inner, self.weights[DOWN], bias)
            yield DOWN, self.math.output(self.inner, values[DOWN], bias)

    def losses(self, output: Tensor) -> dict[str, float] | None:
        """Mean squared error of an output, relative to the exact one's energy, and by routing weight; None when it is
        not a number."""
        errors = (output - self.target).square().mean(1)
        loss = float(errors.mean())
        if not math.isfinite(loss) or not math.isfinite(self.energy):
            return None
        return {
            "loss": loss,
            "relative_loss": loss / self.energy if self.energy > 0 else 0.0,
            "weighted_loss": float((self.squared * errors).mean()),
            "energy": self.energy,
            "weighted_energy": float((self.squared * self.target.square().mean(1)).mean()),
        }


def _trace(note: Note, names: Sequence[str]) -> float | None:
    """Trace of the Hessians of some matrices, where they were computed; gate and up share one."""
    if note.hessian_trace is None:
        return None
    first, down = note.hessian_trace
    return float(sum(down if name == DOWN else first for name in names))
