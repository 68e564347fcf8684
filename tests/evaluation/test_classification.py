"""Accuracy with its error, cross-entropy and logit error against what is computed by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeq.errors import EvaluationError
from moeq.evaluation.classification import classify, logit_error
from moeq.models.corpus import ImageSequences

LOGITS = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0], [0.0, 4.0], [1.0, 0.0]])
LABELS = torch.tensor([0, 1, 1, 1, 1])


class Shown(nn.Module):
    """An image classifier whose images are its logits."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=pixel_values.flatten(1) * self.scale)


def shown(logits: Tensor = LOGITS) -> ImageSequences:
    count = len(logits)
    return ImageSequences(
        ids=torch.zeros(count, 1, dtype=torch.long),
        mask=torch.ones(count, 1, dtype=torch.bool),
        domains=("a", "a", "b", "b", "b")[:count],
        pixels=logits.view(count, 1, 1, 2),
        labels=LABELS[:count],
    )


def test_figures_are_those_computed_by_hand() -> None:
    steps: list[None] = []
    found = classify(Shown(), shown(), 2, torch.device("cpu"), lambda: steps.append(None))
    assert len(steps) == 3
    assert torch.equal(found.logits, LOGITS)
    assert found.accuracy == pytest.approx(3 / 5)
    assert found.accuracy_stderr == pytest.approx(math.sqrt(0.6 * 0.4 / 4))
    rows = zip(LOGITS.tolist(), LABELS.tolist(), strict=True)
    losses = [math.log(sum(map(math.exp, row))) - row[label] for row, label in rows]
    assert found.cross_entropy == pytest.approx(sum(losses) / 5)
    assert found.by_domain["a"] == {"acc": 1.0, "acc_stderr": 0.0}
    assert found.by_domain["b"]["acc"] == pytest.approx(1 / 3)


def test_one_image_has_no_standard_error() -> None:
    found = classify(Shown(), shown(LOGITS[:1]), 4, torch.device("cpu"), lambda: None)
    assert (found.accuracy, found.accuracy_stderr, found.by_domain) == (1.0, None, {"a": {"acc": 1.0}})


def test_the_logit_error_is_relative_to_the_wanted_ones() -> None:
    assert logit_error(LOGITS, LOGITS) == 0
    assert logit_error(LOGITS * 1.5, LOGITS) == pytest.approx(0.5)


def test_outputs_that_are_not_finite_are_an_error() -> None:
    model = Shown()
    model.scale.data.fill_(torch.nan)
    with pytest.raises(EvaluationError, match="not finite"):
        classify(model, shown(), 2, torch.device("cpu"), lambda: None)
