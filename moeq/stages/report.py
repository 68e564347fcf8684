"""report: one HTML page with everything that the run measured, and the model card with its figures."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from moeq.artifacts.assignment import FULL, Assignment
from moeq.artifacts.bench import FOLDER, Bench, Followed, manifest_digest, read_bench
from moeq.artifacts.bench import NAME as BENCH
from moeq.artifacts.evaluation import EvalReport
from moeq.artifacts.files import make_directory, write_text
from moeq.artifacts.gates import NAME as GATES
from moeq.artifacts.gates import Gate, read_gates, write_gates
from moeq.artifacts.loads_in import told
from moeq.artifacts.manifest import read_manifest
from moeq.artifacts.run import EDITABLE
from moeq.artifacts.stage import current_digest, read_record
from moeq.assigners.report import around
from moeq.errors import ArtifactError
from moeq.models.drafts import left_drafts
from moeq.recipe import domain_names
from moeq.recipe.editing import as_yaml
from moeq.reporting.atlas import atlas
from moeq.reporting.inputs import Loads, Refined, ReportInputs, SpeedInputs
from moeq.reporting.maps import MOST_TEXTS
from moeq.reporting.page import render
from moeq.runtime.checkpoint import CARD
from moeq.stages import (
    analysis,
    assign,
    estimate,
    evaluate,
    export,
    gates,
    integer_forward,
    profile,
    quantize,
    refine,
    reparam,
)
from moeq.stages import non_experts as others
from moeq.stages.context import Context
from moeq.stages.estimate import EstimateReport
from moeq.stages.loading import where_it_loads
from moeq.stages.needs import Needs, Sizes
from moeq.stages.replicas import load_losses
from moeq.stages.trade_offs import trade_offs

NAME = "report.html"
REVISION = 17  # raised when the same run gives another page
HOW = ("workers", "engine", "mirror")  # of a recipe: who computes, not what
APART = {"model", "store", "gates", *HOW}  # what the page does not depend on by way of its sections
STAGES = ("profile", "losses", "assign", "quantize", "export", "eval", "estimate")


def run(context: Context) -> dict[str, Any]:
    """Write report.html and the checkpoint's card; returns the summary."""
    inputs = collect(context)
    path = context.directory("report") / NAME
    text = render(inputs)
    write_text(path, text)
    export.write_card(context, inputs.manifest, card_figures(inputs.evaluation, inputs.labels))
    summary = {"bytes": len(text.encode()), "rows": len(inputs.evaluation.rows)}
    if not inputs.gates:
        return summary
    write_gates(path.parent / GATES, inputs.gates)
    return summary | {"gates": len(inputs.gates), "gates_failed": sum(not gate.holds for gate in inputs.gates)}


def collect(context: Context) -> ReportInputs:
    """Read every artifact of the run; ArtifactError when one is missing or damaged."""
    routing, assignment, evaluation = profile.load(context), assign.load(context), evaluate.load(context)
    speed = speed_inputs(estimate.load(context))
    return ReportInputs(
        profile=routing,
        coverage=routing.coverage(**profile.coverage_settings(context)),
        losses=load_losses(context),
        sensitivities=assign.sensitivities(context),
        weights=others.weights(context),
        assignment=assignment,
        evaluation=evaluation,
        manifest=read_manifest(context.directory("export")),
        speed=speed,
        recipe_text=_recipe_text(context),
        others=others.table(context),
        refined=refined(context, assignment),
        tuned=quantize.read_made(context.directory("quantize")).tuned,
        routing=analysis.recorded(context) if context.recipe.profile.trace else None,
        low_precision=analysis.measured(context),
        reparam=reparam.load(context) if context.folds else None,
        integer=integer_forward.load(context),
        bench=measured(context),
        left=left_drafts(context.model.source.drafts),
        around=around(assign.inputs_of(context, context.recipe.assign, context.recipe.name), assignment),
        trade_offs=trade_offs(context, assignment) if speed.tells else [],
        gates=gates.verdicts(context),
        loads=loads(context, assignment),
        labels=context.labels,
        domains=_domains(context, evaluation),
        digests={stage: read_record(context.directory(stage), stage).digest for stage in stages_of(context)},
        edited=assign.is_edited(context),
        mixed=mixed(context),
    )


