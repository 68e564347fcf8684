"""Policies: where experts live and compute, one file each; every module here with a `POLICY` is found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Protocol, runtime_checkable

from moeq.estimator.devices import Hardware, Parameter
from moeq.estimator.step import Layers, Step, Work


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

    def decode(self, layers: Layers, work: Work, variant: str) -> Step:
        """A decode step of the whole model."""
        ...

    def prefill(self, layers: Layers, work: Work, variant: str) -> Step:
        """The prefill of the whole model."""
        ...

    def migration_seconds(self, layers: Layers, variant: str) -> float:
        """Time between prefill and decode in which the whole model's experts move."""
        ...


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
