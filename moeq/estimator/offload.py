"""How layers run whose experts cross the link on demand; shared by the baselines and by every prefill.

Shapes as in step.py: D distinct layers, S outcomes, A active experts, most loaded first. Times in seconds. Source:
shared/ESTIMATOR.md, "Equations": MoNDE with its rules for H, HOBBIT, migration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moeq.estimator.devices import Hardware, Parameter
from moeq.estimator.step import BoolArray, FloatArray, Layers, Schedule, Span, TermTotal, Work, schedule, total
from moeq.estimator.terms import Cost, t_act, t_fetch, t_gpu, t_ndp

PREFILL_SPLIT = Parameter(
    default="opt", source="assumption: cost-optimal split", choices=("opt", "bwrule"), alternative="bwrule"
)


def gpu_cost(layers: Layers, work: Work, bits: ArrayLike, tokens: FloatArray) -> Cost:
    """Experts [D, S, A] at stored bits on the GPU, or on several."""
    return _spread(
        layers, work, lambda hardware: t_gpu(layers.geometry.expert_parameters, bits, tokens, hardware.all_gpus)
    )


def fetch_cost(layers: Layers, work: Work, num_bytes: ArrayLike, transfers: ArrayLike) -> Cost:
    """Bytes [D, S, A] of experts over the link to the GPU that computes them, or to several."""
    return _spread(layers, work, lambda hardware: t_fetch(num_bytes, transfers, hardware))


def _spread(layers: Layers, work: Work, cost_of: Callable[[Hardware], Cost]) -> Cost:
    """Costs [D, S, A] on all GPUs in equal parts; with whole experts on each what the busiest one has to do.

    It is divided among the experts as their times are.
    """
    hardware, gpus = layers.hardware, layers.hardware.gpus
    if gpus is None or gpus.parallel == "tensor":
        return cost_of(hardware)
    each, owner = cost_of(hardware.one), work.experts * gpus.count // layers.geometry.num_experts
    whole, most = each.seconds.sum(axis=-1), np.zeros(each.seconds.shape[:-1])
    for one in range(gpus.count):
        most = np.maximum(most, np.where(owner == one, each.seconds, 0.0).sum(axis=-1))
    share = np.divide(most, whole, out=np.ones_like(most), where=whole > 0)
    return replace(each, seconds=each.seconds * share[..., None])


def pipelined_finish(fetch_seconds: FloatArray, gpu_seconds: FloatArray) -> FloatArray:
    """When the GPU has finished each expert [..., A] if fetches run one after the other and compute follows them.

    R_i = max(R_(i-1), C_i) + g_i with C the running sum of the fetches. Equal to H*t_fetch + t_gpu(last) of
    ESTIMATOR.md while every expert computes for less time than its successor is fetched; later where it does not.
    """
    arrived = np.cumsum(fetch_seconds, axis=-1)
    computed = np.cumsum(gpu_seconds, axis=-1)
    return np.asarray(computed + np.maximum.accumulate(arrived - (computed - gpu_seconds), axis=-1))


def in_turn(seconds: FloatArray) -> FloatArray:
    """Start [..., A] of intervals that follow one another from 0."""
    return np.asarray(np.cumsum(seconds, axis=-1) - seconds)


def bandwidth_rule(layers: Layers, work: Work) -> BoolArray:
    """Mask[D, S, A] of the H = ceil(BW_p/(BW_p+BW_n) * active) most loaded experts, at least one (MoNDE)."""
    link = layers.hardware.all_links.bandwidth_bytes_per_second
    ndp = layers.hardware.ndp.memory_bandwidth_bytes_per_second
    active = (work.tokens > 0).sum(axis=-1)
    count = np.maximum(1, np.ceil(link / (link + ndp) * active - 1e-9))
    return np.asarray(np.arange(work.tokens.shape[-1]) < count[..., None])


def cost_optimal(layers: Layers, work: Work) -> BoolArray:
    """Mask[D, S, A] of the H most loaded experts, none included, whose fetching makes the layer shortest (`opt`)."""
    hardware, parameters = layers.hardware, layers.geometry.expert_parameters
    if hardware.gpus is not None and hardware.gpus.parallel == "expert":
        return _best_prefix(layers, work)
    used = work.tokens > 0
    fetch = fetch_cost(layers, work, layers.fp16_expert_bytes * used, used)
    finish = pipelined_finish(fetch.seconds, gpu_cost(layers, work, 16, work.tokens).seconds)
    written = 2 * np.cumsum(fetch.bytes, axis=-1) / hardware.all_gpus.memory_rate
    ndp = t_ndp(parameters, 16, work.tokens, hardware.ndp).seconds
    left_tokens = np.minimum(_sums_after(work.tokens), work.step_tokens)
    act = t_act(layers.geometry.expert_inputs, left_tokens, hardware.all_links).seconds
    ndp_side = np.maximum(_sums_after(ndp) + act / 2, _from_zero(np.cumsum(fetch.seconds, axis=-1))) + act / 2
    gpu_side = _from_zero(np.maximum(finish, written))
    count = np.argmin(np.maximum(gpu_side, np.where(left_tokens > 0, ndp_side, 0.0)), axis=-1)
    return np.asarray(np.arange(work.tokens.shape[-1]) < count[..., None])


def _best_prefix(layers: Layers, work: Work) -> BoolArray:
    """As `cost_optimal`, every H tried as it would run: what the busiest of several GPUs has of the fetched experts
    hangs on how many these are."""
    order, most = np.arange(work.tokens.shape[-1]), int((work.tokens > 0).sum(axis=-1).max(initial=0))
    tried = (np.broadcast_to(order < count, work.tokens.shape) for count in range(most + 1))
    count = np.stack([split_schedule(layers, work, mask).seconds for mask in tried]).argmin(axis=0)
    return np.asarray(order < count[..., None])


def split_schedule(layers: Layers, work: Work, fetched: BoolArray) -> Schedule:
    """Fetches the FP16 experts of a mask[D, S, A] to the GPU and computes the others in FP16 on the NDP.

    Layer: t_dense + E[max(H*t_fetch + t_gpu(last), sum_cold t_ndp(16) + t_act)] (ESTIMATOR.md, MoNDE). Beyond it,
    activations return when the fetches in the same direction of the link are through. All experts are fetched where
    the memory only holds them.
    """
    hardware, parameters = layers.hardware, layers.geometry.expert_parameters
    active = work.tokens > 0
    moved = fetched & active if hardware.ndp.computes else active
    fetch = fetch_cost(layers, work, layers.fp16_expert_bytes * moved, moved)
    gpu = gpu_cost(layers, work, 16, np.where(moved, work.tokens, 0.0))
    ndp = t_ndp(parameters, 16, np.where(moved, 0.0, work.tokens), hardware.ndp)
    act = t_act(layers.geometry.expert_inputs, work.tokens_at(~moved), hardware.all_links)
    finish = pipelined_finish(fetch.seconds, gpu.seconds)
    back = returned(ndp, act, fetch.seconds.sum(axis=-1))
    terms = {"gpu_experts": gpu, "ndp_experts": ndp, "activations": act, "fetch": fetch}
    seconds = np.maximum(finish[..., -1], back)
    return schedule(
        layers, seconds, terms, lambda: (*fetch_spans(fetch, gpu, finish - gpu.seconds), *ndp_spans(ndp, act, back))
    )


def returned(ndp: Cost, act: Cost, link_busy_seconds: FloatArray | float) -> FloatArray:
    """When the NDP's results [D, S] are back on the GPU, with the link towards it busy until then; 0 without any."""
    back = np.maximum(act.seconds / 2 + ndp.seconds.sum(axis=-1), link_busy_seconds) + act.seconds / 2
    return np.where(act.seconds > 0, back, 0.0)


