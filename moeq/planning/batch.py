"""Memory of one batch of experts in `losses`, as `quantizers/layer.py` holds it; quantizers say what they hold."""

from __future__ import annotations

from moeq.models.experts import ExpertLayer
from moeq.numerics.packed import packed_bytes
from moeq.quantizers.layer import expert_batches
from moeq.quantizers.layer_data import SAMPLE_TOKENS, row_bytes
from moeq.quantizers.quantizer import BatchSizes
from moeq.recipe import Recipe
from moeq.registry import QUANTIZERS


def store_bytes(layer: ExpertLayer, recipe: Recipe) -> int:
    """Bytes of the packed replicas of one layer by one method, all experts at all widths."""
    section = recipe.losses
    one = sum(
        packed_bytes(*layer.shape(projection), bits, section.group_size, section.symmetric, section.nested)
        for projection in layer.projections
        for bits in section.bits
    )
    return layer.num_experts * one


def batch_bytes(layer: ExpertLayer, recipe: Recipe, routed: int, *, gpu: bool = False) -> int:
    """Bytes that one batch of experts has in memory at most; arguments as of `batch_moments`."""
    return max(batch for batch, _ in batch_moments(layer, recipe, routed, gpu=gpu))


def batch_moments(layer: ExpertLayer, recipe: Recipe, routed: int, *, gpu: bool = False) -> list[tuple[int, int]]:
    """Bytes of the tensors of the last batch of experts at its fullest moments, and those of the layer's packed
    replicas by then.

    routed: tokens of its busiest expert.
    """
    section = recipe.losses
    first = next(expert_batches(layer, section))
    count: int = first.stop - first.start
    weights = 4 * count * layer.parameters_per_expert
    hidden, inner = layer.hidden_size, layer.intermediate_size
    every = store_bytes(layer, recipe)
    mine = every * count // layer.num_experts
    quantizers = [QUANTIZERS.get(method) for method in section.methods]
    store = every if any(one.stored for one in quantizers) else 0
    sizes = BatchSizes(layer=layer, settings=section, experts=count, tokens=routed, lent=SAMPLE_TOKENS, gpu=gpu)
    moments = [(row_bytes(layer, routed + SAMPLE_TOKENS), 0)]
    for quantizer in quantizers:
        there = store - mine if quantizer.stored else store
        moments += [(one, there) for part in quantizer.chain() for one in part.memory(sizes)]
    if store:
        moments.append((mine, store))  # packed, and copied to where they stay
        if count < layer.num_experts:
            moments.append((0, 2 * store))  # joined
    rounded = 0 if all(one.stored for one in quantizers) else mine
    rows = 4 * section.max_measured_tokens * (2 * hidden + 7 * inner) + 8 * layer.parameters_per_expert
    moments.append((rounded + rows, store))
    return [(weights + batch, replicas) for batch, replicas in moments]
