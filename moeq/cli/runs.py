"""Whole runs: run, plan and gc."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from moeq.cli.ending import refuse, show
from moeq.options import BuildOptions, JsonOption, QuietOption, option, takes_options


@takes_options("for_", "device", "workers", "quantizer", "refine", "tune", "verify", "force")
def run(asked: BuildOptions) -> None:
    """Make a model small: all stages below in order, from a recipe or with none; goes on where it was stopped."""
    from moeq.starting import context_of

    context = context_of(asked, "run")
    from moeq import api, terminal
    from moeq.cli import gates

    made = api.run_in(context, force=asked.force)
    told = [outcome.record.summary for outcome in made.stages]
    loading = next(({"loads_in": one["loads_in"]} for one in told if "loads_in" in one), {})
    finished = {
        "stages": [terminal.outcome_json(outcome) for outcome in made.stages],
        "table": made.table,
        "paths": {name: str(path) for name, path in made.paths.items()},
        **loading,
        "gates": gates.as_json(made.gates),
        "next": made.next,
    }

    def show_text(_: Any) -> None:
        terminal.print_final(made.table, made.paths, made.stages)
        terminal.print_summary(loading)
        gates.print_lines(made.gates)
        print("\nnext", *(f"  {line}" for line in terminal.named_lines(made.next)), sep="\n")

    show(finished, show_text, json=asked.json, quiet=asked.quiet)
    gates.end(made.gates, json=asked.json)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(BuildOptions):
    """Options of `moeq plan`, which has no --check."""

    check: bool = False
    probe: bool = option("Measure for a few seconds how fast this machine is.", default=True)


@takes_options("for_", "device", "workers", "quantizer", "refine", "tune")
def plan(asked: PlanOptions) -> None:
    """Say what a run will need in memory, disk and time, and whether it fits here; reads and downloads no weights."""
    from moeq.starting import context_of

    context = context_of(replace(asked, quiet=True), "plan")
    from moeq import terminal
    from moeq.planning.plan import error_of, make_plan

    made = make_plan(context, probe=asked.probe)
    show(made.as_json(), lambda _: terminal.print_plan(made), json=asked.json, quiet=asked.quiet)
    error = error_of(made)
    if error is not None:
        refuse(error, json=asked.json)


def gc(
    run: Annotated[list[Path] | None, Argument(help="Run directories.")] = None,
    out: Annotated[list[Path] | None, Option(help="The same as a RUN; may be given several times.")] = None,
    store: Annotated[
        Path | None, Option(help="Replica store that runs share: those that it knows of keep theirs.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only say what would be dropped.")] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Drop replicas that no run's recipe or assignment refers to, and what killed runs left half-written."""
    from moeq import cleaning, terminal

    freed = cleaning.collect([*(run or []), *(out or [])], store, dry_run=dry_run)
    show(freed, terminal.print_freed, json=json, quiet=quiet)


def watch(
    out: Annotated[Path, Argument(help="Run directory, also one that lies on a disk shared with other machines.")],
    once: Annotated[bool, Option("--once", help="Look once.")] = False,
    html: Annotated[Path | None, Option(help="Write a page that refreshes itself here, too.")] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show how far a run is that goes on elsewhere: stages, layers, workers, sizes, time left; until it ends."""
    from moeq import watching

    view = watching.watch(out, html=html, once=once, quiet=quiet)
    show(view.as_json(), lambda _: watching.show(view), json=json, quiet=quiet)
