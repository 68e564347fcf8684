"""Profiles, loss tables and sizes at random, for what assigners are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from moeq.artifacts.assignment import Assignment
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
                    "energy": 2 * float(losses[0]), "weighted_energy": float(losses[0]) * (1 + (expert + seed) % 3),
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
        bytes=tuple({0: 0} | {b: int(w) * (b * 8 + 2) + (b > 1) * b for b in (*BITS, 16)} for w in weights),
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


NAMES = ("gate_proj", "up_proj", "down_proj")


def with_matrices(
    seed: int, layers: int, experts: int, names: tuple[str, ...] = NAMES, **options: object
) -> AssignInputs:
    """`inputs_of` with rows of every projection, and bytes of matrices, each with a bias of 2 bytes."""
    inputs = inputs_of(seed, layers, experts, **options)
    assert inputs.losses is not None
    rng = np.random.default_rng(seed)
    rows = inputs.losses.rows()
    for row in list(rows):
        for name in names:
            share = float(rng.random()) if row["expert"] else 0.0  # expert 0: nothing measured of its matrices
            rows.append(
                row | {"projection": name, "loss": row["loss"] * share, "weighted_loss": row["weighted_loss"] * share}
            )
    weights = rng.integers(3, 9, layers)
    matrices = tuple(
        {
            name: {0: 0} | {b: int(w + number) * (b * 8 + 2) + (b > 1) * b + 2 for b in (*BITS, 16)}
            for number, name in enumerate(names)
        }
        for w in weights
    )
    whole = tuple({bits: sum(one[bits] for one in mine.values()) for bits in (0, *BITS, 16)} for mine in matrices)
    table = LossTable(pa.Table.from_pylist(rows, schema=SCHEMA))
    counts = tuple(sum(64 * int(w + number) + 1 for number in range(len(names))) for w in weights)
    return replace(inputs, losses=table, bytes=whole, matrix_bytes=matrices, weights=counts)


def spent(inputs: AssignInputs, assignment: Assignment) -> int:
    """Bytes of all experts, counted from the assignment's own lines."""
    total = 0
    for layer, mine in enumerate(assignment.layers):
        for choice in mine.experts:
            sizes = inputs.matrix_bytes[layer]
            widths = choice.projections or dict.fromkeys(sizes, choice.bits)
            total += sum(sizes[name][bits] for name, bits in widths.items())
    return total
