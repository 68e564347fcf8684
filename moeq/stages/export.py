"""export: the packed checkpoint directory, its placement manifest and its model card, and copies for other runtimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from rich.markup import escape

from moeq.analysis.coactivation import coactivation
from moeq.artifacts.assignment import FULL, MIXED, Assignment, Width, width_of
from moeq.artifacts.coactivation import NAME as COACTIVATION
from moeq.artifacts.coactivation import CoactivationTable
from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import building, digest_of, write_text
from moeq.artifacts.manifest import NAME as MANIFEST
from moeq.artifacts.manifest import PlacementManifest
from moeq.artifacts.stage import RECORD, damage, is_current, of_earlier_codes, read_record, write_record
from moeq.artifacts.sums import SIGNATURE
from moeq.artifacts.targets import Grid, grids_of, refuse_codes, refuse_layers, refuse_stack
from moeq.artifacts.trace import NAME as TRACE
from moeq.artifacts.trace import read_trace
from moeq.errors import ArtifactError, FormatError
from moeq.exporters import write
from moeq.exporters.exporter import ExportSizes
from moeq.exporters.foreign import WriteOptions, check_other
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.native_writer import ExportInputs, export
from moeq.exporters.packed_source import PackedSource
from moeq.exporters.readers import PLAIN
from moeq.models.disk_names import DiskNames
from moeq.models.loading import memory_bytes
from moeq.models.source import CONFIG, INDEX
from moeq.registry import EXPORTERS
from moeq.runtime.checkpoint import CARD
from moeq.runtime.hook import HOOK_FILE, has_own_code
from moeq.runtimes import ONNX, QONNX, Runtime, runtime, runtimes, written
from moeq.stages import assign, making, model_card, onnx, profile, quantize
from moeq.stages import non_experts as others
from moeq.stages.as_quantized import AsQuantized
from moeq.stages.assign_ahead import settled
from moeq.stages.checkpoint_size import SCHEMA
from moeq.stages.context import Context
from moeq.stages.loading import where_it_loads
from moeq.stages.needs import APART, Moment, Needs, Rates, Sizes
from moeq.stages.replicas import first_made_by, load_losses
from moeq.stages.target_sizes import beyond_size
from moeq.verification.reference import GROUP_BYTES
from moeq.verification.written import check_written
from moeq_kernels.freed import return_memory
from moeq_kernels.widths import Encoding

FORMAT_REVISION = 2  # raised when the same checkpoint gives other bytes in some format


def run(context: Context) -> dict[str, Any]:
    """Write the checkpoint directory, and those for other runtimes that are not there yet; returns the summary."""
    model, assignment = context.model, assign.load(context)
    check_formats(context, assignment)
    model.say_left_behind()
    directory = context.directory("quantize")
    made = quantize.read_made(directory)
    inputs = ExportInputs(
        source=model.source,
        layers=model.described[1],
        top_k=profile.load(context).top_k,
        assignment=assignment,
        expert_keys=model.expert_keys,
        expert_files=quantize.files(directory),
        quantizers={name: list(experts) for name, experts in made.layers.items()},
        errors=made.errors,
        module_errors=made.modules,
        losses=_losses(context) if context.recipe.quantize.replicas == "all" else None,
        max_shard_bytes=context.recipe.export.max_shard,
        stamp=model.stamp,
        others=others.table(context),
        other_keys=frozenset(others.replaced_keys(context)),
        own_code=has_own_code(model.skeleton),
        trust_remote_code=context.recipe.trust_remote_code,
        digests={stage: read_record(context.directory(stage), stage).digest for stage in ("assign", "quantize")},
        making=making.of_run(context),
        coactivation=_coactivation(context),
    )
    target = context.directory("export")
    with context.reporter.bar("export", len(inputs.layers)) as advance:
        manifest = export(inputs, target, advance)
    write_card(context, manifest)
    totals = manifest.totals.model_dump()
    del manifest  # 10 KB an expert, which verification reads for itself
    return_memory()
    if context.recipe.export.verify:
        _check_copies(context, target)
        _check_written(context, target, AsQuantized(context, assignment))
    _write_formats(context)
    if not onnx.is_intact(context):
        for told in onnx.write(context, verify=context.recipe.export.verify).values():
            context.reporter.say(f"  {escape(told['file'])}")
    for old in of_earlier_codes(context.out):
        said = f"{escape(old.name)} holds an earlier assignment: remove it, or name it in export.formats"
        context.reporter.say(f"  [yellow]{said}[/yellow]")
    where = where_it_loads(context, assignment)
    return totals | {"original_expert_bytes": original_expert_bytes(context), "loads_in": where}


def _losses(context: Context) -> dict[str, list[dict[int, float]]]:
    """{layer: [{bits: loss} of every expert]} of the replicas that quantize wrote, by who made them."""
    table = load_losses(context)
    made = quantize.quantizers(context.directory("quantize"))
    methods = {name: table.matrix(name) for name in table.methods()}
    return {
        layer: [
            {
                bits: float(methods[first_made_by(method)][index][bits][expert])
                for bits, method in makers.items()
                if bits != MIXED
            }
            for expert, makers in enumerate(experts)
        ]
        for index, (layer, experts) in enumerate(made.items())
    }


def _coactivation(context: Context) -> CoactivationTable | None:
    """Which experts follow which in the profile's trace; None without one, and for a checkpoint of one replica each."""
    path = context.directory("profile") / TRACE
    if not context.recipe.says_what_follows or not path.is_file():
        return None
    trace = read_trace(path)
    layers = list(zip(trace.layers, trace.num_experts, strict=True))
    return CoactivationTable.of(layers, coactivation(trace), trace.num_tokens, trace.text)


