"""Routing of a recorded trace: similarity of prefill and decode with its control, and maps by domain and modality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moeq.analysis.routing import FloatArray, RoutingAnalysis, Similarity, mean
from moeq.papers import CONTEXT_AWARE, DYNAEXQ, MOPEQ
from moeq.reporting import formats, svg
from moeq.reporting.atlas import ExpertMap, gallery
from moeq.reporting.charts import HEIGHT, WIDTH, by_layer, plane_of
from moeq.reporting.html import Drawing, Raw, Section, figure, lead, paragraph, plain, table
from moeq.reporting.maps import Quantity, scale_of
from moeq.reporting.names import keys_of

SHARE = Quantity(name="share of the layer's activations", form=formats.share, from_zero=True, zero_is_grey=True)
OWN, OTHER = "own decode", "decode of another sequence of the domain"


def routing(analysis: RoutingAnalysis) -> Section:
    """What the trace says beyond the profile's counts."""
    domains = ", ".join(f"{name} ({count:,})" for name, count in analysis.sequences.items())
    text = (
        f"From the recorded trace of {analysis.tokens:,} tokens; sequences by domain: {domains}. What the own decode "
        "resembles more than that of another sequence of the domain is the sequence's own context: without a gap, "
        "knowing the domain would do."
    )
    parts = [
        lead(text),
        *_similarity(analysis),
        *gallery(f"Activations by domain ({DYNAEXQ.short}, Figure 1)", domain_maps(analysis)),
        *gallery(f"Activations of vision and of language tokens ({MOPEQ.short})", modality_maps(analysis)),
        *gallery(f"Activations of single sequences ({CONTEXT_AWARE.short}, Figure 3)", sample_maps(analysis)),
    ]
    return Section("routing", "Routing by sequence and domain", parts)


def _similarity(analysis: RoutingAnalysis) -> list[Raw]:
    if mean(analysis.similarity.same) is None:
        return [paragraph("No sequence has tokens in both prefill and decode, so their similarity is unknown.")]
    caption = (
        "The cosine between a sequence's prefill and its own decode, and the control: its prefill and the decode of "
        f"the others of its domain. ({CONTEXT_AWARE.short}, Figure 4, has 0.89 for the first of Mixtral-8x7B.)"
    )
    every = {"all": analysis.similarity, **analysis.by_domain}
    rows = [(name, *_cells(similarity)) for name, similarity in every.items()]
    head = ("domain", "sequences", OWN, OTHER, "gap")
    parts = [
        figure(similarity_lines(analysis.similarity, analysis.layers), caption),
        table("Mean cosine over layers and sequences between the experts of a prefill and of a decode.", head, rows),
    ]
    if analysis.between:
        pairs = [(" and ".join(domains), _cosine(value)) for domains, value in analysis.between.items()]
        parts.append(table("Mean cosine over layers between whole domains.", ("domains", "cosine"), pairs))
    return parts


def _cells(similarity: Similarity) -> tuple[str, str, str, str]:
    own, other = mean(similarity.same), mean(similarity.other)
    gap = None if own is None or other is None else own - other
    return f"{similarity.sequences:,}", _cosine(own), _cosine(other), _cosine(gap)


def _cosine(value: float | None) -> str:
    return formats.MISSING if value is None or np.isnan(value) else f"{value:.3f}"


def similarity_lines(similarity: Similarity, names: Sequence[str]) -> Drawing:
    """Both cosines by layer; names: the model's own of them."""
    layers = np.arange(len(similarity.same))
    label = f"Chart of the cosine of a prefill with its own decode and with another sequence's in {len(layers)} layers."
    lines = ((OWN, similarity.same, svg.SERIES[0], "o"), (OTHER, similarity.other, svg.SERIES[1], "s"))

    def fill(figure: Any) -> None:
        plane = plane_of(figure)
        for name, values, colour, marker in lines:
            if np.isfinite(values).any():
                plane.plot(layers, values, color=colour, marker=marker, markersize=4, linewidth=1.4, label=name)
        low, high = plane.get_ylim()
        plane.set_ylim(low - 0.25 * (high - low), min(high, 1.0 + 0.02 * (1 - low)))  # room for the legend
        by_layer(plane, names)
        plane.legend(loc="lower right", handlelength=2.2)

    return svg.draw("phase-similarity", label, WIDTH, HEIGHT, fill)


def domain_maps(analysis: RoutingAnalysis) -> list[ExpertMap]:
    """Layers x experts of every domain, in one colour scale; none where there is only one domain."""
    named = analysis.domain_activation if len(analysis.domain_activation) > 1 else {}
    return _maps(analysis, "activation-domain", named, "Share of a layer's activations on this domain's text.")


def modality_maps(analysis: RoutingAnalysis) -> list[ExpertMap]:
    """Vision and language tokens, in one colour scale; none where the trace does not tell them apart."""
    named = {f"{name} tokens": rows for name, rows in analysis.modalities.items()}
    return _maps(analysis, "activation-modality", named, "Share of a layer's activations by these tokens.")


def sample_maps(analysis: RoutingAnalysis) -> list[ExpertMap]:
    """Prefill and decode of single sequences, in one colour scale."""
    named = {
        f"sequence {sample.sequence} ({sample.domain}), {phase}": rows
        for sample in analysis.samples
        for phase, rows in (("prefill", sample.prefill), ("decode", sample.decode))
    }
    return _maps(analysis, "activation", named, "Share of a layer's activations in this part of one sequence.")


def routing_maps(analysis: RoutingAnalysis) -> list[ExpertMap]:
    """All maps of a trace, that of its whole text first."""
    whole = _maps(
        analysis, "activation", {"all": analysis.activation}, "Share of a layer's activations on the whole text."
    )
    return [*whole, *domain_maps(analysis), *modality_maps(analysis), *sample_maps(analysis)]


def _maps(
    analysis: RoutingAnalysis, prefix: str, named: Mapping[str, list[FloatArray]], reading: str
) -> list[ExpertMap]:
    together = [row for rows in named.values() for row in rows]
    scale = scale_of(together, SHARE) if len(named) > 1 else None  # equal colours are equal shares
    return [
        ExpertMap(
            key=f"{prefix}-{key}",
            title=f"Activations: {plain(name)}",
            reading=f"{reading} Grey: never.",
            values=rows,
            quantity=SHARE,
            scale=scale,
            layers=analysis.layers,
        )
        for key, (name, rows) in zip(keys_of(list(named)), named.items(), strict=True)
    ]
