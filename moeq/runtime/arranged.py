"""Stored tensors that a kernel has rearranged: who holds them now, and when they must be where they were.

A prepared layer holds the bytes of its linears; their buffers are None meanwhile. Whatever looks at or changes buffers
(a state dict, a move to another device or dtype, a copy, training) first has them put back, bit for bit; the next call
rearranges them again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from moeq.errors import ModelError
from moeq.runtime.graph_operator import number_for
from moeq_kernels.description import Matrix

COMPUTED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of activations that kernels take
SEVERAL = "its experts lie on several devices"
OFFLOADED = "its weights are offloaded and only there while it runs"
TRAINED = "it is being trained"
GRADIENTS = "gradients are asked for, and what is between its matrices may have weights of its own"
TRANSFORMED = "its inputs are followed by forward-mode differentiation or a transform of torch.func"

Compute = Callable[..., Tensor]

_ARRANGING = threading.RLock()


@contextmanager
def arranging() -> Iterator[None]:
    """Held while stored tensors go to a kernel or come back, and while somebody looks at them: of two threads one does
    it. What is made within may be trained with and written over, also where that is in inference mode, and is no tensor
    of a transform of torch.func."""
    with _ARRANGING, torch.inference_mode(False), torch._C._DisableFuncTorch():
        yield


@dataclass(frozen=True, kw_only=True)
class Arranged:
    """One linear whose stored tensors a kernel holds: how to have its matrix back, its bias, and to put all back.

    device, dtype: of what is held; a dtype of whole numbers where nothing of it follows the model's.
    """

    matrix: Callable[[], Matrix]
    bias: Tensor | None
    put_back: Callable[[], None]
    device: torch.device
    dtype: torch.dtype

    def stays(self, fn: Callable[[Tensor], Tensor]) -> bool:
        """Whether what `_apply` is given leaves what is held as and where it is."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        return probe.device == self.device and probe.dtype == self.dtype


class Puts(nn.Module):
    """A module whose buffers, or those of its children, may be with a kernel."""

    number: Tensor  # of those that are called in a graph, by `number_for`

    def put_back(self) -> None:
        """Have the stored tensors in the buffers again."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        with arranging():
            self.put_back()
            return self.__dict__ | {"_buffers": self._buffers.copy()}  # which another thread's call takes meanwhile

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "number" in state:  # another module's
            self.number = number_for(self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with arranging():
            self.put_back()
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        with arranging():
            self.put_back()
            super()._load_from_state_dict(*arguments)  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        with arranging():
            return self._moved(fn, recurse)

    def _moved(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> Any:
        """As `_apply` of nn.Module."""
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> Any:
        """Trained modules compute with the stored tensors."""
        if mode:
            self.put_back()
        return super().train(mode)


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate brings a module's buffers in when it is called and takes them away after."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return any(getattr(one, "offload", False) and getattr(one, "offload_buffers", False) for one in hooks)


def leave_files(module: nn.Module) -> None:
    """Copy a module's own buffers, guards of some bytes: as read they keep a whole file of weights in memory."""
    module._buffers.update({name: one.clone() for name, one in module._buffers.items() if one is not None})


def refuse_traced(given: Tensor) -> None:
    """ModelError for a call that a trace follows: kernels read bytes, which a FakeTensor has not, and a graph would
    have the experts of its example only."""
    if torch._C._is_tracing() or isinstance(given, (FakeTensor, FunctionalTensor)):
        what = "packed weights cannot be traced or exported"
        raise ModelError(what, do="take what `moeq convert CHECKPOINT --to dequantized --out OUT` writes")


def refuse(given: Tensor) -> None:
    """RuntimeError for activations of another kind than weights, as torch's own products give: weights rounded to whole
    numbers would be others. ModelError as by `refuse_traced`."""
    if not given.is_floating_point():
        raise RuntimeError(f"packed weights are multiplied with floating-point numbers, these inputs are {given.dtype}")
    refuse_traced(given)


def reason_at_call(module: nn.Module, given: Tensor) -> str | None:
    """Why a call with these activations computes with the stored tensors, None if it need not; what is refused as by
    `refuse`."""
    refuse(given)
    if module.training:
        return TRAINED
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return TRANSFORMED
    if type(given).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # what holds another tensor has no bytes itself
        return f"its inputs are {type(given).__name__}"
    return None if given.dtype in COMPUTED else f"its inputs are {given.dtype}"


def note_reason(module: nn.Module, reason: str | None) -> None:
    """Set `reason` where it changes: a module's attributes take longer to set than a small product takes."""
    if module.reason != reason:
        module.reason = reason  # type: ignore[assignment]


def wants_gradients(*given: Tensor) -> bool:
    """Whether a call's output is to have a gradient."""
    return torch.is_grad_enabled() and any(one.requires_grad for one in given)


class _Recomputed(torch.autograd.Function):
    """A kernel's output, whose gradient is that of the same output computed with the stored tensors."""

    @staticmethod
    def forward(ctx: Any, fast: Compute, plain: Compute, *given: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*given)
        return fast(*given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        again, wanted = torch.is_grad_enabled(), ctx.needs_input_grad[2:]  # again: gradients of gradients are asked for
        given = list(ctx.saved_tensors)
        if not again:
            given = [one.detach().requires_grad_(needed) for one, needed in zip(given, wanted, strict=True)]
        with torch.enable_grad():
            output = ctx.plain(*given)
        asked = [one for one, needed in zip(given, wanted, strict=True) if needed]
        found = iter(torch.autograd.grad(output, asked, gradients, create_graph=again))
        return None, None, *(next(found) if needed else None for needed in wanted)


def with_gradients(fast: Compute, plain: Compute, *given: Tensor) -> Tensor:
    """fast(*given), a kernel's; where a gradient is asked for, that of plain(*given), which computes the same."""
    if not wants_gradients(*given):
        return fast(*given)
    output: Tensor = _Recomputed.apply(fast, plain, *given)  # type: ignore[no-untyped-call]
    return output
