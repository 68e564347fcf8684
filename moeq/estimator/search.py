"""Which settings of a model meet a speed: hardware x experts on the GPU x their bits x the others' x batch x policy.

Every combination is worked out; those that do not fit are refused one by one. The front are those that meet the speed
and than which none is better in one respect without being worse in another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeq.artifacts.assignment import FULL
from moeq.estimator.capacity import largest_gpu_experts
from moeq.estimator.devices import Hardware
from moeq.estimator.geometry import ModelGeometry, effective_bits
from moeq.estimator.placement import Placement, uniform_placement
from moeq.estimator.points import SUBJECT, step_joules
from moeq.estimator.policies import Holds, Policy, by_label, titled
from moeq.estimator.result import Frozen
from moeq.estimator.simulation import Simulation, build_simulation
from moeq.estimator.step import Step

GPU_BITS, BITS = (16.0, 8.0, 4.0), (16.0, 4.0, 3.0, 2.0)
SHARES = (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)  # of a layer's experts on the GPU, beside the most that fit
HOUR, MILLION = 3600, 1e6
Loss = Callable[[Placement], float | None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Experts of every layer on the GPU, their code bits, and those of the others."""

    gpu_experts: int
    gpu_bits: float
    bits: float

    def text(self, num_experts: int) -> str:
        """In words."""
        if self.gpu_experts == 0:
            return f"no expert on the GPU, all {_width(self.bits)}"
        if self.gpu_experts == num_experts:
            return f"all {num_experts} experts on the GPU, {_width(self.gpu_bits)}"
        where = f"{self.gpu_experts} of {num_experts} experts on the GPU"
        if self.gpu_bits == self.bits:
            return f"{where}, all {_width(self.bits)}"
        return f"{where} {_width(self.gpu_bits)}, the others {_width(self.bits)}"


def _width(bits: float) -> str:
    return "FP16" if bits == 16 else f"{bits:g} code bits"


class Point(Frozen):
    """A policy at a setting that fits.

    `tokens_per_second` are those of one sequence, `all_tokens_per_second` of the batch; `bits` the mean stored bits of
    a weight that experts compute with; `gpu_bytes` what lies on the GPU (experts, the rest of the model, keys and
    values), `near_bytes` what experts take in the memory beside it. `joules`: of a token of decode, with static power;
    `dollars`: of a million tokens; `loss`: of the experts by a run's measurements. None: not known.
    """

    hardware: str
    policy: str
    gpu_experts: int
    gpu_bits: float
    code_bits: float
    batch: int
    tokens_per_second: float
    all_tokens_per_second: float
    bits: float
    gpu_bytes: float
    near_bytes: float
    joules: float | None
    dollars: float | None
    loss: float | None
    meets: bool
    on_front: bool = False

    @property
    def setting(self) -> Setting:
        """Where experts lie and at which widths."""
        return Setting(gpu_experts=self.gpu_experts, gpu_bits=self.gpu_bits, bits=self.code_bits)

    def text(self, num_experts: int) -> str:
        """The setting in words, as the policy takes it."""
        policy, _ = by_label()[self.policy]
        follows = titled(self.policy).follows
        if follows == "number":
            return f"all {_width(self.bits)}, the {self.gpu_experts} most popular of {num_experts} fetched"
        if follows == "nothing":
            return "all FP16" if self.bits == FULL else "widths of its own"
        if policy.near_data:
            return self.setting.text(num_experts)
        if self.gpu_experts == 0 or self.gpu_bits == self.code_bits:
            return f"all {_width(self.code_bits)}"
        many = f"{self.gpu_experts} of {num_experts} experts"
        return f"{many} {_width(self.gpu_bits)}, the others {_width(self.code_bits)}"

    def short(self, num_experts: int) -> str:
        """The setting as experts x code bits: where some may lie on the GPU, those there first, be they none."""
        policy, _ = by_label()[self.policy]
        if titled(self.policy).follows != "all":
            return f"{num_experts}x16" if self.bits == FULL else "its own"
        hot = self.gpu_experts
        if not policy.near_data and (hot in (0, num_experts) or self.gpu_bits == self.code_bits):
            return f"{num_experts}x{self.code_bits:g}"
        return f"{hot}x{self.gpu_bits:g} {num_experts - hot}x{self.code_bits:g}"


