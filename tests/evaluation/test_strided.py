"""Strided windows: each token counts once, with the context that its window gives it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_bars import Bars

from moeq.errors import EvaluationError, MissingError
from moeq.evaluation.harness_models import StaticLM
from moeq.evaluation.strided import Text, read_text, score_text, windows
from moeq.models import loading
from moeq.models.source import open_source


@pytest.mark.parametrize(("length", "window", "stride"), [(20, 8, 3), (20, 8, 8), (5, 8, 2), (9, 8, 1), (2, 2, 2)])
def test_every_token_but_the_first_is_a_target_once(length: int, window: int, stride: int) -> None:
    tokens = list(range(100, 100 + length))
    found = list(windows(tokens, window, stride))
    assert [target for _, targets in found for target in targets] == tokens[1:]
    for number, (fed, targets) in enumerate(found):
        assert fed == tokens[targets[-1] - 100 - len(fed) : targets[-1] - 100]
        assert len(targets) <= len(fed) <= window
        assert number == 0 or len(targets) <= stride


@pytest.fixture(scope="module")
def lm(tiny_mixtral: Path) -> StaticLM:
    source = open_source(str(tiny_mixtral))
    model: Any = loading.load_model(source, torch.float32, torch.device("cpu"))
    return StaticLM(model, loading.load_tokenizer(source), max_length=32)


@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_the_perplexity_is_that_of_plain_forward_passes(lm: StaticLM, batch_size: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    documents = tuple(tuple(torch.randint(3, 2048, (n,), generator=generator).tolist()) for n in (40, 7, 19))
    text, bars = Text(name="own", documents=documents, domains=("a", "b", "a"), window=16, stride=5), Bars()
    found = score_text(lm, text, batch_size, bar=bars)
    assert bars.found == {"text": (9, 9)}
    total = 0.0
    for tokens in documents:
        done = 1
        for start in range(0, len(tokens) - 1, 5):
            end = min(start + 16, len(tokens) - 1)
            with torch.no_grad():
                logits = lm.model(torch.tensor([tokens[start:end]])).logits[0].log_softmax(-1)
            total += sum(float(logits[place - start - 1, tokens[place]]) for place in range(done, end + 1))
            done = max(done, end + 1)
    assert found["tokens"] == 39 + 6 + 18
    assert found["perplexity"] == pytest.approx(math.exp(-total / 63), rel=1e-5)
    assert found["counted"].endswith("of later windows the last 5")
    assert set(found["by_domain"]) == {"a", "b"}


def test_what_cannot_be_measured_is_one_line(lm: StaticLM, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="window 8, stride 9"):
        read_text("bundled", lm.tokenizer, 8, 9)
    with pytest.raises(EvaluationError, match="a window of 64 tokens is longer than the model's 32 positions"):
        score_text(lm, Text(name="own", documents=((1, 2),), domains=("a",), window=64, stride=64), 1)
    with pytest.raises(MissingError, match="no such file"):
        read_text(str(tmp_path / "none.txt"), lm.tokenizer, 8, None)
