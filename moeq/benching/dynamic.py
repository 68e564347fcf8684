"""Paper 001's Figure 5: time and throughput while precision follows the workload, beside what stays as it is.

Four ways to run one checkpoint, whose requests alternate: all experts in high precision, all in low, as many in high as
dynamic precision has places but always the same ones (static mixed, the same bytes), and dynamic. Every request has
other prompts, the same for all ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moeq.artifacts.bench import manifest_digest
from moeq.artifacts.dynamic_log import mask
from moeq.benching.asked import Asked
from moeq.benching.requests import Request, check_lengths, generate, prompts, timed
from moeq.benching.subject import check_makes_text
from moeq.exporters.native_dynamic import load_with_replicas, open_dynamic
from moeq.folders import checkpoint_of
from moeq.models.experts import ExpertLayer
from moeq.models.source import open_source
from moeq.progress import Reporter
from moeq.runtime.dynamic.fixed import fix
from moeq.runtime.dynamic.model import DynamicMoE

HIGH, LOW, MIXED, DYNAMIC = "static high", "static low", "static mixed", "dynamic"


@dataclass(frozen=True, kw_only=True)
class Way:
    """A model as one of the ways has it; expert_bytes: that its experts take in memory."""

    name: str
    model: Any
    layers: Sequence[ExpertLayer]
    device: torch.device
    expert_bytes: int


def bench_dynamic(asked: Asked, reporter: Reporter) -> dict[str, Any]:
    """What bench.json has under `dynamic`. Raises what opening the checkpoint does, and EvaluationError for requests
    longer than the model's positions."""
    assert asked.dynamic is not None, "nothing dynamic is asked for"
    path = checkpoint_of(Path(asked.checkpoint))
    check_makes_text(open_source(str(path)), asked.trust_remote_code)
    tokens = max(asked.sizes) * (asked.prompt_tokens + asked.new_tokens)
    with open_dynamic(
        path,
        asked.dynamic,
        dtype=asked.dtype,
        device=asked.device,
        tokens=tokens,
        sequences=max(asked.sizes),
        say=reporter.say,
        trust_remote_code=asked.trust_remote_code,
    ) as dynamic:
        began = [dynamic.high(number).tolist() for number in range(len(dynamic.layers))]
        every = [*_static(path, asked, dynamic, began, reporter), _dynamic(dynamic)]
        check_lengths(every[-1], asked.prompt_tokens, asked.new_tokens)
        points, over_time = _requests(every, dynamic, asked, reporter)
        return {
            "manifest_sha256": manifest_digest(path),
            "settings": asdict(dynamic.settings),
            "layers": [layer.name for layer in dynamic.layers],
            "experts": [layer.num_experts for layer in dynamic.layers],
            "other_bytes": dynamic.budget.other_bytes,
            "summary": dynamic.summary(),
            "ways": [
                {"name": way.name, "expert_bytes": way.expert_bytes, "points": of_way}
                for way, of_way in zip(every, points, strict=True)
            ],
            "over_time": over_time,
        }


def _static(
    path: Path, asked: Asked, dynamic: DynamicMoE, began: Sequence[Sequence[bool]], reporter: Reporter
) -> list[Way]:
    """The ways whose experts stay as they are."""
    high, low = dynamic.settings.high, dynamic.settings.low
    widths = {
        HIGH: [[high] * len(layer) for layer in began],
        LOW: [[low] * len(layer) for layer in began],
        MIXED: [[high if there else low for there in layer] for layer in began],
    }
    ways = []
    for name, of_layers in widths.items():
        reporter.say(f"load {name}")
        model, source = load_with_replicas(path, asked.dtype, dynamic.model.device, "measured", asked.trust_remote_code)
        held = fix(model, source.reader.layers, source, of_layers, "measured")
        ways.append(Way(name=name, model=model, layers=source.reader.layers, device=model.device, expert_bytes=held))
    return ways


def _dynamic(dynamic: DynamicMoE) -> Way:
    held = dynamic.budget.pool_bytes
    return Way(name=DYNAMIC, model=dynamic.model, layers=dynamic.layers, device=dynamic.model.device, expert_bytes=held)


def _requests(
    ways: Sequence[Way], dynamic: DynamicMoE, asked: Asked, reporter: Reporter
) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]]]:
    """The points of every way, and what was in high precision after every request."""
    points: list[list[dict[str, Any]]] = [[] for _ in ways]
    over_time = [_now(dynamic)]
    with reporter.bar("requests", len(asked.sizes) * asked.repeat) as advance:
        for batch in asked.sizes:
            for way in ways:
                generate(way, prompts(way, batch, asked.prompt_tokens), 2)
            taken: list[list[Request]] = [[] for _ in ways]
            before = dynamic.summary()
            for turn in range(asked.repeat):
                for way, requests in zip(ways, taken, strict=True):
                    requests.append(timed(way, prompts(way, batch, asked.prompt_tokens, turn + 1), asked.new_tokens))
                over_time.append(_now(dynamic))
                advance()
            after = dynamic.summary()
            for way, requests, of_way in zip(ways, taken, points, strict=True):
                switched = {name: after[name] - before[name] for name in ("promotions", "demotions", "copied_bytes")}
                of_way.append(_point(requests, batch, asked) | (switched if way.name == DYNAMIC else {}))
    low = next(of_way for way, of_way in zip(ways, points, strict=True) if way.name == LOW)
    for of_way in points:
        for point, base in zip(of_way, low, strict=True):
            point["decode_of_low"] = point["decode_tokens_per_second"] / base["decode_tokens_per_second"]
    return points, over_time


def _point(requests: Sequence[Request], batch: int, asked: Asked) -> dict[str, Any]:
    """The four panels at a batch size: medians over requests, of decode over all their steps."""
    first = median(request.tokens[0] for request in requests)
    step = median(seconds for request in requests for seconds in request.tokens[1:])
    return {
        "batch": batch,
        "first_token_seconds": first,
        "token_seconds": step,
        "prefill_tokens_per_second": batch * asked.prompt_tokens / first,
        "decode_tokens_per_second": batch / step,
    }


def _now(dynamic: DynamicMoE) -> dict[str, Any]:
    """As a line of the log of decisions has it."""
    sums = {name: dynamic.summary()[name] for name in SUMS}
    high = [mask(dynamic.high(number).tolist()) for number in range(len(dynamic.layers))]
    return {"step": dynamic.steps, "high": high, **sums}


SUMS = ("promotions", "demotions", "failures", "host_hits", "host_misses", "copied_bytes")
