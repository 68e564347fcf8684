"""What is not a routed expert, where the recipe gives it a width: made in the walk of `losses`, kept in the store.

The store has these modules under a set of their own, so that neither their settings touch the experts' replicas nor the
reverse. A class of modules that is there is not made again when another gets another width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from torch import Tensor

from moeq.artifacts import non_experts as artifact
from moeq.artifacts import replicas
from moeq.artifacts.files import digest_of
from moeq.artifacts.non_experts import MadeOthers, OtherIndex, OtherRow, OtherTable
from moeq.artifacts.replicas import LayerReplicas
from moeq.artifacts.targets import refuse_shape, targets
from moeq.errors import ArtifactError, RecipeError
from moeq.models.corpus import Sequences
from moeq.models.declared import scale_keys
from moeq.models.disk_names import DiskNames
from moeq.models.non_experts import EMBEDDINGS, HEAD, OtherModule, by_block, weight_keys
from moeq.models.streaming import blocks_of
from moeq.models.walk import end_batch
from moeq.models.weights import plain_header
from moeq.quantizers.layer_data import heldout_stride
from moeq.quantizers.non_experts import (
    ROUNDING,
    Grid,
    Listener,
    Result,
    quantize_embedding,
    quantize_linears,
)
from moeq.recipe import Recipe
from moeq.registry import QUANTIZERS
from moeq.runtimes import runtimes
from moeq.stages.context import Context
from moeq.stages.expert_bytes import expert_weights
from moeq.stages.replicas import lacking
from moeq_kernels.packed import PackedWeight, packed_bytes

REVISION = 1  # raised when the same inputs give other codes or figures


def grid(recipe: Recipe, kind: str) -> Grid:
    """How a class of modules is to be quantized."""
    section = recipe.others
    return Grid(
        method=ROUNDING if kind == EMBEDDINGS else section.method,
        bits=section.widths()[kind],
        group_size=recipe.losses.group_size if section.group_size is None else section.group_size,
        symmetric=section.symmetric,
        damping=recipe.losses.damping if section.damping is None else section.damping,
    )


def chosen(context: Context) -> list[OtherModule]:
    """The modules that the recipe gives a width, but for a head that is one tensor with the embeddings, and for those
    that its target has no place for."""
    left = left_out(context)
    return [module for module in _given_widths(context) if module.name not in left]


def left_out(context: Context) -> dict[str, str]:
    """{module: why} of those that the recipe gives a width and its target holds in full precision only.

    Of a target that loads no packed modules at all there are none: what the recipe asks for is refused.
    """
    name = context.recipe.assign.target
    target = None if name is None else targets()[name]
    modules = _given_widths(context)
    if target is None or not target.others or not modules:
        return {}
    names, refuse = DiskNames(context.model.skeleton), runtimes()[target.name].exporter.refuse_other
    found: dict[str, str] = {}
    for module in modules:
        own = None if refuse is None else refuse(names, module.name, (module.rows, module.inputs))
        why = own[0] if own is not None else refuse_shape(target, module.rows, module.inputs)
        if why is not None:
            found[module.name] = why
    return found


def _given_widths(context: Context) -> list[OtherModule]:
    widths = context.recipe.others.widths()
    return [module for module in context.model.others.of(widths) if module.tied is None] if widths else []


def tied_heads(context: Context) -> dict[str, str]:
    """{embeddings: the head that uses the same packed tensor}."""
    if EMBEDDINGS not in context.recipe.others.widths():
        return {}
    return {head.tied: head.name for head in context.model.others.of([HEAD]) if head.tied is not None}


def check(context: Context) -> None:
    """RecipeError when embeddings and head are one tensor and the recipe gives them two widths."""
    widths = context.recipe.others.widths()
    if not {EMBEDDINGS, HEAD} & set(widths):
        return
    tied = any(head.tied is not None for head in context.model.others.of([HEAD]))
    if tied and widths.get(EMBEDDINGS) != widths.get(HEAD):
        raise RecipeError(
            "embeddings and head are one tensor in this model",
            where="others",
            do="give others.embeddings and others.head the same width, or neither",
        )


def packed_weight_bytes(recipe: Recipe, module: OtherModule) -> int:
    """Stored bytes of a module's codes, scales and zero points."""
    how = grid(recipe, module.kind)
    return packed_bytes(module.rows, module.inputs, how.bits, how.encoding)


