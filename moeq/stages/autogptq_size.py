"""What a checkpoint in AutoGPTQ's layout takes on disk: what `size` limits for the runtimes that load it.

As in `checkpoint_size`, from shapes alone, and what is of unknown length before it is written counts at its longest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from moeq.artifacts import manifest
from moeq.artifacts.assignment import DROPPED, FULL
from moeq.artifacts.targets import Grid, Target, grids_of, loadable_grid
from moeq.artifacts.tensor_files import ENTRY_BYTES
from moeq.exporters.foreign import OTHERS_FILE, layer_file
from moeq.exporters.gptq import GPTQMODEL
from moeq.exporters.gptq_layout import PARTS, patterns
from moeq.models.disk_names import DiskNames
from moeq.models.experts import ExpertLayer
from moeq.runtimes import runtimes
from moeq.stages.checkpoint_size import SCHEMA, CheckpointSize
from moeq.stages.non_expert_sizes import Others
from moeq_kernels.widths import group_count

ORDERED = {"gptq": True, "auto-round": False}  # formats in this layout, and whether matrices have a g_idx
RULE = 160  # bytes of a rule beside its pattern
NAMED = 10  # of a name in the index beside it and its file


def is_autogptq(target: Target) -> bool:
    """Whether what is written for a target lies in AutoGPTQ's layout."""
    return target.name in runtimes() and runtimes()[target.name].exporter.name in ORDERED


class AutoGptqSize:
    """Bytes of the checkpoint for a target, by matrix."""

    def __init__(self, size: CheckpointSize, target: Target, *, mixed: bool) -> None:
        """mixed: whether matrices of an expert may differ in width."""
        self.mixed, self.size, self.target, self.recipe = mixed, size, target, size.recipe
        self.ordered = ORDERED[runtimes()[target.name].exporter.name]
        self.disk = DiskNames(size.model.skeleton)
        self._keys = {layer.index: (self.disk.experts(layer) or {}) for layer in size.layers}

    @property
    def other_bytes(self) -> int:
        """Bytes that no width decides: those of the native checkpoint without its manifest, headers and rules."""
        total = sum(size for name, size in self.size.fixed.items() if name not in (manifest.NAME, SCHEMA))
        others, experts = Others(self.size.context), tuple(f"{layer.name}." for layer in self.size.layers)
        total -= others.packed
        for module, grid in zip(others.modules, others.grids(), strict=True):
            total += _header(module.name) + self._stored(grid) + _indexed(module.name, PARTS, OTHERS_FILE)
        every = [name for name, one in self.size.model.skeleton.named_parameters() if one.dim() == 2]
        beside = [name.removesuffix(".weight") for name in every if not name.startswith(experts)]
        called = dict.fromkeys([*beside, *map(self.disk.renamed, beside)])
        total += (1 + len({module.kind for module in others.modules})) * _rules(called)
        mixes = len({*self.recipe.losses.bits, FULL})
        for layer in self.size.layers:
            shared = min(2 ** len(layer.projections) - 1, layer.num_experts) if self.mixed else 1  # matrices of a width
            total += mixes * _rules(self._names(layer, layer.projections[0]))
            for names in (self._names(layer, projection) for projection in layer.projections):
                total += layer.num_experts * _header(max(names, key=len)) + mixes * shared * sum(map(len, names))
        return total

    def matrix_bytes(self, layer: ExpertLayer, projection: str, bits: int) -> int:
        """Bytes of one matrix of an expert, with all that files say of it at its width."""
        if bits == DROPPED:
            return 0
        rows, inputs = layer.shape(projection)
        names = self._names(layer, projection)
        said = len(names) * (len(str(layer.num_experts)) + 1)  # the expert's number in rules
        said += _indexed(max(names, key=len), PARTS, layer_file(layer.index))
        if bits == FULL:
            return rows * inputs * self.size.dtype.itemsize + said
        (grid,) = grids_of(layer, projection, [bits], **vars(self.recipe.losses.encoding))
        return self._stored(grid) + said

    def _names(self, layer: ExpertLayer, projection: str) -> set[str]:
        """What rules call a matrix of a layer's last expert."""
        name, last = f"{layer.name}.{layer.num_experts - 1}.{projection}", (layer.num_experts - 1, projection)
        if self.target.name == GPTQMODEL:
            return {name}
        return {name, self.disk.renamed(name), self._keys[layer.index].get(last, name).removesuffix(".weight")}

    def _stored(self, grid: Grid) -> int:
        """Bytes of qweight, qzeros, scales and, where there is one, g_idx."""
        grid = loadable_grid(self.target, grid) if self.recipe.export.widen else grid
        groups = group_count(grid.inputs, grid.group_size)
        codes = grid.rows * grid.bits * (grid.inputs + groups) // 8
        return codes + 2 * groups * grid.rows + 4 * grid.inputs * self.ordered


def _header(name: str) -> int:
    """Bytes that a file's header has for a matrix: for all that it may be stored as."""
    return sum(ENTRY_BYTES + len(f'"{name}.{part}"') for part in ("weight", *PARTS))


def _indexed(name: str, parts: Iterable[str], file: str) -> int:
    return sum(NAMED + len(f"{name}.{part}{file}") for part in parts)


def _rules(names: Iterable[str]) -> int:
    """Bytes of rules for names that share a grid."""
    return sum(RULE + len(json.dumps(pattern)) for pattern in patterns(names))
