"""The sheet of paper 002: an additive model of its weight-only MoE GEMM fitted to Table 1, and Table 4 recomputed.

Model: t = s + n * (b/16 + c + q_b), in units of reading one FP16 expert; n active experts, b bits, s what a call costs,
c what an expert costs beside its weights, q_b what dequantizing its weights costs (q_16 = 0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from moeq.errors import EstimateError
from moeq.estimator.sheets import Row, Table, differs, filled, printed

NAME = "paper_002"
WITHIN = 0.15  # of the printed speed-up: what the fit is asked to reach
SLACK = 1e-4  # by which the largest miss may grow for the sake of the others
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A quantized GEMM of Table 1: speed-up over FP16 by number of active experts, and their printed mean."""

    name: str
    bits: int
    speedup: Sequence[float]
    geomean: float


@dataclass(frozen=True, kw_only=True)
class GemmModel:
    """The fitted model: s `call`, c `expert`, q_b `dequantize` by kernel, all in reads of one FP16 expert.

    worst_miss: the largest relative miss of a speed-up that was fitted.
    """

    call: float
    expert: float
    dequantize: Mapping[str, float]
    worst_miss: float

    def speedup(self, kernel: Kernel, active: int) -> float:
        """Time of FP16 over that of a kernel at a number of active experts."""
        fp16 = self.call + active * (1 + self.expert)
        return fp16 / (self.call + active * (kernel.bits / 16 + self.expert + self.dequantize[kernel.name]))


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A row of Table 4."""

    hardware: str
    parameters_billions: float
    batch: int
    usd_per_month: float
    latency_ms: float
    words_per_second: float
    usd_per_month_and_word_per_second: float

    @property
    def cost(self) -> float:
        """Price over throughput: USD a month for one word per second."""
        return self.usd_per_month / self.words_per_second

    @property
    def words_per_sentence(self) -> float:
        """Words of one sentence of a batch: throughput times latency over batch size."""
        return self.words_per_second * self.latency_ms / 1000 / self.batch


def kernels() -> list[Kernel]:
    """The quantized GEMMs of Table 1."""
    return [Kernel(**row) for row in printed(NAME)["table_1"]["kernels"]]


def deployments() -> list[Deployment]:
    """The rows of Table 4."""
    return [Deployment(**row) for row in printed(NAME)["table_4"]]


@cache
def fitted() -> GemmModel:
    """The model with the smallest largest relative miss on the numbers of experts that it is fitted on.

    Of the models that miss by no more than that, the one with the least squares. EstimateError when no fit is found.
    """
    known, table = kernels(), printed(NAME)["table_1"]
    chosen = [table["active_experts"].index(active) for active in table["fitted_on"]]
    active = np.array(table["fitted_on"], dtype=np.float64)
    wanted = np.array([[kernel.speedup[index] for index in chosen] for kernel in known])
    bits = np.array([kernel.bits for kernel in known], dtype=np.float64)[:, None]

    def misses(costs: FloatArray) -> FloatArray:
        fp16 = costs[0] + active * (1 + costs[1])
        speedups = fp16 / (costs[0] + active * (bits / 16 + costs[1] + costs[2:, None]))
        return np.ravel(speedups / wanted - 1)

    best = _least_worst(misses, 2 + len(known))
    call, expert, *dequantize = best.tolist()
    return GemmModel(
        call=call,
        expert=expert,
        dequantize={kernel.name: cost for kernel, cost in zip(known, dequantize, strict=True)},
        worst_miss=float(np.abs(misses(best)).max()),
    )


def _least_worst(misses: Callable[[FloatArray], FloatArray], count: int) -> FloatArray:
    """Of `count` costs, none negative, those with the smallest largest miss; among these, the least squares."""
    from scipy.optimize import least_squares, minimize

    start = least_squares(misses, np.full(count, 0.2), bounds=(0, np.inf)).x
    inside = [
        {"type": "ineq", "fun": lambda x: x[count] - misses(x[:count])},
        {"type": "ineq", "fun": lambda x: x[count] + misses(x[:count])},
    ]
    goals: list[tuple[Callable[[FloatArray], float], float]] = [
        (lambda x: float(x[count]), 0.0),
        (lambda x: float((misses(x[:count]) ** 2).sum()), SLACK),
    ]
    costs, limit = np.append(start, np.abs(misses(start)).max()), np.inf
    for goal, slack in goals:
        bounds = [(0.0, np.inf)] * count + [(0.0, limit + slack)]
        result = minimize(goal, costs, method="SLSQP", constraints=inside, bounds=bounds, options={"maxiter": 1000})
        if not result.success:
            raise EstimateError(f"no fit of paper 002: {result.message}", where=NAME, do="report it with your scipy")
        costs, limit = result.x, float(result.x[count])
    return np.asarray(costs[:count], dtype=np.float64)


def tables() -> list[Table]:
    """The whole sheet."""
    model = fitted()
    rows = {"parameters": _parameters(), "gemm": _gemm(), "means": _means(), "costs": _costs(), "claims": _claims()}
    points = ", ".join(map(str, printed(NAME)["table_1"]["fitted_on"]))
    return filled(NAME, rows, fitted_on=points, worst_miss=model.worst_miss, within=WITHIN)


def _parameters() -> Iterator[Row]:
    model = fitted()
    yield "a call", model.call
    yield "an expert beside its weights", model.expert
    for name, cost in model.dequantize.items():
        yield f"dequantizing an expert, {name}", cost


def _gemm() -> Iterator[Row]:
    model, table = fitted(), printed(NAME)["table_1"]
    for kernel in kernels():
        for active, wanted in zip(table["active_experts"], kernel.speedup, strict=True):
            speedup = model.speedup(kernel, active)
            miss = speedup / wanted - 1
            part = "fitted" if active in table["fitted_on"] else "held out"
            yield kernel.name, active, wanted, speedup, miss, part, "" if abs(miss) <= WITHIN else "missed"


def _means() -> Iterator[Row]:
    for kernel in kernels():
        mean = float(np.exp(np.log(kernel.speedup).mean()))
        yield kernel.name, kernel.geomean, mean, "differs" if differs(kernel.geomean, mean) else ""


def _costs() -> Iterator[Row]:
    for row in deployments():
        cost = row.usd_per_month_and_word_per_second
        flag = f"differs by a factor {row.cost / cost:.1f}" if differs(cost, row.cost) else ""
        size, price, words = row.parameters_billions, row.usd_per_month, row.words_per_second
        yield row.hardware, size, row.batch, price, words, row.words_per_sentence, cost, row.cost, flag


def _claims() -> Iterator[Row]:
    small, large, *_, gpu = deployments()
    size, saving = printed(NAME)["claims"]
    larger = large.parameters_billions / small.parameters_billions
    as_printed = 1 - gpu.usd_per_month_and_word_per_second / small.usd_per_month_and_word_per_second
    yield size["text"], size["printed"], larger, larger
    yield saving["text"], saving["printed"], as_printed, 1 - gpu.cost / small.cost
