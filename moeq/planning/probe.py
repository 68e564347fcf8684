"""A few seconds of measuring: how fast this machine does what the stages will ask of it, at the model's own shapes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from moeq.artifacts.files import sync
from moeq.artifacts.storage import storage_errors
from moeq.models.experts import ExpertLayer, ExpertMath
from moeq.models.walk import LayerInputs
from moeq.numerics import gptq
from moeq.numerics.packed import PackedWeight
from moeq.planning.sizes import ModelSizes, Work
from moeq.quantizers.layer import quantize_layer
from moeq.quantizers.layer_data import SAMPLE_TOKENS, heldout_stride
from moeq.quantizers.quantizer import WEIGHT_OPERATIONS, BatchSizes
from moeq.recipe import LossesSection, Recipe
from moeq.registry import QUANTIZERS

SECONDS = 0.4  # of each measurement, about
SLICE_BYTES = 64 << 20  # read of the checkpoint and written beside the run
MOST_OPERATIONS = 3e10  # of the experts in the probe of losses: larger ones are scaled down
PASSES = 40  # elementwise operations over the hidden states in one decoder layer: norms, rotary, residuals, softmax


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What was measured.

    matrix_flops: floating-point operations a second of products in the computing dtype, a batch of tokens wide;
    expert_seconds: one expert's forward on its share of a batch; attention_seconds: one layer's attention over a batch;
    elementwise_bytes: bytes a second of one pass over the hidden states; losses_flops: operations a second of `losses`
    (replicas, losses and packing together, float32); dequantized_weights: weights a second; bytes a second of reading
    the checkpoint from the disk and again from the page cache, of writing and of hashing.
    """

    matrix_flops: float
    expert_seconds: float
    attention_seconds: float
    elementwise_bytes: float
    losses_flops: float
    dequantized_weights: float
    read_bytes: float
    cached_bytes: float
    write_bytes: float
    hash_bytes: float


def measure(
    sizes: ModelSizes, work: Work, recipe: Recipe, files: list[Path], out: Path, device: torch.device
) -> tuple[Rates, Rates]:
    """Measure every rate, a second of the clock and a second of the processor; StorageError when `out` cannot be
    written."""
    tokens = work.calibration.batch_tokens
    read, cached = _reading(max(files, key=lambda path: path.stat().st_size))
    found = {
        "matrix_flops": _matrix_flops(sizes, tokens, device),
        "expert_seconds": _expert_seconds(sizes, expert_tokens(sizes, tokens), device),
        "attention_seconds": _attention_seconds(sizes, work, device),
        "elementwise_bytes": _elementwise(sizes, tokens, device),
        "losses_flops": _losses_flops(sizes, work, recipe.losses, device),
        "dequantized_weights": _dequantizing(sizes, recipe.losses, device),
        "read_bytes": read,
        "cached_bytes": cached,
        "write_bytes": _writing(out),
        "hash_bytes": _hashing(),
    }
    wall, processor = ({name: float(value[clock]) for name, value in found.items()} for clock in (0, 1))
    return Rates(**wall), Rates(**processor)


def _now() -> np.ndarray:
    """Both clocks: that on the wall and the processor seconds of all threads, [2]."""
    return np.array([time.perf_counter(), time.process_time()])


def _since(before: np.ndarray) -> np.ndarray:
    """Seconds by both clocks, [2]; what no clock could tell from nothing is a microsecond."""
    taken: np.ndarray = (_now() - before).clip(1e-6)
    return taken


def expert_tokens(sizes: ModelSizes, tokens: int) -> int:
    """Mean number of a batch's tokens that one expert is given."""
    return max(1, tokens * sizes.top_k // sizes.layers[0].num_experts)


def _seconds(action: Callable[[], object], device: torch.device, limit: float = SECONDS) -> np.ndarray:
    """Seconds of one call by both clocks, the mean of those that fit into the limit (the first warms up, if there are
    more)."""
    taken: list[np.ndarray] = []
    started = time.perf_counter()
    while not taken or time.perf_counter() - started < limit:
        begun = _now()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(_since(begun))
    found: np.ndarray = np.mean(taken[1:] or taken, axis=0)
    return found


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).mul_(shape[-1] ** -0.5).to(dtype)


