"""eval and estimate: of a run, or without one of anything that is named; bench: of a checkpoint on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from moeq.benching.asked import whole_numbers
from moeq.cli.ending import refuse, show
from moeq.cli.stages import run_stage
from moeq.comparison.eval_options import EvalOptions
from moeq.estimation.estimate_options import EstimateOptions
from moeq.options import DeviceOption, DynamicOption, JsonOption, QuietOption, TrustOption, takes_options
from moeq.registry import POLICIES

if TYPE_CHECKING:
    from moeq.pipeline import Outcome
    from moeq.stages.context import Context


def _print_evaluated(context: Context, outcome: Outcome) -> None:
    """The table that the run ends with, without speeds, which are not estimated by then."""
    from moeq import results, terminal
    from moeq.artifacts.evaluation import NAME
    from moeq.artifacts.stage import read_record

    export = replace(outcome, stage="export", record=read_record(context.finished("export"), "export"))
    rows = results.final_rows(context, speeds=False)
    terminal.print_final(rows, {"evaluation": context.finished("eval") / NAME}, [export, outcome])


@takes_options("device", "workers")
def evaluate(asked: EvalOptions) -> None:
    """Perplexity and lm-eval of a run's original, export and other assignments, or of any models, checkpoints
    and runs."""
    from moeq.comparison import refusals

    if refusals.needs_a_run(asked):
        run_stage(asked, "eval", _print_evaluated)
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
    from moeq.estimation.estimate_options import ALL

    preflight.check_hardware([name for name in asked.hardware if name != ALL or asked.speed is None])
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


BatchesOption = Annotated[
    str | None,
    Option(help="Sequences at once, parted by commas [default: 1,4,16,32; --grid: 1,8,20,32,64,96; --dynamic: 1,32]."),
]


def bench(
    checkpoint: Annotated[str, Argument(help="A checkpoint, packed or dense, or a run.")],
    dense: Annotated[
        str | None, Option(metavar="MODEL", help="The model that it was made of, timed in the same run.")
    ] = None,
    batch: BatchesOption = None,
    prompt_tokens: Annotated[int, Option(min=1, help="Tokens of every prompt, which are random.")] = 64,
    new_tokens: Annotated[int, Option(min=2, help="Tokens that follow it.")] = 16,
    repeat: Annotated[int, Option(min=1, help="Requests that are timed of each; shown are medians.")] = 3,
    grid: Annotated[
        bool, Option("--grid", help="Instead: batches by beams, with and without batch pruning (paper 002, Table 3).")
    ] = False,
    dynamic: DynamicOption = None,
    beams: Annotated[str | None, Option(help="Numbers of beams of --grid, parted by commas [default: 1,2].")] = None,
    peers: Annotated[
        bool, Option("--peers/--no-peers", help="Time one expert beside the other libraries that are installed.")
    ] = True,
    gguf: Annotated[
        Path | None, Option(metavar="FILE", help="A GGUF file of the model, for llama.cpp's llama-bench.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"], Option(help="Type that is computed in.")
    ] = "auto",
    out: Annotated[
        Path | None, Option(help="Directory for bench.json and measured.csv, which `moeq estimate --fit` reads.")
    ] = None,
    device: DeviceOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Time a checkpoint on this machine: first token, decode, experts, bytes moved, memory; beside its dense model and
    other libraries.

    MOEQ_KERNEL chooses how packed experts compute. Shares are of the bandwidth that is measured in the same run.
    """
    from moeq import api

    found = api.bench(
        checkpoint,
        dense=dense,
        batches=None if batch is None else whole_numbers(batch, "--batch"),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeat=repeat,
        grid=grid,
        dynamic=dynamic,
        beams=None if beams is None else whole_numbers(beams, "--beams"),
        peers=peers,
        gguf=gguf,
        dtype=dtype,
        out=out,
        device=device or "auto",
        trust_remote_code=trust_remote_code,
        quiet=quiet or json,
    )
    from moeq.benching import tables

    show(found, lambda _: tables.print_bench(found, out), json=json, quiet=quiet)