def non_expert_bytes(context: Context) -> tuple[int, int]:
    """Bytes of the tensors of everything but the routed experts: in the original, and as it is exported."""
    headers = context.model.source.tensors
    experts = context.model.expert_keys
    before = sum(header.bytes for key, header in headers.items() if key not in experts)
    after = sum(plain_header(context.model.source, key)[2] for key in kept_keys(context))
    return before, after + sum(packed_weight_bytes(context.recipe, module) for module in chosen(context))


def kept_keys(context: Context) -> set[str]:
    """The tensors on disk that an export takes along as they are."""
    experts = context.model.expert_keys
    return set(context.model.source.tensors) - experts - replaced_keys(context) - scale_keys(context.model.source)


def weights(context: Context) -> int:
    """Weights of the whole checkpoint, whatever they are packed as; scales are none."""
    kept = set(context.model.source.tensors) - context.model.expert_keys - scale_keys(context.model.source)
    rest = sum(math.prod(plain_header(context.model.source, key)[1]) for key in kept)
    return expert_weights(context.model.layers) + rest


def replaced_keys(context: Context) -> set[str]:
    """The tensors on disk that packed modules stand for."""
    heads = set(tied_heads(context).values())  # a copy of the embeddings, where the disk has them twice
    copies = [module for module in context.model.others.of([HEAD]) if module.name in heads] if heads else []
    return weight_keys(context.model.source, context.model.skeleton, [*chosen(context), *copies])


def block_numbers(context: Context) -> dict[str, int]:
    """Decoder layers by their number in the store; what lies in none ("") comes last."""
    return {block: number for number, block in enumerate([*blocks_of(context.model.skeleton), ""])}


def planned(context: Context, tokens: str) -> OtherIndex:
    """What the recipe asks for, by the names under which the store keeps it. tokens: digest of the sequences."""
    stride = heldout_stride(context.recipe.losses.heldout_fraction)
    model = context.model
    key = ["others", REVISION, replicas.SCHEMA_VERSION, model.stamp.digest, tokens, stride, model.compute()]
    return OtherIndex(set=digest_of(key), made=entries(context.recipe, chosen(context)))


def entries(recipe: Recipe, modules: list[OtherModule]) -> tuple[MadeOthers, ...]:
    """The classes that the recipe quantizes and the model has, by their names in a set."""
    made = []
    for kind in dict.fromkeys(module.kind for module in modules):
        how = grid(recipe, kind)
        damping = how.damping if how.needs_factor else None
        names = [module.name for module in modules if module.kind == kind]
        others = QUANTIZERS.get(how.method).origins
        own = digest_of([kind, how.group_size, how.symmetric, damping, names, *others])[: replicas.SHORT]
        name = f"{how.method}.{how.bits}.{own}"
        made.append(MadeOthers(kind=kind, method=how.method, bits=how.bits, entry=name, rows=name))
    return tuple(made)


