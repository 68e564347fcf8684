"""The command line: one command a stage, no mathematics. Heavy imports are inside the commands."""

from __future__ import annotations

import contextlib
import errno
import json as jsonlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moeq.bounded import shortened
from moeq.errors import InternalError, MoeqError, RecipeError, StorageError
from moeq.registry import ALLOCATORS
from moeq.version import __version__

if TYPE_CHECKING:
    from moeq.recipe import Recipe
    from moeq.stages.context import Context

app = typer.Typer(
    name="moeq",
    help="Makes Mixture-of-Experts models small enough to run where they don't fit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RecipeArgument = Annotated[Path | None, typer.Argument(help="YAML recipe [default: the one in the run directory].")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model directory, hub id, or bundled:tiny-mixtral.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Run directory [default: moeq-out/NAME of the recipe].")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override a key: --set assign.average_bits=2.5")]
JsonOption = Annotated[bool, typer.Option("--json", help="Result as JSON on standard output.")]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that the model's directory brings along.")
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Read and hash every file, also those that have not changed since they were.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress, no messages but errors.")]
QuantizerOption = Annotated[
    Literal["rtn", "gptq", "signround", "best"] | None,
    typer.Option(
        "--quantizer",
        help="Whose replicas are used (assign.quantizer; losses.methods gains it); best: of losses.methods, the one "
        "that loses least.",
    ),
]
RefineOption = Annotated[
    bool, typer.Option("--refine", help="Train the placed experts of every layer together (quantize.refine).")
]
FormatOption = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        help="Also write auto-round, gptq, compressed-tensors, gguf or dequantized (export.formats); may be given "
        "several times.",
    ),
]
WidenOption = Annotated[
    bool,
    typer.Option("--widen", help="Codes that a format's runtime cannot read go into wider ones of the same values."),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Make files anew that were edited by hand (assign/assignment.json).")
]
VerifyOption = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Load what was written in a fresh process and compare it.")
]


INTERRUPTED, TERMINATED = 130, 143  # as shells have it: 128 and the number of the signal


