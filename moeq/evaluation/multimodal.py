"""lm-eval's tasks with images, on a vision-language model that is loaded already.

Letters: C tokens of a context with its image tokens, N tokens of a continuation, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.hf_vlms import DEFAULT_IMAGE_PLACEHOLDER, HFMultimodalLM
from lm_eval.models.utils import replace_placeholders
from torch import Tensor

from moeq.errors import EvaluationError
from moeq.evaluation.batching import BatchSize, rows_at_once
from moeq.evaluation.harness_models import Answer, StaticLM, check_finite
from moeq.folders import expanded
from moeq.models.corpus import opened
from moeq.models.forward import one_answer_each


def image_tasks(manager: Any, names: Sequence[str], *, with_images: bool) -> dict[str, Any]:
    """The tasks among `names`, members of groups included, whose items have images, {name: task}.

    with_images: whether the model takes images. Raises EvaluationError when it does not and a task has them, for a task
    with audio, and for one that scores whole texts with images.
    """
    chosen = {}
    for name, task in manager.load(list(names))["tasks"].items():
        if task.config.doc_to_audio:
            raise EvaluationError("has audio, which moeq does not evaluate", where=f"task {name}", do="leave it out")
        if not task.config.doc_to_image:
            continue
        if not with_images:
            raise EvaluationError(
                "has images, but the model takes text only (it has no image processor)",
                where=f"task {name}",
                do="leave it out, or give a vision-language model",
            )
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            raise EvaluationError("scores whole texts, which images have not", where=f"task {name}", do="leave it out")
        chosen[name] = task
    return chosen


def check_images(tasks: dict[str, Any], limit: int | None) -> None:
    """EvaluationError for an item whose image is a path that is not there; `limit`: items of a task, None for all."""
    for name, task in tasks.items():
        for number, document in enumerate(task.eval_docs):
            if limit is not None and number >= limit:
                break
            given = _listed(task.doc_to_image(document))
            if not given:
                continue
            if not any(isinstance(_path(image), str) for image in given):
                break  # the dataset holds its images
            for image in given:
                _existing(image, f"task {name}, item {number}")


def _listed(given: Any) -> list[Any]:
    """Images of an item: one, several, or none."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _path(image: Any) -> Any:
    """What names an image's file, None where the image is there itself."""
    if isinstance(image, dict):
        return None if isinstance(image.get("bytes"), bytes) else image.get("path")
    return image if isinstance(image, str) else None


def _existing(image: Any, where: str) -> Path:
    path = expanded(str(_path(image)))
    if not path.is_file():
        raise EvaluationError(
            f"no such image: {path}", where=where, do="give paths that are absolute, or relative to where moeq runs"
        )
    return path


def _opened(image: Any, where: str) -> Any:
    """An image in memory, of a path, of {bytes, path}, or as it is."""
    if isinstance(image, dict) and isinstance(image.get("bytes"), bytes):
        return opened(image["bytes"], where)
    return image if _path(image) is None else opened(_existing(image, where), where)


