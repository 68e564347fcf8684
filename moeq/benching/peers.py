"""Other libraries' kernels for linears of an expert's shape, each where it is installed and can run; all at 4 bits.

Their weights are random: only time is asked of them. A peer that is not measured says why in one line.

Letters: N rows and K inputs of a matrix, T tokens, G weights of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Linear = Callable[[Tensor], Tensor]  # [T, K] -> [T, N]
GROUPS = (128, 64, 32)
BITS = 4


class Peer(ABC):
    """A library's linear. package: what pip calls it; module: what must be importable; devices: where it runs."""

    name: ClassVar[str]
    package: ClassVar[str] = "torch"
    module: ClassVar[str] = "torch"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    multiples: ClassVar[tuple[int, int]] = (1, 1)  # of N and K that it takes

    def refusal(self, device: torch.device, shapes: list[tuple[int, int]]) -> str | None:
        """Why it is not measured on this device with matrices of these [N, K]; None where it can be."""
        if find_spec(self.module) is None:
            return f"not installed (pip install {self.package})"
        if device.type not in self.devices:
            return f"runs on {' and '.join(self.devices)} alone"
        for rows, inputs in shapes:
            if rows % self.multiples[0] or inputs % self.multiples[1]:
                return f"takes no matrix of {rows} x {inputs}"
        return None

    @property
    def version(self) -> str:
        """As its package states it."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "unknown"

    @abstractmethod
    def linear(self, rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Linear:
        """One linear of random weights for activations of a type."""


class TorchDense(Peer):
    """torch's own linear with dense weights of the activations' type: what all are held against."""

    name = "torch dense"

    def linear(self, rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Linear:
        weight = torch.randn(rows, inputs, device=device).mul_(inputs**-0.5).to(dtype)
        return lambda hidden: nn.functional.linear(hidden, weight)


class AtenInt4(Peer):
    """torch's `_weight_int4pack_mm_for_cpu`."""

    name = "aten int4"
    devices = ("cpu",)
    multiples = (16, 32)

    def linear(self, rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Linear:
        codes = torch.randint(0, 1 << BITS, (rows, inputs), dtype=torch.int32)
        group = group_of(inputs)
        scales = torch.rand(inputs // group, rows).mul_(0.02 * inputs**-0.5)
        return self.of_codes(codes, torch.stack([scales, torch.zeros_like(scales)], -1).to(dtype), group)

    @staticmethod
    def of_codes(codes: Tensor, scales_and_zeros: Tensor, group: int) -> Linear:
        """codes [N, K] int32, scales and zeros [K/G, N, 2]: value = (code - 8) * scale + zero."""
        ops: Any = torch.ops.aten
        packed = ops._convert_weight_to_int4pack_for_cpu(codes, 1)
        return lambda hidden: ops._weight_int4pack_mm_for_cpu(hidden, packed, group, scales_and_zeros)


class AutoRoundLib(Peer):
    """auto-round-lib's CPU kernels through its own linear, whose arithmetic it chooses itself."""

    name = "auto-round-lib"
    package, module = "auto-round-lib", "auto_round_kernel"
    devices = ("cpu",)
    multiples = (32, 32)

    def linear(self, rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Linear:
        from auto_round_kernel.qlinear import QuantLinear

        return _filled(QuantLinear(BITS, group_of(inputs), True, inputs, rows, False, weight_dtype=torch.float32))


class Gemlite(Peer):
    """gemlite's Triton kernels; activations of float16."""

    name = "gemlite"
    package = module = "gemlite"
    devices = ("cuda",)
    multiples = (32, 32)

    def linear(self, rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Linear:
        from gemlite.core import DType, GemLiteLinear

        group, half = group_of(inputs), torch.float16
        made = GemLiteLinear(
            BITS, group_size=group, in_features=inputs, out_features=rows,
            input_dtype=DType.FP16, output_dtype=DType.FP16,
        )  # fmt: skip
        codes = torch.randint(0, 1 << BITS, (rows, inputs), dtype=torch.uint8, device=device)
        scales = torch.rand(rows, inputs // group, device=device).mul_(0.02 * inputs**-0.5).to(half)
        made.pack(codes, scales, torch.full_like(scales, 8), bias=None)
        return lambda hidden: made(hidden.to(half)).to(hidden.dtype)


class Humming(Peer):
    """humming's kernels through auto-round's linear, which knows their layout."""

    name = "humming"
    package, module = "humming-kernels", "humming"
    devices = ("cuda",)
    multiples = (32, 32)

    def refusal(self, device: torch.device, shapes: list[tuple[int, int]]) -> str | None:
        if (reason := super().refusal(device, shapes)) is not None:
            return reason
        there = find_spec("auto_round_extension") is not None and find_spec("auto_round_extension.humming") is not None
        return None if there else "needs auto-round's linear for it (pip install auto-round)"

    def linear(self, rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Linear:
        from auto_round_extension.humming import QuantLinear

        made = QuantLinear(BITS, group_of(inputs), inputs, rows, False, sym=True, weight_dtype=dtype).to(device)
        return _filled(made)


PEERS: tuple[Peer, ...] = (TorchDense(), AtenInt4(), AutoRoundLib(), Gemlite(), Humming())


def group_of(inputs: int) -> int:
    """The largest usual group that divides K."""
    return next((group for group in GROUPS if inputs % group == 0), inputs)


def _filled(linear: Any) -> Linear:
    """A linear of the GPTQ layout with random codes and small scales, ready to be called."""
    with torch.no_grad():
        linear.qweight.random_(-(1 << 31), (1 << 31) - 1)
        linear.scales.uniform_(0.001, 0.002)
    linear.post_init()
    return linear  # type: ignore[no-any-return]
