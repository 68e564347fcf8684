"""Attention on a CPU where several queries share a key: they are rows of one product, not heads of their own.

Where a mask is given, transformers copies keys and values for every query of a group; else it has torch take every
query by itself (`enable_gqa`), each a product of one row. Seen as rows, the queries of a group are one block: of one
new token that sees 512, with 4 key heads of 8 queries each, that takes a seventeenth of the time; of 16 with a
mask a third. Only marked modules take it, those of packed models and of what they are timed beside; others in the
process are left as they are, and all are with MOEQ_KERNEL=reference.

Letters: B sequences, H heads of queries, G of keys, T tokens, N tokens that they see, d numbers of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moeq_kernels import choice
from moeq_kernels.names import REFERENCE

NAME = "sdpa"
MARK = "moeq_grouped"
MOST_ROWS = 256  # of a group's queries at once: with more, products by head are as fast
OTHERWISE = "softcap", "output_attentions"  # what transformers refuses, or warns of


def group(model: nn.Module) -> None:
    """Mark every attention of a model whose queries share keys; not where somebody has put a function of their own in
    place of transformers'."""
    if REFERENCE in (choice.policy(), choice.named()):
        return
    if ALL_ATTENTION_FUNCTIONS[NAME] not in (sdpa_attention_forward, attend):
        return
    for module in model.modules():
        if getattr(module, "num_key_value_groups", 1) > 1:
            setattr(module, MARK, True)
    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """As transformers' function of that name: queries [B, H, T, d], keys and values [B, G, N, d], mask [B, 1 or H, T,
    N] or None; [B, T, H, d]."""
    asked = any(settings.get(name) not in (None, False) for name in OTHERWISE)
    if asked or not getattr(module, MARK, False) or query.device.type != "cpu":
        return _plainly(module, query, key, value, attention_mask, settings)
    cache = settings.pop("cache", None)
    if isinstance(cache, PagedAttentionCache):  # in which case keys and values are those of this step alone
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=settings)
    (batch, heads, tokens, size), groups = query.shape, key.shape[1]
    each, mask = heads // groups, attention_mask
    alone = (mask is None and tokens > 1) or each * tokens > MOST_ROWS or each * groups != heads
    if alone or settings.get("position_bias") is not None:
        return _plainly(module, query, key, value, mask, settings)
    if mask is not None:
        seen = mask.expand(-1, max(each, mask.shape[1]), -1, -1)
        mask = seen.reshape(len(mask), -1, each * tokens, mask.shape[-1])
    rows = query.reshape(batch, groups, each * tokens, size)
    how = {"dropout_p": settings.get("dropout", 0.0), "scale": settings.get("scaling")}
    found = nn.functional.scaled_dot_product_attention(rows, key, value, mask, **how)
    return found.reshape(len(found), heads, tokens, -1).transpose(1, 2).contiguous(), None


def _plainly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: dict[str, Any]
) -> tuple[Tensor, None]:
    result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **settings)
    return result
