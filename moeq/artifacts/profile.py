"""ExpertProfile: how often, and how strongly, every expert was chosen; per sequence, prefill and decode apart.

On disk: profile.safetensors with, for layer i, `layer.{i}.counts` int64 [S, 2, E] (P of paper 000: how often expert e
was among the top k) and `layer.{i}.scores` float64 [S, 2, E] (W: the sum of the routing weights it was given);
`tokens` int64 [S, 2]. S sequences; the middle axis is prefill, decode. Pads are in none of them. profile.json names
the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from moeq.artifacts.files import read_json, write_json, write_tensors
from moeq.artifacts.stage import check_schema_version
from moeq.errors import ArtifactError

SCHEMA_VERSION = 1
PHASES = ("prefill", "decode")
REMEDY = "run `moeq profile` again"


@dataclass(frozen=True, kw_only=True)
class ExpertProfile:
    """Routing statistics of every MoE layer. counts[l], scores[l]: [S, 2, E_l]; tokens: [S, 2]."""

    layers: tuple[str, ...]
    top_k: tuple[int, ...]
    counts: tuple[np.ndarray, ...]
    scores: tuple[np.ndarray, ...]
    tokens: np.ndarray

    def total(self, layer: int, phase: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Counts P and scores W of one layer [E], summed over sequences, for one phase or both."""
        pick = slice(None) if phase is None else slice(PHASES.index(phase), PHASES.index(phase) + 1)
        return self.counts[layer][:, pick].sum((0, 1)), self.scores[layer][:, pick].sum((0, 1))

    def activation(self) -> list[np.ndarray]:
        """Share of its layer's activations that each expert got, one [E] a layer (paper 000, Figure 2)."""
        totals = [self.total(layer)[0] for layer in range(len(self.layers))]
        return [counts / max(1, counts.sum()) for counts in totals]

    def similarity(self) -> list[float | None]:
        """Mean cosine between a sequence's prefill and decode activations, a layer (paper 000, Figure 4).

        Sequences without tokens in one of the phases are left out; None when none is left.
        """
        result: list[float | None] = []
        for counts in self.counts:
            prefill, decode = counts[:, 0].astype(float), counts[:, 1].astype(float)
            norms = np.linalg.norm(prefill, axis=1) * np.linalg.norm(decode, axis=1)
            seen = norms > 0
            cosines = (prefill * decode).sum(1)[seen] / norms[seen]
            result.append(float(cosines.mean()) if seen.any() else None)
        return result


def write_profile(directory: Path, profile: ExpertProfile) -> None:
    """Write profile.safetensors and profile.json."""
    tensors: dict[str, torch.Tensor] = {"tokens": torch.from_numpy(profile.tokens)}
    for index in range(len(profile.layers)):
        tensors[f"layer.{index}.counts"] = torch.from_numpy(profile.counts[index])
        tensors[f"layer.{index}.scores"] = torch.from_numpy(profile.scores[index])
    write_tensors(directory / "profile.safetensors", tensors)
    table: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "sequences": int(profile.tokens.shape[0]),
        "tokens": dict(zip(PHASES, map(int, profile.tokens.sum(0)), strict=True)),
        "layers": [
            {
                "name": name,
                "num_experts": int(profile.counts[index].shape[-1]),
                "top_k": profile.top_k[index],
                "prefill_decode_cosine": similarity,
                "activation": [round(float(value), 8) for value in activation],
            }
            for index, (name, similarity, activation) in enumerate(
                zip(profile.layers, profile.similarity(), profile.activation(), strict=True)
            )
        ],
    }
    write_json(directory / "profile.json", table)


def read_profile(directory: Path) -> ExpertProfile:
    """Read a profile back; ArtifactError when it is missing, damaged or of another schema version."""
    path = directory / "profile.json"
    table = read_json(path, remedy=REMEDY)
    version = table.get("schema_version") if isinstance(table, dict) else None
    check_schema_version(version, SCHEMA_VERSION, path, remedy=REMEDY)
    tensors = directory / "profile.safetensors"
    try:
        layers = table["layers"]
        with safe_open(tensors, "np") as handle:
            return ExpertProfile(
                layers=tuple(layer["name"] for layer in layers),
                top_k=tuple(layer["top_k"] for layer in layers),
                counts=tuple(handle.get_tensor(f"layer.{i}.counts") for i in range(len(layers))),
                scores=tuple(handle.get_tensor(f"layer.{i}.scores") for i in range(len(layers))),
                tokens=handle.get_tensor("tokens"),
            )
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"cannot be read ({error})", where=str(tensors), do=REMEDY) from None
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"not a profile ({error!r})", where=str(path), do=REMEDY) from None
