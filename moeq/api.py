"""From Python: runs, stages, assignments, plans, comparisons, benches, what is done to checkpoints; commands go here.

Importing this module imports neither torch nor transformers. Errors are those of `moeq.errors`: one line each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from moeq.arguments import checked
from moeq.artifacts.run import STAGES
from moeq.errors import RecipeError, hint
from moeq.folders import checkpoint_of, expanded
from moeq.recipe import Recipe
from moeq.runtimes import NATIVE, named, written
from moeq.starting import Given, RunWords, Texts, begun, listed, path_of

if TYPE_CHECKING:
    from moeq.artifacts.assignment import Assignment
    from moeq.artifacts.gates import Gate
    from moeq.pipeline import Outcome
    from moeq.planning.result import Plan
    from moeq.reproduction.result import Reproduction
    from moeq.stages.context import Context
    from moeq.verification.verify import Verdict


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run.

    stages: what happened to each, in order; table: a row a variant, as `results.final_rows` has them; paths: what was
    made, by name: checkpoint, report, evaluation, and `checkpoint in FORMAT` for every other format; gates: the bounds
    of the recipe with what the run came to, none of which raises; next: {what for: command line} of what may follow.
    """

    out: Path
    recipe: Recipe = field(repr=False)
    stages: tuple[Outcome, ...] = field(repr=False)
    table: tuple[dict[str, Any], ...] = field(repr=False)
    paths: Mapping[str, Path]
    gates: tuple[Gate, ...]
    next: Mapping[str, str] = field(repr=False)

    @property
    def checkpoint(self) -> Path:
        """The packed checkpoint in the native format, for `moeq.load` and `from_pretrained`."""
        return self.paths["checkpoint"]

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.paths["report"]


@dataclass(frozen=True, kw_only=True)
class Assigned:
    """An assignment of a run.

    outcome: what happened to the stage; None where the assignment was only looked at. prices: what each runtime's
    restriction costs; frontier: objective against bytes of every method; None where they were not asked for.
    """

    assignment: Assignment
    outcome: Outcome | None
    prices: list[dict[str, Any]] | None
    frontier: dict[str, Any] | None


@checked
def run(
    recipe: Given = None,
    *,
    out: str | Path | None = None,
    model: str | Path | None = None,
    force: bool = False,
    check: bool = False,
    quiet: bool = False,
    **options: Unpack[RunWords],
) -> Run:
    """Run all stages of a recipe into the directory `out`, from the profile to the report; stopped, it goes on.

    recipe: its file, its keys, or in its place a model or a run's directory; None takes the one in `out`, without one
    the preset `balanced`. out: moeq-out/NAME of the recipe or model where it is not named. model: a directory, a hub id
    or bundled:NAME, instead of the recipe's. force: files that were edited by hand are made anew. check: every file is
    read and hashed, also those that have not changed since they were. Raises the MoeqError of the stage that fails;
    what was finished before it stays.

    options: what changes the recipe or stands in its place, as `moeq run` has it on the command line: bits=2.5 (or
    size, code_bits), quality="best" or preset, for_="llama.cpp", text and eval_text, quantizer, refine, tune,
    group_size, device, workers, overrides=["losses.bits=[2, 4]"].
    """
    return run_in(begun(recipe, "run", out=out, model=model, check=check, quiet=quiet, **options), force=force)


def run_in(context: Context, *, force: bool = False) -> Run:
    """`run`, of what was opened."""
    from moeq import pipeline, results
    from moeq.stages.gates import verdicts

    outcomes = pipeline.run(context, force=force)
    return Run(
        out=context.out,
        recipe=context.recipe,
        stages=tuple(outcomes),
        table=tuple(results.final_rows(context)),
        paths=pipeline.result_paths(context),
        gates=verdicts(context),
        next=results.next_steps(context),
    )


@checked
def stage(
    name: str,
    recipe: Given = None,
    *,
    out: str | Path | None = None,
    model: str | Path | None = None,
    force: bool = False,
    check: bool = False,
    quiet: bool = False,
    **options: Unpack[RunWords],
) -> Outcome:
    """Run one stage (reparam, profile, losses, assign, quantize, export, eval, estimate, report) of a run.

    The rest as `run` has it. Raises ArtifactError where an earlier stage that it reads has not been run.
    """
    if name not in STAGES:
        raise RecipeError(f"no stage {name!r}", do=hint(name, STAGES))
    context = begun(recipe, name, out=out, model=model, check=check, quiet=quiet, **options)
    from moeq import pipeline

    return pipeline.run_alone(context, name, force=force)


