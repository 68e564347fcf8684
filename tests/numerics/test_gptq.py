"""GPTQ against a plain float64 column-by-column oracle (Frantar et al. 2022, Algorithm 1), at every width."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moeq.numerics import gptq, gptq_cpu, gptq_device, group_grids
from moeq.numerics.factor import act_order, factorize
from moeq.numerics.storing import packed_of
from moeq_kernels import grids

BITS = (1, 2, 3, 4, 8)


def grid_of(low: Tensor, high: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero [N] of ranges [N]."""
    top = 2**bits - 1
    if symmetric:
        scale = (2 * torch.maximum(high, -low) / top).half().double()
        return scale, torch.full_like(scale, 2.0 ** (bits - 1))
    scale = ((high - low) / top).half().double()
    return scale, (-low / scale).round()


def clipped(block: Tensor, counts: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero [N] of the range of the least weighted cubed error, each row of [N, g] on its own."""
    kept = 1 - torch.arange(21)[:, None] / 32  # of the range: a row's candidates, the widest first
    low, high = block.amin(1).clamp(max=0), block.amax(1).clamp(min=0)
    scale, zero = grid_of(low * kept.double(), high * kept.double(), bits, symmetric)  # [21, N]
    step, offset = scale[..., None], zero[..., None]
    values = ((block / step + offset).round().clamp(0, 2**bits - 1) - offset) * step
    best = (counts * (values - block).abs() ** 3).sum(2).argmin(0, keepdim=True)  # of equal ones the first
    return scale.gather(0, best)[0], zero.gather(0, best)[0]


def oracle(
    weight: Tensor, hessian: Tensor, bits: int, group: int, symmetric: bool, clip: bool = False
) -> tuple[Tensor, Tensor]:
    """Classic GPTQ: Cholesky factor of the inverse Hessian, one column at a time. Codes and values [N, K]."""
    work, size = weight.double().clone(), weight.shape[1]
    damped = hessian.double() + torch.eye(size).double() * 0.01 * hessian.double().diagonal().mean()
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    values = torch.zeros(weight.shape, dtype=torch.float64)
    top = 2**bits - 1
    for column in range(size):
        if column % group == 0:
            block = work[:, column : column + group]
            low, high = block.amin(1).clamp(max=0), block.amax(1).clamp(min=0)
            if bits == 1:
                scale, zero = (2 * block.abs().mean(1)).half().double(), torch.tensor(0.5).double()
            elif clip:
                counts = upper.diagonal()[column : column + group] ** -2
                scale, zero = clipped(block, counts, bits, symmetric)
            else:
                scale, zero = grid_of(low, high, bits, symmetric)
        code = (work[:, column] / scale + zero).round().clamp(0, top)
        codes[:, column] = code.to(torch.uint8)
        values[:, column] = (code - zero) * scale
        error = (work[:, column] - values[:, column]) / upper[column, column]
        work[:, column + 1 :] -= error[:, None] * upper[column, column + 1 :]
    return codes, values


def problem(inputs: int, rows: int, experts: int = 3, tokens: int = 500) -> tuple[Tensor, Tensor]:
    torch.manual_seed(inputs + rows)
    hidden = torch.randn(experts, tokens, inputs) * torch.linspace(0.2, 2, inputs)
    hidden = hidden + 0.7 * hidden.roll(1, -1)
    return 0.05 * torch.randn(experts, rows, inputs), hidden.mT @ hidden / tokens


@pytest.mark.cases(1)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("inputs", "rows", "group"), [(96, 24, 32), (200, 10, 64), (300, 7, -1), (70, 5, 64)])
def test_float64_codes_equal_the_oracle(inputs: int, rows: int, group: int, symmetric: bool, clip: bool) -> None:
    weight, hessian = problem(inputs, rows)
    factor = factorize(hessian.double())
    importance = factor.pivots if clip else None
    found = gptq.quantize(
        weight, factor.unit_upper, bits=BITS, group_size=group, symmetric=symmetric, importance=importance
    )
    for index, bits in enumerate(BITS):
        for expert in range(len(weight)):
            size = inputs if group == -1 else group
            codes, values = oracle(weight[expert], hessian[expert], bits, size, symmetric, clip)
            assert torch.equal(found.codes[expert, index], codes), bits
            packed = packed_of(found, bits, symmetric)
            torch.testing.assert_close(packed.dequantize()[expert].double(), values, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("bits", BITS)
def test_float32_loses_no_more_than_the_oracle(bits: int) -> None:
    weight, hessian = problem(256, 48)
    factor = factorize(hessian)
    assert not factor.failed.any()
    assert not factor.float64.any()
    found = gptq.quantize(weight, factor.unit_upper, bits=[bits], group_size=64)
    values = packed_of(found, bits, symmetric=False).dequantize().double()

    def loss(expert: int, candidate: Tensor) -> float:
        error = candidate - weight[expert].double()
        return float((error @ hessian[expert].double() * error).sum())

    for expert in range(len(weight)):
        _, best = oracle(weight[expert], hessian[expert], bits, 64, symmetric=False)
        assert loss(expert, values[expert]) <= 1.01 * loss(expert, best)


def test_widths_and_rows_do_not_influence_each_other() -> None:
    """All widths and gate+up share a factor; each must come out as if it were alone."""
    weight, hessian = problem(130, 12)
    factor = factorize(hessian.double()).unit_upper
    together = gptq.quantize(weight, factor, bits=BITS, group_size=32)
    for index, bits in enumerate(BITS):
        alone = gptq.quantize(weight[:, 4:9], factor, bits=[bits], group_size=32)
        assert torch.equal(together.codes[:, index, 4:9], alone.codes[:, 0])


def test_singular_hessians_fall_back_and_are_counted() -> None:
    inputs = 48
    weight = torch.randn(3, 6, inputs)
    one_token = torch.randn(1, inputs)
    hessian = torch.stack([torch.eye(inputs), torch.zeros(inputs, inputs), one_token.T @ one_token])
    factor = factorize(hessian, damping=1e-12)
    assert not factor.failed.any()
    assert factor.damping[0] == 1e-12
    assert factor.float64[2], "rank one needs float64 or more damping"
    found = gptq.quantize(weight, factor.unit_upper, bits=[2], group_size=16)
    rounded = gptq.quantize(weight, None, bits=[2], group_size=16)
    assert torch.equal(found.codes[1], rounded.codes[1]), "no token: plain rounding"


def test_indefinite_hessian_ends_in_plain_rounding() -> None:
    hessian = -torch.eye(20).unsqueeze(0) + 2 * torch.ones(1, 20, 20)
    factor = factorize(hessian)
    assert factor.failed.all()
    assert torch.equal(factor.unit_upper[0], torch.eye(20))


def test_zero_weights_and_tiny_groups_stay_finite() -> None:
    weight = torch.zeros(1, 4, 24)
    weight[0, 1, 3] = 1e-9
    weight[0, 2] = 70000.0  # its scale at 1 bit does not fit float16
    for bits in BITS:
        found = gptq.quantize(weight, None, bits=[bits], group_size=8)
        values = packed_of(found, bits, symmetric=False).dequantize()
        assert torch.isfinite(values).all()
        assert torch.equal(values[0, 0], torch.zeros(24))


def test_decode_with_a_short_last_group() -> None:
    codes = torch.arange(10).reshape(1, 10) % 4
    values = grids.decode(codes, torch.tensor([[1.0, 10.0]]), torch.tensor([[1, 2]]), 8)
    assert values.tolist() == [[-1, 0, 1, 2, -1, 0, 1, 2, -20, -10]]


def ordered_oracle(weight: Tensor, hessian: Tensor, bits: int, group: int) -> Tensor:
    """Classic GPTQ with desc_act and static groups, [N, K]: columns by falling energy, grids of untouched weights."""
    top, size = 2**bits - 1, weight.shape[1]
    order = hessian.diagonal().argsort(descending=True, stable=True)
    damped = hessian.double() + torch.eye(size).double() * 0.01 * hessian.double().diagonal().mean()
    upper = torch.linalg.cholesky(torch.linalg.inv(damped[order][:, order]), upper=True)
    work, codes = weight.double()[:, order].clone(), torch.zeros(weight.shape, dtype=torch.uint8)
    for place, column in enumerate(order.tolist()):
        block = weight.double()[:, column // group * group : column // group * group + group]
        low, high = block.amin(1).clamp(max=0), block.amax(1).clamp(min=0)
        scale = ((high - low) / top if bits > 1 else 2 * block.abs().mean(1)).half().double()
        zero = (-low / scale).round() if bits > 1 else torch.tensor(0.5).double()
        code = (work[:, place] / scale + zero).round().clamp(0, top)
        codes[:, column] = code.to(torch.uint8)
        error = (work[:, place] - (code - zero) * scale) / upper[place, place]
        work[:, place + 1 :] -= error[:, None] * upper[place, place + 1 :]
    return codes


@pytest.mark.cases(1)
@pytest.mark.parametrize("experts", [1, 16])
@pytest.mark.parametrize(("inputs", "rows", "group"), [(96, 24, 32), (300, 7, 64), (150, 5, -1)])
def test_act_order_equals_the_oracle(inputs: int, rows: int, group: int, experts: int) -> None:
    weight, hessian = problem(inputs, rows, experts)
    order, sorted_hessian = act_order(hessian)
    factor = factorize(sorted_hessian.double()).unit_upper
    found = gptq.quantize(weight, factor, bits=BITS, group_size=group, order=order)
    for index, bits in enumerate(BITS):
        for expert in range(experts):
            codes = ordered_oracle(weight[expert], hessian[expert], bits, inputs if group == -1 else group)
            assert torch.equal(found.codes[expert, index], codes), bits


def clipped_in_torch(weight: Tensor, ends: list[Tensor], bits: Any, symmetric: Any, importance: Tensor) -> Any:
    scale, zero = grids.fit_clipped_grid(weight.unsqueeze(2).expand(-1, -1, len(bits), -1), importance, bits, symmetric)
    return scale, grids.inverse_scale(scale), zero


@pytest.mark.cases(1)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("group", [32, 128, -1])
def test_the_compiled_loop_equals_the_one_in_torch(
    group: int, ordered: bool, clip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on a CPU against what runs on a GPU, in float64; also in pieces of a few rows and experts."""
    weight, hessian = problem(200, 300, experts=3)
    order, hessian = act_order(hessian) if ordered else (None, hessian)
    factored = factorize(hessian.double())
    factor = factored.unit_upper
    options = {"bits": BITS, "group_size": group, "order": order, "importance": factored.pivots if clip else None}
    whole = gptq.quantize(weight, factor, **options)
    monkeypatch.setattr(gptq_cpu, "LANES_AT_ONCE", 60)
    in_pieces = gptq.quantize(weight, factor, **options)
    monkeypatch.setattr(gptq, "gptq_cpu", gptq_device)
    monkeypatch.setattr(group_grids, "_clipped", clipped_in_torch)
    in_torch = gptq.quantize(weight, factor, **options)
    for other in (in_pieces, in_torch):
        assert torch.equal(whole.codes, other.codes)
        torch.testing.assert_close(whole.scale, other.scale)
        assert torch.equal(whole.zero, other.zero)


@pytest.mark.parametrize("experts", [1, 16])
def test_float32_codes_are_the_oracles_but_for_one_in_a_thousand(experts: int) -> None:
    weight, hessian = problem(256, 24, experts)
    found = gptq.quantize(weight, factorize(hessian).unit_upper, bits=BITS, group_size=64)
    exact = gptq.quantize(weight, factorize(hessian.double()).unit_upper, bits=BITS, group_size=64)
    assert (found.codes == exact.codes).float().mean() >= 0.999


def test_ill_conditioned_hessians_lose_no_more_than_the_oracle() -> None:
    inputs = 200
    generator = torch.Generator().manual_seed(2)
    basis, _ = torch.linalg.qr(torch.randn(inputs, inputs, generator=generator, dtype=torch.float64))
    hessian = (basis * torch.logspace(0, -7, inputs, dtype=torch.float64)) @ basis.T
    weight = 0.05 * torch.randn(1, 32, inputs, generator=generator)
    factor = factorize(hessian.float().unsqueeze(0))
    found = gptq.quantize(weight, factor.unit_upper, bits=BITS, group_size=32)
    for index, bits in enumerate(BITS):
        values = packed_of(found, bits, symmetric=False).dequantize()[0].double()
        _, best = oracle(weight[0], hessian, bits, 32, symmetric=False)
        losses = [float(((v - weight[0]) @ hessian * (v - weight[0])).sum()) for v in (values, best)]
        assert losses[0] <= 1.001 * losses[1], (index, bits)


@pytest.mark.parametrize("symmetric", [False, True])
def test_clipping_never_has_more_error_than_the_whole_range(symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(2, 9, 40, generator=generator) ** 3
    importance = torch.rand(2, 40, generator=generator)
    options = {"bits": BITS, "group_size": 16, "symmetric": symmetric}
    whole, clipped = (gptq.quantize(weight, None, importance=counts, **options) for counts in (None, importance))
    for bits in BITS:
        errors = []
        for found in (whole, clipped):
            rest = (packed_of(found, bits, symmetric).dequantize() - weight).abs() ** 3 * importance.unsqueeze(1)
            errors.append(torch.stack([part.sum(-1) for part in rest.split(16, -1)], -1))
        assert (errors[1] <= errors[0] * 1.001).all(), bits
        assert (errors[1] < 0.9 * errors[0]).any() == (bits in (2, 3, 4)), bits