class Refused(Frozen):
    """Points that were refused on one hardware for one reason."""

    hardware: str
    policy: str
    points: int
    example: str


class SearchResult(Frozen):
    """All points that fit, best first by what they keep and then by speed.

    `asked`: of the setting that was asked about, by the context-aware placement; None where it does not fit.
    """

    geometry: str
    num_experts: int
    speed: float
    memory_bytes: float | None
    context: int
    evaluated: int
    points: tuple[Point, ...]
    refused: tuple[Refused, ...]
    asked: Point | None
    asked_setting: str

    @property
    def front(self) -> list[Point]:
        """What meets the speed and is not beaten, the fastest first."""
        return sorted((p for p in self.points if p.on_front), key=lambda p: -p.tokens_per_second)

    @property
    def best(self) -> Point | None:
        """Of what meets the speed, that which keeps most: the least loss, or most bits; of equal ones the fastest."""
        return next((point for point in self.points if point.meets), None)

    @property
    def better_than_asked(self) -> Point | None:
        """The fastest on the same hardware and batch that keeps no less than what was asked about, and is faster."""
        if self.asked is None:
            return None
        same = [p for p in self.points if (p.hardware, p.batch) == (self.asked.hardware, self.asked.batch)]
        if self.asked.loss is None:  # its widths were not measured
            kept = [p for p in same if not p.bits < self.asked.bits]
        else:
            kept = [p for p in same if not _keeps(p) < _keeps(self.asked)]
        best = max(kept, key=lambda p: (p.tokens_per_second, -p.gpu_bytes - p.near_bytes), default=None)
        return None if best is None or best.tokens_per_second <= self.asked.tokens_per_second else best


