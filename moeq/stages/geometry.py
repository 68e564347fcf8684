"""The geometry of a model for the estimator, from its configuration and expert layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moeq.errors import EstimateError
from moeq.estimator import CONFIG_KEYS, ModelGeometry, geometry_from_config
from moeq.estimator.attention import KEYS as TEXT_KEYS
from moeq.estimator.attention import PER_LAYER
from moeq.models.experts import ExpertLayer
from moeq.models.streaming import blocks_of
from moeq.models.visits import visits


def model_geometry(
    name: str, skeleton: Any, layers: Sequence[ExpertLayer], *, non_expert_parameters: int
) -> ModelGeometry:
    """The geometry of a model's expert layers; EstimateError where these differ in size."""
    shapes = {(layer.num_experts, layer.hidden_size, layer.intermediate_size) for layer in layers}
    if len(shapes) > 1:
        raise EstimateError(
            "MoE layers of different sizes cannot be estimated yet",
            where=name,
            do="give a geometry by name, such as mixtral-8x7b",
        )
    return replace(first_geometry(skeleton, layers, non_expert_parameters=non_expert_parameters), name=name)


def first_geometry(skeleton: Any, layers: Sequence[ExpertLayer], *, non_expert_parameters: int = 0) -> ModelGeometry:
    """The geometry of a model all of whose expert layers are as the first."""
    return geometry_from_config(
        config_values(skeleton, layers[0].kind.top_k),
        num_moe_layers=len(layers),
        num_experts=layers[0].num_experts,
        expert_intermediate_size=layers[0].intermediate_size,
        non_expert_parameters=non_expert_parameters,
        matrices_per_expert=len(layers[0].projections),
        expert_hidden_size=layers[0].hidden_size,
        layer_names=[layer.name for layer in layers],
        visits=[layer.visits for layer in layers],
        visited_parameters=_visited(skeleton, layers),
    )


def _visited(skeleton: Any, layers: Sequence[ExpertLayer]) -> int:
    """Weights outside of the experts that a token meets again in a loop, as often as that."""
    apart = {f"{layer.name}.{part}" for layer in layers for part in layer.parameters}
    again = {path: visits(skeleton, path) - 1 for path in blocks_of(skeleton)}
    return sum(
        times * parameter.numel()
        for path, times in again.items()
        if times
        for name, parameter in skeleton.get_submodule(path).named_parameters(prefix=path)
        if name not in apart
    )


def dense_geometry(skeleton: Any) -> ModelGeometry:
    """What is asked of a model without experts: its hidden size and heads; the rest is one of each."""
    return geometry_from_config(
        config_values(skeleton, 1),
        num_moe_layers=1,
        num_experts=1,
        expert_intermediate_size=1,
        non_expert_parameters=0,
    )


def config_values(model: Any, top_k: int | None) -> dict[str, Any]:
    """What the geometry reads, through the names that the family's configuration goes by, and from its parts."""
    config = model.config.get_text_config()
    whole: dict[str, Any] = config.to_dict()
    values: dict[str, Any] = {}
    for part in (*(part for part in whole.values() if isinstance(part, dict)), whole):
        values |= {key: part[key] for key in CONFIG_KEYS if part.get(key) is not None}
    values |= {name: whole[own] for name, own in config.attribute_map.items() if name in CONFIG_KEYS and own in whole}
    worked_out = [key for key in TEXT_KEYS if key not in whole and hasattr(type(config), key)]  # by its class
    stated = {key: whole.get(key) for key in (*TEXT_KEYS, PER_LAYER)} | {
        key: getattr(config, key) for key in worked_out
    }
    values |= {key: value for key, value in stated.items() if value is not None}
    return values | {"model_type": config.model_type} | ({} if top_k is None else {"top_k": top_k})
