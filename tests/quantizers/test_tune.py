"""The training of scales alone: units of codes, gradients in every kind of experts, and when a gain is one."""

from __future__ import annotations

from pathlib import Path

import family_models
import pytest
import torch
from torch import Tensor

from moeq.models import loading
from moeq.models.source import open_source
from moeq.numerics import gptq
from moeq.numerics.storing import packed_of
from moeq.quantizers import tune
from moeq.quantizers.tune import Place, State, TunedScales, train, units_of
from moeq.recipe import TuneSection
from moeq_kernels import trellis
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import Encoding

ROWS, INPUTS = 24, 40


def grid(weight: Tensor, bits: int, *, symmetric: bool = False, group_size: int = 16) -> PackedWeight:
    made = gptq.quantize(weight.unsqueeze(0), None, bits=[bits], group_size=group_size, symmetric=symmetric)
    return packed_of(made, bits, symmetric).map(lambda part: part[0])


def walks(bits: int) -> PackedWeight:
    generator = torch.Generator().manual_seed(bits)
    shapes = trellis.packed_shapes(ROWS, INPUTS, bits)
    codes = torch.randint(0, 256, shapes["codes"][0], generator=generator, dtype=torch.uint8)
    scales = torch.rand(ROWS, 1, generator=generator).half()
    return PackedWeight.of({"codes": codes, "scales": scales}, bits, INPUTS, Encoding.trellis(8))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_units_times_scales_are_the_values(bits: int, symmetric: bool) -> None:
    weight = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(bits))
    packed = grid(weight, bits, symmetric=symmetric)
    units = units_of(packed)
    assert units.dtype == torch.float16
    scales = packed.scales.float().repeat_interleave(16, 1)[:, :INPUTS]
    assert torch.equal(units.float() * scales, packed.dequantize())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_units_of_walks(bits: int) -> None:
    packed = walks(bits)
    assert torch.equal(units_of(packed).float() * packed.scales.float(), packed.dequantize())


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "dbrx", "switch_transformers", "llama4_text", "jetmoe"])
def test_gradients_are_those_of_the_loss(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacked, transposed, flattened and numbered experts: the loss changes as the gradient says, along it."""
    monkeypatch.setattr(tune, "SCALE_DTYPE", torch.float32)  # or steps so small are rounded away
    source = open_source(str(family_models.save(family, tmp_path)))
    model, layers = loading.load_model(source, torch.float32, torch.device("cpu")), loading.describe(source)[1]
    experts = [
        (Place(layer=layer, expert=expert, projection=name), grid(view.detach().clone(), 4))
        for layer in layers
        for expert in range(layer.num_experts)
        for name, view in layer.kind.views(model.get_submodule(layer.name), expert).items()
    ]
    scales = TunedScales(model, experts, torch.device("cpu"))
    ids = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})  # type: ignore[union-attr]

    def loss() -> Tensor:
        logits: Tensor = model(**given, use_cache=False).logits
        return logits.double().log_softmax(-1)[..., 7].mean()

    scales.write(torch.zeros_like(scales.change))
    with scales.listening():
        loss().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    direction, step = scales.gradient / scales.gradient.norm(), 2e-3
    found = []
    for sign in (1, -1):
        scales.write(sign * step * direction)
        with torch.no_grad():
            found.append(float(loss()))
    assert (found[0] - found[1]) / (2 * step) == pytest.approx(float(scales.gradient.norm()), rel=0.05)


def noted(*rows: list[float]) -> State:
    state = State.begun(torch.zeros(3))
    for row in rows:
        state.note(torch.tensor(row, dtype=torch.float64))
        state.steps += 1
        state.change += 1
    return state


def test_only_a_gain_beyond_chance_counts() -> None:
    assert noted([1, 2, 3, 4], [0.9, 1.9, 2.91, 3.9]).is_better  # small, and the same everywhere
    assert not noted([1, 2, 3, 4], [0.1, 2.1, 3.1, 4.1]).is_better  # larger, of one sequence
    assert not noted([1, 2, 3, 4], [1, 2, 3, 4]).is_better
    assert not noted([1, 2, 3, 4], [1.1, 2.1, 3.1, 4.1]).is_better
    assert not noted([1], [0.5]).is_better  # no spread is known
    assert not noted([1, 2], [float("nan")] * 2).is_better
    assert not noted([float("nan")] * 2, [1, 2]).is_better
    state = noted([1, 2], [0.5, 1.5], [0.7, 1.7], [0.5, 1.5])
    assert state.chosen == 1
    assert state.best.tolist() == [1, 1, 1]


class Falling:
    """Scales of which the held-out divergence falls, then rises."""

    def __init__(self, divergences: list[float], losses: float = 1.0) -> None:
        self.change, self.gradient = torch.zeros(2), torch.ones(2)
        self.divergences, self.loss, self.seen = divergences, losses, 0

    def write(self, change: Tensor) -> None:
        self.change = change.clone()

    listening = TunedScales.__dict__["listening"]
    model = torch.nn.Module()
    _matrices: tuple[()] = ()

    def _parameters(self) -> dict[torch.nn.Parameter, list[None]]:
        return {}

    def heldout(self) -> Tensor:
        self.seen += 1
        return torch.tensor([self.divergences[self.seen - 1]] * 2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("divergences", "loss", "steps", "chosen"),
    [
        ([1, 0.9, 0.8, 0.85, 0.84, 0.83, 0, 0, 0], 1.0, 10, 2),  # ended after three that were no better
        ([1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], 1.0, 16, 8),
        ([1, 0, 0], float("nan"), 0, 0),
    ],
)
def test_training_ends_when_it_gets_no_better(divergences: list[float], loss: float, steps: int, chosen: int) -> None:
    scales, state = Falling(divergences), State.begun(torch.zeros(2))
    saved: list[int] = []
    train(
        scales,  # type: ignore[arg-type]
        state,
        TuneSection(steps=16),
        backward=lambda _: loss,
        heldout=scales.heldout,
        save=lambda: saved.append(state.steps),
    )
    assert (state.steps, state.chosen) == (steps, chosen)
    assert saved == state.after[1:] == list(range(2, steps + 1, 2))
