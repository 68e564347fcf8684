"""Policies: where experts live and compute, one file each; every module here with a `POLICY` is found by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from moeq.estimator.devices import Hardware, Parameter
from moeq.estimator.step import NOTHING, BoolArray, FloatArray, Layers, Schedule, TermTotal, Work
from moeq.registry import POLICIES
from moeq.tables import human_bytes


@dataclass(frozen=True)
class Variant:
    """short: its name in charts and tables; long: with what it does; monotone: more bandwidth never makes it slower;
    follows: what of the placement decides what it does, all of it or how many experts are on the GPU, or nothing."""

    short: str
    long: str
    monotone: bool = True
    follows: Literal["all", "number", "nothing"] = "all"


@dataclass(frozen=True, kw_only=True)
class Holds:
    """Bytes of experts that lie on the GPU for good and in the memory beside it, and the mean stored bits of a weight
    that experts compute with."""

    gpu_bytes: float
    near_bytes: float
    bits: float


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """A way to run a placed model; `variants` ("" for a policy without any) are estimated side by side.

    name: its module's, or another package's entry point's; help: one line; parameters: what a hardware file may set
    below `policies.<name>`; in_time: whether decode needs consecutive steps, since what it does follows from those
    before; near_data: whether experts compute near their memory where something can.
    """

    name: str
    help: str
    variants: Mapping[str, Variant]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    in_time: bool = False
    near_data: bool = False

    @abstractmethod
    def decode(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """How the experts of every layer run in a decode step."""

    def prefill(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """How the experts of every layer run in the prefill: as in a decode step, unless a policy says otherwise."""
        return self.decode(layers, work, variant)

    def migration(self, layers: Layers, variant: str) -> TermTotal:
        """What moves between prefill and decode, over the whole model: nothing, unless a policy says otherwise."""
        return NOTHING

    def refusal(self, layers: Layers, kv_cache_bytes: float) -> str | None:
        """Why it cannot run this model beside keys and values of a size: the sum that does not fit; or None."""
        return None

    def holds(self, layers: Layers, kv_cache_bytes: float) -> Holds:
        """Where experts lie and at how many bits they compute: all in FP16 in the memory beside the GPU, unless a
        policy says otherwise."""
        return Holds(gpu_bytes=0.0, near_bytes=all_fp16(layers), bits=16.0)

    def reads_near(self, layers: Layers, *, prefill: bool = False) -> FloatArray:
        """Bytes [D, E] of the version of every expert that a phase reads beside the GPU: FP16, unless a policy says
        otherwise; 0 where it is never read there."""
        return np.full(layers.bits.shape, layers.fp16_expert_bytes)


def cold_bytes(layers: Layers) -> FloatArray:
    """Bytes [D, E] of the experts that are not on the GPU, at the widths of the placement."""
    return np.where(layers.hot, 0.0, layers.geometry.expert_parameters / 8 * layers.stored_bits)


def by_label() -> Mapping[str, tuple[Policy, str]]:
    """Every policy and variant by the label of results, in the order of policies."""
    return {label(policy.name, variant): (policy, variant) for policy in POLICIES for variant in policy.variants}


def titled(wanted: str) -> Variant:
    """The variant of a label; of a policy that is not installed here, one that is called so."""
    if wanted not in by_label():
        return Variant(wanted.replace("_", " "), wanted)
    policy, variant = by_label()[wanted]
    return policy.variants[variant]


def label(name: str, variant: str) -> str:
    """The name of a policy's variant in results: `monde_opt`, `hobbit`."""
    return f"{name}_{variant}" if variant else name


def parameter(policy: Policy, hardware: Hardware, key: str) -> float | str:
    """A parameter of a policy: as the hardware file sets it, else the policy's default."""
    return hardware.policies.get(policy.name, {}).get(key, policy.parameters[key].default)


def number(policy: Policy, hardware: Hardware, key: str) -> float:
    """A numeric parameter of a policy."""
    return float(parameter(policy, hardware, key))


def all_fp16(layers: Layers) -> float:
    """FP16 bytes of all experts of the model."""
    return layers.geometry.num_layers * layers.geometry.num_experts * layers.fp16_expert_bytes


def stored_bytes(layers: Layers, mask: BoolArray | None = None) -> float:
    """Bytes of all experts of the model at the widths of the placement, or of those of a mask [D, E]."""
    bits = layers.stored_bits if mask is None else layers.stored_bits * mask
    return float(layers.geometry.expert_parameters / 8 * (bits * layers.repeats[:, None]).sum())


def mean_bits(layers: Layers) -> float:
    """Mean stored bits of a weight of the placement's experts."""
    return float(np.average(layers.stored_bits.mean(axis=1), weights=layers.repeats))


def over_gpu_memory(layers: Layers, expert_bytes: float, kv_cache_bytes: float) -> str | None:
    """The sum by which experts, the rest of the model and keys and values exceed the GPU's memory, or None."""
    rest = layers.geometry.non_expert_bytes
    needed, there = expert_bytes + rest + kv_cache_bytes, layers.hardware.all_gpus.memory_capacity_bytes
    if needed <= there:
        return None
    parts = {"experts": expert_bytes, "the rest": rest, "keys and values": kv_cache_bytes}
    words = " + ".join(f"{name} {human_bytes(size)}" for name, size in parts.items())
    return f"needs {words} = {human_bytes(needed)} of GPU memory, which has {human_bytes(there)}"
