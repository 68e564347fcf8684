"""eval and estimate: of a run, or without one of anything that is named."""

from __future__ import annotations

from typing import Any

import typer

from moeq.cli.ending import refuse, show
from moeq.cli.stages import run_stage
from moeq.comparison.eval_options import EvalOptions
from moeq.estimation.estimate_options import EstimateOptions
from moeq.options import takes_options
from moeq.registry import POLICIES


@takes_options("device")
def evaluate(asked: EvalOptions) -> None:
    """Perplexity and lm-eval of a run's original, export and other assignments, or of any models, checkpoints
    and runs."""
    from moeq.comparison import refusals

    if refusals.needs_a_run(asked):
        run_stage(asked, "eval")
        return
    refusals.check(asked)
    from moeq import terminal
    from moeq.comparison.side_by_side import compare
    from moeq.evaluation import result_file as document

    def show_short(results: dict[str, Any]) -> None:
        show(document.short(results), terminal.print_comparison, json=asked.json, quiet=asked.quiet)

    compare(asked, show_short)


@takes_options()
def estimate(asked: EstimateOptions) -> None:
    """Estimate speed on GPU + near-data-memory hardware: of a run, of a recipe's figures, or of any model's sizes."""
    from moeq import preflight

    preflight.check_hardware([] if asked.hardware is None else [asked.hardware])
    from moeq.estimation import answers

    if answers.needs_a_run(asked):
        run_stage(asked, "estimate")
        return
    answer = answers.answer(asked)
    for line in [] if asked.quiet else POLICIES.problems():
        typer.echo(f"left out: {line}", err=True)
    show(answer.figures, lambda _: answer.show(), json=asked.json, quiet=asked.quiet)
    if answer.refusal is not None:
        refuse(answer.refusal, json=asked.json)
