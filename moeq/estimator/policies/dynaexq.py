"""DynaExq (paper 001): every expert lies on the GPU in one of two precisions, which follow an average of its use.

Shapes as in step.py; W windows of `update_period` consecutive steps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moeq.analysis.hotness import Control, Controller
from moeq.estimator.devices import Parameter
from moeq.estimator.offload import all_on_gpu
from moeq.estimator.policies import Holds, Policy, Variant, all_fp16, number, over_gpu_memory
from moeq.estimator.step import BoolArray, FloatArray, IntArray, Layers, Schedule, Span, Windows, Work
from moeq.estimator.terms import Cost, t_fetch

_PARAMETERS = {
    "high_precision_bits": Parameter(
        default=16, source="paper 001, 4.2: FP16 over int4 (30B), int4 over int2 (80B)", minimum=1, maximum=16
    ),
    "low_precision_bits": Parameter(default=4, source="paper 001, 4.2", minimum=1, maximum=16),
    "ema": Parameter(
        default=0.99, source="assumption: a step; paper 001 prints no alpha", maximum=1.0, alternative=0.9
    ),
    "update_period": Parameter(
        default=32, source="assumption: steps; paper 001 prints no T", minimum=1, alternative=128
    ),
    "threshold": Parameter(
        default=1.0,
        source="paper 001, 3.5: tau, of the score of the last expert that fits after warm-up; 0: none",
    ),
    "transient_experts": Parameter(default=4, source="assumption: paper 001, 3.4 names no size of the buffer"),
}


class DynaExq(Policy):
    """Layer: t_dense + E[sum t_gpu(b' of the pool that the expert is in)]; a step adds what copies do not hide.

    Algorithm 1: hotness S <- a*S + (1-a)*g at every step, and every T steps the top n_hot with S >= tau are to be in
    high precision. tau is fixed after warm-up: the score that the last of the n_hot has then, none where all fit.
    n_hot is what GPU memory holds beside low precision for the others, the rest of the model, keys
    and values and a buffer for experts in transit (paper 001, 3.5). The switches of an update cross the link during
    the next T steps, promotions in high and demotions in low precision, and take effect after them: until then the
    last version is used. No more are promoted than the transient buffer lets through in these steps (3.4). Only what
    the link, or GPU memory beside compute, cannot carry within these T steps stalls.

    g is the mean router weight of a step's tokens, or where none was recorded the share of them that reach the expert,
    over top_k.

    Deviations: experts that were not chosen have g = 0; prompts do not count; warm-up is the popularity; all versions
    lie in the memory behind the link, none on an SSD; experts are not prefetched by correlations of layers.
    """

    def decode(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """Experts in the precision that the controller has given them so far, copies beside them."""
        assert work.in_time, "a controller needs consecutive steps"
        window = np.arange(work.tokens.shape[1]) // int(number(self, layers.hardware, "update_period"))
        decided = self._decisions(layers, work, window)
        used = np.concatenate([decided[:1], decided])[: len(decided)]  # [W, D, E] decided a window ago, copied since
        high, low = self._stored(layers)
        layer = np.arange(len(layers.repeats))[:, None, None]
        experts = all_on_gpu(layers, work, np.where(used[window[None, :, None], layer, work.experts], high, low))
        copies = _copies(layers, decided, high, low)
        windows = _windows(layers, experts, copies, window)
        return _with_copies(experts, copies, windows, window)

    def prefill(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """In the precisions after warm-up."""
        high, low = self._stored(layers)
        is_high = work.pick(layers.popularity_rank < self.high_places(layers, work.kv_cache_bytes))
        return all_on_gpu(layers, work, np.where(is_high, high, low))

    def high_places(self, layers: Layers, kv_cache_bytes: float) -> int:
        """n_hot: experts of a layer that GPU memory holds in high precision, the others in low."""
        high, low = self._stored(layers)
        geometry = layers.geometry
        left = layers.hardware.all_gpus.memory_capacity_bytes - geometry.non_expert_bytes - kv_cache_bytes
        left -= self._least_bytes(layers)
        each = geometry.expert_parameters * (high - low) / 8 * geometry.num_layers
        places = left // each if each > 0 else geometry.num_experts
        return int(min(max(places, 0), geometry.num_experts))

    def refusal(self, layers: Layers, kv_cache_bytes: float) -> str | None:
        """All experts in low precision, with the buffer, do not fit."""
        high, low = self._stored(layers)
        if high < low:
            return f"high precision has {high:g} stored bits a weight, low precision {low:g}"
        return over_gpu_memory(layers, self._least_bytes(layers), kv_cache_bytes)

    def holds(self, layers: Layers, kv_cache_bytes: float) -> Holds:
        """n_hot experts of a layer in high precision on the GPU, the others in low; all versions beside it."""
        high, low = self._stored(layers)
        geometry, places = layers.geometry, self.high_places(layers, kv_cache_bytes)
        share = places / geometry.num_experts
        each = geometry.expert_parameters / 8 * geometry.num_layers
        return Holds(
            gpu_bytes=self._least_bytes(layers) + each * places * (high - low),
            near_bytes=all_fp16(layers) * (high + low) / 16,
            bits=share * high + (1 - share) * low,
        )

    def reads_near(self, layers: Layers, *, prefill: bool = False) -> FloatArray:
        """None: all of them lie on the GPU; what is copied there is used so often that memory holds it."""
        return np.zeros(layers.bits.shape)

    def _stored(self, layers: Layers) -> tuple[float, float]:
        keys = "high_precision_bits", "low_precision_bits"
        high, low = (layers.stored(number(self, layers.hardware, key)) for key in keys)
        return high, low

    def _least_bytes(self, layers: Layers) -> float:
        """All experts in low precision, and the buffer of those in transit."""
        high, low = self._stored(layers)
        geometry = layers.geometry
        in_transit = number(self, layers.hardware, "transient_experts") * high
        return geometry.expert_parameters / 8 * (geometry.num_layers * geometry.num_experts * low + in_transit)

    def _decisions(self, layers: Layers, work: Work, window: IntArray) -> BoolArray:
        """Which experts [W, D, E] are to be in high precision, by what was known when each window began."""
        alpha, steps = number(self, layers.hardware, "ema"), np.bincount(window)
        control = Control(
            places=self.high_places(layers, work.kv_cache_bytes),
            ema=alpha,
            threshold=number(self, layers.hardware, "threshold"),
        )
        controller = Controller.after_warmup(control, layers.popularity)
        gained = _hotness(layers, work, window, alpha)
        decided = np.zeros(gained.shape, dtype=np.bool_)
        decided[0] = controller.high
        for now in range(1, len(decided)):
            controller.fold(gained[now - 1], int(steps[now - 1]))
            decided[now] = controller.decide(self._promotions(layers, steps, now))
        return decided

    def _promotions(self, layers: Layers, steps: IntArray, now: int) -> int:
        """How many experts of a layer the buffer lets through between two updates.

        It is the layer's share of `transient_experts` a step: a copy leaves the buffer when it is registered, between
        steps.
        """
        each = number(self, layers.hardware, "transient_experts") / layers.geometry.num_layers
        before, after = (int(each * int(steps[:count].sum())) for count in (now, now + 1))
        return after - before


def _hotness(layers: Layers, work: Work, window: IntArray, alpha: float) -> FloatArray:
    """Hotness [W, D, E] that the steps of every window add until its end: (1-a) * sum of a^(steps left) * g."""
    shape = (int(window[-1]) + 1, len(layers.repeats), layers.geometry.num_experts)
    ends = np.cumsum(np.bincount(window)) - 1
    weight = (1 - alpha) * alpha ** (ends[window] - np.arange(len(window))).astype(np.float64)
    experts, given = work.routed() if work.routed is not None else (work.experts, work.tokens / layers.geometry.top_k)
    share = given * (weight / work.step_tokens)[None, :, None]
    cells = (window[None, :, None] * shape[1] + np.arange(shape[1])[:, None, None]) * shape[2] + experts
    sums = np.bincount(cells.ravel(), weights=share.ravel(), minlength=int(np.prod(shape)))
    return sums.reshape(shape).astype(np.float64)


def _copies(layers: Layers, decided: BoolArray, high: float, low: float) -> Cost:
    """Switches [D, W] that cross the link during every window: promoted experts in high, demoted ones in low."""
    before = np.concatenate([decided[:1], decided[:-1]])
    promoted = (decided & ~before).sum(axis=2).T.astype(np.float64)
    demoted = (before & ~decided).sum(axis=2).T.astype(np.float64)
    moved = layers.geometry.expert_parameters / 8 * (promoted * high + demoted * low)
    return t_fetch(moved, promoted + demoted, layers.hardware)


def _windows(layers: Layers, experts: Schedule, copies: Cost, window: IntArray) -> Windows:
    weight, again = (each[:, None].astype(np.float64) for each in (layers.repeats, layers.visits))
    read = experts.terms["gpu_experts"].bytes.sum(axis=-1)
    return Windows(
        steps=np.bincount(window).astype(np.float64),
        seconds=_per_window((again * experts.seconds).sum(axis=0), window),
        copy_seconds=(weight * copies.seconds).sum(axis=0),
        gpu_bytes=_per_window((again * read).sum(axis=0), window) + (weight * copies.bytes).sum(axis=0),
        gpu_bytes_per_second=layers.hardware.all_gpus.memory_rate,
    )


def _per_window(values: FloatArray, window: IntArray) -> FloatArray:
    return np.bincount(window, weights=values).astype(np.float64)


def _with_copies(experts: Schedule, copies: Cost, windows: Windows, window: IntArray) -> Schedule:
    """Copies as a term: those of a window stand in its first step."""
    first = np.concatenate([[True], window[1:] != window[:-1]])
    term = Cost(
        **{name: np.where(first, values[:, window], values.dtype.type(0)) for name, values in vars(copies).items()}
    )
    seconds = term.seconds[..., None]
    copied = Span(resource="to_gpu", name="copies", start=np.zeros_like(seconds), seconds=seconds, each=False)
    return replace(
        experts, terms={**experts.terms, "copies": term}, spans=lambda: (*experts.spans(), copied), windows=windows
    )


POLICY = DynaExq(
    name="dynaexq",
    help="every expert lies on the GPU in one of two precisions, which follow an average of its use",
    variants={"": Variant("DynaExq", "DynaExq: all on the GPU, two precisions", follows="nothing")},
    parameters=_PARAMETERS,
    in_time=True,
)
