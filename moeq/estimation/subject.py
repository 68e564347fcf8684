"""What is estimated: the sizes of a model, where its experts live, and how their codes are kept."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moeq.artifacts.assignment import Assignment, read_assignment
from moeq.artifacts.places import MANIFEST
from moeq.errors import EstimateError, ModelError, RecipeError
from moeq.estimator import ModelGeometry, Placement, geometry_from_config, load_geometry
from moeq.estimator.geometry import HEADS, HIDDEN, KV_HEADS, NESTED, TOP_K, codebook_of, effective_bits, preset_of
from moeq.estimator.placement import assignment_placement, placement_of, weights_of_a_scale
from moeq.folders import expanded
from moeq.preflight import check_path
from moeq_kernels.iq_types import SETS, stored_bits
from moeq_kernels.widths import FLOAT_GROUPS, NESTED_BITS, Encoding

if TYPE_CHECKING:  # torch and transformers are imported where a configuration or a manifest is read
    from moeq.artifacts.manifest import PlacementManifest
    from moeq.models.source import ModelSource
    from moeq.models.stored_experts import Shape

STATED = (TOP_K, HEADS, KV_HEADS, HIDDEN)  # without one of each the family decides
BUFFERS = re.compile(  # what weights hold that are no parameters: corrections of routers, tables, decays
    r"(correction_bias|expert_bias|expert_biases|tid2eid|layer_scalar|inv_freq|_decay|slope_rate|balancing_biases)$"
)
BUNDLED = "bundled:"
I_QUANTS = "iq"  # the quantizer that makes them


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Sizes of a model, the placement of its experts, and the scales of their codes: as estimates name them."""

    geometry: ModelGeometry
    placement: Placement
    group_size: int
    zero_points: bool
    codebook: str = ""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a model and, of a packed checkpoint, its manifest."""

    geometry: ModelGeometry
    manifest: PlacementManifest | None = None


def check_known(name: str) -> None:
    """EstimateError, with the nearest known name, for one that neither a geometry nor a model can have."""
    if not expanded(name).exists() and "/" not in name and not name.startswith(BUNDLED):
        load_geometry(name)


def read_model(name: str, *, trust_remote_code: bool = False) -> Model:
    """The model that a geometry's name, a config.json, a model directory, a packed checkpoint or a hub id stands for.

    No weights are read; the id of a model on the hub whose sizes are known needs no network. Raises EstimateError for
    an unknown name, ModelError for a configuration that cannot be read or is none of a Mixture-of-Experts model,
    ArtifactError for a damaged manifest.
    """
    path = expanded(name)
    if (preset := preset_of(name)) is not None and (preset == name or not path.exists()):
        return Model(geometry=load_geometry(preset))
    check_known(name)
    if path.is_file() and path.suffix != ".json":
        raise ModelError("not a config.json", where=name, do="give a config.json, a model directory or a hub id")
    from moeq.artifacts.manifest import read_manifest
    from moeq.models.source import open_config

    source = open_config(name, beside=(MANIFEST,), trust_remote_code=trust_remote_code)
    manifest = read_manifest(source.path) if (source.path / MANIFEST).is_file() else None
    geometry = stored_geometry(source, manifest) or made_geometry(source, trust_remote_code)
    if manifest is not None:  # its directory is called "checkpoint" as often as not
        geometry = replace(geometry, name=manifest.model.name)
    return Model(geometry=geometry, manifest=manifest)


def stored_geometry(source: ModelSource, manifest: PlacementManifest | None = None) -> ModelGeometry | None:
    """Sizes from config.json and the headers of the weights beside it, without making a model; None where they do not
    say all: without weights, in a file of another kind, or where config.json leaves sizes to the family.

    manifest: of a checkpoint in the native format.
    """
    from moeq.estimator.attention import says_all
    from moeq.models.source import INDEX, SINGLE, open_source
    from moeq.models.stored_experts import stored_layers, text_config, without_drafts

    text = text_config(source.config)
    has_weights = (source.path / SINGLE).is_file() or (source.path / INDEX).is_file()
    if not has_weights or not says_all(text) or not all(any(text.get(key) for key in keys) for keys in STATED):
        return None
    opened = open_source(str(source.path))
    shapes = _plain_shapes(opened) if manifest is None else _placed_shapes(opened, manifest)
    if shapes is None:
        return None
    shapes = without_drafts(shapes, source.config)
    layers = stored_layers(shapes, source.config, str(source.path))
    sizes = {(layer.num_experts, layer.hidden_size, layer.intermediate_size, layer.matrices) for layer in layers}
    if len(sizes) != 1:
        return None
    experts, hidden, inner, matrices = sizes.pop()
    apart = {key for layer in layers for key in layer.keys}
    rest = sum(math.prod(shape) for key, shape in shapes.items() if key not in apart and not BUFFERS.search(key))
    if not text.get("head_dim") and not _heads_fill_hidden(text, shapes):
        return None
    found = geometry_from_config(
        text,
        num_moe_layers=len(layers),
        num_experts=experts,
        expert_intermediate_size=inner,
        non_expert_parameters=rest,
        matrices_per_expert=matrices,
        expert_hidden_size=hidden,
        layer_names=[layer.name for layer in layers],
    )
    return replace(found, name=source.name)


def _heads_fill_hidden(text: Mapping[str, Any], shapes: Mapping[str, Shape]) -> bool:
    """Whether a head's size is the hidden size over the heads, as a layer's matrix of keys has it."""
    hidden, heads, sharing = (next(text[key] for key in keys if text.get(key)) for keys in (HIDDEN, HEADS, KV_HEADS))
    rows = next((shape[0] for key, shape in shapes.items() if key.endswith(".self_attn.k_proj.weight")), None)
    return bool(rows == sharing * (hidden // heads))


def _plain_shapes(source: ModelSource) -> dict[str, Shape] | None:
    """{key: shape} of a checkpoint's tensors, packed matrices as their values; None where scales lie among them."""
    from moeq.exporters.readers.described import shapes_of
    from moeq.models.declared import is_dequantized

    return None if is_dequantized(source) else shapes_of(source)


