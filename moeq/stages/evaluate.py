"""eval: the original, the exported checkpoint and the recipe's other assignments, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.evaluation import NAME, SAMPLES, Change, EvalReport, EvalRow, read_eval, write_eval
from moeq.artifacts.files import make_directory
from moeq.errors import EvaluationError
from moeq.evaluation import document
from moeq.evaluation.harness import BUNDLED_TASK, evaluate_tasks, headline, task_scores
from moeq.evaluation.perplexity import perplexity
from moeq.models import corpus
from moeq.models.experts import ExpertLayer, set_expert_weights
from moeq.models.forward import forward
from moeq.models.loading import expert_keys
from moeq.models.others import OtherModule
from moeq.runtime.checkpoint import load_checkpoint
from moeq.runtime.swapping import Place, Replacement, Swapped
from moeq.stages import assign, export, others, quantize, refine
from moeq.stages.context import Context
from moeq.stages.others import Stored
from moeq.stages.quantize import Replicas

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
    sequences = context.evaluation
    manager = context.task_manager
    batches = (
        0 if sequences is None or section.perplexity is None else -(-len(sequences) // section.perplexity.batch_size)
    )
    rest = others.non_expert_bytes(context)
    rows, measured = [], []
    error = 0.0
    swapped: Swapped | None = None
    with context.reporter.bar("eval", len(variants) * (batches + bool(section.tasks))) as advance:
        for variant in variants:
            if variant.exported:
                wanted = _logits(context, own, swapped)
                swapped = None
                context.drop_model()
                model, error = _exported(context, wanted)
            elif context.streamed is not None:
                model = _in_place(context, variant.assignment)
            else:
                swapped = swapped or Swapped(context.model, context.layers)
                swapped.set(replacements(context, variant.assignment))
                model = swapped.model
            found, row = _evaluate(context, model, variant, sequences, manager, rest, advance)
            measured.append(found)
            rows.append(row)
            del model  # before the next variant's is loaded
    context.drop_model()
    tokens = 0 if sequences is None else int(sequences.mask[:, 1:].sum())
    directory = make_directory(context.directory("eval"))
    samples = document.document(measured, section.how_tasks_are_asked())
    document.write(directory / SAMPLES, samples)
    rows = [_with_changes(row, entry["cells"]) for row, entry in zip(rows, samples["table"], strict=True)]
    report = EvalReport(rows=tuple(rows), tokens=tokens, export_logit_error=error)
    write_eval(directory / NAME, report)
    return summarize(report)


def _with_changes(row: EvalRow, cells: dict[str, Any]) -> EvalRow:
    """The row with its differences from the original."""
    changes = {name: Change(**cell["change"]) for name, cell in cells.items() if cell["change"] is not None}
    return row.model_copy(update={"changes": changes})


def check(context: Context) -> None:
    """EvaluationError or CorpusError for tasks, folders and texts that are not there; CorpusError for too little."""
    section = context.recipe.eval
    if section.tasks and (section.include_path is not None or section.tasks != [BUNDLED_TASK]):
        _ = context.task_manager
    if section.tasks:
        _ = context.image_processor
    _ = context.evaluation


def apply_assignment(context: Context, assignment: Assignment, *, exported: bool = False) -> None:
    """Replace the model's experts, and what else is quantized, by their dequantized replicas.

    It is done now, or as a streamed model's layers are read. exported: the assignment is the recipe's own, whose
    experts quantize may have refined.
    """
    stored = Stored(context)
    stored.apply(context.model, "")

    def replace(model: nn.Module, layer: ExpertLayer) -> None:
        for (_, expert), one in layer_replacements(context, assignment, layer, exported=exported, model=model).items():
            set_expert_weights(model, layer, expert, one.make())

    if context.streamed is not None:
        context.overwritten = [module.weight for module in stored.by_block.get("", ())]
        context.streamed.overlay, context.streamed.block_overlay = replace, stored.apply
        return
    for block in stored.by_block:
        stored.apply(context.model, block)
    for layer in context.layers:
        replace(context.model, layer)


def layer_replacements(
    context: Context,
    assignment: Assignment,
    layer: ExpertLayer,
    *,
    exported: bool = False,
    model: nn.Module | None = None,
) -> dict[tuple[str, int], Replacement]:
    """The dequantized replicas of one layer's experts that are below 16 bits, by module and expert.

    exported: as in `apply_assignment`; model: where weights that are rounded now are taken from, None for the disk.
    """
    directory = context.directory("quantize")
    refined: refine.Experts = {}
    if exported:
        made = quantize.quantizers(directory)[layer.name]
        refined = refine.read_refined(directory, layer, assignment, made)
    replicas = Replicas(context, assignment, layer, model, refined=refined)
    found = {}
    for expert in refine.quantized_experts(assignment, layer):
        which = replicas.identity(expert, str(directory) if expert in refined else "")
        found[layer.name, expert] = Replacement(key=which, make=partial(_dequantized, replicas, expert))
    return found


def _dequantized(replicas: Replicas, expert: int) -> dict[str, torch.Tensor]:
    return {name: packed.dequantize() for name, packed in replicas.placed(expert).items()}


def replacements(
    context: Context, assignment: Assignment | None, *, exported: bool = False
) -> dict[Place, Replacement]:
    """What an assignment, and what else the recipe quantizes, puts into a loaded model; nothing for the original."""
    found: dict[Place, Replacement] = {}
    if assignment is None:
        return found
    found |= other_replacements(context)
    for layer in context.layers:
        for place, one in layer_replacements(context, assignment, layer, exported=exported).items():
            found[place] = one
    return found


def other_replacements(context: Context) -> dict[Place, Replacement]:
    """What the recipe quantizes outside of the experts, by module."""
    stored = Stored(context)
    return {
        module.name: Replacement(
            key=f"{stored.index.set} {stored.index.entry_of(module.kind)}",
            make=partial(_dequantized_module, stored, module),
        )
        for module in stored.modules
    }


def _dequantized_module(stored: Stored, module: OtherModule) -> dict[str, torch.Tensor]:
    return {"weight": stored.packed(module).dequantize()}


def _in_place(context: Context, assignment: Assignment | None, *, exported: bool = False) -> Any:
    """The model with one assignment's dequantized experts, from fresh weights."""
    context.drop_model()
    if assignment is not None:
        apply_assignment(context, assignment, exported=exported)
    return context.model


