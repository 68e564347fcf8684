"""eval: the original, the exported checkpoint and the recipe's other assignments, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.digests import digests_of_files
from moeq.artifacts.evaluation import NAME, SAMPLES, Change, EvalReport, EvalRow, Flips, read_eval, write_eval
from moeq.artifacts.files import make_directory
from moeq.errors import EvaluationError
from moeq.evaluation import result_file as document
from moeq.evaluation import task_files
from moeq.evaluation.divergence import Reference
from moeq.evaluation.harness import BUNDLED_TASK
from moeq.folders import expanded
from moeq.models.experts import ExpertLayer
from moeq.models.forward import drawn_inputs
from moeq.models.non_experts import OtherModule
from moeq.recipe import DynamicSection
from moeq.recipe.eval import EvalSection
from moeq.runtime.checkpoint import load_checkpoint
from moeq.runtime.swapping import ExpertPlace, Place, Replacement
from moeq.stages import assign, export, following, judges, needs_evaluate, quantize, refine, workers
from moeq.stages import non_experts as others
from moeq.stages.checkpoint_size import CheckpointSize
from moeq.stages.context import Context
from moeq.stages.expert_bytes import expert_weights, total_bytes
from moeq.stages.low_precision import write_curves
from moeq.stages.model import Overlay
from moeq.stages.needs import Sizes
from moeq.stages.non_experts import Stored
from moeq.stages.replicas import Experts, Replicas
from moeq.stages.translation import Translating, check_translation, figures, text_digests
from moeq.verification.reference import relative

ORIGINAL = "original"
CHECK_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-1}  # relative, of logits


def run(context: Context) -> dict[str, Any]:
    """Write eval.json; returns the summary."""
    with Reference(context.out) as reference:
        variants, error = _measured(context, reference)
    directory = make_directory(context.directory("eval"))
    asked = context.recipe.eval.how_tasks_are_asked()
    rows = _with_samples(directory / SAMPLES, variants.rows, variants.items, asked)
    scores = variants.translating.result(ORIGINAL)
    report = EvalReport(rows=tuple(rows), export_logit_error=error, translation=scores, **variants.judge.sizes)
    write_eval(directory / NAME, report)
    write_curves(context)
    return summarize(report)


def _measured(context: Context, reference: Reference) -> tuple[_Variants, float]:
    """Every variant, the original first, and the error of the exported checkpoint's logits."""
    own = assign.load(context)
    compared = [assign.make(context, other, other.name) for other in context.recipe.eval.compare]
    variants = _Variants(context, judges.judge_of(context, reference), Translating(context))
    followed = context.recipe.eval.dynamic
    several = workers.several(context.recipe, context.model.device)
    opened = needs_evaluate.openers(Sizes(context)) if several else None
    with context.reporter.bar("eval", (2 + len(compared) + len(followed)) * variants.steps) as advance:
        with context.model.overlay() as overlay:
            variants.measure(ORIGINAL, None, overlay.set(), advance)
            expected = _logits(context, replaced(context, overlay, own, exported=True))
        if opened is not None:
            error = variants.measure_apart(opened.count, [own, *compared], expected, advance)
        else:
            checkpoint, error = _exported(context, expected)
            variants.measure(own.name, own, checkpoint, advance, exported=True)
            del checkpoint
            if compared:
                with context.model.overlay() as overlay:
                    for assignment in compared:
                        model = replaced(context, overlay, assignment)
                        variants.measure(assignment.name, assignment, model, advance)
                        del model
        for section in followed:
            variants.follow(section, own, advance)
    return variants, error


