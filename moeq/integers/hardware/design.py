"""Both kernels of paper 004 on an FPGA: cycles and seconds of an image, slices and block RAMs, whether they fit.

A block is norm, query/key/value, attention, projection, norm, MLP or experts, one after the other: that is the latency
of an image. With several images under way, each kernel works on another one ("double-buffering across kernels", 5.3),
and an image is finished as often as the busiest of them is done. Additions, tables and quantizers stream along.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Literal

from moeq.errors import EstimateError, hint
from moeq.integers.hardware.attention_kernel import ROOT_CYCLES, AttentionKernel, NormUnit
from moeq.integers.hardware.interval import Interval
from moeq.integers.hardware.linear_kernel import LinearKernel
from moeq.integers.hardware.parts import Arithmetic, Kernel, Layer, Memory, Multiplier, Parallelism, up
from moeq.integers.hardware.registers import Registers, added
from moeq.integers.hardware.vision import VisionSizes

Weights = Literal["streamed", "preloaded"]
KERNELS: tuple[Kernel, ...] = ("attention", "linear", "norm")
MOST_LANES, MOST_QUERIES, MOST_UNITS, MOST_TILE = 64, 64, 32, 64  # that are tried
OF_ATTENTION = ("queries", "lanes", "norm", "ends")
SEARCHED = ("queries", "lanes", "units", "inputs", "outputs")  # norm and ends follow


@dataclass(frozen=True, kw_only=True)
class Device:
    """An FPGA: multiplier slices (DSPs), block RAMs of 36 Kibit, off-chip bytes a second, clock in hertz."""

    name: str
    dsps: int
    block_rams: float
    bytes_per_second: float
    clock_hertz: float


DEVICES = {  # paper 004, section 5.1; ZCU102's 1824 block RAMs are of 18 Kibit; clocks: its Tables 4 and 5
    "zcu102": Device(name="zcu102", dsps=2520, block_rams=912, bytes_per_second=21e9, clock_hertz=300e6),
    "u280": Device(name="u280", dsps=9024, block_rams=2160, bytes_per_second=460e9, clock_hertz=250e6),
}


def device(name: str) -> Device:
    """An FPGA by name; EstimateError with the nearest known."""
    if name not in DEVICES:
        raise EstimateError(f"unknown FPGA {name!r}", where="--kernels", do=hint(name, DEVICES))
    return DEVICES[name]


@dataclass(frozen=True, kw_only=True)
class Design:
    """A model, widths, a parallelism and an FPGA; weights: fetched once an image, or all kept on chip.

    sums: of linears whose weights are known, by name, as LinearKernel takes them.
    """

    sizes: VisionSizes
    arithmetic: Arithmetic
    at: Parallelism
    device: Device
    weights: Weights = "streamed"
    sums: Mapping[str, Interval] = field(default_factory=dict)

    @cached_property
    def attention(self) -> AttentionKernel:
        """The attention kernel."""
        return AttentionKernel(sizes=self.sizes, arithmetic=self.arithmetic, at=self.at)

    @cached_property
    def norm(self) -> NormUnit:
        """The LayerNorm unit."""
        return NormUnit(sizes=self.sizes, arithmetic=self.arithmetic, at=self.at)

    @cached_property
    def linear(self) -> LinearKernel:
        """The linear kernel."""
        rate = None if self.weights == "preloaded" else self.device.bytes_per_second / self.device.clock_hertz
        return LinearKernel(
            sizes=self.sizes, arithmetic=self.arithmetic, at=self.at, bytes_per_cycle=rate, sums=self.sums
        )

    @cached_property
    def multipliers(self) -> tuple[Multiplier, ...]:
        """All products of a cycle, by kernel."""
        return (*self.attention.multipliers, *self.linear.multipliers, *self.norm.multipliers)

    @cached_property
    def memories(self) -> tuple[Memory, ...]:
        """All memories, by kernel."""
        return (*self.attention.memories, *self.linear.memories, *self.norm.memories)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """All layers of an image."""
        return (*self.linear.layers, *self.attention.layers, *self.norm.layers)

    @property
    def registers(self) -> dict[str, Registers]:
        """Datapaths by what they compute."""
        found = {"attention": self.attention.registers, "norm": self.norm.registers}
        found |= {one.name: one.registers for one in self.linear.linears}
        return found | {"residual": added(self.norm.row_bits)}

    @property
    def dsps(self) -> int:
        """Multiplier slices."""
        return sum(one.slices for one in self.multipliers)

    @property
    def block_rams(self) -> float:
        """Block RAMs of 36 Kibit, in halves."""
        return sum(one.block_rams for one in self.memories)

    @cached_property
    def busy_cycles(self) -> Mapping[Kernel, int]:
        """Cycles of an image that each kernel computes, or waits for weights."""
        return {
            kernel: sum(layer.count * layer.cycles for layer in self.layers if layer.kernel == kernel)
            for kernel in KERNELS
        }

    @property
    def cycles(self) -> int:
        """Cycles of one image alone."""
        return sum(self.busy_cycles.values())

    @property
    def worst_cycles(self) -> int:
        """The same with the worst routing, where there are experts."""
        more = (
            layer.count * max(0, layer.worst_cycles - layer.cycles)
            for layer in self.layers
            if layer.worst_cycles is not None
        )
        return self.cycles + sum(more)

    @property
    def seconds(self) -> float:
        """Latency of an image."""
        return self.cycles / self.device.clock_hertz

    @property
    def images_per_second(self) -> float:
        """Images a second when several are under way."""
        return self.device.clock_hertz / max(self.busy_cycles.values())

    @property
    def operations_per_second(self) -> float:
        """Operations a second of one image after the other: two a multiply-accumulate, as the paper counts (GOPS)."""
        return 2 * self.sizes.macs / self.seconds

    @property
    def shortage(self) -> str | None:
        """What the FPGA has too little of, None where the design fits."""
        over = []
        if self.dsps > self.device.dsps:
            over.append(f"{self.dsps:,} of {self.device.dsps:,} DSPs")
        if self.block_rams > self.device.block_rams:
            over.append(f"{self.block_rams:,g} of {self.device.block_rams:,g} block RAMs")
        return " and ".join(over) or None

    def refusal(self) -> EstimateError | None:
        """One line that says that it does not fit, and why; None where it does."""
        if self.shortage is None:
            return None
        largest = max(self.memories, key=lambda one: one.block_rams)
        array = max(self.multipliers, key=lambda one: one.slices)
        most = (
            f"{array.what} takes {array.slices:,} DSPs"
            if self.dsps > self.device.dsps
            else f"{largest.what} takes {largest.block_rams:,g} block RAMs"
        )
        return EstimateError(
            f"{self.sizes.name} at {self.arithmetic.text} does not fit {self.device.name}: {self.shortage}; {most}",
            where="--kernels",
            do="compute less in parallel, use fewer bits, or stream the weights",
        )


def derived(sizes: VisionSizes, queries: int, lanes: int) -> tuple[int, int]:
    """norm and ends that just keep up: a norm's pass as long as its root, ends in the time that a group's keys take."""
    norm = _power(up(sizes.hidden, ROOT_CYCLES))
    room = max(1, sizes.positions * up(sizes.head, lanes) // queries)
    return norm, min(_power(up(sizes.head, room)), _power(sizes.head))


def _power(least: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(0, least - 1).bit_length()


def candidates(sizes: VisionSizes, given: Mapping[str, int]) -> Iterator[Parallelism]:
    """Parallelisms with powers of two where nothing is given."""
    most = {
        "queries": min(MOST_QUERIES, sizes.positions),
        "lanes": min(MOST_LANES, _power(sizes.head)),
        "units": min(MOST_UNITS, sizes.positions),
        "inputs": min(MOST_TILE, _power(sizes.hidden)),
        "outputs": min(MOST_TILE, _power(sizes.hidden)),
    }
    ranges = [[given[name]] if name in given else _powers(most[name]) for name in SEARCHED]
    for queries, lanes, units, inputs, outputs in product(*ranges):
        norm, ends = derived(sizes, queries, lanes)
        yield Parallelism(
            queries=queries,
            lanes=lanes,
            units=units,
            inputs=inputs,
            outputs=outputs,
            norm=given.get("norm", norm),
            ends=given.get("ends", ends),
        )


def _powers(most: int) -> Sequence[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


def fastest(start: Design, given: Mapping[str, int]) -> Design:
    """The design of the least latency that fits, of equals the one of fewest slices; `at` of `start` is not used.

    given: what of the parallelism is not to be chosen. Where nothing fits, the one that comes closest, which then does
    not. Both kernels are searched apart: they share slices and block RAMs, but no cycles.
    """
    linear = _frontier(start, given, "linear", ("queries", "lanes"))
    attention = _frontier(start, given, "attention", ("units", "inputs", "outputs"))
    most = start.device.dsps, start.device.block_rams
    ranks = []
    for (one, one_place), (other, other_place) in product(linear, attention):
        cycles, dsps, rams = (a + b for a, b in zip(one, other, strict=True))
        ranks.append((max(dsps / most[0], rams / most[1], 1.0), cycles, dsps, rams, one_place, other_place))
    *_, one_at, other_at = min(ranks, key=lambda rank: rank[:4])
    return replace(start, at=replace(one_at, **{name: getattr(other_at, name) for name in OF_ATTENTION}))


def _frontier(
    start: Design, given: Mapping[str, int], kernel: Kernel, others: Sequence[str]
) -> list[tuple[tuple[int, int, float], Parallelism]]:
    """(cycles, slices, block RAMs) of a kernel at every parallelism, without those that another is no worse than.

    others: what the kernel does not depend on. Attention's have the norm unit's with them.
    """
    fixed = {name: given.get(name, 1) for name in others}
    rated = []
    for at in candidates(start.sizes, dict(given) | fixed):
        design = replace(start, at=at)
        parts = (design.linear,) if kernel == "linear" else (design.attention, design.norm)
        cycles = sum(layer.count * layer.cycles for part in parts for layer in part.layers)
        taken = sum(one.slices for part in parts for one in part.multipliers)
        rated.append(((cycles, taken, sum(one.block_rams for part in parts for one in part.memories)), at))
    kept: list[tuple[tuple[int, int, float], Parallelism]] = []
    for rate, at in sorted(rated, key=lambda each: each[0]):
        if not any(all(a <= b for a, b in zip(other, rate, strict=True)) for other, _ in kept):
            kept.append((rate, at))
    return kept
