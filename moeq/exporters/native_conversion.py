"""Writing another tool's checkpoint in the native format: codes, scales and zero points as they are, and a manifest.

The native format has one group size and one kind of grid for all experts, and for all packed modules beside them. Where
a checkpoint has several, the largest size that divides them all is taken and scales and zero points stand there for
each of the smaller groups; symmetric grids beside others get zero points in the middle. Values do not change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moeq.artifacts.assignment import FULL, Assignment, ExpertChoice, LayerAssignment, join_widths
from moeq.artifacts.files import write_text
from moeq.artifacts.manifest import write_manifest
from moeq.artifacts.non_experts import OtherRow, OtherTable
from moeq.artifacts.targets import Grid
from moeq.errors import FormatError
from moeq.exporters.foreign import Draft
from moeq.exporters.native_writer import ExportInputs, layer_name, native_config, native_manifest, others_name
from moeq.exporters.plain import write_index, write_plain
from moeq.exporters.readers import format_of
from moeq.models.configuration import experts_a_token
from moeq.models.experts import ExpertLayer
from moeq.models.non_experts import OtherModule, find_others
from moeq.models.source import read_header
from moeq.models.streaming import blocks_of
from moeq.runtime.hook import HOOK_FILE, HOOK_TEXT, has_own_code
from moeq.runtime.packed_experts import GUARD_DTYPE, guard_shapes
from moeq.runtime.packed_modules import GUARD_SHAPE, guard_name
from moeq_kernels.checkpoint import DENSE
from moeq_kernels.grids import SCALE_DTYPE
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import pack, unpack
from moeq_kernels.widths import METHOD, MORE, PARTS, group_count, resolved_group_size

NAME = "carried over"  # of the assignment
OTHER_WIDTHS = (2, 3, 4, 8)  # of packed modules outside of the experts
ELSEWHERE = "evaluate and serve it where it is, or convert it to dequantized"


@dataclass(kw_only=True)
class Common:
    """The one grid that many matrices are written with: group_size -1 is a whole row; symmetric: no zero points.

    more: state_bits and codebook of codes that are no grid's, which all of them then are.
    """

    sizes: set[int] = field(default_factory=set)
    symmetric: bool = True
    more: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, grid: Grid) -> None:
        """Take in a matrix; FormatError naming one whose codes are of another kind than those before it."""
        more = {part: getattr(grid, part) for part in MORE}
        if self.sizes and more != self.more:
            raise FormatError("codes of another kind than those before it", where=f"for native: {name}", do=ELSEWHERE)
        self.more = more
        self.sizes.add(grid.group_size)
        self.symmetric = self.symmetric and (grid.symmetric or grid.bits == 1)

    @property
    def group_size(self) -> int:
        return math.gcd(*(size for size in self.sizes if size != -1)) or -1

    def of(self, weight: PackedWeight) -> PackedWeight:
        """The same values in this grid."""
        size = resolved_group_size(weight.inputs, self.group_size)
        starts = torch.arange(group_count(weight.inputs, self.group_size)) * size
        of_group = starts // resolved_group_size(weight.inputs, weight.group_size)
        zeros = None
        if not self.symmetric and weight.bits > 1:
            zeros = torch.full(weight.scales.shape, 2 ** (weight.bits - 1), dtype=torch.uint8)
            if weight.zeros is not None:
                zeros = unpack(weight.zeros, weight.bits, weight.scales.shape[-1])
        return replace(
            weight,
            scales=weight.scales[:, of_group],
            zeros=None if zeros is None else pack(zeros[:, of_group], weight.bits),
            group_size=self.group_size,
            symmetric=self.symmetric,
        )


def write(draft: Draft) -> None:
    """FormatError for what the native format does not hold as it is, with the name of the matrix."""
    if format_of(draft.source.source) == METHOD:
        raise FormatError("it is in the native format already", where=draft.source.source.name, do="copy it")
    layers = draft.source.layers
    modules = _modules(draft)
    common, widths = _surveyed(draft, layers)
    beside, rows = _surveyed_modules(draft, modules)
    draft.plain.clear()  # all is read again
    for layer in layers:
        _write_layer(draft, layer, common)
    _write_modules(draft, modules, beside)
    renamed = _renamed(draft)
    where = write_plain(
        draft.source.source, draft.source.rest(), draft.directory, draft.options.max_shard_bytes, renamed
    )
    write_index(draft.directory, draft.where | where)
    inputs = _inputs(draft, common, widths, OtherTable(modules=tuple(rows)) if rows else None)
    headers = {key: head for path in draft.directory.glob("*.safetensors") for key, head in read_header(path).items()}
    if not inputs.own_code:
        write_text(draft.directory / HOOK_FILE, HOOK_TEXT)
    write_manifest(draft.directory, native_manifest(inputs, headers, draft.sides))
    draft.complete(native_config(inputs, draft.sides.config(draft.source.config)))


def _surveyed(draft: Draft, layers: Iterable[ExpertLayer]) -> tuple[Common, dict[str, list[dict[str, int]]]]:
    """The experts' common grid, and {layer: [{projection: bits} of every expert]}: all is read, and refused here."""
    common = Common()
    widths: dict[str, list[dict[str, int]]] = {}
    for layer in layers:
        widths[layer.name] = [{} for _ in range(layer.num_experts)]
        for expert, projection, name, matrix in draft.matrices(layer):
            widths[layer.name][expert][projection] = FULL
            if isinstance(matrix, PackedWeight):
                if matrix.encoding.floats:
                    what = f"{matrix.codebook.upper()}; moeq writes it in the native format from a run alone"
                    raise FormatError(what, where=f"for native: {name}", do=ELSEWHERE)
                _check_scales(name, matrix)
                common.add(name, draft.grids[name])
                widths[layer.name][expert][projection] = matrix.bits
    return common, widths