def other_inputs(context: Context) -> dict[str, Any] | None:
    """What the checkpoint takes beside what the model's digest covers, and whether it says which experts follow
    which."""
    along = context.model.goes_along()
    return {**(along or {}), "coactivation": True} if context.recipe.says_what_follows else along


def format_directory(out: Path, name: str) -> Path:
    """Where a run keeps its checkpoint for another runtime: by its name or, written earlier, by that of its format."""
    now, before = (out / f"checkpoint-{called}" for called in (name, runtimes()[name].before))
    return before if (before / RECORD).is_file() and not now.exists() else now


def format_directories() -> tuple[str, ...]:
    """Names of those folders for all runtimes, and of those of ONNX files."""
    return (ONNX, QONNX, *(f"checkpoint-{called}" for name in written() for called in {name, runtimes()[name].before}))


def check(context: Context) -> None:
    """What formats can be asked before anything runs: RecipeError, FormatError."""
    _check_uniform(context)
    onnx.check(context)
    for name in context.recipe.export.formats:
        asked = runtime(name)
        if asked.exporter.check is not None:
            asked.exporter.check(context.model.source, context.model.skeleton)
        refused = None if asked.target is None else refuse_codes(asked.target, context.recipe.losses.encoding)
        if refused is not None:
            raise FormatError(refused[0], where=f"export.formats: {name}", do=refused[1])
        if asked.target is not None:
            check_others(context, asked)
            _check_matrices(context, asked)


def _check_uniform(context: Context) -> None:
    """FormatError for a runtime that could not load the one width that the recipe gives every expert.

    What was decided before, perhaps by hand, is looked at instead where it is there.
    """
    widths = settled(context, context.recipe.assign)
    if widths is not None and not _is_decided(context):
        _check_widths(context, widths, context.recipe.losses.encoding)


def _is_decided(context: Context) -> bool:
    """Whether the run has an assignment, perhaps one made by hand."""
    return (context.finished("assign") / assign.NAME).is_file()


def check_others(context: Context, asked: Runtime) -> None:
    """FormatError where a target could not load what the recipe packs outside of the experts."""
    if not context.recipe.others.widths():
        return
    names = DiskNames(context.model.skeleton)
    for module in others.chosen(context):
        how = others.grid(context.recipe, module.kind)
        grid = Grid(rows=module.rows, inputs=module.inputs, bits=how.bits, **vars(how.encoding))
        check_other(asked, names, module.name, grid, widen=context.recipe.export.widen)


