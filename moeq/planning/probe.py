"""A few seconds of measuring: how fast this machine does what the stages will ask of it, at the model's own shapes."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from moeq.artifacts.files import sync
from moeq.artifacts.storage import storage_errors
from moeq.models.experts import ExpertLayer, ExpertMath
from moeq.models.walk import LayerInputs
from moeq.numerics import gptq
from moeq.numerics.storing import packed_of
from moeq.quantizers.layer import quantize_layer
from moeq.quantizers.layer_data import SAMPLE_TOKENS, heldout_stride
from moeq.recipe import LossesSection
from moeq.registry import QUANTIZERS
from moeq.stages.needs import Rates, Sizes
from moeq.stages.needs_losses import expert_tokens, losses_operations
from moeq.stages.workers import worker_count, worker_threads

SECONDS = 0.4  # of each measurement, about
SLICE_BYTES = 64 << 20  # read of the checkpoint and written beside the run
MOST_OPERATIONS = 3e10  # of the experts in the probe of losses: larger ones are scaled down


def measure(sizes: Sizes, out: Path) -> tuple[Rates, Rates]:
    """Every rate by the clock and in processor time; StorageError when `out` cannot be written."""
    device, dtype, text, layer = sizes.device, sizes.dtype, sizes.calibration, sizes.layers[0]
    width, tokens = sizes.geometry.hidden_size, sizes.expert_tokens(text.batch_tokens)
    hidden, square = (
        _random(device, min(text.batch_tokens, 2048), width).to(dtype),
        _random(device, width, width).to(dtype),
    )
    routed = _random(device, min(tokens, 512), layer.hidden_size).to(dtype)  # beyond which time grows with the tokens
    inner, products = layer.intermediate_size, len(layer.projections) - 1
    first = _random(device, products * inner, layer.hidden_size).to(dtype)
    second = _random(device, layer.hidden_size, inner).to(dtype)

    def expert() -> Tensor:
        gated = nn.functional.silu(nn.functional.linear(routed, first).unflatten(-1, (products, inner)))
        return nn.functional.linear(gated.prod(-2), second)

    operations = 2 * square.numel() * len(hidden)
    read, cached = _reading_weights(sizes, out)
    rates = {
        "matrix_flops": operations / _seconds(lambda: nn.functional.linear(hidden, square), device),
        "expert_seconds": _seconds(expert, device) * tokens / len(routed),
        "elementwise_bytes": hidden.nbytes / _seconds(lambda: hidden * hidden, device, SECONDS / 4),
        "losses_flops": _by_a_worker(sizes),
        "dequantized_weights": _dequantizing(sizes),
        "read_bytes": read,
        "cached_bytes": cached,
        "write_bytes": _writing(out),
        "hash_bytes": (16 << 20) / _seconds(lambda: hashlib.sha256(bytes(16 << 20)), device, 0),
    }
    clock, processor = (Rates(**{name: float(value[which]) for name, value in rates.items()}) for which in (0, 1))
    return clock, processor


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).mul_(shape[-1] ** -0.5)


def _seconds(action: Callable[[], object], device: torch.device, limit: float = SECONDS) -> np.ndarray:
    """Seconds of one call on the wall and of the processor in all threads, [2]: the mean of those that fit into the
    limit; of several the first warms up.

    What no clock could tell from nothing is a microsecond.
    """
    taken: list[np.ndarray] = []
    started = time.perf_counter()
    while not taken or time.perf_counter() - started < limit:
        begun = time.perf_counter(), time.process_time()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(np.subtract((time.perf_counter(), time.process_time()), begun).clip(1e-6))
    mean: np.ndarray = np.mean(taken[1:] or taken, axis=0)
    return mean


def _by_a_worker(sizes: Sizes) -> np.ndarray:
    """`losses_flops` with the threads of whoever quantizes: this process, or one of its workers."""
    before = torch.get_num_threads()
    if worker_count(sizes.recipe, sizes.device) is not None:
        torch.set_num_threads(worker_threads(sizes.recipe))
    try:
        return losses_flops(sizes)
    finally:
        torch.set_num_threads(before)


def losses_flops(sizes: Sizes) -> np.ndarray:
    """`quantize_layer` itself on a few experts, scaled down in both sizes and tokens where one of them is too much, and
    at one width where the least that a method takes is.

    Products of a method that starts from another's codes run at the rate of that one's.
    """
    section, device = sizes.recipe.losses, sizes.device
    first = dict.fromkeys(QUANTIZERS.get(method).chain()[0] for method in section.methods)
    kept = [quantizer for quantizer in first if quantizer.stored][:1]
    methods = [quantizer.name for quantizer in first if quantizer in kept or not quantizer.stored]
    section = section.model_copy(update={"min_tokens": 1, "methods": methods})
    layer = max(sizes.layers, key=lambda layer: layer.parameters_per_expert)
    step = max(quantizer.sides for quantizer in first)
    least = max(8, step)
    for shrink in (1, 2, 4, 8, 16, 32, 64):
        sides = (size // shrink // step * step for size in (layer.hidden_size, layer.intermediate_size))
        hidden, inner = (max(least, size) for size in sides)
        small = replace(layer, index=0, name="probe", biased=False, hidden_size=hidden, intermediate_size=inner)
        few = [max(2, int(tokens // shrink)) for tokens in expert_tokens(sizes, section)]
        operations = losses_operations(small, few[0], few[1], section, min(SAMPLE_TOKENS, few[0]))
        if operations <= MOST_OPERATIONS:
            break
    if operations > MOST_OPERATIONS:
        section = section.model_copy(update={"bits": section.bits[:1]})
        operations = losses_operations(small, few[0], few[1], section, min(SAMPLE_TOKENS, few[0]))
    experts = max(1, min(layer.num_experts, int(MOST_OPERATIONS / operations)))
    tiny = replace(small, num_experts=1, hidden_size=least, intermediate_size=least)
    _quantizing(tiny, 2 * heldout_stride(section.heldout_fraction), section, device)()  # which may have to be compiled
    once = _quantizing(replace(small, num_experts=experts), experts * sum(few), section, device)
    return experts * operations / _seconds(once, device, 2 * SECONDS)


def _quantizing(layer: ExpertLayer, tokens: int, section: LossesSection, device: torch.device) -> Callable[[], object]:
    """`quantize_layer` on random weights and tokens, each of which one expert is given."""
    inputs = LayerInputs(
        layer=layer,
        hidden=_random(device, tokens, layer.hidden_size),
        experts=torch.randint(layer.num_experts, (tokens, 1), device=device),
        weights=torch.ones(tokens, 1, device=device),
        sequence=torch.arange(tokens),
        position=torch.zeros(tokens, dtype=torch.long),
    )
    weights = {name: _random(device, layer.num_experts, *layer.shape(name)) for name in layer.projections}
    math = ExpertMath(gate=lambda products: nn.functional.silu(torch.stack(list(products.values()))).prod(0))
    return lambda: quantize_layer(inputs, weights, math, section)


def _dequantizing(sizes: Sizes) -> np.ndarray:
    """Mean over the widths of the recipe, on the rows of one matrix that make a million weights."""
    layer, section, device = sizes.layers[0], sizes.recipe.losses, sizes.device
    rows, inputs = layer.shape(layer.projections[0])
    weight = torch.randn(1, max(1, min(rows, 2**20 // inputs)), inputs, device=device)
    codes = gptq.quantize(weight, None, bits=section.bits, group_size=section.group_size, symmetric=section.symmetric)
    packed = [packed_of(codes, bits, section.symmetric) for bits in section.bits]
    return weight.numel() * len(packed) / _seconds(lambda: [made.dequantize(sizes.dtype) for made in packed], device)


def _reading_weights(sizes: Sizes, out: Path) -> tuple[np.ndarray, np.ndarray]:
    """`_reading` of the model's largest file; of one that is still in the hub, of a file on the disk of the run."""
    here = [path for path in sizes.source.files if sizes.source.name_of(path) not in sizes.source.to_fetch]
    if here:
        return _reading(max(here, key=lambda path: path.stat().st_size))
    folder = existing(out)
    with storage_errors(folder), tempfile.NamedTemporaryFile(dir=folder, prefix=".moeq-plan-") as stream:
        stream.write(bytes(SLICE_BYTES))
        stream.flush()
        sync(Path(stream.name))
        return _reading(Path(stream.name))


