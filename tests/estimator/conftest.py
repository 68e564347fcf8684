"""Shared pieces of the estimator's tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from moeq.estimator import Estimate, Grid, Hardware, estimate, load_geometry, load_hardware, uniform_placement

HOT_EXPERTS = {"mixtral-8x7b": 4, "mixtral-8x22b": 2}  # paper 000, 5.1
Run = Callable[..., Estimate]


@pytest.fixture(scope="session")
def preset() -> Hardware:
    return load_hardware("paper-ctxmoe")


@cache
def _run(model: str, bits: int, hardware: Hardware | str, grid: Grid, group_size: int | None) -> Estimate:
    geometry = load_geometry(model)
    device = load_hardware(hardware) if isinstance(hardware, str) else hardware
    placement = uniform_placement(geometry, bits=bits, hot_experts=HOT_EXPERTS[model])
    return estimate(geometry, device, placement, grid=grid, group_size=group_size)


@pytest.fixture(scope="session")
def run() -> Run:
    """`run(model, bits, hardware="paper-ctxmoe", grid=Grid(), group_size=128)` with the paper's hot experts."""

    def call(
        model: str,
        bits: int,
        *,
        hardware: Hardware | str = "paper-ctxmoe",
        grid: Grid | None = None,
        group_size: int | None = 128,
    ) -> Estimate:
        if isinstance(hardware, str):
            return _run(model, bits, hardware, grid or Grid(), group_size)
        return _run.__wrapped__(model, bits, hardware, grid or Grid(), group_size)

    return call
