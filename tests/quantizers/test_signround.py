"""SignRound: gradients, starts, what is kept, borrowing, batching, and every kind of gate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moeq.models.experts import DOWN, ExpertMath
from moeq.models.kinds import GATED
from moeq.models.kinds.base import act_then_multiply
from moeq.numerics import gptq
from moeq.numerics.gptq import Quantized
from moeq.numerics.grids import decode
from moeq.numerics.packed import PackedWeight
from moeq.quantizers.signround import Training, sign_round
from moeq.quantizers.trained_grid import TrainedGrid
from moeq.quantizers.training_rows import Rows

EXPERTS, HIDDEN, INTER = 3, 40, 24
GROUP = 16  # the last group of either side is shorter
SILU = ExpertMath(gate=act_then_multiply(nn.SiLU()))
QUICK = Training(iterations=60, batch_rows=64, lend=0)
SHAPES = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), DOWN: (HIDDEN, INTER)}


def problem(seed: int = 0, rows: int = 200) -> tuple[dict[str, Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weights = {name: 0.3 * torch.randn(EXPERTS, *shape, generator=generator) for name, shape in SHAPES.items()}
    hidden = torch.randn(EXPERTS, rows, HIDDEN, generator=generator) * torch.linspace(0.2, 2, HIDDEN)
    return weights, list(hidden + 0.8 * hidden.roll(1, -1))


def values(found: dict[str, Quantized], bits: int) -> dict[str, Tensor]:
    return {
        name: decode(*(part[:, q.bits.index(bits)] for part in (q.codes, q.scale, q.zero)), q.group_size)
        for name, q in found.items()
    }


def output(weights: dict[str, Tensor], expert: int, rows: Tensor) -> Tensor:
    gate, up, down = (weights[name][expert] for name in GATED)
    return (nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T


def losses(weights: dict[str, Tensor], found: dict[str, Quantized], hidden: list[Tensor], bits: int) -> list[float]:
    replaced = values(found, bits)
    return [
        float((output(replaced, expert, rows) - output(weights, expert, rows)).square().mean())
        for expert, rows in enumerate(hidden)
    ]


def started(weights: dict[str, Tensor], hidden: list[Tensor], method: str, bits: list[int], symmetric: bool = False):  # type: ignore[no-untyped-def]
    """RTN or GPTQ codes of the problem."""
    options = {"bits": bits, "group_size": GROUP, "symmetric": symmetric}
    if method == "rtn":
        return {name: gptq.quantize(weight, None, **options) for name, weight in weights.items()}
    inputs = {
        DOWN: [SILU.intermediate(rows, {n: w[e] for n, w in weights.items()}, {}) for e, rows in enumerate(hidden)]
    }
    found = {}
    for name, weight in weights.items():
        own = torch.stack(inputs.get(name, hidden))
        factor = gptq.factorize(own.mT @ own / own.shape[1])
        found[name] = gptq.quantize(weight, factor.unit_upper, **options)
    return found


def trained(
    weights: dict[str, Tensor], hidden: list[Tensor], bits: list[int], **options: object
) -> dict[str, Quantized]:
    options = {"group_size": GROUP, "training": QUICK} | options
    lent = torch.empty(0, HIDDEN)
    return sign_round(lambda index: Rows(hidden=hidden[index]), lent, weights, {}, SILU, bits=bits, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_the_first_rounding_is_the_start(method: str, symmetric: bool) -> None:
    weights, hidden = problem()
    for name, quantized in started(weights, hidden, method, [1, 2, 3, 4], symmetric).items():
        for width, bits in enumerate(quantized.bits):
            codes, scale, zero = TrainedGrid(weights[name], quantized, bits, symmetric).state()
            assert torch.equal(codes, quantized.codes[:, width]), (name, bits)
            assert torch.equal(scale, quantized.scale[:, width])
            assert torch.equal(zero, quantized.zero[:, width])


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_less_loss_than_the_start_and_codes_that_can_be_stored(bits: int, symmetric: bool) -> None:
    weights, hidden = problem()
    for method in ("rtn", "gptq"):
        start = started(weights, hidden, method, [bits], symmetric)
        found = trained(weights, hidden, [bits], start=start, symmetric=symmetric)
        before, after = (losses(weights, codes, hidden, bits) for codes in (start, found))
        assert all(new <= old * (1 + 1e-5) for new, old in zip(after, before, strict=True)), method
        if bits <= (3 if method == "rtn" else 2):  # from there on GPTQ's codes may be the best that are found
            assert sum(after) < 0.9 * sum(before), method
        replaced = values(found, bits)
        for name, quantized in found.items():
            packed = PackedWeight.of(quantized, bits, symmetric)
            assert torch.equal(packed.dequantize(), replaced[name])
            assert int(quantized.codes.max()) < 2**bits