def loads(context: Context, assignment: Assignment) -> list[Loads]:
    """Every runtime that moeq writes for, with why it does not load what was assigned as it is."""
    found = where_it_loads(context, assignment)
    return [Loads(name=name, reason=None if why is None else why["reason"]) for name, why in told(found).items()]


def _domains(context: Context, evaluation: EvalReport) -> dict[str, str]:
    """What people call the domains of the text that was measured on."""
    measured = context.recipe.eval.perplexity
    domains = sorted({name for row in evaluation.rows for name in row.perplexity_by_domain})
    return {} if measured is None else domain_names(domains, measured.source)


def stages_of(context: Context) -> tuple[str, ...]:
    """The stages whose figures the page shows, in their order."""
    return ("reparam", *STAGES) if context.folds else STAGES


def mixed(context: Context) -> dict[str, str]:
    """{stage: an earlier one} of stages that were made from another result of that one than is there now."""
    names, found = stages_of(context), dict[str, str]()
    now = {name: current_digest(context.directory(name), name, EDITABLE.get(name, frozenset())) for name in names}
    for stage in names:
        made = read_record(context.directory(stage), stage).inputs
        others = [name for name in names if made.get(name, now[name]) != now[name]]
        found |= {stage: others[0]} if others else {}
    return found


def own_inputs(context: Context) -> str | list[str | None] | None:
    """Digests of what was folded first, of a bench, and of the hardware that speeds of other assignments are of, beside
    the stages that are always there."""
    folded = current_digest(context.directory("reparam"), "reparam") if context.folds else None
    bench, hardware = _bench(context), context.recipe.assign.hardware
    beside = [hashlib.sha256(bench.read_bytes()).hexdigest()] if bench.is_file() else []
    beside += [] if hardware is None else [assign.constants_digest(hardware)]
    return [folded, *beside] if beside else folded


def measured(context: Context) -> Bench | None:
    """The bench that lies in the run; None without one, for a grid, and for one of another export."""
    if not _bench(context).is_file():
        return None
    bench = read_bench(_bench(context))
    first = bench.dynamic or (bench.models[0] if bench.models else None)
    if first is None or first.manifest_sha256 != manifest_digest(context.directory("export")):
        where = escape(str(_bench(context)))
        context.reporter.say(f"{where} is of another export: not in the report; run `moeq bench` again")
        return None
    return bench if isinstance(first, Followed) or first.points else None


def _bench(context: Context) -> Path:
    return context.out / FOLDER / BENCH


def refined(context: Context, assignment: Assignment) -> Refined | None:
    """What training the placed experts came to; None where the recipe asked for none."""
    training = refine.by_layer(context)
    if training is None:
        return None
    made = quantize.quantizers(context.directory("quantize"))
    methods = [
        made[layer.name][expert].get(choice.key, "")
        for layer in assignment.layers
        for expert, choice in enumerate(layer.experts)
        if choice.key != FULL
    ]
    changed = sum(training.mark in method for method in methods)
    return Refined(changed=changed, quantized=len(methods), iterations=training.section.iterations)


def write_maps(context: Context, directory: Path) -> list[Path]:
    """Write every map of the report as NAME.svg with its values as NAME.csv; returns the files."""
    make_directory(directory)
    texts = analysis.written(atlas(collect(context)))
    for name, text in texts.items():
        write_text(directory / name, text)
    return [directory / name for name in texts]


