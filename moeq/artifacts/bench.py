"""bench.json: what `moeq bench` measured of a checkpoint, as far as others read it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from moeq.artifacts.manifest import NAME as MANIFEST
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


class Bench(Part):
    """kernel: what MOEQ_KERNEL was; points are missing where the grid was measured instead."""

    schema_version: int
    machine: Machine
    kernel: str | None
    bandwidth: Bandwidth
    settings: Settings
    models: tuple[Measured, ...]


def read_bench(path: Path) -> Bench:
    """ArtifactError for a file that is missing, damaged or of another version."""
    return read_model(path, Bench, SCHEMA_VERSION, remedy=REMEDY)


def manifest_digest(checkpoint: Path) -> str | None:
    """SHA-256 of a packed checkpoint's manifest, by which a bench knows it; None without one."""
    path = checkpoint / MANIFEST
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
