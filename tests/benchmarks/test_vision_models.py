"""Models and tables of benchmarks/vision.py: what starts from what, uneven channels, intervals, rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import build_vit_65
import pytest
import torch
import vision
import vision_models
from transformers import AutoConfig, AutoModelForImageClassification

from moeq.integers.forward.description import describe
from moeq.integers.forward.reference import folded
from moeq.integers.forward.schemes import SCHEMES, float_logits


def fresh(kind: str, tokens: int = 65) -> Any:
    torch.manual_seed(tokens)
    sizes = {"image_size": vision_models.IMAGE[tokens], **vision_models.SIZES, **vision_models.OWN[kind]}
    return AutoModelForImageClassification.from_config(AutoConfig.for_model("moe_vit", **sizes)).eval()


def test_images_have_the_tokens_that_are_named() -> None:
    for tokens in vision_models.TOKENS:
        images, labels, rows = vision_models.digits(tokens)
        side = vision_models.IMAGE[tokens]
        assert (side // vision_models.PATCH) ** 2 + 1 == tokens == fresh("dense", tokens).config.num_positions
        assert images.shape == (1797, 1, side, side)
        assert (float(images.min()), float(images.max())) == (0.0, 1.0)
        assert torch.equal(labels[:, 1], labels[:, 0] % 2)
        assert not set(rows["train"].tolist()) & set(rows["test"].tolist())


def test_a_mixture_starts_near_its_dense_model_and_a_large_one_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_models, "NOISE", 0.0)
    dense, mixture, large = fresh("dense"), fresh("moe"), fresh("dense", 197)
    vision_models.mixed(mixture, dense)
    images = torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(mixture(images, task=0).logits, dense(images).logits, rtol=1e-4, atol=1e-5)
    vision_models.grown(large, dense)
    assert large.pos_embed.shape == (1, 197, 32)
    assert torch.equal(large.pos_embed[:, 0], dense.pos_embed[:, 0])
    assert torch.equal(large.blocks[2].mlp.fc1.weight, dense.blocks[2].mlp.fc1.weight)


def test_a_task_alone_is_that_task() -> None:
    mixture, images = fresh("moe"), torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        for task, labels in enumerate((10, 2)):
            found = build_vit_65.of_task(mixture, task).eval()(images).logits
            assert found.shape == (2, labels)
            assert torch.equal(found, mixture(images, task=task).logits)


@pytest.mark.parametrize("kind", vision_models.KINDS)
def test_uneven_channels_keep_the_outputs_and_the_folded_scales_apart(kind: str) -> None:
    even, images = describe(fresh(kind)), torch.rand(4, 1, 32, 32)
    other = vision.uneven(even, 3)
    torch.testing.assert_close(float_logits(other, images), float_logits(even, images), rtol=1e-9, atol=1e-9)
    assert vision.spread(other, images) > 2 * vision.spread(even, images)
    again = folded(other, images, 8, None)[0]
    torch.testing.assert_close(float_logits(again, images), float_logits(even, images), rtol=1e-9, atol=1e-9)


def test_an_interval_is_student_s_of_logarithms() -> None:
    middle, low, high = vision.interval([1.0, 2.0, 4.0])
    half = 4.302652729911275 * math.log(2) / math.sqrt(3)
    assert (middle, low, high) == pytest.approx((2.0, 2 * math.exp(-half), 2 * math.exp(half)))
    assert vision.interval([3.0])[0] == pytest.approx(3.0)
    assert math.isnan(vision.interval([3.0])[1])


@pytest.mark.full
def test_every_scheme_and_task_is_a_row(tmp_path: Path) -> None:
    fresh("moe").save_pretrained(tmp_path / "moe-65-seed0")
    found = vision.measured(vision_models.made(tmp_path, "moe", 65, 0), 65, 2, 2)
    assert len(found["rows"]) == 1 + len(SCHEMES) + len(vision.UNEVEN)
    assert all(len(tasks) == 2 for tasks in found["rows"].values())
    assert [row["block"] for row in found["dropped"][1]] == [f"blocks.{number}" for number in range(4)]
    mine = SCHEMES[vision.LOG_SQRT2], SCHEMES[vision.LOG2]
    assert [(one[1], one[2], one[3]) for one in mine] == [
        ((8, 8, 4), "log-sqrt2", "calibrated"), ((8, 8, 4), "log2", "calibrated"),
    ]  # fmt: skip
    row = f"{mine[0][0]} 8/8/4"
    each = [error for _, error in found["rows"][row]]
    assert vision.error(found, row) == pytest.approx(math.sqrt(each[0] * each[1]))
