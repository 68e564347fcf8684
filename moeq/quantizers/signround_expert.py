"""SignRound: all matrices of an expert trained together on the expert's output, by signed gradient descent.

After Cheng et al., arXiv 2309.05516, on the grids and in the storage of GPTQ. Deviations: an expert is trained alone,
on the tokens routed to it, many experts at once; the start is any codes, such as GPTQ's; the step that is kept is
the best on fixed rows, not on the step's own.

Letters: E experts, n own rows of one expert, S lent rows, T rows an expert and step, H hidden size, K inputs, N output
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.models.experts import DOWN
from moeq.numerics.gptq import Quantized
from moeq.quantizers.layer_data import ExpertBatch
from moeq.quantizers.trained_grid import State, TrainedGrid, join, quantized, select
from moeq.quantizers.training_rows import SEED_STRIDE, Pool, Pools, evenly

CHECK_ROWS = 512  # of an expert's own rows, and of the lent ones, on which the step to keep is chosen
CLIP_UNITS = 3.0  # the largest code of 2 bits, up to which clips move as fast as offsets
CHECKS = 20  # how many times in a training
MIN_LENT = 64  # rows that are lent even to an expert with many of its own
WEIGHT_BYTES = 48  # a weight in training: itself, offsets and their bounds, rounded values, gradients, temporaries


@dataclass(frozen=True, kw_only=True)
class Training:
    """How experts are trained.

    batch_rows: rows that an expert sees in a step; lend: how many own rows the lent ones count for; working_memory:
    bytes of the tensors in training (one expert is trained whatever it takes).
    """

    iterations: int = 200
    batch_rows: int = 512
    lend: float = 64
    seed: int = 0
    working_memory: int = 2 * 2**30

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.batch_rows < 1 or self.lend < 0:
            raise ValueError("iterations and batch_rows must be at least 1, lend at least 0")

    def rates(self, iteration: int, top: float) -> tuple[float, float]:
        """Steps of the offsets and of the clips of a grid whose largest code is `top`, falling linearly to zero.

        Offsets start with 1/iterations of a unit of the grid, with which one can come half a unit far; clips with the
        same up to 2 bits, then less with the square of the largest code, since a clip moves all codes of its group.
        """
        rate = 1 / self.iterations
        left = 1 - iteration / self.iterations
        return rate * left, rate * min(1, CLIP_UNITS / top) ** 2 * left


@torch.no_grad()
def sign_round(
    rows: Callable[[int], Tensor],
    lent: Tensor,
    batch: ExpertBatch,
    *,
    bits: Sequence[int],
    group_size: int,
    symmetric: bool,
    training: Training,
    start: dict[str, Quantized],
    counts: Callable[[int], Tensor | None] = lambda _: None,
) -> dict[str, Quantized]:
    """Codes and grids of all matrices of a batch of experts, each expert trained as a whole at each width.

    rows(index): [n, H] what an expert is trained on, asked for once, when its turn comes; lent: [S, H] rows of the
    layer that stand in where own ones are few; start: codes to begin with, of the same group size and symmetry;
    counts(index): [n] what the squared error of each of its own rows counts, None: 1. What is drawn hangs on the
    experts' numbers and the seed, not on the batch.

    On the rows of the check (all of an expert's own and lent rows up to CHECK_ROWS of either, evenly spaced among
    more) the mean squared error, lent rows by their share, is never above the start's. An expert without any rows keeps
    its start. Raises ValueError for a start of another group size or without one of the widths. Cheng et al., arXiv
    2309.05516, Algorithm 1.
    """
    check_start(start, bits, group_size)
    parts: list[dict[str, Quantized]] = []
    for which, pools in _chunks(rows, counts, lent, batch, training):
        begin = {name: select(codes, which) for name, codes in start.items()}
        widths = [_train(batch.some(which), pools, begin, width, symmetric, training) for width in bits]
        parts.append({name: quantized([width[name] for width in widths], bits, group_size) for name in batch.weights})
    return {name: join([part[name] for part in parts]) for name in batch.weights}


def check_start(start: dict[str, Quantized], bits: Sequence[int], group_size: int) -> None:
    """ValueError for a start that training cannot begin with."""
    for codes in start.values():
        if codes.group_size != group_size or not set(bits) <= set(codes.bits):
            raise ValueError(f"the start has groups of {codes.group_size} and {codes.bits} bits")


def _chunks(
    rows: Callable[[int], Tensor],
    counts: Callable[[int], Tensor | None],
    lent: Tensor,
    batch: ExpertBatch,
    training: Training,
) -> Iterator[tuple[slice, Pools]]:
    """Experts that are trained at once within the working memory (at least one), with their rows."""
    count, hidden, inter = batch.weights[DOWN].shape
    each = sum(stack[0].numel() for stack in batch.weights.values()) * WEIGHT_BYTES
    each += 4 * (training.batch_rows + 2 * CHECK_ROWS) * (4 * hidden + (len(batch.weights) + 3) * inter)
    first, used, pools = 0, 0, list[Pool]()
    for index in range(count):
        pool = _pool(rows(index), counts(index), lent, batch.some(slice(index, index + 1)), training)
        needed = each + 2 * pool.nbytes
        if pools and used + needed > training.working_memory:
            yield slice(first, index), Pools(pools)
            first, used, pools = index, 0, []
        pools.append(pool)
        used += needed
    yield slice(first, count), Pools(pools)


def _pool(rows: Tensor, weights: Tensor | None, lent: Tensor, expert: ExpertBatch, training: Training) -> Pool:
    """One expert's own rows and as many of the lent ones as their part of the draws is worth.

    Without either it gets a row that counts nothing, which moves nothing.
    """
    own, usable = len(rows), len(lent) if training.lend > 0 else 0
    share = own / (own + training.lend) if usable else 1.0
    few = lent[evenly(len(lent), min(usable, max(MIN_LENT, round((1 - share) * usable)))).to(lent.device)]
    hidden = torch.cat([rows.float(), few.float()])
    counts = hidden.new_ones(len(hidden))
    if weights is not None:
        counts[:own] = weights
    if not len(hidden):
        own, hidden, counts = 1, hidden.new_zeros(1, hidden.shape[1]), hidden.new_zeros(1)
    return Pool(
        hidden=hidden,
        target=_outputs(expert, expert.weights, hidden.unsqueeze(0))[0],
        weights=counts,
        own=own,
        own_share=share,
        seed=training.seed * SEED_STRIDE + expert.which.start,
    )


def _outputs(batch: ExpertBatch, weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """Rows [E, T, H] through their experts with other weights, [E, T, H]."""
    shape, biases, finish = hidden.shape[:2], batch.biases, batch.math.finish

    def product(rows: Tensor, name: str) -> Tensor:
        """[E, T, K] by one matrix of every expert, one below the other as gates want them: [E*T, N]."""
        matrix = weights[name].mT
        made = torch.baddbmm(biases[name].unsqueeze(1), rows, matrix) if name in biases else torch.bmm(rows, matrix)
        return made.flatten(0, 1)

    inner = batch.math.gate({name: product(hidden, name) for name in weights if name != DOWN})
    result = product(inner.unflatten(0, shape), DOWN)
    finished: Tensor = result if finish is None else finish(result)
    return finished.unflatten(0, shape)  # type: ignore[no-any-return]


def _train(
    batch: ExpertBatch, pools: Pools, start: dict[str, Quantized], bits: int, symmetric: bool, training: Training
) -> dict[str, State]:
    """The best state of every expert that is met in training at one width, {projection: state}."""
    grids = {name: TrainedGrid(weight, start[name], bits, symmetric) for name, weight in batch.weights.items()}
    rows, counts = pools.check(CHECK_ROWS)
    draws = pools.draws()
    every = max(1, training.iterations // CHECKS)
    best: dict[str, State] = {}
    least = torch.empty(0)
    for iteration in range(training.iterations + 1):
        values = {name: grid.round() for name, grid in grids.items()}
        if iteration % every == 0 or iteration == training.iterations:
            loss = _loss(batch, pools, values, rows, counts)
            better = loss < least if best else torch.ones_like(loss, dtype=torch.bool)
            least = torch.where(better, loss, least) if best else loss
            best = {name: _merge(better, grid.state(), best.get(name)) for name, grid in grids.items()}
        if iteration < training.iterations:
            gradients = _gradients(batch, pools, values, draws.next(training.batch_rows))
            for grid, gradient in zip(grids.values(), gradients, strict=True):
                grid.step(gradient, *training.rates(iteration, grid.top))
    return best


def _loss(batch: ExpertBatch, pools: Pools, values: dict[str, Tensor], rows: Tensor, counts: Tensor) -> Tensor:
    """Weighted squared error of every expert's output, [E]; rows [E, T] number the pools', counts [E, T] weigh them."""
    error = _outputs(batch, values, pools.hidden[rows]) - pools.target[rows]
    return (error.square().mean(-1) * counts).sum(-1)


def _gradients(batch: ExpertBatch, pools: Pools, values: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, ...]:
    """Gradients of every expert's loss on its rows [E, T] in its matrices, in their order."""
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        loss = _loss(batch, pools, leaves, rows, pools.weights[rows])
        return torch.autograd.grad(loss.sum(), list(leaves.values()))


def _merge(better: Tensor, new: State, old: State | None) -> State:
    """The new state of the experts that it is better for, [E], the old one of the others."""
    if old is None:
        return new
    chosen = better.view(-1, 1, 1)
    codes, scale, zero = (torch.where(chosen, a, b) for a, b in zip(new, old, strict=True))
    return codes, scale, zero
