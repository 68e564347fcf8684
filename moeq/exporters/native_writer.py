"""The native format: a transformers checkpoint directory with packed experts and a placement manifest.

config.json                      the model's own, with quantization_config (method moeq, every expert's width or widths)
model-0000i-of-0000n.safetensors everything that is not packed, byte for byte as it was (FP8: dequantized)
experts-layer-NNN.safetensors    one MoE layer's experts at their placed widths
others-NNN.safetensors           packed modules of a decoder layer outside of its experts, and of no layer, if any
replicas-layer-NNN.safetensors   the other widths, where the recipe asked for them (not loaded by transformers)
model.safetensors.index.json     key -> file
coactivation.json                which experts follow which, where all replicas are exported and a trace was recorded
placement.json                   the manifest
provenance.json                  of what, with what and how it was made
SHA256SUMS                       of all files; README.md, the model card, which people edit, is written by the stage
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeq.artifacts.assignment import Assignment, ExpertChoice, LayerAssignment
from moeq.artifacts.coactivation import CoactivationTable, write_coactivation
from moeq.artifacts.files import filling, place, write_json, write_text
from moeq.artifacts.manifest import (
    CodeFile,
    PlacedExpert,
    PlacedLayer,
    PlacedModule,
    PlacementManifest,
    Replica,
    StoredTensor,
    TensorStamp,
    layout,
    totals,
    write_manifest,
)
from moeq.artifacts.non_experts import OtherTable
from moeq.artifacts.provenance import Making
from moeq.artifacts.sums import write_sums
from moeq.artifacts.tensor_files import tensors_sha256
from moeq.exporters.plain import write_index, write_plain
from moeq.models.declared import scale_keys
from moeq.models.experts import ExpertLayer
from moeq.models.side_files import SideFiles, find_side_files
from moeq.models.source import ModelSource, TensorHeader, read_header
from moeq.runtime.hook import HOOK_FILE, HOOK_SHA256, HOOK_TEXT, hooked
from moeq.runtime.packed_experts import guard_shapes
from moeq.runtime.packed_modules import guard_name
from moeq_kernels.checkpoint import DROPPED_VERSION, FORMAT_VERSION, MIXED_VERSION
from moeq_kernels.widths import METHOD, NESTED_BITS, PARTS, Encoding

_EXTRA = "replicas-"


def layer_name(layer: int) -> str:
    """File of one layer's experts at their placed widths."""
    return f"experts-layer-{layer:03d}.safetensors"


def extra_name(layer: int) -> str:
    """File of one layer's other replicas, which transformers does not load."""
    return f"{_EXTRA}layer-{layer:03d}.safetensors"


def others_name(number: int) -> str:
    """File of the packed modules of one decoder layer, or (the last number) of those in none."""
    return f"others-{number:03d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class ExportInputs:
    """What an exporter is given: the source, what to place, and the quantized files of every layer.

    quantizers: who made each replica, {layer: [{bits, or MIXED: method} of every expert]}; losses: what each of them
    loses, {layer: [{bits: loss} of every expert]}, where all replicas are exported. others: the packed modules
    outside of the experts, and other_keys: the tensors on disk that they replace. own_code: the model is made by code
    that the checkpoint brings along, not by a class of transformers. trust_remote_code: whether code of the source's
    own goes along. errors: {layer: [{bits, or MIXED: {projection: relative error}} of every expert]} and module_errors:
    {packed module: relative error}, where they were measured. making: what the provenance says, None: there is none;
    coactivation: which experts follow which, None: nobody knows, or no runtime could use it.
    """

    source: ModelSource
    layers: list[ExpertLayer]
    top_k: tuple[int, ...]
    assignment: Assignment
    expert_keys: set[str]
    expert_files: list[Path]
    quantizers: dict[str, list[dict[int, str]]]
    losses: dict[str, list[dict[int, float]]] | None = None
    errors: Mapping[str, Sequence[Mapping[int, Mapping[str, float]]]] = field(default_factory=dict)
    module_errors: Mapping[str, float] = field(default_factory=dict)
    max_shard_bytes: int
    stamp: Any
    digests: dict[str, str]
    others: OtherTable | None = None
    other_keys: frozenset[str] = frozenset()
    own_code: bool = False
    trust_remote_code: bool = False
    making: Making | None = None
    coactivation: CoactivationTable | None = None


