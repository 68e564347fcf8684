"""Running a model from one decoder layer on, with what the layers before it gave in an earlier run.

The model's own forward is untouched: each layer that is left out is replaced by a module that returns at once. The last
of them gives what the layer gave; those before it give zeros of its shape that take no memory, since nothing but the
next layer reads them. Where that is not so (layers that share keys or read features of an image again), the output
differs: whoever runs a model so must compare it with the whole model's first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Outputs:
    """What the decoder layers gave in one run of one batch: the output of each, in the order in which they ran.

    Outputs of layers right before one of `wanted` are whole, others are zeros without memory. `repeated`: a layer ran
    more than once, so that no run can begin in the middle.
    """

    wanted: frozenset[str]
    given: dict[str, Any] = field(default_factory=dict)
    repeated: bool = False
    _last: Any = None

    def enter(self, block: str) -> None:
        """A layer begins: what the one before gave stays, or gives its memory back."""
        self.repeated |= block in self.given
        if self.given and block in self.wanted:
            self.given[next(reversed(self.given))] = self._last
        self._last = None

    def leave(self, block: str, output: Any) -> None:
        self.given[block] = _map(output, _hollow)
        self._last = _map(output, torch.clone)

    def before(self, block: str) -> dict[str, Any]:
        """{layer: output} of all that run before one; empty where none does, or the run cannot begin there."""
        if self.repeated or block not in self.wanted & self.given.keys():
            return {}
        return dict(takewhile(lambda item: item[0] != block, self.given.items()))


@contextmanager
def recording(model: nn.Module, blocks: Sequence[str], wanted: Sequence[str]) -> Iterator[Outputs]:
    """Note what the layers give while the model runs one batch within the block; wanted: where runs will begin."""
    outputs = Outputs(wanted=frozenset(wanted))
    with ExitStack() as stack:
        for name in blocks:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(lambda *_, name=name: outputs.enter(name)).remove)
            stack.callback(module.register_forward_hook(lambda *call, name=name: outputs.leave(name, call[2])).remove)
        yield outputs


@contextmanager
def beginning_at(model: nn.Module, outputs: Outputs, block: str) -> Iterator[None]:
    """Within the block the model leaves out every decoder layer before one; the same batch must run."""
    with ExitStack() as stack:
        for name, output in outputs.before(block).items():
            layer = model.get_submodule(name)
            stack.callback(model.set_submodule, name, layer)
            model.set_submodule(name, Done(layer, output))
        yield


class Done(nn.Module):
    """Stands in for a layer: has its attributes, and gives what it gave."""

    def __init__(self, layer: nn.Module, output: Any) -> None:
        super().__init__()
        self.__dict__ |= {"_layer": layer, "_output": output}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        return _map(self.__dict__["_output"], torch.clone)


def _hollow(tensor: Tensor) -> Tensor:
    """Zeros of a tensor's shape in the memory of one."""
    return tensor.new_zeros(()).expand(tensor.shape)


def _map(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A layer's output with every tensor changed."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, dict):
        return {name: _map(value, change) for name, value in output.items()}
    if isinstance(output, tuple | list):
        return type(output)(_map(value, change) for value in output)
    return output
