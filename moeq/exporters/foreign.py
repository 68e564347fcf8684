"""Writing a packed checkpoint for another runtime: what the formats have in common.

Tensors are written while the next ones are converted, of an expert that was read meanwhile, and a few are held; files
are synced while the next are written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import copy_file, filling, sync, write_json, write_text
from moeq.artifacts.provenance import Making
from moeq.artifacts.sums import write_sums
from moeq.artifacts.targets import ANY_GRID, Grid, Target, loadable_grid, refuse_matrix
from moeq.artifacts.tensor_files import TensorFile
from moeq.errors import ArtifactError, FormatError
from moeq.exporters.exporter import Exporter
from moeq.exporters.front_matter import CARD, code_lines, front_matter, markdown, read_origin
from moeq.exporters.packed_source import Matrices, PackedSource
from moeq.exporters.plain import METADATA, write_index, write_plain
from moeq.models.auto_names import CAUSAL, auto_name
from moeq.models.disk_names import DiskNames
from moeq.models.experts import ExpertLayer, find_expert_layers
from moeq.models.loading import describe
from moeq.models.side_files import SOURCE_CARD, SideFiles, find_side_files
from moeq.models.source import ModelSource, check_part
from moeq.progress import Bar, no_bar
from moeq.runtimes import Runtime
from moeq.version import __version__
from moeq_kernels.packed import PackedWeight, widened

AHEAD = 4  # tensors that may wait to be written
OTHERS_PLAIN = (
    "modules outside of the experts are loaded in full precision only",
    "run without `others`, as --for has it, or write it for llama.cpp or mlx",
)
Names = dict[tuple[int, str], str]  # {(expert, projection): key of the matrix}
Tensors = Callable[[str, PackedWeight | Tensor], Mapping[str, Tensor]]  # of a matrix, by what follows its module's name


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """max_shard_bytes: of plain tensors; widen: whether what a target cannot read is stored in a wider symmetric grid
    of the same values; model_name: for the model card; converted: whether the source's own card goes along; settings:
    the exporter's own keys, None: their defaults; making: what the provenance says, None: there is none; bar: counts
    the experts that were read."""

    max_shard_bytes: int = 5 * 10**9
    widen: bool = False
    trust_remote_code: bool = False
    model_name: str = ""
    converted: bool = False
    settings: Any = None
    making: Making | None = None
    bar: Bar = no_bar


class Buffers:
    """Memory for tensors that wait to be written, used again and again: fresh pages cost as much as a copy."""

    def __init__(self) -> None:
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(AHEAD + 1)]

    def contiguous(self, tensor: Tensor) -> Tensor:
        """The tensor, or a contiguous copy that stays as it is while AHEAD more are made."""
        if tensor.is_contiguous():
            return tensor
        size = tensor.numel() * tensor.element_size()
        memory = self._memory.pop(0)
        self._memory.append(memory if memory.numel() >= size else torch.empty(size, dtype=torch.uint8))
        return self._memory[-1][:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)


@dataclass(kw_only=True)
class Draft:
    """An unfinished checkpoint. runtime: what is to load it; where: the file of every tensor; grids: of every packed
    module, by its name in memory; plain: modules of experts in full precision, by theirs; notes: lines on what is not
    as it was in the checkpoint; biases: of the expert whose matrices come, {module: bias [N]}; advance: is told of
    every expert, once."""

    runtime: Runtime
    source: PackedSource
    options: WriteOptions
    directory: Path
    model: nn.Module
    names: DiskNames
    sides: SideFiles
    advance: Callable[[], None]
    where: dict[str, str] = field(default_factory=dict)
    grids: dict[str, Grid] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    biases: dict[str, Tensor] = field(default_factory=dict)
    buffers: Buffers = field(default_factory=Buffers)
    reading: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    writing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    syncing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    unsynced: list[Future[None]] = field(default_factory=list)
    told: set[tuple[str, int]] = field(default_factory=set)

    def restart(self) -> None:
        """Forget what was written."""
        wait(self.unsynced)
        for path in self.directory.iterdir():
            path.unlink()
        self.where, self.grids, self.plain, self.notes, self.unsynced = {}, {}, [], [], []

    @property
    def exporter(self) -> Exporter:
        """Whose format it is."""
        exporter: Exporter = self.runtime.exporter
        return exporter

    @property
    def target(self) -> Target:
        """What the checkpoint is checked against."""
        target: Target = self.runtime.target
        return target

    def expert_keys(self, layer: ExpertLayer) -> Names:
        """Keys of the experts' weights as the family has them; FormatError where it keeps them in other tensors."""
        return _keys_of(self.names, layer, self.source.config.get("model_type"), f"for {self.runtime.name}")

    def expert(self, layer: ExpertLayer, expert: int) -> tuple[Matrices, dict[str, Tensor]]:
        """Matrices and biases of one expert; ArtifactError where a packed one stands for no numbers."""
        matrices, biases = self.source.expert(layer, expert)
        for projection, matrix in matrices.items():
            if isinstance(matrix, PackedWeight) and not matrix.are_numbers():
                where = f"{self.source.source.name}, {layer.name}, expert {expert}, {projection}"
                raise ArtifactError("scales that are not finite", where=where, do="make the checkpoint again")
        if (layer.name, expert) not in self.told:
            self.told.add((layer.name, expert))
            self.advance()
        return matrices, biases

    def matrices(
        self, layer: ExpertLayer, bits: int | Mapping[str, int | None] | None = None
    ) -> Iterator[tuple[int, str, str, PackedWeight | Tensor]]:
        """(expert, projection, name, matrix) in turn, each as the target can load it, or at `bits`, its projection's.

        FormatError for what it cannot load. The next expert is read, and its digest taken, meanwhile.
        """
        coming = self.reading.submit(self.expert, layer, 0)
        for expert in range(layer.num_experts):
            matrices, biases = coming.result()
            self.biases = {f"{layer.name}.{expert}.{projection}": bias for projection, bias in biases.items()}
            if expert + 1 < layer.num_experts:
                coming = self.reading.submit(self.expert, layer, expert + 1)
            for projection, matrix in matrices.items():
                name = f"{layer.name}.{expert}.{projection}"
                if isinstance(matrix, PackedWeight):
                    own = bits.get(projection) if isinstance(bits, Mapping) else bits
                    yield expert, projection, name, self.loadable(name, matrix, own)
                else:
                    self.plain.append(name)
                    yield expert, projection, name, matrix

    def loadable(self, name: str, weight: PackedWeight, bits: int | None = None) -> PackedWeight:
        """The weight as it is or, where options.widen, in the wider grid that the target needs (or of `bits`).

        Raises FormatError naming what the target cannot read; notes the grid.
        """
        grid = grid_of(weight)
        if self.options.widen and not grid.nested and not grid.codebook:
            wide = bits or loadable_grid(self.target, grid).bits
            weight = weight if wide == grid.bits and bits is None else self._widened(name, weight, wide)
        refused = refuse_matrix(self.target, grid_of(weight))
        if refused is not None:
            raise FormatError(refused[0], where=f"for {self.runtime.name}: {name}", do=refused[1])
        self.grids[name] = grid_of(weight)
        return weight

    def _widened(self, name: str, weight: PackedWeight, bits: int) -> PackedWeight:
        try:
            return widened(weight, bits)
        except ValueError as error:  # a sign grid's scale that float16 does not halve
            raise FormatError(str(error), where=f"for {self.runtime.name}: {name}", do=ANY_GRID) from None

    def other(self, name: str, weight: PackedWeight) -> PackedWeight:
        """As `loadable`, of a module outside of the experts."""
        check_other(self.runtime, self.names, name, grid_of(weight), widen=self.options.widen)
        return self.loadable(name, weight)

    def write_experts(
        self, layer: ExpertLayer, weights: Names, parts: Sequence[str], tensors: Tensors, bits: int | None = None
    ) -> None:
        """Write a layer's experts into a file of their own.

        weights: the key of every matrix as the model has it, `MODULE.weight`; parts: what a matrix may be stored as,
        each as `MODULE.PART`; tensors(name, matrix): the parts of one.
        """
        stems = {place: key.removesuffix("weight") for place, key in weights.items()}
        with self.file(layer_file(layer.index), (f"{stem}{part}" for stem in stems.values() for part in parts)) as add:
            for expert, projection, name, matrix in self.matrices(layer, bits):
                for part, tensor in tensors(name, matrix).items():
                    add(f"{stems[expert, projection]}{part}", tensor)

    @contextmanager
    def file(self, name: str, tensors: Iterable[str]) -> Iterator[Callable[[str, Tensor], None]]:
        """A file of a checkpoint, as what adds a tensor to it; tensors: names of all that may come.

        A tensor is written beside what follows, and must not change; one that is not contiguous is copied.
        """
        path = self.directory / name
        stream = TensorFile(path, tensors, METADATA)
        pending: deque[Future[None]] = deque()

        def add(key: str, tensor: Tensor) -> None:
            if len(pending) == AHEAD:
                pending.popleft().result()
            self.where[key] = name
            pending.append(self.writing.submit(stream.add, key, self.buffers.contiguous(tensor)))

        try:
            yield add
            for written in pending:
                written.result()
            stream.finish()
        finally:
            wait(pending)
            stream.close()
        self.unsynced.append(self.syncing.submit(_kept, path, stream))

    def write(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a file of tensors that are all there."""
        with self.file(file, tensors) as add:
            for key, tensor in tensors.items():
                add(key, tensor)

    def finish(
        self,
        quantization: Mapping[str, Any] | None,
        renamed: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Write what is not packed, config.json, the index, the side files, the model card and the digests of all.

        more: keys of config.json beside the source's.
        """
        rest = write_plain(
            self.source.source, self.source.rest(), self.directory, self.options.max_shard_bytes, renamed
        )
        self.where |= rest
        write_index(self.directory, self.where)
        block = {} if quantization is None else {"quantization_config": dict(quantization)}
        self.complete(self.sides.config({**self.source.config, **(more or {}), **block}))

    def complete(self, config: Mapping[str, Any]) -> None:
        """Write config.json, the side files, the model card, the provenance and the digests of all files."""
        write_json(self.directory / "config.json", config)
        self.sides.copy(self.directory)
        write_text(self.directory / CARD, card(self))
        own = self.source.source.path / CARD
        if self.options.converted and own.is_file():
            check_part(own.parent, CARD)
            copy_file(own, self.directory / SOURCE_CARD, digest_of_file(own))
        for file in self.unsynced:
            file.result()
        if self.options.making is not None:
            self.options.making.write(self.directory)
        write_sums(self.directory)


def check_experts(source: ModelSource, model: nn.Module) -> None:
    """FormatError for a family that does not keep every matrix of an expert in a tensor of its own."""
    names = DiskNames(model)
    for layer in find_expert_layers(model, needed=False):
        _keys_of(names, layer, source.config.get("model_type"), None)


def check_whole(source: ModelSource, model: nn.Module) -> None:
    """As `check_experts`; FormatError also where parameters of a layer's experts hold more than these, which are not
    packed: transformers, which loads the packed ones by the module, finds none of the others."""
    check_experts(source, model)
    check_counts(source, model)


def check_counts(source: ModelSource, model: nn.Module) -> None:
    """FormatError where parameters of a layer's experts hold more than these."""
    for layer in find_expert_layers(model, needed=False):
        module = model.get_submodule(layer.name)
        most = max(module.get_parameter(name).shape[0] for name in layer.parameters)
        if most != layer.num_experts:
            family, more = source.config.get("model_type"), most - layer.num_experts
            what = f"model_type {family} stores matrices of {more} experts that compute nothing, beside the packed ones"
            raise FormatError(what, where=layer.name, do=ANY_GRID)


def _keys_of(names: DiskNames, layer: ExpertLayer, family: str | None, where: str | None) -> Names:
    keys = None if layer.biased else names.experts(layer)
    if keys is None:
        why = "has biases" if layer.biased else "does not keep every matrix of an expert in a tensor of its own"
        raise FormatError(f"model_type {family} {why}", where=where, do=ANY_GRID)
    return keys


def check_other(runtime: Runtime, names: DiskNames, name: str, grid: Grid, *, widen: bool) -> None:
    """FormatError for a module outside of the experts that a runtime would not load as it is packed."""
    target, own = runtime.target, runtime.exporter.refuse_other
    refused = None if target.others else OTHERS_PLAIN
    if refused is None and own is not None:
        refused = own(names, name, (grid.rows, grid.inputs))
    refused = refused or refuse_matrix(target, loadable_grid(target, grid) if widen else grid)
    if refused is not None:
        do = refused[1].replace("set losses.", "set others.")
        raise FormatError(refused[0], where=f"for {runtime.name}: {name}", do=do)


def _kept(path: Path, stream: TensorFile) -> None:
    """See that a finished file is on the disk, as it was written."""
    sync(path)
    stream.check()


@contextmanager
def drafting(runtime: Runtime, source: PackedSource, directory: Path, options: WriteOptions) -> Iterator[Draft]:
    """A draft that becomes `directory` when the block ends well; an older one is replaced only then."""
    model = describe(replace(source.source, config=source.config), options.trust_remote_code)[0]
    sides = find_side_files(source.source.path, source.config, options.trust_remote_code)
    if options.settings is None and runtime.exporter.settings is not None:
        options = replace(options, settings=runtime.exporter.settings())
    experts = sum(layer.num_experts for layer in source.layers)
    with filling(directory) as unfinished, options.bar(f"for {runtime.name}", experts) as advance:
        draft = Draft(
            runtime=runtime,
            source=source,
            options=options,
            directory=unfinished,
            model=model,
            names=DiskNames(model),
            sides=sides,
            advance=advance,
        )
        with draft.reading, draft.syncing, draft.writing:
            yield draft


def grid_of(weight: PackedWeight) -> Grid:
    """How a weight is stored; 1 bit is a sign grid, 4 nested bits are a grid like any other."""
    return Grid(
        rows=weight.scales.shape[-2],
        inputs=weight.inputs,
        bits=weight.bits,
        group_size=weight.group_size,
        symmetric=weight.zeros is None,
        nested=weight.nested and weight.bits < 4,
        state_bits=weight.state_bits,
        codebook=weight.codebook,
    )


def layer_file(index: int) -> str:
    """File of one MoE layer's experts."""
    return f"model-experts-{index:03d}.safetensors"


OTHERS_FILE = "model-others.safetensors"


def card(draft: Draft) -> str:
    """A model card that names the runtime, the version that was measured, and how to load it."""
    source, exporter, target = draft.source.source, draft.exporter, draft.runtime.target
    called, snippet = (target and target.called) or exporter.runtime, (target and target.snippet) or exporter.snippet
    name = draft.options.model_name or source.name
    snippet = snippet.replace(CAUSAL, auto_name(source.config))
    widths = Counter(grid.bits for grid in draft.grids.values())
    counted = ", ".join(f"{count} at {bits} code bits" for bits, count in sorted(widths.items())) or "none"
    return "\n".join(
        [
            *front_matter(name, exporter.library, read_origin(source.path), converted=draft.options.converted),
            f"# {markdown(name)} for {called}",
            "",
            f"Written by moeq {__version__} for {called}.",
            f"Packed matrices: {counted}; in full precision: {len(draft.plain)} matrices of experts, and all else.",
            *(f"\n{markdown(note)}." for note in draft.notes),
            *code_lines(draft.sides.code_digests()),
            "",
            "```python",
            snippet,
            "```",
            "",
        ]
    )
