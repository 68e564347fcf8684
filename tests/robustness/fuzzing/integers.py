"""Targets: integer forwards; what is read replays, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from integer_models import made, pixels
from robustness.fuzzing.target import JsonTarget, Place, TensorsTarget

from moeq.artifacts.stage import ModelStamp
from moeq.integers.artifacts.integer import NAME, VECTORS, WEIGHTS, read_manifest
from moeq.integers.forward.description import describe
from moeq.integers.forward.program import pixel_codes
from moeq.integers.forward.replay import replay
from moeq.integers.forward.run import run
from moeq.integers.forward.saved import write
from moeq.integers.forward.schemes import program_of
from moeq.recipe import IntegerSection


def written(folder: Path) -> Path:
    """The integer forward of a tiny model with random weights, with one image."""
    folder = folder / "integer"
    model, section = made("moe"), IntegerSection()
    with torch.no_grad():
        program = program_of(describe(model, 0), pixels(model, 4), section)
        values = run(program, pixel_codes(program, pixels(model, 1, seed=1)))
    write(folder, program, values, section.model_dump(), ModelStamp(name="moe", digest="0"))
    return folder


class IntegerManifest(JsonTarget):
    """manifest.json alone: every name is made before it is used."""

    name = "integer_manifest"

    def prepare(self, place: Place) -> None:
        self.value = _smaller(json.loads((written(self.folder) / NAME).read_text("utf-8")))

    def read(self, data: bytes) -> None:
        self.file(NAME, data)
        manifest = read_manifest(self.folder)
        made = {"pixels"}
        for operation in manifest.operations:
            assert set(operation.inputs.values()) <= made
            made |= set(operation.outputs.values())


def _smaller(manifest: dict) -> dict:  # type: ignore[type-arg]
    """The first operations, and what they use."""
    operations = manifest["operations"][:4]
    values = {"pixels", *(name for operation in operations for name in operation["outputs"].values())}
    tensors = {name for operation in operations for name in operation["tensors"].values()}
    kept = {"tensors": tensors, "values": values}
    smaller = {key: [row for row in manifest[key] if row["name"] in names] for key, names in kept.items()}
    return manifest | smaller | {"operations": operations}


class Replay(JsonTarget):
    """manifest.json beside its tensors: every value equals its vector, or the first that differs is named."""

    name, per_byte = "replay", 0  # tensors are torch's own

    def prepare(self, place: Place) -> None:
        self.path = written(self.folder)
        self.value = json.loads((self.path / NAME).read_text("utf-8"))

    def read(self, data: bytes) -> None:
        (self.path / NAME).write_bytes(data)
        replay(self.path)


class _IntegerTensors(TensorsTarget):
    """Tensors of an integer forward: the manifest has their digests."""

    per_byte = 0
    filename = WEIGHTS

    def prepare(self, place: Place) -> None:
        self.path = written(self.folder)
        self.data = (self.path / self.filename).read_bytes()

    def read(self, data: bytes) -> None:
        (self.path / self.filename).write_bytes(data)
        replay(self.path)


class IntegerWeights(_IntegerTensors):
    name = "integer_weights"


class IntegerVectors(_IntegerTensors):
    name, filename = "integer_vectors", VECTORS
