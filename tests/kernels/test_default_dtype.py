"""Runtimes load and compute under a default dtype of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moeq.numerics.gptq import quantize
from moeq.numerics.storing import packed_of
from moeq_kernels.choice import prepared_layer, prepared_linear
from moeq_kernels.description import DOWN, LayerOfExperts

DEVICE = torch.device("cpu")


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def test_products_do_not_depend_on_it(default: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(2, 32, 32, generator=random, dtype=torch.float32)
    made = packed_of(quantize(values, None, bits=[4], group_size=16), 4, False)
    first, second = (made.map(lambda part, at=at: part[at]) for at in range(2))
    rows = torch.randn(3, 32, generator=random, dtype=torch.float32)
    linear, _ = prepared_linear(first, None, DEVICE, "fixed")
    assert linear is not None
    assert torch.allclose(linear(rows), rows @ first.dequantize().mT, atol=1e-4)
    given = LayerOfExperts(
        matrices=[{"up_proj": first, DOWN: second}], biases=[{}], gate=lambda parts: parts["up_proj"].relu(),
        activation="relu",
    )  # fmt: skip
    for activation in ("relu", None):  # which the kernel knows, and which is Python's
        layer, _ = prepared_layer(replace(given, activation=activation), DEVICE, "fixed")
        assert layer is not None
        found = layer(rows, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.float32))
        assert found.dtype == torch.float32
        assert torch.allclose(found, (rows @ first.dequantize().mT).relu() @ second.dequantize().mT, atol=1e-3)
