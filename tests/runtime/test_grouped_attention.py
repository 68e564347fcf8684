"""Attention whose queries share keys: as transformers computes it, and by rows where that is faster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from moeq.benching.subject import load_subject
from moeq.progress import Reporter
from moeq.runtime import grouped_attention
from moeq.runtime.grouped_attention import MARK, MOST_ROWS, attend

Exported = Callable[[str], Path]
MASKS = ("none", "one head", "every head", "added")


class Attention(nn.Module):
    layer_idx = 0
    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        setattr(self, MARK, True)


def mask_of(kind: str, sequences: int, heads: int, tokens: int, seen: int) -> Tensor | None:
    """Every token sees at least the first."""
    if kind == "none":
        return None
    found = torch.rand(sequences, heads if kind == "every head" else 1, tokens, seen) < 0.6
    found[..., 0] = True
    return torch.zeros(found.shape).masked_fill(~found, -torch.inf) if kind == "added" else found


@given(
    sequences=st.integers(1, 3),
    keys=st.integers(1, 3),
    each=st.integers(1, 9),
    tokens=st.integers(1, 40),
    before=st.integers(0, 30),
    kind=st.sampled_from(MASKS),
    sizes=st.sampled_from([(8, 8), (16, 4)]),
    seed=st.integers(0, 99),
)
def test_what_rows_give_is_what_transformers_gives(
    sequences: int, keys: int, each: int, tokens: int, before: int, kind: str, sizes: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    module, heads, seen = Attention(each), keys * each, tokens + before
    query = torch.randn(sequences, tokens, heads, sizes[0]).transpose(1, 2)  # as models hand it over
    key, value = (torch.randn(sequences, keys, seen, size) for size in sizes)
    mask = mask_of(kind, sequences, heads, tokens, seen)
    given_ = (module, query, key, value, mask)
    (mine, none), (theirs, _) = (each_(*given_, scaling=0.3) for each_ in (attend, sdpa_attention_forward))
    assert none is None
    assert mine.shape == theirs.shape == (sequences, tokens, heads, sizes[1])
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, torch.Size]]:
    """Shapes of the queries and keys that torch's attention gets."""
    seen, attention = [], nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Tensor:
        seen.append((query.shape, key.shape))
        return attention(query, key, *rest, **named)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize(
    ("tokens", "kind", "wanted"),
    [(1, "none", 8), (1, "one head", 8), (5, "one head", 40), (5, "none", 5), (MOST_ROWS // 8 + 1, "one head", 33)],
)
def test_queries_of_a_group_are_rows_where_they_are_few_and_no_causal_mask_is_implied(
    tokens: int, kind: str, wanted: int, products: list[tuple[torch.Size, torch.Size]]
) -> None:
    query, key = torch.randn(2, 16, tokens, 8), torch.randn(2, 2, 50, 8)
    attend(Attention(8), query, key, key, mask_of(kind, 2, 16, tokens, 50))
    assert [shape[2] for shape, _ in products] == [wanted]
    other = Attention(8)
    delattr(other, MARK)
    for one in (attend, sdpa_attention_forward):
        one(other, query, key, key, mask_of(kind, 2, 16, tokens, 50))
    assert products[-1] == products[-2], "what is not marked is transformers'"


def tokens_of(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The likeliest 6 after each prompt: all at once, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    made = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=6, eos_token_id=None, pad_token_id=0
    )
    found: list[list[int]] = made[:, longest:].tolist()
    return found


def marked(model: nn.Module) -> list[bool]:
    return [getattr(part, MARK, False) for part in model.modules() if hasattr(part, "num_key_value_groups")]


def test_a_loaded_checkpoint_decodes_by_rows_and_to_the_same_tokens(
    exported: Exported, products: list[tuple[torch.Size, torch.Size]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported("mixtral")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    monkeypatch.setenv("MOEQ_KERNEL", "reference")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    monkeypatch.delenv("MOEQ_KERNEL")
    assert all(marked(model))
    assert not any(marked(plain))
    prompts = [[5, 9, 3, 17, 4], [8, 2]]
    for some in (prompts, prompts[:1]):
        products.clear()
        mine = tokens_of(model, some)
        assert {(query[1], query[2]) for query, _ in products[-3:]} == {(2, 2)}  # of 4 heads that share 2 keys
        assert mine == tokens_of(plain, some)


def test_attention_that_somebody_registered_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*given: Any, **named: Any) -> None: ...

    monkeypatch.setitem(AttentionInterface._global_mapping, grouped_attention.NAME, own)
    module = Attention(8)
    delattr(module, MARK)
    grouped_attention.group(module)
    assert not hasattr(module, MARK)
    assert AttentionInterface()[grouped_attention.NAME] is own


def test_requests_that_share_steps_decode_by_rows(
    exported: Exported, products: list[tuple[torch.Size, torch.Size]]
) -> None:
    """As `transformers serve --continuous-batching` runs a model: a cache in pages, all requests in one sequence."""
    model = AutoModelForCausalLM.from_pretrained(exported("mixtral"), dtype=torch.float32)
    prompts, settings = [[5, 9, 3, 17, 4], [8, 2]], GenerationConfig(max_new_tokens=6, eos_token_id=-1, pad_token_id=0)
    answers = model.generate_batch(
        inputs=prompts, generation_config=settings, continuous_batching_config=ContinuousBatchingConfig(num_blocks=4)
    )
    made = [answer.generated_tokens for answer in answers.values()]
    assert {shape[1:3] for shape, _ in products[-3:]} == {(2, 4)}, "two tokens' queries of a group"
    for part in model.modules():
        part.__dict__.pop(MARK, None)
    assert made == [tokens_of(model, [prompt])[0] for prompt in prompts]


def test_a_dense_model_that_is_timed_attends_as_packed_ones_do(tiny_mixtral: Path) -> None:
    subject = load_subject(str(tiny_mixtral), torch.float32, torch.device("cpu"), False, Reporter(quiet=True))
    assert marked(subject.model)
    assert all(marked(subject.model))
    assert subject.model.config._attn_implementation == grouped_attention.NAME
