"""The terms of a step: time, bytes and multiply-accumulates of one expert, transfer or dense layer, and what bounds it.

Pure and vectorized: `tokens` (and `bits`) are arrays of any shape, the fields of a Cost have their broadcast shape.
Source: shared/ESTIMATOR.md, "Equations", in its symbols P (weights of one expert), b' (stored bits per weight) and m
(tokens that reach an expert). An expert without tokens costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moeq.errors import EstimateError
from moeq.estimator.devices import Gpu, Hardware, Link, Ndp
from moeq.estimator.geometry import ModelGeometry, effective_bits

FloatArray = NDArray[np.float64]


class Bound(IntEnum):
    """What a term's time is made of."""

    NONE = 0
    BYTES = 1
    MACS = 2
    LATENCY = 3


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time, bytes moved, multiply-accumulates and Bound of every element; all arrays have one shape."""

    seconds: FloatArray
    bytes: FloatArray
    macs: FloatArray
    bound: NDArray[np.int8]


def t_ndp(parameters: int, bits: ArrayLike, tokens: ArrayLike, ndp: Ndp) -> Cost:
    """One expert at b' = `bits` stored bits on the NDP: the longer of reading its weights and computing.

    Compute: P/(r*c)/A * (r+m+c-1)/f/s weight-stationary, P*ceil(m/r)/(A*c)/f/s output-stationary; s = 16/b' where
    low_bit_compute is 'scale', 1 where it is 'const'. A memory that only holds experts must get no tokens.
    """
    stored = np.asarray(bits, dtype=np.float64)
    m = np.asarray(tokens, dtype=np.float64) * (stored > 0)  # dropped ones are given nothing
    if not ndp.computes:
        assert not m.any(), "experts do not compute beside this memory"
        return _longer(memory=np.zeros_like(m), compute=np.zeros_like(m), moved=np.zeros_like(m), macs=np.zeros_like(m))
    read = parameters * stored / 8 * (m > 0)
    rows, columns = ndp.array_rows, ndp.array_columns
    if ndp.dataflow == "ws":
        cycles = parameters / (rows * columns) / ndp.arrays * (rows + m + columns - 1) * (m > 0)
    else:
        cycles = parameters * np.ceil(m / rows) / (ndp.arrays * columns)
    speed = 16.0 / np.where(stored > 0, stored, 16.0) if ndp.low_bit_compute == "scale" else 1.0
    return _longer(
        memory=read / ndp.memory_rate,
        compute=cycles / ndp.clock_hertz / speed,
        moved=read,
        macs=parameters * m,
    )


def expert_seconds(
    parameters: int,
    bits: ArrayLike,
    hardware: Hardware,
    *,
    group_size: int,
    zero_points: bool,
    codebook: str = "",
) -> FloatArray:
    """Seconds that the NDP takes for one token of one expert at every width (16: FP16), of the shape of `bits`.

    `t_ndp` for one token: the longer of reading the weights, scales and zero points, and of computing, where the fill
    of the arrays counts as the hardware's dataflow has it. Raises EstimateError for a memory that only holds.
    """
    if not hardware.ndp.computes:
        raise EstimateError("experts do not compute beside this memory", where=hardware.file, do="give other hardware")
    return t_ndp(parameters, effective_bits(bits, group_size, zero_points, codebook), 1, hardware.ndp).seconds


def t_gpu(parameters: int, bits: ArrayLike, tokens: ArrayLike, gpu: Gpu) -> Cost:
    """One expert from GPU memory: max(P*b'/8 / (eta_h*BW_h), 2*P*m / (eta_c*F))."""
    m = np.asarray(tokens, dtype=np.float64) * (np.asarray(bits) > 0)  # dropped ones are given nothing
    read = parameters * np.asarray(bits, dtype=np.float64) / 8 * (m > 0)
    return _longer(
        memory=read / gpu.memory_rate,
        compute=2 * parameters * m / gpu.compute_rate,
        moved=read,
        macs=parameters * m,
    )


def t_fetch(num_bytes: ArrayLike, transfers: ArrayLike, hardware: Hardware) -> Cost:
    """Bytes from the NDP's memory over the link in a number of transfers: bytes/(eta_p*BW_p) + n*latency.

    A memory that is slower than the link (an SSD) sets the pace.
    """
    link = hardware.all_links
    return _transfer(num_bytes, transfers, min(link.rate, hardware.ndp.memory_rate), link.latency_seconds)


def t_act(hidden_size: int, tokens: ArrayLike, link: Link) -> Cost:
    """FP16 activations of m tokens to the NDP and back: 2*(2*m*d/(eta_p*BW_p) + latency); none for m = 0."""
    m = np.asarray(tokens, dtype=np.float64)
    return _transfer(2 * 2 * m * hidden_size, 2.0 * (m > 0), link.rate, link.latency_seconds)


def _transfer(num_bytes: ArrayLike, transfers: ArrayLike, rate: float, latency_seconds: float) -> Cost:
    moved = np.asarray(num_bytes, dtype=np.float64)
    stream = moved / rate
    latency = np.asarray(transfers, dtype=np.float64) * latency_seconds
    stream, latency, moved = np.broadcast_arrays(stream, latency, moved)
    seconds = stream + latency
    bound = _code(seconds, latency > stream, Bound.LATENCY)
    return Cost(seconds=seconds, bytes=moved, macs=np.zeros_like(seconds), bound=bound)


def t_dense(
    geometry: ModelGeometry,
    *,
    tokens: float,
    sequences: int,
    context: ArrayLike,
    hardware: Hardware,
    prompt: bool = False,
) -> Cost:
    """All of a layer but its experts: tau + max((non-expert bytes/L + KV)/(eta_h*BW_h), FLOPs/(eta_c*F)).

    Dense layers are divided among the MoE layers, with their own tau, keys and values. Several GPUs exchange the FP16
    activations of all tokens twice a layer beside that.

    `tokens` query tokens of `sequences` sequences attend to `context` tokens each; prompt: they are whole prompts of
    `context` tokens, each of which attends to those before it. Shape: that of `context`.
    """
    read_and_again = geometry.non_expert_parameters + geometry.visited_parameters
    gpu, share = hardware.all_gpus, read_and_again / geometry.num_layers
    attended = np.asarray(context, dtype=np.float64)
    read = geometry.other_bits / 8 * share + sequences * geometry.kv_bytes_per_layer(attended, prompt=prompt)
    macs = tokens * (share + geometry.attention_macs(attended, prompt=prompt))
    cost = _longer(
        memory=read / gpu.memory_rate,
        compute=2 * macs / gpu.compute_rate,
        moved=read,
        macs=macs,
    )
    fixed = gpu.layer_overhead_seconds
    if hardware.gpus is not None:
        fixed += 2 * hardware.gpus.exchange_seconds(2 * tokens * geometry.hidden_size)
    fixed *= geometry.all_layers / geometry.num_layers
    bound = np.where(fixed > cost.seconds, Bound.LATENCY, cost.bound).astype(np.int8)
    return Cost(seconds=cost.seconds + fixed, bytes=cost.bytes, macs=cost.macs, bound=bound)


def _longer(*, memory: Any, compute: Any, moved: Any, macs: Any) -> Cost:
    memory, compute, moved, macs = np.broadcast_arrays(memory, compute, moved, macs)
    seconds = np.maximum(memory, compute)
    return Cost(seconds=seconds, bytes=moved, macs=macs, bound=_code(seconds, compute > memory, Bound.MACS))


def _code(seconds: FloatArray, other_is_longer: NDArray[np.bool_], other: Bound) -> NDArray[np.int8]:
    """BYTES, or the other bound where that is the longer; NONE where there is no time at all."""
    code = np.where(other_is_longer, np.int8(other), np.int8(Bound.BYTES))
    code *= seconds > 0
    return code
