"""Routing of a recorded trace: similarity of prefill and decode with its control, and maps by domain and modality."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moeq.analysis.routing import FloatArray, RoutingAnalysis, Similarity, mean
from moeq.reporting import formats, svg
from moeq.reporting.atlas import ExpertMap, gallery
from moeq.reporting.charts import HEIGHT, LEFT, RIGHT, WIDTH, plane_of
from moeq.reporting.html import Drawing, Raw, Section, figure, paragraph, plain, table
from moeq.reporting.maps import Quantity, Scale, scale_of, ticks

SHARE = Quantity(name="share of the layer's activations", form=formats.share, from_zero=True, zero_is_grey=True)
OWN, OTHER = "own decode", "decode of another sequence of the domain"


def routing(found: RoutingAnalysis) -> Section:
    """What the trace says beyond the profile's counts."""
    domains = ", ".join(f"{name} ({count:,})" for name, count in found.sequences.items())
    lead = (
        f"From the recorded trace of {found.tokens:,} tokens; sequences by domain: {domains}. What the own decode "
        "resembles more than that of another sequence of the domain is the sequence's own context: without a gap, "
        "knowing the domain would do."
    )
    return Section(
        anchor="routing",
        title="Routing by sequence and domain",
        parts=[
            paragraph(lead, kind="lead"),
            *_similarity(found),
            *gallery("Activations by domain (paper 001, Figure 1)", domain_maps(found)),
            *gallery("Activations of vision and of language tokens (paper 003)", modality_maps(found)),
            *gallery("Activations of single sequences (paper 000, Figure 3)", sample_maps(found)),
        ],
    )


def _similarity(found: RoutingAnalysis) -> list[Raw]:
    if mean(found.similarity.same) is None:
        return [paragraph("No sequence has tokens in both prefill and decode, so their similarity is unknown.")]
    caption = (
        "The cosine between a sequence's prefill and its own decode, and the control: its prefill and the decode of "
        "the others of its domain. (Paper 000, Figure 4, has 0.89 for the first of Mixtral-8x7B.)"
    )
    rows = [(name, *_cells(one)) for name, one in [("all", found.similarity), *found.by_domain.items()]]
    head = ("domain", "sequences", OWN, OTHER, "gap")
    parts = [
        figure(similarity_lines(found.similarity), caption),
        table("Mean cosine over layers and sequences between the experts of a prefill and of a decode.", head, rows),
    ]
    if found.between:
        pairs = [(f"{one} and {other}", _cosine(value)) for (one, other), value in found.between.items()]
        parts.append(table("Mean cosine over layers between whole domains.", ("domains", "cosine"), pairs))
    return parts


def _cells(one: Similarity) -> tuple[str, str, str, str]:
    own, other = mean(one.same), mean(one.other)
    gap = None if own is None or other is None else own - other
    return f"{one.sequences:,}", _cosine(own), _cosine(other), _cosine(gap)


def _cosine(value: float | None) -> str:
    return formats.MISSING if value is None or np.isnan(value) else f"{value:.3f}"


def similarity_lines(one: Similarity) -> Drawing:
    """Both cosines by layer."""
    layers = np.arange(len(one.same))
    label = f"Chart of the cosine of a prefill with its own decode and with another sequence's in {len(layers)} layers."

    def fill(figure: Any) -> None:
        plane = plane_of(figure)
        lines: Sequence[tuple[str, FloatArray, str, str]] = (
            (OWN, one.same, svg.SERIES[0], "o"),
            (OTHER, one.other, svg.SERIES[1], "s"),
        )
        for name, values, colour, marker in lines:
            if np.isfinite(values).any():
                plane.plot(layers, values, color=colour, marker=marker, markersize=4, linewidth=1.4, label=name)
        plane.set_xlim(-0.5, len(layers) - 0.5)
        plane.set_xticks(ticks(len(layers), (WIDTH - LEFT - RIGHT) / len(layers), 30))
        low, high = plane.get_ylim()
        plane.set_ylim(low - 0.25 * (high - low), min(high, 1.0 + 0.02 * (1 - low)))  # room for the legend
        plane.grid(axis="y")
        plane.set_xlabel("MoE layer")
        plane.set_ylabel("cosine, prefill and decode")
        plane.legend(loc="lower right", handlelength=2.2)

    return svg.draw("phase-similarity", label, WIDTH, HEIGHT, fill)


def domain_maps(found: RoutingAnalysis) -> list[ExpertMap]:
    """Layers x experts of every domain, in one colour scale; none where there is only one domain."""
    if len(found.domain_activation) < 2:
        return []
    return _maps("activation-domain", found.domain_activation, "Share of a layer's activations on this domain's text.")


def modality_maps(found: RoutingAnalysis) -> list[ExpertMap]:
    """Vision and language tokens, in one colour scale; none where the trace does not tell them apart."""
    named = {f"{name} tokens": rows for name, rows in found.modalities.items()}
    return _maps("activation-modality", named, "Share of a layer's activations by these tokens.")


def sample_maps(found: RoutingAnalysis) -> list[ExpertMap]:
    """Prefill and decode of single sequences, in one colour scale."""
    named = {
        f"sequence {one.sequence} ({one.domain}), {phase}": rows
        for one in found.samples
        for phase, rows in (("prefill", one.prefill), ("decode", one.decode))
    }
    return _maps("activation", named, "Share of a layer's activations in this part of one sequence.")


def routing_maps(found: RoutingAnalysis) -> list[ExpertMap]:
    """All maps of a trace, that of its whole text first."""
    whole = _maps("activation", {"all": found.activation}, "Share of a layer's activations on the whole text.")
    return [*whole, *domain_maps(found), *modality_maps(found), *sample_maps(found)]


def _maps(prefix: str, named: Mapping[str, list[FloatArray]], reading: str) -> list[ExpertMap]:
    scale = _together(list(named.values()))
    return [
        ExpertMap(
            key=f"{prefix}-{key}",
            title=f"Activations: {plain(name)}",
            reading=f"{reading} Grey: never.",
            values=rows,
            quantity=SHARE,
            scale=scale,
        )
        for key, (name, rows) in zip(_keys(list(named)), named.items(), strict=True)
    ]


def _keys(names: Sequence[str]) -> list[str]:
    """Names as parts of file names, each another one."""
    found = [re.sub(r"[^A-Za-z0-9_.+-]+", "_", name).strip("_") for name in names]
    return [key if found.count(key) == 1 and key else f"{key}-{index}" for index, key in enumerate(found)]


def _together(several: Sequence[list[FloatArray]]) -> Scale | None:
    """One colour scale for several maps, so that equal colours are equal shares."""
    return scale_of([row for rows in several for row in rows], SHARE) if len(several) > 1 else None
