"""Training whole layers: mixed widths, corrections, chunks of experts, what stays as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeq.models.experts import DOWN, ExpertMath
from moeq.models.kinds import GATED
from moeq.models.kinds.base import ActThenMultiply
from moeq.numerics import gptq
from moeq.quantizers import learned_codes
from moeq.quantizers.layer_training import (
    Layer,
    LayerTokens,
    WidthCodes,
    of_each,
    quantized_widths,
    train_layer,
)
from moeq.quantizers.signround_expert import Training
from moeq_kernels.grids import decode

EXPERTS, HIDDEN, INTER, TOKENS = 5, 40, 24, 300
GROUP = 16
SILU = ExpertMath(gate=ActThenMultiply(nn.SiLU()))
QUICK = Training(iterations=60, batch_rows=48)
SHAPES = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), DOWN: (HIDDEN, INTER)}
BITS = [2, 3, 16, 2, 1]
IDLE = 3


def problem(scales_inputs: bool = False) -> tuple[dict[str, Tensor], LayerTokens]:
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.3 * torch.randn(EXPERTS, *shape, generator=generator) for name, shape in SHAPES.items()}
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator) * torch.linspace(0.2, 2, HIDDEN)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    scores[:, IDLE] = -1
    routing, experts = scores.topk(2, -1)
    experts[:5, 1] = EXPERTS  # no second expert
    hidden = hidden + 0.8 * hidden.roll(1, -1)
    return weights, LayerTokens(hidden=hidden, experts=experts, weights=routing, scales_inputs=scales_inputs)


def output(tokens: LayerTokens, weights: dict[str, Tensor]) -> Tensor:
    """The layer's output, token by token and expert by expert."""
    total = torch.zeros_like(tokens.hidden)
    for token, (experts, routing) in enumerate(zip(tokens.experts, tokens.weights, strict=True)):
        for expert, weight in zip(experts.tolist(), routing.tolist(), strict=True):
            if expert < EXPERTS:
                row = tokens.hidden[token] * (weight if tokens.scales_inputs else 1)
                gate, up, down = (weights[name][expert] for name in GATED)
                found = (nn.functional.silu(row @ gate.T) * (row @ up.T)) @ down.T
                total[token] += found * (1 if tokens.scales_inputs else weight)
    return total


def replaced(weights: dict[str, Tensor], found: list[WidthCodes]) -> dict[str, Tensor]:
    changed = {name: stack.clone() for name, stack in weights.items()}
    for part in found:
        widths = [part.bits] * len(GATED) if isinstance(part.bits, int) else part.bits
        assert list(part.matrices) == list(GATED)
        for (name, codes), bits in zip(part.matrices.items(), widths, strict=True):
            assert codes.bits == (bits,)
            assert int(codes.codes.max()) < 2**bits
            changed[name][list(part.experts)] = decode(codes.codes[:, 0], codes.scale[:, 0], codes.zero[:, 0], GROUP)
    return changed


def rounded(weights: dict[str, Tensor], bits: list[int]) -> dict[str, Tensor]:
    """Rounding to nearest, which training starts from."""
    changed = {name: stack.clone() for name, stack in weights.items()}
    for name, stack in weights.items():
        for expert, width in enumerate(bits):
            if width != 16:
                own = gptq.quantize(stack[expert : expert + 1], None, bits=[width], group_size=GROUP)
                changed[name][expert] = decode(own.codes[0, 0], own.scale[0, 0], own.zero[0, 0], GROUP)
    return changed


def trained(tokens: LayerTokens, weights: dict[str, Tensor], bits: list[Any], **options: Any) -> list[WidthCodes]:
    """A layer's training, from rounding to nearest unless a start is given."""
    defaults = {"group_size": GROUP, "symmetric": False, "training": QUICK}
    options = defaults | {"start": start(weights, bits, options.get("group_size", GROUP))} | options
    layer = Layer(tokens=tokens, weights=weights, biases={}, math=SILU)
    return train_layer(layer, bits=bits, **options)


