"""What is copied beside what is computed: streams, events and host memory as copies need it, on a GPU or without one.

A version of an expert is brought on a stream of its own; what a device has not done yet is asked of events, which never
waits unless it is told to. Without a GPU everything is done as soon as it is asked for: the same code runs there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from moeq_kernels.errors import ModelError

PAGE = 4096


class Event(Protocol):
    """Work that a device was given."""

    def done(self) -> bool:
        """Whether all of it is done; does not wait."""

    def wait(self) -> None:
        """Until it is."""


class Done:
    """Of what is done as soon as it is asked for."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


DONE = Done()


class Streams(Protocol):
    """A device and the ways to its memory."""

    device: torch.device

    def waiting(self, size: int) -> Tensor:
        """uint8 [size] of zeros in host memory, from which copies to the device need nobody: pinned on a GPU, as long
        as this very tensor is kept; a view of it does not keep it."""

    def beside(self, work: Callable[[], None]) -> Event:
        """Work that the device does in the order in which it is given here, beside what is computed."""

    def now(self) -> Event:
        """All that the current stream was given so far."""

    def capturing(self) -> bool:
        """Whether what is computed is captured as a graph, so that nothing else may be asked of the device."""


class HostStreams:
    """Tensors on the CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def waiting(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def beside(self, work: Callable[[], None]) -> Event:
        work()
        return DONE

    def now(self) -> Event:
        return DONE

    def capturing(self) -> bool:
        return False


class CudaStreams:
    """A GPU: one more stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._stream = torch.cuda.Stream(self.device)

    def waiting(self, size: int) -> Tensor:
        """Pinned to the byte: PyTorch's own allocator of pinned memory rounds up to the next power of two.

        ModelError where the system does not pin so much.
        """
        whole = torch.zeros(size + 2 * PAGE, dtype=torch.uint8)
        first = -whole.data_ptr() % PAGE
        length = -(-size // PAGE) * PAGE
        held = whole[first : first + length]
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            code = int(runtime.cudaHostRegister(held.data_ptr(), length, 0))
        if code:
            what = f"{size} bytes of host memory cannot be pinned (cudaHostRegister gives {code})"
            raise ModelError(what, where=str(self.device), do="give less host memory")
        made = held[:size]
        weakref.finalize(made, _unpin, runtime, held.data_ptr(), whole)
        return made

    def beside(self, work: Callable[[], None]) -> Event:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            work()
            return _CudaEvent(self._stream.record_event())

    def now(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self.device).record_event())

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class _CudaEvent:
    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


def _unpin(runtime: Any, start: int, whole: Tensor) -> None:
    """whole: the memory, which is alive until here."""
    runtime.cudaHostUnregister(start)
    del whole


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Within, Triton's programs run on this device: on the current one otherwise, wherever what they are given lies."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def streams_of(device: torch.device) -> Streams:
    """Of a GPU, or of tensors on the CPU."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
