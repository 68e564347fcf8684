"""Training a layer as a whole: experts that answer the same token are trained on the sum of what they say.

For an assignment that is already made: every expert has its own width, and what it gets wrong can be made up for by the
others of its tokens, and by the next layers (the correction of their tokens). Better than training experts alone where
several answer a token; but the codes then belong together.

Letters: E experts, T tokens, t tokens of one step, k experts a token, n rows of one expert, H hidden size, K inputs, N
output rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.models.experts import DOWN, ExpertMath
from moeq.numerics.gptq import Quantized
from moeq.quantizers.learned_codes import LearnedCodes, LearnedScales
from moeq.quantizers.signround_expert import CHECKS, Training, check_start
from moeq.quantizers.trained_grid import State, join, quantized, select
from moeq.quantizers.training_rows import SEED_STRIDE, Deck, evenly
from moeq_kernels.grids import decode
from moeq_kernels.widths import DROPPED, FULL

UNTRAINED = frozenset({DROPPED, FULL})  # widths of experts that are not trained
CHECK_TOKENS = 2048
WEIGHT_BYTES = 44  # a weight in training: itself, position, first moment, values, gradients, temporaries, codes
BLOCK_ROWS = 4096  # of an expert at once outside of training
Learned = LearnedCodes | LearnedScales
Widths = int | tuple[int, ...]  # of an expert: one of all its matrices, or one of each, in the order of `weights`


@dataclass(frozen=True, kw_only=True)
class LayerTokens:
    """What a layer is trained on: hidden [T, H] float32, the chosen experts [T, k] and their routing weights [T, k].

    correction: [T, H] what the layer's output should be more than exact experts make it (None: nothing), such as the
    error that earlier layers left behind; scales_inputs: the routing weight multiplies inputs instead of outputs.
    """

    hidden: Tensor
    experts: Tensor
    weights: Tensor
    correction: Tensor | None = None
    scales_inputs: bool = False


@dataclass(frozen=True, kw_only=True)
class WidthCodes:
    """The experts of one width, or of the same widths, in ascending order, and {projection: codes [E, 1, N, K]}."""

    bits: Widths
    experts: tuple[int, ...]
    matrices: dict[str, Quantized]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What training leaves as it is: a layer's tokens, matrices {projection: [E, N, K]} and biases {projection: [E, N]}
    of all its experts, biases in float32."""

    tokens: LayerTokens
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    math: ExpertMath

    def rows(self, expert: int) -> tuple[Tensor, Tensor]:
        """An expert's tokens [n] and their routing weights [n]."""
        chosen = self.tokens.experts == expert
        rows = chosen.any(1).nonzero().squeeze(1)
        return rows, (self.tokens.weights * chosen).sum(1)[rows].float()

    def output(self, expert: int, rows: Tensor, scale: Tensor, matrices: dict[str, Tensor]) -> Tensor:
        """What an expert adds to the layer's output, [n, H], at some tokens [n], with matrices {projection: [N, K]}."""
        hidden = self.tokens.hidden[rows]
        scale = scale.unsqueeze(1)
        biases = {name: bias[expert] for name, bias in self.biases.items()}
        inner = self.math.intermediate(hidden * scale if self.tokens.scales_inputs else hidden, matrices, biases)
        output = self.math.output(inner, matrices[DOWN], biases.get(DOWN))
        return output if self.tokens.scales_inputs else output * scale

    def exact(self, expert: int, rows: Tensor, scale: Tensor) -> Tensor:
        """As `output` [n, H], with the expert's own matrices."""
        return self.output(expert, rows, scale, {name: stack[expert].float() for name, stack in self.weights.items()})

    def add_output(self, expert: int, matrices: dict[str, Tensor], total: Tensor, factor: float = 1.0) -> None:
        """Add `factor` times what an expert with matrices {projection: [N, K]} adds to the layer's output to [T, H]."""
        for rows, scale in _blocks(self.rows(expert)):
            total.index_add_(0, rows, self.output(expert, rows, scale, matrices), alpha=factor)


