"""Timing requests through transformers' own `generate`: every token's time, and how much of it is the experts'.

Letters: B sequences of a batch, P prompt tokens, N new tokens, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from moeq.benching.bandwidth import synchronize
from moeq.benching.subject import Subject
from moeq.errors import EvaluationError
from moeq.models.experts import ExpertLayer
from moeq.models.forward import choose_as_asked, drawn_inputs
from moeq.models.kinds.base import Routing
from moeq.models.messages import quiet_transformers
from moeq.models.walk import tap

SEED = 0


class Timed(Protocol):
    """A loaded model with its MoE layers."""

    @property
    def model(self) -> Any: ...
    @property
    def layers(self) -> Sequence[ExpertLayer]: ...
    @property
    def device(self) -> torch.device: ...


class Named(Timed, Protocol):
    """One that has a name, too."""

    @property
    def name(self) -> str: ...


@dataclass
class Request:
    """Seconds of one batch's tokens, the first of which is the prefill's, and of the experts within each."""

    tokens: list[float] = field(default_factory=list)
    experts: list[float] = field(default_factory=list)


@dataclass
class Stamps:
    """A stopping criterion that stops nothing and notes when every token was there."""

    device: torch.device
    clock: ExpertClock
    request: Request = field(default_factory=Request)
    last: float = 0.0

    def start(self) -> None:
        synchronize(self.device)
        self.clock.take()
        self.last = time.perf_counter()

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        synchronize(self.device)
        now = time.perf_counter()
        self.request.tokens.append(now - self.last)
        self.request.experts.append(self.clock.take())
        self.last = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class ExpertClock:
    """Seconds within experts modules, by the clock, on CUDA by events on the stream of its device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))  # type: ignore[no-untyped-call]
        return event

    def take(self) -> float:
        """Seconds since this was asked last; what ran on a GPU must be done."""
        spans, self._spans = self._spans, []
        if self.device.type == "cuda":
            return float(sum(begin.elapsed_time(end) for begin, end in spans)) / 1000
        return float(sum(end - begin for begin, end in spans))

    @contextmanager
    def on(self, model: Any, layers: Sequence[ExpertLayer]) -> Iterator[None]:
        """Time the experts modules of these layers."""
        with ExitStack() as stack:
            for layer in layers:
                module = model.get_submodule(layer.name)
                stack.callback(module.register_forward_pre_hook(lambda *_: self._begin()).remove)
                stack.callback(module.register_forward_hook(lambda *_: self._end()).remove)
            yield

    def _begin(self) -> None:
        self._began = self._mark()

    def _end(self) -> None:
        self._spans.append((self._began, self._mark()))


def prompts(subject: Timed, batch: int, length: int, seed: int = SEED) -> Tensor:
    """Random tokens [B, P], the same for every model of a vocabulary."""
    return drawn_inputs(subject.model, batch, length, seed)["input_ids"].to(subject.device)


def check_lengths(subject: Named, prompt_tokens: int, new_tokens: int) -> None:
    """EvaluationError where a request is longer than the model's positions."""
    positions = getattr(subject.model.config.get_text_config(), "max_position_embeddings", None)
    asked = max(prompt_tokens, new_tokens) if subject.model.config.is_encoder_decoder else prompt_tokens + new_tokens
    if positions is not None and asked > positions:
        what = f"{prompt_tokens} + {new_tokens} tokens are more than the model's {positions} positions"
        raise EvaluationError(what, where=subject.name, do="lower --prompt-tokens or --new-tokens")


def generate(subject: Timed, ids: Tensor, new_tokens: int, **options: Any) -> Tensor:
    """Tokens of transformers' `generate`, likeliest ones alone."""
    choose_as_asked(subject.model)
    with torch.no_grad(), quiet_transformers():
        tokens: Tensor = subject.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            **{"min_new_tokens": new_tokens, "pad_token_id": 0, **options},
        )
    return tokens


def timed(subject: Timed, ids: Tensor, new_tokens: int) -> Request:
    """One request, token by token."""
    clock = ExpertClock(subject.device)
    stamps = Stamps(subject.device, clock)
    with clock.on(subject.model, subject.layers):
        stamps.start()
        generate(subject, ids, new_tokens, stopping_criteria=[stamps])
    return stamps.request


def routed_bytes(subject: Subject, ids: Tensor, new_tokens: int) -> float:
    """Bytes of experts that a decode step reads: at every visit to a layer those that some token was routed to.

    Mean over the steps of a request that is not timed.
    """
    visits: list[int] = []
    steps: list[int] = []

    def see(layer: ExpertLayer, routing: Routing) -> None:
        chosen = routing[1].unique().cpu()
        visits.append(int(subject.expert_bytes[layer.name][chosen[chosen < layer.num_experts]].sum()))

    def step(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        steps.append(sum(visits))
        visits.clear()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    with ExitStack() as stack:
        for layer in subject.layers:
            stack.callback(tap(subject.model, layer, see))
        generate(subject, ids, new_tokens, stopping_criteria=[step])
    return sum(steps[1:]) / max(1, len(steps) - 1)


def point(
    subject: Subject, requests: Sequence[Request], batch: int, prompt_tokens: int, moved: float
) -> dict[str, Any]:
    """The figures of one batch size: medians over requests, of decode over all their steps.

    moved: bytes of experts that a decode step reads.
    """
    first = median(request.tokens[0] for request in requests)
    steps = [seconds for request in requests for seconds in request.tokens[1:]]
    expert_steps = [seconds for request in requests for seconds in request.experts[1:]]
    step, expert_step = median(steps), median(expert_steps)
    every = moved + subject.shared_bytes + batch * subject.row_bytes
    return {
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(requests[0].tokens),
        "first_token_seconds": first,
        "token_seconds": step,
        "prefill_tokens_per_second": batch * prompt_tokens / first,
        "decode_tokens_per_second": batch / step,
        "expert_seconds_prefill": median(request.experts[0] for request in requests),
        "expert_seconds_per_step": expert_step,
        "expert_share_of_step": expert_step / step,
        "expert_bytes_per_step": moved,
        "bytes_per_step": every,
        "bytes_per_token": every / batch,
        "bytes_per_second": every / step,
        "expert_bytes_per_second": moved / expert_step if expert_step else None,
    }
