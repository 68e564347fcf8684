"""Continuing a prompt with an exported checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from moeq.artifacts.sums import check_sums
from moeq.errors import EvaluationError, ModelError, first_line
from moeq.models.forward import check_tokens, takes_images
from moeq.models.loading import compute_dtype, load_config, load_tokenizer, model_class, resolve_device
from moeq.models.messages import quiet_transformers
from moeq.models.source import open_source
from moeq.preflight import check_checkpoint
from moeq.progress import Reporter
from moeq.runtime.checkpoint import CARD, load_checkpoint

QUIET = Reporter(quiet=True)


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
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    device: str,
    chat: bool = False,
    trust_remote_code: bool = False,
    reporter: Reporter = QUIET,
) -> dict[str, Any]:
    """Text, token counts and tokens per second. Raises ModelError, ArtifactError or EvaluationError.

    Files that changed since they were written are refused; those whose digests are known are not read again.
    """
    check_checkpoint(checkpoint)
    source = open_source(str(checkpoint))
    sums = check_sums(checkpoint, only=lambda name: name != CARD, cached=True, reporter=reporter)
    if sums is not None:
        sums.require_inactive(checkpoint)
    if takes_images(model_class(source, load_config(source, trust_remote_code), trust_remote_code)):
        what = "an image classifier continues no text"
        raise ModelError(what, where=str(checkpoint), do="use transformers to run it")
    target = resolve_device(device)
    tokenizer = load_tokenizer(source, trust_remote_code)
    model: Any = load_checkpoint(checkpoint, compute_dtype(source, "auto", target), target, trust_remote_code)
    ids = prompt_ids(tokenizer, prompt, chat=chat, where=str(checkpoint))
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and len(ids) + max_new_tokens > positions:
        what = f"{len(ids)} + {max_new_tokens} tokens are more than the model's {positions} positions"
        raise EvaluationError(what, do="shorten the prompt or lower --max-new-tokens")
    torch.manual_seed(seed)
    options: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": max_new_tokens}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    started = time.monotonic()
    with torch.no_grad(), quiet_transformers():
        tensor = torch.tensor([ids], device=target)
        check_tokens(model, tensor)
        generated = model.generate(tensor, attention_mask=torch.ones_like(tensor), pad_token_id=pad, **options)[0]
    seconds = time.monotonic() - started
    new = generated[len(ids) :].tolist()
    return {
        "text": tokenizer.decode(generated.tolist(), skip_special_tokens=True),
        "continuation": tokenizer.decode(new, skip_special_tokens=True),
        "prompt_tokens": len(ids),
        "new_tokens": len(new),
        "tokens_per_second": round(len(new) / seconds, 2),
    }
