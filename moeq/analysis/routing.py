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
                "by_domain": {name: _similarity_json(own) for name, own in self.by_domain.items()},
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
                    {"sequence": sample.sequence, "domain": sample.domain}
                    | {"prefill": _shares_json(sample.prefill), "decode": _shares_json(sample.decode)}
                    for sample in self.samples
                ],
            },
        }


def analyse(trace: RoutingTrace) -> RoutingAnalysis:
    """Similarities and activations of a whole trace; one layer's choices are counted at a time."""
    domains = {name: np.array([of == name for of in trace.domains]) for name in dict.fromkeys(trace.domains)}
    cosines = {name: _Cosines.of(trace.num_layers, int(chosen.sum())) for name, chosen in domains.items()}
    whole: list[FloatArray] = []
    activation: dict[str, list[FloatArray]] = {name: [] for name in domains}
    samples = [Sample(sequence=row, domain=trace.domains[row], prefill=[], decode=[]) for row in _sample(trace)]
    for layer in range(trace.num_layers):
        counts = _phase_counts(trace, layer)
        whole.append(_shares(counts.sum((0, 1))))
        for name, chosen in domains.items():
            cosines[name].add(layer, counts[:, chosen])
            activation[name].append(_shares(counts[:, chosen].sum((0, 1))))
        for sample in samples:
            sample.prefill.append(_shares(counts[0, sample.sequence]))
            sample.decode.append(_shares(counts[1, sample.sequence]))
    modalities = _modalities(trace)
    return RoutingAnalysis(
        model=trace.model,
        text=trace.text,
        layers=trace.layers,
        tokens=trace.num_tokens,
        sequences={name: int(chosen.sum()) for name, chosen in domains.items()},
        similarity=_joined(list(cosines.values())),
        by_domain={name: _joined([own]) for name, own in cosines.items()},
        activation=whole,
        domain_activation=activation,
        between={(a, b): _mean_cosine(activation[a], activation[b]) for a, b in combinations(domains, 2)},
        samples=tuple(samples),
        modalities={name: _activation(trace, tokens) for name, tokens in modalities.items()},
        modality_tokens={name: int(tokens.sum()) for name, tokens in modalities.items()},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Cosines:
    """What one domain's S sequences add up to, of every layer [L]: how many chose in both phases, the sum of each one's
    cosine with its own decode, and of its mean cosine with the others' decodes; seen: which [S] did in any layer.
    """

    numbers: FloatArray
    own: FloatArray
    others: FloatArray
    seen: NDArray[np.bool_]

    @classmethod
    def of(cls, layers: int, sequences: int) -> _Cosines:
        numbers, own, others = np.zeros((3, layers))
        return cls(numbers=numbers, own=own, others=others, seen=np.zeros(sequences, dtype=bool))

    def add(self, layer: int, counts: FloatArray) -> None:
        """Counts [2, S, E] of a layer."""
        there = counts.any(-1).all(0)
        self.seen[there] = True
        prefill, decode = _unit(counts[:, there])
        number, own = int(there.sum()), float((prefill * decode).sum())
        self.numbers[layer], self.own[layer] = number, own
        if number > 1:  # all pairs of two sequences: the product of the sums, without each one's own
            self.others[layer] = (float(prefill.sum(0) @ decode.sum(0)) - own) / (number - 1)


def _joined(parts: Sequence[_Cosines]) -> Similarity:
    """Means over the sequences of some domains; those that are alone in their domain have no other to compare with."""
    numbers = np.stack([part.numbers for part in parts])
    together = np.where(numbers > 1, numbers, 0)
    return Similarity(
        sequences=int(sum(part.seen.sum() for part in parts)),
        same=_ratio(np.sum([part.own for part in parts], axis=0), numbers.sum(0)),
        other=_ratio(np.sum([part.others for part in parts], axis=0), together.sum(0)),
    )


def _ratio(sums: FloatArray, numbers: FloatArray) -> FloatArray:
    """sums / numbers, NaN where there is none."""
    ratios: FloatArray = np.divide(sums, numbers, out=np.full(len(sums), np.nan), where=numbers > 0)
    return ratios


def _phase_counts(trace: RoutingTrace, layer: int) -> FloatArray:
    """Counts [2, S, E] of one layer, prefill and decode."""
    prefill = trace.is_prefill
    return np.stack([sequence_counts(trace, layer, tokens) for tokens in (prefill, ~prefill)]).astype(np.float64)


def _unit(counts: FloatArray) -> FloatArray:
    """Rows [..., E] of length 1; a row without any stays 0."""
    norms = np.linalg.norm(counts, axis=-1, keepdims=True)
    rows: FloatArray = np.divide(counts, norms, out=np.zeros_like(counts), where=norms > 0)
    return rows


def _shares(counts: FloatArray) -> FloatArray:
    """Counts [E] as shares of their sum; NaN where it is 0."""
    total = float(counts.sum())
    return counts / total if total else np.full(len(counts), np.nan)


def _activation(trace: RoutingTrace, tokens: NDArray[np.bool_]) -> list[FloatArray]:
    """Shares of the marked tokens' [N] activations, [E] a layer."""
    shares = []
    for layer, experts in enumerate(trace.num_experts):
        chosen = trace.experts[tokens, layer]
        shares.append(_shares(np.bincount(chosen[chosen != NONE], minlength=experts).astype(np.float64)))
    return shares


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


def _mean_cosine(first: Sequence[FloatArray], second: Sequence[FloatArray]) -> float:
    """Mean over layers of the cosine between two activations; NaN where none is known in both."""
    cosines = [float(_unit(a) @ _unit(b)) for a, b in zip(first, second, strict=True)]
    known = [value for value in cosines if np.isfinite(value)]
    return float(np.mean(known)) if known else float("nan")


def mean(values: FloatArray) -> float | None:
    """Mean of the known layers; None where none is known."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _similarity_json(similarity: Similarity) -> dict[str, Any]:
    return {
        "sequences": similarity.sequences,
        "own_decode": _plain(mean(similarity.same)),
        "decode_of_another": _plain(mean(similarity.other)),
        "own_decode_by_layer": [_plain(value) for value in similarity.same.tolist()],
        "decode_of_another_by_layer": [_plain(value) for value in similarity.other.tolist()],
    }


def _plain(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else round(value, DIGITS)


def _shares_json(rows: Sequence[FloatArray]) -> list[list[float | None]]:
    return [[_plain(value) for value in row.tolist()] for row in rows]
