"""Which kernel computes with packed weights: by device, by what a kernel refuses, and by MOEQ_KERNEL.

On a GPU it is Triton's. On a CPU it is one of the forms of `cpu` (instruction sets); which of them, and from how many
rows of an expert on it is unpacked and multiplied by torch instead, depends on the policy:

    measured    a short measurement, kept by CPU (see `measured`): the last bits of results may depend on it
    fixed       by what the CPU has alone: the same bits in every process on a machine
    reference   the plain way: the bits of the dequantized model

MOEQ_KERNEL names a kernel for every policy but the last. Forms that round activations to int8 change results by more
than their last bits: no policy takes one, only a name does.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from moeq_kernels import measured
from moeq_kernels.cpu.forms import FORMS, forms
from moeq_kernels.description import Kernel, LayerOfExperts, Matrix, PreparedLayer, PreparedLinear
from moeq_kernels.dropped import without_dropped
from moeq_kernels.errors import ModelError
from moeq_kernels.names import CPU, CPU_INT8, REFERENCE, TRITON, VARIABLE, interpreted
from moeq_kernels.packed import PackedWeight
from moeq_kernels.reference import ReferenceKernel
from moeq_kernels.streams import Streams, streams_of

if TYPE_CHECKING:  # which loads a compiler
    from moeq_kernels.cpu.versions import Places, VersionedLayer
    from moeq_kernels.gpu.versions import VersionedTritonLayer

NO_KERNEL = "moeq has no kernel for {} codes"
_NAMES = {"exl3": "EXL3's", "iq": "i-quants'"}
Policy = Literal["measured", "fixed", "reference"]
_policy: ContextVar[Policy] = ContextVar("policy", default="measured")
_at_once: ContextVar[bool] = ContextVar("at_once", default=True)


def policy() -> Policy:
    """The policy of modules that are made now."""
    return _policy.get()


def at_once() -> bool:
    """Whether a kernel rearranges what is loaded now as soon as it is there, not when it is first used."""
    return _at_once.get()


@contextmanager
def choosing(wanted: Policy, *, at_once: bool = True) -> Iterator[None]:
    """Modules that are made within keep to a policy; at_once: see `at_once`."""
    tokens = _policy.set(wanted), _at_once.set(at_once)
    try:
        yield
    finally:
        _policy.reset(tokens[0])
        _at_once.reset(tokens[1])


def named() -> str | None:
    """The kernel that MOEQ_KERNEL names; ModelError for one that there is not, or not on this machine."""
    name = os.environ.get(VARIABLE, "").strip()
    if not name:
        return None
    known = [REFERENCE, CPU, CPU_INT8, *FORMS, TRITON]
    if name not in known:
        raise ModelError(f"no kernel is called {name!r}", where=VARIABLE, do=f"take one of {', '.join(known)}")
    if name == TRITON and not (interpreted() or torch.cuda.is_available()):
        raise ModelError("there is no CUDA device", where=f"{VARIABLE}={name}", do="leave it out, or take another one")
    whole = forms(int8=True)
    if (name in FORMS and not FORMS[name].runs_here()) or (name == CPU_INT8 and not whole):
        usable = [REFERENCE, CPU, *([CPU_INT8] if whole else []), *forms(), *whole]
        raise ModelError(f"this CPU does not run {name}", where=VARIABLE, do=f"take one of {', '.join(usable)}")
    return name


def takes_triton(device: torch.device) -> bool:
    """Whether what lies on a device is Triton's, if not left to the plain way."""
    name = named()
    return name == TRITON or (name is None and device.type == "cuda")


def prepared_layer(
    layer: LayerOfExperts, device: torch.device, policy: Policy
) -> tuple[PreparedLayer | None, str | None]:
    """A layer that lies on a device, in the arrangement of its kernel; or None and why no kernel takes it.

    Experts of which nothing is stored are dropped: kernels are given the others.
    """

    def prepared(whole: LayerOfExperts) -> tuple[PreparedLayer | None, str | None]:
        every = [one for matrices in whole.matrices for one in matrices.values()]
        kernel, why = _kernel(device, policy, every, layers=True)
        if kernel is not None:
            why = kernel.refusal(whole)
        return (None, why) if kernel is None or why is not None else (kernel.layer(whole), None)

    return without_dropped(layer, device, prepared)


