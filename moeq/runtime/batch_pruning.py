"""Batch pruning (paper 002, 3.5): sequences of a batch that are finished reach no expert while the others go on.

Routers run on all rows, as they do without it; only what they choose for a finished row is dropped, so that what counts
tokens per expert (a capacity) is as it was for the others. A finished row's experts give zeros, which nobody reads.

Letters: R rows of a batch (beams are rows of their own), T tokens of a call, E experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moeq.errors import EvaluationError
from moeq.models.kinds import KINDS
from moeq.runtime.packed_experts import PACKED, PackedExperts

NLLB = "NllbMoeExperts"  # its experts cannot be quantized, but its rows can be left out
SEEN = ("_get_stopping_criteria", "_beam_search_has_unfinished_sequences")  # of transformers' `generate`
BY_INDEX = ("stacked", "dbrx")  # kinds whose packed modules take E for no expert


@dataclass
class Pruned:
    """Rows that go on, and what was saved.

    live: [R], None while all do; finished: how many do not; tokens: rows that experts modules were called with, summed
    over layers and steps; left_out: those among them that no expert saw.
    """

    live: Tensor | None = None
    finished: int = 0
    tokens: int = 0
    left_out: int = 0

    def keep(self, live: Tensor) -> None:
        """Route these rows from now on; where none is left, the batch is over and the next one is whole."""
        self.finished = len(live) - int(live.sum())  # the one wait for a GPU in a step
        self.live = live if 0 < self.finished < len(live) else None

    def of_tokens(self, count: int, device: torch.device) -> Tensor | None:
        """Which tokens [T] of a call are routed; None: all."""
        self.tokens += count
        if self.live is None or count % len(self.live):
            return None
        each = count // len(self.live)
        self.left_out += each * self.finished
        return self.live.to(device).repeat_interleave(each)


@contextmanager
def pruning(model: Any) -> Iterator[Pruned]:
    """While it lasts, what `model.generate` has finished is not routed: greedy, sampled or by beams.

    A row is finished by any criterion (an end token, a stop string); with beams, a sentence is when no beam of it can
    change its result any more. Raises EvaluationError for a router that shares its capacity among the rows of a batch.
    """
    rows = Pruned()
    with ExitStack() as stack:
        for module in list(model.modules()):
            check_alone(module)
            if _holds_experts(module):
                for hook in _hooks(module, rows):
                    stack.callback(hook.remove)
        for name, wrapped in zip(SEEN, (_seeing_criteria(model, rows), _seeing_beams(model, rows)), strict=True):
            setattr(model, name, wrapped)
            stack.callback(delattr, model, name)
        yield rows


@contextmanager
def pruning_if_alone(model: Any) -> Iterator[Pruned | None]:
    """`pruning` where that changes no row that goes on; else nothing: routers share a capacity among rows, or the model
    does not generate as transformers' do."""
    shares = any(_shares_capacity(module) for module in model.modules())
    if shares or not all(hasattr(model, name) for name in SEEN):
        yield None
        return
    with pruning(model) as rows:
        yield rows


def _shares_capacity(module: nn.Module) -> bool:
    share = getattr(module, "moe_eval_capacity_token_fraction", None)
    return share is not None and not share >= 1


def check_alone(module: nn.Module) -> None:
    """EvaluationError for a router in which a row's expert hangs on what other rows of the batch chose."""
    if _shares_capacity(module):
        share = module.moe_eval_capacity_token_fraction
        raise EvaluationError(
            f"its routers share a capacity among the rows of a batch (moe_eval_capacity_token_fraction {share:g}): "
            "rows that are left out would change the others",
            where="batch pruning",
            do="set it to 1, or generate without batch pruning",
        )


def _holds_experts(module: nn.Module) -> bool:
    return (
        isinstance(module, PackedExperts)
        or type(module).__name__ == NLLB
        or any(kind.holds(module) for kind in KINDS if not isinstance(module, PackedExperts))
    )


