"""Continuing a prompt with an exported checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from moeq.errors import EvaluationError, ModelError
from moeq.models.forward import check_tokens, takes_images
from moeq.models.loading import compute_dtype, load_config, load_tokenizer, model_class, resolve_device
from moeq.models.messages import quiet_transformers
from moeq.models.source import open_source
from moeq.preflight import check_checkpoint
from moeq.runtime.checkpoint import load_checkpoint


def generate(
    checkpoint: Path,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    device: str,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Text, token counts and tokens per second. Raises ModelError, ArtifactError or EvaluationError."""
    check_checkpoint(checkpoint)
    source = open_source(str(checkpoint))
    if takes_images(model_class(source, load_config(source, trust_remote_code), trust_remote_code)):
        what = "an image classifier continues no text"
        raise ModelError(what, where=str(checkpoint), do="use transformers to run it")
    target = resolve_device(device)
    tokenizer = load_tokenizer(source, trust_remote_code)
    model: Any = load_checkpoint(checkpoint, compute_dtype(source, "auto", target), target, trust_remote_code)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]
    if not ids:
        raise EvaluationError("the prompt has no tokens", do="give some text")
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
