"""bench.json: what `moeq bench` measured of a checkpoint, as far as others read it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moeq.artifacts.dynamic_log import Mask
from moeq.artifacts.places import MANIFEST
from moeq.artifacts.stage import read_model

SCHEMA_VERSION = 1
NAME = "bench.json"
FOLDER = "bench"  # of a run, where its report looks for one
REMEDY = "run `moeq bench` again"


class Part(BaseModel):
    """A part of the file; what is not read is not named here."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Machine(Part):
    device: str
    name: str
    threads: int
    torch: str


class Bandwidth(Part):
    bytes_per_second: float
    how: str


class Settings(Part):
    prompt_tokens: int
    new_tokens: int
    repeat: int


class Point(Part):
    batch: int
    first_token_seconds: float
    token_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    expert_share_of_step: float
    bytes_per_token: float
    bandwidth_share: float


class Measured(Part):
    """One model of the file; manifest_sha256: of a packed one's placement.json."""

    model: str
    packed: bool
    bits_per_weight: float
    tensor_bytes: int
    resident_bytes: int
    manifest_sha256: str | None
    points: tuple[Point, ...] = ()


class WayPoint(Part):
    """decode_of_low: over that of all experts in low precision."""

    batch: int
    first_token_seconds: float
    token_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    decode_of_low: float


class Way(Part):
    """The checkpoint in static high, low or mixed precision, or dynamic; expert_bytes: in memory."""

    name: str
    expert_bytes: int
    points: tuple[WayPoint, ...]


class Moment(Part):
    """What was in high precision after so many forward passes, by layer as the log of decisions has it; sums until
    then."""

    step: int
    high: tuple[Mask, ...]
    promotions: int
    demotions: int
    failures: int
    host_hits: int
    host_misses: int
    copied_bytes: int


class FollowedSums(Part):
    high_bits: int
    low_bits: int
    high_experts_a_layer: int


class Followed(Part):
    """Precision that followed the workload, beside static ones."""

    manifest_sha256: str | None
    summary: FollowedSums
    ways: tuple[Way, ...]
    over_time: Annotated[tuple[Moment, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _of_its_layers(self) -> Followed:
        if len({len(one.high) for one in self.over_time}) > 1:
            raise ValueError("over_time has sets of different numbers of layers")
        return self


class Bench(Part):
    """kernel: what MOEQ_KERNEL was; models, points are missing where dynamic precision or the grid was measured
    instead."""

    schema_version: int
    machine: Machine
    kernel: str | None
    bandwidth: Bandwidth
    settings: Settings
    models: tuple[Measured, ...]
    dynamic: Followed | None = None


def read_bench(path: Path) -> Bench:
    """ArtifactError for a file that is missing, damaged or of another version."""
    return read_model(path, Bench, SCHEMA_VERSION, remedy=REMEDY)


def manifest_digest(checkpoint: Path) -> str | None:
    """SHA-256 of a packed checkpoint's manifest, by which a bench knows it; None without one."""
    path = checkpoint / MANIFEST
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