def _matrix_flops(sizes: ModelSizes, tokens: int, device: torch.device) -> np.ndarray:
    rows = min(tokens, 2048)
    hidden = _random(rows, sizes.hidden_size, dtype=sizes.dtype, device=device)
    weight = _random(sizes.hidden_size, sizes.hidden_size, dtype=sizes.dtype, device=device)
    seconds = _seconds(lambda: nn.functional.linear(hidden, weight), device)
    return 2 * rows * sizes.hidden_size**2 / seconds


def _expert_seconds(sizes: ModelSizes, tokens: int, device: torch.device) -> np.ndarray:
    """One expert's forward; measured on at most 512 tokens, beyond which time grows with the tokens."""
    layer = sizes.layers[0]
    rows = min(tokens, 512)
    hidden = _random(rows, layer.hidden_size, dtype=sizes.dtype, device=device)
    wide = (len(layer.projections) - 1) * layer.intermediate_size
    first = _random(wide, layer.hidden_size, dtype=sizes.dtype, device=device)
    second = _random(layer.hidden_size, layer.intermediate_size, dtype=sizes.dtype, device=device)

    def forward() -> Tensor:
        inner = nn.functional.linear(hidden, first).unflatten(-1, (-1, layer.intermediate_size))
        return nn.functional.linear(nn.functional.silu(inner).prod(-2), second)

    return _seconds(forward, device) * tokens / rows


def _attention_seconds(sizes: ModelSizes, work: Work, device: torch.device) -> np.ndarray:
    """Attention of one sequence, times the sequences of a batch."""
    text = work.calibration
    one = _random(1, sizes.num_heads, text.length, sizes.head_dim, dtype=sizes.dtype, device=device)
    seconds = _seconds(lambda: nn.functional.scaled_dot_product_attention(one, one, one, is_causal=True), device)
    return seconds * min(text.batch, text.sequences)


def _elementwise(sizes: ModelSizes, tokens: int, device: torch.device) -> np.ndarray:
    rows = min(tokens, 8192)
    hidden = _random(rows, sizes.hidden_size, dtype=sizes.dtype, device=device)
    seconds = _seconds(lambda: hidden * hidden, device, SECONDS / 4)
    return rows * sizes.hidden_size * sizes.dtype.itemsize / seconds


def losses_operations(layer: ExpertLayer, tokens: float, heldout: float, section: LossesSection, sample: int) -> float:
    """Floating-point operations of `losses` for one expert; `tokens` of its own to calibrate, `heldout` to measure.

    What the quantizers say of themselves, and the measured outputs.
    """
    hidden, inner, widths = layer.hidden_size, layer.intermediate_size, len(section.bits)
    first = len(layer.projections) - 1
    one = BatchSizes(layer=layer, settings=section, experts=1, tokens=tokens, lent=sample)
    total: float = sum(part.operations(one) for method in section.methods for part in QUANTIZERS.get(method).chain())
    products = 2 * first + 2 if section.per_projection else first + 1
    rows = min(heldout, section.max_measured_tokens)
    total += 2 * rows * hidden * inner * (first + 1 + products * widths * len(section.methods))
    weights = layer.parameters_per_expert * widths * len(section.methods)
    return total + WEIGHT_OPERATIONS * weights