class _Variants:
    """Measures one model after the other; items: what each answered, for `document`."""

    def __init__(self, context: Context, judge: judges.Judge, translating: Translating) -> None:
        self.context, self.judge, self.translating = context, judge, translating
        self.steps = judge.steps + translating.batches
        self.rest, self.sizes = others.non_expert_bytes(context), CheckpointSize(context)
        self.rows: list[EvalRow] = []
        self.items: list[document.Row | None] = []

    def measure(
        self,
        name: str,
        assignment: Assignment | None,
        model: Any,
        advance: Callable[[], None],
        *,
        exported: bool = False,
    ) -> None:
        """Measure the model, which has an assignment's experts, None: its own; exported: it is the checkpoint."""
        measured = self.judge.measure(name, model, None if exported else self.context.model.streamed, advance)
        self.translating.add(name, model, advance)
        self._keep(name, assignment, measured, exported=exported)

    def measure_apart(
        self, count: int, assignments: Sequence[Assignment], expected: torch.Tensor, advance: Callable[[], None]
    ) -> float:
        """Measure the checkpoint, which has the first assignment, and the others, each by one of some workers; the
        error of the checkpoint's logits. expected: what these should be."""
        opened, seen = workers.Opened.of(self.context), self.judge.seen()
        wanted = [expected.cpu(), *[None] * (len(assignments) - 1)]
        parts = [
            (f"eval of {one.name}", _Asked(opened=opened, seen=seen, assignment=one, expected=logits))
            for one, logits in zip(assignments, wanted, strict=True)
        ]

        def measured() -> None:
            for _ in range(self.steps):
                advance()

        with workers.opening(self.context, count) as crew:
            found = crew.did(_measure_in_worker, parts, measured)
        for place, (one, (result, translations, _)) in enumerate(zip(assignments, found, strict=True)):
            self.translating.take(one.name, translations)
            self._keep(one.name, one, result, exported=place == 0)
        return float(found[0][2])

    def _keep(
        self, name: str, assignment: Assignment | None, measured: judges.Measured, *, exported: bool = False
    ) -> None:
        """The row of a variant that was measured."""
        context = self.context
        self.items.append(measured.items)
        if assignment is None:
            size, codes = export.original_expert_bytes(context), None
        else:
            size, codes = total_bytes(context, assignment), assignment.code_bits()
        self.rows.append(
            EvalRow(
                name=name,
                exported=exported,
                assignment=assignment,
                expert_bytes=size,
                other_bytes=self.rest[assignment is not None],
                checkpoint_bytes=self.sizes.of(assignment),
                bits_per_weight=8 * size / expert_weights(context.model.layers),
                code_bits=None if codes is None else float(codes),
                **measured.figures,
            )
        )

    def follow(self, section: DynamicSection, own: Assignment, advance: Callable[[], None]) -> None:
        """Measure the checkpoint with precision that follows the workload; its experts take what its pools do."""
        context, name = self.context, following.name_of(self.context, section, [row.name for row in self.rows])
        with following.opened(context, section) as dynamic:
            measured = self.judge.measure(name, dynamic.model, None, advance)
            self.translating.add(name, dynamic.model, advance)
        told = dynamic.summary()
        self.items.append(measured.items)
        self.rows.append(
            EvalRow(
                name=name,
                exported=False,
                assignment=None,
                expert_bytes=told["pool_bytes"],
                other_bytes=self.rest[True],
                checkpoint_bytes=self.sizes.of(own),
                bits_per_weight=8 * told["pool_bytes"] / expert_weights(context.model.layers),
                dynamic=told,
                **measured.figures,
            )
        )


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A variant that a worker measures, by its assignment; expected: of the exported checkpoint, what its logits should
    be; seen: what the original's judge gave."""

    opened: workers.Opened
    seen: Any
    assignment: Assignment
    expected: torch.Tensor | None


def _measure_in_worker(asked: _Asked, tensors: Any) -> tuple[tuple[judges.Measured, Any, float], dict[str, Any]]:
    """The task: what was measured, the translations, and the error of the checkpoint's logits, 0 where it is another
    variant."""
    context, name = asked.opened.context(), asked.assignment.name
    translating, error = Translating(context), 0.0
    with judges.judging(context, asked.seen) as judge:
        if asked.expected is not None:
            model, error = _exported(context, asked.expected.to(context.model.device))
            measured = judge.measure(name, model, None, _no_bar)
            translating.add(name, model, _no_bar)
        else:
            with context.model.overlay() as overlay:
                model = replaced(context, overlay, asked.assignment)
                measured = judge.measure(name, model, context.model.streamed, _no_bar)
                translating.add(name, model, _no_bar)
                del model
    return (measured, translating.last(), error), {}


def _no_bar() -> None:
    """A worker shows none."""


def _with_samples(
    path: Path, rows: list[EvalRow], measured: list[document.Row | None], settings: dict[str, Any]
) -> list[EvalRow]:
    """Keep every item of every variant in a file; the rows with their differences from the original, item by item, and
    the answers that flipped."""
    items = [row for row in measured if row is not None]
    if not items:
        path.unlink(missing_ok=True)
        return rows
    samples = document.document(items, settings)
    document.write(path, samples)
    with_changes = []
    for row, entry in zip(rows, samples["table"], strict=True):
        cells = entry["cells"].items()
        changes = {name: Change(**cell["change"]) for name, cell in cells if cell["change"] is not None}
        flips = {name: Flips(**cell["flips"]) for name, cell in cells if cell["flips"] is not None}
        with_changes.append(row.model_copy(update={"changes": changes, "flips": flips}))
    return with_changes


def check(context: Context) -> None:
    """EvaluationError for tasks, images and folders that are not there; no text is tokenized.

    RecipeError for figures that the model has none of; EvaluationError also for a translation by a model that cannot,
    CorpusError for parallel text that is not there or not parallel.
    """
    section = context.recipe.eval
    _ = context.text.perplexity
    if section.tasks and (section.include_path is not None or section.tasks != [BUNDLED_TASK]):
        _ = context.text.task_manager
    if section.tasks:
        _ = context.text.image_processor
    check_translation(context)
    following.check(context)


def other_inputs(context: Context) -> dict[str, list[str]] | None:
    """Digests of what the evaluation reads beside the recipe, the model and the text; None: of nothing."""
    inputs = {
        "hardware": assign.deciding(context, context.recipe.eval.compare),
        "translation": text_digests(context),
        "tasks": _task_digests(context.recipe.eval),
    }
    return {name: digests for name, digests in inputs.items() if digests is not None} or None