def export(inputs: ExportInputs, directory: Path, advance: Callable[[], None] = lambda: None) -> PlacementManifest:
    """Build the checkpoint directory; it replaces an older one only when it is whole. advance: is told of every layer
    whose experts were hashed."""
    sides = find_side_files(inputs.source.path, inputs.source.config, inputs.trust_remote_code)
    with filling(directory) as unfinished:
        rest = set(inputs.source.tensors) - inputs.expert_keys - inputs.other_keys - scale_keys(inputs.source)
        where = write_plain(inputs.source, rest, unfinished, inputs.max_shard_bytes)
        for path in inputs.expert_files:
            place(path, unfinished / path.name)
            where |= {} if path.name.startswith(_EXTRA) else dict.fromkeys(read_header(path), path.name)
        headers = {
            key: header for path in unfinished.glob("*.safetensors") for key, header in read_header(path).items()
        }
        write_index(unfinished, where)
        write_json(unfinished / "config.json", native_config(inputs, sides.config(inputs.source.config)))
        sides.copy(unfinished)
        if not inputs.own_code:
            write_text(unfinished / HOOK_FILE, HOOK_TEXT)
        manifest = native_manifest(inputs, headers, sides, advance)
        write_manifest(unfinished, manifest)
        if inputs.coactivation is not None:
            write_coactivation(unfinished, inputs.coactivation)
        if inputs.making is not None:
            inputs.making.write(unfinished)
        write_sums(unfinished)
    return manifest


def native_config(inputs: ExportInputs, config: dict[str, Any]) -> dict[str, Any]:
    """What config.json holds; config: the model's own, as it goes along."""
    plain = config if inputs.own_code else hooked(config)
    return plain | {"quantization_config": _quantization(inputs)}


def _quantization(inputs: ExportInputs) -> dict[str, Any]:
    own = inputs.assignment
    experts = {layer.name: widths for layer, widths in zip(inputs.layers, own.expert_widths(), strict=True)}
    block = quantization(own.encoding, own.is_mixed, inputs.others, drops=own.drops)
    return block | {"experts": experts}


def quantization(encoding: Encoding, mixed: bool, others: OtherTable | None, *, drops: bool = False) -> dict[str, Any]:
    """What config.json says of a checkpoint, but for the width of every expert."""
    block = layout(encoding, mixed)
    return {
        **({} if others is None or not others.modules else {"others": other_widths(others)}),
        "quant_method": METHOD,
        "format_version": DROPPED_VERSION if drops else MIXED_VERSION if mixed else FORMAT_VERSION,
        "layout": block["name"],
        "layout_version": block["version"],
        **encoding.describe(),
    }


def other_widths(others: OtherTable) -> dict[str, Any]:
    """What config.json says of packed modules outside of the experts."""
    first = others.modules[0]
    return {
        "bits": {row.module: row.bits for row in others.modules},
        "group_size": first.group_size,
        "symmetric": first.symmetric,
        "tied": {row.module: row.tied for row in others.modules if row.tied is not None},
    }


def listed_code(sides: SideFiles, own_code: bool) -> tuple[CodeFile, ...]:
    """The Python files of a checkpoint: moeq's hook, unless the model is made by code of its own, and the model's."""
    hook = [] if own_code else [CodeFile(file=HOOK_FILE, sha256=HOOK_SHA256, origin="moeq")]
    own = [CodeFile(file=name, sha256=sha256, origin="model") for name, sha256 in sides.code_digests().items()]
    return (*hook, *own)


def native_manifest(
    inputs: ExportInputs,
    headers: dict[str, TensorHeader],
    sides: SideFiles,
    advance: Callable[[], None] = lambda: None,
) -> PlacementManifest:
    """The manifest of the tensors of all files; advance: is told of every layer."""
    own, by_expert = inputs.assignment, dict[str, list[str]]()
    names = {layer.name for layer in inputs.layers}
    for key in headers:
        prefix = _expert_prefix(key, names)
        if prefix is not None:
            by_expert.setdefault(prefix, []).append(key)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing takes most of the time, and lets the others run
        each = zip(inputs.layers, own.layers, inputs.top_k, strict=True)
        layers = []
        for layer in pool.map(lambda layer: _placed_layer(inputs, by_expert, headers, *layer), each):
            layers.append(layer)
            advance()
    others = () if inputs.others is None else tuple(_placed_modules(inputs.others, inputs.module_errors, headers))
    packed = {key for keys in by_expert.values() for key in keys}
    packed |= {f"{module.key_prefix}{stamp.name}" for module in others for stamp in module.tensors}
    guard = sum(headers[f"{layer.name}.{part}"].bytes for layer in inputs.layers for part in guard_shapes(layer))
    guard += sum(headers[guard_name(module.name)].bytes for module in others)
    return PlacementManifest(
        model=inputs.stamp,
        assignment=own.model_dump(mode="json", include={"name", "method", "parameters"}),
        layout=layout(own.encoding, own.is_mixed, own.drops),
        layers=tuple(layers),
        others=others,
        tensors=stored_tensors({key: header for key, header in headers.items() if key not in packed}),
        totals=totals(layers, others, sum(header.bytes for header in headers.values()), guard),
        inputs=inputs.digests,
        code=listed_code(sides, inputs.own_code),
    )


