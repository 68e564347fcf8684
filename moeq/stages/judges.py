"""How eval measures a variant: a language model by perplexity and tasks, an image classifier by its answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from moeq.errors import EvaluationError
from moeq.evaluation.classification import classify, logit_error
from moeq.evaluation.harness import headline, run_tasks
from moeq.evaluation.perplexity import perplexity
from moeq.models.corpus import ImageSequences
from moeq.models.streaming import StreamedModel
from moeq.stages.context import Context


class Judge(Protocol):
    """steps: how often one variant's measurement advances the bar; sizes: what eval.json says of what it used."""

    steps: int
    sizes: dict[str, int]

    def measure(self, model: Any, streamed: StreamedModel | None, advance: Callable[[], None]) -> dict[str, Any]:
        """The figures of one variant, by the fields of EvalRow; the original comes first."""
        ...


def judge_of(context: Context) -> Judge:
    """What measures the recipe's model."""
    return ImageJudge(context) if context.takes_images else TextJudge(context)


class TextJudge:
    """Perplexity on the evaluation text, and lm-eval tasks; either may be missing."""

    def __init__(self, context: Context) -> None:
        self.context, self.section, self.sequences = context, context.perplexity, context.evaluation
        self.manager = context.task_manager
        self.steps = int(bool(context.recipe.eval.tasks))
        self.sizes = {"tokens": 0}
        if self.sequences is not None and self.section is not None:
            self.steps += -(-len(self.sequences) // self.section.batch_size)
            self.sizes["tokens"] = int(self.sequences.mask[:, 1:].sum())

    def measure(self, model: Any, streamed: StreamedModel | None, advance: Callable[[], None]) -> dict[str, Any]:
        context, section = self.context, self.context.recipe.eval
        measured: dict[str, Any] = {"perplexity": None, "by_domain": {}}
        if self.sequences is not None and self.section is not None:
            measured = perplexity(
                model, self.sequences, self.section.batch_size, context.device, advance, streamed=streamed
            )
        tasks: dict[str, dict[str, float]] = {}
        if section.tasks:
            tasks = run_tasks(
                model,
                context.tokenizer,
                section.tasks,
                self.manager,
                batch_size=section.batch_size,
                limit=section.limit,
            )
            advance()
        accuracy, stderr = headline(tasks)
        return {
            "perplexity": measured["perplexity"],
            "perplexity_by_domain": measured["by_domain"],
            "accuracy": accuracy,
            "accuracy_stderr": stderr,
            "tasks": tasks,
        }


class ImageJudge:
    """Accuracy, cross-entropy, and the logits' distance from the first measured model's."""

    def __init__(self, context: Context) -> None:
        found = context.evaluation
        if not isinstance(found, ImageSequences):
            raise EvaluationError("no images to be measured on", where="eval.images", do="name some in corpus.source")
        self.context, self.images, self.batch = context, found, context.test_images.batch_size
        self.steps = -(-len(found) // self.batch)
        self.sizes = {"tokens": 0, "images": len(found)}
        self.wanted: Tensor | None = None

    def measure(self, model: Any, streamed: StreamedModel | None, advance: Callable[[], None]) -> dict[str, Any]:
        found = classify(model, self.images, self.batch, self.context.device, advance, streamed=streamed)
        self.wanted = found.logits if self.wanted is None else self.wanted
        return {
            "perplexity": None,
            "perplexity_by_domain": {},
            "accuracy": found.accuracy,
            "accuracy_stderr": found.accuracy_stderr,
            "tasks": found.by_domain,
            "cross_entropy": found.cross_entropy,
            "logit_error": logit_error(found.logits, self.wanted),
        }
