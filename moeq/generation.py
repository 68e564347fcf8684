"""Continuing prompts with an exported checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from torch import Tensor

from moeq.artifacts.sums import check_sums
from moeq.errors import EvaluationError, ModelError, first_line
from moeq.models.forward import check_tokens, choose_as_asked, vocabulary
from moeq.models.loading import compute_dtype, load_config, load_tokenizer, model_class, no_text, resolve_device
from moeq.models.messages import quiet_transformers
from moeq.models.source import ModelSource, open_source
from moeq.preflight import check_checkpoint
from moeq.progress import Reporter
from moeq.runtime.batch_pruning import pruning
from moeq.runtime.checkpoint import CARD, load_checkpoint
from moeq.runtime.dynamic.options import Following, in_words

if TYPE_CHECKING:
    from moeq.runtime.dynamic.model import DynamicMoE

QUIET = Reporter(quiet=True)
LEAST_TEMPERATURE = 1e-6  # below it the likeliest token is all that is drawn, until float32 cannot divide any more


def prompt_ids(tokenizer: Any, prompt: str, *, chat: bool, where: str = "prompt") -> list[int]:
    """Token ids of a prompt, as `tokenizer(prompt)` and transformers' own pipelines make them.

    A first token of its own (BOS) is there where the tokenizer adds one. chat: the prompt is the user's turn of a
    conversation, as the tokenizer's chat template writes it up to where the answer begins. An empty prompt is BOS
    alone. EvaluationError without a template, or without a token.
    """
    if not chat:
        ids = tokenizer(prompt, verbose=False)["input_ids"]
    elif not getattr(tokenizer, "chat_template", None):
        do = "leave --chat out, or put chat_template.jinja into the checkpoint"
        raise EvaluationError("the tokenizer has no chat template", where=where, do=do)
    else:
        turns = [{"role": "user", "content": prompt}]
        try:
            ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # jinja's own errors, and whatever a template raises
            what = f"the chat template does not take a user's turn alone ({first_line(error)})"
            raise EvaluationError(what, where=where, do="leave --chat out") from error
    if not ids and tokenizer.bos_token_id is None:
        raise EvaluationError("the prompt has no tokens", do="give some text")
    return list(ids) or [tokenizer.bos_token_id]


def generate(
    checkpoint: Path,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    device: str,
    beams: int = 1,
    chat: bool = False,
    dynamic: Following | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter = QUIET,
) -> dict[str, Any]:
    """Text, token counts and tokens per second. Raises ModelError, ArtifactError or EvaluationError.

    Several prompts are continued together: `answers` has what one alone gives, in their order, and those that are
    finished reach no expert any more. dynamic: experts' precision follows what is generated, and what that came to is
    told under the same name. Files that changed since they were written are refused; those whose digests are known are
    not read again.
    """
    check_checkpoint(checkpoint)
    source = open_source(str(checkpoint))
    sums = check_sums(checkpoint, only=lambda name: name != CARD, cached=True, reporter=reporter)
    if sums is not None:
        sums.require_inactive(checkpoint)
    config = _config_of_text(source, str(checkpoint), trust_remote_code)
    target = resolve_device(device)
    tokenizer = load_tokenizer(source, trust_remote_code)
    several = [prompts] if isinstance(prompts, str) else list(prompts)
    rows = [prompt_ids(tokenizer, prompt, chat=chat, where=str(checkpoint)) for prompt in several]
    _check_positions(config, max(map(len, rows)), max_new_tokens)
    options = _options(temperature, max_new_tokens, beams)
    room = len(rows) * beams, max(map(len, rows)) + max_new_tokens
    with _running(checkpoint, source, target, dynamic, room, trust_remote_code, reporter) as (model, following):
        pad = _pad_of(tokenizer, vocabulary(model))
        ids, mask = _padded(rows, pad or 0, left=not model.config.is_encoder_decoder)
        choose_as_asked(model)
        check_tokens(model, ids)
        torch.manual_seed(seed)
        started = time.monotonic()
        with torch.no_grad(), quiet_transformers(), pruning(model) if len(rows) > 1 else nullcontext() as pruned:
            ids, mask = ids.to(target), mask.to(target)
            generated = model.generate(ids, attention_mask=mask, pad_token_id=pad, **options)
        seconds = time.monotonic() - started
    begin = 1 if model.config.is_encoder_decoder else ids.shape[1]
    ends = _end_tokens(model)
    answers = [
        _answer(tokenizer, row, new, ends, whole=not model.config.is_encoder_decoder)
        for row, new in zip(rows, generated[:, begin:].tolist(), strict=True)
    ]
    count = sum(answer["new_tokens"] for answer in answers)
    more: dict[str, Any] = {"tokens_per_second": round(count / seconds, 2)}
    if pruned is not None:
        more |= {"expert_rows": pruned.tokens, "expert_rows_left_out": pruned.left_out}
    if following is not None:
        more["dynamic"] = following.summary()
        reporter.say(escape(in_words(more["dynamic"])))
    return answers[0] | more if pruned is None else {"answers": answers, **more}


def _config_of_text(source: ModelSource, where: str, trust_remote_code: bool) -> Any:
    """A model's configuration; ModelError for one that makes no text."""
    config = load_config(source, trust_remote_code)
    if (what := no_text(model_class(source, config, trust_remote_code))) is not None:
        raise ModelError(f"{what} continues no text", where=where, do="use transformers to run it")
    return config