def start(weights: dict[str, Tensor], bits: list[Any], group_size: int) -> list[WidthCodes]:
    """Every expert rounded to nearest."""
    codes = []
    for width in quantized_widths(bits):
        experts = [expert for expert, own in enumerate(bits) if own == width]
        matrices = {
            name: gptq.quantize(stack[experts], None, bits=[own], group_size=group_size)
            for (name, stack), own in zip(weights.items(), of_each(width, weights), strict=True)
        }
        codes.append(WidthCodes(bits=width, experts=tuple(experts), matrices=matrices))
    return codes


def error(tokens: LayerTokens, exact: dict[str, Tensor], changed: dict[str, Tensor]) -> float:
    wanted = output(tokens, exact) + (0 if tokens.correction is None else tokens.correction)
    return float((output(tokens, changed) - wanted).square().mean())


@pytest.mark.cases(1)
@pytest.mark.parametrize("scales_inputs", [False, True])
def test_mixed_widths_lose_less_together_than_rounded(scales_inputs: bool) -> None:
    weights, tokens = problem(scales_inputs)
    found = trained(tokens, weights, BITS)
    assert [(part.bits, part.experts) for part in found] == [(1, (4,)), (2, (0, 3)), (3, (1,))]
    changed, before = replaced(weights, found), rounded(weights, BITS)
    assert error(tokens, weights, changed) < 0.6 * error(tokens, weights, before)
    for name in GATED:
        assert torch.equal(changed[name][2], weights[name][2])
        assert torch.equal(changed[name][IDLE], before[name][IDLE])
        assert not torch.equal(changed[name][0], before[name][0])


def test_matrices_of_several_widths_lose_less_together_than_rounded() -> None:
    weights, tokens = problem()
    bits = [(2, 3, 1), 3, 16, (2, 3, 1), (1, 2, 4)]
    found = trained(tokens, weights, bits)
    assert [(part.bits, part.experts) for part in found] == [((1, 2, 4), (4,)), ((2, 3, 1), (0, 3)), (3, (1,))]
    rows = {name: [one if isinstance(one, int) else one[place] for one in bits] for place, name in enumerate(GATED)}
    before = {name: rounded({name: stack}, rows[name])[name] for name, stack in weights.items()}
    changed = replaced(weights, found)
    assert error(tokens, weights, changed) < 0.6 * error(tokens, weights, before)
    for name in GATED:
        assert torch.equal(changed[name][2], weights[name][2])
        assert torch.equal(changed[name][IDLE], before[name][IDLE])
    again = trained(tokens, weights, bits, start=found)
    assert error(tokens, weights, replaced(weights, again)) <= error(tokens, weights, changed) * (1 + 1e-5)
    other = [(2, 3, 2), *bits[1:]]
    with pytest.raises(ValueError, match="other experts or widths"):
        trained(tokens, weights, other, start=found)


