"""What an assignment section will make of a model, before anything is measured: the widths and their bytes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from moeq.artifacts.assignment import FULL, Assignment, ExpertChoice, LayerAssignment
from moeq.assigners.prefix_split import candidates, increments
from moeq.models.experts import ExpertLayer
from moeq.numerics.packed import packed_bytes
from moeq.planning.sizes import ModelSizes
from moeq.recipe import BEST, AssignSection, Recipe

TYPICAL = 0.1234567890123456  # stands for a figure of full length


def methods(section: AssignSection, recipe: Recipe) -> tuple[str, ...]:
    """The methods whose replicas an assignment may take; which one is best is not known yet."""
    return tuple(recipe.losses.methods) if section.quantizer == BEST else (section.quantizer,)


def expert_bytes(layer: ExpertLayer, bits: int, recipe: Recipe, full: int) -> int:
    """Stored bytes of one expert, biases included; `full`: bytes of one weight at 16 bits."""
    biases = layer.biases_per_expert * full
    if bits == FULL:
        return layer.parameters_per_expert * full + biases
    section = recipe.losses
    shapes = (layer.shape(projection) for projection in layer.projections)
    group, symmetric, nested = section.group_size, section.symmetric, section.nested
    return biases + sum(packed_bytes(*shape, bits, group, symmetric, nested) for shape in shapes)


def widths(sizes: ModelSizes, section: AssignSection, recipe: Recipe) -> list[list[int]]:
    """Widths of every layer's experts, those on the GPU first, as the section will choose them.

    Which expert gets which is not known yet. prefix-split may choose among several cuts of the same number of bits; the
    one of most bytes stands here (they differ by zero points, which 1 bit does not store). Of methods that spend a
    budget as the losses say, a mix that spends it stands here; of those without one, the widest width that they take.
    """
    full = sizes.source_dtype.itemsize
    chosen: list[list[int]]
    cold = [layer.num_experts - section.gpu_experts for layer in sizes.layers]
    if section.method == "uniform" and section.bits is not None:
        chosen = [[section.bits] * count for count in cold]
    elif section.method == "prefix-split" and section.average_bits is not None:
        average = Fraction(section.average_bits)
        if section.selector:
            budgets = increments(cold, average)
            chosen = [
                _largest_cut(layer, count, budget, recipe, full)
                for layer, count, budget in zip(sizes.layers, cold, budgets, strict=True)
            ]
        else:
            chosen = [[int(average)] * count for count in cold]
    else:
        chosen = _fullest(sizes, section, recipe, cold)
    return [[FULL] * section.gpu_experts + mine for mine in chosen]


def _fullest(sizes: ModelSizes, section: AssignSection, recipe: Recipe, cold: list[int]) -> list[list[int]]:
    """Widths of as many bytes as a section's budget allows: from the first layer on, the widest that leaves enough for
    the narrowest after it. Without a budget, the widest that the method takes for all.
    """
    full = sizes.source_dtype.itemsize
    named = sorted(section.named_widths())
    known = named if named or section.method == "mopeq" else sorted(recipe.losses.bits)
    known += [FULL] if FULL in (section.widths or ()) else []
    cost = [{bits: expert_bytes(layer, bits, recipe, full) for bits in known} for layer in sizes.layers]
    if section.average_bits is not None:
        left = int(Fraction(section.average_bits) * sum(cold))
        cost = [{bits: bits for bits in known} for _ in sizes.layers]
    elif section.expert_bytes is not None or section.size is not None:
        left = section.expert_bytes if section.expert_bytes is not None else section.size or 0
        if section.size is not None:
            left -= sizes.disk - sizes.experts_disk - sizes.others.disk + sizes.others.packed
        hot = [layer.num_experts - count for layer, count in zip(sizes.layers, cold, strict=True)]
        left -= sum(n * expert_bytes(layer, FULL, recipe, full) for n, layer in zip(hot, sizes.layers, strict=True))
    else:
        return [[max(known)] * count for count in cold]
    left -= sum(min(costs.values()) * count for costs, count in zip(cost, cold, strict=True))
    chosen = []
    for costs, count in zip(cost, cold, strict=True):
        mine = []
        for _ in range(count):
            least = min(costs.values())
            bits = max((bits for bits in known if costs[bits] - least <= max(left, 0)), default=known[0])
            left -= costs[bits] - least
            mine.append(bits)
        chosen.append(mine)
    return chosen


def _largest_cut(layer: ExpertLayer, count: int, budget: int, recipe: Recipe, full: int) -> list[int]:
    """Widths of `count` experts, 4 to 1 bits, whose increments spend `budget`, of most bytes."""
    if count == 0:
        return []
    runs = candidates(count, budget)
    cost = np.array([expert_bytes(layer, bits, recipe, full) for bits in (4, 3, 2, 1)])
    best = runs[(runs @ cost).argmax()]
    found: list[int] = np.repeat([4, 3, 2, 1], best).tolist()
    return found


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
                bits=bits,
                quantizer=None if bits == FULL else methods(section, recipe)[0],
                importance=TYPICAL,
            )
            for index, bits in enumerate(mine)
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