def _options(temperature: float, max_new_tokens: int, beams: int) -> dict[str, Any]:
    """How transformers chooses tokens."""
    drawn = {"temperature": temperature, "top_k": 0} if temperature >= LEAST_TEMPERATURE else {}
    return {"do_sample": bool(drawn), "max_new_tokens": max_new_tokens, "num_beams": beams, **drawn}


@contextmanager
def _running(
    checkpoint: Path,
    source: ModelSource,
    target: torch.device,
    dynamic: Following | None,
    room: tuple[int, int],
    trust_remote_code: bool,
    reporter: Reporter,
) -> Iterator[tuple[Any, DynamicMoE | None]]:
    """The model as it is placed, or with its experts' precision changing, of which the second is told; room: sequences,
    and tokens of each, whose keys and values there may be."""
    if dynamic is None:
        yield load_checkpoint(checkpoint, compute_dtype(source, "auto", target), target, trust_remote_code), None
        return
    from moeq.exporters.native_dynamic import open_dynamic  # which loads a compiler
    from moeq.runtime.dynamic.told import watched

    with open_dynamic(
        checkpoint,
        dynamic.options,
        device=str(target),
        tokens=math.prod(room),
        sequences=room[0],
        log=dynamic.log,
        say=reporter.say,
        trust_remote_code=trust_remote_code,
    ) as following, watched(following, reporter) if dynamic.watch else nullcontext():  # fmt: skip
        yield following.model, following


def _check_positions(config: Any, longest: int, max_new_tokens: int) -> None:
    """EvaluationError for a prompt and an answer that are longer than the model's positions."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest + max_new_tokens > positions:
        what = f"{longest} + {max_new_tokens} tokens are more than the model's {positions} positions"
        raise EvaluationError(what, do="shorten the prompt or lower --max-new-tokens")


def _pad_of(tokenizer: Any, rows: int) -> int | None:
    """What stands where nobody looks: the tokenizer's pad, or end, that the model has an embedding of, if any."""
    named = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in named if token is not None and token < rows), None)


def _padded(rows: Sequence[Sequence[int]], pad: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Tokens [B, S] and which of them are real, pads before a decoder's rows, behind an encoder's."""
    longest = max(map(len, rows))
    ids, mask = torch.full((len(rows), longest), pad), torch.zeros(len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), None) if left else slice(len(row))
        ids[number, place], mask[number, place] = torch.tensor(row), 1
    return ids, mask


def _end_tokens(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends if isinstance(ends, list) else [] if ends is None else [ends])


def _answer(tokenizer: Any, prompt: Sequence[int], new: list[int], ends: set[int], *, whole: bool) -> dict[str, Any]:
    """What one prompt was continued with, up to its first end token; whole: the text begins with the prompt."""
    last = next((place for place, token in enumerate(new) if token in ends), len(new))
    new = new[: last + 1]
    continuation = tokenizer.decode(new, skip_special_tokens=True)
    return {
        "text": tokenizer.decode([*(prompt if whole else ()), *new], skip_special_tokens=True),
        "continuation": continuation,
        "prompt_tokens": len(prompt),
        "new_tokens": len(new),
    }
