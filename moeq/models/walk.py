"""Walking a model layer by layer with many batches in lockstep.

All batches run up to the experts of one MoE layer and wait there; the caller then sees what the layer's experts are
about to be given, and the batches go on. Of a streamed model every decoder layer is read once for all batches.
A layer in a loop comes out when the batches are in it for the last time, with what it was given each time; it is read
as often as that.
`model.forward` is untouched, so masks, rotary embeddings and whatever else a family does stay its own; only one layer's
inputs are held at a time. Each batch runs in a greenlet: one thread, one at a time, in a fixed order, so that results
repeat exactly.

Letters: T tokens of all batches (pads taken out), H hidden size, k experts a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn

from moeq.errors import AllZeroError, ModelError, NotFiniteError
from moeq.models.experts import ExpertLayer, stacked_weights
from moeq.models.forward import forward
from moeq.models.kinds.base import Routing
from moeq.models.visits import visits

if TYPE_CHECKING:
    from moeq.models.streaming import StreamedModel
    from moeq.progress import Bar

LARGEST_PRODUCT = 1e18  # of an expert's matrices' largest weights: squares of its outputs then come near 1e38


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Token ids [B, S] and a mask of real tokens [B, S]; `sequences` numbers the rows within the corpus [B].

    extra: what else the model is given, such as the pixels of images.
    """

    input_ids: Tensor
    mask: Tensor
    sequences: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)

    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Which are real [B * S] and, of the real ones, row in the corpus and index among the row's real tokens [T]."""
        real = self.mask.reshape(-1).bool()
        position = self.mask.long().cumsum(1) - 1
        return real, self.sequences.unsqueeze(1).expand_as(position).reshape(-1)[real], position.reshape(-1)[real]


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What the experts of one layer are given, pads and tokens that are not finite removed.

    hidden: [T, H]; experts: [T, k] chosen experts, the layer's number of experts or more for none; weights: [T, k]
    routing weights; sequence: [T] row in the corpus; position: [T] index among the real tokens of its sequence;
    left_out: tokens that were removed because their activations or routing weights are not finite. Of a layer in a loop
    every token is here, and counts, as often as it goes through it.
    """

    layer: ExpertLayer
    hidden: Tensor
    experts: Tensor
    weights: Tensor
    sequence: Tensor
    position: Tensor
    left_out: int = 0


@dataclass(frozen=True)
class _Left:
    """A batch has come to the end of a decoder layer."""

    block: str


_running: ContextVar[Batch] = ContextVar("batch")  # every greenlet has a context of its own


def current_batch() -> Batch:
    """The batch that runs, for hooks that are called within a walk."""
    return _running.get()


def end_batch() -> None:
    """Let the batch that runs end here, for hooks of a walk that need nothing of what follows."""
    raise GreenletExit


def walk(
    model: nn.Module,
    layers: Sequence[ExpertLayer],
    batches: Sequence[Batch],
    device: torch.device,
    *,
    streamed: StreamedModel | None = None,
    finish: Callable[[Batch, Any], None] | None = None,
    blocks: Sequence[str] = (),
    left: Callable[[str], None] | None = None,
    hidden: bool = True,
) -> Iterator[LayerInputs]:
    """Yield the inputs of every MoE layer in turn, over all batches.

    streamed: its blocks are read when all batches have come to them, once a visit; a layer's weights are there while
    its inputs are out. A caller that keeps neither inputs nor views of weights holds one layer of both, and of a loop
    what its layers were given before; hidden: whether `gather` keeps hidden states. finish: called with every output;
    without it the walk ends after the last layer. blocks: paths of decoder layers; `left` is called with each when all
    batches have left it for the last time, while its weights are there. Raises ModelError when layers run in another
    order than found, and NotFiniteError when an expert's weights, or every token's activations, are not.
    """
    main = getcurrent()

    def stop_here(layer: ExpertLayer, seen: Routing) -> None:
        main.switch((layer, [part.detach() for part in seen]))

    def leave(block: str) -> None:
        main.switch(_Left(block))

    runs = [greenlet(lambda batch=batch: run_batch(model, batch, device, finish)) for batch in batches]
    with ExitStack() as stack:
        stack.callback(stop_runs, runs)
        for layer in layers:
            stack.callback(tap(model, layer, stop_here))
        for block in blocks:
            stack.callback(model.get_submodule(block).register_forward_hook(lambda *_, at=block: leave(at)).remove)
        if streamed is not None:
            stack.enter_context(streamed.lockstep(main.switch))
        given: dict[int, list[LayerInputs]] = {}  # of every layer that is not done yet, at each of its visits
        done, ended = 0, Counter[str]()
        while finish is not None or done < len(layers):
            events = go_on(runs, streamed)
            if done == len(layers) and all(run.dead for run in runs):
                return
            if left is not None and all(isinstance(event, _Left) and event == events[0] for event in events):
                ended[events[0].block] += 1
                if ended[events[0].block] == visits(model, events[0].block):
                    left(events[0].block)
                continue
            here = _layer_of(events)
            if here is None or here not in layers[done:]:
                raise out_of_turn(layers[min(done, len(layers) - 1)].name if layers else "the model")
            check_weights(model, here)
            given.setdefault(here.index, []).append(gather(here, [seen for _, seen in events], batches, hidden))
            del events  # which would else lie beside the next layer's
            if len(given[here.index]) == here.visits:
                if here != layers[done]:
                    raise out_of_turn(layers[done].name)
                yield _joined(given.pop(here.index))
                done += 1


def run_all(
    model: nn.Module,
    batches: Sequence[Batch],
    device: torch.device,
    finish: Callable[[Batch, Any], None],
    streamed: StreamedModel | None,
    bar: Bar,
) -> None:
    """Run all batches through the model, as `walk` does; bar: counts the layers of a streamed one."""
    with nullcontext() if streamed is None else streamed.counted(bar):
        for _ in walk(model, (), batches, device, streamed=streamed, finish=finish):
            pass


def _layer_of(events: Sequence[Any]) -> ExpertLayer | None:
    """The layer whose experts all runs have come to; None where they have not."""
    layers = [event[0] if isinstance(event, tuple) else None for event in events]
    return layers[0] if all(layer == layers[0] for layer in layers) else None


def _joined(parts: Sequence[LayerInputs]) -> LayerInputs:
    """What a layer was given at each visit as one."""
    if len(parts) == 1:
        return parts[0]
    names = ("hidden", "experts", "weights", "sequence", "position")
    columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return LayerInputs(layer=parts[0].layer, left_out=sum(part.left_out for part in parts), **columns)


def go_on(runs: Sequence[greenlet], streamed: StreamedModel | None) -> list[Any]:
    """Let all runs go on until they wait for more than a block of a streamed model; what each of them says, or None."""
    while True:
        with torch.no_grad():
            events = [run.switch() for run in runs]
        if streamed is None or not all(isinstance(event, str) and event == events[0] for event in events):
            return events
        streamed.only(events[0])


def tap(model: nn.Module, layer: ExpertLayer, see: Callable[[ExpertLayer, Routing], None]) -> Callable[[], None]:
    """Call `see` with what the layer's experts are about to be given; returns what takes the hook off."""
    tap = layer.kind.tap(layer.name)
    module: Any = model.get_submodule(tap.path)

    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any = None) -> None:
        see(layer, tap.read(module, arguments, output))

    return (module.register_forward_hook if tap.after else module.register_forward_pre_hook)(hook).remove  # type: ignore[no-any-return]


