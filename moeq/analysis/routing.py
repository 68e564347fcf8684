"""Routing by sequence, domain and modality, from a recorded trace.

Similarity (paper 000, Figure 4): the cosine between the distributions of activations over a layer's experts in two
parts of the text. Beside that of a sequence's own prefill and decode stands its control, the prefill of one sequence
and the decode of another of the same domain: what it says more than the control is the sequence's own context.

Letters: S sequences, L MoE layers, E experts of a layer, N tokens, D domains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeq.artifacts.stage import ModelStamp
from moeq.artifacts.trace import NONE, RoutingTrace, sequence_counts
from moeq.version import __version__

FloatArray = NDArray[np.float64]
SCHEMA_VERSION = 1
SAMPLES = 2  # sequences that are shown one by one
DIGITS = 6
VISION, LANGUAGE = "vision", "language"


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """Mean cosines of every layer [L], NaN where there is nothing to compare.

    same: of a sequence's prefill and its own decode; other: of its prefill and the decode of another sequence of its
    domain, the mean over all such pairs; sequences: how many have tokens in both phases.
    """

    sequences: int
    same: FloatArray
    other: FloatArray


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Shares of one sequence's activations, [E] a layer."""

    sequence: int
    domain: str
    prefill: list[FloatArray]
    decode: list[FloatArray]


@dataclass(frozen=True, kw_only=True)
class RoutingAnalysis:
    """What a trace says. Activations are shares of a layer's, one [E] a layer, NaN where no token chose there.

    model, text: the model that it was recorded from, and the digest of the sequences; similarity, by_domain: over all
    sequences, and over those of a domain; modalities: of vision and of language tokens, empty where the trace does not
    tell them apart; between: {(domain, domain): mean over layers of the cosine of both}.
    """

    model: ModelStamp | None
    text: str
    layers: tuple[str, ...]
    tokens: int
    sequences: Mapping[str, int]
    similarity: Similarity
    by_domain: Mapping[str, Similarity]
    activation: list[FloatArray]
    domain_activation: Mapping[str, list[FloatArray]]
    between: Mapping[tuple[str, str], float]
    samples: tuple[Sample, ...]
    modalities: Mapping[str, list[FloatArray]]
    modality_tokens: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """Plain values: cosines and shares of six digits, null where there is nothing to compare."""
        return {
            "schema_version": SCHEMA_VERSION,
            "moeq_version": __version__,
            "model": None if self.model is None else self.model.model_dump(mode="json"),
            "text_digest": self.text,
            "layers": list(self.layers),
            "tokens": self.tokens,
            "sequences": dict(self.sequences),
            "prefill_decode_cosine": {
                "all": _similarity_json(self.similarity),
                "by_domain": {name: _similarity_json(one) for name, one in self.by_domain.items()},
            },
            "between_domain_cosine": {f"{a}/{b}": _plain(value) for (a, b), value in self.between.items()},
            "activation": {
                "all": _shares_json(self.activation),
                "by_domain": {name: _shares_json(rows) for name, rows in self.domain_activation.items()},
                "by_modality": {
                    name: {"tokens": self.modality_tokens[name], "shares": _shares_json(rows)}
                    for name, rows in self.modalities.items()
                },
                "samples": [
                    {
                        "sequence": one.sequence,
                        "domain": one.domain,
                        "prefill": _shares_json(one.prefill),
                        "decode": _shares_json(one.decode),
                    }
                    for one in self.samples
                ],
            },
        }


def analyse(trace: RoutingTrace) -> RoutingAnalysis:
    """Similarities and activations of a whole trace; every layer's choices are counted once."""
    domains = {name: np.array([one == name for one in trace.domains]) for name in dict.fromkeys(trace.domains)}
    counts = [_phase_counts(trace, layer) for layer in range(trace.num_layers)]
    by_domain = {name: _similarity(counts, mine) for name, mine in domains.items()}
    activation = {name: [_shares(layer[:, mine].sum((0, 1))) for layer in counts] for name, mine in domains.items()}
    chosen = _sample(trace)
    modalities = _modalities(trace)
    return RoutingAnalysis(
        model=trace.model,
        text=trace.text,
        layers=trace.layers,
        tokens=trace.num_tokens,
        sequences={name: int(mine.sum()) for name, mine in domains.items()},
        similarity=_joined(counts, list(by_domain.values())),
        by_domain=by_domain,
        activation=[_shares(layer.sum((0, 1))) for layer in counts],
        domain_activation=activation,
        between={(a, b): _mean_cosine(activation[a], activation[b]) for a, b in combinations(domains, 2)},
        samples=tuple(
            Sample(
                sequence=index,
                domain=trace.domains[index],
                prefill=[_shares(layer[0, index]) for layer in counts],
                decode=[_shares(layer[1, index]) for layer in counts],
            )
            for index in chosen
        ),
        modalities={name: _activation(trace, tokens) for name, tokens in modalities.items()},
        modality_tokens={name: int(tokens.sum()) for name, tokens in modalities.items()},
    )


