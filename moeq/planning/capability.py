"""Whether the runtimes can load what the recipe will assign, and whether there is what it needs to be measured.

What a runtime loads stands in its exporter's targets (`artifacts.targets`).
"""

from __future__ import annotations

from collections.abc import Sequence

from moeq.artifacts.assignment import FULL, Width, join_widths, matrix_widths
from moeq.artifacts.targets import loaded_by, loads_width, may_differ
from moeq.assigners.inputs import Loaded
from moeq.assigners.limits import stand_in
from moeq.quantizers.layer_data import heldout_stride
from moeq.stages import export
from moeq.stages.context import Context
from moeq.stages.loading import loaded_matrices

Widths = Sequence[Sequence[Width]]  # of every layer's experts, or of their matrices


def refusals(context: Context, widths: Widths) -> list[str]:
    """Lines that say why the run would end without a checkpoint: the format, widths without losses, too little text."""
    recipe, lines = context.recipe, []
    native = _refused(context, recipe.export.format, widths)
    if native is not None:
        lines.append(f"export.format {recipe.export.format} cannot carry it: {native}; choose another format")
    for name in recipe.export.formats:
        reason = _refused(context, name, widths)
        if reason is not None:
            lines.append(f"export.formats: {name} cannot carry it: {reason}")
    missing = sorted(_used(widths) - {*recipe.losses.bits})
    if missing:
        lines.append(f"assign uses {missing} bits, which losses does not make; add them to losses.bits")
    stride = heldout_stride(recipe.losses.heldout_fraction)
    if recipe.corpus.sequences < stride:
        lines.append(
            f"{recipe.corpus.sequences} sequences leave none to measure on; raise corpus.sequences to {stride}"
        )
    return lines


def _used(widths: Widths) -> set[int]:
    """All widths that occur but full precision."""
    return {bits for layer in widths for width in layer for bits in matrix_widths(width)} - {FULL}


def _refused(context: Context, name: str, widths: Widths) -> str | None:
    """Why a format cannot carry some widths, with the nearest thing that works.

    Where assign decides within its target, each width that the target loads is asked for alone, since there widths
    stand side by side only as it takes them; of matrices of other shapes the next one that it loads of them.
    """
    section, target, variants = context.recipe.losses, loaded_by(name), [widths]
    if target is not None and context.recipe.assign.target == target.name:
        size, symmetric, used = section.group_size, section.symmetric, _used(widths)
        loaded = [bits for bits in used if loads_width(target, bits, group_size=size, symmetric=symmetric)]
        shapes = loaded_matrices(context, target, widen=context.recipe.export.widen)
        if not may_differ(target, context.recipe.assign.granularity):
            everywhere = [bits for bits in loaded if all(bits in own for matrices in shapes for own in matrices)]
            shapes, loaded = (), everywhere or loaded
        variants = [_of_shapes(context, widths, shapes, bits) for bits in loaded or used]
    for variant in variants:
        reason = export.refused(context, name, variant, section.encoding)
        if reason is not None:
            return "; ".join(reason)
    return None


def _of_shapes(context: Context, widths: Widths, shapes: Loaded, bits: int) -> Widths:
    """All experts at one width, each matrix at the next one that is loaded of its shape; shapes: none, as it is."""
    if not shapes:
        return [[bits] * len(layer) for layer in widths]
    found: list[list[Width]] = []
    for layer, matrices, experts in zip(context.model.layers, shapes, widths, strict=True):
        chosen = [stand_in(bits, [width for width in own if width != FULL]) for own in matrices]
        found.append([join_widths(dict(zip(layer.projections, chosen, strict=True)))] * len(experts))
    return found
