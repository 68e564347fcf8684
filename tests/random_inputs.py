"""Profiles, loss tables and sizes at random, for what assigners are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from moeq.artifacts.effects import LayerEffects
from moeq.artifacts.losses import SCHEMA, LossTable
from moeq.artifacts.profile import ExpertProfile
from moeq.assigners.inputs import AssignInputs
from moeq.recipe import AssignSection

BITS = (1, 2, 3, 4, 8)


def inputs_of(
    seed: int, layers: int = 2, experts: int | Sequence[int] = 5, *, symmetric: bool = False, **options: object
) -> AssignInputs:
    """A random profile and loss table; bytes as packed experts have them: zero points at more than 1 bit.

    experts: of every layer, or of each.
    """
    rng = np.random.default_rng(seed)
    sizes = [experts] * layers if isinstance(experts, int) else list(experts)
    counts = [rng.integers(0, 50, size) * (rng.random(size) > 0.1) for size in sizes]
    scores = [row * rng.random(len(row)) for row in counts]
    profile = ExpertProfile(
        layers=tuple(f"layer.{layer}" for layer in range(len(sizes))),
        top_k=(2,) * len(sizes),
        counts=tuple(np.stack([row, row])[None] for row in counts),
        scores=tuple(np.stack([row, row])[None] for row in scores),
        tokens=np.array([[200, 200]]),
    )
    rows = []
    for layer, size in enumerate(sizes):
        for expert in range(size):
            losses = rng.random() * np.array([1, 0.3, 0.08, 0.02, 1e-4]) * np.exp(rng.normal(0, 0.4, 5))
            for bits, loss in zip(BITS, losses.tolist(), strict=True):
                row = {
                    "layer": layer, "layer_name": f"layer.{layer}", "expert": expert, "projection": "expert",
                    "method": "gptq", "bits": bits, "group_size": 64, "symmetric": symmetric, "loss": loss,
                    "relative_loss": loss, "calibration_tokens": 9, "heldout_tokens": 9, "fallback": "none",
                    "measured_on": "heldout", "bytes": 0, "weighted_loss": loss * rng.random(), "hessian_trace": 1.0,
                }  # fmt: skip
                rows.append(row)
    weights = rng.integers(8, 20, len(sizes))
    return AssignInputs(
        name="x",
        config=AssignSection(**options),
        profile=profile,
        losses=table_of(rows),
        group_size=64,
        symmetric=symmetric,
        bytes=tuple({b: int(w) * (b * 8 + 2) + (b > 1) * b for b in (*BITS, 16)} for w in weights),
        weights=tuple(64 * int(w) for w in weights),
        other_bytes=1000,
        traces=lambda: [np.random.default_rng(seed + layer).random(size) for layer, size in enumerate(sizes)],
        effects=LayerEffects(bits=2, method="gptq", sequences=1, tokens=1, divergence=tuple(rng.random(len(sizes)))),
    )


def table_of(rows: Sequence[dict[str, object]]) -> LossTable:
    return LossTable(pa.Table.from_pylist(list(rows), schema=SCHEMA))


def expert_bytes(inputs: AssignInputs, bits: list[np.ndarray]) -> int:
    return sum(inputs.bytes[layer][int(width)] for layer, widths in enumerate(bits) for width in widths)


def least_bytes(inputs: AssignInputs) -> int:
    return sum(one[1] * counts.shape[-1] for one, counts in zip(inputs.bytes, inputs.profile.counts, strict=True))


def with_options(inputs: AssignInputs, **options: object) -> AssignInputs:
    return replace(inputs, config=AssignSection(**options))