def _check_matrices(context: Context, asked: Runtime) -> None:
    """FormatError where a target loads a matrix of the experts at none of the widths that it may be given.

    What was decided before is looked at instead where it is there.
    """
    section, losses, target = context.recipe.assign, context.recipe.losses, asked.target
    widths = sorted(section.named() or losses.bits, key=lambda bits: bits not in target.widths)
    if FULL in widths or _is_decided(context):
        return
    for layer in context.model.layers:
        for projection in layer.projections if section.gpu_experts < layer.num_experts else ():
            every = grids_of(layer, projection, widths, **vars(losses.encoding))
            refused = [refuse_stack(target, [grid], full=False, widen=context.recipe.export.widen) for grid in every]
            if refused[0] is not None and None not in refused:
                what = f"{layer.name}, {projection}: {refused[0][0]}"
                raise FormatError(what, where=f"export.formats: {asked.name}", do=refused[0][1])


def check_formats(context: Context, assignment: Assignment) -> None:
    """FormatError for a runtime that could not load what was assigned, before anything is written."""
    _check_widths(context, assignment.expert_widths(), assignment.encoding)


def _check_widths(context: Context, widths: Sequence[Sequence[Width]], encoding: Encoding) -> None:
    """FormatError for a runtime that could not load the widths [E] of some layer."""
    for name in context.recipe.export.formats:
        reason = refused(context, name, widths, encoding)
        if reason is not None:
            raise FormatError(reason[0], where=f"export.formats: {name}", do=reason[1])


def refused(
    context: Context, name: str, widths: Sequence[Sequence[Width]], encoding: Encoding
) -> tuple[str, str] | None:
    """Why a runtime could not load the widths [E] of some layer, and what to do; None where it could."""
    return refuse_layers(
        name,
        context.model.layers,
        widths,
        **vars(encoding),
        widen=context.recipe.export.widen,
    )


def _write_formats(context: Context) -> None:
    """Write the checkpoint for other runtimes; none takes an older one's place before all are written and right."""
    with ExitStack() as stack:
        for name in context.recipe.export.formats:
            directory, key = format_directory(context.out, name), _format_key(context, name)
            stage = _format_stage(directory)
            if is_current(directory, stage, key, cached=not context.check, reporter=context.reporter):
                context.reporter.say(f"[dim]  for {name}: unchanged, skipped[/dim]")
                continue
            for what in damage(directory, stage):
                context.reporter.say(f"  [yellow]{directory.name}: {escape(what)}; made again[/yellow]")
            context.reporter.say(f"  for {name}")
            _write_format(context, name, key, stack.enter_context(building(directory)))


def _write_format(context: Context, name: str, key: str, directory: Path) -> None:
    """Write the checkpoint for another runtime, with its record."""
    recipe = context.recipe
    options = WriteOptions(
        max_shard_bytes=recipe.export.max_shard,
        widen=recipe.export.widen,
        trust_remote_code=recipe.trust_remote_code,
        model_name=context.model.stamp.name,
        settings=_settings(context, name),
        making=making.of_run(context, name),
        bar=context.reporter.bar,
    )
    native = NativeReader(context.directory("export"), recipe.trust_remote_code)
    for note in chain(write(name, native, directory, options), beyond_size(context, directory)):
        context.reporter.say(f"  {escape(note)}")
    if recipe.export.verify:
        _check_written(context, directory, native)
    stage, stamp, seed = _format_stage(format_directory(context.out, name)), context.model.stamp, recipe.seed
    inputs = {"quantize": read_record(context.directory("quantize"), "quantize").digest}
    write_record(directory, stage=stage, model=stamp, seed=seed, key=key, inputs=inputs, summary={}, volatile={})


def _settings(context: Context, name: str) -> BaseModel | None:
    """The keys of `export` that are a format's own; None where it has none."""
    settings = runtimes()[name].exporter.settings
    return None if settings is None else settings.model_validate(context.recipe.export, from_attributes=True)


