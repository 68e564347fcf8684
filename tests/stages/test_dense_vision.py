"""Paper 004's recipe on a tiny dense ViT and folders of images: folded and integer; experts are asked for elsewhere."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from moeq import pipeline
from moeq.errors import ModelError
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

RECIPES = Path(__file__).parents[2] / "recipes"
LABELS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import ViTConfig, ViTForImageClassification

    folder = tmp_path_factory.mktemp("models") / "vit"
    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 8, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    config = ViTConfig(**sizes, num_attention_heads=2, num_labels=LABELS)
    ViTForImageClassification(config).save_pretrained(folder)
    rule = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(rule | {"image_std": [0.5] * 3}))
    return folder


def convert(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the script that reads ImageNet's folders."""
    monkeypatch.setattr(sys, "argv", ["imagenet.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPES / "imagenet.py"), run_name="__main__")
    return int(ended.value.code or 0)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Folders of classes: 4 images of each to train on, 2 to validate; widths and heights differ."""
    for part, count in (("train", 4), ("val", 2)):
        for label in range(LABELS):
            folder = tmp_path / part / f"n{label:03}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.random.default_rng(10 * label + number).integers(0, 255, (30, 20 + number, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path


def run(model: Path, images: Path) -> Context:
    options = ["corpus.sequences=8", "reparam.samples=8", "reparam.integer.calibration=8",
               "reparam.integer.schemes=false", f"corpus.source={images / 'all.safetensors'}"]  # fmt: skip
    recipe = load_recipe(RECIPES / "paper-004-table1.yaml", options)
    return Context(recipe=recipe, model_name=str(model), out=images / "run", reporter=Reporter(quiet=True))


def test_folders_of_images_become_a_file(
    images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = images / "all.safetensors"
    sizes = ("--size", 16, "--resize", 18, "--calibration", 5)
    assert convert(monkeypatch, images / "train", images / "val", out, *sizes) == 0
    found = load_file(out)
    assert found["images"].shape == (5 + 2 * LABELS, 3, 16, 16)
    assert found["labels"][found["test"]].tolist() == [0, 0, 1, 1, 2, 2]
    whole = Image.open(images / "val" / "n002" / "1.png").resize((18, 26), Image.Resampling.BICUBIC)
    wanted = np.asarray(whole.crop((1, 5, 17, 21))).transpose(2, 0, 1)
    assert (found["images"][-1].numpy() == wanted).all()
    assert convert(monkeypatch, images / "train", images / "val" / "n002", out) == 4
    (images / "train" / "n000a").mkdir()
    assert convert(monkeypatch, images / "train", images / "val", out) == 4, "classes would have other numbers"
    assert "val: n000a is a class of one folder alone" in capsys.readouterr().err


def test_a_dense_vit_is_folded_and_made_integer(model: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("--size", 16, "--resize", 18, "--calibration", 8)
    convert(monkeypatch, images / "train", images / "val", images / "all.safetensors", *sizes)
    outcome = pipeline.run_alone(run(model, images), "reparam")
    found = outcome.record.summary["integer"]["task-0"]
    assert found["widths"] == "8/8/4"
    assert found["integer"]["logit_error"] < 0.05
    with pytest.raises(ModelError, match="not a Mixture-of-Experts model: no module holds routed experts"):
        pipeline.run(run(model, images))
    assert not (images / "run" / "profile").exists()
