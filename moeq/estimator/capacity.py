"""What fits where: bytes on the GPU and on the near-data side, and what the room that is left would hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from moeq.errors import EstimateError
from moeq.estimator.devices import Hardware
from moeq.estimator.geometry import ModelGeometry, effective_bits
from moeq.estimator.placement import Placement, layer_of_assignment
from moeq.estimator.result import Frozen
from moeq.tables import human_bytes

REPLICA_BITS = (1, 2, 3, 4)


class Part(Frozen):
    """Something that has to lie in a memory."""

    name: str
    bytes: float


class Memory(Frozen):
    """A memory and what a placement puts into it."""

    name: str
    capacity_bytes: float
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> float:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def room_bytes(self) -> float:
        """What is left; negative where the parts do not fit."""
        return self.capacity_bytes - self.bytes

    @property
    def fits(self) -> bool:
        """Whether the parts are at most as large as the memory."""
        return self.room_bytes >= 0

    def sum_text(self) -> str:
        """The sum in words: every part with its bytes, the total, and what the memory has."""
        parts = " + ".join(f"{part.name} {human_bytes(part.bytes)}" for part in self.parts)
        return f"{self.name}: {parts} = {human_bytes(self.bytes)} of {human_bytes(self.capacity_bytes)}"


class KvRoom(Frozen):
    """What K experts a layer leave for keys and values: sequences of the context, or one sequence's tokens."""

    gpu_experts: int
    room_bytes: float
    largest_batch: int
    largest_context: int


class CapacityPlan(Frozen):
    """Memories and their parts, and what would fit beside `placement`'s own choice of hot experts.

    `by_gpu_experts`: every K (experts a layer on the GPU, of `gpu_stored_bits` a weight) that fits with at least one
    token of one sequence; `largest_gpu_experts`: the largest K that fits at `batch` sequences of `context` tokens, None
    where not even 0 does.
    """

    geometry: str
    hardware: str
    placement: str
    batch: int
    context: int
    group_size: int | None
    zero_points: bool
    replica_bits: tuple[int, ...]
    gpu: Memory
    ndp: Memory
    gpu_stored_bits: float = 16.0
    largest_gpu_experts: int | None
    by_gpu_experts: tuple[KvRoom, ...]

    @property
    def fits(self) -> bool:
        """Whether both memories hold their parts."""
        return self.gpu.fits and self.ndp.fits

    def refusal(self) -> EstimateError | None:
        """The sum of the first memory whose parts do not fit; None where all do."""
        for memory in (self.gpu, self.ndp):
            if not memory.fits:
                where = f"{self.geometry} on {self.hardware}"
                return EstimateError(f"does not fit: {memory.sum_text()}", where=where, do=self._remedy(memory))
        return None

    def require(self) -> None:
        """Raise the refusal, if there is one."""
        refused = self.refusal()
        if refused is not None:
            raise refused

    def _remedy(self, memory: Memory) -> str:
        if memory is self.ndp:
            return "keep fewer replicas, or use larger near-data memory"
        if self.largest_gpu_experts is None:
            return "use a smaller batch or context, or a GPU with more memory"
        return f"at this batch and context, at most {self.largest_gpu_experts} {self.experts_text} a layer fit"

    @property
    def experts_text(self) -> str:
        """What lies on the GPU: "FP16 experts", or their stored bits."""
        return "FP16 experts" if self.gpu_stored_bits == 16 else f"experts of {self.gpu_stored_bits:g} stored bits"


def plan_capacity(
    geometry: ModelGeometry,
    hardware: Hardware,
    placement: Placement,
    *,
    batch: int,
    context: int,
    group_size: int | None,
    zero_points: bool,
    codebook: str = "",
    replica_bits: Sequence[int] = REPLICA_BITS,
) -> CapacityPlan:
    """What the placement needs on the GPU and on the near-data side at `batch` sequences of `context` tokens.

    GPU: everything but the experts as it is stored, the hot experts at their widths, keys and values in FP16. Near-data
    side: FP16 and a replica at each of `replica_bits` of every expert, so that any sequence can be placed anew.
    """
    largest = partial(largest_gpu_experts, geometry, hardware, batch=batch, context=context)
    geometry = geometry.across(hardware.count)
    rows = layer_of_assignment(geometry.num_layers, len(placement.bits))
    stored = effective_bits(placement.bits, group_size, zero_points, codebook) * placement.hot
    each = float(stored[placement.hot].mean()) if placement.hot.any() else 16.0
    on_gpu = {
        "non-expert weights": geometry.non_expert_bytes,
        "hot experts": float(geometry.expert_parameters / 8 * np.sum(stored[rows])),
        f"keys and values of {batch} x {context} tokens": float(geometry.kv_bytes(context, batch)),
    }
    kept = [("FP16 experts", geometry.expert_bytes(16, None))]
    size_at = partial(geometry.expert_bytes, group_size=group_size, zero_points=zero_points, codebook=codebook)
    kept += [(f"{bits}-bit replicas", size_at(bits)) for bits in replica_bits]
    experts = geometry.num_layers * geometry.num_experts
    return CapacityPlan(
        geometry=geometry.name,
        hardware=hardware.name,
        placement=placement.name,
        batch=batch,
        context=context,
        group_size=group_size,
        zero_points=zero_points,
        replica_bits=tuple(replica_bits),
        gpu=Memory(
            name="GPU" if hardware.count == 1 else f"{hardware.count} GPUs",
            capacity_bytes=hardware.all_gpus.memory_capacity_bytes,
            parts=tuple(Part(name=name, bytes=size) for name, size in on_gpu.items()),
        ),
        ndp=Memory(
            name="near-data memory" if hardware.disk is None else "near-data memory and disk",
            capacity_bytes=hardware.near_capacity_bytes,
            parts=tuple(Part(name=name, bytes=experts * size) for name, size in kept),
        ),
        gpu_stored_bits=each,
        largest_gpu_experts=largest(stored_bits=each),
        by_gpu_experts=tuple(_kv_rooms(geometry, hardware, batch, context, each)),
    )


def largest_gpu_experts(
    geometry: ModelGeometry, hardware: Hardware, *, batch: int, context: int, stored_bits: float = 16.0
) -> int | None:
    """The most experts a layer that fit on the GPU at stored bits; None where it cannot hold even none."""
    kept = float(geometry.across(hardware.count).kv_bytes(context, batch))
    room = hardware.all_gpus.memory_capacity_bytes - geometry.non_expert_bytes - kept
    one = _bytes_of_one_a_layer(geometry, stored_bits)
    return None if room < 0 else min(geometry.num_experts, int(room // one) if one else geometry.num_experts)


def _bytes_of_one_a_layer(geometry: ModelGeometry, stored_bits: float) -> float:
    """Bytes of one expert of every layer."""
    return geometry.num_layers * geometry.expert_parameters * stored_bits / 8


def _kv_rooms(
    geometry: ModelGeometry, hardware: Hardware, batch: int, context: int, stored_bits: float
) -> Iterator[KvRoom]:
    each = float(geometry.kv_bytes(context))
    for experts in range(geometry.num_experts + 1):
        taken = experts * _bytes_of_one_a_layer(geometry, stored_bits)
        room = hardware.all_gpus.memory_capacity_bytes - geometry.non_expert_bytes - taken
        if room < float(geometry.kv_bytes(1)):
            break
        yield KvRoom(
            gpu_experts=experts,
            room_bytes=room,
            largest_batch=int(room // each),
            largest_context=geometry.longest_context(room, batch),
        )
