"""What runtimes can load: the widths, how far they may be mixed, and the grid.

From exports that were loaded and compared with the dequantized model, and from the runtimes' own sources (see
MIXED for what goes wrong). `moeq` is the native format, which carries everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moeq.artifacts.assignment import FULL, WIDTHS, Width
from moeq.errors import AssignmentError

Granularity = Literal["projection", "expert", "layer", "model"]
FINENESS: tuple[Granularity, ...] = ("projection", "expert", "layer", "model")
MIXED = {
    "expert": "it takes one width for all matrices of an expert",
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
            granularity="projection",
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


def granularity_within(target: Target, wanted: Granularity | None) -> Granularity:
    """What has one width: what was asked for, or the finest that a target takes (none asked: experts or coarser).

    Raises AssignmentError where a target cannot take what was asked for.
    """
    if wanted is None:
        return max("expert", target.granularity, key=FINENESS.index)
    if FINENESS.index(wanted) < FINENESS.index(target.granularity):
        raise AssignmentError(
            f"granularity {wanted} cannot be loaded: {MIXED[target.granularity]}",
            where=f"target {target.name}",
            do=f"set assign.granularity: {target.granularity if target.granularity != 'model' else 'null'}, or "
            "target: moeq",
        )
    return wanted


def refusal(target: Target, widths: Sequence[Sequence[Width]], names: Sequence[str], *, symmetric: bool) -> str | None:
    """Why a target cannot load widths of every layer's experts, naming the first layer and expert in the way."""
    grid = refuse_grid(target, symmetric=symmetric)
    if grid is not None:
        return grid
    for name, mine in zip(names, widths, strict=True):
        for expert, width in enumerate(mine):
            reason = _refuse_expert(target, width, mine[0] if target.granularity == "layer" else widths[0][0])
            if reason is not None:
                return f"{name}, expert {expert}: {reason}"
    return None


def _refuse_expert(target: Target, width: Width, first: Width) -> str | None:
    """Why a target cannot load one expert beside the first of its layer or model."""
    if isinstance(width, int):
        foreign = [] if width in target.widths else [width]
    else:
        foreign = sorted(set(width.values()) - set(target.widths))
    if foreign:
        return f"{foreign[0]} bits; {target.name} loads {', '.join(map(str, target.widths))}"
    if target.granularity == "projection":
        return None
    if not isinstance(width, int):
        listed = ", ".join(f"{name} {bits}" for name, bits in width.items())
        return f"{listed} bits; {MIXED[target.granularity]}"
    if target.granularity != "expert" and width != first:
        return f"{width} bits beside {first}; {MIXED[target.granularity]}"
    return None


def check(target: Target, widths: Sequence[Sequence[Width]], names: Sequence[str], *, symmetric: bool) -> None:
    """AssignmentError when a target cannot load what was assigned."""
    reason = refusal(target, widths, names, symmetric=symmetric)
    if reason is not None:
        raise AssignmentError(
            reason,
            where=f"target {target.name}",
            do="use method optimal, which decides within a target, or target: moeq",
        )
