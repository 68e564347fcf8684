"""A process that takes the CPU for a CUDA GPU: `python tests/pretended_gpu.py ARGUMENTS OF MOEQ`.

Tensors say cuda:0 and compute on the CPU. As on a GPU, an operation on tensors of both devices fails (but for scalars
and for what is indexed), and NumPy takes none of them. To torch's own code they are of a backend written in Python, so
that it need not be linked with CUDA. Triton is not there.

What it cannot show: kernels, streams, and how much memory is taken.
"""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"  # of the backend that tensors are of below Python
_setup_privateuseone_for_python_backend(NAME)
BELOW, GPU, CPU = torch.device(NAME, 0), torch.device("cuda", 0), torch.device("cpu")
INDEXED = ("aten.index.", "aten.index_put", "aten._index_put", "aten._unsafe_index")  # by what lies on the CPU, too
MADE = ("empty_strided", "empty.memory_format")  # by torch's own code, in threads that have no mode
BYTES = 80 << 30
_kept: list[Any] = []


class There(Tensor):
    """A tensor of the GPU; `inner` holds its values."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=BELOW,
        )  # fmt: skip
        made.inner = inner
        return made

    def _put(self, value: Any) -> None:
        torch._C.TensorBase.data.__set__(self, value)
        self.inner = value.inner

    data = property(lambda self: torch._C.TensorBase.data.__get__(self), _put)

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    __array__ = numpy

    def tolist(self) -> Any:
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or GPU)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else super().__format__(spec)

    def __getitem__(self, index: Any) -> Any:
        return Tensor.__getitem__(self, _index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        Tensor.__setitem__(self, _index(index), value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sees what makes tensors, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def _index(index: Any) -> Any:
    """Lists as tensors: torch would make tensors of its own of them."""
    parts = index if isinstance(index, tuple) else (index,)
    made = tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
    return made if isinstance(index, tuple) else made[0]


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type in (GPU.type, NAME)


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation's result, on the GPU where one of its tensors is or where it is asked for."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here, there = ([one for one in tensors if isinstance(one, There) == side] for side in (False, True))
    target = kwargs.get("device")
    if not there and not _is_there(target):
        return func(*args, **kwargs)
    name, written = str(func), "copy_" in str(func)
    mixed = there and any(one.dim() and one.device.type == "cpu" for one in here) and any(one.dim() for one in there)
    if (
        mixed
        and not written
        and "_to_copy" not in name
        and not (name.startswith(INDEXED) and isinstance(tensors[0], There))
    ):
        told = [(one.device.type, tuple(one.shape)) for one in tensors]
        raise RuntimeError(f"Expected all tensors to be on the same device, {name}: {told}")
    options = {**kwargs, "device": CPU} if _is_there(target) else dict(kwargs)
    options.pop("pin_memory", None)
    known = {id(one.inner): one for one in there}
    given, named = tree_map(lambda leaf: leaf.inner if isinstance(leaf, There) else leaf, (args, options))
    whole = name.startswith("aten.histc") and not given[0].is_floating_point()  # which a GPU counts
    found = func(given[0].float(), *given[1:], **named).to(given[0].dtype) if whole else func(*given, **named)
    stays = isinstance(tensors[0], There) if written else target is None or _is_there(target)
    return tree_map(lambda one: _there(one, known), found) if stays else found


def _there(value: Any, known: dict[int, There]) -> Any:
    """An operation's result on the GPU: its own argument where it wrote in place."""
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    return known[id(value)] if id(value) in known else There(value)


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Tensor.to, which asks for CUDA before anyone else is asked."""
    copies = kwargs.pop("copy", False)
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    if "other" in kwargs:
        other = kwargs.pop("other")
        args = (other.device, other.dtype)
    if len(args) == 4 or (len(args) == 3 and isinstance(args[0], torch.dtype)):
        *args, copies = args  # type: ignore[assignment]
    args = tuple(GPU if isinstance(one, str | torch.device) and _is_there(one) else one for one in args)
    device, dtype, _, memory = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = device or self.device, dtype or self.dtype
    if device.type not in ("cpu", GPU.type):
        return torch._C.TensorBase.to(self, device, dtype)
    laid_out = memory in (None, torch.preserve_format) or self.is_contiguous(memory_format=memory)
    if not copies and device.type == self.device.type and dtype == self.dtype and laid_out:
        return self
    more = {} if memory is None else {"memory_format": memory}
    return torch.ops.aten._to_copy(self, dtype=dtype, device=GPU if device.type == GPU.type else CPU, **more)


def _made_of_numbers(make: Any) -> Any:
    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if isinstance(data, list | tuple):
            data = tree_map(lambda one: one.item() if isinstance(one, There) else one, data)
        if device is None:
            return make(data, *args, **kwargs)
        return make(data, *args, device=CPU if _is_there(device) else device, **kwargs).to(device)

    return made


class _Stream:
    """A stream or an event, behind which nothing ever is."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: self

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


def install() -> None:
    """From here on there is a GPU in this process, and none without it."""
    sys.modules["triton"] = None  # type: ignore[assignment]
    _device_constructors()  # remembers torch's own functions
    library = torch.library.Library("aten", "IMPL")
    _kept.append(library)
    for name in MADE:
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base), overload or "default")
        library.impl(name, lambda *a, _operator=operator, **k: computed(_operator, a, k), "PrivateUse1")
    described = SimpleNamespace(name="Pretended GPU", total_memory=BYTES, multi_processor_count=1, major=9, minor=0)
    answers = {
        "_lazy_init": None, "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "set_device": None, "mem_get_info": (BYTES, BYTES), "get_device_properties": described,
        "get_device_name": described.name, "get_device_capability": (9, 0), "synchronize": None, "empty_cache": None,
        "manual_seed_all": None, "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0,
        "reset_peak_memory_stats": None, "get_rng_state_all": [], "set_rng_state_all": None,
        "is_current_stream_capturing": False, "is_bf16_supported": True, "device": nullcontext(),
        "stream": nullcontext(), "current_stream": _Stream(), "default_stream": _Stream(),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    torch.cuda.Stream = torch.cuda.Event = _Stream  # type: ignore[assignment, misc]
    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, _made_of_numbers(getattr(torch, name)))
    Tensor.to = _to  # type: ignore[assignment]
    Tensor.cpu = lambda self, *_, **__: self.to(CPU)  # type: ignore[assignment]
    Tensor.cuda = lambda self, *_, **__: self.to(GPU)  # type: ignore[assignment]
    Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment]
    Tensor.record_stream = lambda self, _: None  # type: ignore[assignment]
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters that are tied stay so
    _Mode().__enter__()
    run = threading.Thread.run

    def with_mode(thread: threading.Thread) -> None:
        with _Mode():
            run(thread)

    threading.Thread.run = with_mode  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    from moeq.__main__ import main

    main()
