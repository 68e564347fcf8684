"""The widths that an assignment section comes to, before anything is measured: which expert gets which is not known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

from moeq.artifacts.assignment import FULL, Width, join_widths
from moeq.artifacts.targets import Granularity, granularity_within, loaded_by, loads_width, may_differ, target_of
from moeq.models.experts import ExpertLayer
from moeq.recipe import AssignSection
from moeq.stages.checkpoint_size import CheckpointSize
from moeq.stages.expert_bytes import expert_bytes, loaded_bytes
from moeq.stages.loading import loaded_matrices

Cost = Fraction | int
Costs = Sequence[Sequence[Cost]]  # of every item, by place in the known widths


@dataclass(frozen=True, kw_only=True)
class _Item:
    """What has one of some widths, rising: counts of experts by the layer that they are of, whole or one of their
    matrices."""

    known: Sequence[int]
    counts: Mapping[int, int]
    matrix: str | None = None

    def matrices(self, layers: Sequence[ExpertLayer]) -> Iterator[tuple[int, int, str]]:
        """The layer of each, how many there are, and which they are."""
        for layer, count in self.counts.items():
            for name in layers[layer].projections if self.matrix is None else [self.matrix]:
                yield layer, count, name


def foreseen_widths(checkpoint: CheckpointSize, section: AssignSection) -> list[list[Width]]:
    """Widths of every layer's experts, those on the GPU first: what the method's own file foresees, else as many bytes
    as its budget allows (without one the widest that it takes for all).
    """
    layers, encoding, full = checkpoint.layers, checkpoint.recipe.losses.encoding, checkpoint.dtype.itemsize
    cold = [layer.num_experts - section.gpu_experts for layer in layers]
    foreseen = section.allocator.foreseen
    chosen = foreseen and foreseen(section, cold, lambda layer, bits: expert_bytes(layers[layer], bits, encoding, full))
    return [[*[FULL] * section.gpu_experts, *widths] for widths in chosen or _fullest(checkpoint, section, cold)]


def _fullest(checkpoint: CheckpointSize, section: AssignSection, cold: Sequence[int]) -> list[list[Width]]:
    """From the first expert on, the widest that leaves enough for the narrowest after it, of what the target loads; of
    what shares a width one as wide as the other."""
    layers, target = checkpoint.layers, target_of(section.target)
    granularity = granularity_within(target, section.granularity)
    items = list(_items(cold, granularity, _known(checkpoint, section)))

    @cache
    def price(place: int, name: str, bits: int) -> Cost:
        """Of one matrix, in what the budget counts."""
        layer = layers[place]
        if section.code_bits is not None:
            return Fraction(bits, len(layer.projections))
        if section.size is not None and not target.has_own_bytes:
            return checkpoint.matrix_bytes(layer, name, bits)
        return loaded_bytes(checkpoint.context, section, layer, name, bits)

    left: Cost
    if section.code_bits is not None:
        left = Fraction(section.code_bits) * sum(cold)
    elif section.bits_per_weight is not None:
        weights = sum(count * layer.weights_per_expert for count, layer in zip(cold, layers, strict=True))
        left = Fraction(section.bits_per_weight) * weights / 8
    elif section.size is None and section.expert_bytes is None:
        return _widths(cold, [(item, item.known[-1]) for item in items])
    else:
        left = section.expert_bytes or (section.size or 0) - checkpoint.other_bytes
        full = [price(place, name, FULL) for place, layer in enumerate(layers) for name in layer.projections]
        left -= section.gpu_experts * sum(full)
    costs = [
        [sum(count * price(layer, name, bits) for layer, count, name in item.matrices(layers)) for bits in item.known]
        for item in items
    ]
    left = max(left - sum(own[0] for own in costs), 0)
    shared = granularity in ("stack", "layer", "model")
    places = _evenly(costs, [item.known for item in items], left) if shared else _first(costs, left)
    return _widths(cold, [(item, item.known[place]) for item, place in zip(items, places, strict=True)])


def _known(checkpoint: CheckpointSize, section: AssignSection) -> list[dict[str, list[int]]]:
    """Widths to choose from, rising, of every layer's matrices: those that the target loads of them (as
    `limits.choices`), of all alike where they cannot differ; all where it loads none, which is refused elsewhere."""
    context, losses = checkpoint.context, checkpoint.recipe.losses
    every = sorted(section.named() or section.allocator.widths or losses.bits)
    target = None if section.target is None else loaded_by(section.target)
    if target is None:
        return [dict.fromkeys(layer.projections, every) for layer in checkpoint.layers]
    size, symmetric = losses.encoding.group_size, losses.encoding.symmetric
    own = [bits for bits in every if loads_width(target, bits, group_size=size, symmetric=symmetric)] or every
    shapes = loaded_matrices(context, target, widen=context.recipe.export.widen)
    if not shapes:
        return [dict.fromkeys(layer.projections, own) for layer in checkpoint.layers]
    if not may_differ(target, section.granularity):
        common = [bits for bits in own if all(bits in widths for matrices in shapes for widths in matrices)]
        return [dict.fromkeys(layer.projections, common or own) for layer in checkpoint.layers]
    return [
        {
            name: [bits for bits in own if bits in widths] or own
            for name, widths in zip(layer.projections, matrices, strict=True)
        }
        for layer, matrices in zip(checkpoint.layers, shapes, strict=True)
    ]


def _items(cold: Sequence[int], granularity: Granularity, known: Sequence[dict[str, list[int]]]) -> Iterator[_Item]:
    """Experts, or matrices, that share a width, in order; experts one by one where none do."""
    counts = {layer: count for layer, count in enumerate(cold) if count}
    first = [next(iter(own.values())) for own in known]
    if granularity == "model":
        yield _Item(known=first[0], counts=counts)
        return
    for layer, count in counts.items():
        if granularity == "stack":
            yield from (_Item(known=own, counts={layer: count}, matrix=name) for name, own in known[layer].items())
        elif granularity == "layer":
            yield _Item(known=first[layer], counts={layer: count})
        else:
            yield from [_Item(known=first[layer], counts={layer: 1})] * count


def _widths(cold: Sequence[int], chosen: Iterable[tuple[_Item, int]]) -> list[list[Width]]:
    """Widths of every layer's experts, of those that items have."""
    whole: list[list[Width]] = [[] for _ in cold]
    matrices: list[dict[str, int]] = [{} for _ in cold]
    for item, bits in chosen:
        for layer, count in item.counts.items():
            if item.matrix is None:
                whole[layer] += [bits] * count
            else:
                matrices[layer][item.matrix] = bits
    each = zip(whole, matrices, cold, strict=True)
    return [[join_widths(widths)] * count if widths else own for own, widths, count in each]


def _first(costs: Costs, left: Cost) -> list[int]:
    """Places of the widest that leave the least for what comes after: of many small items, which use up a budget."""
    places = []
    for own in costs:
        places.append(max(place for place, cost in enumerate(own) if cost - own[0] <= left))
        left -= own[places[-1]] - own[0]
    return places


def _evenly(costs: Costs, known: Sequence[Sequence[int]], left: Cost) -> list[int]:
    """Places of few large items, whose next step may not fit into what is left of a budget: as if all lost alike, of
    that a quarter with each bit."""
    places = [0] * len(costs)
    worth = [[(4.0**-one - 4.0**-other) / (other - one) for one, other in pairwise(own)] for own in known]
    while True:
        steps = [
            (-gains[place], item)
            for item, (own, gains, place) in enumerate(zip(costs, worth, places, strict=True))
            if place < len(gains) and own[place + 1] - own[place] <= left
        ]
        if not steps:
            return places
        _, item = min(steps)
        left -= costs[item][places[item] + 1] - costs[item][places[item]]
        places[item] += 1
