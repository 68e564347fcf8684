"""Which parameter of a model a tensor is a view of, by where it lies in memory; modes that watch a model so."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from moeq.models.loading import tied

PRODUCTS = {  # matrix products: places of left, right and (None: no) added operand
    "aten::mm": (0, 1, None), "aten::bmm": (0, 1, None), "aten::addmm": (1, 2, 0), "aten::baddbmm": (1, 2, 0),
    "aten::mv": (0, 1, None), "aten::addmv": (1, 2, 0), "aten::_grouped_mm": (0, 1, None),
}  # fmt: skip


class ParameterMap:
    """Parameters by their memory; those of `blocks` are looked up as a block starts to run and let go of as it ends,
    of several batches in lockstep for the last one, since a streamed model reads them just before. Tied parameters have
    the first one's name."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._model, self._blocks, self._tied = model, blocks, tied(model)
        self._held: dict[int, tuple[Tensor, str]] = {}
        self._inside: Counter[str] = Counter()  # batches, by block
        self._starts: list[int] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the map right within the block."""
        handles = []
        for path in self._blocks:
            block = self._model.get_submodule(path)
            handles.append(block.register_forward_pre_hook(lambda own, *_, at=path: self._enter(f"{at}.", own)))
            handles.append(block.register_forward_hook(lambda *_, at=path: self._leave(f"{at}.")))
        self._look_up("", self._model)
        try:
            yield
        finally:
            self._drop("")
            self._inside.clear()
            for handle in handles:
                handle.remove()

    def find(self, tensor: Tensor) -> tuple[Tensor, str] | None:
        """The parameter (or copy of it) in whose memory a tensor lies, and its name."""
        if tensor.device.type == "meta" or not tensor.numel():
            return None
        at = tensor.data_ptr()
        place = bisect_right(self._starts, at) - 1
        if place < 0:
            return None
        whole, name = self._held[self._starts[place]]
        return (whole, name) if at < self._starts[place] + whole.numel() * whole.element_size() else None

    def among(self, tensors: Sequence[Any]) -> dict[int, tuple[Tensor, str]]:
        """What `find` says of these tensors, by their id."""
        return {id(tensor): whole for tensor in tensors if (whole := self.find(tensor)) is not None}

    def take(self, copy: Tensor, name: str) -> None:
        """Take a copy of a parameter, laid out as it is, for the parameter."""
        self._held[copy.data_ptr()] = copy, name
        self._starts = sorted(self._held)

    def _enter(self, prefix: str, block: nn.Module) -> None:
        self._inside[prefix] += 1
        self._look_up(prefix, block)

    def _leave(self, prefix: str) -> None:
        self._inside[prefix] -= 1
        if not self._inside[prefix]:
            self._drop(prefix)

    def _drop(self, prefix: str) -> None:
        self._held = {at: held for at, held in self._held.items() if not held[1].startswith(prefix)}
        self._starts = sorted(self._held)

    def _look_up(self, prefix: str, module: nn.Module) -> None:
        self._drop(prefix)
        for below, parameter in module.named_parameters():
            if parameter.device.type != "meta":
                name = f"{prefix}{below}"
                first = min([name, *self._tied.get(name, ())])
                self._held.setdefault(parameter.data_ptr(), (parameter.detach(), first))
        self._starts = sorted(self._held)


class Watching(TorchDispatchMode):  # type: ignore[misc]
    """A dispatch mode under which a model runs, and which knows the parameter that a tensor is a view of.

    A mode says in `__torch_dispatch__` what it does with that, and in `_listen` what else it hears of the model.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._map = ParameterMap(model, blocks)
        self._open = ExitStack()

    def _listen(self) -> Iterator[RemovableHandle]:
        """Hooks that stay as long as the mode is entered."""
        yield from ()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            for handle in self._listen():
                opening.callback(handle.remove)
            opening.enter_context(self._map.watching())
            super().__enter__()  # type: ignore[no-untyped-call]
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._open.close()
