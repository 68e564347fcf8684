"""gates: whether a finished run keeps to the bounds of its recipe."""

from __future__ import annotations

from collections.abc import Sequence

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.evaluation import EvalReport, EvalRow
from moeq.artifacts.gates import Gate, bounded
from moeq.artifacts.targets import refuse_target, targets
from moeq.errors import FormatError, GateError, MoeqError, RecipeError
from moeq.estimator.points import SUBJECT
from moeq.recipe import Recipe
from moeq.runtimes import runtimes
from moeq.stages import assign, estimate, evaluate, export
from moeq.stages.context import Context
from moeq.stages.estimate import EstimateReport
from moeq.stages.loading import check_family


def check(context: Context) -> None:
    """RecipeError for a gate on text of a model that reads none."""
    wanted = context.recipe.gates.of_text()
    if wanted and context.model.takes_images:
        raise RecipeError(
            "an image classifier is measured on no text", where=f"gates.{wanted[0]}", do="leave this gate out"
        )


def verdicts(context: Context) -> tuple[Gate, ...]:
    """Every gate of the recipe with what the run came to; ArtifactError where a stage has not been run."""
    recipe = context.recipe
    if not recipe.gates.any():
        return ()
    own = assign.load(context)
    measured = of_evaluation(recipe, evaluate.load(context))
    speed = of_estimate(recipe, estimate.load(context), own.name)
    return (*measured, *speed, *(_of_runtime(context, name, own) for name in recipe.gates.formats))


def of_evaluation(recipe: Recipe, report: EvalReport) -> list[Gate]:
    """Gates on size and on quality, of the exported assignment."""
    gates, original = recipe.gates, report.row(evaluate.ORIGINAL)
    row = next(row for row in report.rows if row.exported)
    found, made = row.divergence, []
    if gates.kl is not None:
        value = None if found is None else found.kl if found.kl_most is None else found.kl_most
        made.append(bounded("kl", value, gates.kl, "<=", None if found is None else found.kl_stderr))
    if gates.perplexity_increase is not None:
        made.append(bounded("perplexity_increase", _increase(row, original), gates.perplexity_increase, "<="))
    if gates.equal_top1 is not None:
        value = None if found is None else found.same_top
        made.append(
            bounded("equal_top1", value, gates.equal_top1, ">=", None if found is None else found.same_top_stderr)
        )
    if gates.bytes is not None:
        made.append(bounded("bytes", row.whole_bytes, gates.bytes, "<="))
    if gates.bits_per_weight is not None:
        made.append(bounded("bits_per_weight", row.bits_per_weight, gates.bits_per_weight, "<="))
    return made


def _increase(row: EvalRow, original: EvalRow | None) -> float | None:
    """Perplexity above the original's, in percent."""
    if row.perplexity is None or original is None or not original.perplexity:
        return None
    return 100 * (row.perplexity / original.perplexity - 1)


def of_estimate(recipe: Recipe, report: EstimateReport, name: str) -> list[Gate]:
    """The gate on speed: decode of the recipe's own placement at the first point of its grid."""
    wanted, grid = recipe.gates.tokens_per_second, recipe.estimate.grid
    if wanted is None:
        return []
    made, first = report.of(name), (grid.batches[0], grid.inputs[0], grid.outputs[0])
    points = () if made is None else made.points
    at = (point.decode_tokens_per_second for point in points if point.policy == SUBJECT and point.at == first)
    return [bounded("tokens_per_second", next(at, None), wanted, ">=")]


def _of_runtime(context: Context, name: str, assignment: Assignment) -> Gate:
    """The gate on a runtime: whether anything that is known of it keeps it from loading what was assigned."""
    why = _not_loaded(context, name, assignment)
    return Gate(name="formats", holds=why is None, of=name, why=why)


def _not_loaded(context: Context, name: str, assignment: Assignment) -> str | None:
    """Why a runtime cannot load what was assigned and what is packed beside it, or a model of this kind at all."""
    target = targets().get(name)
    if target is None:
        return None  # it takes plain weights
    try:
        check_family(context, name)
    except MoeqError as error:
        return error.what
    refused = refuse_target(
        target,
        context.model.layers,
        assignment.expert_widths(),
        **vars(assignment.encoding),
        widen=context.recipe.export.widen,
    )
    if refused is not None:
        return refused[0]
    try:
        export.check_others(context, runtimes()[name])
    except FormatError as error:
        return f"{error.what}; {error.do}"
    return None


def error_of(gates: Sequence[Gate]) -> GateError | None:
    """What a command ends with where gates failed; None where all hold."""
    failed = [gate for gate in gates if not gate.holds]
    if not failed:
        return None
    what = "; ".join(f"{gate.name} {gate.measured()}" for gate in failed)
    do = "change the run's settings, or the gate"
    if all(gate.name == "formats" for gate in failed):
        do = f"have the run keep to what {failed[0].of} loads (assign.target: {failed[0].of}), or leave the gate out"
    return GateError(f"{len(failed)} of {len(gates)} failed: {what}", where="gates", do=do)
