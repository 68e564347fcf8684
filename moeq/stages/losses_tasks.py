"""losses by workers: a layer's experts in groups, quantized by tasks while the model runs on to the next layer.

What a worker computes with, values, strides and threads, is what one process would compute with, so that replicas and
rows have the same bytes however many workers there are. Where the model is on a GPU, every worker has a GPU to itself.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from moeq.artifacts.replicas import Made
from moeq.engine.task import Engine, Resources, Shared, Task, falling_groups, named
from moeq.errors import ModelError, RecipeError
from moeq.models.experts import ExpertLayer, ExpertMath, expert_math, stacked_biases, stacked_weights
from moeq.models.walk import LayerInputs
from moeq.quantizers.layer import LayerResult, expert_batches, quantize_experts
from moeq.quantizers.layer_data import RoutedTokens
from moeq.recipe import LossesSection
from moeq.registry import QUANTIZERS
from moeq.stages import workers
from moeq.stages.context import Context
from moeq_kernels.packed import PackedWeight, joined
from moeq_kernels.widths import Encoding

PARTS_A_WORKER = 4  # tasks of a layer for each of several: the last ones, which are small, leave little idle
WEIGHTS, BIASES, TOKENS = "weights.", "biases.", "tokens."  # names of what is put
SHARED = "shared"  # mean of x x^T over the layer's calibration tokens
PRELOAD = (__name__, *workers.PRELOAD)
Keep = Callable[[int, Sequence[Made], LayerResult], None]  # stores what was made of a layer


@dataclass(frozen=True, kw_only=True)
class Group:
    """Some experts of a layer at some widths: what a task is given. key: of what was put for the layer; device: the
    kind of device on which it computes, the first that the worker sees; seed: the recipe's."""

    key: str
    device: str
    layer: ExpertLayer
    math: ExpertMath
    section: LossesSection
    experts: range
    left_out: int
    seed: int = 0


def section_of(section: LossesSection, made: Sequence[Made]) -> LossesSection:
    """The section for what one call makes."""
    return section.model_copy(
        update={
            "bits": list(dict.fromkeys(one.bits for one in made)),
            "methods": list(dict.fromkeys(one.method for one in made)),
        }
    )


def split(
    layer: ExpertLayer, section: LossesSection, count: int, device: torch.device | str = "cpu"
) -> list[tuple[range, LossesSection]]:
    """Groups of experts, as many as keep the workers busy, one for a single worker, and as small as working memory
    wants; where experts are fewer than workers, by width too, unless the codes of one width are those of another."""
    first = next(expert_batches(layer, section, device))
    experts = expert_groups(layer.num_experts, count, most=first.stop - first.start)
    apart = len(experts) < count and len(section.bits) > 1 and not section.nested
    widths = [section.model_copy(update={"bits": [bits]}) for bits in section.bits] if apart else [section]
    return list(product(experts, widths))


def expert_groups(experts: int, count: int, most: int | None = None) -> list[range]:
    """What so many workers are given of a layer's experts, one after the other; most: experts of a group."""
    return falling_groups(experts, 1 if count == 1 else PARTS_A_WORKER * count, most)


@contextmanager
def working(context: Context, keep: Keep, ahead: int) -> Iterator[Ahead | None]:
    """The workers that a recipe asks for, ended with the block; None without. ahead: see `Ahead`."""
    device = context.model.device
    count = workers.worker_count(context.recipe, device)
    if count is None:
        yield None
        return
    with workers.working(context, count, PRELOAD) as engine:
        yield Ahead(engine, context.recipe.losses, keep, ahead, device, seed=context.recipe.seed)


def check(context: Context) -> None:
    """RecipeError for more workers of this machine than it has GPUs, where the model is on one, and for a cluster
    without workers, which would be given nothing."""
    recipe, there = context.recipe, len(workers.gpus(context.model.device))
    if recipe.engine != workers.PROCESSES and workers.worker_count(recipe, context.model.device) is None:
        do = "set workers, or leave engine out"
        raise RecipeError("there are no workers to be where it says", where=f"engine: {recipe.engine}", do=do)
    if there and recipe.workers is not None and recipe.workers > there and recipe.engine == workers.PROCESSES:
        what = f"{recipe.workers} workers for {there} {'GPU' if there == 1 else 'GPUs'}, and each has one to itself"
        raise RecipeError(what, where="workers", do=f"use at most {there}, or set device: cpu")