def _placed_layer(
    inputs: ExportInputs,
    by_expert: dict[str, list[str]],
    headers: dict[str, TensorHeader],
    layer: ExpertLayer,
    choices: LayerAssignment,
    top_k: int,
) -> PlacedLayer:
    """One layer of the manifest; by_expert: keys of tensors by `{layer}.{expert}.`."""
    losses = [{}] * layer.num_experts if inputs.losses is None else inputs.losses[layer.name]
    errors = inputs.errors.get(layer.name, [{}] * layer.num_experts)
    experts = []
    for number, choice in enumerate(choices.experts):
        prefix, made_by = f"{layer.name}.{number}.", inputs.quantizers[layer.name][number]
        keys = by_expert.get(prefix, [])
        experts.append(
            PlacedExpert(
                expert=number,
                tier=choice.tier,
                bits=choice.bits,
                importance=choice.importance,
                replicas=_replicas(prefix, choice, keys, headers, made_by, losses[number], errors[number]),
            )
        )
    return PlacedLayer(
        name=layer.name,
        num_experts=layer.num_experts,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        projections=layer.projections,
        biased=layer.biased,
        kind=layer.kind.name,
        top_k=top_k,
        experts=tuple(experts),
    )


def stored_tensors(headers: Mapping[str, TensorHeader]) -> tuple[StoredTensor, ...]:
    """What the manifest says of tensors that are no expert's and no packed module's, in the order of their names."""
    return tuple(
        StoredTensor(
            name=name,
            dtype=header.dtype,
            shape=header.shape,
            file=header.file.name,
            sha256=tensors_sha256([header]),
        )
        for name, header in sorted(headers.items())
    )


def _placed_modules(
    others: OtherTable, errors: Mapping[str, float], headers: dict[str, TensorHeader]
) -> Iterator[PlacedModule]:
    for row in others.modules:
        prefix = f"{row.module}."
        yield PlacedModule(
            name=row.module,
            kind=row.kind,
            bits=row.bits,
            group_size=row.group_size,
            symmetric=row.symmetric,
            quantizer=row.method,
            rows=row.rows,
            inputs=row.inputs,
            tied=row.tied,
            error=errors.get(row.module),
            **_stamped(prefix, [f"{prefix}{part}" for part in PARTS if f"{prefix}{part}" in headers], headers),
        )


def _stamped(prefix: str, keys: Iterable[str], headers: Mapping[str, TensorHeader]) -> dict[str, Any]:
    """Where tensors below a prefix lie, what they are, and the digest of their bytes."""
    stored = {key.removeprefix(prefix): headers[key] for key in sorted(keys)}
    stamps = (TensorStamp(name=name, dtype=header.dtype, shape=header.shape) for name, header in stored.items())
    return {
        "file": next(iter(stored.values())).file.name,
        "key_prefix": prefix,
        "tensors": tuple(stamps),
        "bytes": sum(header.bytes for header in stored.values()),
        "sha256": tensors_sha256(stored.values()),
    }


def _expert_prefix(key: str, names: set[str]) -> str | None:
    """`{experts module}.{expert}.` of a tensor of a packed expert, None for every other tensor."""
    parts = key.split(".")
    for index in range(len(parts) - 1, 0, -1):
        if parts[index].isdigit() and ".".join(parts[:index]) in names:
            return ".".join(parts[: index + 1]) + "."
    return None


def _replicas(
    prefix: str,
    choice: ExpertChoice,
    keys: list[str],
    headers: Mapping[str, TensorHeader],
    made_by: Mapping[int, str],
    losses: Mapping[int, float],
    errors: Mapping[int, Mapping[str, float]],
) -> tuple[Replica, ...]:
    """The placed replica first, if the expert is not dropped, then the others by width, those without tensors last.

    made_by: {bits, or MIXED: method}; losses: by width, of those whose matrices have one; errors: {bits, or MIXED:
    {projection: relative error}}.
    """
    by_width: dict[int, list[str]] = {}
    for key in keys:
        first = key.removeprefix(prefix).split(".")[0]
        by_width.setdefault(int(first[4:]) if first.startswith("bits") else choice.key, []).append(key)
    stored = {
        width: Replica(
            bits=width,
            placed=width == choice.key,
            quantizer=made_by.get(width),
            errors=dict(errors.get(width, {})) or None,
            **_stamped(prefix if width == choice.key else f"{prefix}bits{width}.", by_width[width], headers),
        )
        for width in [*([] if choice.is_dropped else [choice.key]), *sorted(set(by_width) - {choice.key})]
    }
    placed = {"bits": choice.bits, "projections": choice.projections}
    replicas = [one.model_copy(update=placed) if one.placed else one for one in stored.values()]
    for width in sorted(set(made_by) - set(stored)):
        wide = max(bits for bits in set(stored) & set(NESTED_BITS) if made_by[bits] == made_by[width])
        update = {"bits": width, "placed": False, "leading_bits_of": wide, "quantizer": made_by[width], "errors": None}
        replicas.append(stored[wide].model_copy(update=update))
    return tuple(
        replica if replica.projections is not None else replica.model_copy(update={"loss": losses.get(replica.bits)})
        for replica in replicas
    )