def _logits(context: Context, assignment: Assignment, swapped: Swapped | None) -> torch.Tensor:
    """Logits of random tokens with an assignment's dequantized weights; swapped: the model, where it is loaded whole
    and was used before."""
    if swapped is None:
        model = _in_place(context, assignment, exported=True)
    else:
        swapped.set(replacements(context, assignment, exported=True))
        model = swapped.model
    with torch.no_grad():
        logits: torch.Tensor = forward(model, _random_tokens(context)).logits.float()
    return logits


def _random_tokens(context: Context) -> torch.Tensor:
    generator = torch.Generator().manual_seed(context.recipe.seed)
    skeleton: Any = context.described[0]
    vocabulary = skeleton.get_input_embeddings().weight.shape[0]
    return torch.randint(vocabulary, (2, 32), generator=generator).to(context.device)


def _exported(context: Context, wanted: torch.Tensor) -> tuple[Any, float]:
    """The exported checkpoint, loaded as a user would, and its logits' error against those of the dequantized
    weights."""
    with torch.no_grad():
        packed = load_checkpoint(
            context.directory("export"), context.dtype, context.device, context.recipe.trust_remote_code
        )
        found = forward(packed, _random_tokens(context)).logits.float()
    error = float((found - wanted).norm() / wanted.norm())
    if not error <= CHECK_TOLERANCE[context.dtype]:
        raise EvaluationError(
            f"the exported checkpoint's logits are off the dequantized weights' by {error:.2g} relative",
            where=str(context.directory("export")),
            do="report this as a bug of moeq",
        )
    return packed, error


def _evaluate(
    context: Context,
    model: Any,
    variant: _Variant,
    sequences: corpus.Sequences | None,
    manager: Any,
    rest: tuple[int, int],
    advance: Any,
) -> tuple[document.Row, EvalRow]:
    """Measure one variant, item by item and together; rest: bytes beside the experts, of the original and as
    exported."""
    section = context.recipe.eval
    measured: dict[str, Any] | None = None
    if sequences is not None and section.perplexity is not None:
        measured = perplexity(
            model,
            sequences,
            section.perplexity.batch_size,
            context.device,
            advance,
            streamed=None if variant.exported else context.streamed,
        )
    results = None
    if section.tasks:
        from moeq.evaluation.multimodal import static_lm  # brings lm-eval in, which takes seconds

        options = {"batch_size": section.batch_size, "truncate": True}
        lm = static_lm(model, context.tokenizer, context.image_processor, **options)
        results = evaluate_tasks(
            lm,
            section.tasks,
            manager,
            limit=section.limit,
            num_fewshot=section.num_fewshot,
            chat_template=section.chat_template,
        )
        advance()
    tasks = {} if results is None else task_scores(results)
    found = {"name": variant.name, "lm_eval": results, "perplexity": measured, "cut_requests": {}}
    assignment = variant.assignment
    accuracy, stderr = headline(tasks)
    if assignment is None:
        size = export.original_bytes(context, expert_keys(context.source, *context.described))
    else:
        size = assign.total_bytes(context, assignment)
    average = None if assignment is None else assignment.average_bits()
    return found, EvalRow(
        name=variant.name,
        exported=variant.exported,
        assignment=assignment,
        expert_bytes=size,
        other_bytes=rest[assignment is not None],
        average_bits=None if average is None else float(average),
        perplexity=None if measured is None else measured["perplexity"],
        perplexity_by_domain={} if measured is None else measured["by_domain"],
        accuracy=accuracy,
        accuracy_stderr=stderr,
        tasks=tasks,
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
            }
            for row in report.rows
        ],
    }


def load(context: Context) -> EvalReport:
    return read_eval(context.directory("eval") / NAME)