def gpu_span(gpu: Cost, start: FloatArray) -> Span:
    """Experts on the GPU from start[D, S, A] on."""
    return Span(resource="gpu", name="gpu_experts", start=start, seconds=gpu.seconds)


def fetch_spans(fetch: Cost, gpu: Cost, start: FloatArray) -> tuple[Span, ...]:
    """Fetches in turn, and the experts on the GPU from start[D, S, A] on."""
    fetches = Span(resource="to_gpu", name="fetch", start=in_turn(fetch.seconds), seconds=fetch.seconds)
    return fetches, gpu_span(gpu, start)


def ndp_spans(ndp: Cost, act: Cost, back: FloatArray) -> tuple[Span, ...]:
    """Activations to the NDP, its experts in turn, activations back [D, S] at the end."""
    half = act.seconds[..., None] / 2
    return (
        Span(resource="to_ndp", name="activations", start=np.zeros_like(half), seconds=half, each=False),
        Span(resource="ndp", name="ndp_experts", start=half + in_turn(ndp.seconds), seconds=ndp.seconds),
        Span(resource="to_gpu", name="activations", start=back[..., None] - half, seconds=half, each=False),
    )


def prefill_split(layers: Layers, work: Work, rule: object) -> Schedule:
    """A prefill over FP16 experts that start on the NDP, split by `rule` ("opt" or "bwrule")."""
    choose = bandwidth_rule if rule == "bwrule" or not layers.hardware.ndp.computes else cost_optimal
    return split_schedule(layers, work, choose(layers, work))


