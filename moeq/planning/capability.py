"""Whether the formats can carry what the recipe will assign, and whether the recipe's stages fit together.

What a format can carry stands in its exporter's targets (`artifacts.targets`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moeq.artifacts.assignment import FULL, Width, matrix_widths
from moeq.artifacts.targets import loaded_by, loads_width, refuse_layers
from moeq.models.experts import ExpertLayer
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
        return {bits for layer in self.widths for width in layer for bits in matrix_widths(width)}


def _refused(name: str, asked: Asked, recipe: Recipe) -> str | None:
    """Why a format cannot carry it, with the nearest thing that works."""
    for variant in _variants(name, asked, recipe):
        reason = refuse_layers(
            name,
            variant.layers,
            variant.widths,
            group_size=variant.group_size,
            symmetric=variant.symmetric,
            nested=variant.nested,
            widen=recipe.export.widen,
        )
        if reason is not None:
            return "; ".join(reason)
    return None


def _variants(name: str, asked: Asked, recipe: Recipe) -> list[Asked]:
    """What a format is asked to carry: where assign decides within its target, each width alone that the target loads,
    since there widths stand side by side only as it takes them."""
    target, size = loaded_by(name), asked.group_size
    if target is None or recipe.assign.target != target.name:
        return [asked]
    used = asked.used() - {FULL}
    loaded = [bits for bits in used if loads_width(target, bits, group_size=size, symmetric=asked.symmetric)]
    return [replace(asked, widths=tuple((bits,) * len(layer) for layer in asked.widths)) for bits in loaded or used]


def check_stages(context: Context) -> None:
    """What the stages themselves would refuse before the first write, in their own words; no text is read."""
    for stage in STAGES:
        if stage.check is not None:
            stage.check(context)


def refusals(context: Context, asked: Asked) -> list[str]:
    """Lines that say why the run would end without a checkpoint: the format, widths without losses, too little text."""
    recipe, lines = context.recipe, []
    native = _refused(recipe.export.format, asked, recipe)
    if native is not None:
        lines.append(f"export.format {recipe.export.format} cannot carry it: {native}; choose another format")
    for name in recipe.export.formats:
        reason = _refused(name, asked, recipe)
        if reason is not None:
            lines.append(f"export.formats: {name} cannot carry it: {reason}")
    missing = sorted(asked.used() - {FULL, *recipe.losses.bits})
    if missing:
        lines.append(f"assign uses {missing} bits, which losses does not make; add them to losses.bits")
    stride = heldout_stride(recipe.losses.heldout_fraction)
    if recipe.corpus.sequences < stride:
        lines.append(
            f"{recipe.corpus.sequences} sequences leave none to measure on; raise corpus.sequences to {stride}"
        )
    return lines
