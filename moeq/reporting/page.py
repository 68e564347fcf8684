"""The whole page: one HTML file that asks for nothing else."""

from __future__ import annotations

from moeq.artifacts.bench import Bench
from moeq.reporting import (
    cautions,
    decided,
    experts,
    followed,
    formats,
    frontier,
    low_precision,
    measured,
    reparam,
    routing,
    speed,
    summary,
    trade_offs,
    translation,
)
from moeq.reporting import non_experts as others
from moeq.reporting.frame import document
from moeq.reporting.html import Raw, Section, details, element, escape, join, lead, paragraph, table
from moeq.reporting.inputs import ReportInputs


def render(inputs: ReportInputs) -> str:
    """The report as one HTML document; its bytes depend only on the artifacts."""
    sizes, traded = frontier.frontier(inputs.around), trade_offs.trade_offs(inputs.trade_offs, inputs.speed)
    sweeps, translated, folded = inputs.low_precision, inputs.evaluation.translation, inputs.reparam
    sections = [
        decided.decided(inputs),
        summary.size_against_quality(inputs),
        *([] if sizes is None else [sizes]),
        *([] if traded is None else [traded]),
        cautions.cautions(inputs),
        summary.variants(inputs),
        *([] if translated is None else [translation.translation(translated, inputs.labels)]),
        experts.activation(inputs),
        *([] if inputs.routing is None else [routing.routing(inputs.routing)]),
        experts.losses(inputs),
        experts.sensitivity(inputs),
        experts.bits(inputs),
        *([] if inputs.others is None else [others.packed_modules(inputs.others)]),
        *([] if inputs.bench is None else [_measured(inputs.bench)]),
        speed.estimate(inputs),
        *([] if sweeps is None else [low_precision.low_precision(sweeps)]),
        *([] if folded is None else [reparam.reparam(folded, inputs.integer)]),
        provenance(inputs),
    ]
    name = inputs.manifest.model.name
    return document(
        f"{name}: {inputs.label(inputs.assignment.name)} · moeq report", name, [_subtitle(inputs)], sections
    )


def _measured(bench: Bench) -> Section:
    return measured.measured(bench) if bench.dynamic is None else followed.followed(bench)


def _subtitle(inputs: ReportInputs) -> Raw:
    label = inputs.label(inputs.assignment.name)
    what = paragraph(Raw(f"Experts packed as <b>{escape(label)}</b>."), kind="lead")
    return join([what, lead(_coverage(inputs)), cautions.summary_line(inputs)])


def _coverage(inputs: ReportInputs) -> str:
    """How many experts calibration reached."""
    coverage, profile = inputs.coverage, inputs.profile
    experts, below = sum(coverage.experts), sum(coverage.below)
    never = sum(int((profile.total(layer)[0] == 0).sum()) for layer in range(len(profile.layers)))
    text = (
        f"Calibration reached {experts - below:,} of {experts:,} experts with {coverage.min_tokens:,} tokens or more, "
        f"{formats.share(coverage.share_covered)}"
    )
    return f"{text}; {never:,} of the others never." if never else f"{text}."


def provenance(inputs: ReportInputs) -> Section:
    """What the run was made from, exactly."""
    stamp = inputs.manifest.model
    facts = [
        ("model", stamp.name),
        ("revision", stamp.revision or "local"),
        ("model digest", element("span", stamp.digest, class_="digest")),
        ("moeq", inputs.manifest.moeq_version),
    ]
    digests = [(stage, element("span", digest, class_="digest")) for stage, digest in inputs.digests.items()]
    reading = "Digest of what each stage wrote: a run with the same digests gave the same bytes."
    parts = [
        table("The model that was read and the program that read it.", ("what", "value"), facts, texts=2),
        table(reading, ("stage", "digest"), digests, texts=2),
        details("The recipe as it was run", element("pre", inputs.recipe_text or "not found in the run directory")),
    ]
    return Section("provenance", "Provenance", parts)