class VisionLM(StaticLM, HFMultimodalLM):  # type: ignore[misc]
    """lm-eval's hf-multimodal on a loaded model; requests without images go through its text-only parts.

    Beside generation it scores continuations of contexts with images, one at a time, so that images of any size go.
    Raises EvaluationError for an image that cannot be read and a context that its model has no positions for: cutting
    it would cut the image.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        batch_size: BatchSize = 1,
        max_length: int | None = None,
        truncate: bool = False,
    ) -> None:
        """processor: the family's, for text and images; batch_size auto: for contexts of the model's length."""
        named = any(getattr(model.config, name, None) is not None for name in ("image_token_id", "image_token_index"))
        token = None if named else getattr(processor, "image_token", None)
        if not named and token is None:
            raise EvaluationError(
                "neither its configuration nor its processor names the image token", where=type(model).__name__
            )
        super().__init__(model, processor, max_length=max_length, truncate=truncate, image_string=token)
        self.batch_size_per_gpu = rows_at_once(batch_size, model, self.max_length)

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **_: Any) -> None:
        self.processor, self.tokenizer = tokenizer, tokenizer.tokenizer

    def _by_images(self, requests: list[Any], image: Callable[..., Any], text: Callable[..., Any]) -> list[Any]:
        """Answers of `image` for the requests that have images and of `text` for the others, in the requests' order."""
        sides: tuple[list[int], list[int]] = ([], [])
        ready = []
        for number, request in enumerate(requests):
            texts, rest = request.args[:2], request.args[2:]
            where = f"task {request.task_name}, item {request.doc_id}"
            images = [_opened(picture, where) for picture in _listed(rest[0]["visual"])] if rest else []
            sides[bool(images)].append(number)
            ready.append(replace(request, arguments=(*texts, {"visual": images}) if images else texts))
        answers: list[Any] = [None] * len(requests)
        for answer_all, numbers in zip((text, image), sides, strict=True):
            given = answer_all([ready[number] for number in numbers]) if numbers else []
            for number, answer in zip(numbers, given, strict=True):
                answers[number] = answer
        return answers

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return self._by_images(
            requests, lambda some: HFMultimodalLM.generate_until(self, some, disable_tqdm=True), super().generate_until
        )

    def _model_multimodal_generate(self, *given: Any, **options: Any) -> Tensor:
        """As HFMultimodalLM's."""
        with one_answer_each(self.model, self.tokenizer) as more:
            tokens: Tensor = super()._model_multimodal_generate(*given, **options, **more)
        return tokens

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Answer]:
        """(log-likelihood, whether it is the greedy choice) of every continuation."""
        score = super().loglikelihood
        answers: list[Answer] = self._by_images(
            requests, lambda some: list(map(self._scored, some)), lambda some: score(some, disable_tqdm=True)
        )
        check_finite(logprob for logprob, _ in answers)
        return answers

    def tok_batch_multimodal_encode(
        self,
        strings: list[str],
        images: list[list[Any]],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> Any:
        batch = super().tok_batch_multimodal_encode(strings, images, padding_side=padding_side, truncation=truncation)
        if left_truncate_len is not None:
            self._check_length(batch["input_ids"].shape[1], left_truncate_len)
        return batch

    def _check_length(self, tokens: int, most: int) -> None:
        if tokens > most:
            raise EvaluationError(
                f"a context of {tokens} tokens with its images, the model has room for {most}",
                do="use smaller images, or lower the task's max_gen_toks or number of examples",
            )

    def _encoded(self, text: str, images: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Ids [C] and what else the model takes with them."""
        if not self.chat_applied:
            text = replace_placeholders(text, DEFAULT_IMAGE_PLACEHOLDER, self.image_token, self.max_images)
        given = self.processor(text=[text], images=[images[: self.max_images]], return_tensors="pt")
        given = given.to(self.device, self.model.dtype)
        extra = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        return extra.pop("input_ids")[0], extra

    def _scored(self, request: Any) -> Answer:
        context, continuation, given = request.args
        spaces = len(context) - len(context.rstrip())
        if spaces:  # as lm-eval does with text: they belong to the continuation's first token
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        before, _ = self._encoded(context, given["visual"])
        ids, extra = self._encoded(context + continuation, given["visual"])
        self._check_length(len(ids), self.max_length)
        with torch.no_grad():
            logits = self.model(input_ids=ids[None], **extra).logits[0, len(before) - 1 : -1]
        logprobs, wanted = logits.float().log_softmax(-1), ids[len(before) :]  # [N, V], [N]
        answer = float(logprobs.gather(1, wanted[:, None]).sum()), bool((logprobs.argmax(-1) == wanted).all())
        self.cache_hook.add_partial("loglikelihood", request.args[:2], answer)
        return answer


def static_lm(model: Any, tokenizer: Any, processor: Any, **options: Any) -> StaticLM:
    """A loaded model for lm-eval; processor: None where no task has images."""
    return StaticLM(model, tokenizer, **options) if processor is None else VisionLM(model, processor, **options)