def _reading(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Bytes a second from the disk, the file's pages dropped first as far as the kernel lets us, and from the cache."""
    size = min(SLICE_BYTES, path.stat().st_size)
    with storage_errors(path, "read"), path.open("rb", buffering=0) as stream:
        with suppress(io.UnsupportedOperation):  # of an object store
            os.posix_fadvise(stream.fileno(), 0, size, os.POSIX_FADV_DONTNEED)

        def read() -> None:
            stream.seek(0)
            while stream.tell() < size and stream.read(4 << 20):
                pass

        first, again = (size / _seconds(read, torch.device("cpu"), 0) for _ in range(2))
    return first, np.maximum(first, again)


def _writing(out: Path) -> np.ndarray:
    """Bytes a second of writing and syncing a file on the disk of the run directory."""
    folder, data = existing(out), os.urandom(4 << 20)
    with storage_errors(folder), tempfile.NamedTemporaryFile(dir=folder, prefix=".moeq-plan-") as stream:

        def write() -> None:
            for _ in range(SLICE_BYTES // len(data)):
                stream.write(data)
            stream.flush()
            sync(Path(stream.name))

        return SLICE_BYTES / _seconds(write, torch.device("cpu"), 0)


def existing(path: Path) -> Path:
    """The path itself or its nearest parent that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
