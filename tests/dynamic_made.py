"""Tiny models with experts in two precisions, whose replicas can fail, wait, or be counted."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from family_models import build as tiny_model
from replicas_made import Made

from moeq.models.experts import ExpertLayer
from moeq.quantizers.layer import made_on_demand
from moeq.recipe import LossesSection
from moeq.runtime.dynamic.copies import Switch
from moeq.runtime.dynamic.model import DynamicMoE, DynamicSettings
from moeq.runtime.dynamic.pools import HIGH, LOW
from moeq_kernels.names import VARIABLE

CPU = torch.device("cpu")
UNITS = {"hidden_size": 64, "intermediate_size": 96}  # whole units of 32 inputs
NESTED_GRID = LossesSection(group_size=32, bits=[2, 3, 4], methods=["rtn"], nested=True)
LOW_BITS = 2
IDS = torch.tensor([[3, 7, 1, 4, 9, 2, 8, 5]])


class Source(Made):
    """Replicas that can fail, wait, or be counted."""

    def __init__(self, model: Any, bits: tuple[int, ...] = (2, 4)) -> None:
        super().__init__(model, bits)
        self.before: Callable[[ExpertLayer, int, int], None] = lambda *_: None
        self.asked = 0

    def expert(self, layer: ExpertLayer, expert: int, key: int) -> Any:
        self.asked += 1
        self.before(layer, expert, key)
        return super().expert(layer, expert, key)


class Nested(Source):
    """Replicas of 2 bits that are the leading bits of those of 4; every test has the same."""

    wide: ClassVar[dict[tuple[int, int], Any]] = {}

    def expert(self, layer: ExpertLayer, expert: int, key: int) -> Any:
        self.asked += 1
        self.before(layer, expert, key)
        if (layer.index, expert) not in self.wide:
            floats = {name: stack[expert].float() for name, stack in self.original[layer.index].items()}
            made = made_on_demand("rtn", floats, NESTED_GRID, 4, layer=layer, expert=expert)
            self.wide[layer.index, expert] = made
        wide = self.wide[layer.index, expert]
        return {name: weight.leading(key) for name, weight in wide.items()}, {}


def settings(**given: Any) -> DynamicSettings:
    usual = {"high": 4, "low": 2, "memory_bytes": 1 << 30, "background": False, "period": 4, "certainty": 0.0}
    return DynamicSettings(**{**usual, "threshold": 0.0, **given})


@cache
def _budget(family: str, nested: bool, device: str, kernel: str | None) -> Any:
    """What a tiny model's experts take; kernel: what the environment says."""
    probed = tiny_model(family, **UNITS if nested else {}).eval().to(device)
    source = Nested(probed) if nested else Source(probed)
    probe = DynamicMoE(probed, source.layers, source, settings(), policy="fixed")
    probe.close()
    return probe.budget


def made(family: str = "mixtral", **given: Any) -> tuple[DynamicMoE, Source]:
    """A tiny model, half of whose experts are in high precision unless memory is given."""
    torch.manual_seed(0)
    nested: bool = given.pop("nested", False)
    device: str = given.pop("device", "cpu")
    sizes = UNITS if nested else {}
    model = tiny_model(family, **sizes).eval()
    source = Nested(model) if nested else Source(model)
    said: list[str] = given.pop("said", [])
    budget = _budget(family, nested, device, os.environ.get(VARIABLE))
    half = min(budget.layers) // 2
    wanted = (
        sum(budget.other_bytes.values())
        + budget.least_bytes
        + half * len(budget.layers) * (budget.high_bytes - budget.low_bytes)
    )
    follows = given.pop("follows", None)
    options = {"memory_bytes": wanted} | given
    dynamic = DynamicMoE(
        model.to(device), source.layers, source, settings(**options), follows=follows, policy="fixed", say=said.append
    )
    assert dynamic.places == half or "memory_bytes" in given
    return dynamic, source


def high_of(dynamic: DynamicMoE) -> list[list[bool]]:
    return [dynamic.high(layer).tolist() for layer in range(len(dynamic.layers))]


def nothing_lost(dynamic: DynamicMoE) -> None:
    """Every expert has one block, no block is shared, and all others are free."""
    places = [place for layer in dynamic.copies.layers for place in layer.places()]
    assert len({block for _, block in places}) == len(places)
    for version, pool in enumerate(dynamic.pools.pools):
        used = [block for of, block in places if of == version]
        assert set(used) <= set(pool.starts)
        assert pool.free == pool.count - len(used)


def as_published(dynamic: DynamicMoE, source: Source, number: int, expert: int) -> bool:
    """Whether what a call would read of an expert is its version, bit for bit."""
    layer: Any = dynamic.copies.layers[number]
    version, _ = layer.place(expert)
    wanted, _ = source.expert(dynamic.layers[number], expert, 4 if version == HIGH else 2)
    for name, matrix in wanted.items():
        found = layer.matrix(expert, name).parts()
        if not all(torch.equal(found[part].cpu(), tensor) for part, tensor in matrix.parts().items()):
            return False
    return True


def drawn(dynamic: DynamicMoE, rng: random.Random) -> list[Switch]:
    """A promotion and a demotion in every layer."""
    switches = []
    for number, row in enumerate(high_of(dynamic)):
        up, down = ([e for e, high in enumerate(row) if high == wanted] for wanted in (False, True))
        switches += [Switch(number, rng.choice(up), HIGH)] if up else []
        switches += [Switch(number, rng.choice(down), LOW)] if down else []
    rng.shuffle(switches)
    return switches