def _losses_flops(sizes: ModelSizes, work: Work, section: LossesSection, device: torch.device) -> np.ndarray:
    """`quantize_layer` itself on a few experts, scaled down in both sizes and tokens where one of them is too much.

    Products of a method that starts from another's codes run at the rate of that one's.
    """
    first = dict.fromkeys(QUANTIZERS.get(method).chain()[0] for method in section.methods)
    kept = [one for one in first if one.stored][:1]
    methods = [one.name for one in first if one in kept or not one.stored]
    section = section.model_copy(update={"min_tokens": 1, "methods": methods})
    layer = max(sizes.layers, key=lambda one: one.parameters_per_expert)
    tokens, heldout = losses_tokens(sizes, work, section)
    shrink = 1
    while True:
        small = replace(
            layer,
            index=0,
            name="probe",
            biased=False,
            hidden_size=max(8, layer.hidden_size // shrink),
            intermediate_size=max(8, layer.intermediate_size // shrink),
        )
        few = (max(2, int(tokens // shrink)), max(2, int(heldout // shrink)))
        operations = losses_operations(small, *few, section, min(SAMPLE_TOKENS, few[0]))
        if operations <= MOST_OPERATIONS or shrink >= 64:
            break
        shrink *= 2
    experts = max(1, min(layer.num_experts, int(MOST_OPERATIONS / operations)))
    stride = heldout_stride(section.heldout_fraction)
    tiny = replace(small, num_experts=1, hidden_size=8, intermediate_size=8)
    _quantizing(tiny, 2 * stride, section, device)()  # the column loop may have to be compiled
    work_once = _quantizing(replace(small, num_experts=experts), experts * sum(few), section, device)
    seconds = _seconds(work_once, device, 2 * SECONDS)
    return experts * operations / seconds


def _quantizing(layer: ExpertLayer, tokens: int, section: LossesSection, device: torch.device) -> Callable[[], object]:
    """`quantize_layer` on random weights and tokens, each of which one expert is given."""
    experts = layer.num_experts
    inputs = LayerInputs(
        layer=layer,
        hidden=_random(tokens, layer.hidden_size, dtype=torch.float32, device=device),
        experts=torch.randint(experts, (tokens, 1), device=device),
        weights=torch.ones(tokens, 1, device=device),
        sequence=torch.arange(tokens),
        position=torch.zeros(tokens, dtype=torch.long),
    )
    weights = {
        name: _random(experts, *layer.shape(name), dtype=torch.float32, device=device) for name in layer.projections
    }
    math = ExpertMath(gate=lambda products: nn.functional.silu(torch.stack(list(products.values()))).prod(0))
    return lambda: quantize_layer(inputs, weights, math, section)


def losses_tokens(sizes: ModelSizes, work: Work, section: LossesSection) -> tuple[float, float]:
    """Mean calibration and held-out tokens of an expert."""
    share = sizes.top_k / sizes.layers[0].num_experts
    calibration = work.calibration.tokens * (1 - section.heldout_fraction)
    heldout = work.calibration.tokens * section.heldout_fraction
    return calibration if section.tokens == "all" else calibration * share, heldout * share


def _dequantizing(sizes: ModelSizes, section: LossesSection, device: torch.device) -> np.ndarray:
    """Mean over the widths of the recipe, on the rows of one matrix that make a million weights."""
    layer = sizes.layers[0]
    rows, inputs = layer.shape(layer.projections[0])
    rows = max(1, min(rows, 2**20 // inputs))
    weight = _random(1, rows, inputs, dtype=torch.float32, device=device)
    made = gptq.quantize(weight, None, bits=section.bits, group_size=section.group_size, symmetric=section.symmetric)
    packed = [PackedWeight.of(made, bits, section.symmetric) for bits in section.bits]
    seconds = _seconds(lambda: [one.dequantize(sizes.dtype) for one in packed], device)
    return rows * inputs * len(packed) / seconds


def _reading(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Bytes a second from the disk, the file's pages dropped first as far as the kernel lets us, and from the cache."""
    size = min(SLICE_BYTES, path.stat().st_size)
    with storage_errors(path, "read"), path.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
        found = []
        for _ in range(2):
            stream.seek(0)
            started = _now()
            left = size
            while left > 0 and (chunk := stream.read(min(left, 4 << 20))):
                left -= len(chunk)
            found.append(size / _since(started))
    return found[0], np.maximum(*found)


def _writing(out: Path) -> np.ndarray:
    """Bytes a second of writing and syncing a file on the disk of the run directory."""
    folder = existing(out)
    data = os.urandom(4 << 20)
    with storage_errors(folder), tempfile.NamedTemporaryFile(dir=folder, prefix=".moeq-plan-") as stream:
        started = _now()
        for _ in range(SLICE_BYTES // len(data)):
            stream.write(data)
        stream.flush()
        sync(Path(stream.name))
        return SLICE_BYTES / _since(started)


def existing(path: Path) -> Path:
    """The path itself or its nearest parent that is there."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _hashing() -> np.ndarray:
    import hashlib

    data = bytes(16 << 20)
    started = _now()
    hashlib.sha256(data).hexdigest()
    return len(data) / _since(started)
