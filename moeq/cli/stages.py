"""Single stages of a run, on what the ones before have left."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq.cli.ending import show
from moeq.errors import RecipeError
from moeq.estimation.estimate_options import hardware_presets
from moeq.options import BUDGETS, FORMAT, BudgetOptions, RunOptions, StageOptions, among, option, takes_options
from moeq.registry import ALLOCATORS, EXPORTERS
from moeq.runtimes import OF_FOLDED, ONNX, QONNX, written

if TYPE_CHECKING:
    from moeq.pipeline import Outcome
    from moeq.stages.context import Context


def run_stage(asked: RunOptions, name: str, told: Callable[[Context, Outcome], None] | None = None) -> None:
    """One stage on what is there, and what came of it; told: in words, where its summary is not."""
    from moeq.starting import context_of

    context = context_of(asked, name)
    from moeq import pipeline, terminal

    outcome = pipeline.run_alone(context, name)

    def in_words(_: Any) -> None:
        terminal.print_summary(outcome.record.summary) if told is None else told(context, outcome)

    show(terminal.outcome_json(outcome), in_words, json=asked.json, quiet=asked.quiet)


@takes_options("device")
def reparam(asked: StageOptions) -> None:
    """Fold norms into the linears that they feed, so that one static scale serves what they give."""
    run_stage(asked, "reparam")


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(StageOptions):
    """Options of `moeq profile`."""

    imatrix: Path | None = option(
        "File for llama.cpp's own quantizer, such as imatrix.gguf: the mean squares of every matrix's inputs on the "
        "same text (llama-quantize --imatrix)."
    )


@takes_options("device", "workers")
def profile(asked: ProfileOptions) -> None:
    """Count what the routers choose on calibration text."""
    from moeq.artifacts.storage import check_no_address
    from moeq.starting import context_of

    if asked.imatrix is None:
        run_stage(asked, "profile")
        return
    if asked.imatrix.exists():
        raise RecipeError("is there already", where=f"--imatrix {asked.imatrix}", do="name another, or remove it")
    check_no_address(asked.imatrix)
    context = context_of(asked, "profile")
    from moeq import pipeline, terminal
    from moeq.artifacts.files import make_writable
    from moeq.exporters.imatrix import check
    from moeq.stages.imatrix import write

    check(context.model.skeleton.config)
    make_writable(asked.imatrix.parent)
    outcome = terminal.outcome_json(pipeline.run_alone(context, "profile"))
    outcome["imatrix"] = write(context, asked.imatrix)

    def show_text(_: Any) -> None:
        terminal.print_summary(outcome["summary"])
        terminal.print_summary(outcome["imatrix"])

    show(outcome, show_text, json=asked.json, quiet=asked.quiet)


@takes_options("device", "workers", "quantizer")
def losses(asked: StageOptions) -> None:
    """Replicas of every expert at every width, and what each one loses."""
    run_stage(asked, "losses")


def _targets() -> list[str]:
    """Runtimes by name, for a shell that asks."""
    return [target.name for exporter in EXPORTERS for target in exporter.targets]


@dataclass(frozen=True, kw_only=True)
class AssignOptions(BudgetOptions):
    """Options of `moeq assign`."""

    method: str | None = option(
        f"{', '.join(ALLOCATORS.names())}.", sets="assign.method", autocompletion=among(ALLOCATORS.names)
    )
    bits_per_weight: str | None = option("What --bits was called.", hidden=True)
    average_bits: str | None = option("What --code-bits was called.", hidden=True)
    expert_bytes: str | None = option(
        "Budget: bytes of all experts, such as 10GiB.", BUDGETS, sets="assign.expert_bytes"
    )
    granularity: str | None = option(
        "What has one width, where the method decides it: expert, projection or layer.",
        sets="assign.granularity",
        autocompletion=among(lambda: ("expert", "projection", "layer")),
    )
    ndp_latency: float | None = option(
        "Limit beside the budget, of a method that keeps it: expected ms a token that the near-data side spends on "
        "experts.",
        sets="assign.ndp_latency_ms",
    )
    speed: str | None = option(
        "Limit beside the budget: what the estimator gives the assignment on --hardware in decode, such as 20tok/s; "
        "without a budget the only one.",
        sets="assign.speed",
    )
    hardware: str | None = option(
        "Preset or YAML file whose near-data latency is shown and limited, and whose speed --speed is.",
        sets="assign.hardware",
        autocompletion=among(hardware_presets),
    )
    target: str | None = option(
        "Runtime that must load it; --price lists them.", sets="assign.target", autocompletion=among(_targets)
    )
    price: bool = option("Show what each target's restriction costs.", default=False)
    frontier: bool = option("Objective against bytes of every method: table, JSON and plot.", default=False)

    def by_names_of_today(self) -> AssignOptions:
        """With what was asked for by an earlier name; RecipeError for --average-bits, which counted something else."""
        if self.average_bits is not None:
            do = "give --bits, which counts all that is stored, or --code-bits, which counts as it did"
            raise RecipeError("there is no --average-bits", do=do)
        if self.bits_per_weight is None:
            return self
        if self.bits is not None:
            raise RecipeError("--bits-per-weight is what --bits was called, and both are given", do="give --bits")
        print("--bits-per-weight is now --bits", file=sys.stderr)
        return replace(self, bits=self.bits_per_weight, bits_per_weight=None)

    @property
    def only_looks(self) -> bool:
        """Whether --price or --frontier is asked of the assignment that is there, and none is to be made."""
        named = self.recipe_path is not None or self.for_ is not None or self.quantizer is not None
        makes = named or self.force or self.changes()
        return (self.price or self.frontier) and not makes


@takes_options("for_", "device", "quantizer", "force")
def assign(asked: AssignOptions) -> None:
    """Decide which expert gets which precision and where it lives."""
    from moeq.starting import context_of

    asked = asked.by_names_of_today()
    context = context_of(asked, "assign")
    from moeq import api, terminal
    from moeq.stages.assign import NAME
    from moeq.stages.frontier import PLOT

    look = asked.only_looks and (context.finished("assign") / NAME).is_file()
    made = api.assign_in(context, look=look, prices=asked.price, frontier=asked.frontier, force=asked.force)
    outcome: dict[str, Any] = {"stage": "assign"} if made.outcome is None else terminal.outcome_json(made.outcome)
    outcome |= {} if made.prices is None else {"prices": made.prices}
    outcome |= {} if made.frontier is None else {"frontier": made.frontier}

    def show_text(_: Any) -> None:
        if "summary" in outcome:
            terminal.print_summary(outcome["summary"])
        if "prices" in outcome:
            terminal.print_prices(outcome["prices"])
        if "frontier" in outcome:
            terminal.print_frontier(outcome["frontier"], context.finished("assign") / PLOT)

    show(outcome, show_text, json=asked.json, quiet=asked.quiet)


@takes_options("device", "refine", "tune")
def quantize(asked: StageOptions) -> None:
    """Make the replicas that the assignment names."""
    run_stage(asked, "quantize")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(StageOptions):
    """Options of `moeq export`."""

    format: list[str] = option(
        f"{FORMAT} Or by itself, of what `moeq reparam` makes: {', '.join((*OF_FOLDED, QONNX))}.",
        default=list,
        autocompletion=among(lambda: (*written(), *OF_FOLDED, QONNX)),
    )


@takes_options("device", "format", "widen", "verify")
def export(asked: ExportOptions) -> None:
    """Write the packed checkpoint, its placement manifest and its model card.

    With --format onnx instead the integer forward of a vision transformer, which `moeq reparam` has made; with --format
    qonnx its products with QONNX's Quant; with --format compressed-tensors-w8a8 the language model with folded norms
    in int8.
    """
    of_folded = [name for name in asked.format if name in (*OF_FOLDED, QONNX)]
    if not of_folded:
        run_stage(asked, "export")
    elif set(asked.format) != {*of_folded[:1]}:
        what = f"{of_folded[0]} is of what `moeq reparam` makes"
        raise RecipeError(what, where="--format", do=f"give --format {of_folded[0]} by itself")
    elif of_folded[0] in (ONNX, QONNX):
        _export_onnx(replace(asked, format=[]), of_folded[0])
    else:
        _export_w8a8(replace(asked, format=[]))


def _export_onnx(asked: StageOptions, form: str) -> None:
    """OUT/onnx, or OUT/qonnx, of a run's integer forward, and nothing else."""
    from moeq.preflight import ONNX_EXPORT
    from moeq.starting import context_of

    context = context_of(asked, ONNX_EXPORT)
    from moeq import terminal
    from moeq.stages import onnx

    show(
        onnx.write(context, verify=asked.verify, qonnx=form == QONNX),
        terminal.print_summary,
        json=asked.json,
        quiet=asked.quiet,
    )