def prepared_linear(
    matrix: Matrix, bias: Tensor | None, device: torch.device, policy: Policy
) -> tuple[PreparedLinear | None, str | None]:
    """One matrix, as `prepared_layer`."""
    kernel, why = _kernel(device, policy, [matrix], layers=False)
    if kernel is None:
        return None, why
    try:
        return kernel.linear(matrix, bias), None
    except ValueError as error:  # what a kernel cannot arrange
        return None, str(error)


def versioned_layer(
    layer: LayerOfExperts,
    versions: Sequence[Mapping[str, Matrix]],
    held: Tensor,
    places: Places,
    policy: Policy,
    streams: Streams | None = None,
) -> VersionedLayer | VersionedTritonLayer:
    """A layer whose experts change between versions while it runs, where the buffer lies; see `cpu.versions` and
    `gpu.versions`.

    streams: of what is copied; None: of this layer alone. ModelError where its kernel cannot take them.
    """
    every = [one for matrices in versions for one in matrices.values()]
    kernel, why = _kernel(held.device, policy, every, layers=True)
    made: VersionedLayer | VersionedTritonLayer
    try:
        if kernel is None:
            raise ValueError(why)
        if isinstance(kernel, ReferenceKernel):
            raise ValueError("the plain way has no buffer of its own")
        if kernel.name == TRITON:
            module = importlib.import_module("moeq_kernels.gpu.versions")
            made = module.versioned_layer(layer, versions, held, places, streams or streams_of(held.device))
        else:
            made = kernel.versions(layer, versions, held, places)  # type: ignore[attr-defined]
    except ValueError as error:
        do = f"leave {VARIABLE} out, and take a checkpoint whose experts are packed or in 16 bits"
        raise ModelError(f"experts cannot change their precision: {error}", where=VARIABLE, do=do) from error
    return made


def _kernel(
    device: torch.device, policy: Policy, matrices: Sequence[Matrix], *, layers: bool
) -> tuple[Kernel | None, str | None]:
    """The kernel of a device for some matrices, of a layer's experts or one alone, or None and why there is none."""
    name, packed = named(), [one for one in matrices if isinstance(one, PackedWeight)]
    if REFERENCE in (name, policy):
        return ReferenceKernel(), None
    if (other := next((one for one in packed if one.codebook), None)) is not None:
        return None, NO_KERNEL.format(_NAMES.get(other.encoding.codes, other.codebook.upper()))
    if takes_triton(device):
        return _triton()
    if device.type != "cpu":
        return None, f"no kernel computes on {device.type}"
    return _cpu(name, policy, max((one.state_bits for one in packed), default=0), layers), None


def _cpu(name: str | None, policy: Policy, state_bits: int, layers: bool) -> Kernel:
    """A form that is named keeps its own number of rows from which on to unpack."""
    from moeq_kernels.cpu.kernel import CpuKernel, contenders  # which load a compiler

    if name in FORMS:
        return CpuKernel(name)
    if name == CPU_INT8:
        return CpuKernel(forms(int8=True)[0])
    if policy == "fixed":
        return CpuKernel()
    compared = contenders(measured.WALKED_BITS if state_bits else measured.BITS, state_bits)
    return CpuKernel(*measured.best(CpuKernel, compared, torch.get_num_threads(), state_bits, layers))


def _triton() -> tuple[Kernel | None, str | None]:
    if importlib.util.find_spec("triton") is None:
        return None, "Triton is not installed"
    module = importlib.import_module("moeq_kernels.gpu.kernel")  # it imports Triton
    kernel: Kernel = module.TritonKernel()
    return kernel, None
