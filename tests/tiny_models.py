"""Tiny random models of awkward sizes, and whether the long sweeps run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import torch

from moeq.bundled import bundled_path

FULL = os.environ.get("MOEQ_FULL") == "1"
T = TypeVar("T")


def some(cases: Iterable[T], number: int) -> list[T]:
    """The first of the cases that a whole file of tests runs through; all of them in the long sweeps."""
    return list(cases)[: None if FULL else number]


def save_tiny(folder: Path, family: str, dtype: torch.dtype = torch.float32, **sizes: int) -> Path:
    """A random model of a family with the bundled tokenizer; hidden 40 and intermediate 56 divide by no group size."""
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common = {
        "vocab_size": 2048, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(7)
    if family == "mixtral":
        own = {"intermediate_size": 56, "num_local_experts": 5, "num_experts_per_tok": 2}
        model = MixtralForCausalLM(MixtralConfig(**common | own | sizes))
    else:
        own = {
            "intermediate_size": 64, "moe_intermediate_size": 24, "num_experts": 7, "num_experts_per_tok": 3,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common | own | sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.normal_(std=0.15)
    model.to(dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_path("tiny-mixtral") / name, folder / name)
    return folder