def speed_inputs(report: EstimateReport) -> SpeedInputs:
    return SpeedInputs(
        geometry=report.geometry,
        geometry_is_the_models=report.geometry_is_the_models,
        hardware=report.hardware,
        popularity=report.popularity,
        estimates=report.estimates,
        decode_speedups={made.placement: estimate.decode_speedups(made) for made in report.estimates},
    )


def card_figures(report: EvalReport, named: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of the model card's table, the largest first; named: what people read for a variant."""
    rows = sorted(report.rows, key=lambda row: (-row.expert_bytes, row.name))
    columns = {"name", "bits_per_weight", "expert_bytes", "perplexity", "accuracy"}
    return [
        row.model_dump(include=columns)
        | {"name": named.get(row.name, row.name)}
        | row.divergence_figures()
        | row.image_figures()
        for row in rows
    ]


def is_intact(context: Context) -> bool:
    """Whether the checkpoint's card still has the figures: an export that ran again wrote it without them.

    And whether the page has the recipe's gates, which are in no stage's key.
    """
    if gates.verdicts(context) != _gates_there(context):
        return False
    path = context.directory("export") / CARD
    figures = card_figures(evaluate.load(context), context.labels)
    expected = export.card(context, read_manifest(path.parent), figures)
    return path.is_file() and path.read_text("utf-8") == expected


def _gates_there(context: Context) -> tuple[Gate, ...] | None:
    """The gates that the page was written with; None where they cannot be read."""
    path = context.directory("report") / GATES
    try:
        return read_gates(path) if path.is_file() else ()
    except ArtifactError:
        return None


def _recipe_text(context: Context) -> str:
    """The recipe with its defaults filled in; the model by name, and nothing of where things lie on this machine."""
    data = context.recipe.model_dump(
        mode="json", exclude={"store", *HOW} | (set() if context.recipe.gates.any() else {"gates"})
    )
    return as_yaml(data | {"model": context.model.source.name})


FIGURES = 95 << 20  # bytes of the figures while they are drawn; measured 70 to 115
ROW = 1300  # bytes of one row of the loss table as a Python dictionary
SECONDS, EXPERT_SECONDS = 2.0, 9e-4
PAGE, LAYER, ASSIGNMENT, METHOD = 71_000, 1_000, 2_600, 9_500  # bytes of the page without its maps
MEASURES = 5  # maps of values beside those of losses
GATE, GATED = 250, 4  # bytes of a gate in gates.json, and about how many there are
VALUES, VALUE, WIDTHS, WIDTH = 3_950, 76, 2_150, 165  # bytes of a map of values and of widths, and a cell's
LABELLED, PIXELS = 30, 3.3  # cells that make a map of values larger by their labels; bytes of a cell in the picture


def needs(sizes: Sizes) -> Needs:
    """Tables, figures and the page, whose bytes are known only when it is drawn: an estimate."""
    losses, layers, count = sizes.recipe.losses, len(sizes.layers), len(sizes.checkpoint.sections)
    size = PAGE + LAYER * layers + ASSIGNMENT * count + METHOD * len(losses.methods)
    values = VALUES + VALUE * min(sizes.experts, LABELLED) + PIXELS * sizes.experts
    widths = WIDTHS + (WIDTH if sizes.experts <= MOST_TEXTS else PIXELS) * sizes.experts
    size += int((MEASURES + len(losses.bits)) * values + count * widths)
    once = sizes.loss_rows() // (len(losses.methods) * (4 if losses.per_projection else 1))
    drawn = {"rows of the loss table": once * ROW, "manifest": export.manifest_bytes(sizes), "figures": FIGURES}
    moment = {**(sizes.model() if sizes.streams else {}), **sizes.tables(), **drawn}
    gated = {GATES: GATE * GATED} if sizes.recipe.gates.any() else {}
    return Needs(
        moments=[moment], files={NAME: size, **gated}, seconds=lambda rates: SECONDS + EXPERT_SECONDS * sizes.experts
    )