def _task_digests(section: EvalSection) -> list[str] | None:
    """Names and digests of the files of tasks of one's own, data that they name included; None without any."""
    if section.include_path is None or not section.tasks:
        return None
    files = task_files.files_of(expanded(section.include_path))
    digests = digests_of_files(files.values(), cached=True)
    return [f"{name} {digests[path]}" for name, path in files.items()]


def replaced(context: Context, overlay: Overlay, assignment: Assignment, *, exported: bool = False) -> nn.Module:
    """The model with an assignment's dequantized experts, and what else the recipe quantizes.

    exported: the assignment is the recipe's own, whose experts quantize may have trained further.
    """
    experts = partial(layer_replacements, context, assignment, exported=exported)
    return overlay.set(experts, other_replacements(context))


def layer_replacements(
    context: Context,
    assignment: Assignment,
    layer: ExpertLayer,
    model: nn.Module | None = None,
    *,
    exported: bool = False,
) -> dict[ExpertPlace, Replacement]:
    """The dequantized replicas of one layer's experts that are below 16 bits, by module and expert.

    exported: as in `replaced`; model: where weights that are rounded now are taken from, None for the disk.
    """
    directory = context.directory("quantize")
    refined: Experts = {}
    if exported:
        made = quantize.quantizers(directory)[layer.name]
        refined = refine.read_trained(directory, layer, assignment, made)
    replicas = Replicas(context, assignment, layer, model, refined=refined)
    return {
        (layer.name, expert): replicas.replacement(expert, str(directory) if expert in refined else "")
        for expert in [*refine.quantized_experts(assignment, layer), *refine.dropped_experts(assignment, layer)]
    }


def replacements(
    context: Context, assignment: Assignment | None, *, exported: bool = False
) -> dict[Place, Replacement]:
    """What an assignment, and what else the recipe quantizes, puts into a loaded model; nothing for the original."""
    if assignment is None:
        return {}
    wanted: list[tuple[Place, Replacement]] = [*other_replacements(context).items()]
    for layer in context.model.layers:
        wanted += layer_replacements(context, assignment, layer, exported=exported).items()
    return dict(wanted)


def other_replacements(context: Context) -> dict[str, Replacement]:
    """What the recipe quantizes outside of the experts, by module."""
    stored = Stored(context)

    def dequantized(module: OtherModule) -> dict[str, torch.Tensor]:
        return {"weight": stored.packed(module).dequantize(context.model.dtype)}

    return {
        module.name: Replacement(
            key=f"{stored.index.set} {stored.index.entry_of(module.kind)}", make=partial(dequantized, module)
        )
        for module in stored.modules
    }


def _logits(context: Context, model: Any) -> torch.Tensor:
    """Logits of random inputs."""
    with torch.no_grad():
        logits: torch.Tensor = model(**_random_inputs(context), use_cache=False).logits.float()
    return logits


def _random_inputs(context: Context) -> dict[str, torch.Tensor]:
    drawn = drawn_inputs(context.model.skeleton, 2, 32, context.recipe.seed)
    return {
        name: value.to(context.model.device, context.model.dtype if value.is_floating_point() else None)
        for name, value in drawn.items()
    }


def _exported(context: Context, expected: torch.Tensor) -> tuple[Any, float]:
    """The exported checkpoint, loaded as a user would, and the error of its logits of random inputs.

    It computes the plain way, whatever this machine's kernels are: what is recorded are the bits of its weights.
    """
    directory, trust = context.directory("export"), context.recipe.trust_remote_code
    dtype, device = context.model.dtype, context.model.device
    checkpoint = load_checkpoint(directory, dtype, device, trust, policy="reference")
    error = relative(_logits(context, checkpoint), expected)
    if not error <= CHECK_TOLERANCE[context.model.dtype]:
        raise EvaluationError(
            f"the exported checkpoint's logits are off the dequantized weights' by {error:.2g} relative",
            where=str(directory),
            do="report this as a bug of moeq",
        )
    return checkpoint, error


def summarize(report: EvalReport) -> dict[str, Any]:
    """Rows of the final table."""
    shown = {"name", "bits_per_weight", "expert_bytes", "other_bytes", "checkpoint_bytes", "perplexity", "accuracy"}
    rows = [row.model_dump(include=shown) | row.divergence_figures() | row.image_figures() for row in report.rows]
    return {
        "export_logit_error": report.export_logit_error,
        "rows": rows,
        **({} if report.translation is None else {"translation": figures(report.translation)}),
    }


def load(context: Context) -> EvalReport:
    """What was measured; the sizes of checkpoints, and bits, counted now where an earlier version of moeq did not."""
    report = read_eval(context.directory("eval") / NAME)
    rows = report.rows
    if any(row.bits_per_weight is None for row in rows):
        weights = expert_weights(context.model.layers)
        rows = tuple(row.model_copy(update={"bits_per_weight": 8 * row.expert_bytes / weights}) for row in rows)
    if any(row.checkpoint_bytes is None for row in rows):
        sizes = CheckpointSize(context)
        rows = tuple(row.model_copy(update={"checkpoint_bytes": sizes.of(row.assignment)}) for row in rows)
    return report.model_copy(update={"rows": rows})
