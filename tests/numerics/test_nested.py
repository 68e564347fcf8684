"""Replicas that share their codes, against a column-by-column oracle in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moeq.numerics import nested
from moeq.numerics.factor import factorize
from moeq_kernels.grids import decode

BITS = (2, 3, 4)


def problem(inputs: int, rows: int, experts: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(inputs + rows)
    hidden = torch.randn(experts, 500, inputs, generator=generator) * torch.linspace(0.2, 2, inputs)
    hidden = hidden + 0.7 * hidden.roll(1, -1)
    return 0.05 * torch.randn(experts, rows, inputs, generator=generator), hidden.mT @ hidden / 500


def value(code: Tensor, bits: int, scale: Tensor, zero: Tensor) -> Tensor:
    """What a 4-bit code stands for when only its first bits are read: the middle of what they leave open."""
    inside = 2 ** (4 - bits)
    return ((code // inside) * inside + (inside - 1) / 2 - zero) * scale


def range_of(blocks: dict[int, Tensor], symmetric: bool, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scale and zero [N] of the 4-bit grid for one group's moved weights, {bits: [N, g]}."""
    low, high = blocks[4].amin(1).clamp(max=0), blocks[4].amax(1).clamp(min=0)
    tried = []
    for step in range(21 if counts is not None else 1):
        part = 1 - step / 32
        if symmetric:
            scale = (2 * torch.maximum(high, -low) * part / 15).half().double()
            zero = torch.full_like(scale, 8)
        else:
            scale = ((high - low) * part / 15).half().double()
            zero = (-low * part / scale).round()
        error = torch.zeros_like(scale)
        for bits, weight in zip(BITS, nested.COUNTS, strict=True):
            block, inside = blocks[bits], 2 ** (4 - bits)
            levels = value(torch.arange(16)[::inside, None], bits, scale, zero)  # [levels, N]
            nearest = (levels[:, :, None] - block).abs().amin(0)
            error += weight / inside**3 * (nearest**3 * (counts if counts is not None else 1)).sum(1)
        tried.append((error, scale, zero))
    best = torch.stack([error for error, *_ in tried]).argmin(0)
    scales, zeros = (torch.stack([one[place] for one in tried]) for place in (1, 2))
    return scales.gather(0, best[None])[0], zeros.gather(0, best[None])[0]


def oracle(
    weight: Tensor, hessian: Tensor, group: int, symmetric: bool, clip: bool
) -> tuple[Tensor, dict[int, Tensor]]:
    """Classic GPTQ at three widths side by side, the code of each column chosen for all of them: codes, values."""
    size = weight.shape[1]
    damped = hessian.double() + torch.eye(size).double() * 0.01 * hessian.double().diagonal().mean()
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    work = {bits: weight.double().clone() for bits in BITS}
    values = {bits: torch.zeros_like(work[bits]) for bits in BITS}
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    for column in range(size):
        if column % group == 0:
            blocks = {bits: work[bits][:, column : column + group] for bits in BITS}
            counts = upper.diagonal()[column : column + group] ** -2 if clip else None
            scale, zero = range_of(blocks, symmetric, counts)
        candidates = torch.arange(16)[:, None]
        cost = torch.zeros(16, len(weight)).double()
        for bits, count in zip(BITS, nested.COUNTS, strict=True):
            distance = (value(candidates, bits, scale, zero) - work[bits][:, column]) / (scale * 2 ** (4 - bits))
            cost += count * distance**2
        code = cost.argmin(0)
        codes[:, column] = code.to(torch.uint8)
        for bits in BITS:
            values[bits][:, column] = value(code, bits, scale, zero)
            error = (work[bits][:, column] - values[bits][:, column]) / upper[column, column]
            work[bits][:, column + 1 :] -= error[:, None] * upper[column, column + 1 :]
    return codes, values


@pytest.mark.cases(0)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("inputs", "rows", "group"), [(96, 24, 32), (300, 7, -1), (70, 5, 64), (150, 140, 150)])
def test_float64_codes_equal_the_oracle(inputs: int, rows: int, group: int, symmetric: bool, clip: bool) -> None:
    weight, hessian = problem(inputs, rows)
    factor = factorize(hessian.double())
    found = nested.quantize(
        weight,
        factor.unit_upper,
        group_size=group,
        symmetric=symmetric,
        importance=factor.pivots if clip else None,
    )
    for expert in range(len(weight)):
        codes, values = oracle(weight[expert], hessian[expert], inputs if group == -1 else group, symmetric, clip)
        for index, bits in enumerate(BITS):
            assert torch.equal(found.codes[expert, index], codes >> (4 - bits)), bits
            mine = decode(found.codes[expert, index], found.scale[expert, index], found.zero[expert, index], group)
            torch.testing.assert_close(mine.double(), values[bits], rtol=1e-6, atol=1e-9)


@pytest.mark.cases(3)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("group", [32, -1])
def test_the_compiled_loop_equals_the_one_in_torch(group: int, clip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = problem(200, 37, experts=5)
    factor = factorize(hessian.double())
    options: dict[str, Any] = {"group_size": group, "importance": factor.pivots if clip else None}
    whole = nested.quantize(weight, factor.unit_upper, **options)
    monkeypatch.setattr(nested, "LANES_AT_ONCE", 60)
    monkeypatch.setattr(nested, "LANES_A_THREAD", 1)
    in_pieces = nested.quantize(weight, factor.unit_upper, **options)
    monkeypatch.setattr(nested, "_on_cpu", lambda tensor: False)
    in_torch = nested.quantize(weight, factor.unit_upper, **options)
    for other in (in_pieces, in_torch):
        assert torch.equal(whole.codes, other.codes)
        torch.testing.assert_close(whole.scale, other.scale)
        assert torch.equal(whole.zero, other.zero)


@pytest.mark.full
@pytest.mark.parametrize("symmetric", [False, True])
def test_without_feedback_every_code_is_the_best_for_all_widths(symmetric: bool) -> None:
    weight, _ = problem(40, 9)
    weight[1, 3] = 0
    found = nested.quantize(weight, None, group_size=16, symmetric=symmetric, importance=torch.ones(3, 40))
    assert torch.isfinite(found.scale).all()
    for index, bits in enumerate(BITS):
        assert torch.equal(found.codes[:, index], found.codes[:, 2] >> (4 - bits))
        assert torch.equal(found.scale[:, index], found.scale[:, 2] * 2 ** (4 - bits))
    identity = torch.eye(40).expand(3, 40, 40)
    same = nested.quantize(weight, identity, group_size=16, symmetric=symmetric, importance=torch.ones(3, 40))
    assert (same.codes == found.codes).float().mean() > 0.999
    errors = [
        (decode(found.codes[:, i], found.scale[:, i], found.zero[:, i], 16) - weight).square().mean() for i in range(3)
    ]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
