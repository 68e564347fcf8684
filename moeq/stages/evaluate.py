"""eval: the original, the exported checkpoint and the recipe's other assignments, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.evaluation import NAME, EvalReport, EvalRow, read_eval, write_eval
from moeq.artifacts.files import make_directory
from moeq.errors import EvaluationError
from moeq.evaluation.harness import BUNDLED_TASK
from moeq.models.experts import ExpertLayer, set_expert_weights
from moeq.models.forward import drawn_inputs
from moeq.models.loading import expert_keys
from moeq.runtime.checkpoint import load_checkpoint
from moeq.stages import assign, export, judges, others, quantize, refine
from moeq.stages.context import Context
from moeq.stages.low_precision import write_curves
from moeq.stages.others import Stored
from moeq.stages.quantize import Replicas
from moeq.stages.translation import Translating, check_translation, figures, text_digests

ORIGINAL = "original"
CHECK_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-1}  # relative, of logits


@dataclass(frozen=True, kw_only=True)
class _Variant:
    name: str
    assignment: Assignment | None
    exported: bool = False


def run(context: Context) -> dict[str, Any]:
    """Write eval.json; returns the summary."""
    section = context.recipe.eval
    own = assign.load(context)
    variants = [
        _Variant(name=ORIGINAL, assignment=None),
        _Variant(name=own.name, assignment=own, exported=True),
        *(_Variant(name=c.name, assignment=assign.make(context, c, c.name)) for c in section.compare),
    ]
    judge = judges.judge_of(context)
    translating = Translating(context)
    rest = others.non_expert_bytes(context)
    rows = []
    error = 0.0
    with context.reporter.bar("eval", len(variants) * (judge.steps + translating.batches)) as advance:
        for variant in variants:
            if variant.exported:
                model, error = _exported(context, own)
            else:
                model = _in_place(context, variant.assignment)
            found = judge.measure(model, None if variant.exported else context.streamed, advance)
            rows.append(_row(context, variant, rest, found))
            translating.add(variant.name, model, advance)
            del model  # before the next variant's is loaded
    context.drop_model()
    scores = translating.result(ORIGINAL)
    report = EvalReport(rows=tuple(rows), export_logit_error=error, translation=scores, **judge.sizes)
    write_eval(make_directory(context.directory("eval")) / NAME, report)
    write_curves(context)
    return summarize(report)


def check(context: Context) -> None:
    """EvaluationError or CorpusError for tasks, folders and texts that are not there; CorpusError for too little.

    RecipeError for figures that the model has none of, EvaluationError also for a translation by a model that cannot.
    """
    section = context.recipe.eval
    _ = context.perplexity
    if section.tasks and (section.include_path is not None or section.tasks != [BUNDLED_TASK]):
        _ = context.task_manager
    _ = context.evaluation
    check_translation(context)


def other_inputs(context: Context) -> dict[str, list[str]] | None:
    """Digests of what the evaluation reads beside the recipe, the model and the text; None: of nothing."""
    found = {"hardware": assign.compared_hardware(context), "translation": text_digests(context)}
    return {name: digests for name, digests in found.items() if digests is not None} or None


def apply_assignment(context: Context, assignment: Assignment, *, exported: bool = False) -> None:
    """Replace the model's experts, and what else is quantized, by their dequantized replicas.

    It is done now, or as a streamed model's layers are read. exported: the assignment is the recipe's own, whose
    experts quantize may have refined.
    """
    directory = context.directory("quantize")
    made = quantize.quantizers(directory) if exported else {}
    stored = Stored(context)
    stored.apply(context.model, "")

    def replace(model: nn.Module, layer: ExpertLayer) -> None:
        refined = refine.read_refined(directory, layer, assignment, made[layer.name]) if made else None
        replicas = Replicas(context, assignment, layer, model, refined=refined)
        for expert in refine.quantized_experts(assignment, layer):
            values = {name: packed.dequantize() for name, packed in replicas.placed(expert).items()}
            set_expert_weights(model, layer, expert, values)

    if context.streamed is not None:
        context.overwritten = [module.weight for module in stored.by_block.get("", ())]
        context.streamed.overlay, context.streamed.block_overlay = replace, stored.apply
        return
    for block in stored.by_block:
        stored.apply(context.model, block)
    for layer in context.layers:
        replace(context.model, layer)


def _in_place(context: Context, assignment: Assignment | None, *, exported: bool = False) -> Any:
    """The model with one assignment's dequantized experts, from fresh weights."""
    context.drop_model()
    if assignment is not None:
        apply_assignment(context, assignment, exported=exported)
    return context.model


def _exported(context: Context, assignment: Assignment) -> tuple[Any, float]:
    """The exported checkpoint, loaded as a user would, and its logits' error against the dequantized weights."""
    dequantized = _in_place(context, assignment, exported=True)
    drawn = drawn_inputs(dequantized, 2, 32, context.recipe.seed)
    inputs = {
        name: value.to(context.device, context.dtype if value.is_floating_point() else None)
        for name, value in drawn.items()
    }
    with torch.no_grad():
        wanted = dequantized(**inputs, use_cache=False).logits.float()
        context.drop_model()
        del dequantized
        packed = load_checkpoint(
            context.directory("export"), context.dtype, context.device, context.recipe.trust_remote_code
        )
        found = packed(**inputs, use_cache=False).logits.float()
    error = float((found - wanted).norm() / wanted.norm())
    if not error <= CHECK_TOLERANCE[context.dtype]:
        raise EvaluationError(
            f"the exported checkpoint's logits are off the dequantized weights' by {error:.2g} relative",
            where=str(context.directory("export")),
            do="report this as a bug of moeq",
        )
    return packed, error


def _row(context: Context, variant: _Variant, rest: tuple[int, int], figures: dict[str, Any]) -> EvalRow:
    """One variant as measured; rest: bytes beside the experts, of the original and as exported."""
    assignment = variant.assignment
    if assignment is None:
        size = export.original_bytes(context, expert_keys(context.source, *context.described))
    else:
        size = assign.total_bytes(context, assignment)
    average = None if assignment is None else assignment.average_bits()
    return EvalRow(
        name=variant.name,
        exported=variant.exported,
        assignment=assignment,
        expert_bytes=size,
        other_bytes=rest[assignment is not None],
        average_bits=None if average is None else float(average),
        **figures,
    )


def summarize(report: EvalReport) -> dict[str, Any]:
    """Rows of the final table."""
    return {
        "export_logit_error": report.export_logit_error,
        "rows": [
            {
                "name": row.name,
                "expert_bytes": row.expert_bytes,
                "other_bytes": row.other_bytes,
                "perplexity": row.perplexity,
                "accuracy": row.accuracy,
                **row.image_figures(),
            }
            for row in report.rows
        ],
        **({} if report.translation is None else {"translation": figures(report.translation)}),
    }


def load(context: Context) -> EvalReport:
    return read_eval(context.directory("eval") / NAME)