@pytest.mark.full
def test_what_earlier_layers_left_behind_is_made_up_for() -> None:
    weights, tokens = problem()
    bits = [4] * EXPERTS
    noisy = {
        name: stack + 0.03 * torch.randn(stack.shape, generator=torch.Generator().manual_seed(1))
        for name, stack in weights.items()
    }
    correction = output(tokens, noisy) - output(tokens, weights)
    asked = replace(tokens, correction=correction)
    kept = correction.clone()
    training = replace(QUICK, iterations=120)
    plain = trained(tokens, weights, bits, training=training)
    found = trained(asked, weights, bits, training=training)
    assert torch.equal(correction, kept)
    errors = [error(asked, weights, replaced(weights, part)) for part in (plain, found)]
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.full
def test_recovers_planted_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are those of some codes, one expert a token; the weights lie up to 0.8 of a step from these."""
    monkeypatch.setattr(learned_codes, "SCALE_REACH", 0)  # the planted grid stays
    weights, tokens = problem()
    bits, generator = [2] * EXPERTS, torch.Generator().manual_seed(4)
    hidden = tokens.hidden.repeat(6, 1)
    hidden += 0.3 * torch.randn(hidden.shape, generator=generator)
    (planted,) = start(weights, bits, GROUP)
    on_grid = replaced(weights, [planted])
    off, moved = {}, {}
    for name, codes in planted.matrices.items():
        noise = 1.6 * torch.rand(on_grid[name].shape, generator=generator) - 0.8
        step, zero = (
            part[:, 0].repeat_interleave(GROUP, -1)[..., : noise.shape[-1]] for part in (codes.scale, codes.zero)
        )
        off[name] = on_grid[name] + noise * step
        nearest = (off[name] / step + zero).round().clamp(0, 3).to(torch.uint8)
        moved[name] = replace(codes, codes=nearest.unsqueeze(1))
    experts = (torch.arange(len(hidden)) % EXPERTS).unsqueeze(1)
    asked = LayerTokens(hidden=hidden, experts=experts, weights=torch.ones_like(experts, dtype=torch.float32))
    asked = replace(asked, correction=output(asked, on_grid) - output(asked, off))
    before = [replace(planted, matrices=moved)]
    after = trained(asked, off, bits, start=before, training=replace(QUICK, iterations=300, batch_rows=64))
    for name in GATED:
        right = [
            float((part[0].matrices[name].codes == planted.matrices[name].codes).float().mean())
            for part in (before, after)
        ]
        assert right[0] < 0.8
        assert right[1] > right[0] + 0.05, name
    assert error(asked, off, replaced(off, after)) < 0.25 * error(asked, off, replaced(off, before))


def test_one_expert_at_a_time_answers_for_those_before() -> None:
    """Within little memory the sum still gets better than each alone would make it, and nothing is lost."""
    weights, tokens = problem()
    small = replace(QUICK, working_memory=1)
    found = trained(tokens, weights, BITS, training=small)
    together = trained(tokens, weights, BITS)
    assert [part.experts for part in found] == [part.experts for part in together]
    errors = [error(tokens, weights, replaced(weights, part)) for part in (found, together)]
    assert errors[0] < 0.6 * error(tokens, weights, rounded(weights, BITS))
    assert errors[0] == pytest.approx(errors[1], rel=0.3)


def test_the_same_seed_gives_the_same_codes() -> None:
    weights, tokens = problem()
    runs = [trained(tokens, weights, BITS, training=replace(QUICK, iterations=20, seed=seed)) for seed in (0, 0, 1)]
    first, again, other = ([part.matrices[DOWN].codes for part in run] for run in runs)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_layer_without_any_tokens_keeps_its_start() -> None:
    weights, tokens = problem()
    none = replace(tokens, experts=torch.full_like(tokens.experts, EXPERTS))
    found = trained(none, weights, BITS)
    changed, before = replaced(weights, found), rounded(weights, BITS)
    assert all(torch.equal(changed[name], before[name]) for name in GATED)


def test_a_start_of_other_widths_or_groups_is_refused() -> None:
    weights, tokens = problem()
    other = trained(tokens, weights, BITS, group_size=8, training=replace(QUICK, iterations=1))
    with pytest.raises(ValueError, match="the start has groups of 8"):
        trained(tokens, weights, BITS, start=other)
    with pytest.raises(ValueError, match="of other experts or widths"):
        trained(tokens, weights, [2, *BITS[1:4], 2], start=other)


def test_training_goes_on_from_where_another_ended() -> None:
    weights, tokens = problem()
    first = trained(tokens, weights, BITS)
    again = trained(tokens, weights, BITS, start=first)
    errors = [error(tokens, weights, replaced(weights, part)) for part in (first, again)]
    assert errors[1] < 0.97 * errors[0]


def test_one_experts_part_of_the_output() -> None:
    weights, tokens = problem()
    total = torch.zeros_like(tokens.hidden)
    for expert in range(EXPERTS):
        own = {name: stack[expert] for name, stack in weights.items()}
        Layer(tokens=tokens, weights=weights, biases={}, math=SILU).add_output(expert, own, total, factor=2)
    torch.testing.assert_close(total, 2 * output(tokens, weights), rtol=1e-4, atol=1e-4)