def _placed_shapes(source: ModelSource, manifest: PlacementManifest) -> dict[str, Shape]:
    """{key: shape} of a checkpoint in the native format as it was before it was packed."""
    names = [layer.name for layer in manifest.layers] + [module.name for module in manifest.others]
    packed = tuple(f"{name}." for name in names)
    shapes = {key: header.shape for key, header in source.tensors.items() if not key.startswith(packed)}
    shapes |= {f"{one.name}.weight": (one.rows, one.inputs) for one in manifest.others}
    for layer in manifest.layers:
        hidden, inner = layer.hidden_size, layer.intermediate_size
        for projection in layer.projections:
            shape = (hidden, inner) if projection == "down_proj" else (inner, hidden)
            shapes |= {f"{layer.name}.{expert}.{projection}.weight": shape for expert in range(layer.num_experts)}
    return shapes


def made_geometry(source: ModelSource, trust_remote_code: bool = False) -> ModelGeometry:
    """Sizes from the configuration alone, by the model that transformers makes of it; of a packed one as it was."""
    from moeq.models import loading
    from moeq.stages.geometry import model_geometry

    skeleton, layers = loading.describe(source, trust_remote_code, packed=True)
    apart = {f"{layer.name}.{part}" for layer in layers for part in layer.parameters}
    apart |= {name for name, others in loading.tied(skeleton).items() if name > min(others, default=name)}
    parameters = skeleton.named_parameters(remove_duplicate=False)
    rest = sum(parameter.numel() for name, parameter in parameters if name not in apart)
    return model_geometry(source.name, skeleton, layers, non_expert_parameters=rest)


def codes_of_run(run: Path, geometry: ModelGeometry) -> dict[str, Any]:
    """How a run's replicas are kept, as a Subject says it: what its measured losses are of.

    Raises ArtifactError for a run without losses.
    """
    from moeq.artifacts.losses import NAME, WHOLE, read_losses

    check_path(run, "give the directory of a run to --losses")
    table = read_losses(run / "losses" / NAME).table
    group_size, symmetric, method = (table[column][0].as_py() for column in ("group_size", "symmetric", "method"))
    codebook, group_size = method if method in FLOAT_GROUPS else "", weights_of_a_scale(group_size, geometry)
    rows = zip(*(table[column].to_pylist() for column in ("method", "projection", "bits", "bytes")), strict=True)
    sizes = {bits: size for own, projection, bits, size in rows if (own, projection) == (method, WHOLE)}
    stored = {bits: 8 * size / geometry.expert_parameters for bits, size in sizes.items()}
    if method == I_QUANTS:
        codebook = _set_of(stored)
    elif not symmetric and _are_nested(stored, group_size):
        codebook = NESTED
    return {"group_size": group_size, "zero_points": not symmetric, "codebook": codebook}


