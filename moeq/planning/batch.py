"""Memory of one batch of experts in `losses`, as `quantizers/layer.py` holds it.

A CPU's column loop rounds a few rows at a time and packs blocks, so that what counts there are the batch's weights,
Hessians, factors and codes. A GPU works on all rows of the batch at once, in tensors of float32 and 64-bit words.
"""

from __future__ import annotations

import torch

from moeq.models.experts import DOWN, ExpertLayer
from moeq.numerics.grids import resolved_group_size
from moeq.numerics.packed import packed_bytes
from moeq.quantizers.layer import expert_batches
from moeq.quantizers.layer_data import SAMPLE_TOKENS, part_rows
from moeq.quantizers.measuring import STORED
from moeq.quantizers.memory import working_memory
from moeq.recipe import RTN, SIGNROUND, Recipe

LOOP_BYTES = 16 << 20  # a thread's columns, residuals and feedback in GPTQ's column loop on a CPU
LARGEST_IN_HEAP = 32 << 20  # glibc maps what is larger by itself, and gives it back at once


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
    given = routed + SAMPLE_TOKENS
    tokens = 4 * (given * hidden + min(given, part_rows(inner)) * 3 * inner)
    every = store_bytes(layer, recipe)
    mine = every * count // layer.num_experts
    store = every if {*section.methods} & {*STORED} else 0
    moments = [(tokens, 0)]
    if store:
        moments += [(one, store - mine) for one in _stored_moments(layer, recipe, count, tokens, gpu=gpu)]
        moments.append((mine, store))  # packed, and copied to where they stay
        if count < layer.num_experts:
            moments.append((0, 2 * store))  # joined
    if RTN in section.methods:
        moments += [(one, store) for one in _rounding_moments(layer, recipe, count, gpu=gpu)]
    if SIGNROUND in section.methods:
        training = _codes(layer, recipe, count) + working_memory(section.working_memory)
        moments.append((training, store - mine))
    rounded = mine if RTN in section.methods else 0
    rows = 4 * section.max_measured_tokens * (2 * hidden + 7 * inner) + 8 * layer.parameters_per_expert
    moments.append((rounded + rows, store))
    return [(weights + batch, replicas) for batch, replicas in moments]


def _codes(layer: ExpertLayer, recipe: Recipe, count: int) -> int:
    """Bytes of the unpacked codes of a batch, at all widths."""
    return count * len(recipe.losses.bits) * layer.parameters_per_expert


def _stored_moments(layer: ExpertLayer, recipe: Recipe, count: int, tokens: int, *, gpu: bool) -> list[int]:
    """GPTQ: Hessians while they are summed up, then those of the first matrices and those of down, factored one after
    the other; the lists that Hessians were summed up in stay, and so does what the first matrices became."""
    section = recipe.losses
    hidden, inner, widths = layer.hidden_size, layer.intermediate_size, len(section.bits)
    wide = count * (len(layer.projections) - 1) * inner * hidden
    narrow = count * hidden * inner
    first, second = 4 * count * hidden**2, 4 * count * inner**2
    ordered = 2 if section.act_order else 0  # in the order of rounding, and halfway there
    lists = first + second
    if gpu:
        group = resolved_group_size(max(hidden, inner), section.group_size)
        step = 16 * count * widths * max(group * 2 * inner, group * hidden)
        factor, codes = max(first, second), _codes(layer, recipe, count)
        packing = 20 * narrow
        return [
            lists + tokens,
            lists + 5 * factor + codes,
            lists + 2 * factor + wide * (8 + 6 * widths) + step + codes,
            codes + packing,
        ]
    stack = 4 * wide
    loop = LOOP_BYTES * torch.get_num_threads()
    return [
        lists + tokens,
        lists + stack + (2 + ordered) * first + widths * wide * (2 if section.act_order else 1) + loop,
        lists + stack + (2 + ordered) * second + widths * (wide + narrow * (2 if section.act_order else 1)) + loop,
    ]


def _rounding_moments(layer: ExpertLayer, recipe: Recipe, count: int, *, gpu: bool) -> list[int]:
    """RTN: the matrices before as codes, one input-major, its codes, and a group of them in float32 and 8 bits; blocks
    that lie in the heap of a CPU leave gaps there."""
    section = recipe.losses
    rows, inputs = layer.shape(DOWN)
    one = count * len(section.bits) * rows * inputs
    share = resolved_group_size(inputs, section.group_size) / inputs
    before = (len(layer.projections) - 1) * one
    packing = 20 * count * rows * inputs if gpu else count * rows * inputs
    gaps = 0 if gpu else min(one, LARGEST_IN_HEAP) + min(int(4 * share * one), LARGEST_IN_HEAP)
    return [
        before + 4 * count * rows * inputs + int((1 + 5 * share) * one) + gaps,
        before + one + packing,
    ]