@checked
def assign(
    recipe: Given = None,
    *,
    out: str | Path | None = None,
    model: str | Path | None = None,
    look: bool = False,
    prices: bool = False,
    frontier: bool = False,
    force: bool = False,
    check: bool = False,
    quiet: bool = False,
    **options: Unpack[RunWords],
) -> Assigned:
    """Decide which expert of a run gets which width and place (the stage `assign`), on its profile and losses.

    look: only what is there is read, nothing is decided anew. Other options as `run` has them. Raises AssignmentError
    for a budget that cannot be met.
    """
    context = begun(recipe, "assign", out=out, model=model, check=check, quiet=quiet, **options)
    return assign_in(context, look=look, prices=prices, frontier=frontier, force=force)


def assign_in(
    context: Context, *, look: bool = False, prices: bool = False, frontier: bool = False, force: bool = False
) -> Assigned:
    """`assign`, of what was opened."""
    from moeq import pipeline
    from moeq.stages import assign as deciding
    from moeq.stages import frontier as stage

    outcome = None if look else pipeline.run_alone(context, "assign", force=force)
    with pipeline.looking(context, "assign") if look else nullcontext():
        return Assigned(
            assignment=deciding.load(context),
            outcome=outcome,
            prices=stage.prices(context) if prices else None,
            frontier=stage.frontier(context) if frontier else None,
        )


@checked
def plan(
    recipe: Given = None,
    *,
    out: str | Path | None = None,
    model: str | Path | None = None,
    probe: bool = True,
    quiet: bool = True,
    **options: Unpack[RunWords],
) -> Plan:
    """What a run will need in memory, disk and time, and whether it fits here; reads no weights, and downloads none.

    probe: measure for a few seconds how fast this machine is; without, no times; the rest as `run` has it. Nothing is
    written.
    """
    context = begun(recipe, "plan", out=out, model=model, quiet=quiet, **options)
    from moeq.planning.plan import make_plan

    return make_plan(context, probe=probe)


