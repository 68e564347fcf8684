"""Paper 004's recipe on tiny dense ViT and DeiT and folders of images: planned, folded and integer; Swin is refused."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from moeq import pipeline
from moeq.errors import ModelError, MoeqError
from moeq.integers.forward import schemes
from moeq.integers.forward.program import pixel_codes
from moeq.planning.plan import error_of, make_plan
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

RECIPES = Path(__file__).parents[2] / "recipes"
LABELS = 3


SIZES = {"image_size": 16, "patch_size": 8, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
RULE = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3}


def saved(folder: Path, name: str, **sizes: Any) -> Path:
    """A random classifier of a class of transformers'."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, num_labels=LABELS)
    getattr(transformers, f"{name}ForImageClassification")(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(RULE | {"image_std": [0.5, 0.25, 0.2]}))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    plain = {name: saved(folder / name, name, **SIZES, num_attention_heads=2) for name in ("ViT", "DeiT")}
    windows = {"patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
    return plain | {name: saved(folder / name, name, image_size=16, **windows) for name in ("Swin", "Swinv2")}


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


def run(model: Path, images: Path, *more: str) -> Context:
    options = ["corpus.sequences=8", "reparam.samples=8", "reparam.integer.calibration=8",
               "reparam.integer.schemes=false", f"corpus.source={images / 'all.safetensors'}", *more]  # fmt: skip
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


@pytest.fixture
def converted(images: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders with all.safetensors beside them."""
    sizes = ("--size", 16, "--resize", 18, "--calibration", 8)
    assert convert(monkeypatch, images / "train", images / "val", images / "all.safetensors", *sizes) == 0
    return images


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["ViT", "DeiT"])
def test_a_dense_one_is_planned_folded_and_made_integer(models: dict[str, Path], converted: Path, name: str) -> None:
    """By the recipe as it is; its files are as large as was planned, and the rest is refused."""
    context = run(models[name], converted)
    plan = make_plan(context, probe=True)
    assert (error_of(plan), [need.stage for need in plan.stages]) == (None, ["reparam"])
    assert plan.notes == ("a model without experts: `moeq reparam` alone, whose time is not foreseen",)
    outcome = pipeline.run_alone(context, "reparam")
    found = outcome.record.summary["integer"]["task-0"]
    assert (found["widths"], found["images"]) == ("8/8/4", 2 * LABELS)
    assert found["description_error"] < 1e-5
    assert found["integer"]["logit_error"] < 0.15  # of weights at random, in six images
    written = sum(stamp.bytes for stamp in outcome.record.files.values())
    assert 0.8 < plan.stages[0].written / written < 1.25
    with pytest.raises(ModelError, match="not a Mixture-of-Experts model: no module holds routed experts"):
        pipeline.run(run(models[name], converted))
    assert not (converted / "run" / "profile").exists()


@pytest.mark.parametrize("name", ["Swin", "Swinv2"])
def test_windows_are_refused_by_name(models: dict[str, Path], converted: Path, name: str) -> None:
    kind = f"{name}ForImageClassification"
    for asked, line in (((), f"{kind} has no integer forward; leave it out"),
                        (("reparam.integer=null",), f"{kind} has no table of positions")):  # fmt: skip
        context = run(models[name], converted, *asked)
        with pytest.raises(MoeqError, match=line):
            pipeline.run_alone(context, "reparam")
        with pytest.raises(MoeqError, match=line):
            make_plan(context, probe=False)
    assert not (converted / "run").exists()


def test_images_of_larger_models_run_fewer_at_once(
    models: dict[str, Path], converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same result; all values of 64 images of ViT-B, three times, would take 100 GB."""
    seen: list[int] = []

    def counted(program: Any, pixels: Tensor) -> Tensor:
        seen.append(len(pixels))
        return pixel_codes(program, pixels)

    monkeypatch.setattr(schemes, "pixel_codes", counted)
    figures = []
    for held in (schemes.HELD_BYTES, 1):
        monkeypatch.setattr(schemes, "HELD_BYTES", held)
        outcome = pipeline.run_alone(run(models["ViT"], converted, f"reparam.samples={6 + len(figures)}"), "reparam")
        figures.append(outcome.record.summary["integer"]["task-0"]["integer"])
    assert seen == [1, 6, *[1] * 7]
    assert figures[0]["accuracy"] == figures[1]["accuracy"]
    assert figures[0]["logit_error"] == pytest.approx(figures[1]["logit_error"], abs=0.01)