@dataclass(kw_only=True)
class _Layer:
    """A layer that was handed out: what was put for it, and the tickets of every call's tasks."""

    index: int
    shared: list[Shared]
    calls: list[tuple[Sequence[Made], LossesSection, list[int]]]


class Ahead:
    """Layers whose experts workers quantize while the model runs on: one is gathered and stored when `ahead` later ones
    have been handed out."""

    def __init__(
        self,
        engine: Engine,
        section: LossesSection,
        keep: Keep,
        ahead: int,
        device: torch.device | str = "cpu",
        *,
        seed: int = 0,
    ) -> None:
        self._engine, self._section, self._keep, self.ahead, self._seed = engine, section, keep, ahead, seed
        self._device = torch.device(device)
        self._out: deque[_Layer] = deque()

    def add(self, module: torch.nn.Module, inputs: LayerInputs, calls: Sequence[Sequence[Made]]) -> None:
        """Hand a layer out: copies of its inputs and its experts' weights are what workers see."""
        layer, math = inputs.layer, expert_math(module, inputs.layer)
        check_sendable(math, layer)
        tokens = self._engine.put(_tokens_and_hessian(inputs, self._section, calls))
        there: dict[range, Shared] = {}
        handed = _Layer(index=layer.index, shared=[tokens], calls=[])
        for made in calls:
            section, tickets = section_of(self._section, made), []
            for experts, own in split(layer, section, self._engine.workers, self._device):
                if experts not in there:
                    there[experts] = self._engine.put(_experts(module, layer, experts))
                    handed.shared.append(there[experts])
                group = Group(
                    key=tokens.key,
                    device=self._device.type,
                    layer=layer,
                    math=math,
                    section=own,
                    experts=experts,
                    left_out=inputs.left_out,
                    seed=self._seed,
                )
                task = Task(
                    name=f"{layer.name}, {named(experts)}",
                    function=quantize_group,
                    arguments=group,
                    shared=(tokens, there[experts]),
                    resources=self._takes(group_bytes(layer, own, len(experts), self._device)),
                )
                tickets.append(self._engine.submit(task))
            handed.calls.append((made, section, tickets))
        self._out.append(handed)

    def _takes(self, size: int) -> Resources:
        return Resources(ram_bytes=size) if self._device.type == "cpu" else Resources(gpu_bytes=size)

    def finished(self, left: int) -> Iterator[None]:
        """Gather and store layers, the first first, until so many are still out; yields after each."""
        while len(self._out) > left:
            handed = self._out.popleft()
            for made, section, tickets in handed.calls:
                parts = [_result(one.value, one.tensors) for one in self._engine.gather(tickets)]
                self._keep(handed.index, made, joined_results(parts, section.bits))
            for shared in handed.shared:
                self._engine.drop(shared)
            yield


def _experts(module: torch.nn.Module, layer: ExpertLayer, experts: range) -> dict[str, Tensor]:
    """What the tasks of a group read beside: their experts' weights and biases."""
    which = slice(experts.start, experts.stop)
    weights, biases = stacked_weights(module, layer, which), stacked_biases(module, layer, which)
    given = {f"{WEIGHTS}{name}": stack for name, stack in weights.items()}
    return _handed(given | {f"{BIASES}{name}": stack for name, stack in biases.items()})


