"""The plan: what every stage needs, what the machine has, and whether the one goes into the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from moeq.tables import human_bytes


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one stage needs. Bytes; `ram_terms` and `gpu_terms`, by what they are, of the moments with most in memory.

    `seconds`, on the wall and of the processor, are None without a probe. `lasting` are the stage's files by name,
    `linked` bytes of files that it shares with an earlier stage, `temporary` bytes that are gone when it ends,
    `elsewhere` bytes on the disk of a replica store that is not that of the run.
    """

    stage: str
    ram_terms: dict[str, int]
    gpu_terms: dict[str, int]
    read: int
    lasting: dict[str, int]
    linked: int
    temporary: int
    seconds: float | None
    elsewhere: int = 0
    processor_seconds: float | None = None

    @property
    def ram(self) -> int:
        return sum(self.ram_terms.values())

    @property
    def gpu(self) -> int:
        return sum(self.gpu_terms.values())

    @property
    def written(self) -> int:
        """Bytes that stay on the disk, without what is shared with an earlier stage."""
        return sum(self.lasting.values()) - self.linked

    def as_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "ram_bytes": self.ram,
            "gpu_bytes": self.gpu,
            "read_bytes": self.read,
            "written_bytes": self.written,
            "linked_bytes": self.linked,
            "temporary_bytes": self.temporary,
            "other_disk_bytes": self.elsewhere,
            "seconds": self.seconds,
            "processor_seconds": self.processor_seconds,
            "ram": self.ram_terms,
            "gpu": self.gpu_terms,
        }


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is: free memory (of the machine or the cgroup), GPU memory (None: computes on the CPU), free disk.

    store_disk, hub_disk: free disk of the replica store and of the hub's cache, None where it lies on the run's own.
    """

    ram: int
    gpu: int | None
    disk: int
    disk_path: str
    store_disk: int | None = None
    store_path: str = ""
    hub_disk: int | None = None
    hub_path: str = ""

    def as_json(self) -> dict[str, Any]:
        free = {
            "ram": self.ram, "gpu": self.gpu, "disk": self.disk, "store_disk": self.store_disk,
            "hub_disk": self.hub_disk,
        }  # fmt: skip
        return {f"available_{what}_bytes": size for what, size in free.items()} | {"disk_path": self.disk_path}


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A resource of which a stage needs more than there is."""

    stage: str
    resource: str
    need: int
    have: int
    do: str

    def line(self) -> str:
        return f"{self.stage} needs {human_bytes(self.need)} of {self.resource}, there are {human_bytes(self.have)}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe on a model on this machine. `refusals`: why the target format cannot carry what the recipe asks for;
    `download_bytes`: of its weights that are still in the hub."""

    recipe: str
    model: dict[str, Any]
    stages: tuple[Need, ...]
    machine: Machine
    rates: dict[str, float] | None
    refusals: tuple[str, ...]
    shortages: tuple[Shortage, ...]
    notes: tuple[str, ...]
    download_bytes: int = 0

    @property
    def fits(self) -> bool:
        return not self.refusals and not self.shortages

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON types, bytes and seconds in the names; disk_bytes: the most that lies there at any time, of
        what a run writes, and download_bytes what comes from the hub before."""
        short = {shortage.stage for shortage in self.shortages}
        lying = list(accumulate(need.written for need in self.stages))
        return vars(self) | {
            "machine": self.machine.as_json(),
            "stages": [need.as_json() | {"fits": need.stage not in short} for need in self.stages],
            "disk_bytes": max(size + need.temporary for size, need in zip(lying, self.stages, strict=True)),
            "shortages": [vars(shortage) for shortage in self.shortages],
            "fits": self.fits,
        }
