"""Replay of an exported integer forward from its files alone: equal, or the first tensor that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moeq.errors import ArtifactError
from moeq.integers.artifacts.integer import REMEDY
from moeq.integers.forward.run import run
from moeq.integers.forward.saved import read


def replay(folder: Path) -> dict[str, Any]:
    """Run the vectors' pixels through the manifest's operations and compare every value, in order.

    ArtifactError for damaged files, for operations that do not go together, and naming the first value that differs,
    with its first place.
    """
    manifest, program, vectors = read(folder)
    try:
        made = run(program, vectors["pixels"])
    except (RuntimeError, IndexError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArtifactError(f"its operations do not go together ({reason})", where=str(folder), do=REMEDY) from None
    for operation in manifest.operations:
        for name in operation.outputs.values():
            value, wanted = made[name], vectors[name]
            if wanted.shape != value.shape:
                what = f"value {name} is {list(value.shape)}, the vectors have {list(wanted.shape)}"
                raise ArtifactError(what, where=str(folder), do=REMEDY)
            if not torch.equal(wanted, value):
                raise ArtifactError(_difference(name, wanted, value), where=str(folder), do=REMEDY)
    return {
        "kind": "integer forward of a vision transformer",
        "model": None if manifest.model is None else manifest.model.name,
        "settings": manifest.settings,
        "operations": len(manifest.operations),
        "tensors": len(manifest.tensors),
        "weight_bytes": sum(manifest.files[name].bytes for name in {stored.file for stored in manifest.tensors}),
        "images": manifest.vectors,
        "values": len(manifest.values),
        "check": "every SHA-256 equals the manifest; replayed from these files, every value equals its vector",
    }


def _difference(name: str, wanted: torch.Tensor, value: torch.Tensor) -> str:
    places = (wanted != value).nonzero()
    first = tuple(places[0].tolist())
    return (
        f"value {name} differs from its vector in {len(places)} of {wanted.numel()} places, first at "
        f"{list(first)}: {int(value[first])} instead of {int(wanted[first])}"
    )
