"""What is estimated: the sizes of a model, where its experts live, and how their codes are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moeq.artifacts.assignment import Assignment, read_assignment
from moeq.errors import EstimateError, ModelError, RecipeError
from moeq.estimator import ModelGeometry, Placement, known_geometries, load_geometry
from moeq.estimator.placement import assignment_placement, placement_of, weights_of_a_scale

if TYPE_CHECKING:  # torch and transformers are imported where a configuration or a manifest is read
    from moeq.artifacts.manifest import PlacementManifest
    from moeq.models.source import ModelSource

MANIFEST = "placement.json"
BUNDLED = "bundled:"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Sizes of a model, the placement of its experts, and the scales of their codes: as estimates name them."""

    geometry: ModelGeometry
    placement: Placement
    group_size: int
    zero_points: bool


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a model and, of a packed checkpoint, its manifest."""

    geometry: ModelGeometry
    manifest: PlacementManifest | None = None


def check_known(name: str) -> None:
    """EstimateError, with the nearest known name, for one that neither a geometry nor a model can have."""
    if not Path(name).expanduser().exists() and "/" not in name and not name.startswith(BUNDLED):
        load_geometry(name)


def read_model(name: str, *, trust_remote_code: bool = False) -> Model:
    """The model that a geometry's name, a config.json, a model directory, a packed checkpoint or a hub id stands for.

    No weights are read. Raises EstimateError for an unknown name, ModelError for a configuration that cannot be read or
    is none of a Mixture-of-Experts model, ArtifactError for a damaged manifest.
    """
    path = Path(name).expanduser()
    if name in known_geometries():
        return Model(geometry=load_geometry(name))
    check_known(name)
    if path.is_file() and path.suffix != ".json":
        raise ModelError("not a config.json", where=name, do="give a config.json, a model directory or a hub id")
    from moeq.artifacts.manifest import read_manifest
    from moeq.models.source import open_config

    source = open_config(name, beside=(MANIFEST,), trust_remote_code=trust_remote_code)
    manifest = read_manifest(source.path) if (source.path / MANIFEST).is_file() else None
    geometry = _geometry(source, trust_remote_code)
    if manifest is not None:  # its directory is called "checkpoint" as often as not
        geometry = replace(geometry, name=manifest.model.name)
    return Model(geometry=geometry, manifest=manifest)


def _geometry(source: ModelSource, trust_remote_code: bool) -> ModelGeometry:
    """Sizes from the configuration alone, of a packed model those that it had before."""
    from moeq.models import loading
    from moeq.stages.geometry import model_geometry

    skeleton, layers = loading.describe(source, trust_remote_code, packed=True)
    apart = {f"{layer.name}.{part}" for layer in layers for part in layer.parameters}
    apart |= {name for name, others in loading.tied(skeleton).items() if name > min(others, default=name)}
    parameters = skeleton.named_parameters(remove_duplicate=False)
    rest = sum(parameter.numel() for name, parameter in parameters if name not in apart)
    return model_geometry(source.name, skeleton, layers, non_expert_parameters=rest)


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
    )


def of_manifest(manifest: PlacementManifest, geometry: ModelGeometry, where: str) -> Subject:
    """The placement of a packed checkpoint on a model; EstimateError for a manifest of another model."""
    _check(geometry, [layer.num_experts for layer in manifest.layers], where)
    wanted = (geometry.hidden_size, geometry.intermediate_size, geometry.top_k)
    for layer in manifest.layers:
        sizes = (layer.hidden_size, layer.intermediate_size, layer.top_k)
        if sizes != wanted:
            text = f"{layer.name} has (hidden, intermediate, top k) {sizes}, {geometry.name} has {wanted}"
            raise EstimateError(text, where=where, do="give a manifest of this model")
    group_size = weights_of_a_scale(manifest.layout["group_size"], geometry)
    symmetric = bool(manifest.layout["symmetric"])
    widths = [[expert.widths for expert in layer.experts] for layer in manifest.layers]
    hot = [np.array([expert.tier == "gpu" for expert in layer.experts]) for layer in manifest.layers]
    return Subject(
        geometry=geometry,
        placement=placement_of(str(manifest.assignment["name"]), widths, hot, group_size, symmetric=symmetric),
        group_size=group_size,
        zero_points=not symmetric,
    )


def read_placed(path: Path) -> tuple[PlacementManifest, str]:
    """The manifest at a path (placement.json or the checkpoint's directory) and its name for messages."""
    from moeq.artifacts.manifest import read_manifest

    if path.is_file() and path.name != MANIFEST:
        raise RecipeError(f"not a {MANIFEST}", where=f"--manifest {path}", do="give it, or the checkpoint's directory")
    directory = path if path.is_dir() else path.parent
    return read_manifest(directory), str(directory / MANIFEST)


def _check(geometry: ModelGeometry, experts: list[int], where: str) -> None:
    geometry.check_layers(experts, where=where, do=f"give one that was made for {geometry.name}")
