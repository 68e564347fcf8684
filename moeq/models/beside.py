"""A model run twice, side by side: as it is, and with its experts replaced layer by layer.

Both runs stop where a decoder layer with experts ends. The caller then sees what the layer's experts were given in the
second run and how far its output, the layer's own experts still being exact, is from the first run's; it may overwrite
these experts, and the second run repeats the decoder layer with what it finds before it goes on. So later layers see
what the earlier ones became, one set of weights serves both runs, and a streamed model reads every layer once.

Letters: T tokens of all batches (pads taken out), t those of the first batch, H hidden size, k experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from moeq.errors import ModelError
from moeq.models.experts import ExpertLayer
from moeq.models.kinds.base import Routing
from moeq.models.streaming import StreamedModel, blocks_of
from moeq.models.walk import Batch, LayerInputs, check_weights, gather, go_on, out_of_turn, run_batch, stop_runs, tap


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What is seen of one MoE layer.

    inputs: of the run with replaced experts; behind: [T, H] float32, what the exact run's decoder layer gives more than
    this one's with exact experts (None: outputs of another shape); moved: [t, H] float32, what replacing the experts
    of the layer before has changed of its decoder layer's output at the first batch's tokens (None: no layer before, or
    outputs of another shape).
    """

    inputs: LayerInputs
    behind: Tensor | None
    moved: Tensor | None


class _Runs:
    """The two runs of every batch, and what their hooks tell."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch], device: torch.device) -> None:
        self.main = getcurrent()
        self.batches = batches
        self.all = [
            greenlet(lambda batch=batch: run_batch(model, batch, device, None)) for _ in range(2) for batch in batches
        ]
        self.exact = set(self.all[: len(batches)])
        self.moved: Tensor | None = None
        self._seen: dict[Any, tuple[ExpertLayer, Routing]] = {}
        self._repeating: Any = None

    def see(self, layer: ExpertLayer, seen: Routing) -> None:
        """What a run gives a layer's experts."""
        run = getcurrent()
        if run not in self.exact:
            self._seen[run] = (layer, seen)

    def pause(self, event: Any) -> None:
        """Wait until all runs are here, unless a decoder layer is only repeated."""
        if self._repeating is None:
            self.main.switch(event)

    def after(self, layer: ExpertLayer, block: nn.Module, arguments: Any, named: Any, output: Any) -> Any:
        """Forward hook of a decoder layer."""
        run = getcurrent()
        if self._repeating is not None:
            return None
        if run in self.exact:
            self.main.switch((layer, None, _hidden(output)))
            return None
        of, seen = self._seen.pop(run, (None, None))
        self.main.switch((layer, seen if of == layer else None, _hidden(output)))
        self._repeating = run
        try:
            again = block(*arguments, **named)
        finally:
            self._repeating = None
            self._seen.pop(run, None)
        if run is self.all[len(self.batches)]:
            keep = self.batches[0].tokens()[0].to(_hidden(again).device)
            change = _hidden(again).float() - _hidden(output).float()
            self.moved = change.flatten(0, -2)[keep] if change.shape[:-1].numel() == len(keep) else None
        return again


def _hidden(output: Any) -> Tensor:
    """Hidden states of what a decoder layer gives."""
    return (output if isinstance(output, Tensor) else output[0]).detach()


@torch.no_grad()
def walk_beside(
    model: nn.Module,
    layers: Sequence[ExpertLayer],
    batches: Sequence[Batch],
    device: torch.device,
    *,
    streamed: StreamedModel | None = None,
) -> Iterator[Beside]:
    """Yield every MoE layer in turn; what the caller makes of its experts meanwhile is what later layers see.

    A layer's weights are there, and exact, when it comes out. Raises ModelError when a decoder layer has more than one
    MoE layer or the layers do not run in the order in which they were found, QuantizationError when weights or
    activations are not finite.
    """
    runs = _Runs(model, batches, device)
    half = len(batches)
    with ExitStack() as stack:
        stack.callback(stop_runs, runs.all)
        for layer, path in zip(layers, _blocks(model, layers), strict=True):
            stack.callback(tap(model, layer, runs.see))
            block, after = model.get_submodule(path), partial(runs.after, layer)  # before a streamed layer's weights go
            stack.callback(block.register_forward_hook(after, with_kwargs=True, prepend=True).remove)
        if streamed is not None:
            stack.enter_context(streamed.lockstep(runs.pause))
        for layer in layers:
            events = go_on(runs.all, streamed)
            there = all(isinstance(event, tuple) and event[0] == layer for event in events)
            if not there or any(seen is None for _, seen, _ in events[half:]):
                raise out_of_turn(layer.name)
            check_weights(model, layer)
            inputs = gather(layer, [seen for _, seen, _ in events[half:]], batches)
            behind = _behind([hidden for _, _, hidden in events], batches, inputs)
            del events
            moved, runs.moved = runs.moved, None
            yield Beside(inputs=inputs, behind=behind, moved=moved)
            del inputs, behind, moved


def _blocks(model: nn.Module, layers: Sequence[ExpertLayer]) -> list[str]:
    """The decoder layer of every MoE layer; ModelError when one is in none, or two are in the same."""
    blocks = blocks_of(model)
    holding: list[str] = []
    for layer in layers:
        path = next((path for path in blocks if layer.name.startswith(f"{path}.")), None)
        if path is None or path in holding:
            what = "experts are not in a decoder layer of their own, so that they cannot be refined"
            raise ModelError(what, where=layer.name, do="use quantize.refine: null")
        holding.append(path)
    return holding


def _behind(outputs: list[Tensor], batches: Sequence[Batch], inputs: LayerInputs) -> Tensor | None:
    """Exact outputs less the others' at the tokens of `inputs`, [T, H]; None when they are of another shape."""
    parts, places = [], []
    for exact, other, batch in zip(outputs[: len(batches)], outputs[len(batches) :], batches, strict=True):
        missing = (exact.float() - other.float()).flatten(0, -2)
        keep, sequence, position = batch.tokens()
        if len(missing) != len(keep) or missing.shape[1] != inputs.hidden.shape[1]:
            return None
        parts.append(missing[keep.to(missing.device)])
        places.append(_place(sequence, position))
    behind = torch.cat(parts)
    if len(behind) != len(inputs.hidden):  # some tokens were left out
        there = torch.isin(torch.cat(places), _place(inputs.sequence, inputs.position))
        behind = behind[there.to(behind.device)]
    return behind


def _place(sequence: Tensor, position: Tensor) -> Tensor:
    """A number of its own for every token of a corpus."""
    return sequence << 32 | position