def _keeps(point: Point) -> float:
    """What a point keeps of the model, more is better."""
    return point.bits if point.loss is None else -point.loss


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched, and for which speed (tokens a second of one sequence).

    `placed`: what was asked about, where its experts have widths of their own, which `asked` has in the mean, and
    `placed_loss` what these lose;
    `memory_bytes`: of the GPU's memory, at most what it has; `dollars_per_hour` by name of a hardware; `loss` of a
    placement by a run, whose policies then are those that take its widths or FP16; `labels`: policies (None: all).
    """

    geometry: ModelGeometry
    hardware: Sequence[Hardware]
    speed: float
    asked: Setting
    placed: Placement | None = None
    placed_loss: float | None = None
    batches: Sequence[int] = (1,)
    context: int = 1024
    group_size: int | None = 128
    zero_points: bool = False
    codebook: str = ""
    memory_bytes: float | None = None
    dollars_per_hour: Mapping[str, float] | None = None
    loss: Loss | None = None
    gpu_widths: Sequence[float] = GPU_BITS
    widths: Sequence[float] = BITS
    labels: frozenset[str] | None = None
    samples: int = 256
    seed: int = 0

    def run(self) -> SearchResult:
        """Every combination; raises EstimateError as the estimator does."""
        found: list[Point] = []
        refused: Counter[tuple[str, str]] = Counter()
        reasons: dict[tuple[str, str], str] = {}
        drawn: dict[Any, Any] = {}
        evaluated = 0
        for system in self.hardware:
            for point, key, reason in self._of_system(self._limited(system), drawn):
                evaluated += 1
                if point is not None:
                    found.append(point)
                else:
                    refused[key] += 1
                    reasons.setdefault(key, reason)
        asked = self._asked(found)
        points = _ranked(_with_front(found))
        return SearchResult(
            geometry=self.geometry.name,
            num_experts=self.geometry.num_experts,
            speed=self.speed,
            memory_bytes=self.memory_bytes,
            context=self.context,
            evaluated=evaluated,
            points=tuple(points),
            refused=tuple(
                Refused(hardware=system, policy=policy, points=count, example=reasons[system, policy])
                for (system, policy), count in refused.items()
            ),
            asked=asked,
            asked_setting=self.asked.text(self.geometry.num_experts) + (" on average" if self.placed else ""),
        )

    def _limited(self, system: Hardware) -> Hardware:
        """With no more GPU memory than allowed."""
        if self.memory_bytes is None or self.memory_bytes >= system.all_gpus.memory_capacity_bytes:
            return system
        return system.changed("gpu", memory_capacity_bytes=self.memory_bytes / system.count)

    def settings(self, system: Hardware, batch: int) -> list[Setting]:
        """Every setting once, that which is asked about first."""
        experts = self.geometry.num_experts
        own = [] if self.placed is not None else [self.asked]
        found = [*own]
        for gpu_bits in dict.fromkeys((*self.gpu_widths, *(asked.gpu_bits for asked in own))):
            stored = float(effective_bits(gpu_bits, self.group_size, self.zero_points, self.codebook))
            most = largest_gpu_experts(self.geometry, system, batch=batch, context=self.context, stored_bits=stored)
            places = {round(share * experts) for share in SHARES} | {most or 0, *(asked.gpu_experts for asked in own)}
            for gpu_experts, bits in product(
                sorted(places), dict.fromkeys((*self.widths, *(asked.bits for asked in own)))
            ):
                all_there, none = gpu_experts == experts, gpu_experts == 0
                widths = {"gpu_bits": 16.0 if none else gpu_bits, "bits": gpu_bits if all_there else bits}
                found.append(Setting(gpu_experts=gpu_experts, **widths))
        return list(dict.fromkeys(_plain(setting, experts) for setting in found))

    def _of_system(
        self, system: Hardware, drawn: dict[Any, Any]
    ) -> Iterator[tuple[Point | None, tuple[str, str], str]]:
        """A point, or hardware and policy with the reason of a refusal."""
        for batch in self.batches:
            seen: set[tuple[str, Any]] = set()
            for setting in self.settings(system, batch):
                simulation = self._simulation(system, self._placement(setting), drawn)
                every = {label: policy for label, policy, _ in simulation.wanted(self.labels)}
                follows = {label: _followed(label, setting) for label in every}
                wanted = {label: policy for label, policy in every.items() if (label, follows[label]) not in seen}
                seen |= follows.items()
                yield from self._of_setting(simulation, system, setting, batch, wanted)

    def _simulation(self, system: Hardware, placement: Placement, drawn: dict[Any, Any]) -> Simulation:
        """The placed model; routing that was drawn is shared."""
        made = build_simulation(
            self.geometry,
            system,
            placement,
            group_size=self.group_size,
            zero_points=self.zero_points,
            codebook=self.codebook,
            context=self.context,
            samples=self.samples,
            seed=self.seed,
            labels=self.labels,
        )
        return replace(made, drawn=drawn)

    def _placement(self, setting: Setting) -> Placement:
        return uniform_placement(
            self.geometry, bits=setting.bits, hot_experts=setting.gpu_experts, hot_bits=setting.gpu_bits
        )

    def _of_setting(
        self, simulation: Simulation, system: Hardware, setting: Setting, batch: int, wanted: Mapping[str, Policy]
    ) -> Iterator[tuple[Point | None, tuple[str, str], str]]:
        kept, fits = simulation.kv_cache_bytes(batch), {}
        for label, policy in wanted.items():
            reason = simulation.lack(policy, kept)
            reason = reason or self._unmeasured(label, policy.holds(simulation.layers, kept), setting)
            if reason is None:
                fits[label] = policy
            else:
                yield None, (system.name, label), f"batch {batch}, {setting.text(self.geometry.num_experts)}: {reason}"
        steps = simulation.decode(batch, frozenset(fits)) if fits else {}
        for label, step in steps.items():
            yield self._point(simulation, system, setting, batch, label, fits[label], step), (system.name, label), ""

    def _point(
        self,
        simulation: Simulation,
        system: Hardware,
        setting: Setting,
        batch: int,
        label: str,
        policy: Policy,
        step: Step,
    ) -> Point:
        kept = simulation.kv_cache_bytes(batch)
        holds = policy.holds(simulation.layers, kept)
        rate, joules = 1 / step.seconds, step_joules(step, system.energy)
        dollars = (self.dollars_per_hour or {}).get(system.name)
        loss = None if self.loss is None else 0.0 if holds.bits == 16 else self.loss(self._placement(setting))
        return Point(
            hardware=system.name,
            policy=label,
            gpu_experts=setting.gpu_experts,
            gpu_bits=setting.gpu_bits,
            code_bits=setting.bits,
            batch=batch,
            tokens_per_second=rate,
            all_tokens_per_second=batch * rate,
            bits=holds.bits,
            gpu_bytes=holds.gpu_bytes + self.geometry.non_expert_bytes + kept,
            near_bytes=holds.near_bytes,
            joules=None if joules is None else joules / batch,
            dollars=None if dollars is None else MILLION * dollars / HOUR / (batch * rate),
            loss=loss,
            meets=rate >= self.speed,
        )

    def _unmeasured(self, label: str, holds: Holds, setting: Setting) -> str | None:
        """Why a run's losses do not tell what a policy loses; None where they do, or there are none."""
        if self.loss is None or holds.bits == 16:
            return None
        if titled(label).follows != "all":
            return "it takes widths of its own, whose losses are not those of a placement"
        return None if self.loss(self._placement(setting)) is not None else "its widths were not measured"

    def _asked(self, found: Sequence[Point]) -> Point | None:
        if self.placed is not None:
            return self._of_placement(self.placed)
        wanted = _plain(self.asked, self.geometry.num_experts)
        return next((p for p in found if p.policy == SUBJECT and p.setting == wanted), None)

    def _of_placement(self, placement: Placement) -> Point | None:
        """A placement as it is, on the first hardware at the first batch; None where it does not fit."""
        system, batch, policy = self._limited(self.hardware[0]), self.batches[0], by_label()[SUBJECT][0]
        simulation = self._simulation(system, placement, {})
        if simulation.lack(policy, simulation.kv_cache_bytes(batch)) is not None:
            return None
        step = simulation.decode(batch, frozenset({SUBJECT}))[SUBJECT]
        point = self._point(simulation, system, self.asked, batch, SUBJECT, policy, step)
        return point.model_copy(update={"loss": self.placed_loss})


