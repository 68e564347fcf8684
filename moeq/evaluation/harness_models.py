"""lm-eval's models: a transformers model as it is, and one whose experts' precision follows the context."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.models.utils_hf import stop_sequences_criteria
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from moeq.errors import EvaluationError
from moeq.evaluation.batching import BatchSize, rows_at_once
from moeq.evaluation.divergence import Scorer
from moeq.models.forward import one_answer_each
from moeq.runtime.batch_pruning import pruning_if_alone
from moeq.runtime.context_aware import ContextAwareModel, Piece

Request = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, context, continuation
Answer = tuple[float, bool]
ROLLING = "the first half of a text's first window is the prefill, what follows runs with its decision"
Window = tuple[Sequence[int], Sequence[int]]  # tokens that are fed, and the targets of the last of them


class StaticLM(HFLM):  # type: ignore[misc]
    """HFLM on a loaded model.

    truncate: cut what is longer than the model's positions from the left, as lm-eval does; else it is an error.
    batch_size auto: by free memory, without trying.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch_size: BatchSize = 1,
        max_length: int | None = None,
        truncate: bool = False,
        **more: Any,
    ) -> None:
        """more: options of a further class of lm-eval's beside HFLM."""
        logger = logging.getLogger("lm_eval")
        level = logger.level
        logger.setLevel(logging.ERROR)  # HFLM warns of every model that is loaded already
        try:
            super().__init__(
                pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length, **more
            )
        finally:
            logger.setLevel(level)
        self.truncate = truncate
        self.cut: Counter[str] = Counter()  # requests that were cut, by their kind

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes of the model; HFLM's own asks the hub for it."""
        return {"model_num_parameters": self.model.num_parameters(), "model_dtype": str(self.model.dtype)}

    def _detect_batch_size(self, requests: Sequence[Request] | None = None, pos: int = 0) -> int:
        length = self.max_length
        if requests:
            length = min(length, len(requests[pos][1]) + len(requests[pos][2]))
        return rows_at_once("auto", self.model, length)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        for _, context, continuation in requests:
            self.check_pair(context, continuation)
        scored: list[Answer] = super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)
        check_finite(logprob for logprob, _ in scored)
        return scored

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        for request in requests:
            context, options = request.args
            new = int(normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"])
            if new >= self.max_length:
                raise EvaluationError(
                    f"{new} new tokens leave no room for a context in {self.max_length} positions",
                    where=str(request.task_name),
                    do="lower max_gen_toks in the task's generation_kwargs",
                )
            self.check_length(len(self.tok_encode(context)) + new, "generation")
        texts: list[str] = super().generate_until(requests, disable_tqdm=True)
        return texts

    def _model_generate(self, *given: Any, **options: Any) -> torch.Tensor:
        """As HFLM's; rows of a batch that are finished reach no expert any more."""
        with pruning_if_alone(self.model), one_answer_each(self.model, self.tokenizer) as more:
            tokens: torch.Tensor = super()._model_generate(*given, **options, **more)
        return tokens

    def check_pair(self, context: Sequence[int], continuation: Sequence[int]) -> None:
        """`check_length` of a context with its continuation, which is never cut: EvaluationError where it alone is too
        long."""
        if len(continuation) > self.max_length:
            raise EvaluationError(
                f"a continuation of {len(continuation)} tokens is longer than the model's {self.max_length} positions",
                do="leave the task out",
            )
        self.check_length(len(context) + len(continuation) - 1, "loglikelihood")

    def check_length(self, tokens: int, kind: str) -> None:
        """EvaluationError for more tokens than the model has positions, unless they may be cut: then it is counted."""
        if tokens <= self.max_length:
            return
        if not self.truncate:
            raise EvaluationError(
                f"a request of {tokens} tokens ({kind}) is longer than the model's {self.max_length} positions",
                do="cut contexts from the left with --truncate, or leave the task out",
            )
        self.cut[kind] += 1


class ContextAwareLM(StaticLM):
    """A context-aware model for lm-eval: each distinct context is prefilled once, alone, and decides its experts.

    Answers do not depend on batches or the order of requests: the decisions are the same bits, log-likelihoods within
    float rounding. Rolling: the first half of a text's first window is the context, scored by the prefill; everything
    after it, also in later windows, runs with the decision made there.
    """

    def __init__(self, runtime: ContextAwareModel, tokenizer: Any, **options: Any) -> None:
        super().__init__(runtime.model, tokenizer, **options)
        self.runtime = runtime

    def get_model_info(self) -> dict[str, Any]:
        return {**super().get_model_info(), "rolling": ROLLING}

    def _rows(self, tokens: int) -> int:
        """How many pieces of so many tokens go together."""
        return rows_at_once(self.batch_size_per_gpu, self.model, tokens)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        fitted = [self._fitted(context, continuation) for _, context, continuation in requests]
        scored: list[Answer] = [(math.nan, False)] * len(requests)
        with self.runtime.installed():
            for numbers, scores in self._scored_together(fitted):
                for number, (logprobs, greedy) in zip(numbers, scores, strict=True):
                    scored[number] = answer = (float(logprobs.double().sum()), bool(greedy.all()))
                    texts = requests[number][0]
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answer)
        check_finite(logprob for logprob, _ in scored)
        return scored

    def _fitted(self, context: list[int], continuation: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Context and continuation within the model's positions, cut as HFLM cuts them."""
        self.check_pair(context, continuation)
        left = self.max_length + 1 - len(continuation)
        return tuple(context[-left:]), tuple(continuation)

    def _scored_together(self, fitted: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Iterator[tuple[Any, Any]]:
        """(numbers of requests, their scores) of every piece, the longest first; requests that differ in their last
        token alone are one piece."""

        def fed(number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
            return fitted[number][0], fitted[number][1][:-1]

        order = sorted(range(len(fitted)), key=lambda number: (-len(fitted[number][0]), fed(number), fitted[number][1]))
        groups = [list(numbers) for _, numbers in groupby(order, key=fed)]
        start = 0
        while start < len(groups):
            longest = max(sum(map(len, fitted[groups[start][0]])), 1)
            some = groups[start : start + self._rows(longest)]
            start += len(some)
            pieces = [
                self.runtime.continuation(self.runtime.prefill(fitted[group[0]][0]), [fitted[n][1] for n in group])
                for group in some
            ]
            yield from zip(some, self.runtime.score(pieces), strict=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts."""
        totals = []
        for request in requests:
            windows = list(self._windows(request.args[0]))
            scored = zip(self.rolling(windows), windows, strict=True)
            scores = [Scorer().score((0, 0), logits, torch.tensor(targets)) for logits, (_, targets) in scored]
            totals.append(sum(float(part.sum()) for part in scores))
            check_finite(totals[-1:])
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def _windows(self, text: str) -> Iterator[Window]:
        """As HFLM cuts a text: every token is a target once."""
        cut: Any = get_rolling_token_windows
        disjoint: Any = make_disjoint_window
        for window in cut(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        ):
            context, targets = disjoint(window)
            yield context + targets[:-1], targets

    def rolling(self, windows: Sequence[Window]) -> Iterator[torch.Tensor]:
        """Logits [T, V] of the targets of each of a text's windows: its tokens, and what the last of them predict.

        The first half of the first window is the prefill.
        """
        if not windows:
            return
        with self.runtime.installed():
            tokens, targets = windows[0]
            half = max(1, len(tokens) // 2)
            started = self.runtime.start(tokens[:half])
            keys = self.runtime.choose(started.routing)
            parts = [started.logits]
            if half < len(tokens):
                rest = Piece(cache=started.cache, length=half, keys=keys, tokens=tokens[half:])
                parts += self.runtime.logits([rest])
            yield torch.cat(parts)[-len(targets) :]
            later = [Piece(cache=None, length=0, keys=keys, tokens=fed) for fed, _ in windows[1:]]
            rows = self._rows(max((len(piece.tokens) for piece in later), default=1))
            for at in range(0, len(later), rows):
                logits = self.runtime.logits(later[at : at + rows])
                for row, (_, targets) in zip(logits, windows[1 + at : 1 + at + rows], strict=True):
                    yield row[-len(targets) :]

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        """The contexts [B, C] with new tokens after them, greedy or as the task says; called by HFLM."""
        mask = options.pop("attention_mask").bool()
        if not options.get("do_sample") and not options.get("temperature"):
            options = {name: value for name, value in options.items() if name != "temperature"} | {"do_sample": False}
        with self.runtime.installed(), one_answer_each(self.model, self.tokenizer) as more:
            new = self.runtime.generate(
                [row[keep].tolist() for row, keep in zip(context, mask, strict=True)],
                self.tokenizer.pad_token_id,
                stopping=lambda rows, length: stop_sequences_criteria(self.tokenizer, stop, length, rows),
                max_new_tokens=max_length - context.shape[1],
                **options,
                **more,
            )
        most = max(map(len, new))
        padded = [row + [self.tokenizer.pad_token_id] * (most - len(row)) for row in new]
        return torch.cat([context.cpu(), torch.tensor(padded, dtype=context.dtype)], 1)


def check_finite(logprobs: Iterable[float]) -> None:
    """EvaluationError where a log-likelihood is not finite: what a task would make of it looks like chance."""
    if not all(map(math.isfinite, logprobs)):
        raise EvaluationError("the model's outputs are not finite", do="use float32 or check the checkpoint")
