"""The edges of a model: every norm whose output goes into linears and nowhere else, with all of those linears."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from moeq.integers.edges.norms import Norm, find_norms
from moeq.integers.edges.trace import Seen, Trace, Use, traced
from moeq.models.experts import ExpertLayer

_NUMBER = re.compile(r"(?<=[._])\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True)
class Consumer:
    """A parameter that a norm's output is multiplied with.

    weight, bias: names of parameters, bias None for none that could take a shift back; axis: of the weight, along the
    norm's channels; scaled: whether rows are multiplied by numbers on the way.
    """

    weight: str
    axis: int
    bias: str | None
    scaled: bool


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A norm and all that consumes its output."""

    norm: Norm
    consumers: tuple[Consumer, ...]

    def why_no_shift(self) -> str | None:
        """Why the fold must be of scales alone, None when it may shift."""
        if self.norm.bias is None:
            return "the norm has no bias"
        for consumer in self.consumers:
            if consumer.scaled:
                return f"rows are scaled before {consumer.weight}"
            if consumer.bias is None:
                return f"{consumer.weight} has no bias"
        return None


@dataclass(frozen=True, kw_only=True)
class Edges:
    """edges: what can be folded; refused: {norm: why} of norms that feed linears and something else; left: {norm: why}
    of those that feed no linear, or did not run."""

    edges: tuple[Edge, ...]
    refused: dict[str, str]
    left: dict[str, str]


def find_edges(
    model: nn.Module, layers: Sequence[ExpertLayer], blocks: Sequence[str], calls: Sequence[Callable[[], object]]
) -> Edges:
    """Run `calls` (forward passes of the model on few tokens, in float32) and see where the norms' outputs go.

    layers: the MoE layers, so that experts which got no token are consumers too; blocks: paths of the modules that are
    read as they run.
    """
    norms = find_norms(model)
    trace = traced(model, norms, blocks, calls)
    _complete(model, layers, trace)
    edges: list[Edge] = []
    refused: dict[str, str] = {}
    left: dict[str, str] = {}
    for norm in norms:
        consumers = {name: seen for name, seen in trace.parameters.items() if norm.name in seen.fed_by}
        why = _why_not(norm, consumers, trace)
        if not trace.of_norms[norm.name]:
            left[norm.name] = "it did not run"
        elif not consumers:
            left[norm.name] = f"no linear takes its output ({_first(trace.uses[norm.name]) or 'nothing does'})"
        elif why is not None:
            refused[norm.name] = why
        else:
            edges.append(Edge(norm=norm, consumers=_consumers(model, norm, consumers, trace)))
    return Edges(edges=tuple(edges), refused=refused, left=left)


def _first(uses: Iterable[Use]) -> str | None:
    return min(map(str, uses), default=None)


def _why_not(norm: Norm, consumers: dict[str, Seen], trace: Trace) -> str | None:
    """Why a norm with these consumers cannot be folded, None when it can."""
    if trace.uses[norm.name]:
        return f"its output is also used by {_first(trace.uses[norm.name])}"
    for leaf in (norm.weight, norm.bias):
        own = trace.parameters.get(f"{norm.name}.{leaf}", Seen())
        elsewhere = [use for use in own.others if use.module != norm.name]
        if elsewhere:
            return f"its {leaf} is also used by {_first(elsewhere)}"
    for name, seen in consumers.items():
        if seen.others:
            return f"{name}, which it feeds, is also used by {_first(seen.others)}"
        strangers = sorted(set(seen.fed_by) - {norm.name})
        if strangers:
            return f"{name}, which it feeds, is also fed by {strangers[0]}"
        if len(seen.fed_by[norm.name]) > 1:
            return f"it feeds {name} along more than one axis"
    return None


def _consumers(model: nn.Module, norm: Norm, consumers: dict[str, Seen], trace: Trace) -> tuple[Consumer, ...]:
    axes = {name: next(iter(seen.fed_by[norm.name])) for name, seen in consumers.items()}
    biases = {name: _bias(model, name, axes[name], seen, trace) for name, seen in consumers.items()}
    uses = Counter(biases.values())
    return tuple(
        Consumer(
            weight=name,
            axis=axes[name],
            bias=biases[name] if uses[biases[name]] == 1 else None,
            scaled=not seen.exact,
        )
        for name, seen in sorted(consumers.items())
    )


def _bias(model: nn.Module, weight: str, axis: int, seen: Seen, trace: Trace) -> str | None:
    """The parameter that is always added to the weight's product and is nothing else's, None for none."""
    if len(seen.biases) != 1:
        return None
    bias = next(iter(seen.biases))
    if bias is None or trace.parameters.get(bias, Seen()).others:
        return None
    wanted = list(model.get_parameter(weight).shape)
    del wanted[axis]
    return bias if list(model.get_parameter(bias).shape) == wanted else None


def _complete(model: nn.Module, layers: Sequence[ExpertLayer], trace: Trace) -> None:
    """What feeds one expert feeds all: experts with parameters of their own, and identity experts, that no token
    chose."""
    for layer in layers:
        names = [f"{layer.name}.{name}" for name in layer.parameters]
        seen = [name for name in names if name in trace.parameters and trace.parameters[name].fed_by]
        if layer.kind.identity_beyond(model.get_submodule(layer.name)):
            for norm in {norm for name in seen for norm in trace.parameters[name].fed_by}:
                trace.uses[norm].add(Use(operation="identity experts", module=layer.name))
        for name in seen:
            for other in names:
                if other not in trace.parameters and _alike(name) == _alike(other):
                    trace.parameters[other] = _moved(model, trace.parameters[name], other)


def _alike(name: str) -> str:
    """A name without its numbers."""
    return _NUMBER.sub("*", name)


def _moved(model: nn.Module, seen: Seen, other: str) -> Seen:
    """What was seen of one expert's parameter, said of another's."""
    expert = _NUMBER.findall(other)[-1]
    names = dict(model.named_parameters())
    biases = {None if bias is None else _NUMBER.sub(lambda _: expert, bias) for bias in seen.biases}
    return Seen(
        fed_by=seen.fed_by,
        exact=seen.exact,
        biases={bias if bias in names else None for bias in biases},
    )
