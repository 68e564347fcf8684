"""Following what norms give through a forward pass, operation by operation.

A tensor that holds a norm's channels along one dimension is marked. Marks pass through views, gathers and joins of rows
and copies; products with a constant a row keep the mark but take the shift away from it. A matrix product over the
channels with a parameter, or a view of one, makes that parameter a consumer. Whatever else is done to a marked tensor
is a use that the norm cannot be folded past.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from moeq.integers.edges.marks import FOLLOWED, RESHAPES, UNREAD, Mark, follow
from moeq.integers.edges.norms import Norm
from moeq.integers.edges.watching import PRODUCTS, Watching


@dataclass(frozen=True, kw_only=True)
class Use:
    """An operation, and the path of the module that did it."""

    operation: str
    module: str

    def __str__(self) -> str:
        return f"{self.operation} in {self.module or 'the model'}"


@dataclass(kw_only=True)
class Seen:
    """What was seen of a parameter as a consumer: norms that feed it, along which axis; what else is done with it.

    exact: whether its input is always the whole norm output, so that a shift can be taken back by a bias; biases: the
    parameters that are added to its product at once and before anything else, None where there is none.
    """

    fed_by: dict[str, set[int]] = field(default_factory=dict)
    others: set[Use] = field(default_factory=set)
    exact: bool = True
    biases: set[str | None] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """An operation that ran. Of its inputs, by their id: marks, the parameters in whose memory they lie, and the names
    of parameters whose products they hold along their last dimension."""

    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    output: Any
    marks: dict[int, Mark]
    parameters: dict[int, tuple[Tensor, str]]
    products: dict[int, str]


ADDITIONS = {"aten::add", "aten::add_"}


class Trace(Watching):
    """A dispatch mode under which a model runs; `of_norms`, `uses` and `parameters` are what it found.

    of_norms: how often each norm ran; uses: {norm: what cannot be folded past}; parameters: {name: Seen}. Parameters of
    `blocks` are looked up when their block starts to run, since a streamed model reads them just before.
    """

    def __init__(self, model: nn.Module, norms: Sequence[Norm], blocks: Sequence[str]) -> None:
        super().__init__(model, blocks)
        self.model, self.norms = model, {norm.name: norm for norm in norms}
        self.of_norms: dict[str, int] = dict.fromkeys(self.norms, 0)
        self.uses: dict[str, set[Use]] = {name: set() for name in self.norms}
        self.parameters: dict[str, Seen] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._marks: Any = WeakTensorKeyDictionary()
        self._products: Any = WeakTensorKeyDictionary()

    def _listen(self) -> Iterator[RemovableHandle]:
        yield register_module_forward_pre_hook(self._entered)
        yield register_module_forward_hook(self._left, always_call=True)
        for name in self.norms:
            yield self.model.get_submodule(name).register_forward_hook(self._mark_output, with_kwargs=True)

    def _entered(self, module: nn.Module, _: Any) -> None:
        self._stack.append(self._names.get(id(module), type(module).__name__))

    def _left(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()

    def _mark_output(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        norm = self.norms[self._names[id(module)]]
        self.of_norms[norm.name] += 1
        if len(_tensors((args, kwargs))) == 1 and isinstance(output, Tensor) and output.shape[-1] == norm.width:
            self._marks[output] = Mark(norm=norm.name, dim=output.dim() - 1)
        else:
            self.uses[norm.name].add(Use(operation="a call with more than hidden states", module=norm.name))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        call = _Call(
            name=func._schema.name,
            args=args,
            kwargs=kwargs,
            output=output,
            marks={id(tensor): self._marks[tensor] for tensor in given if tensor in self._marks},
            parameters=self._map.among(given),
            products={id(tensor): self._products[tensor] for tensor in given if tensor in self._products},
        )
        if call.name in UNREAD or not (call.marks or call.parameters or call.products):
            return output
        if call.name in PRODUCTS:
            self._product(call)
            self._unbiased(call.products.values())
        elif call.name in ADDITIONS and call.products and not call.marks:
            self._addition(call)
            self._products.pop(output, None)  # where it was added to in place
        else:
            self._follow(call)
        return output

    def _here(self, operation: str) -> Use:
        return Use(operation=operation.removeprefix("aten::"), module=self._stack[-1] if self._stack else "")

    def _of(self, parameter: str) -> Seen:
        return self.parameters.setdefault(parameter, Seen())

    def _unbiased(self, parameters: Iterable[str]) -> None:
        """Something that is no bias is done to these parameters' products."""
        for parameter in parameters:
            self._of(parameter).biases.add(None)

    def _used(self, call: _Call, operation: str) -> None:
        """What is done to an operation's parameters makes them no consumers."""
        for _, parameter in call.parameters.values():
            self._of(parameter).others.add(self._here(operation))

    def _follow(self, call: _Call) -> None:
        """Carry marks from an operation's inputs to its outputs, or note that it uses them."""
        outputs = _tensors(call.output)
        mark = follow(call.name, call.args, call.kwargs, outputs, call.marks) if call.marks else None
        if mark is None:
            for lost in call.marks.values():
                self.uses[lost.norm].add(self._here(call.name))
        else:
            for output in outputs:
                self._marks[output] = mark
        if call.name in FOLLOWED:
            self._copy(call, outputs)
        else:
            self._used(call, call.name)
        for source in (tensor for tensor in call.args if id(tensor) in call.products):
            for output in outputs:
                if call.name in RESHAPES and output.dim() and output.shape[-1] == source.shape[-1]:
                    self._products[output] = call.products[id(source)]
                else:
                    self._unbiased([call.products[id(source)]])

    def _copy(self, call: _Call, outputs: Sequence[Tensor]) -> None:
        """Take a copy of a whole parameter, in another type, for the parameter; other copies are uses of it."""
        for source in (tensor for tensor in call.args if id(tensor) in call.parameters):
            whole, parameter = call.parameters[id(source)]
            alike = (source.shape, source.stride()) == (whole.shape, whole.stride())
            for output in outputs:
                if self._map.find(output) is None and alike and output.shape == whole.shape:
                    self._map.take(output, parameter)
                elif self._map.find(output) is None:
                    self._of(parameter).others.add(self._here(call.name))

    def _product(self, call: _Call) -> None:
        """A matrix product: a consumer, a use of a mark, or a use of a parameter that no norm feeds."""
        left, right, added = PRODUCTS[call.name]
        args, marks, parameters = call.args, call.marks, call.parameters
        plain = all(call.kwargs.get(factor, 1) == 1 for factor in ("alpha", "beta"))
        operands = {left: args[left].dim() - 1, right: max(0, args[right].dim() - 2)}
        bias = None if added is None else parameters.get(id(args[added]))
        if bias is not None and id(args[left]) not in marks:
            self._of(bias[1]).others.add(self._here(call.name))
        for place, other in ((left, right), (right, left)):
            mark, weight = marks.get(id(args[place])), parameters.get(id(args[other]))
            if weight is not None and mark is None:
                self._of(weight[1]).others.add(self._here(call.name))
            if mark is None:
                continue
            axis = None if weight is None else axis_of(args[other], operands[other], weight[0])
            if weight is None or axis is None or mark.dim != operands[place]:
                self.uses[mark.norm].add(self._here(f"{call.name} with what is no parameter"))
                continue
            seen = self._of(weight[1])
            seen.fed_by.setdefault(mark.norm, set()).add(axis)
            seen.exact &= mark.exact
            if bias is not None and plain:
                seen.biases.add(bias[1])
            elif place == left and plain:
                self._products[call.output] = weight[1]
            else:
                seen.biases.add(None)
        if added is not None and id(args[added]) in marks:
            self.uses[marks[id(args[added])].norm].add(self._here("addition"))

    def _addition(self, call: _Call) -> None:
        """A bias where a parameter is added to a product; otherwise the product has none."""
        for product in call.products.values():
            biases = [call.parameters[id(term)][1] for term in call.args[:2] if id(term) in call.parameters]
            self._of(product).biases.add(biases[0] if biases else None)
        if len(call.products) != 1:
            self._used(call, "add")


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def axis_of(view: Tensor, dim: int, parameter: Tensor) -> int | None:
    """The axis of a parameter that a dimension of a view of it runs along, None for a part of one or for none."""
    size, stride = view.shape[dim], view.stride(dim)
    axes = [
        axis for axis in range(parameter.dim()) if (parameter.shape[axis], parameter.stride(axis)) == (size, stride)
    ]
    return axes[0] if axes else None


def traced(
    model: nn.Module, norms: Sequence[Norm], blocks: Sequence[str], calls: Sequence[Callable[[], object]]
) -> Trace:
    """A model's forward passes under a trace; experts run one by one, as the family's own code writes them."""
    chosen: Any = getattr(model, "get_experts_implementation", dict)()
    if chosen:
        model.set_experts_implementation(dict.fromkeys(chosen, "eager"))  # type: ignore[operator]
    try:
        trace = Trace(model, norms, blocks)
        for call in calls:
            with torch.no_grad(), trace:
                call()
    finally:
        if chosen:
            model.set_experts_implementation(chosen)  # type: ignore[operator]
    return trace
