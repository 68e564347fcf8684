"""A model run twice, side by side: as it is, and with its experts replaced layer by layer.

Both runs stop where a decoder layer with experts ends. The caller then sees what the layer's experts were given in the
second run and how far its output, the layer's own experts still being exact, is from the first run's; it may overwrite
these experts, and the second run repeats the decoder layer with what it finds before it goes on. So later layers see
what the earlier ones became, one set of weights serves both runs, and a streamed model reads every layer once.

Letters: T tokens of all batches (pads taken out), t those of the first batch, H hidden size, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from moeq.errors import ModelError
from moeq.models.experts import ExpertLayer
from moeq.models.streaming import StreamedModel, blocks_of
from moeq.models.walk import Batch, LayerInputs, check_weights, gather, out_of_turn, run_batch, stop_runs, tap


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
        self._seen: dict[Any, tuple[ExpertLayer, tuple[Tensor, Tensor, Tensor]]] = {}
        self._repeating: Any = None

    def see(self, layer: ExpertLayer, seen: tuple[Tensor, Tensor, Tensor]) -> None:
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
        self.main.switch((layer, self._taken(run, layer), _hidden(output)))
        self._repeating = run
        try:
            again = block(*arguments, **named)
        finally:
            self._repeating = None
            self._seen.pop(run, None)
        if run is self.all[len(self.batches)]:
            keep = self.batches[0].mask.reshape(-1).bool().to(_hidden(again).device)
            change = _hidden(again).float() - _hidden(output).float()
            self.moved = change.flatten(0, -2)[keep] if change.shape[:-1].numel() == len(keep) else None
        return again

    def _taken(self, run: Any, layer: ExpertLayer) -> tuple[Tensor, Tensor, Tensor] | None:
        """What a run gave the layer's experts, which is then forgotten."""
        of, seen = self._seen.pop(run, (None, None))
        return seen if of == layer else None


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
            stack.callback(_hook(model.get_submodule(path), layer, runs.after))
        if streamed is not None:
            stack.enter_context(streamed.lockstep(runs.pause))
        done = 0
        while done < len(layers):
            events: list[Any] = []
            events += [run.switch() for run in runs.all]
            if streamed is not None and all(isinstance(event, str) and event == events[0] for event in events):
                streamed.only(events[0])
                continue
            if any(not isinstance(event, tuple) or event[0] != layers[done] for event in events):
                raise out_of_turn(layers[done].name)
            if any(event[1] is None for event in events[half:]):
                raise out_of_turn(layers[done].name)
            check_weights(model, layers[done])
            inputs = gather(layers[done], [(event[0], *event[1]) for event in events[half:]], batches)
            behind = _behind([event[2] for event in events], batches, inputs)
            events.clear()
            moved, runs.moved = runs.moved, None
            yield Beside(inputs=inputs, behind=behind, moved=moved)
            del inputs, behind, moved
            done += 1


def _hook(block: nn.Module, layer: ExpertLayer, after: Callable[..., Any]) -> Callable[[], None]:
    handle = block.register_forward_hook(
        lambda own, arguments, named, output: after(layer, own, arguments, named, output),
        with_kwargs=True,
        prepend=True,  # before a streamed layer's weights go
    )
    return handle.remove


def _blocks(model: nn.Module, layers: Sequence[ExpertLayer]) -> list[str]:
    """The decoder layer of every MoE layer; ModelError when one is in none, or two are in the same."""
    blocks = blocks_of(model)
    found: list[str] = []
    for layer in layers:
        path = next((path for path in blocks if layer.name.startswith(f"{path}.")), None)
        if path is None or path in found:
            raise ModelError(
                "experts are not in a decoder layer of their own, so that they cannot be refined",
                where=layer.name,
                do="use quantize.refine: null",
            )
        found.append(path)
    return found


def _behind(outputs: list[Tensor], batches: Sequence[Batch], inputs: LayerInputs) -> Tensor | None:
    """Exact outputs less the others' at the tokens of `inputs`, [T, H]; None when they are of another shape."""
    parts, places = [], []
    for exact, other, batch in zip(outputs[: len(batches)], outputs[len(batches) :], batches, strict=True):
        missing = (exact.float() - other.float()).flatten(0, -2)
        keep = batch.mask.reshape(-1).bool()
        if len(missing) != len(keep) or missing.shape[1] != inputs.hidden.shape[1]:
            return None
        parts.append(missing[keep.to(missing.device)])
        position = batch.mask.long().cumsum(1) - 1
        places.append(_place(batch.sequences.unsqueeze(1).expand_as(position), position).reshape(-1)[keep])
    found, place = torch.cat(parts), torch.cat(places)
    if len(found) != len(inputs.hidden):  # some tokens were left out
        found = found[torch.isin(place, _place(inputs.sequence, inputs.position)).to(found.device)]
    return found


def _place(sequence: Tensor, position: Tensor) -> Tensor:
    """A number of its own for every token of a corpus."""
    return sequence << 32 | position
