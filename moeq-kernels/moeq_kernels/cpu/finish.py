"""What is done with the products of some blocks: bias, activation and gate, or the weighted sum; compiled.

Letters as in `schedule`.
"""

from __future__ import annotations

import math

import numpy as np

from moeq_kernels.cpu.columns import BIAS, COUNT, EXPERT, FIRST, LANES, ROWS
from moeq_kernels.cpu.kept_code import internal
from moeq_kernels.cpu.memory import float_of

# what is done with the products
PRODUCTS, WEIGHTED, SILU, GELU, GELU_TANH, RELU = range(6)
ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu": GELU, "gelu_pytorch_tanh": GELU_TANH, "gelu_new": GELU_TANH,
               "relu": RELU}  # fmt: skip
_compile = internal()


@_compile  # type: ignore[untyped-decorator]
def _exp(value):  # type: ignore[no-untyped-def]
    """e to the power of a float32, to 2e-7 of it, in operations that vectors have; Cephes' polynomial."""
    held = min(max(value, np.float32(-87.0)), np.float32(88.0))
    whole = np.floor(held * np.float32(1.44269504) + np.float32(0.5))
    rest = held - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    power = np.float32(1.9875691500e-4)
    power = power * rest + np.float32(1.3981999507e-3)
    power = power * rest + np.float32(8.3334519073e-3)
    power = power * rest + np.float32(4.1665795894e-2)
    power = power * rest + np.float32(1.6666665459e-1)
    power = power * rest + np.float32(5.0000001201e-1)
    power = power * rest * rest + rest + np.float32(1)
    return power * float_of(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))


@_compile  # type: ignore[untyped-decorator]
def _activate(kind, values):  # type: ignore[no-untyped-def]
    """The activation function of some float32 in their place."""
    one, half = np.float32(1), np.float32(0.5)
    if kind == SILU:
        for k in range(values.shape[0]):
            values[k] = values[k] / (one + _exp(-values[k]))
    elif kind == GELU_TANH:
        factor, cubed = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)
        for k in range(values.shape[0]):
            value = values[k]
            values[k] = value / (one + _exp(-factor * (value + cubed * value * value * value)))
    elif kind == GELU:
        for k in range(values.shape[0]):
            values[k] = half * values[k] * (one + np.float32(math.erf(values[k] * np.float32(math.sqrt(0.5)))))
    else:
        for k in range(values.shape[0]):
            values[k] = max(values[k], np.float32(0))


@_compile  # type: ignore[untyped-decorator]
def finish(end, products, tile, block, width, stage, weights, per_token, out, biased):  # type: ignore[no-untyped-def]
    """What is done with the products [C, size * width] of a tile and some blocks, of which `block` is the first."""
    table, tiles, order = stage[:3]
    expert, first, rows = tiles[tile, EXPERT], tiles[tile, FIRST], tiles[tile, COUNT]
    begin, matrices = block * LANES, table.shape[1]
    for which in range(matrices):
        count, bias = min(width, table[expert, which, ROWS] - begin), table[expert, which, BIAS]
        if bias >= 0:
            added = biased[bias + begin : bias + begin + count]
            for row in range(rows):
                values = products[which, row * width : row * width + count]
                for lane in range(count):
                    values[lane] += added[lane]
        if end == PRODUCTS:
            for row in range(rows):
                into = out[which, first + row, begin : begin + count]
                values = products[which, row * width : row * width + count]
                for lane in range(count):
                    into[lane] = values[lane]
    count = min(width, table[expert, 0, ROWS] - begin)
    if end == WEIGHTED:
        for row in range(rows):
            place = order[first + row]
            weight, into = weights[place], out[0, place // per_token, begin : begin + count]
            values = products[0, row * width : row * width + count]
            for lane in range(count):
                into[lane] += weight * values[lane]
    elif end > WEIGHTED:
        for row in range(rows):
            into = out[0, first + row, begin : begin + count]
            values = products[0, row * width : row * width + count]
            others = products[matrices - 1, row * width : row * width + count]
            _activate(end, values)
            for lane in range(count):
                into[lane] = values[lane] * others[lane] if matrices > 1 else values[lane]
