"""Finished sequences of a batch reach no expert where `moeq eval` generates: translations and lm-eval's answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family_models import build
from torch import Tensor

from moeq.evaluation.harness_models import StaticLM
from moeq.evaluation.translation import translate
from moeq.models.experts import find_expert_layers
from moeq.models.loading import load_tokenizer
from moeq.models.source import open_source
from moeq.recipe import TranslationSection
from moeq.runtime.batch_pruning import pruning_if_alone

EOS, CERTAIN, PROMPT = 1, 1e4, 5
ENDS = (2, 6, 3)  # new tokens of every sequence
LIVE = [sum(end > step for end in ENDS) for step in range(1, max(ENDS))]  # rows of every step after the first


def ending(model: Any, prompt: int, beams: int = 1) -> None:
    """Have sequence i of whatever the model generates end with its ENDS[i]-th new token."""

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        ends = torch.tensor(ENDS).repeat_interleave(beams)
        scores[:, EOS] = torch.where(ids.shape[1] - prompt + 1 == ends, CERTAIN, -CERTAIN)
        return scores

    model.generate = partial(model.generate, logits_processor=[process], eos_token_id=EOS)


def rows_seen(model: Any) -> list[int]:
    """Rows that the experts of the last MoE layer are called with, filled while the model runs."""
    experts = model.get_submodule(find_expert_layers(model)[-1].name)
    seen: list[int] = []
    forward: Callable[..., Tensor] = experts.forward

    def counting(hidden: Tensor, *given: Tensor) -> Tensor:
        seen.append(len(hidden))
        return forward(hidden, *given)

    experts.forward = counting
    return seen


class Words:
    """A tokenizer of prompts of as many tokens."""

    pad_token_id = 0

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Tensor]:
        ids = torch.arange(3, 3 + PROMPT * len(texts)).view(len(texts), PROMPT)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def batch_decode(self, rows: Tensor, **_: Any) -> list[str]:
        return [" ".join(str(token) for token in row if token > EOS) for row in rows.tolist()]


@pytest.mark.parametrize("beams", [1, 2])
def test_translations_are_pruned_and_unchanged(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    section: Any = SimpleNamespace(prefix="", beams=(beams,), batch_size=len(ENDS), max_new_tokens=8)
    assert set(vars(section)) <= set(TranslationSection.model_fields)
    model = build("switch_transformers")
    ending(model, 1, beams)
    seen = rows_seen(model)
    texts = ["a", "b", "c", "d", "e", "f"]

    def translated() -> list[str]:
        seen.clear()
        return translate(model, Words(), texts, section, torch.device("cpu"), lambda: None)[beams]

    pruned, rows = translated(), sum(seen)
    monkeypatch.setattr("moeq.runtime.batch_pruning._holds_experts", lambda module: False)
    assert translated() == pruned
    finished = sum(max(ENDS) - end for end in ENDS) * beams
    assert sum(seen) - rows == 2 * finished, "two batches, each without its finished rows"


@pytest.mark.parametrize("beams", [1, 2])
def test_translations_come_back_as_tokens(beams: int) -> None:
    """Whatever the model's generation_config.json says."""
    section: Any = SimpleNamespace(prefix="", beams=(beams,), batch_size=2, max_new_tokens=8)
    model = build("switch_transformers")

    def translated() -> list[str]:
        return translate(model, Words(), ["a", "b", "c"], section, torch.device("cpu"), lambda: None)[beams]

    usual = translated()
    settings: dict[str, Any] = {"return_dict_in_generate": True, "max_new_tokens": 2}
    model.generation_config.update(**settings)
    model.generation_config.num_return_sequences = 2  # which `update` refuses, and a file may have
    assert translated() == usual
    said = model.generation_config
    assert {**settings, "num_return_sequences": 2}.items() <= vars(said).items()


@pytest.mark.parametrize(
    "settings",
    [
        {"return_dict_in_generate": True},
        {"stop_strings": ["zzz"]},
        {"max_new_tokens": 2},
        {"num_return_sequences": 2},
        {"max_time": 1e-9},
        {"prompt_lookup_num_tokens": 2},
        {"use_cache": False},
    ],
)
def test_answers_of_lm_eval_come_back_as_tokens(settings: dict[str, Any]) -> None:
    from moeq.bundled import bundled_path

    model = build("mixtral")
    tokenizer = load_tokenizer(open_source(str(bundled_path("tiny-mixtral"))))
    lm = StaticLM(model, tokenizer, batch_size=2, max_length=32)
    context = torch.arange(3, 3 + PROMPT * 2).view(2, PROMPT)

    def answered() -> list[list[int]]:
        made = lm._model_generate(context, PROMPT + 8, ["zzz"], attention_mask=torch.ones_like(context))
        return [[int(token) for token in row] for row in made]

    usual = answered()
    vars(model.generation_config).update(settings)
    assert answered() == usual
    assert settings.items() <= vars(model.generation_config).items()


def test_answers_of_lm_eval_are_pruned() -> None:
    from moeq.bundled import bundled_path

    model = build("mixtral")
    ending(model, PROMPT)
    seen = rows_seen(model)
    tokenizer = load_tokenizer(open_source(str(bundled_path("tiny-mixtral"))))
    lm = StaticLM(model, tokenizer, batch_size=len(ENDS), max_length=32)
    context = torch.arange(3, 3 + PROMPT * len(ENDS)).view(len(ENDS), PROMPT)
    made = lm._model_generate(context, PROMPT + 8, ["zzz"], attention_mask=torch.ones_like(context))
    assert seen == [PROMPT * len(ENDS), *LIVE]
    assert [(row == EOS).nonzero()[0].item() + 1 - PROMPT for row in made] == list(ENDS)


def test_a_capacity_that_rows_share_is_left_alone() -> None:
    model = build("nllb-moe", moe_eval_capacity_token_fraction=0.5)
    with pruning_if_alone(model) as rows:
        assert rows is None
    with pruning_if_alone(build("nllb-moe")) as rows:
        assert rows is not None
