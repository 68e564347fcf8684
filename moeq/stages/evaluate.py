"""eval: the original, the exported checkpoint and the recipe's other assignments, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.evaluation import NAME, SAMPLES, Change, EvalReport, EvalRow, read_eval, write_eval
from moeq.artifacts.files import make_directory
from moeq.errors import EvaluationError
from moeq.evaluation import result_file as document
from moeq.evaluation.harness import BUNDLED_TASK
from moeq.models.experts import ExpertLayer
from moeq.models.forward import drawn_inputs
from moeq.models.loading import expert_keys
from moeq.models.non_experts import OtherModule
from moeq.quantizers.quantizer import WEIGHT_OPERATIONS, on_demand
from moeq.runtime.checkpoint import load_checkpoint
from moeq.runtime.swapping import ExpertPlace, Place, Replacement, Swapped, overwrite
from moeq.stages import assign, export, judges, quantize, refine
from moeq.stages import non_experts as others
from moeq.stages.checkpoint_size import CheckpointSize
from moeq.stages.context import Context
from moeq.stages.expert_bytes import total_bytes
from moeq.stages.low_precision import write_curves
from moeq.stages.needs import LIBRARY, PACKED_CALLS, Moment, Needs, Rates, Sizes
from moeq.stages.non_experts import Stored
from moeq.stages.replicas import Experts, Replicas
from moeq.stages.text_sizes import Text
from moeq.stages.translation import Translating, check_translation, figures, text_digests
from moeq.verification.verify import relative

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
    rest, whole = others.non_expert_bytes(context), CheckpointSize(context)
    rows: list[EvalRow] = []
    measured: list[document.Row | None] = []
    error = 0.0
    swapped: Swapped | None = None
    with context.reporter.bar("eval", len(variants) * (judge.steps + translating.batches)) as advance:
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
            found = judge.measure(variant.name, model, None if variant.exported else context.streamed, advance)
            measured.append(found.items)
            rows.append(_row(context, variant, rest, whole, found.figures))
            translating.add(variant.name, model, advance)
            del model  # before the next variant's is loaded
    context.drop_model()
    directory = make_directory(context.directory("eval"))
    rows = _with_samples(directory / SAMPLES, rows, measured, section.how_tasks_are_asked())
    scores = translating.result(ORIGINAL)
    report = EvalReport(rows=tuple(rows), export_logit_error=error, translation=scores, **judge.sizes)
    write_eval(directory / NAME, report)
    write_curves(context)
    return summarize(report)


def _with_samples(
    path: Path, rows: list[EvalRow], measured: list[document.Row | None], settings: dict[str, Any]
) -> list[EvalRow]:
    """Keep every item of every variant in a file; the rows with their differences from the original, item by item."""
    items = [one for one in measured if one is not None]
    if not items:
        path.unlink(missing_ok=True)
        return rows
    samples = document.document(items, settings)
    document.write(path, samples)
    return [_with_changes(row, entry["cells"]) for row, entry in zip(rows, samples["table"], strict=True)]


def _with_changes(row: EvalRow, cells: dict[str, Any]) -> EvalRow:
    """The row with its differences from the original."""
    changes = {name: Change(**cell["change"]) for name, cell in cells.items() if cell["change"] is not None}
    return row.model_copy(update={"changes": changes})


def check(context: Context) -> None:
    """EvaluationError for tasks, images and folders that are not there; no text is tokenized.

    RecipeError for figures that the model has none of; EvaluationError also for a translation by a model that cannot,
    CorpusError for parallel text that is not there or not parallel.
    """
    section = context.recipe.eval
    _ = context.text.perplexity
    if section.tasks and (section.include_path is not None or section.tasks != [BUNDLED_TASK]):
        _ = context.task_manager
    if section.tasks:
        _ = context.image_processor
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
    stored = Stored(context)
    stored.apply(context.model, "")

    def replace(model: nn.Module, layer: ExpertLayer) -> None:
        overwrite(model, layer, layer_replacements(context, assignment, layer, exported=exported, model=model))

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
) -> dict[ExpertPlace, Replacement]:
    """The dequantized replicas of one layer's experts that are below 16 bits, by module and expert.

    exported: as in `apply_assignment`; model: where weights that are rounded now are taken from, None for the disk.
    """
    directory = context.directory("quantize")
    refined: Experts = {}
    if exported:
        made = quantize.quantizers(directory)[layer.name]
        refined = refine.read_refined(directory, layer, assignment, made)
    replicas = Replicas(context, assignment, layer, model, refined=refined)
    found = {}
    for expert in refine.quantized_experts(assignment, layer):
        found[layer.name, expert] = replicas.replacement(expert, str(directory) if expert in refined else "")
    return found


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
    """Logits of random inputs with an assignment's dequantized weights; swapped: the model, where it is loaded whole
    and was used before."""
    if swapped is None:
        model = _in_place(context, assignment, exported=True)
    else:
        swapped.set(replacements(context, assignment, exported=True))
        model = swapped.model
    with torch.no_grad():
        logits: torch.Tensor = model(**_random_inputs(context), use_cache=False).logits.float()
    return logits


def _random_inputs(context: Context) -> dict[str, torch.Tensor]:
    drawn = drawn_inputs(context.described[0], 2, 32, context.recipe.seed)
    return {
        name: value.to(context.device, context.dtype if value.is_floating_point() else None)
        for name, value in drawn.items()
    }


def _exported(context: Context, wanted: torch.Tensor) -> tuple[Any, float]:
    """The exported checkpoint, loaded as a user would, and its logits' error against those of the dequantized
    weights."""
    with torch.no_grad():
        packed = load_checkpoint(
            context.directory("export"), context.dtype, context.device, context.recipe.trust_remote_code
        )
        found = packed(**_random_inputs(context), use_cache=False).logits.float()
    error = relative(found, wanted)
    if not error <= CHECK_TOLERANCE[context.dtype]:
        raise EvaluationError(
            f"the exported checkpoint's logits are off the dequantized weights' by {error:.2g} relative",
            where=str(context.directory("export")),
            do="report this as a bug of moeq",
        )
    return packed, error


def _row(
    context: Context, variant: _Variant, rest: tuple[int, int], whole: CheckpointSize, figures: dict[str, Any]
) -> EvalRow:
    """One variant as measured; rest: bytes of tensors beside the experts, of the original and as exported."""
    assignment = variant.assignment
    if assignment is None:
        size = export.original_bytes(context, expert_keys(context.source, *context.described))
    else:
        size = total_bytes(context, assignment)
    average = None if assignment is None else assignment.average_bits()
    return EvalRow(
        name=variant.name,
        exported=variant.exported,
        assignment=assignment,
        expert_bytes=size,
        other_bytes=rest[assignment is not None],
        checkpoint_bytes=whole.of(assignment),
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
                "checkpoint_bytes": row.checkpoint_bytes,
                "perplexity": row.perplexity,
                "accuracy": row.accuracy,
                **row.image_figures(),
            }
            for row in report.rows
        ],
        **({} if report.translation is None else {"translation": figures(report.translation)}),
    }


def load(context: Context) -> EvalReport:
    """What was measured; the sizes of checkpoints counted now where an earlier version of moeq did not."""
    found = read_eval(context.directory("eval") / NAME)
    if all(row.checkpoint_bytes is not None for row in found.rows):
        return found
    whole = CheckpointSize(context)
    rows = tuple(row.model_copy(update={"checkpoint_bytes": whole.of(row.assignment)}) for row in found.rows)
    return found.model_copy(update={"rows": rows})


CHECKED = Text(sequences=2, length=32, batch=2, whole=64)  # on which the exported checkpoint is compared
LOADING = 0.7  # seconds of building and filling a model, whatever its size
REQUEST_OBJECTS = 6000  # bytes of a request as objects
CHANGE, SCORES, ROW, EXPERT = 220, 180, 750, 14  # bytes of eval.json beside assignments, an expert's indentation last
SAMPLE_ROW, SEQUENCE, REQUEST, CHARACTER = 4000, 39, 375, 1.45  # bytes of samples.json, of which for every assignment


def needs(sizes: Sizes) -> Needs:
    """The model with what is swapped in it, then the exported checkpoint, with logits in float32."""
    text, tasks, section = sizes.evaluation, sizes.tasks, sizes.recipe.eval
    given, count = [one for one in (text, tasks) if one is not None], len(sizes.placed)
    walks = (text is not None) + (0 if tasks is None else tasks.batches)  # of a streamed model, for one assignment
    changes = len(section.tasks) + (len(section.tasks) > 1) + (text is not None)
    row = ROW + SCORES * len(section.tasks) + assign.assignment_bytes(sizes) + EXPERT * sizes.experts
    items: float = SAMPLE_ROW + sum((SEQUENCE if one is text else REQUEST) * one.sequences for one in given)
    items += CHARACTER * sum(one.characters for one in given)
    files = {NAME: ROW + count * row}
    if not sizes.images:
        files = {NAME: ROW + count * (row + CHANGE * changes), SAMPLES: int((1 + count) * items)}

    def seconds(rates: Rates) -> float:
        forwards = sum(
            sizes.forward(
                rates, min(one.batch, one.sequences) * (one.mean_length or one.length), one.batches, head=True
            )
            for one in given
        )
        weights = sizes.expert_parameters + sizes.others.parameters
        dequantizing = weights / rates.dequantized_weights + sizes.experts * PACKED_CALLS
        rounding = WEIGHT_OPERATIONS * sizes.expert_parameters / rates.losses_flops
        found = rounding * sum(on_demand(sizes.methods(one)) for _, one in sizes.checkpoint.sections)
        found += (count + 1) * forwards + (1 + sum(one.batches for one in given)) * dequantizing
        found += (count - 1) * dequantizing * (max(1, walks) if sizes.streams else 1)
        found += (walks * count + 1 if sizes.streams else 2 + (count > 1)) * sizes.reading(rates, sizes.disk)
        found += LOADING * (1 if sizes.streams else 2 + (count > 1)) + (0 if tasks is None else LIBRARY)
        return found + _curve_seconds(sizes, rates, dequantizing)

    read = sizes.disk * (walks * count + 1 if sizes.streams else 2 + count) + sum(sizes.placed)
    read += count * sizes.others.packed + sum(sizes.checkpoint.files(sizes.widths[0]).values())
    return Needs(moments=_moments(sizes, given), files=files, read=read, seconds=seconds)


def _moments(sizes: Sizes, given: Sequence[Text]) -> Sequence[Moment]:
    """Beside a loaded model the experts that replicas stand in for, until it is dropped for the exported one."""
    text, tasks, width = sizes.evaluation, sizes.tasks, sizes.dtype.itemsize
    tables = {**sizes.tables(), "tokens of the text": 0 if text is None else 4 * text.whole}
    replaced = (sizes.expert_parameters + sizes.others.parameters) * width
    exported = {"exported checkpoint": sizes.whole - replaced + sizes.others.packed + 1.02 * sizes.placed[0]}
    once = {"one expert, dequantized": 12 * max(layer.parameters_per_expert for layer in sizes.layers), **tables}
    if sizes.streams:
        loaded, stopped = sizes.model(), {"stopped texts": 0 if text is None else text.tokens * 2 * sizes.token}
        swapped, reading = stopped, {"being read": 0.1 * sizes.placed[0]}
    else:
        loaded, stopped, reading = {}, {}, {}
        swapped = {"experts that were replaced": sizes.expert_parameters * width}
    moments = [{**sizes.loading(), **stopped, **once}, {**loaded, **exported, **tables, **reading}]
    for one in (CHECKED, *given):
        logits = {"logits of tasks" if one is tasks else "logits": one.batch_tokens * sizes.vocabulary * (width + 12)}
        running = {**sizes.running(one.batch_tokens, one.length), **logits, **once}
        moments += [{**sizes.held(), **swapped, **running}, {**loaded, **exported, **running}]
    moments[-1]["requests"] = 0 if tasks is None else tasks.sequences * REQUEST_OBJECTS
    return moments


def _curve_seconds(sizes: Sizes, rates: Rates, dequantizing: float) -> float:
    """Seconds of the curves: a pass for every point, and in every order every expert replaced about once."""
    text, found = sizes.evaluation, 0.0
    if text is None:
        return found
    for section in sizes.recipe.eval.low_precision:
        share = min(1.0, (section.sequences or text.sequences) / text.sequences)
        one = share * sizes.forward(rates, text.batch_tokens, text.batches, head=True)
        one += sizes.reading(rates, sizes.disk) + dequantizing if sizes.streams else 0.0
        found += (2 + section.seeds) * (len(section.shares) * one + dequantizing) + sizes.reading(rates, sizes.disk)
    return found
