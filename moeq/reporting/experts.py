"""What routing, losses, sensitivity and bits look like, layer by layer and expert by expert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow.compute
from numpy.typing import NDArray

from moeq.artifacts.assignment import Assignment, width_of
from moeq.artifacts.losses import WHOLE, LossTable
from moeq.artifacts.profile import ExpertProfile
from moeq.papers import CONTEXT_AWARE, MOPEQ
from moeq.quantizers.quantizer import label
from moeq.reporting import atlas, formats
from moeq.reporting.charts import Band, loss_chart, similarity_chart, width_chart
from moeq.reporting.html import Raw, Section, details, element, figure, items, lead, paragraph, table
from moeq.reporting.inputs import ReportInputs
from moeq.reporting.names import expert_name, never_chosen

MOST_NAMED = 12
MOST_LISTED = 600  # experts whose matrices are listed one by one
FALLBACKS = {
    "borrowed_hessian": "too few calibration tokens, so part of the layer's Hessian stood in",
    "left_out_tokens": "some of the layer's tokens were left out, since their activations are not finite",
    "raised_damping": "the factorization held only with more damping",
    "float64": "the factorization held only in float64",
    "rounded": "no factorization held, so the weights were rounded to nearest",
    "scale_underflow": "the weights are so small that their scales have few digits in float16",
    "scale_overflow": "the weights are so large that their scales were cut off at the largest of float16",
}


def activation(inputs: ReportInputs) -> Section:
    """Who is chosen, and whether the prefill predicts the decode."""
    profile = inputs.profile
    number, sequences = int(profile.tokens.sum()), int(profile.tokens.shape[0])
    one, text = "token", f"{number:,} tokens in {formats.count(sequences, 'sequence')} of calibration text"
    if inputs.classifies:
        one, text = "position", f"{number:,} positions of {formats.count(sequences, 'image')}"
    top_k = " or ".join(map(str, sorted(set(profile.top_k))))
    text = (
        f"Counted on {text}, the top {top_k} experts a {one}. Maps of what every expert was given are under "
        "Sensitivity."
    )
    return Section("activation", "Which experts are chosen", [lead(text), *_similarity(profile)])


def _similarity(profile: ExpertProfile) -> list[Raw]:
    means = np.array([np.nan if value is None else value for value in profile.similarity()])
    if np.isnan(means).all():
        return [paragraph("No sequence has tokens in both prefill and decode, so their similarity is unknown.")]
    cosines = [cosines if cosines.size else np.full(1, np.nan) for cosines in profile.cosines()]
    low, high = (np.array([np.quantile(layer, part) for layer in cosines]) for part in (0.1, 0.9))
    label = f"Chart of the cosine between prefill and decode by layer, {np.nanmean(means):.3f} on average."
    drawing = similarity_chart("similarity", label, Band(middle=means, low=low, high=high), profile.layers)
    caption = (
        "Near 1, the experts that a sequence's prefill chose are those that its decode will choose, so they can be "
        "placed before it starts. Points: mean over sequences; bars: 10-90 % of them. "
        f"({CONTEXT_AWARE.short}, Figure 4.)"
    )
    return [figure(drawing, caption)]


def losses(inputs: ReportInputs) -> Section:
    """What every expert loses at every width."""
    measured, widths = inputs.losses, inputs.losses.bits()
    relative = {method: measured.matrix(method, "relative_loss") for method in measured.methods()}
    bands = {label(method): _band(layers, widths) for method, layers in relative.items()}
    parts = [
        lead(
            "Relative loss: squared error of an expert's output on tokens that were not used to quantize it, divided "
            "by the output's energy."
        ),
        figure(
            loss_chart("losses", f"Chart of relative loss by code bits for {', '.join(bands)}.", widths, bands),
            "Lower is better. Lines: median over experts; bands: the middle 80 % of them. A wide band means that one "
            "width for all is a waste.",
        ),
        _loss_table(relative, widths),
        element("h3", "Fallbacks and coverage"),
        lead("Figures of experts that calibration hardly reached are less certain than the others."),
        items(_coverage(measured, atlas.main_method(inputs), inputs.profile)),
    ]
    return Section("losses", "What an expert loses", parts)


def _at(layers: Sequence[dict[int, np.ndarray]], width: int) -> NDArray[np.float64]:
    """Losses of all experts at a width."""
    return np.concatenate([layer[width] for layer in layers if width in layer] or [np.full(1, np.nan)])


def _band(layers: Sequence[dict[int, np.ndarray]], widths: Sequence[int]) -> Band:
    def parts(width: int) -> NDArray[np.float64]:
        values = _at(layers, width)
        known = values[np.isfinite(values)]
        return np.quantile(known, (0.5, 0.1, 0.9)) if known.size else np.full(3, np.nan)

    middle, low, high = np.array([parts(width) for width in widths]).T
    return Band(middle=middle, low=low, high=high)


def _loss_table(relative: dict[str, list[dict[int, np.ndarray]]], widths: Sequence[int]) -> Raw:
    head = ("method", *map(formats.width, widths))
    rows = [
        (label(method), *(formats.share(float(np.mean(_at(layers, width)))) for width in widths))
        for method, layers in relative.items()
    ]
    return table("Mean relative loss over all experts; lower is better.", head, rows)


def _coverage(measured: LossTable, method: str, profile: ExpertProfile) -> list[str]:
    """Sentences on the experts that calibration hardly reached and on what stood in for it."""
    field, least_bits = pyarrow.compute.field, measured.bits()[0]
    once = (field("projection") == WHOLE) & (field("method") == method) & (field("bits") == least_bits)
    whole: list[dict[str, Any]] = measured.table.filter(once).to_pylist()  # one row an expert
    fallbacks = Counter(name for row in whole for name in row["fallback"].split("+") if name != "none")
    lines = [
        f"{formats.count(number, 'expert')} of {len(whole):,}: {FALLBACKS.get(name, 'a fallback')} ({name})."
        for name, number in sorted(fallbacks.items())
    ] or [f"No fallback was needed for any of the {len(whole):,} experts."]
    borrowed = sum(row["measured_on"] == "borrowed" for row in whole)
    lines.append(
        f"{formats.count(borrowed, 'expert')} of {len(whole):,}: too few held-out tokens, so the loss was measured on "
        "other tokens of the layer."
    )
    least = min(whole, key=lambda row: (row["calibration_tokens"], row["layer"], row["expert"]))
    place = expert_name(least["layer_name"], least["expert"])
    lines.append(f"Fewest calibration tokens: {least['calibration_tokens']:,} ({place}).")
    count, names = never_chosen(profile, MOST_NAMED)
    return [*lines, f"Never chosen in calibration: {formats.count(count, 'expert')}{names and f' ({names})'}."]


def sensitivity(inputs: ReportInputs) -> Section:
    """What every measure says that an expert is worth, one map each."""
    measures, losses = atlas.sensitivity_maps(inputs), atlas.loss_maps(inputs)
    unknown = [measure.title for measure in measures if not measure.known]
    text = (
        "What the measures that assign bits say of every expert, side by side: where they disagree, the methods built "
        "on them do. Colours run from the least to the largest value of a map, but for outliers, which its "
        "caption counts; the scale names the unit."
    )
    parts = [
        lead(text),
        atlas.figures([measure for measure in (*measures, losses[0]) if measure.known]),
        *([paragraph(f"Not known of any expert of this run: {', '.join(unknown)}.")] if unknown else []),
        *atlas.gallery("Losses at the other widths", losses[1:]),
    ]
    return Section("sensitivity", "Sensitivity", parts)


def bits(inputs: ReportInputs) -> Section:
    """Which expert got which width, and where it lives: by the recipe's assignment, then by every other one."""
    assignment = inputs.assignment
    codes = assignment.code_bits()
    row = inputs.evaluation.row(assignment.name)
    stored = (
        "" if row is None or row.bits_per_weight is None else f"{formats.bits(row.bits_per_weight)} bits of a weight, "
    )
    mean = f"{stored}{formats.bits(None if codes is None else float(codes))} of them its code's"
    mean = mean if stored else f"{formats.bits(None if codes is None else float(codes))} code bits on average"
    by_bits = _counts(assignment)
    what = "matrices" if assignment.is_mixed else "experts"
    text = ", ".join(f"{count:,} at {width}" for width, count in by_bits.items())
    bars = width_chart("widths", f"Bar chart of {what} by code bits: {text}.", by_bits, what)
    given = "the mean of its matrices' code bits" if assignment.is_mixed else "its code bits"
    shown = [
        figure(
            atlas.own_widths(inputs).draw(),
            f"Each cell is one expert and {given}; 16 means left as it was, 0 dropped. Above it: the bits that are "
            "stored for a weight, and the bytes of all experts, scales and zero points counted. "
            f"{atlas.placement(assignment)}",
        ),
        figure(bars, f"How many {what} got each width: one bar would be a uniform assignment."),
    ]
    parts = [
        lead(f"{inputs.label(assignment.name)}: {assignment.method}; {mean}."),
        element("div", *shown, class_="figures"),
        *_matrices(assignment),
        *atlas.gallery(
            f"Code bits of the other assignments ({MOPEQ.short}, Figures 5-10)", atlas.compared_widths(inputs)
        ),
    ]
    return Section("bits", "Code bits of every expert", parts)