def _are_nested(stored: Mapping[int, float], group_size: int) -> bool:
    """Whether some width has the zero points of a wider one: a table of losses does not say it of grids either."""
    narrow = [bits for bits in NESTED_BITS[:-1] if bits in stored]
    plain, nested = (effective_bits(narrow, group_size, True, codebook) for codebook in ("", NESTED))
    sizes = [stored[bits] for bits in narrow]
    return bool(narrow) and bool(np.abs(nested - sizes).sum() < np.abs(plain - sizes).sum())


def _set_of(stored: Mapping[int, float]) -> str:
    """The set of i-quants that stores so many bits for a weight of each width: a table of losses does not name it."""
    return min(SETS, key=lambda name: sum(abs(size - stored_bits(bits, name)) for bits, size in stored.items()))


def of_assignment(path: Path, geometry: ModelGeometry) -> Subject:
    """An assignment on a model; ArtifactError for a damaged file, EstimateError for one of another model."""
    assignment: Assignment = read_assignment(path)
    _check(geometry, [len(layer.experts) for layer in assignment.layers], str(path))
    group_size = weights_of_a_scale(assignment.group_size, geometry)
    return Subject(
        geometry=geometry,
        placement=assignment_placement(assignment, group_size),
        group_size=group_size,
        zero_points=not assignment.symmetric,
        codebook=codebook_of(assignment.encoding),
    )


def of_manifest(manifest: PlacementManifest, geometry: ModelGeometry, where: str) -> Subject:
    """The placement of a packed checkpoint on a model; EstimateError for a manifest of another model."""
    _check(geometry, [layer.num_experts for layer in manifest.layers], where)
    wanted = (geometry.expert_inputs, geometry.intermediate_size, geometry.top_k)
    for layer in manifest.layers:
        sizes = (layer.hidden_size, layer.intermediate_size, layer.top_k)
        if sizes != wanted:
            text = f"{layer.name} has (hidden, intermediate, top k) {sizes}, {geometry.name} has {wanted}"
            raise EstimateError(text, where=where, do="give a manifest of this model")
    group_size = weights_of_a_scale(manifest.layout["group_size"], geometry)
    encoding = Encoding.described(manifest.layout)
    symmetric, codebook = encoding.symmetric, codebook_of(encoding)
    widths = [[expert.widths for expert in layer.experts] for layer in manifest.layers]
    hot = [np.array([expert.tier == "gpu" for expert in layer.experts]) for layer in manifest.layers]
    name = str(manifest.assignment["name"])
    return Subject(
        geometry=geometry,
        placement=placement_of(name, widths, hot, group_size, symmetric=symmetric, codebook=codebook),
        group_size=group_size,
        zero_points=not symmetric,
        codebook=codebook,
    )


def with_others_of(manifest: PlacementManifest, geometry: ModelGeometry) -> ModelGeometry:
    """A model's geometry with all but its experts at the bits at which a packed checkpoint of it stores them."""
    packed = sum(module.rows * module.inputs for module in manifest.others)
    stored = manifest.totals.packed_module_bytes
    return geometry.with_others_packed(packed, stored, of=geometry.non_expert_parameters)


def read_placed(path: Path) -> tuple[PlacementManifest, str]:
    """The manifest at a path (placement.json or the checkpoint's directory) and its name for messages."""
    from moeq.artifacts.manifest import read_manifest

    if path.is_file() and path.name != MANIFEST:
        raise RecipeError(f"not a {MANIFEST}", where=f"--manifest {path}", do="give it, or the checkpoint's directory")
    directory = path if path.is_dir() else path.parent
    return read_manifest(directory), str(directory / MANIFEST)


def _check(geometry: ModelGeometry, experts: list[int], where: str) -> None:
    geometry.check_layers(experts, where=where, do=f"give one that was made for {geometry.name}")
