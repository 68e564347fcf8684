"""Refining a layer: what training is given and gives back, and how an output moves with its experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moeq.models.experts import DOWN, ExpertLayer, ExpertMath
from moeq.models.kinds import GATED
from moeq.models.kinds.base import ActThenMultiply
from moeq.models.walk import LayerInputs
from moeq.numerics import gptq, trellis_ldlq
from moeq.numerics.factor import factorize
from moeq.numerics.storing import packed_of
from moeq.quantizers.refine import Change, LayerJob, link_of, refine_layer
from moeq.recipe import RefineSection
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import Encoding

EXPERTS, HIDDEN, INTER, TOKENS, GROUP = 4, 24, 16, 200, 8
BITS = (2, 16, 1, 3)
SILU = ExpertMath(gate=ActThenMultiply(nn.SiLU()))
SHAPES = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), DOWN: (HIDDEN, INTER)}


def job(symmetric: bool = False, behind: Tensor | None = None) -> LayerJob:
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.3 * torch.randn(EXPERTS, *shape, generator=generator) for name, shape in SHAPES.items()}
    routing, experts = torch.rand(TOKENS, EXPERTS, generator=generator).topk(2, -1)
    layer = ExpertLayer(
        index=0, name="layers.0.experts", num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=INTER
    )
    inputs = LayerInputs(
        layer=layer,
        hidden=torch.randn(TOKENS, HIDDEN, generator=generator),
        experts=experts,
        weights=routing,
        sequence=torch.zeros(TOKENS, dtype=torch.int64),
        position=torch.arange(TOKENS),
    )
    return LayerJob(
        inputs=inputs, behind=behind, weights=weights, biases={}, math=SILU, bits=BITS, group_size=GROUP,
        symmetric=symmetric,
    )  # fmt: skip


def rounded(of: LayerJob) -> dict[int, dict[str, PackedWeight]]:
    return {
        expert: {
            name: packed_of(
                gptq.quantize(stack[expert : expert + 1], None, bits=[bits], group_size=GROUP, symmetric=of.symmetric),
                bits,
                of.symmetric,
            ).map(lambda part: part[0])
            for name, stack in of.weights.items()
        }
        for expert, bits in enumerate(of.bits)
        if bits != 16
    }


def walked(of: LayerJob) -> dict[int, dict[str, PackedWeight]]:
    """In trellis codes of 256 states, as if inputs were white."""
    found: dict[int, dict[str, PackedWeight]] = {}
    for expert, bits in enumerate(of.bits):
        for name, stack in of.weights.items() if bits != 16 else ():
            hessian = torch.eye(stack.shape[-1])[None]
            weight = stack[expert : expert + 1]
            (made,) = trellis_ldlq.quantize(weight, factorize(hessian, 0.01), hessian, [bits], 8)
            parts = {"codes": made.codes, "scales": made.scales.unsqueeze(-1)}
            packed = PackedWeight.of(parts, bits, made.inputs, Encoding.trellis(8))
            found.setdefault(expert, {})[name] = packed.map(lambda part: part[0])
    return found


def values(packed: dict[int, dict[str, PackedWeight]]) -> dict[int, dict[str, Tensor]]:
    return {expert: {name: one.dequantize() for name, one in own.items()} for expert, own in packed.items()}


def output(of: LayerJob, replaced: dict[int, dict[str, Tensor]]) -> Tensor:
    total = torch.zeros(TOKENS, HIDDEN)
    for expert in range(EXPERTS):
        own = replaced.get(expert, {name: stack[expert] for name, stack in of.weights.items()})
        gate, up, down = (own[name] for name in GATED)
        hidden = of.inputs.hidden
        scale = (of.inputs.weights * (of.inputs.experts == expert)).sum(1, keepdim=True)
        total += scale * ((nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T)
    return total


@pytest.mark.parametrize("symmetric", [False, True])
def test_packed_experts_go_in_and_better_ones_come_out(symmetric: bool) -> None:
    given = job(symmetric)
    start = rounded(given)
    found = refine_layer(given, start, RefineSection(iterations=60))
    assert list(found) == [0, 2, 3]
    for expert, own in found.items():
        assert list(own) == list(GATED)
        for name, one in own.items():
            before = start[expert][name]
            assert (one.bits, one.inputs, one.symmetric) == (before.bits, before.inputs, before.symmetric)
            assert {k: (v.shape, v.dtype) for k, v in one.parts().items()} == {
                k: (v.shape, v.dtype) for k, v in before.parts().items()
            }
    exact = output(given, {})
    errors = [float((output(given, values(one)) - exact).square().mean()) for one in (start, found)]
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("trellis", [False, True])
def test_scales_alone_are_trained_with_the_codes_as_they_were(trellis: bool) -> None:
    given = replace(job(), group_size=-1 if trellis else GROUP)
    start = walked(given) if trellis else rounded(given)
    found = refine_layer(given, start, RefineSection(iterations=60), scales_alone=not trellis)
    for expert, own in found.items():
        for name, one in own.items():
            before = start[expert][name]
            after, parts = one.parts(), before.parts()
            assert replace(one, scales=before.scales).dequantize().equal(before.dequantize())
            assert (after["scales"].shape, after["scales"].dtype) == (parts["scales"].shape, torch.float16)
            assert not torch.equal(after.pop("scales"), parts.pop("scales"))
            assert all(torch.equal(after[key], parts[key]) for key in parts)
    exact = output(given, {})
    errors = [float((output(given, values(one)) - exact).square().mean()) for one in (start, found)]
    assert errors[1] < 0.9 * errors[0]


def test_what_was_left_behind_is_asked_for() -> None:
    behind = 0.1 * torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    behind = behind @ torch.randn(HIDDEN, 2, generator=torch.Generator().manual_seed(2)) @ torch.ones(2, HIDDEN)
    wanted = output(job(), {}) + behind
    errors = []
    for given in (job(), job(behind=behind)):
        found = refine_layer(given, rounded(given), RefineSection(iterations=60))
        errors.append(float((output(given, values(found)) - wanted).square().mean()))
    assert errors[1] < 0.95 * errors[0]


def test_the_change_is_that_of_the_whole_sum() -> None:
    given = job()
    new = values(rounded(given))
    change = Change(given)
    for expert, own in new.items():
        change.add(expert, own)
    torch.testing.assert_close(change.total, output(given, new) - output(given, {}), rtol=1e-4, atol=1e-5)


def test_a_link_is_found_where_output_and_experts_move_together() -> None:
    generator = torch.Generator().manual_seed(0)
    changed = torch.randn(50, HIDDEN, generator=generator)
    noise = torch.randn(50, HIDDEN, generator=generator)
    assert link_of(0.22 * changed[:30], changed) == pytest.approx(0.22)
    assert link_of(changed + 0.1 * noise, changed) == pytest.approx(1, abs=0.02)
    assert link_of(changed + noise, changed) is None
    assert link_of(-changed, changed) is None
    assert link_of(changed, torch.zeros_like(changed)) is None
    assert link_of(changed, changed[:, 1:]) is None


def test_a_norm_after_the_experts_has_no_link() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(200, 1, generator=generator) * 5 + 0.01
    before = torch.randn(200, HIDDEN, generator=generator) * scale
    after = before + 0.1 * torch.randn(200, HIDDEN, generator=generator) * scale.square()
    norm = nn.RMSNorm(HIDDEN)
    assert link_of((norm(after) - norm(before)).detach(), after - before) is None