def _check_copies(context: Context, directory: Path) -> None:
    """ArtifactError for a file that is not, byte for byte, what quantize recorded when it wrote it."""
    for name, stamp in read_record(context.directory("quantize"), "quantize").files.items():
        if (directory / name).is_file() and digest_of_file(directory / name, cached=True) != stamp.sha256:
            where = str(context.directory("quantize") / name)
            raise ArtifactError("is not what quantize wrote", where=where, do="run `moeq quantize` again")


def _check_written(context: Context, directory: Path, against: PackedSource) -> None:
    check_written(directory, context.reporter, against=against, trust_remote_code=context.recipe.trust_remote_code)


def _format_stage(directory: Path) -> str:
    """What the record in a folder of `format_directory` calls what wrote it."""
    return directory.name.replace("checkpoint", "export", 1)


def _format_key(context: Context, name: str) -> str:
    """Of the runtime by its former name: what was written for it then is there still."""
    section = context.recipe.export
    manifest = digest_of_file(context.directory("export") / MANIFEST, cached=not context.check)
    own, package = _settings(context, name), EXPORTERS.origin(runtimes()[name].exporter.name)
    settings = [section.max_shard, section.widen, section.verify, *([] if own is None else [own.model_dump()])]
    settings += [] if package is None else [package]
    settings += [beside] if (beside := context.model.beside()) else []
    return digest_of([runtimes()[name].before, FORMAT_REVISION, context.model.stamp.digest, manifest, *settings])


def formats_intact(context: Context) -> bool:
    """Whether the checkpoint is there for all other runtimes that the recipe wants."""
    cached = not context.check
    return (
        (context.directory("export") / MANIFEST).is_file()
        and onnx.is_intact(context)
        and all(
            is_current(directory, _format_stage(directory), _format_key(context, name), cached=cached)
            for name in context.recipe.export.formats
            for directory in [format_directory(context.out, name)]
        )
    )


def original_expert_bytes(context: Context) -> int:
    """Bytes of the routed experts in the original checkpoint."""
    return sum(context.model.source.tensors[key].bytes for key in context.model.expert_keys)


def write_card(context: Context, manifest: PlacementManifest, figures: list[dict[str, Any]] | None = None) -> None:
    """Write the model card; the report stage writes it again with the measured figures."""
    directory, text = context.directory("export"), card(context, manifest, figures or [])
    signature = directory / SIGNATURE
    if signature.exists() and (directory / CARD).read_bytes() != text.encode():
        signature.unlink()
        context.reporter.say(f"  [yellow]{SIGNATURE} is taken away: the card has changed; sign again[/yellow]")
    write_text(directory / CARD, text)


def card(context: Context, manifest: PlacementManifest, figures: list[dict[str, Any]]) -> str:
    """The checkpoint's model card."""
    edited = assign.is_edited(context)
    return model_card.render(manifest, context.model.source.config, figures, context.model.origin, edited=edited)


REPLICA = 9000  # bytes of one replica in the manifest: nine tensors' stamps as objects and as JSON
TARGET_PROGRAM = 312 << 20  # bytes of what a verification's own process loads before the checkpoint
NAMES = 1000  # bytes of a header for a matrix: it has room for all that one may be stored as
VERIFYING = 7.0  # seconds of starting it, and of a few tokens in it


def manifest_bytes(sizes: Sizes) -> int:
    """Bytes of the manifest in memory."""
    every = sizes.recipe.quantize.replicas == "all"
    return sizes.experts * (len(sizes.recipe.losses.bits) + 1 if every else 1) * REPLICA