class Making:
    """The modules of one run that the store lacks, made as a walk goes through the layers."""

    def __init__(self, context: Context, sequences: Sequences) -> None:
        """Write the run's index, so that `moeq gc` keeps what is made, and see what the store has."""
        self.context, self.sequences = context, sequences
        self.directory = context.directory("losses")
        self.modules = chosen(context)
        for why, count in Counter(left_out(context).values()).items():
            context.reporter.say(f"  {count} matrices beside the experts stay in full precision: {escape(why)}")
        stride = heldout_stride(context.recipe.losses.heldout_fraction)
        self.heldout = torch.arange(len(sequences)) % stride == stride - 1
        for name in (artifact.NAME, artifact.INDEX):
            (self.directory / name).unlink(missing_ok=True)
        if context.recipe.others.widths():
            self.index = planned(context, sequences.digest())
            artifact.write_index(self.directory, self.index)

    @cached_property
    def store(self) -> Path:
        return self.context.store / self.index.set

    @cached_property
    def blocks(self) -> dict[str, int]:
        return block_numbers(self.context)

    @cached_property
    def missing(self) -> dict[str, list[OtherModule]]:
        """What the store lacks of every layer; what is damaged is named, and lacking."""
        missing = {block: self._lacking(block, modules) for block, modules in by_block(self.modules).items()}
        return {block: modules for block, modules in missing.items() if modules}

    def _lacking(self, block: str, modules: list[OtherModule]) -> list[OtherModule]:
        kinds = {module.kind for module in modules}
        wanted = [made for made in self.index.made if made.kind in kinds]
        missing = lacking(self.context, self.index.set, self.blocks[block], wanted)
        return [module for made in missing for module in modules if module.kind == made.kind]

    @property
    def needs_walk(self) -> bool:
        """Whether something is lacking that is measured on what it is given."""
        return any(not module.lookup for lacking in self.missing.values() for module in lacking)

    @contextmanager
    def listening(self) -> Iterator[dict[str, Any]]:
        """What `walk` must be given so that lacking linears are made as their layers are done; they are made then."""
        if not self.needs_walk:
            yield {}
            return
        model: Any = self.context.model.module
        linears = [module for lacking in self.missing.values() for module in lacking if not module.lookup]
        listener = Listener(model, linears, self.heldout)
        head = model.get_output_embeddings()
        stop = None if head is None else head.register_forward_pre_hook(lambda *_: end_batch())
        done: set[str] = set()

        def left(block: str) -> None:
            done.add(block)
            self._make(block, listener)

        try:
            yield {"finish": lambda *_: None, "blocks": [block for block in self.missing if block], "left": left}
            for block in ["", *self.missing]:  # a layer that the text never comes to is rounded
                if block not in done and any(not module.lookup for module in self.missing.get(block, ())):
                    with self._having(block):
                        left(block)
        finally:
            listener.remove()
            if stop is not None:
                stop.remove()

    @contextmanager
    def _having(self, block: str) -> Iterator[None]:
        """With the weights of a layer there, also of a streamed model."""
        streamed = self.context.model.streamed if block else None
        if streamed is not None:
            streamed.load(block)
        try:
            yield
        finally:
            if streamed is not None:
                streamed.drop(block)

    def _make(self, block: str, listener: Listener) -> None:
        sums = listener.take(block)
        linears = [(module, self._grid(module)) for module in self.missing[block] if not module.lookup]
        self._keep(block, list(quantize_linears(linears, sums, self._weight)))

    def _weight(self, name: str) -> Tensor:
        return self.context.model.module.get_submodule(name).get_parameter("weight")

    def _grid(self, module: OtherModule) -> Grid:
        return grid(self.context.recipe, module.kind)

    def _keep(self, block: str, results: list[tuple[OtherModule, Result]]) -> None:
        """Put what was made of one layer into the store."""
        number = self.blocks[block]
        tied = tied_heads(self.context)
        for kind in dict.fromkeys(module.kind for module, _ in results):
            entry = self.index.entry_of(kind)
            made = [(module, result) for module, result in results if module.kind == kind]
            replicas.add_replicas(self.store, number, {entry: {module.name: result.packed for module, result in made}})
            rows = [_row(module, self._grid(module), result, tied.get(module.name)) for module, result in made]
            replicas.add_rows(self.store, number, entry, [row.model_dump(mode="json") for row in rows])

    def finish(self) -> None:
        """Make the embeddings, and write the table and the digests of all that the run has."""
        widths = self.context.recipe.others.widths()
        if not widths:
            return
        tables = [module for module in self.missing.get("", ()) if module.lookup]
        if tables:
            times = self._looked_up(tables[0])
            made = [(m, quantize_embedding(m.name, self._weight(m.name), times, self._grid(m))) for m in tables]
            self._keep("", made)
        digests = [replicas.digests(self.store, number, self._entries(block)) for block, number in self.blocks.items()]
        artifact.write_index(self.directory, self.index.model_copy(update={"layers": tuple(digests)}))
        artifact.write_table(self.directory, self._table(widths))

    def _looked_up(self, module: OtherModule) -> Tensor:
        """How often held-out text looks up every row of the embeddings."""
        ids = self.sequences.ids[self.heldout][self.sequences.mask[self.heldout].bool()]
        return torch.bincount(ids, minlength=module.rows)[: module.rows]

    def _entries(self, block: str) -> list[str]:
        kinds = dict.fromkeys(module.kind for module in self.modules if module.block == block)
        return [self.index.entry_of(kind) for kind in kinds]

    def _table(self, widths: dict[str, int]) -> OtherTable:
        rows: list[OtherRow] = []
        for block, number in self.blocks.items():
            for entry in self._entries(block):
                rows += map(OtherRow.model_validate, replicas.made_rows(self.store, number, entry))
        others = self.context.model.others
        order = [module.name for module in others.modules]
        there = {module.kind for module in others.modules} | {kind for kind, _ in others.left.values()}
        return OtherTable(
            modules=tuple(sorted(rows, key=lambda row: order.index(row.module))),
            left={name: reason for name, (kind, reason) in others.left.items() if kind in widths},
            absent=tuple(kind for kind in widths if kind not in there),
        )


