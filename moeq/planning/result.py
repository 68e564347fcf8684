"""The plan: what every stage needs, what the machine has, and whether the one goes into the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moeq.tables import human_bytes


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of a stage's memory: what it is and its bytes, in the machine's memory or the GPU's.

    `lever`: the key of the recipe that makes it smaller, with what to set it to.
    """

    what: str
    bytes: int
    gpu: bool = False
    lever: str | None = None


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one stage needs. Bytes; `ram_terms` are those of the moment with most in memory.

    `seconds`, on the wall and of the processor, are None without a probe. `lasting` are the stage's files by name,
    `linked` bytes of files that it shares with an earlier stage, `temporary` bytes that are gone when it ends,
    `elsewhere` bytes on the disk of a replica store that is not that of the run.
    """

    stage: str
    ram_terms: tuple[Term, ...]
    gpu_terms: tuple[Term, ...]
    read: int
    lasting: dict[str, int]
    linked: int
    temporary: int
    seconds: float | None
    elsewhere: int = 0
    processor_seconds: float | None = None

    @property
    def ram(self) -> int:
        return sum(term.bytes for term in self.ram_terms)

    @property
    def gpu(self) -> int:
        return sum(term.bytes for term in self.gpu_terms)

    @property
    def written(self) -> int:
        """Bytes that stay on the disk, without what is shared with an earlier stage."""
        return sum(self.lasting.values()) - self.linked


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is: free memory (of the machine or the cgroup), GPU memory (None: computes on the CPU), free disk.

    store_disk: free disk of the replica store, None when it lies on the run's own.
    """

    ram: int
    gpu: int | None
    disk: int
    disk_path: str
    store_disk: int | None = None
    store_path: str = ""


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
    """A recipe on a model on this machine. `refusals`: why the target format cannot carry what the recipe asks for."""

    recipe: str
    model: dict[str, Any]
    stages: tuple[Need, ...]
    machine: Machine
    rates: dict[str, float] | None
    refusals: tuple[str, ...]
    shortages: tuple[Shortage, ...]
    notes: tuple[str, ...]

    @property
    def disk(self) -> int:
        """The most that lies on the disk at any time of the run."""
        most = lying = 0
        for need in self.stages:
            lying += need.written
            most = max(most, lying + need.temporary)
        return most

    @property
    def fits(self) -> bool:
        return not self.refusals and not self.shortages

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON types, bytes and seconds in the names."""
        short = {(one.stage, one.resource) for one in self.shortages}
        return {
            "recipe": self.recipe,
            "model": self.model,
            "machine": {
                "available_ram_bytes": self.machine.ram,
                "available_gpu_bytes": self.machine.gpu,
                "available_disk_bytes": self.machine.disk,
                "disk_path": self.machine.disk_path,
                "available_store_disk_bytes": self.machine.store_disk,
            },
            "rates": self.rates,
            "stages": [
                {
                    "stage": need.stage,
                    "ram_bytes": need.ram,
                    "gpu_bytes": need.gpu,
                    "read_bytes": need.read,
                    "written_bytes": need.written,
                    "linked_bytes": need.linked,
                    "temporary_bytes": need.temporary,
                    "other_disk_bytes": need.elsewhere,
                    "seconds": need.seconds,
                    "processor_seconds": need.processor_seconds,
                    "fits": not any(stage == need.stage for stage, _ in short),
                    "ram": {term.what: term.bytes for term in need.ram_terms},
                    "gpu": {term.what: term.bytes for term in need.gpu_terms},
                }
                for need in self.stages
            ],
            "disk_bytes": self.disk,
            "refusals": list(self.refusals),
            "shortages": [vars(one) for one in self.shortages],
            "notes": list(self.notes),
            "fits": self.fits,
        }
