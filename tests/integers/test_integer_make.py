"""The whole of it: calibrate, prove, write, replay, and the schemes of Table 1 on the bundled digits model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from integer_models import made, pixels
from integer_reader import replay as independent_replay
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import AutoModelForImageClassification

from moeq.bundled import bundled_path
from moeq.errors import QuantizationError
from moeq.integers.forward.description import describe
from moeq.integers.forward.from_model import lines, make
from moeq.integers.forward.reference import folded
from moeq.integers.forward.schemes import SCHEMES, float_logits, program_of, quality, schemes, simulated_logits, table
from moeq.models.corpus import ImageTask, open_image_sets
from moeq.recipe import IntegerSection


def digits(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """32 training images, the test images and their labels."""
    found = load_digits()
    split = json.loads((bundled_path("tiny-moe-vit").parent / "digits_split.json").read_text())
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] * model.config.pixel_scale
    return images[split["train"][:32]], images[split["test"]], torch.tensor(found.target)[split["test"]]


@pytest.fixture(scope="module")
def bundled() -> Any:
    return AutoModelForImageClassification.from_pretrained(bundled_path("tiny-moe-vit")).float().eval()


@pytest.mark.full
def test_log_sqrt2_at_4_bits_keeps_the_digits_and_beats_log2_and_uniform(bundled: Any) -> None:
    calibration, images, labels = digits(bundled)
    vit = describe(bundled)
    reference = float_logits(vit, images)
    found = {
        softmax: quality(
            simulated_logits(program_of(vit, calibration, IntegerSection(softmax=softmax)), images), reference, labels
        )
        for softmax in ("log-sqrt2", "log2", "uniform")
    }
    mine = found["log-sqrt2"]
    assert quality(reference, reference, labels).accuracy - mine.accuracy <= 0.005
    assert mine.logit_error < 0.08
    assert mine.logit_error < found["log2"].logit_error
    assert mine.logit_error < found["uniform"].logit_error


@pytest.mark.full
def test_at_65_tokens_the_code_that_calibration_chooses_turns_the_order_of_the_printed_forms() -> None:
    model = AutoModelForImageClassification.from_pretrained(bundled_path("tiny-moe-vit-65")).float().eval()
    task = ImageTask.of(model, bundled_path("tiny-moe-vit-65"))
    (found,) = open_image_sets("digits", task)
    calibration, images = (task.pixels(found.images[found.part(part)[:16]]) for part in ("train", "test"))
    labels, vit = found.labels[found.part("test")[:16]], describe(model)
    reference = float_logits(vit, images)
    errors = {}
    for softmax in ("log-sqrt2", "log2"):
        for dropping in ("printed", "calibrated"):
            section = IntegerSection(softmax=softmax, dropping=dropping)
            logits = simulated_logits(program_of(vit, calibration, section), images)
            errors[softmax, dropping] = quality(logits, reference, labels).logit_error
    assert errors["log-sqrt2", "printed"] > errors["log2", "printed"]
    assert errors["log-sqrt2", "calibrated"] < errors["log2", "calibrated"]
    assert errors["log-sqrt2", "calibrated"] < errors["log-sqrt2", "printed"] / 2


def test_the_integer_forward_of_the_bundled_model(bundled: Any, tmp_path: Path) -> None:
    calibration, images, labels = digits(bundled)
    section = IntegerSection(vectors=2, schemes=False)
    found = make(bundled, calibration, images[:48], labels[:48], section, tmp_path / "integer")
    text = lines(found)
    assert max(map(len, text)) <= 70
    assert f"logit error {found.integer.logit_error:.4f}" in " ".join(text)
    assert found.equal_to_simulation
    assert found.integer.accuracy >= 0.95
    assert 0 < found.integer.logit_error < 0.1
    assert found.differing_code_share_first < 0.005
    assert 0 <= found.saturated_code_share < 0.01
    assert found.saturated_residuals == 0
    assert (found.widths, found.calibration_images, found.vectors, found.schemes) == ("8/8/4", 32, 2, None)
    differing, values = independent_replay(tmp_path / "integer")
    assert differing == []
    manifest = json.loads((tmp_path / "integer" / "manifest.json").read_text())
    scale = next(value["scale"] for value in manifest["values"] if value["name"] == "logits")
    with torch.no_grad():
        logits = bundled(images[:2]).logits
    assert (torch.from_numpy(values["logits"]) * scale).argmax(-1).tolist() == logits.argmax(-1).tolist()


def test_every_scheme_is_a_row_of_a_narrow_table() -> None:
    model = made("moe")
    images = pixels(model, 24)
    labels = torch.zeros(24, dtype=torch.int64)
    rows = schemes(describe(model), images, images, labels, IntegerSection())
    assert [row.widths for row in rows] == ["64/64/64", "8/8/8", "8/8/8", "8/8/4", "8/8/4", "8/8/4", "8/8/4",
                                            "8/8/4", "8/8/8", "6/6/4", "4/8/4"]  # fmt: skip
    assert rows[0].logit_error == 0
    errors = [row.logit_error for row in rows[1:]]
    assert all(0 < error < 1 for error in errors)
    assert len(set(errors)) >= len(SCHEMES) - 2
    text = table(rows)
    assert max(map(len, text.splitlines())) <= 70
    assert f"{errors[-1]:.4f}" in text.splitlines()[-1]


def test_the_fold_is_worth_it_where_channels_differ() -> None:
    """A few channels of the norms' outputs 60 times the others', as ViTs have them; the function stays the same."""
    model: Any = made("deit")
    images = pixels(model, 32)
    for layer in model.deit.layers:
        pairs = [(layer.layernorm_before, (layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj)),
                 (layer.layernorm_after, (layer.mlp.fc1,))]  # fmt: skip
        with torch.no_grad():
            for norm, consumers in pairs:
                norm.weight[::8] *= 60
                norm.bias[::8] *= 60
                for consumer in consumers:
                    consumer.weight[:, ::8] /= 60
    vit = describe(model)
    reference = float_logits(vit, images)
    section = IntegerSection(softmax="uniform", attention=8)
    errors = [
        float(
            (simulated_logits(program_of(vit, images, section, scales), images) - reference).norm() / reference.norm()
        )
        for scales in ({}, None)
    ]
    assert errors[1] < errors[0] / 4


def fold_into(model: Any, images: Tensor) -> dict[str, float]:
    """Fold a DeiT in place, as the stage does; returns s~ by module path."""
    fold, scales = folded(describe(model), images, 8, None)
    named = {}
    with torch.no_grad():
        for number, (layer, block) in enumerate(zip(model.deit.layers, fold.blocks, strict=True)):
            pairs = [(layer.layernorm_before, block.norm1), (layer.layernorm_after, block.norm2),
                     (layer.attention.q_proj, block.query), (layer.attention.k_proj, block.key),
                     (layer.attention.v_proj, block.value), (layer.mlp.fc1, block.update.up)]  # fmt: skip
            for module, part in pairs:
                module.weight.copy_(part.weight)
                module.bias.copy_(part.bias)
            for side, norm in (("norm1", block.norm1), ("norm2", block.norm2)):
                named[norm.path] = scales[f"blocks.{number}.{side}"]
    return named


def test_a_folded_model_with_its_scales_is_the_same_integer_forward(tmp_path: Path) -> None:
    model = made("deit")
    images, labels = pixels(model, 24), torch.zeros(24, dtype=torch.int64)
    after = copy.deepcopy(model)
    scales = fold_into(after, images)
    assert sorted(scales)[0] == "deit.layers.0.layernorm_after"
    section = IntegerSection(schemes=False)
    one = make(model, images, images, labels, section, tmp_path / "one")
    two = make(after, images, images, labels, section, tmp_path / "two", norm_scales=scales, original=model)
    assert two.integer.logit_error == pytest.approx(one.integer.logit_error, rel=0.3)
    values = [json.loads((tmp_path / name / "manifest.json").read_text())["values"] for name in ("one", "two")]
    norms = [{value["name"]: value["scale"] for value in found if "norm" in value["name"]} for found in values]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    with pytest.raises(QuantizationError, match=r"deit\.nowhere is no norm of this model"):
        make(after, images, images, labels, section, tmp_path / "x", norm_scales={"deit.nowhere": 1.0})


def test_images_and_labels_that_do_not_go_together(tmp_path: Path) -> None:
    model = made("moe")
    images, labels = pixels(model, 4), torch.zeros(4, dtype=torch.int64)
    section = IntegerSection(schemes=False)
    with pytest.raises(QuantizationError, match="integer: 3 labels of 4 images"):
        make(model, images, images, labels[:3], section, tmp_path / "x")
    with pytest.raises(QuantizationError, match=r"calibration images are \[0, 1, 6, 6\]"):
        make(model, images[:0], images, labels, section, tmp_path / "x")
    with pytest.raises(QuantizationError, match="integer: labels are 2 to 2, the head of task 0 knows 0 to 1"):
        make(model, images, images, labels + 2, section, tmp_path / "x")
    with pytest.raises(QuantizationError, match="a pixel of the evaluation images is not finite"):
        make(model, images, images * float("inf"), labels, section, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_clipped_residual_stream_is_counted_and_said(tmp_path: Path) -> None:
    model = made("moe")
    with torch.no_grad():
        model.patch_embed.weight *= 20
    images, labels = pixels(model, 8), torch.zeros(8, dtype=torch.int64)
    dark = (images * 16 > 8) / 16
    section = IntegerSection(schemes=False)
    calm = make(model, images, images, labels, section, tmp_path / "calm")
    clipped = make(model, dark, images, labels, section, tmp_path / "clipped")
    assert (calm.saturated_residuals, len(lines(calm))) == (0, 8)
    assert clipped.saturated_residuals > 0
    assert lines(clipped)[-1].endswith("numbers of residual stream or logits were clipped to their range")