def _handed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in main memory, from where every worker reads them."""
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _tokens_and_hessian(
    inputs: LayerInputs, section: LossesSection, calls: Sequence[Sequence[Made]]
) -> dict[str, Tensor]:
    """What every task of a layer reads: tokens, and the Hessian that experts share, which is computed here once."""
    given = {
        f"{TOKENS}hidden": inputs.hidden,
        f"{TOKENS}experts": inputs.experts,
        f"{TOKENS}weights": inputs.weights,
        f"{TOKENS}sequence": inputs.sequence,
        f"{TOKENS}position": inputs.position,
    }
    methods = {made.method for call in calls for made in call}
    if any(QUANTIZERS.get(method).knows_hessians for method in methods):
        given[SHARED] = RoutedTokens.of(inputs, section).shared
    return _handed(given)


def check_sendable(math: ExpertMath, layer: ExpertLayer) -> None:
    """ModelError where what an expert computes beside its matrices cannot be handed to another process."""
    try:
        pickle.dumps(math)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        what = f"what its experts compute cannot be handed to workers ({error})"
        raise ModelError(what, where=layer.name, do="leave workers out") from None


_tokens: dict[str, RoutedTokens] = {}  # of the layer that this worker does, by the key of what was put


def quantize_group(group: Group, tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """The task: rows and replicas of a group, these as (projection, bits, inputs, encoding) beside their tensors."""
    result = quantize_experts(
        _tokens_of(group, tensors),
        group.layer,
        group.experts,
        _there(_named(tensors, WEIGHTS), group.device),
        group.math,
        group.section,
        _there(_named(tensors, BIASES), group.device),
        seed=group.seed,
    )
    made: dict[str, Tensor] = {}
    described: list[tuple[str, int, int, Encoding]] = []
    for projection, widths in result.replicas.items():
        for bits, weight in widths.items():
            described.append((projection, bits, weight.inputs, weight.encoding))
            made |= {f"{projection}.{bits}.{part}": tensor.cpu() for part, tensor in weight.parts().items()}
    return (result.rows, described), made


def _there(tensors: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    """Tensors on the first device of a kind that this process sees."""
    return tensors if device == "cpu" else {name: tensor.to(f"{device}:0") for name, tensor in tensors.items()}


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _tokens_of(group: Group, tensors: Mapping[str, Tensor]) -> RoutedTokens:
    """The layer's tokens, split and sampled once in every worker."""
    if group.key not in _tokens:
        _tokens.clear()
        own = _there(_named(tensors, TOKENS), group.device)
        tokens = RoutedTokens.of(LayerInputs(layer=group.layer, left_out=group.left_out, **own), group.section)
        if SHARED in tensors:  # which is computed when it is first asked for otherwise
            tokens.__dict__.update(_there({SHARED: tensors[SHARED]}, group.device))
        _tokens[group.key] = tokens
    return _tokens[group.key]


def _result(value: Any, tensors: Mapping[str, Tensor]) -> LayerResult:
    """What a task gave, as `quantize_experts` had it."""
    rows, described = value
    replicas: dict[str, dict[int, PackedWeight]] = {}
    for projection, bits, inputs, encoding in described:
        parts = _named(tensors, f"{projection}.{bits}.")
        replicas.setdefault(projection, {})[bits] = PackedWeight.of(parts, bits, inputs, encoding)
    return LayerResult(rows=rows, replicas=replicas)


def joined_results(parts: Sequence[LayerResult], widths: Sequence[int]) -> LayerResult:
    """The results of consecutive groups as one: experts, of each the widths, in their order."""
    replicas: dict[str, dict[int, PackedWeight]] = {}
    for projection in dict.fromkeys(name for part in parts for name in part.replicas):
        replicas[projection] = {
            bits: joined([part.replicas[projection][bits] for part in parts if bits in part.replicas[projection]])
            for bits in widths
        }
    return LayerResult(rows=[row for part in parts for row in part.rows], replicas=replicas)


def group_bytes(layer: ExpertLayer, section: LossesSection, experts: int, device: torch.device | str = "cpu") -> int:
    """Bytes of float32 weights, Hessians, residuals and codes of a group's largest batch, as `expert_batches` counts
    them."""
    first = next(expert_batches(layer, section, device, range(experts)))
    hidden, inter, widths = layer.hidden_size, layer.intermediate_size, len(section.bits)
    one: int = 4 * 3 * (hidden**2 + inter**2) + layer.parameters_per_expert * (4 + widths * 10)
    size: int = (first.stop - first.start) * one
    return size
