"""Steps in which FP16 experts cross the link on demand; shared by the baselines and by every prefill.

Shapes as in step.py: D distinct layers, S outcomes, A active experts, most loaded first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeq.estimator.devices import Parameter
from moeq.estimator.step import BoolArray, FloatArray, Layers, Step, Work, expected_step
from moeq.estimator.terms import t_act, t_fetch, t_gpu, t_ndp

PREFILL_SPLIT = Parameter(default="opt", source="cost-optimal split of a prefill", choices=("opt", "bwrule"))


def pipelined_finish(fetch_seconds: FloatArray, gpu_seconds: FloatArray) -> FloatArray:
    """When the GPU has finished each expert [..., A] if fetches run one after the other and compute follows them.

    R_i = max(R_(i-1), C_i) + g_i with C the running sum of the fetches. Equal to H*t_fetch + t_gpu(last) of
    ESTIMATOR.md while every expert computes for less time than its successor is fetched; later where it does not.
    """
    arrived = np.cumsum(fetch_seconds, axis=-1)
    computed = np.cumsum(gpu_seconds, axis=-1)
    slack: FloatArray = np.maximum.accumulate(arrived - (computed - gpu_seconds), axis=-1)
    return computed + slack


def bandwidth_rule(layers: Layers, work: Work) -> BoolArray:
    """Mask[D, S, A] of the H = ceil(BW_p/(BW_p+BW_n) * active) most loaded experts, at least one (MoNDE)."""
    link = layers.hardware.link.bandwidth_bytes_per_second
    ndp = layers.hardware.ndp.memory_bandwidth_bytes_per_second
    active = (work.tokens > 0).sum(axis=-1)
    count = np.maximum(1, np.ceil(link / (link + ndp) * active - 1e-9))
    return np.asarray(np.arange(work.tokens.shape[-1]) < count[..., None])


def cost_optimal(layers: Layers, work: Work) -> BoolArray:
    """Mask[D, S, A] of the H most loaded experts, none included, whose fetching makes the layer shortest."""
    hardware, parameters = layers.hardware, layers.geometry.expert_parameters
    used = work.tokens > 0
    fetch = t_fetch(layers.fp16_expert_bytes * used, used, hardware.link).seconds
    finish = pipelined_finish(fetch, t_gpu(parameters, 16, work.tokens, hardware.gpu).seconds)
    ndp = t_ndp(parameters, 16, work.tokens, hardware.ndp).seconds
    left_tokens = np.minimum(_sums_after(work.tokens), work.step_tokens)
    ndp_side = _sums_after(ndp) + t_act(layers.geometry.hidden_size, left_tokens, hardware.link).seconds
    gpu_side = np.concatenate([np.zeros_like(finish[..., :1]), finish], axis=-1)
    count = np.argmin(np.maximum(gpu_side, ndp_side), axis=-1)
    return np.asarray(np.arange(work.tokens.shape[-1]) < count[..., None])


def split_step(layers: Layers, work: Work, fetched: BoolArray) -> Step:
    """A step that fetches the FP16 experts of a mask[D, S, A] to the GPU and computes the others in FP16 on the NDP.

    Layer: t_dense + E[max(H*t_fetch + t_gpu(last), sum_cold t_ndp(16) + t_act)] (ESTIMATOR.md, MoNDE).
    """
    hardware, parameters = layers.hardware, layers.geometry.expert_parameters
    moved = fetched & (work.tokens > 0)
    fetch = t_fetch(layers.fp16_expert_bytes * moved, moved, hardware.link)
    gpu = t_gpu(parameters, 16, np.where(moved, work.tokens, 0.0), hardware.gpu)
    ndp = t_ndp(parameters, 16, np.where(moved, 0.0, work.tokens), hardware.ndp)
    act = t_act(layers.geometry.hidden_size, work.tokens_at(~moved), hardware.link)
    gpu_side = pipelined_finish(fetch.seconds, gpu.seconds)[..., -1]
    moe = np.maximum(gpu_side, ndp.seconds.sum(axis=-1) + act.seconds)
    terms = {"gpu_experts": gpu, "ndp_experts": ndp, "activations": act, "fetch": fetch}
    return expected_step(layers, work, moe, terms)


def prefill_step(layers: Layers, work: Work, rule: object) -> Step:
    """A prefill over FP16 experts that start on the NDP, split by `rule` ("opt" or "bwrule")."""
    choose = bandwidth_rule if rule == "bwrule" else cost_optimal
    return split_step(layers, work, choose(layers, work))


def on_demand_step(
    layers: Layers,
    work: Work,
    *,
    misses: BoolArray,
    bytes_per_miss: float,
    fetches_per_miss: float = 1.0,
    overlap: bool = False,
) -> Step:
    """A step without NDP: misses[D, S, A] are fetched, every active expert computes in FP16 on the GPU.

    Without `overlap` compute waits for all fetches (sum t_fetch + sum t_gpu); with it compute follows the fetches.
    """
    hardware = layers.hardware
    missed: NDArray[np.bool_] = misses & (work.tokens > 0)
    fetch = t_fetch(bytes_per_miss * missed, fetches_per_miss * missed, hardware.link)
    gpu = t_gpu(layers.geometry.expert_parameters, 16, work.tokens, hardware.gpu)
    if overlap:
        moe = pipelined_finish(fetch.seconds, gpu.seconds)[..., -1]
    else:
        moe = fetch.seconds.sum(axis=-1) + gpu.seconds.sum(axis=-1)
    return expected_step(layers, work, moe, {"gpu_experts": gpu, "fetch": fetch})


def _sums_after(values: FloatArray) -> FloatArray:
    """Sums[..., A+1] of what is left of values[..., A] after the first 0, 1, ..., A entries."""
    backward = np.cumsum(values[..., ::-1], axis=-1)[..., ::-1]
    return np.concatenate([backward, np.zeros_like(values[..., :1])], axis=-1)
