"""assign: which expert gets which width and where it lives."""

from __future__ import annotations

from typing import Any

from moeq.artifacts.assignment import FULL, Assignment, read_assignment, write_assignment
from moeq.assigners import assign
from moeq.assigners.inputs import AssignInputs
from moeq.errors import AssignmentError
from moeq.models.experts import ExpertLayer
from moeq.models.loading import source_dtype
from moeq.numerics.packed import packed_bytes
from moeq.recipe import AssignSection
from moeq.stages import losses, others, profile
from moeq.stages.context import Context

NAME = "assignment.json"


def run(context: Context) -> dict[str, Any]:
    """Write assignment.json; returns the summary."""
    assignment = make(context, context.recipe.assign, context.recipe.name)
    write_assignment(context.directory("assign") / NAME, assignment)
    return summarize(context, assignment)


def check(context: Context) -> None:
    """AssignmentError when a section asks for more GPU experts than a layer has."""
    for section in (context.recipe.assign, *context.recipe.eval.compare):
        for layer in context.layers:
            if section.gpu_experts > layer.num_experts:
                raise AssignmentError(
                    f"gpu_experts is {section.gpu_experts}, the layer has {layer.num_experts} experts",
                    where=layer.name,
                    do="lower gpu_experts",
                )


def make(context: Context, config: AssignSection, name: str) -> Assignment:
    """Decide one assignment; AssignmentError when a width it names was not made into replicas."""
    section = context.recipe.losses
    if config.bits is not None and config.bits != FULL and config.bits not in section.bits:
        raise AssignmentError(
            f"{config.bits} bits is not among losses.bits {list(section.bits)}", where=name, do="add it to losses.bits"
        )
    inputs = AssignInputs(
        name=name,
        config=config,
        profile=profile.load(context),
        losses=losses.load(context),
        group_size=section.group_size,
        symmetric=section.symmetric,
    )
    return assign(inputs)


def expert_bytes(layer: ExpertLayer, bits: int, assignment: Assignment, full_bytes_per_weight: int) -> int:
    """Stored bytes of one expert at a width: codes, scales and zero points, or the checkpoint's own weights at 16.

    Biases stay in the checkpoint's type at every width.
    """
    biases = layer.biases_per_expert * full_bytes_per_weight
    if bits == FULL:
        return layer.parameters_per_expert * full_bytes_per_weight + biases
    shapes = (layer.shape(projection) for projection in layer.projections)
    return biases + sum(packed_bytes(*shape, bits, assignment.group_size, assignment.symmetric) for shape in shapes)


def total_bytes(context: Context, assignment: Assignment) -> int:
    """Bytes of all experts at their placed widths."""
    size = source_dtype(context.source).itemsize
    return sum(
        expert_bytes(layer, int(bits), assignment, size)
        for layer, widths in zip(context.layers, assignment.bits(), strict=True)
        for bits in widths
    )


def summarize(context: Context, assignment: Assignment) -> dict[str, Any]:
    """Average bits, bytes and the number of experts at each width."""
    ndp, everywhere = assignment.average_bits("ndp"), assignment.average_bits()
    flat = [int(bits) for layer in assignment.bits() for bits in layer]
    size = total_bytes(context, assignment)
    return {
        "method": assignment.method,
        "average_bits_ndp": None if ndp is None else float(ndp),
        "average_bits_all": None if everywhere is None else float(everywhere),
        "expert_bytes": size,
        **others.sizes(context, size),
        "experts_by_bits": {str(bits): flat.count(bits) for bits in assignment.widths()},
        "gpu_experts": int(sum(hot.sum() for hot in assignment.hot())),
    }


def load(context: Context) -> Assignment:
    """Read the assignment and check it against the model."""
    path = context.directory("assign") / NAME
    assignment = read_assignment(path)
    wanted = [(layer.name, layer.num_experts) for layer in context.layers]
    found = [(layer.name, len(layer.experts)) for layer in assignment.layers]
    if wanted != found:
        raise AssignmentError(
            "the assignment is for other layers or experts than the model has",
            where=str(path),
            do="run `moeq assign` again",
        )
    return assignment
