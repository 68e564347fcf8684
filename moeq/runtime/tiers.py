"""A packed model's experts where the placement manifest wants them: those of tier gpu on the GPU, the rest beside."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import torch

from moeq.artifacts.assignment import Tier
from moeq.artifacts.manifest import REMEDY, PlacedLayer
from moeq.errors import ArtifactError, ModelError
from moeq.models.loading import resolve_device
from moeq.runtime.packed_experts import PackedExperts

TIERS: tuple[str, ...] = get_args(Tier)
FASTEST = "gpu"


def tier_devices(chosen: Mapping[str, str]) -> dict[str, torch.device]:
    """The device of every tier: the GPU, where there is one, for `gpu`, the machine's memory for the rest.

    chosen: {tier: device} that differ. ModelError for an unknown tier, or a device that is not there.
    """
    unknown = sorted(set(chosen) - set(TIERS))
    if unknown:
        raise ModelError("no such tier", where=f"placement, {unknown[0]}", do=f"name {', '.join(TIERS)}")
    usual = dict.fromkeys(TIERS, "cpu") | {FASTEST: "auto"}
    return {tier: resolve_device(device) for tier, device in (usual | dict(chosen)).items()}


def place(model: Any, layers: Iterable[PlacedLayer], devices: Mapping[str, torch.device]) -> Any:
    """Move a loaded model: each expert to the device of its tier, everything else to that of `gpu`.

    Activations follow by themselves, once a layer and direction (see PackedExperts). Returns the model; ArtifactError
    when the manifest is of another model. Experts that stay never visit the GPU, so that it need only hold its own.
    """
    tiers = {layer.name: [expert.tier for expert in layer.experts] for layer in layers}
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedExperts)}
    wrong = sorted(
        name for name in tiers.keys() | packed.keys()
        if name not in tiers or name not in packed or len(tiers[name]) != packed[name].num_experts
    )  # fmt: skip
    if wrong:
        where = f"placement.json, {wrong[0]}"
        raise ArtifactError("the manifest and the model's MoE layers differ", where=where, do=REMEDY)
    for name, module in packed.items():
        for number, tier in enumerate(tiers[name]):
            module.get_submodule(str(number)).to(devices[tier])
    with _taken_out(packed.values()):
        model.to(devices[FASTEST])
    return model


@contextmanager
def _taken_out(layers: Collection[PackedExperts]) -> Iterator[None]:
    """The model without its packed experts."""
    experts = [
        (layer, str(number), layer._modules[str(number)]) for layer in layers for number in range(layer.num_experts)
    ]
    for layer, name, _ in experts:
        layer._modules[name] = None
    try:
        yield
    finally:
        for layer, name, expert in experts:
            layer._modules[name] = expert