def _blocks(rows: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """An expert's tokens and their routing weights, some at a time."""
    return zip(*(part.split(BLOCK_ROWS) for part in rows), strict=True)


class _Run:
    """The training of some of a layer's experts, the others' outputs being exact."""

    def __init__(
        self,
        layer: Layer,
        rows: list[tuple[Tensor, Tensor]],
        experts: list[int],
        bits: Sequence[Widths],
        left: Tensor,
        start: Sequence[WidthCodes],
        symmetric: bool,
        training: Training,
        learned: type[Learned],
    ) -> None:
        """rows: of every expert, `Layer.rows`; left: [T, H] what the outputs should be more than exact experts make
        them."""
        self.layer, self.rows, self.training, self.left = layer, rows, training, left
        self.experts = sorted(experts, key=lambda expert: (rising(bits[expert]), expert))
        self.active = (
            torch.isin(layer.tokens.experts, torch.tensor(experts).to(left.device)).any(1).nonzero().squeeze(1)
        )
        self.target = left.clone()  # [T, H] of what these experts add
        for expert in experts:
            for some, scale in _blocks(rows[expert]):
                self.target.index_add_(0, some, layer.exact(expert, some, scale))
        self.grids: list[dict[str, Learned]] = []  # width by width, as `experts` are
        for part in sorted(start, key=lambda part: rising(part.bits)):
            chosen = [expert for expert in self.experts if bits[expert] == part.bits]
            places = [part.experts.index(expert) for expert in chosen]
            if chosen:
                widths = dict(zip(layer.weights, of_each(part.bits, layer.weights), strict=True))
                self.grids.append(
                    {
                        name: learned(
                            stack[chosen].float(),
                            select(part.matrices[name], places),
                            widths[name],
                            symmetric,
                            training.iterations,
                        )
                        for name, stack in layer.weights.items()
                    }
                )
        self.deck = Deck(len(self.active), training.seed * SEED_STRIDE + experts[0])

    def train(self) -> dict[int, dict[str, State]]:
        """The best states met in training, {expert: {projection: state [1, ...]}}."""
        check = self.active[evenly(len(self.active), min(len(self.active), CHECK_TOKENS)).to(self.active.device)]
        pairs = sum(len(self.rows[expert][0]) for expert in self.experts)
        count = round(self.training.batch_rows * len(self.experts) * len(self.active) / max(pairs, 1))
        every = max(1, self.training.iterations // CHECKS)
        least = float("inf")
        best: list[dict[str, State]] = []
        for iteration in range(self.training.iterations + 1 if pairs else 1):
            values = [{name: grid.round() for name, grid in grids.items()} for grids in self.grids]
            if iteration % every == 0 or iteration == self.training.iterations:
                loss = float(self._error(check, _by_expert(values)))
                if loss < least or not best:
                    least, best = loss, [{name: grid.state() for name, grid in of.items()} for of in self.grids]
            if iteration < self.training.iterations and pairs:
                self._step(values, self.active[self.deck.next(count).to(self.active.device)])
        return dict(zip(self.experts, _apart(best), strict=True))

    def _step(self, values: list[dict[str, Tensor]], tokens: Tensor) -> None:
        leaves = [value.requires_grad_() for of in values for value in of.values()]
        grids = [grid for of in self.grids for grid in of.values()]
        with torch.enable_grad():
            loss = self._error(tokens, _by_expert(values))
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        for grid, gradient in zip(grids, gradients, strict=True):
            if gradient is not None:
                grid.step(gradient)

    def _error(self, tokens: Tensor, matrices: list[dict[str, Tensor]]) -> Tensor:
        """Squared error of the sum of these experts' outputs at some tokens [t]."""
        picks = self.layer.tokens.experts[tokens]  # [t, k]
        total = -self.target[tokens]
        for expert, own in zip(self.experts, matrices, strict=True):
            slots, choices = (picks == expert).nonzero(as_tuple=True)
            if len(slots):
                rows = tokens[slots]
                scale = self.layer.tokens.weights[rows, choices].float()
                total = total.index_add(0, slots, self.layer.output(expert, rows, scale, own))
        return total.square().sum()

    def hand_on(self, states: dict[int, dict[str, State]], group_size: int) -> None:
        """Add to `left` what these experts, with their states, still lack."""
        for expert, own in states.items():
            matrices = {
                name: decode(codes[0], scale[0], zero[0], group_size) for name, (codes, scale, zero) in own.items()
            }
            for rows, scale in _blocks(self.rows[expert]):
                missing = self.layer.exact(expert, rows, scale) - self.layer.output(expert, rows, scale, matrices)
                self.left.index_add_(0, rows, missing)


def _by_expert(values: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Stacks of each width as {projection: [N, K]} of each expert."""
    return [dict(zip(of, own, strict=True)) for of in values for own in zip(*of.values(), strict=True)]


def _apart(best: list[dict[str, State]]) -> list[dict[str, State]]:
    """States of each width as those of each expert, [1, ...]."""

    def alone(state: State, index: int) -> State:
        codes, scale, zero = (part[index : index + 1] for part in state)
        return codes, scale, zero

    return [
        {name: alone(state, index) for name, state in of.items()} for of in best for index in range(len(of[DOWN][0]))
    ]


@torch.no_grad()
def train_layer(
    layer: Layer,
    *,
    bits: Sequence[Widths],
    group_size: int,
    symmetric: bool,
    training: Training,
    start: Sequence[WidthCodes],
    learned: type[Learned] = LearnedCodes,
) -> list[WidthCodes]:
    """Codes and grids of a layer's experts, each at its own width, width by width in ascending order.

    bits: of every expert, or of each of its matrices, 16 for one that is not quantized, 0 for one that is dropped, for
    which the others make up as far as they can; start: the codes to begin with,
    as they are returned; learned: what of them is trained.

    Training.batch_rows is the mean over experts; lend is not used: an expert without tokens keeps its start. As many
    experts as fit into the working memory are trained at once; the next ones then answer for what these get wrong. On
    evenly spaced tokens the output's mean squared error is never above the start's. Raises ValueError for a start of
    another group size or of other experts.
    """
    _check_start(start, bits, group_size)
    rows = [layer.rows(expert) for expert in range(len(bits))]
    hidden, correction = layer.tokens.hidden, layer.tokens.correction
    left = torch.zeros_like(hidden) if correction is None else correction.float().clone()
    for expert in (expert for expert, width in enumerate(bits) if width == DROPPED):
        for some, scale in _blocks(rows[expert]):
            left.index_add_(0, some, layer.exact(expert, some, scale))
    trained: dict[Widths, list[tuple[int, dict[str, State]]]] = {width: [] for width in quantized_widths(bits)}
    for chunk in _chunks(layer, bits, training):
        run = _Run(layer, rows, chunk, bits, left, start, symmetric, training, learned)
        states = run.train()
        run.hand_on(states, group_size)
        for expert in chunk:
            trained[bits[expert]].append((expert, states[expert]))
    return [_codes(width, own, group_size) for width, own in trained.items()]


def rising(widths: Widths) -> tuple[int, ...]:
    """What experts are ordered by."""
    return (widths,) if isinstance(widths, int) else widths


def quantized_widths(bits: Sequence[Widths]) -> list[Widths]:
    """The widths of the experts that are quantized, rising."""
    return sorted(set(bits) - UNTRAINED, key=rising)


def of_each(widths: Widths, names: Collection[str]) -> tuple[int, ...]:
    """The width of each of an expert's matrices."""
    return (widths,) * len(names) if isinstance(widths, int) else widths


def _check_start(start: Sequence[WidthCodes], bits: Sequence[Widths], group_size: int) -> None:
    there = {expert: part.bits for part in start for expert in part.experts}
    if there != {expert: width for expert, width in enumerate(bits) if width not in UNTRAINED}:
        raise ValueError("the start is of other experts or widths")
    for part in start:
        for (name, codes), own in zip(part.matrices.items(), of_each(part.bits, part.matrices), strict=True):
            check_start({name: codes}, [own], group_size)


def _codes(width: Widths, trained: list[tuple[int, dict[str, State]]], group_size: int) -> WidthCodes:
    names = trained[0][1]
    return WidthCodes(
        bits=width,
        experts=tuple(expert for expert, _ in trained),
        matrices={
            name: join([quantized([states[name]], (own,), group_size) for _, states in trained])
            for name, own in zip(names, of_each(width, names), strict=True)
        },
    )


def experts_at_once(weights: int, memory: int) -> int:
    """How many experts of so many weights each are trained together in so many bytes, at least one."""
    return max(1, memory // (WEIGHT_BYTES * weights))


def _chunks(layer: Layer, bits: Sequence[Widths], training: Training) -> Iterator[list[int]]:
    """Experts to be quantized, as many at once as the working memory allows."""
    step = experts_at_once(sum(stack[0].numel() for stack in layer.weights.values()), training.working_memory)
    quantized = [expert for expert, width in enumerate(bits) if width not in UNTRAINED]
    for first in range(0, len(quantized), step):
        yield quantized[first : first + step]