def _export_w8a8(asked: StageOptions) -> None:
    """The stage reparam with reparam.w8a8; RecipeError where later ones went on with the model as it was."""
    from moeq.starting import context_of

    context = context_of(asked, "reparam")
    from moeq import pipeline, terminal
    from moeq.stages.w8a8 import FOLDER, wanted

    outcome = terminal.outcome_json(pipeline.run_alone(wanted(context), "reparam"))
    outcome["w8a8"] = str(context.finished("reparam") / FOLDER)

    def show_text(_: Any) -> None:
        terminal.print_summary(outcome["summary"])
        terminal.print_summary({"w8a8": outcome["w8a8"]})

    show(outcome, show_text, json=asked.json, quiet=asked.quiet)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(StageOptions):
    """Options of `moeq report`."""

    maps: Path | None = option("Folder for every map of the report: NAME.svg, and NAME.csv with its values.")
    analysis: Path | None = option(
        "Only write routing analyses into this folder (needs `moeq profile` with profile.trace: true): similarity of "
        "prefill and decode, activation maps, and the curves of eval.low_precision."
    )


@takes_options()
def report(asked: ReportOptions) -> None:
    """Write the HTML report."""
    from moeq.artifacts.places import refuse_artifacts
    from moeq.artifacts.storage import check_no_address
    from moeq.starting import context_of

    if asked.analysis is not None and asked.maps is not None:
        raise RecipeError("--analysis goes without --maps", do="give one of them")
    for flag, folder in (("--analysis", asked.analysis), ("--maps", asked.maps)):
        if folder is not None:
            check_no_address(folder)
            refuse_artifacts(folder, flag)
    context = context_of(asked, "report")
    from moeq import pipeline, terminal

    if asked.analysis is not None:
        from moeq.stages.analysis import write

        show(write(context, asked.analysis), terminal.print_summary, json=asked.json, quiet=asked.quiet)
        return
    from moeq.artifacts.files import make_writable
    from moeq.cli import gates
    from moeq.stages.gates import verdicts
    from moeq.stages.report import write_maps

    if asked.maps is not None:
        make_writable(asked.maps)
    outcome = pipeline.run_alone(context, "report")
    maps = {} if asked.maps is None else {"maps": [str(path) for path in write_maps(context, asked.maps)]}
    judged = verdicts(context)
    summary = outcome.record.summary | maps
    as_json = terminal.outcome_json(outcome) | maps | {"gates": gates.as_json(judged)}

    def show_text(_: Any) -> None:
        terminal.print_summary(summary)
        gates.print_lines(judged)

    show(as_json, show_text, json=asked.json, quiet=asked.quiet)
    gates.end(judged, json=asked.json)
