"""Paper 002's Table 3 grid, batches by beams, and what its batch pruning gains there.

Sentences of a batch end at different lengths: where is drawn, evenly from a quarter to all of the new tokens, the same
for every way of running. The end token is impossible before and certain there, so that any model will do.

Letters: B sentences, W beams, P prompt tokens, N new tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moeq.benching.asked import Asked
from moeq.benching.bandwidth import synchronize
from moeq.benching.requests import SEED, generate, prompts
from moeq.benching.subject import Subject
from moeq.runtime.batch_pruning import pruning

CERTAIN = 1e4
PAPER = {"speed_up": 1.14, "what": "at most, by the encoder-decoder of paper 002 on a V100"}


def grid(subject: Subject, asked: Asked, advance: Callable[[], None]) -> dict[str, Any]:
    """Input tokens a second of every batch and number of beams, without and with batch pruning."""
    rows = []
    for beams in asked.beam_counts:
        for batch in asked.sizes:
            rows.append(_cell(subject, asked, batch, beams))
            advance()
    gains = [row["speed_up"] for row in rows]
    return {
        "points": rows,
        "largest_speed_up": max(gains),
        "mean_speed_up": math.exp(sum(map(math.log, gains)) / len(gains)),
        "ends": "drawn evenly from a quarter to all of the new tokens",
        "paper": PAPER,
    }


def _cell(subject: Subject, asked: Asked, batch: int, beams: int) -> dict[str, Any]:
    """One batch and number of beams; the two ways alternate."""
    ids, ends = prompts(subject, batch, asked.prompt_tokens), drawn_ends(batch, asked.new_tokens)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    tokens: dict[bool, Tensor] = {}
    left_out = 0.0
    for turn in range(asked.repeat + 1):  # the first one warms up
        for pruned in (False, True):
            with pruning(subject.model) if pruned else nullcontext() as rows:
                taken, tokens[pruned] = _request(subject, ids, ends, beams, asked.new_tokens)
            if turn:
                seconds[pruned].append(taken)
            if rows is not None:
                left_out = rows.left_out / rows.tokens
    without, with_ = (median(seconds[pruned]) for pruned in (False, True))
    return {
        "batch": batch,
        "beams": beams,
        "input_tokens_per_second": batch * asked.prompt_tokens / without,
        "pruned_input_tokens_per_second": batch * asked.prompt_tokens / with_,
        "speed_up": without / with_,
        "rows_left_out": left_out,
        "same_tokens": _same(*tokens.values()),
    }


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def drawn_ends(batch: int, new_tokens: int) -> Tensor:
    """New tokens [B] of every sentence, one of them all."""
    generator = torch.Generator().manual_seed(SEED)
    ends = torch.randint(max(1, new_tokens // 4), new_tokens + 1, (batch,), generator=generator)
    ends[0] = new_tokens
    return ends


def _request(subject: Subject, ids: Tensor, ends: Tensor, beams: int, new_tokens: int) -> tuple[float, Tensor]:
    """Seconds of a batch, and its tokens."""
    end = _end_token(subject.model)
    start = 1 if subject.model.config.is_encoder_decoder else ids.shape[1]
    wanted = (start + ends).repeat_interleave(beams).to(subject.device)

    def process(tokens: Tensor, scores: Tensor) -> Tensor:
        ends_here: Tensor = wanted.eq(tokens.shape[1] + 1)
        scores[:, end] = torch.where(ends_here, CERTAIN, -CERTAIN).to(scores.dtype)
        return scores

    options: dict[str, Any] = {"num_beams": beams, "eos_token_id": end, "logits_processor": [process]}
    options["min_new_tokens"] = None
    if beams > 1:
        options["early_stopping"] = True
    synchronize(subject.device)
    started = time.perf_counter()
    made = generate(subject, ids, new_tokens, **options)
    synchronize(subject.device)
    return time.perf_counter() - started, made


def _end_token(model: Any) -> int:
    """The model's own end token, or another word."""
    for place in (getattr(model, "generation_config", None), model.config.get_text_config()):
        ends = getattr(place, "eos_token_id", None)
        if ends is not None:
            return int(ends[0] if isinstance(ends, list) else ends)
    return 1
