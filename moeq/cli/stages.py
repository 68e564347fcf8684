"""Single stages of a run, on what the ones before have left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq.cli.ending import show
from moeq.cli.runs import context_of
from moeq.errors import RecipeError
from moeq.options import RunOptions, StageOptions, option, takes_options
from moeq.registry import ALLOCATORS

if TYPE_CHECKING:
    from moeq.stages.context import Context


def run_stage(asked: RunOptions, name: str) -> None:
    """One stage on what is there, and what came of it."""
    context = context_of(asked, name)
    from moeq import pipeline, terminal

    outcome = terminal.outcome_json(pipeline.run_alone(context, name))
    show(outcome, lambda _: terminal.print_summary(outcome["summary"]), json=asked.json, quiet=asked.quiet)


@takes_options()
def reparam(asked: StageOptions) -> None:
    """Fold norms into the linears that they feed, so that one static scale serves what they give."""
    run_stage(asked, "reparam")


@takes_options()
def profile(asked: StageOptions) -> None:
    """Count what the routers choose on calibration text."""
    run_stage(asked, "profile")


@takes_options("quantizer")
def losses(asked: StageOptions) -> None:
    """Replicas of every expert at every width, and what each one loses."""
    run_stage(asked, "losses")


@dataclass(frozen=True, kw_only=True)
class AssignOptions(StageOptions):
    """Options of `moeq assign`."""

    method: str | None = option(f"{', '.join(ALLOCATORS.names())}.", sets="assign.method")
    bits_per_weight: str | None = option(
        "Budget: bits stored for a weight of the experts, scales and zero points counted, such as 2.5.",
        sets="assign.bits_per_weight",
    )
    code_bits: str | None = option(
        "Budget as papers count it: mean bits of the experts' codes alone.", sets="assign.code_bits"
    )
    average_bits: str | None = option("What --code-bits was called.", hidden=True)
    expert_bytes: str | None = option("Budget: bytes of all experts, such as 10GiB.", sets="assign.expert_bytes")
    size: str | None = option(
        "Budget: the whole checkpoint, every file of its directory, such as 12GiB.", sets="assign.size"
    )
    granularity: str | None = option(
        "What has one width, where the method decides it: expert, projection or layer.", sets="assign.granularity"
    )
    ndp_latency: float | None = option(
        "Limit beside the budget, of a method that keeps it: expected ms a token that the near-data side spends on "
        "experts.",
        sets="assign.ndp_latency_ms",
    )
    hardware: str | None = option(
        "Preset or YAML file whose near-data latency is shown and limited.", sets="assign.hardware"
    )
    target: str | None = option("Runtime that must load it; --price lists them.", sets="assign.target")
    price: bool = option("Show what each target's restriction costs.", default=False)
    frontier: bool = option("Objective against bytes of every method: table, JSON and plot.", default=False)

    @property
    def only_looks(self) -> bool:
        """Whether --price or --frontier is asked of the assignment that is there, and none is to be made."""
        makes = (
            self.recipe is not None
            or self.for_ is not None
            or self.quantizer is not None
            or self.force
            or self.changes()
        )
        return (self.price or self.frontier) and not makes

    def changes(self) -> list[str]:
        """With a budget, or a method that cannot keep the recipe's, whatever budget the recipe has goes."""
        from moeq.recipe import BUDGETS, budget_keys

        if self.average_bits is not None:
            do = "give --bits-per-weight, which counts all that is stored, or --code-bits, which counts as it did"
            raise RecipeError("there is no --average-bits", do=do)
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        given += [name for name in budget_keys() if any(one.startswith(f"assign.{name}=") for one in self.set_)]
        method = None if self.method is None else ALLOCATORS.get(self.method)
        kept = given or (budget_keys() if method is None else method.budgets)
        dropped = [name for name in budget_keys() if name not in kept]
        if method is not None and self.ndp_latency is None and "ndp_latency_ms" not in method.reads:
            dropped.append("ndp_latency_ms")  # the recipe's, which belongs to its own method
        return [*super().changes(), *(f"assign.{name}=null" for name in dropped)]


@takes_options("for_", "quantizer", "force")
def assign(asked: AssignOptions) -> None:
    """Decide which expert gets which precision and where it lives."""
    context = context_of(asked, "assign")
    from moeq import pipeline, terminal
    from moeq.stages.assign import NAME
    from moeq.stages.frontier import PLOT

    outcome: dict[str, Any] = {"stage": "assign"}
    if asked.only_looks and (context.finished("assign") / NAME).is_file():
        with pipeline.looking(context, "assign"):
            outcome |= _looked_at(context, asked)
    else:
        outcome = terminal.outcome_json(pipeline.run_alone(context, "assign", force=asked.force))
        outcome |= _looked_at(context, asked)

    def show_text(_: Any) -> None:
        if "summary" in outcome:
            terminal.print_summary(outcome["summary"])
        if "prices" in outcome:
            terminal.print_prices(outcome["prices"])
        if "frontier" in outcome:
            terminal.print_frontier(outcome["frontier"], context.finished("assign") / PLOT)

    show(outcome, show_text, json=asked.json, quiet=asked.quiet)


def _looked_at(context: Context, asked: AssignOptions) -> dict[str, Any]:
    """What --price and --frontier show of an assignment."""
    from moeq.stages import frontier as stage

    prices = {"prices": stage.prices(context)} if asked.price else {}
    return prices | ({"frontier": stage.frontier(context)} if asked.frontier else {})


@takes_options("refine")
def quantize(asked: StageOptions) -> None:
    """Make the replicas that the assignment names."""
    run_stage(asked, "quantize")


@takes_options("format", "widen", "verify")
def export(asked: StageOptions) -> None:
    """Write the packed checkpoint, its placement manifest and its model card."""
    run_stage(asked, "export")


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
    if asked.analysis is not None and asked.maps is not None:
        raise RecipeError("--analysis goes without --maps", do="give one of them")
    context = context_of(asked, "report")
    from moeq import pipeline, terminal

    if asked.analysis is not None:
        from moeq.stages.analysis import write

        show(write(context, asked.analysis), terminal.print_summary, json=asked.json, quiet=asked.quiet)
        return
    from moeq.stages.report import write_maps

    outcome = pipeline.run_alone(context, "report")
    maps = {} if asked.maps is None else {"maps": [str(path) for path in write_maps(context, asked.maps)]}
    summary = outcome.record.summary | maps
    as_json = terminal.outcome_json(outcome) | maps
    show(as_json, lambda _: terminal.print_summary(summary), json=asked.json, quiet=asked.quiet)
