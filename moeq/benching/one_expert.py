"""One expert at a time: the model's own experts beside other libraries' linears of the same shapes.

Experts are used in turn, each kernel's as many, so that caches hold no more of the one's weights than of the other's.

Letters: T tokens, H hidden size, I intermediate size, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from moeq.benching.bandwidth import synchronize
from moeq.benching.peers import PEERS, Linear, Peer
from moeq.benching.subject import Subject
from moeq.models.experts import DOWN, ExpertLayer

MOST_BYTES = 512 << 20  # of one kernel's experts, as dense weights
SECONDS = 0.05  # of calls between two looks at the clock, about
Call = Callable[[Tensor], object]
ALONE = "its experts are called with the whole layer's tokens, not one by one"


@dataclass(frozen=True)
class Competitor:
    """calls: one for each expert, with [T, H]."""

    name: str
    calls: Sequence[Call]


def one_expert(subject: Subject, others: Sequence[Subject], tokens: Sequence[int], repeat: int) -> dict[str, Any]:
    """Seconds of one expert for every number of tokens and every kernel, medians of interleaved rounds.

    peers: of each its version, or why it is not measured.
    """
    layer = subject.layers[0]
    shapes = [layer.shape(projection) for projection in layer.projections]
    total = sum(one.num_experts for one in subject.layers)
    count = max(1, min(total, MOST_BYTES // (layer.parameters_per_expert * 2)))
    competitors, said = [], []
    for own, name in ((subject, "model"), *((other, "dense model") for other in others)):
        calls = _own_calls(own, count)
        said.append({"name": name, "refusal": ALONE if calls is None else None, "version": None})
        competitors += [] if calls is None else [Competitor(name, calls)]
    for peer in PEERS:
        refusal = peer.refusal(subject.device, shapes)
        calls = None
        if refusal is None:
            try:
                calls = _peer_calls(peer, layer, subject, count)
            except Exception as error:  # what another library raises on shapes or devices that it does not take
                refusal = f"failed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        said.append({"name": peer.name, "refusal": refusal, "version": None if refusal else peer.version})
        competitors += [] if calls is None else [Competitor(peer.name, calls)]
    rows = [_row(competitors, subject, layer.hidden_size, size, repeat) for size in tokens]
    return {"shapes": shapes, "experts_in_turn": count, "peers": said, "points": rows}


def _own_calls(subject: Subject, count: int) -> list[Call] | None:
    """Calls of the experts modules with all tokens at one expert; None where a family's module cannot be called so."""
    made: list[Call] = []
    for layer in subject.layers:
        if layer.kind.name not in ("stacked", "dbrx", "numbered"):
            return None
        module = subject.model.get_submodule(layer.name)
        made += [_own_call(module, layer, expert) for expert in range(layer.num_experts)]
    return made[:count]


def _own_call(module: nn.Module, layer: ExpertLayer, expert: int) -> Call:
    def call(hidden: Tensor) -> object:
        index = torch.full((len(hidden), 1), expert, device=hidden.device)
        weights = hidden.new_ones(len(hidden), 1)
        if layer.kind.name == "numbered":
            return module(hidden, nn.functional.one_hot(index, layer.num_experts), weights)
        return module(hidden, index, weights)

    return call


def _peer_calls(peer: Peer, layer: ExpertLayer, subject: Subject, count: int) -> list[Call]:
    """Experts of a peer's linears, tried once."""
    calls = []
    for _ in range(count):
        linears = {name: peer.linear(*layer.shape(name), subject.dtype, subject.device) for name in layer.projections}
        calls.append(_expert_of(linears))
    calls[0](torch.zeros(1, layer.hidden_size, dtype=subject.dtype, device=subject.device))
    return calls


def _expert_of(linears: dict[str, Linear]) -> Call:
    """An expert with silu, whatever the family's activation is: its time is that of the matrices."""

    def call(hidden: Tensor) -> object:
        up = linears["up_proj"](hidden)
        gated = nn.functional.silu(linears["gate_proj"](hidden)) * up if "gate_proj" in linears else torch.relu(up)
        return linears[DOWN](gated)

    return call


def _row(
    competitors: Sequence[Competitor], subject: Subject, hidden_size: int, tokens: int, repeat: int
) -> dict[str, Any]:
    hidden = torch.randn(tokens, hidden_size, device=subject.device).to(subject.dtype)
    turns = {one.name: cycle(one.calls) for one in competitors}
    seconds: dict[str, list[float]] = {one.name: [] for one in competitors}
    with torch.no_grad():
        calls = {one.name: _calls_of(turns[one.name], hidden, subject.device) for one in competitors}
        for _ in range(repeat):
            for name, times in seconds.items():
                times.append(_timed(turns[name], calls[name], hidden, subject.device))
    return {"tokens": tokens, "seconds": {name: median(times) for name, times in seconds.items()}}


def _calls_of(turn: Any, hidden: Tensor, device: torch.device) -> int:
    """How many calls fill SECONDS; the first ones warm up."""
    _timed(turn, 2, hidden, device)
    return max(1, min(1000, round(SECONDS / max(_timed(turn, 3, hidden, device), 1e-7))))


def _timed(turn: Any, calls: int, hidden: Tensor, device: torch.device) -> float:
    """Seconds of one call, over some."""
    synchronize(device)
    started = time.perf_counter()
    for call in islice(turn, calls):
        call(hidden)
    synchronize(device)
    return (time.perf_counter() - started) / calls
