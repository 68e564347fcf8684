"""ExpertProfile: how often, and how strongly, every expert was chosen; per sequence, prefill and decode apart.

On disk: profile.safetensors with, for layer i, `layer.{i}.counts` int64 [S, 2, E] (P of paper 000: how often expert e
was among the top k) and `layer.{i}.scores` float64 [S, 2, E] (W: the sum of the routing weights it was given);
`tokens` int64 [S, 2]. S sequences; the middle axis is prefill, decode. Pads are in none of them. profile.json names
the layers and the text, and says how many experts of each layer saw too few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from moeq.artifacts.files import read_json, write_json
from moeq.artifacts.reading import is_count
from moeq.artifacts.stage import check_schema_version
from moeq.artifacts.tensor_files import write_tensors
from moeq.errors import ArtifactError

SCHEMA_VERSION = 2
PHASES = ("prefill", "decode")
REMEDY = "run `moeq profile` again"


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How many experts of each layer saw fewer than `min_tokens` tokens of the sequences that losses calibrates on."""

    min_tokens: int
    below: tuple[int, ...]
    experts: tuple[int, ...]

    @property
    def share_below(self) -> float:
        """Share of all experts that saw fewer."""
        return sum(self.below) / sum(self.experts)

    @property
    def share_covered(self) -> float:
        """Share of all experts that saw at least so many."""
        return (sum(self.experts) - sum(self.below)) / sum(self.experts)


@dataclass(frozen=True, kw_only=True)
class ExpertProfile:
    """Routing statistics of every MoE layer. counts[l], scores[l]: [S, 2, E_l]; tokens: [S, 2].

    text: digest of the sequences; corpus: what they were taken from, hub datasets with their commit.
    """

    layers: tuple[str, ...]
    top_k: tuple[int, ...]
    counts: tuple[np.ndarray, ...]
    scores: tuple[np.ndarray, ...]
    tokens: np.ndarray
    text: str = ""
    corpus: tuple[str, ...] = ()

    def coverage(self, min_tokens: int, heldout_stride: int) -> Coverage:
        """Which experts saw fewer than `min_tokens` tokens; every `heldout_stride`-th sequence is not counted."""
        kept = np.arange(len(self.tokens)) % heldout_stride != heldout_stride - 1
        seen = [counts[kept].sum((0, 1)) for counts in self.counts]
        return Coverage(
            min_tokens=min_tokens,
            below=tuple(int((counts < min_tokens).sum()) for counts in seen),
            experts=tuple(len(counts) for counts in seen),
        )

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

        None where no sequence has tokens in both phases.
        """
        return [float(cosines.mean()) if cosines.size else None for cosines in self.cosines()]

    def cosines(self) -> list[np.ndarray]:
        """Cosine between prefill and decode activations of every sequence that has tokens in both, an array a layer."""
        cosines = []
        for counts in self.counts:
            prefill, decode = counts[:, 0].astype(float), counts[:, 1].astype(float)
            norms = np.linalg.norm(prefill, axis=1) * np.linalg.norm(decode, axis=1)
            seen = norms > 0
            cosines.append((prefill * decode).sum(1)[seen] / norms[seen])
        return cosines


def write_profile(directory: Path, profile: ExpertProfile, coverage: Coverage) -> None:
    """Write profile.safetensors and profile.json."""
    import torch  # reading a profile takes none

    tensors: dict[str, torch.Tensor] = {"tokens": torch.from_numpy(profile.tokens)}
    for index in range(len(profile.layers)):
        tensors[f"layer.{index}.counts"] = torch.from_numpy(profile.counts[index])
        tensors[f"layer.{index}.scores"] = torch.from_numpy(profile.scores[index])
    write_tensors(directory / "profile.safetensors", tensors)
    table: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "corpus": list(profile.corpus),
        "text_digest": profile.text,
        "sequences": int(profile.tokens.shape[0]),
        "coverage": {
            "min_tokens": coverage.min_tokens,
            "experts_below": sum(coverage.below),
            "share_below": round(coverage.share_below, 8),
        },
        "tokens": dict(zip(PHASES, map(int, profile.tokens.sum(0)), strict=True)),
        "layers": [
            {
                "name": name,
                "num_experts": int(profile.counts[index].shape[-1]),
                "top_k": profile.top_k[index],
                "prefill_decode_cosine": similarity,
                "experts_below_min_tokens": coverage.below[index],
                "share_below_min_tokens": round(coverage.below[index] / coverage.experts[index], 8),
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
            profile = ExpertProfile(
                layers=tuple(layer["name"] for layer in layers),
                top_k=tuple(layer["top_k"] for layer in layers),
                counts=tuple(handle.get_tensor(f"layer.{i}.counts") for i in range(len(layers))),
                scores=tuple(handle.get_tensor(f"layer.{i}.scores") for i in range(len(layers))),
                tokens=handle.get_tensor("tokens"),
                text=table["text_digest"],
                corpus=tuple(table["corpus"]),
            )
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"cannot be read ({error})", where=str(tensors), do=REMEDY) from None
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"not a profile ({error!r})", where=str(path), do=REMEDY) from None
    problem = _problem_with(profile)
    if problem is not None:
        raise ArtifactError(f"not a profile: {problem}", where=str(directory), do=REMEDY)
    return profile


def _problem_with(profile: ExpertProfile) -> str | None:
    """What does not fit together in a profile that was read, or None."""
    if not profile.layers or not all(
        isinstance(text, str) for text in (profile.text, *profile.layers, *profile.corpus)
    ):
        return "it names no layers, or other things than texts"
    tokens = profile.tokens
    if tokens.dtype != np.int64 or tokens.ndim != 2 or tokens.shape[1] != len(PHASES) or (tokens < 0).any():
        return "tokens are not counts of every sequence"
    for name, top_k, counts, scores in zip(profile.layers, profile.top_k, profile.counts, profile.scores, strict=True):
        wanted = (*tokens.shape, counts.shape[-1] if counts.ndim == 3 else 0)
        if counts.dtype != np.int64 or counts.shape != wanted or (counts < 0).any():
            return f"counts of {name} are not counts of every sequence"
        if scores.dtype != np.float64 or scores.shape != wanted or not np.isfinite(scores).all():
            return f"scores of {name} are not numbers of every sequence"
        if not is_count(top_k) or not 1 <= top_k <= counts.shape[-1]:
            return f"top_k of {name} is {top_k!r}"
    return None
