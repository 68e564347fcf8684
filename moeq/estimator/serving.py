"""What a server sees: requests that arrive at random and are batched continuously, by the estimated times of steps.

Requests arrive as a Poisson process and wait in order. Between two decode steps the server takes in as many as its
batch has room for, each prompt by itself and before all else runs on; then every running sequence gets a token. A
request takes its prompt and as many steps as tokens, as everywhere in the estimator. Times of steps are the estimator's
at some batches and linear between them; the cost of attention is that of the context everywhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moeq.errors import EstimateError
from moeq.estimator.policies import by_label
from moeq.estimator.result import Frozen
from moeq.estimator.simulation import Simulation

REQUESTS, WARM_UP = 2000, 0.1  # that arrive; share of them that is not counted
MOST_BATCH = 256
QUANTILES = (0.5, 0.9, 0.99)


class ServedRow(Frozen):
    """A policy under a rate of requests a second.

    `first_seconds`, `token_seconds`: quantiles QUANTILES of the time to the first token, waiting included, and of the
    mean time of a later one of each request; `busy_share` of the time something ran; `mean_batch` of decode steps;
    `keeps_up`: whether requests leave as fast as they arrive, so that these figures do not grow with the time it runs.
    """

    policy: str
    rate: float
    input_tokens: int
    output_tokens: int
    largest_batch: int
    first_seconds: tuple[float, ...]
    token_seconds: tuple[float, ...]
    tokens_per_second: float
    mean_batch: float
    busy_share: float
    most_rate: float
    keeps_up: bool


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Seconds of a prompt, and of a decode step [n] at batches [n]."""

    prompt: float
    batches: NDArray[np.int64]
    seconds: NDArray[np.float64]

    def step(self, batch: int) -> float:
        """Seconds of a step of so many sequences."""
        return float(np.interp(batch, self.batches, self.seconds))

    @property
    def largest(self) -> int:
        """The largest batch that fits."""
        return int(self.batches[-1])

    def most_rate(self, output_tokens: int) -> float:
        """Requests a second that a server that is never idle serves with its largest batch."""
        each = self.prompt + output_tokens * self.seconds[-1] / self.largest
        return float(1 / each)


def steps_of(simulation: Simulation, policy: str, input_tokens: int, output_tokens: int) -> Steps:
    """Times of a policy at batches that double, and at the largest that fits with such requests, at most MOST_BATCH.

    Raises EstimateError where not even one request fits.
    """
    simulation = replace(simulation, kv_tokens=max(simulation.kv_tokens, input_tokens + output_tokens))

    def refusal(batch: int) -> str | None:
        return simulation.lack(by_label()[policy][0], simulation.kv_cache_bytes(batch))

    if (reason := refusal(1)) is not None:
        raise EstimateError(reason, where=f"--rate, {policy}", do="give other hardware, bits or lengths")
    fits, not_any_more = 1, MOST_BATCH + 1
    while not_any_more - fits > 1:
        middle = (fits + not_any_more) // 2
        fits, not_any_more = (middle, not_any_more) if refusal(middle) is None else (fits, middle)
    batches = sorted({*(1 << power for power in range(fits.bit_length())), fits})
    seconds = [simulation.decode(batch, frozenset({policy}))[policy].seconds for batch in batches]
    prompt = simulation.prefill(1, input_tokens, frozenset({policy}))[policy].seconds
    prompt += simulation.migration()[policy].seconds
    return Steps(prompt=prompt, batches=np.array(batches), seconds=np.array(seconds))


def serve(
    steps: Steps,
    *,
    policy: str,
    rate: float,
    input_tokens: int,
    output_tokens: int,
    requests: int = REQUESTS,
    seed: int = 0,
) -> ServedRow:
    """Requests of one length at a rate, one after the other until all are done."""
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, requests))
    first, last = np.zeros(requests), np.zeros(requests)
    waiting: deque[int] = deque()
    running: dict[int, int] = {}  # {request: tokens that are left}
    now = busy = in_batch = 0.0
    count = arrived = 0
    while arrived < requests or waiting or running:
        if not waiting and not running:
            now = max(now, float(arrivals[arrived]))
        while arrived < requests and arrivals[arrived] <= now:
            waiting.append(arrived)
            arrived += 1
        start = now
        while waiting and len(running) < steps.largest:
            request = waiting.popleft()
            now += steps.prompt
            running[request] = output_tokens
        step, alike = steps.step(len(running)), min(running.values())
        if not waiting and arrived < requests:  # until the next arrives; else until one of them ends
            alike = min(alike, max(1, math.ceil((arrivals[arrived] - now) / step)))
        first[[request for request, left in running.items() if left == output_tokens]] = now + step
        now += alike * step
        count, in_batch = count + alike, in_batch + alike * len(running)
        running = {request: left - alike for request, left in running.items()}
        for request in [request for request, left in running.items() if left == 0]:
            last[request] = now
            del running[request]
        busy += now - start
    counted = slice(int(WARM_UP * requests), None)
    most = steps.most_rate(output_tokens)
    return ServedRow(
        policy=policy,
        rate=rate,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        largest_batch=steps.largest,
        first_seconds=_quantiles((first - arrivals)[counted]),
        token_seconds=_quantiles(((last - first) / max(1, output_tokens - 1))[counted]),
        tokens_per_second=requests * output_tokens / now,
        mean_batch=in_batch / max(1, count),
        busy_share=busy / now,
        most_rate=most,
        keeps_up=rate < most,
    )


def _quantiles(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(value) for value in np.quantile(values, QUANTILES))


def served(
    simulation: Simulation, policies: Sequence[str], rate: float, input_tokens: int, output_tokens: int, seed: int
) -> list[ServedRow]:
    """Every policy that can run such requests, under the same arrivals; EstimateError where none can."""
    rows, refused = [], []
    for policy in policies:
        try:
            steps = steps_of(simulation, policy, input_tokens, output_tokens)
        except EstimateError as error:
            refused.append(error)
            continue
        lengths = {"input_tokens": input_tokens, "output_tokens": output_tokens}
        rows.append(serve(steps, policy=policy, rate=rate, seed=seed, **lengths))
    if refused and not rows:
        raise refused[0]
    return rows
