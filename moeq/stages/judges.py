"""How eval measures a variant: a language model by perplexity and tasks, an image classifier by its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moeq.artifacts.evaluation import Divergence
from moeq.errors import EvaluationError
from moeq.evaluation import result_file as document
from moeq.evaluation.classification import classify, logit_error
from moeq.evaluation.divergence import Reference
from moeq.evaluation.harness import evaluate_tasks, headline, task_scores
from moeq.evaluation.perplexity import perplexity
from moeq.models.corpus import ImageSequences
from moeq.models.streaming import StreamedModel
from moeq.stages.context import Context


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One variant: figures by the fields of EvalRow; items: what answers and texts it gave, for `document`.

    items is None where nothing is kept item by item (image classifiers).
    """

    figures: dict[str, Any]
    items: document.Row | None


class Judge(Protocol):
    """steps: how often one variant's measurement advances the bar; sizes: what eval.json says of what it used."""

    steps: int
    sizes: dict[str, int]

    def measure(self, name: str, model: Any, streamed: StreamedModel | None, advance: Callable[[], None]) -> Measured:
        """The variant called `name`; the original comes first."""
        ...

    def seen(self) -> Any:
        """What another process compares with the original by, see `judging`."""
        ...


def judge_of(context: Context, reference: Reference) -> Judge:
    """What measures the recipe's model; reference: what compares variants of a language model with the first."""
    return ImageJudge(context) if context.model.takes_images else TextJudge(context, reference)


@contextmanager
def judging(context: Context, seen: Any) -> Iterator[Judge]:
    """What measures variants in another process than the original; seen: what `Judge.seen` gave there."""
    if context.model.takes_images:
        judge = ImageJudge(context)
        judge.wanted = seen
        yield judge
        return
    with Reference.again(seen) as reference:
        yield TextJudge(context, reference)


class TextJudge:
    """Perplexity on the evaluation text, and lm-eval tasks; either may be missing."""

    def __init__(self, context: Context, reference: Reference) -> None:
        self.context, self.section, self.sequences = context, context.text.perplexity, context.text.evaluation
        self.reference = reference
        self.manager = context.text.task_manager
        self.steps = int(bool(context.recipe.eval.tasks))
        self.sizes = {"tokens": 0}
        if self.sequences is not None and self.section is not None:
            self.steps += -(-len(self.sequences) // self.section.batch_size)
            self.sizes["tokens"] = int(self.sequences.mask[:, 1:].sum())

    def measure(self, name: str, model: Any, streamed: StreamedModel | None, advance: Callable[[], None]) -> Measured:
        measured: dict[str, Any] | None = None
        divergence: dict[str, Any] | None = None
        if self.sequences is not None and self.section is not None:
            scorer, device = self.reference.scorer(name, self.sizes["tokens"]), self.context.model.device
            batch, bar = self.section.batch_size, self.context.reporter.bar
            measured = perplexity(model, self.sequences, batch, device, advance, streamed, scorer, bar)
            divergence = scorer.divergence(measured)
        results: dict[str, Any] | None = None
        cut: dict[str, int] = {}
        if self.context.recipe.eval.tasks:
            results, cut = self._tasks(name, model)
            advance()
        tasks = {} if results is None else task_scores(results)
        accuracy, stderr = headline(tasks)
        return Measured(
            figures={
                "perplexity": None if measured is None else measured["perplexity"],
                "perplexity_by_domain": {} if measured is None else measured["by_domain"],
                "accuracy": accuracy,
                "accuracy_stderr": stderr,
                "tasks": tasks,
                "divergence": None if divergence is None else Divergence.of(divergence),
            },
            items={
                "name": name,
                "lm_eval": results,
                "perplexity": measured,
                "divergence": divergence,
                "cut_requests": cut,
            },
        )

    def seen(self) -> Any:
        return self.reference.seen()

    def _tasks(self, name: str, model: Any) -> tuple[dict[str, Any], dict[str, int]]:
        """lm-eval's results with every sample, and how many requests were cut, by their kind.

        Of the model the results hold the name alone: they are the same wherever the run lies.
        """
        from moeq.evaluation.multimodal import static_lm  # brings lm-eval in, which takes seconds

        context, section = self.context, self.context.recipe.eval
        options = {"batch_size": section.batch_size, "truncate": True}
        lm = static_lm(model, context.model.tokenizer, context.text.image_processor, **options)
        results = evaluate_tasks(
            lm,
            section.tasks,
            self.manager,
            limit=section.limit,
            num_fewshot=section.num_fewshot,
            chat_template=section.chat_template,
            model={"model": name},
            bar=context.reporter.bar,
        )
        return results, dict(lm.cut)


class ImageJudge:
    """Accuracy, cross-entropy, and the logits' distance from the first measured model's."""

    def __init__(self, context: Context) -> None:
        images = context.text.evaluation
        if not isinstance(images, ImageSequences):
            raise EvaluationError("no images to be measured on", where="eval.images", do="name some in corpus.source")
        self.context, self.images, self.batch = context, images, context.text.test_images.batch_size
        self.steps = -(-len(images) // self.batch)
        self.sizes = {"tokens": 0, "images": len(images)}
        self.wanted: Tensor | None = None

    def measure(self, name: str, model: Any, streamed: StreamedModel | None, advance: Callable[[], None]) -> Measured:
        device, bar = self.context.model.device, self.context.reporter.bar
        answers = classify(model, self.images, self.batch, device, advance, streamed, bar)
        self.wanted = answers.logits if self.wanted is None else self.wanted
        figures = {
            "perplexity": None,
            "perplexity_by_domain": {},
            "accuracy": answers.accuracy,
            "accuracy_stderr": answers.accuracy_stderr,
            "tasks": answers.by_domain,
            "cross_entropy": answers.cross_entropy,
            "logit_error": logit_error(answers.logits, self.wanted),
        }
        return Measured(figures=figures, items=None)

    def seen(self) -> Any:
        return self.wanted
