"""The widths that an assignment section comes to, before anything is measured: which expert gets which is not known."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from moeq.artifacts.assignment import FULL, Width
from moeq.artifacts.targets import Granularity, granularity_within, target_of
from moeq.models.experts import ExpertLayer
from moeq.recipe import AssignSection
from moeq.stages.checkpoint_size import CheckpointSize
from moeq.stages.expert_bytes import expert_bytes, loaded_bytes


def foreseen_widths(checkpoint: CheckpointSize, section: AssignSection) -> list[list[Width]]:
    """Widths of every layer's experts, those on the GPU first: what the method's own file foresees, else as many bytes
    as its budget allows (without one the widest that it takes for all).
    """
    layers, encoding, full = checkpoint.layers, checkpoint.recipe.losses.encoding, checkpoint.dtype.itemsize
    cold = [layer.num_experts - section.gpu_experts for layer in layers]
    foreseen = section.allocator.foreseen
    chosen = foreseen and foreseen(section, cold, lambda layer, bits: expert_bytes(layers[layer], bits, encoding, full))
    return [[*[FULL] * section.gpu_experts, *widths] for widths in chosen or _fullest(checkpoint, section, cold)]


def _fullest(checkpoint: CheckpointSize, section: AssignSection, cold: Sequence[int]) -> list[list[int]]:
    """From the first layer on, the widest that leaves enough for the narrowest after it, of what the target loads."""
    target = target_of(section.target)
    known = sorted(section.named() or section.allocator.widths or checkpoint.recipe.losses.bits)
    known = [bits for bits in known if bits in target.widths] or known

    def price(layer: ExpertLayer, bits: int) -> int:
        if section.code_bits is not None:
            return bits
        if section.size is not None and target_of(section.target).block_bytes is None:
            return sum(checkpoint.matrix_bytes(layer, name, bits) for name in layer.projections)
        return sum(loaded_bytes(checkpoint.context, section, layer, name, bits) for name in layer.projections)

    left: Fraction | int
    if section.code_bits is not None:
        left = Fraction(section.code_bits) * sum(cold)
    elif section.bits_per_weight is not None:
        weights = sum(count * layer.weights_per_expert for count, layer in zip(cold, checkpoint.layers, strict=True))
        left = Fraction(section.bits_per_weight) * weights / 8
    elif section.size is None and section.expert_bytes is None:
        return [[known[-1]] * count for count in cold]
    else:
        left = section.expert_bytes or (section.size or 0) - checkpoint.other_bytes
        left -= section.gpu_experts * sum(price(layer, FULL) for layer in checkpoint.layers)
    prices = [[price(layer, bits) for bits in known] for layer in checkpoint.layers]
    left -= sum(count * costs[0] for count, costs in zip(cold, prices, strict=True))
    chosen: list[list[int]] = [[] for _ in cold]
    for alike in _alike(cold, granularity_within(target, section.granularity)):
        costs = [sum(each) for each in zip(*(prices[layer] for layer in alike), strict=True)]
        best = max(index for index, each in enumerate(costs) if each - costs[0] <= max(left, 0))
        left -= costs[best] - costs[0]
        for layer in alike:
            chosen[layer].append(known[best])
    return chosen


def _alike(cold: Sequence[int], granularity: Granularity) -> list[list[int]]:
    """Experts that have one width, by the layer that each is of; those of one layer take it where none is shared."""
    every = [[layer] * count for layer, count in enumerate(cold) if count]
    if granularity == "model":
        return [[layer for layers in every for layer in layers]]
    return every if granularity == "layer" else [[layer] for layers in every for layer in layers]
