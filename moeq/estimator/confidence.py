"""How far the headlines can be off: all assumptions varied together, and which of them matter most.

Latin hypercube samples over the ranges of every constant that the sensitivity changes one at a time (assumed, fitted or
ideal ones, the fixed time of a layer, the link), parameters of policies that were assumed, and the routing between
uniform and Zipf 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeq.estimator.devices import SECTIONS, Hardware, file_key
from moeq.estimator.points import BASELINES, SUBJECT
from moeq.estimator.result import Frozen
from moeq.estimator.sensitivity import ZIPF_EXPONENT, hardware_changes, policy_changes
from moeq.estimator.simulation import Simulation
from moeq.estimator.workload import placed_popularity

SAMPLES = 96
SHARE = 0.9  # of the samples that an interval holds
MOST = 3  # assumptions that are named
FACTOR, NEARBY = 1.5, 0.2  # of rates and sizes; of efficiencies
STEPS = "decode step"
_LATENCY = 5e-6  # the largest of a latency that is stated as 0


class IntervalRow(Frozen):
    """A headline: its value as assumed and where SHARE of the samples lie.

    most: the assumptions that move it most, each with its rank correlation.
    """

    figure: str
    value: float
    low: float
    high: float
    most: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """Something that is varied: what a draw in [0, 1] makes of a simulation."""

    key: str
    changed: Callable[[Simulation, float], Simulation]


def intervals(
    simulation: Simulation,
    batch: int,
    *,
    values: Mapping[str, float] | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
) -> tuple[IntervalRow, ...]:
    """The decode step of the context-aware placement and its speed-ups over the baselines at a batch.

    values: of an estimate that drew more routing than the simulation, figure by figure; the interval moves with them.
    """
    varied = list(assumptions_of(simulation, batch))
    if not varied:
        return ()
    drawn = _latin_hypercube(samples, len(varied), np.random.default_rng(seed))
    base = _headlines(simulation, batch)
    found: dict[str, list[float]] = {figure: [] for figure in base}
    for row in drawn:
        changed = simulation
        for assumption, draw in zip(varied, row, strict=True):
            changed = assumption.changed(changed, float(draw))
        for figure, value in _headlines(changed, batch).items():
            found[figure].append(value)
    told = {figure: (values or {}).get(figure, value) for figure, value in base.items()}
    return tuple(
        _row(figure, told[figure], np.array(found[figure]) * (told[figure] / value), drawn, varied)
        for figure, value in base.items()
    )


def _latin_hypercube(samples: int, dimensions: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """[samples, dimensions] in [0, 1): every column has one draw in each of that many equal strata.

    Written out because scipy's takes a third of a second to import, which is as long as the rest of an estimate.
    """
    strata = np.tile(np.arange(samples)[:, None], dimensions)
    return (rng.permuted(strata, axis=0) + rng.random((samples, dimensions))) / samples


def _headlines(simulation: Simulation, batch: int) -> dict[str, float]:
    steps = simulation.decode(batch, frozenset({SUBJECT, *BASELINES}))
    own = steps[SUBJECT].seconds
    over = {over_figure(key): steps[key].seconds / own for key in BASELINES if key in steps}
    return {STEPS: own, **over}


def over_figure(baseline: str) -> str:
    """What the speed-up over a baseline is called."""
    return f"decode over {baseline}"


def _row(
    figure: str, value: float, found: NDArray[np.float64], drawn: NDArray[np.float64], varied: Sequence[Assumption]
) -> IntervalRow:
    low, high = np.quantile(found, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    ranks = np.argsort(np.argsort(found)).astype(np.float64)
    strength = [_correlation(np.argsort(np.argsort(column)), ranks) for column in drawn.T]
    order = np.argsort(-np.abs(strength), kind="stable")[:MOST]
    most = tuple((varied[index].key, strength[index]) for index in order)
    return IntervalRow(figure=figure, value=value, low=float(low), high=float(high), most=most)


def _correlation(one: NDArray[np.int64], other: NDArray[np.float64]) -> float:
    return float(np.corrcoef(one, other)[0, 1]) if np.ptp(other) > 0 else 0.0


def assumptions_of(simulation: Simulation, batch: int) -> list[Assumption]:
    """Everything that is varied."""
    found = [_constant(key, hardware) for key, _, hardware in hardware_changes(simulation.layers.hardware)]
    found += [_parameter(key, hardware) for key, _, hardware in policy_changes(simulation, batch)]
    uniform = len(simulation.distinct_popularity) == 1 and np.ptp(simulation.distinct_popularity) == 0
    if simulation.replay is None and uniform:
        found.append(Assumption(key="routing", changed=_routing))
    return found


def _routing(simulation: Simulation, draw: float) -> Simulation:
    layers = simulation.layers
    return simulation.with_popularity(placed_popularity(layers.hot, layers.bits, draw * ZIPF_EXPONENT))


def _constant(key: str, other: Hardware) -> Assumption:
    """A constant of the hardware; other: what the sensitivity changes it to, which is all there is of words."""
    section, _, name = key.partition(".")
    field = next(field for field in SECTIONS[section].model_fields if file_key(field) == name)

    def changed(simulation: Simulation, draw: float) -> Simulation:
        hardware = simulation.layers.hardware
        old = getattr(getattr(hardware, section), field)
        if isinstance(old, str):
            new = old if draw < 0.5 else getattr(getattr(other, section), field)
        else:
            low, high = _range(field, float(old))
            value = low + draw * (high - low)
            new = max(1, round(value)) if isinstance(old, int) else value
        return simulation.on(hardware.changed(section, **{field: new}))

    return Assumption(key=key, changed=changed)


def _range(field: str, old: float) -> tuple[float, float]:
    if field.endswith("efficiency"):
        return max(0.05, old - NEARBY), min(1.0, old + NEARBY)
    if field.endswith("_seconds"):
        return 0.0, 2 * old or _LATENCY
    return old / FACTOR, old * FACTOR


def _parameter(key: str, other: Hardware) -> Assumption:
    _, policy, name = key.split(".")

    def changed(simulation: Simulation, draw: float) -> Simulation:
        if draw < 0.5:
            return simulation
        hardware = simulation.layers.hardware
        given = {**hardware.policies.get(policy, {}), name: other.policies[policy][name]}
        return simulation.on(hardware.model_copy(update={"policies": {**hardware.policies, policy: given}}))

    return Assumption(key=key, changed=changed)
