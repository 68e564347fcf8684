"""Orders of rows and columns that llama.cpp keeps matrices in, by family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Order = tuple[str, Tensor | None, Tensor | None]  # a tensor's stem, and the order of its rows and of its columns


def as_they_are(config: Any, stem: str, rows: int) -> list[Order]:
    return [(stem, None, None)]


def by_group(config: Any, stem: str, rows: int) -> list[Order]:
    """in_proj_qkvz has q, k, v and z of a group of heads together; llama.cpp has all q, k, v in one, z in another."""
    if stem != "ssm_in":
        return as_they_are(config, stem, rows)
    groups, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // groups * config.linear_value_head_dim
    parts = torch.arange(rows).view(groups, -1).split([size, size, values, values], 1)
    first = torch.cat([part.reshape(-1) for part in parts[:3]])
    return [("attn_qkv", first, None), ("attn_gate", parts[3].reshape(-1), None)]


def tiled(config: Any, stem: str, rows: int) -> list[Order]:
    """Heads of values are kept by their place in a group first, then by group, and all that belongs to them."""
    heads, groups, size = config.linear_num_value_heads, config.linear_num_key_heads, config.linear_value_head_dim

    def order(width: int) -> Tensor:
        return torch.arange(heads * width).view(groups, -1, width).transpose(0, 1).reshape(-1)

    if stem == "ssm_out":
        return [(stem, None, order(size))]
    if stem in ("attn_qkv", "ssm_conv1d"):
        keys = rows - heads * size
        return [(stem, torch.cat([torch.arange(keys), keys + order(size)]), None)]
    if stem == "attn_gate":
        return [(stem, order(size), None)]
    if stem in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        return [(stem, order(1), None)]
    return as_they_are(config, stem, rows)


def halves_interleaved(config: Any, stem: str, rows: int) -> list[Order]:
    """q_proj and k_proj of llama, by head."""
    if stem not in ("attn_q", "attn_k"):
        return as_they_are(config, stem, rows)
    heads = config.num_attention_heads if stem == "attn_q" else config.num_key_value_heads
    return [(stem, torch.arange(rows).view(heads, 2, -1).mT.reshape(-1), None)]


def granite(config: Any, stem: str, rows: int) -> list[Order]:
    """As `halves_interleaved`; and the shared expert's first matrices, which lie one after the other, are two."""
    if stem != "ffn_gate_up_shexp":
        return halves_interleaved(config, stem, rows)
    gate, up = torch.arange(rows).chunk(2)
    return [("ffn_gate_shexp", gate, None), ("ffn_up_shexp", up, None)]


def in_its_shape(config: Any, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape
