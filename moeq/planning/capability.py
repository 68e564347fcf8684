"""Whether the target format can carry what the recipe will assign, and whether the recipe's stages fit together.

A rule is a function of what is asked of the native format that returns why it cannot carry it, or None; what the
formats that it is converted to can carry stands in `artifacts.targets`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moeq.artifacts.assignment import FULL, Width, matrix_widths
from moeq.artifacts.targets import LOADED_BY, loads_width, refuse_layers
from moeq.exporters import NATIVE
from moeq.models.experts import ExpertLayer
from moeq.numerics.widths import SUPPORTED_BITS
from moeq.quantizers.layer_data import heldout_stride
from moeq.recipe import Recipe
from moeq.stages.context import Context
from moeq.stages.order import STAGES


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a format is asked to carry: the widths of every layer's experts or their matrices, and the grid."""

    layers: tuple[ExpertLayer, ...]
    widths: tuple[tuple[Width, ...], ...]
    group_size: int
    symmetric: bool
    all_replicas: bool
    nested: bool = False

    def used(self) -> set[int]:
        """All widths that occur."""
        return {bits for layer in self.widths for one in layer for bits in matrix_widths(one)}


def native(asked: Asked) -> str | None:
    """The native format carries any mix of the widths that can be packed, and dense experts."""
    known = {*SUPPORTED_BITS, FULL}
    foreign = sorted(asked.used() - known)
    return f"it packs 1 to 8 bits and 16, not {foreign}" if foreign else None


def _converted(name: str, asked: Asked, widen: bool) -> str | None:
    """Why a format that the native one is converted to cannot carry it, with the nearest thing that works."""
    found = refuse_layers(
        name,
        asked.layers,
        asked.widths,
        group_size=asked.group_size,
        symmetric=asked.symmetric,
        nested=asked.nested,
        widen=widen,
    )
    return None if found is None else "; ".join(found)


def _variants(name: str, asked: Asked, recipe: Recipe) -> list[Asked]:
    """What a format is asked to carry: where assign decides within its target, each width alone that the target loads,
    since there widths stand side by side only as it takes them."""
    target, size = LOADED_BY.get(name), asked.group_size
    if target is None or recipe.assign.target != target.name:
        return [asked]
    used = asked.used() - {FULL}
    loaded = [bits for bits in used if loads_width(target, bits, group_size=size, symmetric=asked.symmetric)]
    return [replace(asked, widths=tuple((bits,) * len(mine) for mine in asked.widths)) for bits in loaded or used]


Rule = Callable[[Asked], str | None]
RULES: dict[str, Rule] = {NATIVE: native}


def check_stages(context: Context) -> None:
    """What the stages themselves would refuse before the first write, in their own words; no text is read."""
    for stage in STAGES:
        if stage.check is not None:
            stage.check(context)


def refusals(context: Context, asked: Asked) -> list[str]:
    """Lines that say why the run would end without a checkpoint: the format, widths without losses, too little text."""
    found = []
    recipe = context.recipe
    rule = RULES.get(recipe.export.format)
    reason = "moeq plan has no rule for it" if rule is None else rule(asked)
    if reason is not None:
        found.append(f"export.format {recipe.export.format} cannot carry it: {reason}; choose another format")
    for name in recipe.export.formats:
        reasons = [_converted(name, one, recipe.export.widen) for one in _variants(name, asked, recipe)]
        reason = next((found for found in reasons if found is not None), None)
        if reason is not None:
            found.append(f"export.formats: {name} cannot carry it: {reason}")
    missing = sorted(asked.used() - {FULL, *recipe.losses.bits})
    if missing:
        found.append(f"assign uses {missing} bits, which losses does not make; add them to losses.bits")
    stride = heldout_stride(recipe.losses.heldout_fraction)
    if recipe.corpus.sequences < stride:
        found.append(
            f"{recipe.corpus.sequences} sequences leave none to measure on; raise corpus.sequences to {stride}"
        )
    return found
