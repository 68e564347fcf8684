"""What runtimes can load: the widths, how far they may be mixed, and the grid.

From exports that were loaded and compared with the dequantized model, and from the runtimes' own sources (see
MIXED for what goes wrong). `moeq` is the native format, which carries everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moeq.artifacts.assignment import FULL, WIDTHS
from moeq.errors import AssignmentError

Granularity = Literal["expert", "layer", "model"]
MIXED = {
    "layer": "it takes one width for all experts of a layer",
    "model": "it takes one width for all experts of the model",
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """granularity: what shares one width; reads: where that comes from."""

    name: str
    widths: tuple[int, ...]
    granularity: Granularity
    symmetric_only: bool
    reads: str


TARGETS = {
    target.name: target
    for target in (
        Target(
            name="moeq",
            widths=WIDTHS,
            granularity="expert",
            symmetric_only=False,
            reads="the native format: any mix",
        ),
        Target(
            name="auto-round",
            widths=(2, 3, 4, 8, FULL),
            granularity="expert",
            symmetric_only=False,
            reads="extra_config, one entry an expert",
        ),
        Target(
            name="gptqmodel",
            widths=(2, 3, 4, 8, FULL),
            granularity="expert",
            symmetric_only=False,
            reads="dynamic rules, one an expert; experts are unfused",
        ),
        Target(
            name="vllm",
            widths=(2, 4, 8, FULL),
            granularity="layer",
            symmetric_only=False,
            reads="the scheme of expert 0 is taken for its whole fused layer",
        ),
        Target(
            name="transformers",
            widths=(2, 3, 4, 8),
            granularity="model",
            symmetric_only=True,
            reads="compressed-tensors without a peer's package: one scheme for all experts, zero points are ignored",
        ),
    )
}


def refuse_grid(target: Target, *, symmetric: bool) -> str | None:
    """Why a target cannot read the grid, or None."""
    if target.symmetric_only and not symmetric:
        return f"{target.name} reads symmetric grids only; set losses.symmetric: true"
    return None


def refusal(target: Target, bits: Sequence[np.ndarray], names: Sequence[str], *, symmetric: bool) -> str | None:
    """Why a target cannot load widths [E] of every layer, naming the first layer and expert in the way; or None."""
    grid = refuse_grid(target, symmetric=symmetric)
    if grid is not None:
        return grid
    for name, widths in zip(names, bits, strict=True):
        for expert, width in enumerate(widths.tolist()):
            if width not in target.widths:
                known = ", ".join(map(str, target.widths))
                return f"{name}, expert {expert}: {width} bits; {target.name} loads {known}"
            other = None
            if target.granularity == "layer":
                other = int(widths[0])
            elif target.granularity == "model":
                other = int(bits[0][0])
            if other is not None and width != other:
                return f"{name}, expert {expert}: {width} bits beside {other}; {MIXED[target.granularity]}"
    return None


def check(target: Target, bits: Sequence[np.ndarray], names: Sequence[str], *, symmetric: bool) -> None:
    """AssignmentError when a target cannot load what was assigned."""
    reason = refusal(target, bits, names, symmetric=symmetric)
    if reason is not None:
        raise AssignmentError(
            reason,
            where=f"target {target.name}",
            do="use method optimal, which decides within a target, or target: moeq",
        )