def _check_scales(name: str, weight: PackedWeight) -> None:
    if weight.scales.dtype != SCALE_DTYPE:
        raise FormatError("scales that float16 does not hold", where=f"for native: {name}", do=ELSEWHERE)


def _modules(draft: Draft) -> dict[str, OtherModule]:
    """The packed modules outside of the experts; FormatError for one that native checkpoints cannot pack."""
    found = find_others(draft.model, draft.source.layers)
    known = {module.name: module for module in found.modules}
    for name in draft.source.other_names():
        if name not in known or known[name].tied is not None:
            why = (
                "one tensor with another module"
                if name in known
                else found.left.get(name, ("", "no linear of a kind"))[1]
            )
            raise FormatError(f"packed, and {why}", where=f"for native: {name}", do=ELSEWHERE)
    return {name: known[name] for name in draft.source.other_names()}


def _carried(draft: Draft) -> Iterator[tuple[str, PackedWeight]]:
    """Packed modules outside of the experts, each as the native format holds it."""
    for name, weight in draft.source.others():
        loadable = draft.loadable(name, weight)
        _check_scales(name, loadable)
        if loadable.encoding.codes != "grid":
            what = f"{loadable.codebook.upper()}; modules outside of the experts have grids"
            raise FormatError(what, where=f"for native: {name}", do=ELSEWHERE)
        if loadable.bits not in OTHER_WIDTHS:
            what = f"{loadable.bits} bits; modules outside of the experts have {', '.join(map(str, OTHER_WIDTHS))}"
            raise FormatError(what, where=f"for native: {name}", do=ELSEWHERE)
        yield name, loadable


def _surveyed_modules(draft: Draft, modules: dict[str, OtherModule]) -> tuple[Common, list[OtherRow]]:
    """The common grid of packed modules outside of the experts, and a row of each."""
    common = Common()
    bits: dict[str, int] = {}
    for name, weight in _carried(draft):
        bits[name] = weight.bits
        common.add(name, draft.grids[name])
    heads = {module.tied: module.name for module in find_others(draft.model, draft.source.layers).modules}
    rows = [
        OtherRow(
            module=name,
            kind=module.kind,
            bits=bits[name],
            method=_method(draft),
            group_size=common.group_size,
            symmetric=common.symmetric,
            rows=module.rows,
            inputs=module.inputs,
            relative_error=None,
            calibration_rows=0,
            heldout_rows=0,
            fallback="none",
            bytes=0,
            tied=heads.get(name),
        )
        for name, module in modules.items()
    ]
    return common, rows