def _row(module: OtherModule, how: Grid, result: Result, tied: str | None) -> OtherRow:
    fallback = result.row["fallback"]
    return OtherRow(
        module=module.name,
        kind=module.kind,
        bits=how.bits,
        method=ROUNDING if fallback.startswith("rounded") else how.method,
        group_size=how.group_size,
        symmetric=how.symmetric,
        rows=module.rows,
        inputs=module.inputs,
        bytes=result.packed.nbytes,
        tied=tied,
        **result.row,
    )


def is_intact(context: Context) -> bool:
    """Whether the store still has what the index names."""
    if not context.recipe.others.widths():
        return True
    try:
        index = artifact.read_index(context.directory("losses"))
        for number, wanted in enumerate(index.layers):
            if wanted:
                LayerReplicas(context.store / index.set, number).check(wanted, cached=not context.check)
            for entry in wanted if context.check else ():
                replicas.made_rows(context.store / index.set, number, entry)
    except ArtifactError:
        return False
    return bool(index.layers)


def table(context: Context) -> OtherTable | None:
    """The table of the run, None where its recipe quantizes nothing but experts."""
    return artifact.read_table(context.directory("losses")) if context.recipe.others.widths() else None


def summarize(table: OtherTable) -> dict[str, Any]:
    """Of every class: modules, width, bytes, mean relative error; fallbacks, and what stays in full precision."""
    classes: dict[str, Any] = {}
    for kind in dict.fromkeys(row.kind for row in table.modules):
        rows = [row for row in table.modules if row.kind == kind]
        errors = [row.relative_error for row in rows if row.relative_error is not None]
        classes[kind] = {
            "modules": len(rows),
            "bits": rows[0].bits,
            "bytes": sum(row.bytes for row in rows),
            "mean_relative_error": sum(errors) / len(errors) if errors else None,
            "fallbacks": sum(row.fallback != "none" for row in rows),
        }
    left = {"left_in_full_precision": len(table.left)} if table.left else {}
    return classes | left | ({"not_in_this_model": list(table.absent)} if table.absent else {})


class Stored:
    """The packed weights of a run, from the store."""

    def __init__(self, context: Context) -> None:
        """ArtifactError when losses was not run for this recipe."""
        self.context = context
        self.modules = chosen(context)
        self._numbers = block_numbers(context)
        self._open: tuple[str, LayerReplicas] | None = None

    @cached_property
    def index(self) -> OtherIndex:
        index = artifact.read_index(self.context.directory("losses"))
        if not index.layers:
            raise ArtifactError("not finished", where=str(self.context.directory("losses")), do=replicas.REMEDY)
        return index

    def by_number(self) -> dict[int, list[OtherModule]]:
        """Modules by the number of their decoder layer; those in none have the last number."""
        return {self._numbers[block]: modules for block, modules in by_block(self.modules).items()}

    def packed(self, module: OtherModule) -> PackedWeight:
        """One module's packed weight [N, K]."""
        if self._open is None or self._open[0] != module.block:
            number = self._numbers[module.block]
            there = LayerReplicas(self.context.store / self.index.set, number)
            there.check(self.index.layers[number], cached=True)
            self._open = (module.block, there)
        return self._open[1].expert(self.index.entry_of(module.kind), module.name, 0)