def _version(show: bool) -> None:
    if show:
        print(f"moeq {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Makes Mixture-of-Experts models small enough to run where they don't fit."""


def _context(
    recipe: Path | None,
    model: str | None,
    out: Path | None,
    overrides: list[str] | None,
    quiet: bool,
    trust: bool,
    quantizer: str | None = None,
    refine: bool = False,
    check: bool = False,
    command: str = "run",
) -> Context:
    """The run that the options describe, for a command: wrong ones are refused before the stages are imported."""
    from moeq.preflight import check_run
    from moeq.progress import Reporter
    from moeq.recipe import load_recipe

    if recipe is None and out is not None and (out / "recipe.yaml").is_file():
        recipe = out / "recipe.yaml"
    wanted = [*(overrides or []), *(["trust_remote_code=true"] if trust else [])]
    loaded = load_recipe(recipe, wanted)
    more = _overrides(loaded, quantizer, refine)
    loaded = load_recipe(recipe, [*wanted, *more]) if more else loaded
    name = model or loaded.model
    if name is None:
        raise RecipeError("no model", where=str(recipe or "defaults"), do="give a recipe, --model, or --out of a run")
    target = out or Path("moeq-out") / loaded.name
    check_run(loaded, name, target, command)
    from moeq.stages.context import Context

    return Context(recipe=loaded, model_name=name, out=target, reporter=Reporter(quiet=quiet), check=check)


def _overrides(loaded: Recipe, quantizer: str | None, refine: bool) -> list[str]:
    """What --quantizer and --refine change of a recipe."""
    found = []
    if quantizer is not None:
        from moeq.recipe import BEST

        methods = [*loaded.losses.methods, *({quantizer} - {BEST, *loaded.losses.methods})]
        found += [f"losses.methods=[{', '.join(methods)}]", f"assign.quantizer={quantizer}"]
    if refine and loaded.quantize.refine is None:
        found.append("quantize.refine={}")
    return found


@app.command()
def run(
    recipe: RecipeArgument = None,
    model: ModelOption = None,
    out: OutOption = None,
    set_: SetOption = None,
    quantizer: QuantizerOption = None,
    refine: RefineOption = False,
    verify: VerifyOption = True,
    force: ForceOption = False,
    check: CheckOption = False,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run all stages below in order; goes on where it was stopped."""
    wanted = [*(set_ or []), *_verify_override(verify)]
    context = _context(recipe, model, out, wanted, quiet, trust_remote_code, quantizer, refine, check)
    from moeq import pipeline, results, terminal

    outcomes = pipeline.run(context, force=force)
    rows, paths = results.final_rows(context), pipeline.result_paths(context)
    if json:
        _print_json(
            {
                "stages": [terminal.outcome_json(outcome) for outcome in outcomes],
                "table": rows,
                "paths": {name: str(path) for name, path in paths.items()},
            }
        )
    elif not quiet:
        terminal.print_final(rows, paths, outcomes)


def _stage_command(name: str, summary: str) -> Callable[..., None]:
    def command(
        recipe: RecipeArgument = None,
        model: ModelOption = None,
        out: OutOption = None,
        set_: SetOption = None,
        quantizer: QuantizerOption = None,
        refine: RefineOption = False,
        format_: FormatOption = None,
        widen: WidenOption = False,
        verify: VerifyOption = True,
        check: CheckOption = False,
        trust_remote_code: TrustOption = False,
        json: JsonOption = False,
        quiet: QuietOption = False,
    ) -> None:
        wanted = [*(set_ or []), *_export_overrides(format_, widen), *_verify_override(verify)]
        context = _context(recipe, model, out, wanted, quiet, trust_remote_code, quantizer, refine, check, name)
        _run_stage(context, name, json, quiet)

    command.__doc__ = summary
    whole = signature(command, eval_str=True)
    absent = {option for option, stages in STAGE_OPTIONS.items() if name not in stages}
    mine = [parameter for parameter in whole.parameters.values() if parameter.name not in absent]
    command.__signature__ = whole.replace(parameters=mine)  # type: ignore[attr-defined]
    return command


def _export_overrides(formats: Sequence[str] | None, widen: bool) -> list[str]:
    """What --format and --widen change of a recipe; the native format is always written."""
    others = [name for name in formats or () if name != "moeq"]
    return [*([f"export.formats=[{', '.join(others)}]"] if formats else []), *(["export.widen=true"] if widen else [])]


def _verify_override(verify: bool) -> list[str]:
    """What --no-verify changes of a recipe; without it the recipe decides."""
    return [] if verify else ["export.verify=false"]


STAGE_OPTIONS = {  # options that not every stage has
    "quantizer": ("losses",),
    "refine": ("quantize",),
    "format_": ("export",),
    "widen": ("export",),
    "verify": ("export",),
}


STAGE_HELP = {
    "reparam": "Fold norms into the linears that they feed, so that one static scale serves what they give.",
    "profile": "Count what the routers choose on calibration text.",
    "losses": "Replicas of every expert at every width, and what each one loses.",
    "assign": "Decide which expert gets which precision and where it lives.",
    "quantize": "Make the replicas that the assignment names.",
    "export": "Write the packed checkpoint, its placement manifest and its model card.",
    "eval": "Perplexity and lm-eval of a run's original, export and other assignments, or of any models, checkpoints "
    "and runs.",
    "estimate": "Estimate speed on GPU + near-data-memory hardware: of a run, of a recipe's figures, or of any model's "
    "sizes.",
    "report": "Write the HTML report.",
}


def assign(
    recipe: RecipeArgument = None,
    model: ModelOption = None,
    out: OutOption = None,
    set_: SetOption = None,
    method: Annotated[
        str | None,
        typer.Option("--method", help=f"{', '.join(ALLOCATORS.names())}."),
    ] = None,
    average_bits: Annotated[
        str | None, typer.Option("--average-bits", help="Budget: mean width of the experts, such as 2.5.")
    ] = None,
    expert_bytes: Annotated[
        str | None, typer.Option("--expert-bytes", help="Budget: bytes of all experts, such as 10GiB.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option("--size", help="Budget: the whole checkpoint, every file of its directory, such as 12GiB."),
    ] = None,
    granularity: Annotated[
        str | None,
        typer.Option(
            "--granularity", help="What has one width, where the method decides it: expert, projection or layer."
        ),
    ] = None,
    ndp_latency: Annotated[
        float | None,
        typer.Option(
            "--ndp-latency",
            help="Limit beside the budget, of a method that keeps it: expected ms a token that the near-data side "
            "spends on experts.",
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="Preset or YAML file whose near-data latency is shown and limited."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", help="Runtime that must load it: moeq, auto-round, gptqmodel, llama.cpp, vllm or transformers."
        ),
    ] = None,
    price: Annotated[bool, typer.Option("--price", help="Show what each target's restriction costs.")] = False,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Objective against bytes of every method: table, JSON and plot.")
    ] = False,
    quantizer: QuantizerOption = None,
    force: ForceOption = False,
    check: CheckOption = False,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    given = {"average_bits": average_bits, "expert_bytes": expert_bytes, "size": size}
    more = {"granularity": granularity, "ndp_latency_ms": ndp_latency, "hardware": hardware, "target": target}
    chosen = [f"assign.{name}={value}" for name, value in more.items() if value is not None]
    if method is not None and ndp_latency is None and "ndp_latency_ms" not in ALLOCATORS.get(method).reads:
        chosen.append("assign.ndp_latency_ms=null")  # the recipe's, which belongs to its own method
    overrides = [*(set_ or []), *_assign_overrides(method, given), *chosen]
    context = _context(
        recipe, model, out, overrides, quiet, trust_remote_code, quantizer, check=check, command="assign"
    )
    from moeq import pipeline, terminal
    from moeq.stages import assign as stage

    looks = (price or frontier) and not overrides and quantizer is None and recipe is None and not force
    if looks and (context.finished("assign") / stage.NAME).is_file():
        outcome = None
        with pipeline.looking(context, "assign"):
            extra = _looked_at(context, price, frontier)
    else:
        outcome = pipeline.run_alone(context, "assign", force=force)
        extra = _looked_at(context, price, frontier)
    if json:
        _print_json(({"stage": "assign"} if outcome is None else terminal.outcome_json(outcome)) | extra)
    elif not quiet:
        if outcome is not None:
            terminal.print_summary(outcome.record.summary)
        if "prices" in extra:
            terminal.print_prices(extra["prices"])
        if "frontier" in extra:
            terminal.print_frontier(extra["frontier"], context.finished("assign") / stage.FRONTIER_PLOT)


def _looked_at(context: Context, price: bool, frontier: bool) -> dict[str, Any]:
    """What --price and --frontier show of an assignment."""
    from moeq.stages import assign as stage

    prices = {"prices": stage.prices(context)} if price else {}
    return prices | ({"frontier": stage.frontier(context)} if frontier else {})


def report(
    recipe: RecipeArgument = None,
    model: ModelOption = None,
    out: OutOption = None,
    set_: SetOption = None,
    maps: Annotated[
        Path | None,
        typer.Option("--maps", help="Folder for every map of the report: NAME.svg, and NAME.csv with its values."),
    ] = None,
    analysis: Annotated[
        Path | None,
        typer.Option(
            "--analysis",
            help="Only write routing analyses into this folder (needs `moeq profile` with profile.trace: true): "
            "similarity of prefill and decode, activation maps, and the curves of eval.low_precision.",
        ),
    ] = None,
    check: CheckOption = False,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    if analysis is not None and maps is not None:
        raise RecipeError("--analysis goes without --maps", do="give one of them")
    context = _context(recipe, model, out, set_, quiet, trust_remote_code, check=check, command="report")
    from moeq import pipeline, terminal
    from moeq.stages import report as stage

    if analysis is not None:
        from moeq.stages.analysis import write

        figures = write(context, analysis)
        if json:
            _print_json(figures)
        elif not quiet:
            terminal.print_summary(figures)
        return
    outcome = pipeline.run_alone(context, "report")
    written = [] if maps is None else [str(path) for path in stage.write_maps(context, maps)]
    if json:
        _print_json(terminal.outcome_json(outcome) | ({"maps": written} if maps is not None else {}))
    elif not quiet:
        terminal.print_summary(outcome.record.summary | ({"maps": written} if maps is not None else {}))


def estimate(
    recipe: Annotated[
        list[str] | None,
        typer.Argument(help="YAML recipe [default: the one in the run directory]; more axes of --grid."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Without a recipe: mixtral-8x7b or another known geometry, a config.json, a model directory, a packed "
            "checkpoint, or a hub id; no weights are read.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Run directory [default: moeq-out/NAME of the recipe]; without a run, where estimate.json, the page "
            "and the timeline go [default: nowhere].",
        ),
    ] = None,
    set_: SetOption = None,
    hardware: Annotated[
        str | None, typer.Option("--hardware", help="Preset or YAML file (estimate.hardware) [default: paper-ctxmoe].")
    ] = None,
    assignment: Annotated[
        Path | None, typer.Option("--assignment", help="assignment.json: bits and place of every expert.")
    ] = None,
    manifest: Annotated[
        Path | None, typer.Option("--manifest", help="placement.json of a packed checkpoint, or its directory.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="trace.safetensors of `moeq profile` (profile.trace): routing as it was recorded."
        ),
    ] = None,
    bits: Annotated[
        float | None, typer.Option("--bits", help="Width of every expert off the GPU [default: 3].")
    ] = None,
    gpu_experts: Annotated[
        int | None,
        typer.Option("--gpu-experts", help="FP16 experts a layer on the GPU [default: as many as fit].", min=0),
    ] = None,
    group_size: Annotated[
        int, typer.Option("--group-size", help="Weights that share a scale, with --bits.", min=1)
    ] = 128,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="Policy that is shown beside the context-aware placement and both MoNDE baselines; may be given "
            "several times [default: all].",
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", help="Lengths and batches: --grid in=128,512,2048 out=512,2048 batch=1,4,16"),
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens of keys and values at a decode step [default: 1024].", min=1)
    ] = None,
    kv_growth: Annotated[
        bool, typer.Option("--kv-growth", help="Keys and values grow with the request instead of --context.")
    ] = False,
    zipf: Annotated[
        float | None,
        typer.Option("--zipf", help="Exponent of Zipf routing, the placement's best experts the most popular."),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            "--replicas",
            help="Widths at which the near-data side keeps every expert beside FP16, or none [default: 1,2,3,4].",
        ),
    ] = None,
    capacity: Annotated[
        bool, typer.Option("--capacity", help="Only say what fits where; refused with the sum where it does not.")
    ] = False,
    sheet: Annotated[
        str | None,
        typer.Option("--sheet", help="Print a paper's figures worked out again: paper-002 or paper-004."),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            "--fit",
            help="CSV of measured points (policy, batch, lengths, seconds): fit efficiencies and latencies of the "
            "hardware; --out takes the fitted YAML.",
        ),
    ] = None,
    check: CheckOption = False,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from moeq.estimation import command

    asked = command.Asked(
        words=recipe or [],
        model=model,
        out=out,
        overrides=set_ or [],
        hardware=hardware,
        assignment=assignment,
        manifest=manifest,
        trace=trace,
        bits=bits,
        gpu_experts=gpu_experts,
        group_size=group_size,
        policies=policy or [],
        grid=grid or [],
        context=context,
        kv_growth=kv_growth,
        zipf=zipf,
        replicas=replicas,
        capacity=capacity,
        sheet=sheet,
        fit=fit,
        trust_remote_code=trust_remote_code,
        json=json,
        quiet=quiet,
    )
    if not command.needs_a_run(asked):
        found, refusal = command.run(asked)
        if json:
            _print_json(found)
        if refusal is not None and json:
            print(f"moeq: {refusal}", file=sys.stderr)
            raise typer.Exit(refusal.exit_code)
        if refusal is not None:
            raise refusal
        return
    overrides = command.recipe_overrides(asked)
    described = _context(asked.recipe, model, out, overrides, quiet, trust_remote_code, check=check, command="estimate")
    _run_stage(described, "estimate", json, quiet)


def evaluate(
    recipe: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE|WHAT...]",
            help="YAML recipe [default: the one in the run directory]; or what is compared, the first with the others: "
            "models, packed checkpoints, runs, RUN:ASSIGNMENT (of its recipe; original; * for all), assignment files, "
            "and results of an earlier --out.",
        ),
    ] = None,
    model: ModelOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Run directory [default: moeq-out/NAME of the recipe]; of a comparison, the JSON file for its "
            "results, every sample included [default: none].",
        ),
    ] = None,
    set_: SetOption = None,
    tasks: Annotated[str | None, typer.Option("--tasks", help="lm-eval tasks, separated by commas.")] = None,
    include_path: Annotated[
        Path | None, typer.Option("--include-path", help="Folder of lm-eval task YAML files.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", min=0, help="Examples in a context [default: the task's own].")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Items a task [default: all].")] = None,
    batch_size: Annotated[
        str | None, typer.Option("--batch-size", help="Sequences at once, or auto: by free memory [default: 16].")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option("--text", help="Perplexity of a file, or bundled [default: bundled, where no task is named]."),
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", min=2, help="Tokens of a window of --text [default: 512, or fewer].")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", min=1, help="The last tokens of a window that count [default: the window]."),
    ] = None,
    context_aware: Annotated[
        list[str] | None,
        typer.Option(
            "--context-aware",
            help="A row for every run and checkpoint named, whose experts are placed and quantized by each sequence's "
            "prefill: gpu_experts=2,average_bits=2.5,alpha=0.5,selector=true; may be given several times.",
        ),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut too long contexts from the left, as lm-eval does, and count them.")
    ] = False,
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"], typer.Option(help="Type that a comparison computes in.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Of a comparison: auto, cpu or cuda.")] = "auto",
    check: CheckOption = False,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    from moeq.comparison import options

    asked = options.Asked(
        words=recipe or [],
        model=model,
        out=out,
        overrides=set_ or [],
        tasks=tasks,
        include_path=include_path,
        num_fewshot=num_fewshot,
        limit=limit,
        batch_size=batch_size,
        text=text,
        window=window,
        stride=stride,
        context_aware=context_aware or [],
        truncate=truncate,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        json=json,
        quiet=quiet,
    )
    if options.needs_a_run(asked):
        overrides = options.recipe_overrides(asked)
        context = _context(asked.recipe, model, out, overrides, quiet, trust_remote_code, check=check, command="eval")
        _run_stage(context, "eval", json, quiet)
        return
    options.check(asked)
    from moeq import terminal
    from moeq.comparison import command
    from moeq.evaluation import document

    def show(found: dict[str, Any]) -> None:
        if json:
            _print_json(document.short(found))
        elif not quiet:
            terminal.print_comparison(document.short(found))

    command.run(asked, show)


def _run_stage(context: Context, name: str, json: bool, quiet: bool) -> None:
    """One stage on what is there, and what came of it."""
    from moeq import pipeline, terminal

    outcome = pipeline.run_alone(context, name)
    if json:
        _print_json(terminal.outcome_json(outcome))
    elif not quiet:
        terminal.print_summary(outcome.record.summary)


def _assign_overrides(method: str | None, given: dict[str, str | None]) -> list[str]:
    """What --method and the budget options set; a budget that is given replaces the recipe's, whatever it was."""
    from moeq.recipe import budget_keys

    chosen = {name: value for name, value in given.items() if value is not None}
    kept = chosen or (budget_keys() if method is None else ALLOCATORS.get(method).budgets)
    dropped = [name for name in budget_keys() if name not in kept]
    return [
        *([f"assign.method={method}"] if method is not None else []),
        *(f"assign.{name}=null" for name in dropped),
        *(f"assign.{name}={value}" for name, value in chosen.items()),
    ]


OWN_COMMANDS: dict[str, Callable[..., None]] = {  # stages with options of their own
    "assign": assign,
    "estimate": estimate,
    "eval": evaluate,
    "report": report,
}

for _name, _summary in STAGE_HELP.items():
    app.command(_name, help=_summary)(OWN_COMMANDS.get(_name) or _stage_command(_name, _summary))


@app.command()
def plan(
    recipe: RecipeArgument = None,
    model: ModelOption = None,
    out: OutOption = None,
    set_: SetOption = None,
    trust_remote_code: TrustOption = False,
    probe: Annotated[bool, typer.Option(help="Measure for a few seconds how fast this machine is.")] = True,
    json: JsonOption = False,
) -> None:
    """Say what a run will need in memory, disk and time, and whether it fits here; reads no weights."""
    context = _context(recipe, model, out, set_, True, trust_remote_code, command="plan")
    from moeq import terminal
    from moeq.planning.make import error_of, make_plan

    made = make_plan(context, probe=probe)
    error = error_of(made)
    if json:
        _print_json(made.as_json())
        if error is not None:
            print(f"moeq: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code)
        return
    terminal.print_plan(made)
    if error is not None:
        raise error


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Checkpoint, run directory, model directory, or any file moeq writes.")],
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Say what a file or directory is; check a checkpoint's bytes and digests against its manifest."""
    from moeq import inspection, terminal
    from moeq.progress import Reporter

    found = inspection.inspect(path, Reporter(), trust_remote_code)
    if json:
        _print_json(found)
    else:
        terminal.print_summary(found)


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A packed checkpoint.")],
    to: Annotated[
        Literal["auto-round", "gptq", "compressed-tensors", "gguf", "dequantized"],
        typer.Option("--to", help="The format to write."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Directory to write, which must not be there yet.")],
    widen: WidenOption = False,
    verify: VerifyOption = True,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a packed checkpoint in another format, without calibration; codes are taken over exactly."""
    from moeq import preflight
    from moeq.models.source import check_there

    preflight.check_absent(out)
    if not checkpoint.is_file():
        check_there(str(checkpoint))
    from moeq import conversion, terminal
    from moeq.progress import Reporter

    found = conversion.convert(
        checkpoint,
        to,
        out,
        widen=widen,
        trust_remote_code=trust_remote_code,
        verify=Reporter(quiet=quiet or json) if verify else None,
    )
    if json:
        _print_json(found)
    elif not quiet:
        terminal.print_summary(found)


@app.command()
def verify(
    checkpoint: Annotated[
        Path, typer.Argument(help="A packed checkpoint, of moeq or of another tool, or a plain one.")
    ],
    against: Annotated[
        str | None,
        typer.Option("--against", help="Model (or packed checkpoint) that it was made of: how far it is from that."),
    ] = None,
    target: Annotated[
        Literal["moeq", "auto-round", "gptqmodel", "transformers", "llama.cpp"] | None,
        typer.Option("--target", help="Whose loader is used [default: the one that the format is for]."),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option("--python", help="Interpreter of an environment with the target's package [default: this one]."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"], typer.Option(help="Type that the target computes in.")
    ] = "float32",
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Load a checkpoint with its target's own loader in a fresh process and compare it with its weights."""
    from moeq import preflight
    from moeq.models.source import check_there

    preflight.check_directory(checkpoint)
    if against is not None:
        check_there(against)
    from moeq import terminal
    from moeq.progress import Reporter
    from moeq.verification import verify as verification

    options = verification.Options(
        target=target, python=python, against=against, dtype=dtype, trust_remote_code=trust_remote_code
    )
    verdict = verification.verify(checkpoint, options, Reporter(quiet=quiet or json))
    if json:
        _print_json(verdict.as_json())
        if verdict.problems:
            print(f"moeq: {verification.error_of(verdict)}", file=sys.stderr)
            raise typer.Exit(verification.error_of(verdict).exit_code)
        return
    if not quiet:
        terminal.print_verdict(verdict)
    verification.require(verdict)


@app.command()
def families(
    name: Annotated[str | None, typer.Argument(help="Part of a model_type or class, such as qwen3.")] = None,
    json: JsonOption = False,
) -> None:
    """List the families of models: which stream, and which can be quantized, exported and loaded."""
    from dataclasses import asdict

    from moeq import terminal
    from moeq.models import support

    rows = support.families(name)
    if json:
        _print_json([asdict(row) for row in rows])
    else:
        terminal.print_families(rows)


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint that moeq exported.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the continuation.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Continue a prompt with an exported checkpoint: a first look at what came out."""
    from moeq import preflight
    from moeq.models.source import check_there

    preflight.check_checkpoint(checkpoint)
    check_there(str(checkpoint))
    preflight.check_device(device)
    from moeq import generation

    result = generation.generate(
        checkpoint,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    if json:
        _print_json(result)
    else:
        print(result["text"])


@app.command()
def gc(
    out: Annotated[list[Path] | None, typer.Option("--out", help="Run directory; may be given several times.")] = None,
    store: Annotated[
        Path | None, typer.Option("--store", help="Replica store that runs share: those that it knows of keep theirs.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be dropped.")] = False,
    json: JsonOption = False,
) -> None:
    """Drop replicas that no run's recipe or assignment refers to, and what killed runs left half-written."""
    from moeq import cleaning, terminal

    found = cleaning.collect(out or [], store, dry_run=dry_run)
    if json:
        _print_json(found)
    else:
        terminal.print_freed(found)


def _print_json(value: Any) -> None:
    print(jsonlib.dumps(value, indent=1, ensure_ascii=False))


def _as_moeq_error(error: Exception) -> MoeqError:
    """An unexpected exception as one line; the traceback goes to a file."""
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EIO, errno.EFBIG):
        return StorageError(error.strerror or str(error), where="standard output", do="free some space")
    if isinstance(error, OSError) and error.filename is not None:
        return StorageError(
            error.strerror or str(error), where=shortened(str(error.filename), 400), do="check the disk and the path"
        )
    with tempfile.NamedTemporaryFile("w", prefix="moeq-", suffix=".log", delete=False) as log:
        log.write(traceback.format_exc())
    return InternalError(
        f"{type(error).__name__}: {error}", where="bug in moeq", do=f"please report it with {log.name}"
    )


def main() -> None:
    """Entry point: errors become one line on standard error and an exit code by class, never a traceback.

    SIGTERM ends a command as Ctrl-C does: what is half-written goes.
    """
    ended_by: list[int] = []
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: _interrupt(ended_by, number))
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # a full disk or a closed pipe shows here, not when the interpreter has gone
    except (KeyboardInterrupt, SystemExit) as leaving:
        code = leaving.code if isinstance(leaving, SystemExit) else INTERRUPTED  # typer makes 130 of an interrupt
        if code == INTERRUPTED:
            print("interrupted; run the same command to go on", file=sys.stderr)
            code = TERMINATED if ended_by else INTERRUPTED
        sys.exit(code)
    except BrokenPipeError:
        _drop_output()
        sys.exit(141)
    except Exception as error:
        known = error if isinstance(error, MoeqError) else _as_moeq_error(error)
        if "--json" in sys.argv:
            with contextlib.suppress(OSError):
                _print_json({"error": type(known).__name__, "message": str(known), "exit_code": known.exit_code})
                sys.stdout.flush()
        if isinstance(known, StorageError):
            _drop_output()
        print(f"moeq: {known}", file=sys.stderr)
        sys.exit(known.exit_code)


def _interrupt(ended_by: list[int], number: int) -> None:
    """A signal as an interrupt; it is noted."""
    ended_by.append(number)
    raise KeyboardInterrupt


def _drop_output() -> None:
    """What is still buffered for standard output goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