def _write_layer(draft: Draft, layer: ExpertLayer, common: Common) -> None:
    """Write a layer's experts into a file of their own, with tensors that make loading without moeq fail."""
    guards = {f"{layer.name}.{name}": shape for name, shape in guard_shapes(layer).items()}
    stems = [f"{layer.name}.{expert}.{name}" for expert in range(layer.num_experts) for name in layer.projections]
    keys = [f"{stem}.{part}" for stem in stems for part in (*PARTS, DENSE, "bias")]
    with draft.file(layer_name(layer.index), [*keys, *guards]) as add:
        for _, _, name, matrix in draft.matrices(layer):
            for part, tensor in _parts(matrix, common).items():
                add(f"{name}.{part}", tensor)
            if name in draft.biases:
                add(f"{name}.bias", draft.biases[name])
        for key, shape in guards.items():
            add(key, torch.zeros(shape, dtype=GUARD_DTYPE))


def _parts(matrix: PackedWeight | Tensor, common: Common) -> dict[str, Tensor]:
    return {DENSE: matrix} if isinstance(matrix, Tensor) else common.of(matrix).parts()


def _write_modules(draft: Draft, modules: dict[str, OtherModule], common: Common) -> None:
    """Write the packed modules outside of the experts, a file a decoder layer, each with its guard."""
    numbers = {block: number for number, block in enumerate([*blocks_of(draft.model), ""])}
    by_file: dict[str, list[str]] = {}
    for name, module in modules.items():
        by_file.setdefault(others_name(numbers[module.block]), []).append(name)
    for file, names in by_file.items():
        keys = [f"{name}.{part}" for name in names for part in PARTS]
        with draft.file(file, [*keys, *map(guard_name, names)]) as add:
            for name, weight in _carried(draft):
                if name in names:
                    for part, tensor in common.of(weight).parts().items():
                        add(f"{name}.{part}", tensor)
                    add(guard_name(name), torch.zeros(GUARD_SHAPE, dtype=GUARD_DTYPE))


def _renamed(draft: Draft) -> dict[str, str]:
    """{key: the family's own name on disk} of what is not packed, which some tools call as it is in memory."""
    known = draft.model.state_dict()
    memory = {key: draft.names.in_memory(key) for key in draft.source.rest()}
    return {key: draft.names.renamed(name) for key, name in memory.items() if name in known}


def _method(draft: Draft) -> str:
    return f"as in {format_of(draft.source.source)}"


def _inputs(
    draft: Draft, common: Common, widths: dict[str, list[dict[str, int]]], others: OtherTable | None
) -> ExportInputs:
    """What the manifest says of a checkpoint that no run made: every expert on the GPU, as it was."""
    source, own = draft.source.source, has_own_code(draft.model)
    layers = []
    for name, experts in widths.items():
        choices = []
        for matrices in experts:
            joined = join_widths(matrices)
            mixed = {} if isinstance(joined, int) else {"projections": dict(joined)}
            choices.append(ExpertChoice(tier="gpu", bits=max(matrices.values()), importance=0.0, **mixed))
        layers.append(LayerAssignment(name=name, experts=tuple(choices)))
    assignment = Assignment(
        name=NAME,
        method=_method(draft),
        group_size=common.group_size,
        symmetric=common.symmetric,
        layers=tuple(layers),
        **common.more,
    )
    config: Any = draft.model.config
    own_top_k = [layer.kind.top_k for layer in draft.source.layers]
    top_k = tuple(own or experts_a_token(config.to_dict()) for own in own_top_k)
    stamp = source.stamp()
    return ExportInputs(
        source=source,
        layers=draft.source.layers,
        top_k=top_k,
        assignment=assignment,
        expert_keys=set(),
        expert_files=[],
        quantizers={
            layer.name: [
                {choice.key: _method(draft)} if choice.bits != FULL or choice.projections else {}
                for choice in layer.experts
            ]
            for layer in assignment.layers
        },
        max_shard_bytes=draft.options.max_shard_bytes,
        stamp=stamp.model_copy(update={"name": draft.options.model_name or stamp.name}),
        digests={"checkpoint": stamp.digest},
        others=others,
        own_code=own,
        trust_remote_code=draft.options.trust_remote_code,
        making=draft.options.making,
    )
