"""The sheet of paper 002: an additive model of its weight-only MoE GEMM fitted to Table 1, and Table 4 recomputed.

Model: t = s + n * (b/16 + c + q_b), in units of reading one FP16 expert; n active experts, b bits, s what a call costs,
c what an expert costs beside its weights, q_b what dequantizing its weights costs (q_16 = 0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from moeq.errors import EstimateError
from moeq.estimator.sheets import Cell, Table, printed

NAME = "paper_002"
WITHIN = 0.15  # of the printed speed-up: what the fit is asked to reach
TOLERANCE = 0.05  # a printed cost further from its recomputed one than this share of it is flagged
SLACK = 1e-4  # by which the largest miss may grow for the sake of the others
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A quantized GEMM of Table 1: speed-up over FP16 by number of active experts, and their printed mean."""

    name: str
    bits: int
    speedup: tuple[float, ...]
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


def kernels() -> tuple[Kernel, ...]:
    """The quantized GEMMs of Table 1."""
    return tuple(
        Kernel(name=one["name"], bits=one["bits"], speedup=tuple(one["speedup"]), geomean=one["geomean"])
        for one in printed(NAME)["table_1"]["kernels"]
    )


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
        found: FloatArray = fp16 / (costs[0] + active * (bits / 16 + costs[1] + costs[2:, None])) / wanted - 1
        return found.ravel()

    best = _least_worst(misses, 2 + len(known))
    return GemmModel(
        call=float(best[0]),
        expert=float(best[1]),
        dequantize={kernel.name: float(cost) for kernel, cost in zip(known, best[2:], strict=True)},
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
    found, limit = np.append(start, np.abs(misses(start)).max()), np.inf
    for goal, slack in goals:
        bounds = [(0.0, np.inf)] * count + [(0.0, limit + slack)]
        result = minimize(goal, found, method="SLSQP", constraints=inside, bounds=bounds, options={"maxiter": 1000})
        if not result.success:
            raise EstimateError(f"no fit of paper 002: {result.message}", where=NAME, do="report it with your scipy")
        found, limit = result.x, float(result.x[count])
    return np.asarray(found[:count], dtype=np.float64)


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

    @property
    def disagrees(self) -> bool:
        """Whether the printed cost is not price over throughput."""
        return abs(self.usd_per_month_and_word_per_second / self.cost - 1) > TOLERANCE


def deployments() -> tuple[Deployment, ...]:
    """The rows of Table 4."""
    return tuple(Deployment(**row) for row in printed(NAME)["table_4"])


def tables() -> list[Table]:
    """The whole sheet."""
    return [_parameters(), _gemm(), _means(), _costs(), _claims()]


def _parameters() -> Table:
    model = fitted()
    costs = tuple((f"dequantizing an expert, {name}", cost) for name, cost in model.dequantize.items())
    return Table(
        title="Additive model of the quantized MoE GEMM",
        columns=("cost", "reads of one FP16 expert"),
        rows=(("a call", model.call), ("an expert beside its weights", model.expert), *costs),
        notes=(
            f"Fitted to Table 1 at {', '.join(map(str, printed(NAME)['table_1']['fitted_on']))} active experts; the "
            f"largest miss is {model.worst_miss:.1%}, and {WITHIN:.0%} is asked for.",
            "12 printed ratios for 5 costs: an account of Table 1, not a kernel's measured parts.",
        ),
    )


def _gemm() -> Table:
    model, table = fitted(), printed(NAME)["table_1"]
    rows: list[tuple[Cell, ...]] = []
    for kernel in kernels():
        for active, wanted in zip(table["active_experts"], kernel.speedup, strict=True):
            found = model.speedup(kernel, active)
            miss = found / wanted - 1
            part = "fitted" if active in table["fitted_on"] else "held out"
            rows.append(
                (kernel.name, active, wanted, found, miss, part, "" if abs(miss) <= WITHIN else "missed")
            )  # fmt: skip
    return Table(
        title="Speed-up over FP16, printed and fitted",
        columns=("kernel", "active experts", "printed", "model", "miss", "point", "flag"),
        rows=tuple(rows),
    )


def _means() -> Table:
    rows = []
    for kernel in kernels():
        mean = float(np.exp(np.log(kernel.speedup).mean()))
        flag = "differs" if abs(kernel.geomean / mean - 1) > TOLERANCE else ""
        rows.append((kernel.name, kernel.geomean, mean, flag))
    return Table(
        title="Geometric means of Table 1, recomputed",
        columns=("kernel", "printed", "recomputed", "flag"),
        rows=tuple(rows),
    )


def _costs() -> Table:
    return Table(
        title="Cost (Table 4), recomputed",
        columns=(
            "hardware", "parameters (1e9)", "batch", "USD a month", "words/s", "words a sentence",
            "printed USD a month per word/s", "recomputed", "flag",
        ),
        rows=tuple(
            (row.hardware, row.parameters_billions, row.batch, row.usd_per_month, row.words_per_second,
             row.words_per_sentence, row.usd_per_month_and_word_per_second, row.cost,
             f"differs by a factor {row.cost / row.usd_per_month_and_word_per_second:.1f}" if row.disagrees else "")
            for row in deployments()
        ),
        notes=(
            "The small CPU model's printed cost is right if 8 instances share its machine, each as fast as alone; the "
            "paper does not say so, and divides the large CPU model's price by one.",
            "Words a sentence: words per second times latency over batch.",
        ),
    )  # fmt: skip


def _claims() -> Table:
    small, large, *_, gpu = deployments()
    size, saving = printed(NAME)["claims"]
    larger = large.parameters_billions / small.parameters_billions
    as_printed = 1 - gpu.usd_per_month_and_word_per_second / small.usd_per_month_and_word_per_second
    return Table(
        title="Claims of the text, recomputed",
        columns=("claim", "in the text", "from printed figures", "from recomputed ones"),
        rows=(
            (size["text"], size["printed"], larger, larger),
            (saving["text"], saving["printed"], as_printed, 1 - gpu.cost / small.cost),
        ),
    )


TABLES = tables
