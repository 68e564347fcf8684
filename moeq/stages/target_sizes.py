"""What an assigner counts: bytes of experts as a section's target stores them, and what `size` counts beside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moeq.artifacts import manifest
from moeq.artifacts.assignment import DROPPED, FULL
from moeq.artifacts.targets import Target, target_of
from moeq.exporters.exporter import more_bytes
from moeq.folders import bytes_in
from moeq.recipe import AssignSection
from moeq.stages.autogptq_size import AutoGptqSize, is_autogptq
from moeq.stages.checkpoint_size import SCHEMA, CheckpointSize
from moeq.stages.context import Context
from moeq.stages.expert_bytes import loaded_bytes
from moeq.stages.non_expert_sizes import Others
from moeq.tables import human_size

NAMED = 1024  # bytes of what a module's tensors are called, in headers, the index and config.json
Matrices = Sequence[Mapping[str, Mapping[int, int]]]


def sizes(context: Context, config: AssignSection) -> dict[str, Any]:
    """`AssignInputs`' bytes and matrix_bytes, and where a section limits `size` its record_bytes and other_bytes."""
    widths = (DROPPED, *context.recipe.losses.bits, FULL)
    matrices = tuple(
        {
            name: {bits: loaded_bytes(context, config, layer, name, bits) for bits in widths}
            for name in layer.projections
        }
        for layer in context.model.layers
    )
    whole = tuple({bits: sum(of[bits] for of in each.values()) for bits in widths} for each in matrices)
    return {"bytes": whole, "matrix_bytes": matrices, **_beside(context, config, matrices)}


def sizes_of_target(context: Context, config: AssignSection, target: Target) -> dict[str, Any]:
    """The same for another target than a section's; nothing where both count what the native checkpoint stores."""
    counted = (target, target_of(config.target))
    if all(not one.has_own_bytes and (config.size is None or not is_autogptq(one)) for one in counted):
        return {}
    return sizes(context, config.model_copy(update={"target": target.name}))


def _beside(context: Context, config: AssignSection, matrices: Matrices) -> dict[str, Any]:
    """What `size` counts beside the experts' own tensors; nothing where a section does not limit it.

    Of a target in AutoGPTQ's layout, or whose groups take other bytes, it is the checkpoint for that which is limited,
    of one with blocks of its own the file: it has all else that the native checkpoint has, the tokenizer twice. Both of
    the latter say nothing of single matrices.
    """
    if config.size is None:
        return {}
    size, target = CheckpointSize(context), target_of(config.target)
    if target.block_bytes is not None:
        none = tuple({name: dict.fromkeys(sizes, 0) for name, sizes in own.items()} for own in matrices)
        return {"other_bytes": size.other_bytes + sum(context.model.side_files.sizes().values()), "record_bytes": none}
    if target.group_bytes is not None:
        none = tuple({name: dict.fromkeys(sizes, 0) for name, sizes in own.items()} for own in matrices)
        return {"other_bytes": _beside_stacks(size, target), "record_bytes": none}
    mixed = config.granularity == "projection"
    counted = AutoGptqSize(size, target, mixed=mixed) if is_autogptq(target) else size
    records = tuple(
        {
            name: {bits: counted.matrix_bytes(layer, name, bits) - stored for bits, stored in sizes.items()}
            for name, sizes in own.items()
        }
        for layer, own in zip(context.model.layers, matrices, strict=True)
    )
    return {"other_bytes": counted.other_bytes, "record_bytes": records}


def _beside_stacks(size: CheckpointSize, target: Target) -> int:
    """Bytes that no width decides where experts lie in stacks: those of the native checkpoint without its manifest, and
    what the target takes more of what is packed beside the experts."""
    others = Others(size.context)
    more = sum(more_bytes(target, grid, widen=size.recipe.export.widen) for grid in others.grids())
    stacks = sum(len(layer.projections) for layer in size.layers)
    own = sum(taken for name, taken in size.fixed.items() if name not in (manifest.NAME, SCHEMA))
    return own + more + NAMED * (len(others.modules) + stacks)


def beyond_size(context: Context, directory: Path) -> Iterator[str]:
    """What is told of a checkpoint for a runtime that takes more than `size`, which limits another."""
    section = context.recipe.assign
    target = target_of(section.target)
    own = target.has_own_bytes or is_autogptq(target)
    limited = f"checkpoint-{section.target}" if own else "checkpoint"
    if section.size is not None and (there := bytes_in(directory)) > section.size:
        yield f"takes {human_size(there)}: assign.size, {human_size(section.size)}, limits {limited}, not this"
