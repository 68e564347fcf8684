"""SignRound of single experts: gradients, starts, what is kept, borrowing, batching, and every kind of gate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from family_models import VOCABULARY, build
from pydantic import ValidationError
from torch import Tensor, nn

from moeq.models.corpus import Sequences
from moeq.models.experts import DOWN, ExpertMath, expert_math, find_expert_layers, stacked_biases, stacked_weights
from moeq.models.kinds import GATED
from moeq.models.kinds.base import ActThenMultiply
from moeq.models.walk import walk
from moeq.numerics import gptq
from moeq.numerics.factor import factorize
from moeq.numerics.gptq import Quantized
from moeq.numerics.storing import packed_of
from moeq.quantizers.layer_data import ExpertBatch
from moeq.quantizers.signround_expert import Training, sign_round
from moeq.quantizers.trained_grid import TrainedGrid
from moeq.quantizers.training_rows import SEED_STRIDE, Deck, Pool, Pools
from moeq.recipe import Recipe
from moeq_kernels.grids import decode

EXPERTS, HIDDEN, INTER = 3, 40, 24
GROUP = 16  # the last group of either side is shorter
SILU = ExpertMath(gate=ActThenMultiply(nn.SiLU()))
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
        factor = factorize(own.mT @ own / own.shape[1])
        found[name] = gptq.quantize(weight, factor.unit_upper, **options)
    return found


def trained(
    weights: dict[str, Tensor], hidden: list[Tensor], bits: list[int], first: int = 0, **options: object
) -> dict[str, Quantized]:
    start = started(weights, hidden, "rtn", bits)
    defaults = {"group_size": GROUP, "training": QUICK, "symmetric": False, "start": start}
    lent = torch.empty(0, HIDDEN)
    return sign_round(hidden.__getitem__, lent, batch(weights, first), bits=bits, **defaults | options)  # type: ignore[arg-type]


def batch(weights: dict[str, Tensor], first: int = 0) -> ExpertBatch:
    """Experts whose numbers begin with `first`."""
    which = slice(first, first + len(weights[DOWN]))
    return ExpertBatch(which=which, weights=weights, biases={}, math=SILU)


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


@pytest.mark.cases(2)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_less_loss_than_the_start_and_codes_that_can_be_stored(bits: int, symmetric: bool) -> None:
    weights, hidden = problem()
    for method in ("rtn", "gptq"):
        start = started(weights, hidden, method, [bits], symmetric)
        found = trained(weights, hidden, [bits], start=start, symmetric=symmetric)
        before, after = (losses(weights, codes, hidden, bits) for codes in (start, found))
        assert all(new <= old * (1 + 1e-5) for new, old in zip(after, before, strict=True)), method
        if bits <= 2 or (method == "rtn" and bits <= 4):
            assert sum(after) < 0.9 * sum(before), method
        replaced = values(found, bits)
        for name, quantized in found.items():
            packed = packed_of(quantized, bits, symmetric)
            assert torch.equal(packed.dequantize(), replaced[name])
            assert int(quantized.codes.max()) < 2**bits


def straight_through(grid: TrainedGrid, offset: Tensor, low_clip: Tensor, high_clip: Tensor) -> Tensor:
    """The rounding as the paper has it, for autograd, in float64."""
    weight = grid.weight.double()
    if grid.fixed_zero:
        scale, zero = grid.base.double() * high_clip, grid.zero.double()
    else:
        scale = (grid.high.double() * high_clip - grid.low.double() * low_clip) / grid.top
        exact = -grid.low.double() * low_clip / scale
        zero = exact + (exact.round() - exact).detach()
    position = weight / scale + zero.detach() + offset
    rounded = position + (position.round() - position).detach()  # the zero point moves no weight of itself
    inside = (rounded.detach() >= 0) & (rounded.detach() <= grid.top)
    code = torch.where(inside, rounded - zero.detach(), rounded.detach().clamp(0, grid.top) - zero)
    return (code * scale).flatten(-2)[..., : grid.inputs]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_gradients_by_hand_are_those_of_straight_through_rounding(bits: int, symmetric: bool) -> None:
    weights, hidden = problem()
    start = started(weights, hidden, "gptq", [bits], symmetric)["up_proj"]
    grid = TrainedGrid(weights["up_proj"], start, bits, symmetric)
    generator = torch.Generator().manual_seed(3)
    grid.high_clip.mul_(0.7 + 0.2 * torch.rand(grid.high_clip.shape, generator=generator))
    grid.low_clip.mul_(0.7 + 0.2 * torch.rand(grid.low_clip.shape, generator=generator))
    rounded = grid.round()
    gradient = torch.randn(rounded.shape, generator=generator)
    leaves = [part.double().clone().requires_grad_() for part in (grid.offset, grid.low_clip, grid.high_clip)]
    reference = straight_through(grid, *leaves)
    close = (reference.detach() - rounded).abs() < 2e-3 * rounded.abs().max()
    assert float(close.float().mean()) > 0.99  # scales are float16: some weights at the edge of two codes differ
    wanted = torch.autograd.grad((reference * gradient).sum(), leaves, allow_unused=True)
    before = [part.clone() for part in (grid.offset, grid.low_clip, grid.high_clip)]
    grid.step(gradient, 1e-3, 1e-3)
    for name, old, new, slope in zip(
        ("offset", "low", "high"), before, (grid.offset, grid.low_clip, grid.high_clip), wanted, strict=True
    ):
        if slope is None:
            assert name == "low"
            assert grid.fixed_zero
            continue
        agree = ((old - new) * 1e3 - slope.sign()).abs() < 0.1
        assert float(agree.float().mean()) > 0.99, name


def test_an_expert_without_rows_keeps_its_start_and_with_lent_ones_is_trained_on_them() -> None:
    weights, hidden = problem()
    start = started(weights, hidden, "rtn", [2])
    lent = hidden[1][:100]
    few = [hidden[0], hidden[1][:0], hidden[2]]
    arguments = {"bits": [2], "group_size": GROUP, "symmetric": False, "start": start}
    options = {"training": QUICK} | arguments
    alone = sign_round(few.__getitem__, lent, batch(weights), **options)  # type: ignore[arg-type]
    for name in GATED:
        assert torch.equal(alone[name].codes[1], start[name].codes[1])
        assert torch.equal(alone[name].scale[1], start[name].scale[1])
        assert not torch.equal(alone[name].codes[0], start[name].codes[0])
    options = {"training": replace(QUICK, lend=8)} | arguments
    found = sign_round(few.__getitem__, lent, batch(weights), **options)  # type: ignore[arg-type]
    on_lent = [lent] * EXPERTS
    assert losses(weights, found, on_lent, 2)[1] < 0.8 * losses(weights, start, on_lent, 2)[1]


def test_batches_of_experts_and_numbers() -> None:
    weights, hidden = problem()
    whole = trained(weights, hidden, [2])
    again = trained(weights, hidden, [2])
    single = trained(weights, hidden, [2], training=replace(QUICK, working_memory=1))
    other = trained(weights, hidden, [2], training=replace(QUICK, seed=1))
    for name in GATED:
        assert torch.equal(whole[name].codes, again[name].codes)
        assert float((whole[name].codes == single[name].codes).float().mean()) > 0.95
        assert not torch.equal(whole[name].codes, other[name].codes)
    last = trained({name: stack[2:] for name, stack in weights.items()}, hidden[2:], [2], first=2)
    assert float((last[DOWN].codes[0] == whole[DOWN].codes[2]).float().mean()) > 0.95


def test_all_widths_at_once_are_each_width_alone() -> None:
    weights, hidden = problem()
    both = trained(weights, hidden, [1, 3])
    three = trained(weights, hidden, [3])
    for name in GATED:
        assert both[name].bits == (1, 3)
        assert torch.equal(both[name].codes[:, 1], three[name].codes[:, 0])


def test_the_largest_seed_of_a_recipe_draws() -> None:
    seed = 2**63 - 1
    assert Recipe.model_validate({"seed": seed}).seed == seed
    hands = [Deck(8, seed * SEED_STRIDE + expert).next(8).tolist() for expert in (0, 0, 1)]
    assert hands[0] == hands[1] != hands[2]
    assert sorted(hands[2]) == list(range(8))
    with pytest.raises(ValidationError, match="seed"):
        Recipe.model_validate({"seed": seed + 1})


def test_draws_show_every_row_before_any_again_and_lent_ones_in_proportion() -> None:
    def pool(own: int, lent: int, seed: int) -> Pool:
        rows = torch.zeros(own + lent, 2)
        share = own / (own + 4)
        return Pool(hidden=rows, target=rows, weights=rows[:, 0] + 1, own=own, own_share=share, seed=seed)

    pools = Pools([pool(12, 5, 0), pool(4, 6, 1)])
    draws = pools.draws()
    drawn = [draws.next(8) for _ in range(4)]
    first = torch.cat([rows[0] for rows in drawn])
    assert sorted(first[first < 12].tolist()) == sorted(2 * list(range(12)))
    second = torch.stack([rows[1] for rows in drawn])
    assert ((second >= 17) & (second < 27)).all()
    assert ((second < 21).sum(1) == 4).all()
    assert torch.equal(pools.draws().next(8), drawn[0])
    index, weights = pools.check(100)
    assert index.shape == (2, 17)
    assert weights.sum(1).tolist() == pytest.approx([1, 1])
    assert weights[0, :12].sum().item() == pytest.approx(12 / 16)
    assert (weights[1, 10:] == 0).all()


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h", "muse_spark", "switch_transformers"])
def test_experts_with_biases_other_gates_and_norms(family: str) -> None:
    model = build(family)
    ids = torch.randint(20, VOCABULARY, (8, 24), generator=torch.Generator().manual_seed(5))
    corpus = Sequences(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), domains=("x",) * 8)
    inputs = list(walk(model, find_expert_layers(model), corpus.batches(4), torch.device("cpu")))[-1]
    layer, every = inputs.layer, slice(None)
    weights, biases = stacked_weights(model, layer, every), stacked_biases(model, layer, every)
    own = expert_math(model, layer)
    hidden = inputs.hidden.float()

    def loss(codes: dict[str, Quantized], expert: int) -> float:
        mine = {name: bias[expert] for name, bias in biases.items()}
        outputs = [
            own.output(own.intermediate(hidden, matrices, mine), matrices[DOWN], mine.get(DOWN))
            for matrices in ({name: stack[expert] for name, stack in of.items()} for of in (weights, values(codes, 2)))
        ]
        return float((outputs[0] - outputs[1]).square().mean())

    start = {name: gptq.quantize(stack, None, bits=[2], group_size=GROUP) for name, stack in weights.items()}
    found = sign_round(
        lambda _: hidden, hidden[:0],
        ExpertBatch(which=slice(0, layer.num_experts), weights=weights, biases=biases, math=own),
        bits=[2], group_size=GROUP, symmetric=False, training=replace(QUICK, batch_rows=192), start=start,
    )  # fmt: skip
    with torch.no_grad():
        before, after = (sum(loss(codes, expert) for expert in range(layer.num_experts)) for codes in (start, found))
    assert after < 0.7 * before


def test_a_start_that_does_not_fit_is_refused() -> None:
    weights, hidden = problem()
    start = started(weights, hidden, "rtn", [2, 3])
    with pytest.raises(ValueError, match="the start has groups of 16"):
        trained(weights, hidden, [4], start=start)
    with pytest.raises(ValueError, match="the start has groups of 16"):
        trained(weights, hidden, [2], start=start, group_size=8)
    with pytest.raises(ValueError, match="at least 1"):
        Training(iterations=0)


def test_rows_that_count_more_are_fitted_better() -> None:
    """Two halves of an expert's rows, of which only one counts."""
    weights, hidden = problem()
    half = len(hidden[0]) // 2

    def found(first: float, second: float) -> list[float]:
        """The mean error on either half."""
        counts = torch.cat([torch.full((half,), first), torch.full((half,), second)])
        made = trained(weights, hidden, [2], counts=lambda _: counts)
        return [
            sum(losses(weights, made, [rows[side] for rows in hidden], 2)) for side in (slice(half), slice(half, None))
        ]

    one, other = found(2, 0), found(0, 2)
    assert one[0] < 0.97 * other[0]
    assert other[1] < 0.97 * one[1]
    assert found(1, 1) == [
        sum(losses(weights, trained(weights, hidden, [2]), [rows[side] for rows in hidden], 2))
        for side in (slice(half), slice(half, None))
    ]