def _projections(assignment: Assignment) -> list[str]:
    """The matrices of an expert, where those of some expert differ in width."""
    choices = (choice for layer in assignment.layers for choice in layer.experts)
    return next((list(choice.projections) for choice in choices if choice.projections is not None), [])


def _counts(assignment: Assignment) -> dict[int, int]:
    """{width: number of experts}, or of matrices where those of some expert differ."""
    names = _projections(assignment)
    flat = chain.from_iterable(assignment.expert_widths())
    counts = Counter(width_of(widths, name) for widths in flat for name in names or [""])
    return {width: counts[width] for width in sorted(counts)}


def _matrices(assignment: Assignment) -> list[Raw]:
    """Where the matrices of some expert differ in width: how many of each have which, and of every expert."""
    names, layers = _projections(assignment), assignment.expert_widths()
    if not names:
        return []
    known = assignment.widths()
    rows = []
    for name in names:
        bits = [width_of(widths, name) for widths in chain.from_iterable(layers)]
        rows.append((name, *(f"{bits.count(width):,}" for width in known), formats.bits(sum(bits) / len(bits))))
    head = ("matrix", *map(formats.width, known), "mean code bits")
    tables = [table("How many experts have which width for each of their matrices.", head, rows)]
    if sum(map(len, layers)) <= MOST_LISTED:
        every = [
            (expert_name(layer.name, expert), *(str(width_of(widths, name)) for name in names))
            for layer, experts in zip(assignment.layers, layers, strict=True)
            for expert, widths in enumerate(experts)
        ]
        listed = table("Code bits of every matrix of every expert.", ("expert", *names), every)
        tables.append(details("every expert", listed))
    return tables