def stop_runs(runs: Sequence[greenlet]) -> None:
    """End the runs where they wait."""
    for run in runs:
        if run and not run.dead:
            run.throw(GreenletExit)


def out_of_turn(where: str) -> ModelError:
    """The error for a model whose layers do not run in the order in which they were found."""
    what = "this MoE layer did not run in its turn"
    return ModelError(what, where=where, do="report the model's family: its layers are not run in order")


def check_weights(model: nn.Module, layer: ExpertLayer) -> None:
    """NotFiniteError naming the expert and matrix whose weights are not finite, or so large that outputs overflow."""
    most = {
        projection: torch.maximum(stack.amax((1, 2)), -stack.amin((1, 2))).double()
        for projection, stack in stacked_weights(model, layer, slice(None)).items()
    }  # {projection: [E]}
    product = torch.stack(list(most.values())).prod(0)
    for projection, each in most.items():
        what, wrong = "weights are not finite", ~torch.isfinite(each)
        if not bool(wrong.any()):
            what, wrong = "weights are so large that outputs overflow", (product > LARGEST_PRODUCT) & (each > 1)
        if bool(wrong.any()):
            expert = int(wrong.nonzero()[0])
            raise NotFiniteError(what, where=f"{layer.name}, expert {expert}, {projection}", do="check the checkpoint")


def run_batch(
    model: nn.Module, batch: Batch, device: torch.device, finish: Callable[[Batch, Any], None] | None
) -> None:
    """Run the model on one batch, and call `finish` with its output."""
    _running.set(batch)
    padded = not bool(batch.mask.all())
    extra: dict[str, Tensor] = {}
    if batch.extra:
        dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
        extra = {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in batch.extra.items()}
    mask = batch.mask.to(device, torch.long) if padded else None
    output = forward(model, batch.input_ids.to(device), mask, **extra)
    if finish is not None:
        finish(batch, output)


def gather(
    layer: ExpertLayer, captured: Sequence[Sequence[Tensor]], batches: Sequence[Batch], kept: bool = True
) -> LayerInputs:
    """Join the routing [B * S, ...] of every batch, and take the pads, and what is not finite, out.

    kept: whether hidden states are, else they come as [T, 0]. Raises ModelError where the experts do not see one row a
    token, NotFiniteError and AllZeroError where no token has activations.
    """
    parts: list[tuple[Tensor, ...]] = []
    for (hidden, experts, weights), batch in zip(captured, batches, strict=True):
        keep, sequence, position = batch.tokens()
        if hidden.shape[0] != keep.numel():
            raise ModelError(
                f"the experts were given {hidden.shape[0]} rows for {keep.numel()} tokens",
                where=layer.name,
                do="report the model's family: its experts do not see one row a token",
            )
        there = keep.to(hidden.device)
        parts.append((hidden[there], experts[there], weights[there], sequence, position))
    hidden, experts, weights, sequence, position = (torch.cat(column) for column in zip(*parts, strict=True))
    chosen = experts < layer.num_experts
    finite = torch.isfinite(hidden).all(1) & (torch.isfinite(weights) | ~chosen).all(1)
    left_out = int((~finite).sum())
    if left_out == len(hidden):
        what = "activations before the experts are not finite, of none of the tokens"
        raise NotFiniteError(what, where=layer.name, do="use dtype: float32, or check the checkpoint's weights")
    if not bool(hidden.any()):
        what = "activations before the experts are all 0"
        raise AllZeroError(what, where=layer.name, do="check the checkpoint's weights")
    if left_out:
        hidden, experts, weights = hidden[finite], experts[finite], weights[finite]
        sequence, position = sequence[finite.cpu()], position[finite.cpu()]
    return LayerInputs(
        layer=layer,
        hidden=hidden if kept else hidden.new_empty(len(hidden), 0),
        experts=experts.long(),
        weights=weights.float(),
        sequence=sequence,
        position=position,
        left_out=left_out,
    )