def _phase_counts(trace: RoutingTrace, layer: int) -> FloatArray:
    """Counts [2, S, E] of one layer, prefill and decode."""
    prefill = trace.is_prefill
    return np.stack([sequence_counts(trace, layer, tokens) for tokens in (prefill, ~prefill)]).astype(np.float64)


def _unit(counts: FloatArray) -> FloatArray:
    """Rows [..., E] of length 1; a row without any stays 0."""
    norms = np.linalg.norm(counts, axis=-1, keepdims=True)
    found: FloatArray = np.divide(counts, norms, out=np.zeros_like(counts), where=norms > 0)
    return found


def _similarity(counts: Sequence[FloatArray], mine: NDArray[np.bool_]) -> Similarity:
    """Of the marked sequences [S]: those that chose in both phases, layer by layer."""
    same, other = np.full(len(counts), np.nan), np.full(len(counts), np.nan)
    for index, layer in enumerate(counts):
        there = mine & layer.any(-1).all(0)
        prefill, decode = _unit(layer[:, there])
        number, own = int(there.sum()), float((prefill * decode).sum())
        if number:
            same[index] = own / number
        if number > 1:  # all pairs of two sequences: the product of the sums, without each one's own
            other[index] = (float(prefill.sum(0) @ decode.sum(0)) - own) / (number * (number - 1))
    both = np.stack([layer.any(-1).all(0) for layer in counts]).any(0)
    return Similarity(sequences=int((mine & both).sum()), same=same, other=other)


def _joined(counts: Sequence[FloatArray], parts: Sequence[Similarity]) -> Similarity:
    """Over all sequences: each against its own decode, and against those of its domain alone."""
    whole = _similarity(counts, np.ones(counts[0].shape[1], dtype=bool))
    others = np.stack([part.other for part in parts])
    numbers = np.array([[part.sequences] for part in parts]) * np.isfinite(others)
    total = numbers.sum(0)
    unknown = np.full(len(counts), np.nan)
    other = np.divide((numbers * np.nan_to_num(others)).sum(0), total, out=unknown, where=total > 0)
    return Similarity(sequences=whole.sequences, same=whole.same, other=other)


def _shares(counts: FloatArray) -> FloatArray:
    """Counts [E] as shares of their sum; NaN where it is 0."""
    total = float(counts.sum())
    return counts / total if total else np.full(len(counts), np.nan)


def _activation(trace: RoutingTrace, tokens: NDArray[np.bool_]) -> list[FloatArray]:
    """Shares of the marked tokens' [N] activations, [E] a layer."""
    found = []
    for layer, experts in enumerate(trace.num_experts):
        chosen = trace.experts[tokens, layer]
        found.append(_shares(np.bincount(chosen[chosen != NONE], minlength=experts).astype(np.float64)))
    return found


def _modalities(trace: RoutingTrace) -> dict[str, NDArray[np.bool_]]:
    """The tokens [N] of images and the others; empty where the trace does not tell them apart."""
    if trace.images is None:
        return {}
    seen = trace.images.astype(bool)
    return {VISION: seen, LANGUAGE: ~seen}


def _sample(trace: RoutingTrace) -> list[int]:
    """The first sequences that have both phases, of different domains where there are several."""
    whole = np.flatnonzero((trace.prefill > 0) & (trace.prefill < trace.lengths)).tolist()
    first = {trace.domains[index]: index for index in reversed(whole)}
    order = [*sorted(first.values()), *(index for index in whole if index not in first.values())]
    return sorted(order[:SAMPLES])


def _mean_cosine(one: Sequence[FloatArray], other: Sequence[FloatArray]) -> float:
    """Mean over layers of the cosine between two activations; NaN where none is known in both."""
    found = [float(_unit(a) @ _unit(b)) for a, b in zip(one, other, strict=True)]
    known = [value for value in found if np.isfinite(value)]
    return float(np.mean(known)) if known else float("nan")


def mean(values: FloatArray) -> float | None:
    """Mean of the known layers; None where none is known."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _similarity_json(one: Similarity) -> dict[str, Any]:
    return {
        "sequences": one.sequences,
        "own_decode": _plain(mean(one.same)),
        "decode_of_another": _plain(mean(one.other)),
        "own_decode_by_layer": [_plain(value) for value in one.same.tolist()],
        "decode_of_another_by_layer": [_plain(value) for value in one.other.tolist()],
    }


def _plain(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else round(value, DIGITS)


def _shares_json(rows: Sequence[FloatArray]) -> list[list[float | None]]:
    return [[_plain(value) for value in row.tolist()] for row in rows]
