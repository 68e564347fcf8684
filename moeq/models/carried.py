"""A model run once, block by block, with what changes of single layers make of it carried along.

Every run stops where it calls a decoder layer ("block"), and the caller makes the call: once as it is, once for every
change that is carried, with that change's hidden states in the place of the run's own, and once for a change that
begins in this block. So nothing before a change is computed again, and of a streamed model every block is read once,
and once more for what begins in it. `model.forward` is untouched. A change can be carried where a block is given the
very tensor that the block before it gave. Where something is done to it in between, `Lost` is raised; where a change
reaches later blocks on another way as well (keys that layers share), only a comparison with a whole run tells.

Letters: B sequences of a batch, S tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from moeq.models.partial import Done
from moeq.models.streaming import StreamedModel, blocks_of
from moeq.models.walk import Batch, run_batch, stop_runs

Forward = Callable[..., Any]


class Lost(Exception):
    """What a block gives does not go into the next one as it is, so that no change can be carried."""


class _Call:
    """A run wants a block's output: the block, and what it is called with."""

    def __init__(self, block: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.block, self.arguments, self.named = block, arguments, named

    def made(self, forward: Forward, own: Tensor | None = None, changed: Tensor | None = None) -> Any:
        """The block's output; with `changed` in the place of the tensor `own`. Raises Lost where there is none."""
        if changed is None:
            return forward(*self.arguments, **self.named)
        if not any(value is own for value in (*self.arguments, *self.named.values())):
            raise Lost
        arguments = [changed if value is own else value for value in self.arguments]
        return forward(*arguments, **{name: changed if value is own else value for name, value in self.named.items()})


@contextmanager
def _asking(name: str, block: nn.Module, main: Any) -> Iterator[Forward]:
    """Within the block runs have the main greenlet compute a block's output; its own forward, for that."""
    own, replaced = block.forward, block.__dict__.get("forward")
    block.forward = lambda *arguments, **named: main.switch(_Call(name, arguments, named))
    try:
        yield own
    finally:
        if replaced is None:
            del block.forward
        else:
            block.forward = replaced


class Carried:
    """Some batches in one run of a model, and the changes that are carried along it.

    changed: {change: hidden states [B, S, H] of every batch after the blocks that were run}.
    """

    def __init__(
        self, model: Any, batches: Sequence[Batch], device: torch.device, streamed: StreamedModel | None = None
    ) -> None:
        self.batches = batches
        self.changed: dict[Hashable, list[Tensor]] = {}
        self._model, self._device, self._streamed = model, device, streamed
        self._blocks = {name: model.get_submodule(name) for name in blocks_of(model)}
        self._forward: dict[str, Forward] = {}
        self._calls: list[_Call] = []
        self._given: list[Any] = []  # the outputs of the last block

    @torch.no_grad()
    def walk(self) -> Iterator[str]:
        """The blocks in the order in which they run; its weights are there while one is out, and `begin` adds changes.

        Raises Lost, also where a block runs twice.
        """
        main, seen, answers = getcurrent(), set[str](), list[tuple[Any, ...]]([()] * len(self.batches))
        runs = [greenlet(lambda at=batch: run_batch(self._model, at, self._device, None)) for batch in self.batches]
        with ExitStack() as stack:
            if self._streamed is not None:
                stack.enter_context(self._streamed.lockstep(lambda _: None))
            for name, block in self._blocks.items():
                self._forward[name] = stack.enter_context(_asking(name, block, main))
            stack.callback(stop_runs, runs)
            while True:
                calls = [run.switch(*answer) for run, answer in zip(runs, answers, strict=True)]
                if all(run.dead for run in runs):
                    return
                names = {call.block if isinstance(call, _Call) else "" for call in calls}
                if len(names) > 1 or names & seen:
                    raise Lost
                name = names.pop()
                seen.add(name)
                self._calls = calls
                self._run(name)
                yield name
                answers = [(output,) for output in self._given]

    def _run(self, name: str) -> None:
        """Compute a block as it is, and for every change that began before it."""
        if self._streamed is not None:
            self._streamed.only(name)
        forward, before = self._forward[name], [_hidden(output) for output in self._given]
        for states in self.changed.values():
            for index, call in enumerate(self._calls):
                states[index] = _hidden(call.made(forward, before[index], states[index]))
        self._given = [call.made(forward) for call in self._calls]

    @torch.no_grad()
    def begin(self, change: Hashable, name: str) -> None:
        """A change of the block that is out begins here; its weights are the changed ones now."""
        if self._streamed is not None:
            self._streamed.drop(name)
            self._streamed.load(name)
        self.changed[change] = [_hidden(call.made(self._forward[name])) for call in self._calls]

    @contextmanager
    def ending(self, index: int, change: Hashable | None = None) -> Iterator[None]:
        """Within the block, runs of a batch begin after the last block: as it is, or with a change."""
        output = self._given[index]
        if change is not None:
            output = _with_hidden(output, self.changed[change][index])
        with ExitStack() as stack:
            for name, block in self._blocks.items():
                stack.callback(self._model.set_submodule, name, block)
                self._model.set_submodule(name, Done(block, output))
            yield


def _hidden(output: Any) -> Tensor:
    """Hidden states of what a block gives; Lost where it gives something else."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        raise Lost
    return first


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    return hidden if isinstance(output, Tensor) else type(output)((hidden, *output[1:]))
