"""What an assignment is refused before anything is measured of the experts."""

from __future__ import annotations

import numpy as np

from moeq.artifacts.assignment import FULL, Width
from moeq.artifacts.profile import ExpertProfile
from moeq.artifacts.targets import MIXED, granularity_within, loaded_by, refuse_codes, refuse_grid, target_of
from moeq.artifacts.targets import check as refuse_widths
from moeq.assigners.limits import limit_of, widths_within
from moeq.errors import AssignmentError, FormatError, RecipeError
from moeq.estimator import load_hardware
from moeq.recipe import BUDGETS, AssignSection
from moeq.stages.assign import inputs_before, naming
from moeq.stages.context import Context
from moeq.stages.loading import check_family


def check(context: Context) -> None:
    """AssignmentError when a section asks for more GPU experts than a layer has, EstimateError for bad hardware.

    RecipeError for routing of decode steps, which images have none of; AssignmentError too for a budget that no
    statistics could meet.
    """
    _check_section(context, context.recipe.assign, context.recipe.name)
    for compared in context.recipe.eval.compare:
        with naming(context, compared):
            _check_section(context, compared, compared.name)


def _check_gpu_experts(context: Context, section: AssignSection) -> None:
    """FormatError where experts would stay in full precision, and the target has none of them, or one width for all
    of a layer."""
    target, count = target_of(section.target), section.gpu_experts
    mixes = any(0 < count < layer.num_experts for layer in context.model.layers) and {*section.named()} != {FULL}
    refused = None
    if mixes and target.granularity in ("layer", "model"):
        refused = f"which mixes 16 bits with others; {MIXED[target.granularity]}"
    elif count and FULL not in target.widths:
        refused = f"which leaves them in 16 bits; {target.name} loads {', '.join(map(str, target.widths))}"
    if refused is not None:
        do = "set assign.gpu_experts: 0, or target: native"
        raise FormatError(f"gpu_experts is {count}, {refused}", where=f"target {target.name}", do=do)


def settled(context: Context, section: AssignSection) -> list[list[Width]] | None:
    """Widths of every layer's experts where they follow from a section alone: those of experts on the GPU, and one that
    is named for all others; None where something is to be decided."""
    named, hot = [*section.named()], section.gpu_experts
    counts = [layer.num_experts for layer in context.model.layers]
    if len(named) != 1 and hot < max(counts):
        return None
    return [[*[FULL] * min(hot, count), *named[:1] * (count - hot)] for count in counts]


def _check_section(context: Context, section: AssignSection, name: str) -> None:
    if section.statistics == "decode" and context.model.takes_images:
        raise RecipeError("images have no decode positions", where="assign.statistics: decode", do="use all")
    if section.target is not None:
        check_family(context, section.target)
        _check_codes(context, section.target)
        _check_gpu_experts(context, section)
        _check_settled(context, section, section.target)
    hardware = context.recipe.hardware_of(section)
    if hardware is not None:
        load_hardware(hardware)
    for layer in context.model.layers:
        if section.gpu_experts > layer.num_experts:
            raise AssignmentError(
                f"gpu_experts is {section.gpu_experts}, the layer has {layer.num_experts} experts",
                where=layer.name,
                do="lower gpu_experts",
            )
    if any(getattr(section, budget) is not None for budget in BUDGETS):
        granularity = granularity_within(target_of(section.target), section.granularity)
        inputs = inputs_before(context, section, name, _unmeasured(context))
        known = sorted({*(section.named() or context.recipe.losses.bits), *inputs.decided_among()})
        refused_anyway = target_of(section.target).symmetric_only and not inputs.symmetric
        within = section.allocator.within_target and not refused_anyway
        limit = limit_of(inputs, widths_within(inputs, known) if within else known, granularity=granularity)
        if section.allocator.refuse is not None:
            section.allocator.refuse(inputs, limit)


def _check_codes(context: Context, name: str) -> None:
    """FormatError for a runtime that reads no codes of the kind that the recipe's replicas have, at whatever width."""
    target = loaded_by(name)
    refused = None if target is None else refuse_codes(target, context.recipe.losses.encoding)
    if refused is not None:
        raise FormatError(refused[0], where=f"assign.target: {name}", do=refused[1])


def _check_settled(context: Context, section: AssignSection, name: str) -> None:
    """FormatError for a runtime that loads nothing of such a grid, or not the widths that a section settles."""
    target, encoding = loaded_by(name), context.recipe.losses.encoding
    if target is None:
        return
    reason = refuse_grid(target, symmetric=encoding.symmetric)
    if reason is not None:
        raise FormatError(reason, where=f"target {name}")
    names = [layer.name for layer in context.model.layers]
    widths = settled(context, section) or [[] for _ in names]
    refuse_widths(target, widths, names, symmetric=encoding.symmetric, group_size=encoding.group_size)


def _unmeasured(context: Context) -> ExpertProfile:
    """A profile that tells no expert from another: what a budget must pay does not follow from statistics."""
    flat = [np.ones((1, 2, layer.num_experts)) for layer in context.model.layers]
    return ExpertProfile(
        layers=tuple(layer.name for layer in context.model.layers),
        top_k=(1,) * len(flat),
        counts=tuple(ones.astype(np.int64) for ones in flat),
        scores=tuple(flat),
        tokens=np.ones((1, 2), np.int64),
    )
