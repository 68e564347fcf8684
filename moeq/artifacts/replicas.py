"""The replica store: packed replicas of every expert at every width, one safetensors file a layer.

Keys of `layer-{l:03d}.safetensors`: `{projection}.{bits}.{part}`, part codes, scales or zeros, each stacked over the
layer's experts on its first axis, so that one expert is a slice of one row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from moeq.artifacts.files import write_tensors
from moeq.artifacts.stage import check_schema_version
from moeq.errors import ArtifactError
from moeq.numerics.packed import PARTS, PackedWeight

SCHEMA_VERSION = 1
REMEDY = "run `moeq losses` again"


def layer_file(directory: Path, layer: int) -> Path:
    return directory / f"layer-{layer:03d}.safetensors"


def write_layer_replicas(directory: Path, layer: int, replicas: Mapping[str, Mapping[int, PackedWeight]]) -> None:
    """Write all replicas of one layer: {projection: {bits: stack over experts}}."""
    tensors: dict[str, Any] = {}
    shapes: dict[str, dict[str, Any]] = {}
    for projection, widths in replicas.items():
        for bits, packed in widths.items():
            shapes[projection] = {
                "inputs": packed.inputs,
                "group_size": packed.group_size,
                "symmetric": packed.symmetric,
            }
            tensors |= {f"{projection}.{bits}.{part}": tensor for part, tensor in packed.parts().items()}
    metadata = {"moeq_schema_version": str(SCHEMA_VERSION), "projections": json.dumps(shapes, sort_keys=True)}
    write_tensors(layer_file(directory, layer), tensors, metadata)


class LayerReplicas:
    """Reads single experts' replicas of one layer from the store."""

    def __init__(self, directory: Path, layer: int) -> None:
        """Open the layer's file; ArtifactError when it is missing, damaged or of another schema version."""
        self.path = layer_file(directory, layer)
        try:
            self.handle = safe_open(self.path, "pt")
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"cannot be read ({error})", where=str(self.path), do=REMEDY) from None
        metadata = self.handle.metadata() or {}
        check_schema_version(metadata.get("moeq_schema_version"), str(SCHEMA_VERSION), self.path, remedy=REMEDY)
        self.projections: dict[str, dict[str, Any]] = json.loads(metadata["projections"])
        self.keys = set(self.handle.keys())

    def widths(self, projection: str) -> list[int]:
        """The widths that the store holds of one projection."""
        return sorted(
            int(key.split(".")[1]) for key in self.keys if key.startswith(f"{projection}.") and "codes" in key
        )

    def expert(self, projection: str, bits: int, expert: int) -> PackedWeight:
        """One expert's replica; ArtifactError when the store does not hold that width."""
        if f"{projection}.{bits}.codes" not in self.keys:
            raise ArtifactError(
                f"no {bits}-bit replica of {projection} (there are {self.widths(projection)})",
                where=str(self.path),
                do="add the width to losses.bits",
            )
        parts: dict[str, Any] = {
            part: self.handle.get_slice(key)[expert] if (key := f"{projection}.{bits}.{part}") in self.keys else None
            for part in PARTS
        }
        return PackedWeight(bits=bits, **parts, **self.projections[projection])
