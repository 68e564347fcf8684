"""What a model needs of the device's memory beside its experts: paper 001, section 3.5, what M_HBM is left of.

Weights outside of the experts are counted as they lie, packed ones as kernels hold them. Keys, values and states are
counted as the model's own caches hold them, layer by layer, each as far as its window goes (transformers lets go of
what lies before it one token later, where a text was fed at once). Activations are the most that is alive at once in a
forward pass, measured with short texts and carried on to long ones.

Letters: T tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moeq.models.experts import ExpertLayer
from moeq.models.forward import cache_name, drawn_inputs
from moeq.models.messages import quiet_transformers
from moeq.runtime.packed_modules import PackedModule, prepare

WEIGHTS, CACHE, ACTIVATIONS = "weights beside the experts", "keys and values", "activations"
FEW, MANY = 4, 12  # tokens whose caches are compared
LENGTHS = (16, 32, 64)  # tokens whose activations are measured
WINDOWS = ("sliding_window", "max_cache_len")


def other_bytes(model: Any, layers: Sequence[ExpertLayer], *, context: int, batch: int = 1) -> dict[str, int]:
    """Bytes by name for `batch` texts of `context` tokens each, fed at once: WEIGHTS, CACHE and ACTIVATIONS.

    The model runs a few short texts for it: what its experts' modules take while they compute is that of the modules
    that it has, so that a packed model tells it best, or one with `stand_ins`.
    """
    return {
        WEIGHTS: weights_bytes(model, layers),
        CACHE: batch * kept_bytes(model, context),
        ACTIVATIONS: activation_bytes(model, context * batch),
    }


def weights_bytes(model: nn.Module, layers: Sequence[ExpertLayer]) -> int:
    """Parameters and buffers outside of the experts' modules, those that are shared once, and what kernels hold
    instead, which take what is packed first."""
    prepare(model, experts=False)
    within = {id(inner) for layer in layers for inner in model.get_submodule(layer.name).modules()}
    held: dict[int, int] = {}
    for module in model.modules():
        if id(module) not in within:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                held[tensor.data_ptr()] = tensor.nbytes
            if isinstance(module, PackedModule) and module.prepared is not None:
                held[id(module)] = module.prepared.nbytes
    return sum(held.values())


def kept_bytes(model: Any, context: int) -> int:
    """Keys, values and states of one text of so many tokens."""
    few, many = (_kept(model, length) for length in (FEW, MANY))
    whole = 0.0
    for (short, _), (longer, window) in zip(few, many, strict=True):
        most = min(MANY, window - 1 if window else MANY)  # tokens that were kept; the next one makes a window full
        each = max(0.0, (longer - short) / (most - FEW)) if most > FEW else 0.0
        whole += longer + each * (min(context, window or context) - most)
    return max(0, round(whole))


class _StandIn(nn.Module):
    """In the place of experts: zeros, and while they are made room for what kernels take, a row in float32 of every
    matrix's outputs for each expert of a token."""

    def __init__(self, layer: ExpertLayer) -> None:
        super().__init__()
        self.width = sum(layer.shape(projection)[0] for projection in layer.projections)

    def forward(self, hidden: Tensor, *given: Any, **_: Any) -> Tensor:
        chosen = (one.numel() for one in given if isinstance(one, Tensor) and not one.is_floating_point())
        rows = torch.empty(next(chosen, hidden[..., 0].numel()), self.width, device=hidden.device)
        made = torch.zeros_like(hidden)
        del rows
        return made


@contextmanager
def stand_ins(model: nn.Module, layers: Sequence[ExpertLayer]) -> Iterator[None]:
    """The model without its experts, which nothing has been made of yet."""
    before = {layer.name: model.get_submodule(layer.name) for layer in layers}
    try:
        for layer in layers:
            model.set_submodule(layer.name, _StandIn(layer))
        yield
    finally:
        for name, module in before.items():
            model.set_submodule(name, module)


def _drawn(model: Any, length: int) -> dict[str, Tensor]:
    """A text of so many tokens, where the model lies."""
    return {name: one.to(model.device) for name, one in drawn_inputs(model, 1, length, 0).items()}


def _kept(model: Any, length: int) -> list[tuple[int, int | None]]:
    """Bytes of every layer's part of the cache after some tokens, and its window, None: it has none; and what a cache
    has beside its layers (MiniMax's states)."""
    with torch.no_grad(), quiet_transformers():
        cache = getattr(model(**_drawn(model, length), use_cache=True), cache_name(model))
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if model.config.is_encoder_decoder else [cache]
    return [_of_layer(layer) for part in parts for layer in (*part.layers, part)]


def _of_layer(layer: Any) -> tuple[int, int | None]:
    tensors = [found for value in vars(layer).values() for found in _tensors(value)]
    size = sum({one.data_ptr(): one.nbytes for one in tensors if one.numel()}.values())
    windows = [value for name in WINDOWS if isinstance(value := getattr(layer, name, None), int) and value > 0]
    return size, min(windows, default=None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def activation_bytes(model: Any, tokens: int) -> int:
    """The most bytes of tensors alive at once in a forward pass of T tokens, its logits of the last one alone.

    Measured at LENGTHS and carried on as a + b*T + c*T^2, no part of which falls.
    """
    found = [_peak(lambda length=length: _forward(model, length)) for length in LENGTHS]  # type: ignore[misc]
    square, each, least = np.polyfit(LENGTHS, found, 2)
    if square < 0 or abs(square) * LENGTHS[-1] ** 2 < 0.01 * found[-1]:
        square, (each, least) = 0.0, np.polyfit(LENGTHS, found, 1)
    return max(*found, round(float(max(0.0, least) + max(0.0, each) * tokens + square * tokens**2)))


def _forward(model: Any, length: int) -> None:
    options = {} if model.config.is_encoder_decoder else {"logits_to_keep": 1}
    with torch.no_grad(), quiet_transformers():
        try:
            model(**_drawn(model, length), use_cache=False, **options)
        except TypeError:  # a family that always computes all of them
            model(**_drawn(model, length), use_cache=False)


class _Alive(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage().data_ptr() for one in _tensors([args, kwargs or {}])}
        result = func(*args, **(kwargs or {}))
        for made in _tensors(result if isinstance(result, list | tuple) else [result]):
            storage = made.untyped_storage()
            place, size = storage.data_ptr(), storage.nbytes()
            if place not in given and place not in self._seen and size:
                self._seen.add(place)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(made, self._gone, place, size)
        return result

    def _gone(self, place: int, size: int) -> None:
        self._seen.discard(place)
        self.now -= size


def _peak(work: Callable[[], None]) -> int:
    alive = _Alive()
    with alive:
        work()
    return alive.most
