"""What an estimate of a run is made for: the sizes that its recipe names, and the routing that its profile has."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from moeq.errors import EstimateError
from moeq.estimator import ModelGeometry, load_geometry
from moeq.stages import non_experts as others
from moeq.stages import profile
from moeq.stages.context import Context
from moeq.stages.geometry import model_geometry

OWN_GEOMETRY = "model"
FLOOR = 1e-6  # of an expert's share: one that calibration never chose can still be chosen


def chosen_geometry(context: Context) -> tuple[ModelGeometry, bool]:
    """The geometry that the recipe names and whether it is the model's own; of several, the first that fits.

    All but the experts has as many bits a weight in it as what the recipe makes of the model.
    """
    named = context.recipe.estimate.geometry
    names = [named] if isinstance(named, str) else named
    experts = {layer.num_experts for layer in context.model.layers}
    counts = []
    for name in names:
        geometry = _own_geometry(context) if name == OWN_GEOMETRY else load_geometry(name)
        if experts == {geometry.num_experts}:
            return _packed(context, geometry), name == OWN_GEOMETRY
        counts.append(f"{name} has {geometry.num_experts} experts a layer")
    raise EstimateError(
        f"{', '.join(counts) or 'none named'}, the model {sorted(experts)}",
        where="estimate.geometry",
        do="use geometry: model",
    )


def _own_geometry(context: Context) -> ModelGeometry:
    model = context.model
    return model_geometry(model.source.name, *model.described, non_expert_parameters=_other_parameters(context))


def _other_parameters(context: Context) -> int:
    tensors = context.model.source.tensors
    return sum(math.prod(tensors[key].shape) for key in tensors.keys() - context.model.expert_keys)


def _packed(context: Context, geometry: ModelGeometry) -> ModelGeometry:
    modules = others.chosen(context)
    weights = sum(module.rows * module.inputs for module in modules)
    stored = sum(others.packed_weight_bytes(context.recipe, module) for module in modules)
    return geometry.with_others_packed(weights, stored, of=_other_parameters(context))


def profiled_popularity(context: Context) -> NDArray[np.float64]:
    """The share of a layer's tokens that each expert got in the profile, [L, E]."""
    measured = np.stack(profile.load(context).activation()) + FLOOR
    return np.asarray(measured / measured.sum(1, keepdims=True), dtype=np.float64)
