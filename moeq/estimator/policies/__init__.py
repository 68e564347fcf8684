"""Policies: where experts live and compute, one file each; every module here with a `POLICY` is found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, runtime_checkable

from moeq.estimator.devices import Hardware, Parameter
from moeq.estimator.step import NOTHING, Layers, Schedule, TermTotal, Work
from moeq.tables import human_bytes


@runtime_checkable
class Policy(Protocol):
    """A way to run a placed model; `variants` ("" for a policy without any) are estimated side by side."""

    @property
    def name(self) -> str:
        """The name of the policy's module."""
        ...

    @property
    def variants(self) -> tuple[str, ...]:
        """At least one."""
        ...

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """What a hardware file may set below `policies.<name>`, with defaults and their sources."""
        ...

    @property
    def in_time(self) -> bool:
        """Whether decode needs consecutive steps, since what it does follows from the steps before."""
        ...

    def decode(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """How the experts of every layer run in a decode step."""
        ...

    def prefill(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """How the experts of every layer run in the prefill."""
        ...

    def migration(self, layers: Layers, variant: str) -> TermTotal:
        """What moves between prefill and decode, over the whole model."""
        ...

    def refusal(self, layers: Layers, kv_cache_bytes: float) -> str | None:
        """Why the policy cannot run this model beside keys and values of a size: the sum that does not fit; or None."""
        ...


@dataclass(frozen=True)
class Plain:
    """What most policies share: steps in any order, nothing moves ahead of decoding, the model may be of any size."""

    in_time: bool = field(default=False, init=False)

    def migration(self, layers: Layers, variant: str) -> TermTotal:
        """Nothing moves ahead of decoding."""
        return NOTHING

    def refusal(self, layers: Layers, kv_cache_bytes: float) -> str | None:
        """Experts that do not fit the GPU come from the NDP's memory."""
        return None


@cache
def known_policies() -> Mapping[str, Policy]:
    """Every policy by name, sorted."""
    found: dict[str, Policy] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda one: one.name):
        policy = getattr(importlib.import_module(f"{__name__}.{module.name}"), "POLICY", None)
        if policy is not None:
            assert isinstance(policy, Policy), f"{module.name}.POLICY is not a Policy"
            assert policy.name == module.name, f"{module.name}.POLICY is named {policy.name}"
            found[policy.name] = policy
    return found


def label(name: str, variant: str) -> str:
    """The name of a policy's variant in results: `monde_opt`, `hobbit`."""
    return f"{name}_{variant}" if variant else name


def parameter(policy: Policy, hardware: Hardware, key: str) -> float | str:
    """A parameter of a policy: as the hardware file sets it, else the policy's default."""
    return hardware.policies.get(policy.name, {}).get(key, policy.parameters[key].default)


def number(policy: Policy, hardware: Hardware, key: str) -> float:
    """A numeric parameter of a policy."""
    return float(parameter(policy, hardware, key))


def over_gpu_memory(layers: Layers, expert_bytes: float, kv_cache_bytes: float) -> str | None:
    """The sum by which experts, the rest of the model and keys and values exceed the GPU's memory, or None."""
    rest = 2.0 * layers.geometry.non_expert_parameters
    needed, there = expert_bytes + rest + kv_cache_bytes, layers.hardware.gpu.memory_capacity_bytes
    if needed <= there:
        return None
    parts = {"experts": expert_bytes, "the rest": rest, "keys and values": kv_cache_bytes}
    words = " + ".join(f"{name} {human_bytes(size)}" for name, size in parts.items())
    return f"needs {words} = {human_bytes(needed)} of GPU memory, which has {human_bytes(there)}"