@checked
def evaluate(
    *what: str | Path,
    tasks: str | Sequence[str] | None = (),
    text: str | Path | None = None,
    out: str | Path | None = None,
    include_path: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int | Literal["auto"] | None = None,
    window: int | None = None,
    stride: int | None = None,
    context_aware: str | Sequence[str] = (),
    dynamic: str | Sequence[str] = (),
    dynamic_log: str | Path | None = None,
    truncate: bool = False,
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure models, checkpoints, runs, assignments of runs (RUN:NAME) and earlier results side by side.

    The first is what the others are compared with, item by item: differences with intervals, and, on text, the KL of
    the next token's distribution. tasks: lm-eval's; text: a file, or bundled (also where neither is named); out: JSON
    file for the results with every sample. Returns what such a file holds. Raises EvaluationError and, for what is
    named and cannot be read, ModelError or ArtifactError.
    """
    from moeq.comparison.eval_options import EvalOptions

    if not what:
        raise RecipeError("nothing to evaluate", do="name models, checkpoints or runs")
    asked = EvalOptions(
        recipe=[str(word) for word in what],
        tasks=(tasks if isinstance(tasks, str) else ", ".join(tasks or ())) or None,
        text=None if text is None else str(text),
        out=path_of(out),
        include_path=path_of(include_path),
        num_fewshot=num_fewshot,
        limit=limit,
        batch_size=None if batch_size is None else str(batch_size),
        window=window,
        stride=stride,
        context_aware=listed(context_aware),
        dynamic=listed(dynamic),
        dynamic_log=path_of(dynamic_log),
        truncate=truncate,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        quiet=quiet,
    )
    from moeq.comparison.refusals import check

    check(asked)
    from moeq.comparison.side_by_side import compare

    return compare(asked)


@checked
def bench(
    checkpoint: str | Path,
    *,
    dense: str | Path | None = None,
    batches: Sequence[int] | None = None,
    prompt_tokens: int = 64,
    new_tokens: int = 16,
    repeat: int = 3,
    grid: bool = False,
    dynamic: str | None = None,
    beams: Sequence[int] | None = None,
    peers: bool = True,
    gguf: str | Path | None = None,
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto",
    out: str | Path | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Time a checkpoint, packed or dense, on this machine, beside its dense model and other libraries' kernels.

    grid: batches by beams with and without batch pruning instead (paper 002, Table 3); dynamic: precision that follows
    the workload beside static high, low and mixed instead (paper 001, Figure 5), as `--dynamic` says; out: directory
    for bench.json and measured.csv, which `moeq estimate --fit` reads. Returns what bench.json holds. Raises
    ModelError, ArtifactError or EvaluationError.
    """
    from moeq.benching.asked import Asked
    from moeq.runtime.dynamic.options import DynamicOptions

    asked = Asked(
        checkpoint=str(checkpoint),
        dense=None if dense is None else str(dense),
        batches=None if batches is None else tuple(batches),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeat=repeat,
        grid=grid,
        dynamic=None if dynamic is None else DynamicOptions.parse(dynamic),
        beams=None if beams is None else tuple(beams),
        peers=peers,
        gguf=path_of(gguf),
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    from moeq.preflight import check_bench

    check_bench(asked, path_of(out))
    from moeq.artifacts.files import make_writable
    from moeq.benching import measure
    from moeq.progress import Reporter

    if out is not None:
        make_writable(Path(out))
    found = measure.bench(asked, Reporter(quiet=quiet))
    if out is not None:
        measure.write(Path(out), found)
    return found


@checked
def reproduce(
    checkpoint: str | Path,
    *,
    model: str | Path,
    texts: Texts = (),
    out: str | Path | None = None,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> Reproduction:
    """Make a checkpoint again from its provenance.json and compare every file's bytes.

    model, texts: what it was made of, under any name; what has another digest than the provenance says is refused.
    out: the run directory, by default one beside the checkpoint that goes when all is equal. A difference is no error:
    `is_equal` says it. Raises ArtifactError for a checkpoint that is not whole or has no provenance, ModelError and
    CorpusError for files that are not those, RecipeError for a recipe that is not followed, and what a run raises.
    """
    from moeq.progress import Reporter
    from moeq.reproduction.matching import match

    reporter = Reporter(quiet=quiet)
    inputs = match(checkpoint_of(Path(checkpoint)), str(model), listed(texts), trust_remote_code, reporter)
    from moeq.reproduction import again

    return again.reproduce(inputs, path_of(out), reporter)


@checked
def convert(
    checkpoint: str | Path,
    to: str,
    out: str | Path,
    *,
    max_shard: str = "5GB",
    widen: bool = False,
    verify: bool = True,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Write a packed checkpoint, or a run's, for another runtime, without calibration; codes are taken over exactly.

    to: the runtime, `native` also for checkpoints of other tools; out: a directory that is not there yet; widen: codes
    that it cannot read go into wider ones of the same values; verify: load what was written in a fresh process and
    compare it. Returns what was written, by name. Raises FormatError for what the runtime cannot read.
    """
    from moeq import preflight
    from moeq.models.source import check_there
    from moeq.recipe.types import bytes_of

    path, runtime = checkpoint_of(Path(checkpoint)), named(to, (NATIVE, *written()), "--to")
    shard = bytes_of(max_shard, "--max-shard")
    preflight.check_absent(Path(out))
    preflight.check_folder(path, "give a checkpoint's directory")
    if not path.is_file():
        check_there(str(path))
    from moeq import conversion
    from moeq.progress import Reporter

    return conversion.convert(
        path,
        runtime,
        Path(out),
        widen=widen,
        max_shard=shard,
        trust_remote_code=trust_remote_code,
        verify=verify,
        reporter=Reporter(quiet=quiet),
    )


@checked
def verify(
    checkpoint: str | Path,
    *,
    against: str | Path | None = None,
    target: str | None = None,
    python: str | Path | None = None,
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    signature: bool | None = None,
    public_key: str | Path | None = None,
    certificate_chain: Texts = (),
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> Verdict:
    """Load a checkpoint, or a run's, with its target's own loader in a fresh process and compare it with its weights.

    against: the model that it was made of; target: another runtime than the one that it is for; python: the interpreter
    that has its package. public_key, certificate_chain: whose signature (model.sig) is verified before anything is
    loaded; signature: whether one is, None: where a key or certificates are given. What is wrong is no error:
    `problems` of what is returned says it.
    """
    from moeq import preflight, signing
    from moeq.models.source import check_there

    path = checkpoint_of(Path(checkpoint))
    preflight.check_folder(path, "give a checkpoint's directory")
    preflight.check_loader(target)
    if against is not None:
        check_there(str(against))
    trust = signing.Trust(public_key=path_of(public_key), roots=[expanded(one) for one in listed(certificate_chain)])
    wanted = bool(public_key or certificate_chain) if signature is None else signature
    signing.check_trust(path, trust, wanted=wanted)
    signed = signing.check_signature(path, trust) if wanted else None
    from moeq.progress import Reporter
    from moeq.verification import verify as verification

    options = verification.Options(
        target=target,
        python=None if python is None else str(python),
        against=None if against is None else str(against),
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        signature=signed,
    )
    return verification.verify(path, options, Reporter(quiet=quiet))


@checked
def inspect(path: str | Path, *, trust_remote_code: bool = False, quiet: bool = True) -> dict[str, Any]:
    """What a checkpoint, a run's directory, a model or any file that moeq writes is; bytes and digests are checked."""
    from moeq import preflight

    preflight.check_folder(Path(path))
    from moeq import inspection
    from moeq.progress import Reporter

    return inspection.inspect(Path(path), Reporter(quiet=quiet), trust_remote_code)