def _kind_of(module: nn.Module) -> str:
    """Name of the kind of an experts module, packed or the family's own."""
    if isinstance(module, PackedExperts):
        return next(name for name in reversed(PACKED) if isinstance(module, PACKED[name]))
    return next((kind.name for kind in KINDS if kind.holds(module)), "numbered")


def _hooks(module: nn.Module, rows: Pruned) -> list[Any]:
    """Hooks of one experts module: what is left out of its call comes back as zeros."""
    kind = _kind_of(module)
    if isinstance(module, PackedExperts) and kind in BY_INDEX and not module.identity_beyond:
        return [module.register_forward_pre_hook(lambda _, given: _without_expert(given, rows, module.num_experts))]
    left: list[tuple[Tensor, torch.Size]] = []
    experts = int(module.num_experts) if kind == "llama4" else 1  # type: ignore[arg-type]

    def enter(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        left.clear()
        hidden = given[0].reshape(experts, -1, given[0].shape[-1])
        live = rows.of_tokens(hidden.shape[1], hidden.device)
        if live is None:
            return None
        left.append((live, given[0].shape))
        kept = hidden[:, live]
        if kind != "jetmoe":  # whose block is called with [B, S, H]
            kept = kept.flatten(0, 1)
        return (kept, *(_by_token(part, len(live))[live] for part in given[1:]))

    def leave(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not left:
            return None
        live, shape = left.pop()
        whole = output.new_zeros(experts, len(live), shape[-1])
        whole[:, live] = output.reshape(experts, -1, shape[-1])
        return whole.view(shape)

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def _by_token(part: Tensor, tokens: int) -> Tensor:
    return part if len(part) == tokens else part.flatten(0, -2)


def _without_expert(given: tuple[Any, ...], rows: Pruned, experts: int) -> tuple[Any, ...] | None:
    """A call's hidden states, indices and weights, with E, no expert, as the index of finished rows."""
    hidden, index, *rest = given
    live = rows.of_tokens(index[..., 0].numel(), index.device)
    if live is None:
        return None
    return (hidden, index.masked_fill(~live.view(*index.shape[:-1], 1), experts), *rest)


def _seeing_criteria(model: Any, rows: Pruned) -> Callable[..., Any]:
    """`generate`'s criteria of every batch, which also tell which rows of a batch without beams are finished."""
    make = model._get_stopping_criteria

    def get_stopping_criteria(generation_config: Any, *given: Any, **named: Any) -> Any:
        rows.live = None
        criteria = make(generation_config, *given, **named)
        return criteria if (generation_config.num_beams or 1) > 1 else _telling(criteria, rows)

    return get_stopping_criteria


def _telling(criteria: Any, rows: Pruned) -> Any:
    """The list of criteria as one that keeps in `rows` what any of them has ever said is finished."""

    class Telling(type(criteria)):  # type: ignore[misc]
        ended: Tensor | None = None

        def __call__(self, input_ids: Tensor, scores: Any, **named: Any) -> Tensor:
            done: Tensor = super().__call__(input_ids, scores, **named)
            self.ended = done if self.ended is None else self.ended | done
            rows.keep(~self.ended)
            return done

    return Telling(criteria)


def _seeing_beams(model: Any, rows: Pruned) -> Callable[..., Any]:
    """transformers' question after every step of a beam search, from which finished sentences are known."""
    ask = model._beam_search_has_unfinished_sequences

    def has_unfinished_sequences(can_improve: Tensor, finished: Tensor, hits: Tensor, early_stopping: Any) -> Any:
        goes_on = ask(can_improve, finished, hits, early_stopping)
        live = can_improve.reshape(-1)
        if early_stopping is True:
            live = live & ~finished.all(-1)
        rows.keep(live.repeat_interleave(finished.shape[1]) & goes_on)
        return goes_on

    return has_unfinished_sequences