def on_demand(
    layers: Layers,
    work: Work,
    *,
    misses: BoolArray,
    bytes_per_miss: float,
    fetches_per_miss: float = 1.0,
    overlap: bool = False,
) -> Schedule:
    """Without NDP: misses[D, S, A] are fetched, every active expert computes in FP16 on the GPU.

    Without `overlap` compute waits for all fetches (sum t_fetch + sum t_gpu); with it compute follows the fetches.
    """
    missed: NDArray[np.bool_] = misses & (work.tokens > 0)
    fetch = fetch_cost(layers, work, bytes_per_miss * missed, fetches_per_miss * missed)
    gpu = gpu_cost(layers, work, 16, work.tokens)
    if overlap:
        finish = pipelined_finish(fetch.seconds, gpu.seconds)
    else:
        finish = fetch.seconds.sum(axis=-1, keepdims=True) + np.cumsum(gpu.seconds, axis=-1)
    terms = {"gpu_experts": gpu, "fetch": fetch}
    return schedule(layers, finish[..., -1], terms, lambda: fetch_spans(fetch, gpu, finish - gpu.seconds))


def all_on_gpu(layers: Layers, work: Work, stored_bits: FloatArray) -> Schedule:
    """Every active expert computes on the GPU from its memory, at stored_bits[D, S, A]; nothing moves."""
    gpu = gpu_cost(layers, work, stored_bits, work.tokens)
    chain = gpu.seconds.sum(axis=-1)
    return schedule(layers, chain, {"gpu_experts": gpu}, lambda: (gpu_span(gpu, in_turn(gpu.seconds)),))


def moved_ahead(layers: Layers, moved: FloatArray, transfers: FloatArray) -> TermTotal:
    """Transfers of a number of bytes [D] to the GPU between prefill and decode, over the whole model.

    As slow as the slowest of the link and the memories at its ends.
    """
    fetch = t_fetch(moved, transfers, layers.hardware)
    seconds = np.maximum(fetch.seconds, moved / layers.hardware.all_gpus.memory_rate)
    return total(layers.repeats.astype(np.float64), replace(fetch, seconds=seconds))


def _sums_after(values: FloatArray) -> FloatArray:
    """Sums[..., A+1] of what is left of values[..., A] after the first 0, 1, ..., A entries."""
    return _from_zero(np.cumsum(values[..., ::-1], axis=-1))[..., ::-1]


def _from_zero(values: FloatArray) -> FloatArray:
    """Values[..., A+1] with a 0 before them."""
    return np.concatenate([np.zeros_like(values[..., :1]), values], axis=-1)