def needs(sizes: Sizes) -> Needs:
    """The manifest, and what the target and the reference of its verification hold; files as `assign.size` counts."""
    section, others, placed = sizes.recipe.export, sizes.others, sizes.placed[0]
    packed = quantize.packed_files(sizes) | others.written()
    files = sizes.checkpoint.files(sizes.widths[0]) | packed
    del files[RECORD]
    rest = sizes.disk - sizes.experts_disk - others.disk
    if section.formats:
        given = _export_sizes(sizes, rest)
        files |= {f"../checkpoint-{name}": _foreseen(given, name, sizes, files) for name in section.formats}
    if section.onnx:
        files[f"../{ONNX}"] = onnx.foreseen_bytes(sizes.context)
    writing = {**sizes.model(), **sizes.tables(), "manifest": manifest_bytes(sizes)}

    def seconds(rates: Rates) -> float:
        verifying = VERIFYING + 2 * sizes.reading(rates, sizes.disk) if section.verify else 0.0
        return sizes.reading(rates, rest + others.disk) + placed / rates.hash_bytes + verifying

    linked = sum(packed.values())
    moments = [writing, *({**writing, **moment} for moment in _verifying(sizes) if section.verify)]
    return Needs(moments=moments, files=files, linked=linked, read=rest + linked, seconds=seconds)


def _export_sizes(sizes: Sizes, rest: int) -> ExportSizes:
    """What the sizes of the checkpoints in other formats follow from."""
    losses, stacks = sizes.recipe.losses, []
    for layer, experts in zip(sizes.layers, sizes.widths[0], strict=True):
        for projection in layer.projections:
            used = sorted({width_of(width, projection) for width in experts})
            rows, inputs = layer.shape(projection)
            grids = grids_of(layer, projection, used, **vars(losses.encoding))
            stacks.append((layer.num_experts * rows * inputs, tuple(grids), FULL in used))
    return ExportSizes(
        plain=sizes.disk,
        rest=rest,
        packed=sizes.others.packed,
        experts=sizes.placed[0],
        stacks=tuple(stacks),
        widen=sizes.recipe.export.widen,
        others=sizes.others.grids(),
    )


def _foreseen(given: ExportSizes, name: str, sizes: Sizes, native: Mapping[str, int]) -> int:
    """Bytes of the directory for a runtime; native: of the native one's files.

    Beside tensors there lies what lies beside the native one's; a file of a format of its own has the tokenizer, too.
    """
    asked = runtimes()[name]
    left_out = {MANIFEST, SCHEMA, HOOK_FILE, COACTIVATION}
    beside = {file: size for file, size in native.items() if file not in left_out and not file.endswith(".safetensors")}
    more = 0
    if asked.exporter.file is not None:
        beside = {file: size for file, size in beside.items() if file not in {INDEX, CONFIG}}
        more = sum(sizes.context.model.side_files.sizes().values())
    elif asked.target is not None:
        matrices = len(given.others) + sum(layer.num_experts * len(layer.projections) for layer in sizes.layers)
        more = (NAMES + asked.exporter.listed) * matrices
    tensors: int = asked.exporter.size(replace(given, target=name))
    return tensors + more + sum(beside.values())


def _verifying(sizes: Sizes) -> list[Moment]:
    """The target's process, and when it has ended what its layers and modules are compared with: experts a group at a
    time."""
    layer, parameters = sizes.largest, sizes.expert_parameters + sizes.others.parameters
    whole, plain = sum(sizes.block_parameters) + sizes.resident_parameters, PLAIN in sizes.recipe.export.formats
    loaded = [4 * (whole - parameters) + sizes.others.packed + sizes.placed[0], *([4 * whole] if plain else [])]
    loaded = [size for size in loaded if size <= memory_bytes(torch.device("cpu"))]  # others are left out
    if not loaded:
        return []
    resident, block = 4 * sizes.resident_parameters, 4 * max(sizes.block_parameters)
    if not plain:  # whose experts are read as stacks, a layer at a time
        expert = 4 * layer.parameters_per_expert
        block -= max(0, layer.num_experts * expert - max(GROUP_BYTES, expert) - expert)
    module = {"one module, compared": sizes.others.unpacked(4)} if plain else {}
    reference = "reference in float32"
    held: Moment = {reference: resident}
    return [{APART: TARGET_PROGRAM + max(loaded), **held}, {reference: resident + block}, {**held, **module}]