def _followed(label: str, setting: Setting) -> Any:
    """What of a setting a policy follows: settings that are equal in it are one for the policy."""
    return {"all": setting, "number": setting.gpu_experts, "nothing": None}[titled(label).follows]


def _plain(setting: Setting, num_experts: int) -> Setting:
    """With the widths of experts that there are none of set to what the others have."""
    if setting.gpu_experts == 0:
        return replace(setting, gpu_bits=16.0)
    return replace(setting, bits=setting.gpu_bits) if setting.gpu_experts == num_experts else setting


def _with_front(points: Sequence[Point]) -> list[Point]:
    """With what is not beaten among those that meet the speed; energy and money count where all of these have them."""
    meeting = [index for index, point in enumerate(points) if point.meets]
    known = [
        field for field in ("joules", "dollars") if all(getattr(points[index], field) is not None for index in meeting)
    ]
    rows = [
        (
            *(-points[index].tokens_per_second, -_keeps(points[index])),
            *(points[index].gpu_bytes, points[index].near_bytes),
            *(getattr(points[index], field) for field in known),
        )
        for index in meeting
    ]
    unbeaten = {meeting[row] for row in np.flatnonzero(front(rows))}
    return [point.model_copy(update={"on_front": index in unbeaten}) for index, point in enumerate(points)]


def front(rows: Sequence[tuple[float, ...]]) -> NDArray[np.bool_]:
    """Which of [N] rows no other beats: is at most as large in every column and smaller in one.

    Of equal rows it is the first. N is some thousands at most: every pair is compared.
    """
    table = np.array(rows, dtype=np.float64)
    unbeaten = np.ones(len(table), dtype=np.bool_)
    for index, row in enumerate(table):
        not_larger = (table <= row).all(axis=1)
        smaller = (table < row).any(axis=1)
        equal_before = not_larger & ~smaller & (np.arange(len(table)) < index)
        unbeaten[index] = not ((not_larger & smaller) | equal_before).any()
    return unbeaten


def _ranked(points: Sequence[Point]) -> list[Point]:
    """What keeps most first, of equal ones the fastest, then the smallest."""
    return sorted(points, key=lambda p: (-_keeps(p), -p.tokens_per_second, p.gpu_bytes + p.near_bytes))
