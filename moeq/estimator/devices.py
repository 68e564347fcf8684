"""The devices that the estimator knows: GPU, link and near-data-processing memory, as frozen models in SI units.

In a hardware file the key of a field is its name without the unit (`bandwidth_bytes_per_second` is `bandwidth`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_UNIT = re.compile(r"_((bytes|flops)_per_second|joules_per_(byte|mac)|bytes|seconds|hertz|watts)$")


@dataclass(frozen=True)
class Unit:
    """The unit of a field, and a spelling that an error message can show."""

    name: str
    example: str


BytesPerSecond = Annotated[float, Field(gt=0), Unit("byte/second", "512 GB/s")]
FlopsPerSecond = Annotated[float, Field(gt=0), Unit("flop/second", "989.4 TFLOP/s")]
Bytes = Annotated[float, Field(gt=0), Unit("byte", "80 GB")]
Hertz = Annotated[float, Field(gt=0), Unit("hertz", "1 GHz")]
Seconds = Annotated[float, Field(ge=0), Unit("second", "5 us")]
Watts = Annotated[float, Field(ge=0), Unit("watt", "70 W")]
JoulesPerByte = Annotated[float, Field(ge=0), Unit("joule/byte", "7 pJ/bit")]
JoulesPerMac = Annotated[float, Field(ge=0), Unit("joule/mac", "1.5 pJ/MAC")]
Efficiency = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(gt=0, strict=True)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Constant(_Frozen):
    """One constant as its file writes it: dotted key, text of the value, where the value comes from."""

    key: str
    text: str
    source: str

    @property
    def is_fitted(self) -> bool:
        """Whether the value was tuned to the results that it is meant to explain: its source starts with "fitted"."""
        return self.source.lower().startswith("fitted")


class _WithMemory(_Frozen):
    memory_bandwidth_bytes_per_second: BytesPerSecond
    memory_efficiency: Efficiency
    memory_capacity_bytes: Bytes

    @property
    def memory_rate(self) -> float:
        """Bytes per second of the memory, derated."""
        return self.memory_efficiency * self.memory_bandwidth_bytes_per_second


class Gpu(_WithMemory):
    """A GPU: its memory, its peak, and a fixed time per layer that a roofline does not see."""

    peak_compute_flops_per_second: FlopsPerSecond
    compute_efficiency: Efficiency
    layer_overhead_seconds: Seconds

    @property
    def compute_rate(self) -> float:
        """FLOP per second, derated."""
        return self.compute_efficiency * self.peak_compute_flops_per_second


class Link(_Frozen):
    """The link between GPU and NDP memory; `latency_seconds` is paid once a transfer."""

    bandwidth_bytes_per_second: BytesPerSecond
    efficiency: Efficiency
    latency_seconds: Seconds

    @property
    def rate(self) -> float:
        """Bytes per second of one direction, derated."""
        return self.efficiency * self.bandwidth_bytes_per_second


class Ndp(_WithMemory):
    """Near-data processing: memory beside `arrays` systolic arrays of `array_rows` x `array_columns` MACs.

    `dataflow`: 'ws' weight-stationary, 'os' output-stationary, 'none': a memory that only holds experts, without
    arrays and clock. `low_bit_compute`: 'scale' lets the MAC rate grow as 16/bits, 'const' does not. A CPU is
    output-stationary: as many arrays as cores, of one row and as many columns as a core has MACs a cycle.
    """

    arrays: Count = 0
    array_rows: Count = 0
    array_columns: Count = 0
    clock_hertz: Hertz = 0.0
    dataflow: Literal["ws", "os", "none"]
    low_bit_compute: Literal["scale", "const"] = "const"

    @property
    def computes(self) -> bool:
        """Whether experts can run beside this memory."""
        return self.dataflow != "none"

    @property
    def peak_macs_per_second(self) -> float:
        """Multiply-accumulates per second at 16 bits with every array full."""
        return self.arrays * self.array_rows * self.array_columns * self.clock_hertz


class Energy(_Frozen):
    """What moving a byte and multiplying take beyond static power, and static power, which the devices always take.

    A MAC counts alike at every width (an upper bound).
    """

    gpu_memory_joules_per_byte: JoulesPerByte
    link_joules_per_byte: JoulesPerByte
    ndp_memory_joules_per_byte: JoulesPerByte
    gpu_compute_joules_per_mac: JoulesPerMac
    ndp_compute_joules_per_mac: JoulesPerMac
    gpu_static_watts: Watts
    ndp_static_watts: Watts


class Gpus(_Frozen):
    """Several GPUs of one kind that run a model together, and how they exchange what each of them worked out.

    `parallel`: by 'tensor' every matrix is cut into equal parts; by 'expert' that holds of all but the experts, which
    are whole, the first of a layer on the first GPU and so on. Either way sums are exchanged twice a layer, after its
    attention and after its experts (Megatron-LM, 1909.08053, section 3). Of the link between them the rate is that of
    one GPU in one direction; `latency_seconds` is paid for a message.
    """

    count: Annotated[int, Field(ge=2, le=1024, strict=True)]
    parallel: Literal["tensor", "expert"]
    bandwidth_bytes_per_second: BytesPerSecond
    efficiency: Efficiency
    latency_seconds: Seconds

    def exchange_seconds(self, num_bytes: float) -> float:
        """An all-reduce of so many bytes: the faster of a ring and of every GPU reading what all others have.

        Ring: 2(n-1) messages of an n-th each. Otherwise one message from each of the others, at the same time.
        """
        rate, others = self.efficiency * self.bandwidth_bytes_per_second, self.count - 1
        ring = 2 * others * (num_bytes / self.count / rate + self.latency_seconds)
        return min(ring, others * num_bytes / rate + self.latency_seconds)


class Disk(_Frozen):
    """A disk behind the near-data memory, for what that has no room for; `latency_seconds` is paid for a read."""

    bandwidth_bytes_per_second: BytesPerSecond
    efficiency: Efficiency
    latency_seconds: Seconds
    capacity_bytes: Bytes

    @property
    def rate(self) -> float:
        """Bytes per second of reads, derated."""
        return self.efficiency * self.bandwidth_bytes_per_second


SECTIONS: Mapping[str, type[_Frozen]] = {"gpu": Gpu, "link": Link, "ndp": Ndp}
OPTIONAL_SECTIONS: Mapping[str, type[_Frozen]] = {"gpus": Gpus, "disk": Disk, "energy": Energy}


class Hardware(_Frozen):
    """A GPU + NDP system; `policies` holds the parameters that the file sets for policies, `constants` every source.

    `gpu` and `link` are one GPU and its own way to the memory beside it; `gpus` is None where there is one only, `disk`
    and `energy` where the file gives none.
    """

    name: str
    description: str
    file: str
    gpu: Gpu
    link: Link
    ndp: Ndp
    gpus: Gpus | None = None
    disk: Disk | None = None
    energy: Energy | None = None
    policies: dict[str, dict[str, float | str]]
    constants: tuple[Constant, ...]

    @property
    def count(self) -> int:
        """How many GPUs there are."""
        return 1 if self.gpus is None else self.gpus.count

    @property
    def one(self) -> Hardware:
        """The same with one of the GPUs."""
        return self if self.gpus is None else self.model_copy(update={"gpus": None})

    @property
    def all_gpus(self) -> Gpu:
        """All GPUs as one of their memory, rates and peak, where work is spread evenly."""
        if self.gpus is None:
            return self.gpu
        fields = ("memory_bandwidth_bytes_per_second", "memory_capacity_bytes", "peak_compute_flops_per_second")
        return self.gpu.model_copy(update={name: self.count * getattr(self.gpu, name) for name in fields})

    @property
    def all_links(self) -> Link:
        """The links of all GPUs as one."""
        if self.gpus is None:
            return self.link
        bandwidth = self.count * self.link.bandwidth_bytes_per_second
        return self.link.model_copy(update={"bandwidth_bytes_per_second": bandwidth})

    @property
    def near_capacity_bytes(self) -> float:
        """Bytes beside the GPU, those of the disk among them."""
        return self.ndp.memory_capacity_bytes + (0.0 if self.disk is None else self.disk.capacity_bytes)

    def changed(self, section: str, **fields: Any) -> Hardware:
        """This hardware with some fields of one section replaced, and the change noted as their source.

        Raises pydantic.ValidationError for an unknown field or a value out of bounds.
        """
        before = getattr(self, section).model_dump(exclude_unset=True)
        new = SECTIONS[section](**{**before, **fields})
        texts = {f"{section}.{file_key(name)}": str(value) for name, value in fields.items()}
        constants = tuple(
            Constant(key=old.key, text=texts[old.key], source=f"changed from {old.text}") if old.key in texts else old
            for old in self.constants
        )
        return self.model_copy(update={section: new, "constants": constants})

    def constant(self, key: str) -> Constant:
        """The constant of a dotted key such as "link.bandwidth"; KeyError when there is none."""
        return {constant.key: constant for constant in self.constants}[key]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A number in [minimum, maximum], or one of `choices`, that a hardware file may set for a policy.

    `alternative`: what a sensitivity row tries instead where the value is an assumption.
    """

    default: float | str
    source: str
    alternative: float | str | None = None
    minimum: float = 0.0
    maximum: float = float("inf")
    choices: tuple[str, ...] = ()

    def problem_with(self, value: object) -> str | None:
        """What is wrong with a value, or None."""
        if self.choices:
            return None if value in self.choices else f"{value!r} is not one of {', '.join(self.choices)}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"{value!r} is not a number"
        if not self.minimum <= value <= self.maximum:
            return f"{value!r} is not between {self.minimum:g} and {self.maximum:g}"
        return None


def file_key(field: str) -> str:
    """The key that a hardware file uses for a field: its name without the unit."""
    return _UNIT.sub("", field)
