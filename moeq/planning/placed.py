"""What an assignment section will make of a model, before anything is measured: the widths and their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from moeq.artifacts.assignment import (
    FULL,
    Assignment,
    ExpertChoice,
    LayerAssignment,
    Width,
    join_widths,
    matrix_widths,
)
from moeq.models.experts import ExpertLayer
from moeq.planning.sizes import ModelSizes
from moeq.recipe import BEST, AssignSection, Recipe
from moeq.stages import expert_bytes as stored

TYPICAL = 0.1234567890123456  # stands for a figure of full length


def methods(section: AssignSection, recipe: Recipe) -> tuple[str, ...]:
    """The methods whose replicas an assignment may take; which one is best is not known yet."""
    return tuple(recipe.losses.methods) if section.quantizer == BEST else (section.quantizer,)


def expert_bytes(layer: ExpertLayer, bits: Width, recipe: Recipe, full: int) -> int:
    """Stored bytes of one expert, biases included; `full`: bytes of one weight at 16 bits."""
    return stored.expert_bytes(layer, bits, recipe.losses, full)


def widths(sizes: ModelSizes, section: AssignSection, recipe: Recipe) -> list[list[Width]]:
    """Widths of every layer's experts, those on the GPU first, as the section will choose them.

    Which expert gets which is not known yet. What the method's own file foresees stands here; of others that spend a
    budget a mix that spends it, of those without one the widest width that they take.
    """
    full = sizes.source_dtype.itemsize
    cold = [layer.num_experts - section.gpu_experts for layer in sizes.layers]
    foreseen = section.allocator.foreseen
    chosen: Sequence[Sequence[Width]] | None = foreseen and foreseen(
        section, cold, lambda layer, bits: expert_bytes(sizes.layers[layer], bits, recipe, full)
    )
    if chosen is None:
        chosen = _fullest(sizes, section, recipe, cold)
    return [[*[FULL] * section.gpu_experts, *mine] for mine in chosen]


def _fullest(sizes: ModelSizes, section: AssignSection, recipe: Recipe, cold: list[int]) -> list[list[Width]]:
    """Widths of as many bytes as a section's budget allows: from the first layer on, the widest that leaves enough for
    the narrowest after it; where matrices have their own, from the first projection on. Without a budget, the widest
    that the method takes for all.
    """
    known = sorted(section.named() or recipe.losses.bits)
    left = _budget(sizes, section, recipe, cold)
    if left is None:
        return [[max(known)] * count for count in cold]
    in_bits = section.average_bits is not None
    if section.granularity != "projection":
        costs = [
            {bits: bits if in_bits else _expert_cost(layer, bits, sizes, section, recipe) for bits in known}
            for layer in sizes.layers
        ]
        found = iter(_spend([one for one, count in zip(costs, cold, strict=True) for _ in range(count)], left))
        return [[next(found) for _ in range(count)] for count in cold]
    chosen: list[list[dict[str, int]]] = [[{} for _ in range(count)] for count in cold]
    places = [
        (layer.projections[index], layer, chosen[layer.index][expert])
        for index in range(max(len(layer.projections) for layer in sizes.layers))
        for layer, count in zip(sizes.layers, cold, strict=True)
        if index < len(layer.projections)
        for expert in range(count)
    ]
    items = [_matrix_costs(layer, name, known, sizes, section, recipe) for name, layer, _ in places]
    for (name, _, own), bits in zip(places, _spend(items, left), strict=True):
        own[name] = bits
    return [[join_widths(one) for one in mine] for mine in chosen]


def _matrix_costs(
    layer: ExpertLayer, projection: str, known: list[int], sizes: ModelSizes, section: AssignSection, recipe: Recipe
) -> dict[int, Fraction | int]:
    """{width: cost} of one matrix: its bytes, or its share of the bits of its expert's weights."""
    if section.average_bits is not None:
        return {bits: Fraction(bits, len(layer.projections)) for bits in known}
    return {bits: _matrix_cost(layer, projection, bits, sizes, section, recipe) for bits in known}


def _matrix_cost(
    layer: ExpertLayer, projection: str, bits: int, sizes: ModelSizes, section: AssignSection, recipe: Recipe
) -> int:
    """Bytes of one matrix as the section's budget counts them."""
    if section.size is not None:
        return sizes.checkpoint.matrix_bytes(layer, projection, bits)
    return stored.matrix_bytes(layer, projection, bits, recipe.losses, sizes.source_dtype.itemsize)


def _expert_cost(layer: ExpertLayer, bits: int, sizes: ModelSizes, section: AssignSection, recipe: Recipe) -> int:
    return sum(_matrix_cost(layer, name, bits, sizes, section, recipe) for name in layer.projections)


def _budget(sizes: ModelSizes, section: AssignSection, recipe: Recipe, cold: list[int]) -> Fraction | int | None:
    """What the experts that are decided may cost, in bits of a weight or in bytes; None without a budget."""
    if section.average_bits is not None:
        return Fraction(section.average_bits) * sum(cold)
    whole = section.expert_bytes if section.expert_bytes is not None else section.size
    if whole is None:
        return None
    if section.size is not None:
        whole -= sizes.checkpoint.other_bytes
    hot = [layer.num_experts - count for layer, count in zip(sizes.layers, cold, strict=True)]
    each = [_expert_cost(layer, FULL, sizes, section, recipe) for layer in sizes.layers]
    return whole - sum(count * size for count, size in zip(hot, each, strict=True))


def _spend(items: Sequence[Mapping[int, Fraction | int]], budget: Fraction | int) -> list[int]:
    """Widths of items in order, {width: cost} each: the widest that leaves enough for the cheapest after it."""
    left = budget - sum(min(costs.values()) for costs in items)
    chosen = []
    for costs in items:
        least = min(costs.values())
        bits = max((bits for bits in costs if costs[bits] - least <= max(left, 0)), default=next(iter(costs)))
        left -= costs[bits] - least
        chosen.append(bits)
    return chosen


def placed_bytes(sizes: ModelSizes, section: AssignSection, recipe: Recipe) -> int:
    """Bytes of all experts as the section will place them."""
    full = sizes.source_dtype.itemsize
    return sum(
        expert_bytes(layer, bits, recipe, full)
        for layer, mine in zip(sizes.layers, widths(sizes, section, recipe), strict=True)
        for bits in mine
    )


def stand_in(sizes: ModelSizes, section: AssignSection, recipe: Recipe, name: str) -> Assignment:
    """An assignment of the right widths with made-up importance, to measure what depends on its size alone."""
    layers = []
    for layer, mine in zip(sizes.layers, widths(sizes, section, recipe), strict=True):
        hot = section.gpu_experts
        experts = tuple(
            ExpertChoice(
                tier="gpu" if index < hot else "ndp",
                bits=max(matrix_widths(one)),
                projections=None if isinstance(one, int) else dict(one),
                quantizer=None if one == FULL else methods(section, recipe)[0],
                importance=TYPICAL,
            )
            for index, one in enumerate(mine)
        )
        layers.append(LayerAssignment(name=layer.name, experts=experts))
    return Assignment(
        name=name,
        method=section.method,
        parameters=section.model_dump(mode="json", exclude={"name", "method"}, exclude_none=True),
        group_size=recipe.losses.group_size,
        symmetric=recipe.losses.symmetric,
        nested=recipe.losses.nested,
        layers=tuple(layers),
    )
