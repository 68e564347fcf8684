"""Images with labels: what is read, in which order, and what is refused in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import build_vit
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from moeq.bundled import bundled_path
from moeq.errors import CorpusError, MissingError
from moeq.models import loading
from moeq.models.corpus import ImageFiles, ImagePool, ImageSequences, ImageTask, join, open_image_sets
from moeq.models.corpus.labelled import enlarged
from moeq.models.source import open_source

TASK = ImageTask(
    shape=(1, 4, 4), positions=5, labels=3, scale=0.5, mean=torch.zeros(1, 1, 1), deviation=torch.ones(1, 1, 1)
)


def images(count: int = 6) -> Tensor:
    return torch.arange(count * 16, dtype=torch.uint8).view(count, 4, 4)


def written(path: Path, **changes: Tensor | None) -> str:
    tensors = {
        "images": images(),
        "labels": torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.uint8),
        "train": torch.tensor([5, 0, 3, 1]),
        "test": torch.tensor([2, 4]),
    }
    save_file({name: one for name, one in (tensors | changes).items() if one is not None}, path)
    return str(path)


def test_a_file_s_parts_are_taken_in_their_order_and_scaled(tmp_path: Path) -> None:
    (found,) = open_image_sets(written(tmp_path / "shapes.safetensors"), TASK)
    pool = ImagePool([found], "train", TASK, "corpus")
    taken = pool.take(2)
    assert isinstance(taken, ImageSequences)
    assert torch.equal(taken.pixels, images()[[5, 3]].unsqueeze(1).float() / 2)
    assert taken.labels.tolist() == [2, 0]
    assert taken.domains == ("shapes", "shapes")
    assert taken.ids.shape == (2, 5)
    assert bool(taken.mask.all())
    rest = pool.take(None)
    assert rest.labels.tolist() == [0, 1]
    both = join([taken, rest])
    assert isinstance(both, ImageSequences)
    assert both.labels.tolist() == [2, 0, 0, 1]
    assert both.digest() != taken.digest()
    batches = both.batches(3)
    assert [len(batch.sequences) for batch in batches] == [3, 1]
    assert torch.equal(torch.cat([batch.extra["pixel_values"] for batch in batches]), both.pixels)


def test_a_file_without_parts_gives_all_of_its_images_to_either(tmp_path: Path) -> None:
    (found,) = open_image_sets(written(tmp_path / "a.safetensors", train=None, test=None), TASK)
    assert found.part("train").tolist() == found.part("test").tolist() == list(range(6))


def test_domains_have_equal_shares(tmp_path: Path) -> None:
    names = [written(tmp_path / "one.safetensors"), written(tmp_path / "two.safetensors", train=torch.tensor([1]))]
    found = ImagePool(open_image_sets(names, TASK), "train", TASK, "corpus").take(3)
    assert found.domains == ("one", "one", "two")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"labels": None}, "labels are missing: it holds images, test, train"),
        ({"images": None}, "images are missing"),
        ({"images": images().view(6, 2, 8)}, "images are 2 x 8, the model takes 1 x 4 x 4"),
        ({"images": images().view(6, 1, 2, 8)}, "images are 1 x 2 x 8, the model takes 1 x 4 x 4"),
        ({"labels": torch.tensor([0, 1, 2])}, r"labels are \[3\], one whole number an image is wanted"),
        ({"labels": torch.ones(6)}, "one whole number an image is wanted"),
        ({"labels": torch.tensor([0, 1, 3, 0, 1, 2])}, "image 2 has label 3, the model's are 0 to 2"),
        (
            {"images": torch.cat([images(4).float(), torch.full((2, 4, 4), torch.nan)])},
            "pixels of image 4 are not finite",
        ),
        ({"train": torch.tensor([0, 6])}, "train has row numbers that are not of its 6 images"),
        ({"train": torch.tensor([0, 0])}, "train names a row twice"),
        ({"train": torch.tensor([0, 2])}, "1 rows are in both train and test"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CorpusError, match=says) as caught:
        open_image_sets(written(tmp_path / "a.safetensors", **changes), TASK)
    assert "\n" not in str(caught.value)


def test_what_is_no_set_of_images_is_refused(tmp_path: Path) -> None:
    for name, text, says in (
        ("a.txt", "words", "the model takes images"),
        ("a.safetensors", "words", "not a safetensors file"),
        ("b.safetensors", None, "no such file"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(MissingError if text is None else CorpusError, match=says):
            open_image_sets(str(tmp_path / name), TASK)


def test_too_few_images_are_an_error(tmp_path: Path) -> None:
    sets = open_image_sets(written(tmp_path / "a.safetensors"), TASK)
    with pytest.raises(CorpusError, match="4 images to calibrate on, 5 are wanted"):
        ImagePool(sets, "train", TASK, "corpus").take(5)
    sets = open_image_sets(written(tmp_path / "a.safetensors", test=None), TASK)
    with pytest.raises(CorpusError, match="0 images to be measured on, at least one is wanted"):
        ImagePool(sets, "test", TASK, "corpus").take(None)


def test_the_digits_are_scikit_learn_s_under_the_bundled_split() -> None:
    source = open_source("bundled:tiny-moe-vit")
    task = ImageTask.of(loading.skeleton(source), source.path)
    assert (task.shape, task.positions, task.labels, task.scale) == ((1, 8, 8), 17, 10, 0.0625)
    (found,) = open_image_sets("digits", task)
    (same,) = open_image_sets("bundled", task)
    assert found.digest == same.digest
    assert (found.domain, len(found.images)) == ("digits", 1797)
    split = json.loads(bundled_path("digits_split.json").read_text())
    assert split == build_vit.split(1797)
    assert sorted(split["train"] + split["test"]) == list(range(1797))
    assert (found.part("train").tolist(), found.part("test").tolist()) == (split["train"], split["test"])
    taken = ImagePool([found], "test", task, "digits").take(None)
    assert isinstance(taken, ImageSequences)
    assert (float(taken.pixels.min()), float(taken.pixels.max())) == (0.0, 1.0)


@pytest.fixture
def pictures(tmp_path: Path) -> tuple[ImageTask, ImageFiles, Tensor]:
    """A model's folder with an image processor, pictures of 6 x 6 pixels, and what they become at 4 x 4."""
    settings = {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 4, "width": 4},
        "resample": 0, "do_rescale": True, "rescale_factor": 0.5, "do_normalize": True, "image_mean": [1.0] * 3,
        "image_std": [2.0] * 3,
    }  # fmt: skip
    model = ViTForImageClassification(
        ViTConfig(image_size=4, patch_size=2, num_channels=3, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                  intermediate_size=8, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
    )  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(settings))
    task = ImageTask.of(model, tmp_path / "model")
    files = ImageFiles(model=tmp_path / "model", trust_remote_code=False, channels=3, image_field="image",
                       label_field="label", names=model.config.label2id)  # fmt: skip
    greys = [10, 200, 90]
    for number, (name, grey) in enumerate(zip(("cat", "dog", "dog"), greys, strict=True)):
        (tmp_path / "set" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 6), (grey, grey, grey)).save(tmp_path / "set" / name / f"{number}.png")
    return task, files, (torch.tensor(greys).float() * 0.5 - 1) / 2


def test_a_folder_of_a_folder_a_label_goes_through_the_processor(tmp_path: Path, pictures: Any) -> None:
    task, files, wanted = pictures
    (found,) = open_image_sets(str(tmp_path / "set"), task, files)
    taken = ImagePool([found], "train", task, "corpus").take(None)
    assert isinstance(taken, ImageSequences)
    assert taken.labels.tolist() == [0, 1, 1]
    assert taken.pixels.shape == (3, 3, 4, 4)
    torch.testing.assert_close(taken.pixels, wanted.view(3, 1, 1, 1).expand(3, 3, 4, 4))
    assert (found.domain, found.public_name) == ("set", "set")


def test_rows_name_images_and_labels(tmp_path: Path, pictures: Any) -> None:
    task, files, wanted = pictures
    rows = [{"image": "set/dog/1.png", "label": "dog"}, {"image": "set/cat/0.png", "label": 0}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = open_image_sets(str(path), task, files)
    assert found.labels.tolist() == [1, 0]
    torch.testing.assert_close(found.images[:, 0, 0, 0], wanted[[1, 0]])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"image": "set/dog/1.png"}, "row 1: no field 'label'"),
        ({"label": 1}, "row 1: no field 'image'"),
        ({"image": "set/dog/9.png", "label": 1}, "no such image"),
        ({"image": "rows.jsonl", "label": 1}, "cannot be read"),
        ({"image": "set/dog/1.png", "label": "cow"}, "label 'cow' is none of the model's"),
        ({"image": "set/dog/1.png", "label": "²"}, "label '²' is none of the model's"),
        ({"image": "set/dog/1.png", "label": 2}, "image 0 has label 2, the model's are 0 to 1"),
    ],
)
def test_rows_that_are_no_labelled_images_are_named(tmp_path: Path, pictures: Any, row: Any, says: str) -> None:
    task, files, _ = pictures
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(CorpusError, match=says) as caught:
        open_image_sets(str(path), task, files)
    assert "\n" not in str(caught.value)


def test_image_files_need_the_model_s_processor(tmp_path: Path, pictures: Any) -> None:
    task, files, _ = pictures
    (tmp_path / "model" / "preprocessor_config.json").unlink()
    with pytest.raises(CorpusError, match="has no preprocessor_config"):
        open_image_sets(str(tmp_path / "set"), task, files)


def test_a_preprocessor_file_says_how_pixels_are_scaled(tmp_path: Path) -> None:
    config = ViTConfig(image_size=4, patch_size=2, num_channels=1, hidden_size=8, num_hidden_layers=1,
                       num_attention_heads=2, intermediate_size=8, num_labels=3)  # fmt: skip
    model = ViTForImageClassification(config)
    with pytest.raises(CorpusError, match="to scale them"):
        open_image_sets(written(tmp_path / "a.safetensors"), ImageTask.of(model, tmp_path))
    settings = {"do_rescale": True, "rescale_factor": 0.1, "do_normalize": True, "image_mean": [2], "image_std": [4]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    task = ImageTask.of(model, tmp_path)
    assert task.positions == 5
    (found,) = open_image_sets(written(tmp_path / "a.safetensors"), task)
    torch.testing.assert_close(task.pixels(found.images), (images().unsqueeze(1) * 0.1 - 2) / 4)


@pytest.mark.cases(1)
@pytest.mark.parametrize("factor", [2, 4, 7])
def test_digits_are_enlarged_to_the_model_s_images(factor: int) -> None:
    side = 8 * factor
    task = ImageTask(shape=(1, side, side), positions=1, labels=10, scale=1 / 16, mean=torch.zeros(1, 1, 1),
                     deviation=torch.ones(1, 1, 1))  # fmt: skip
    (found,) = open_image_sets("digits", task)
    (small,) = open_image_sets("digits", dataclasses.replace(task, shape=(1, 8, 8)))
    assert (found.images.shape[1:], found.images.dtype) == ((1, side, side), torch.uint8)
    real = torch.nn.functional.interpolate(small.images[:40].double(), size=(side, side), mode="bilinear")
    assert float((found.images[:40] - real).abs().max()) <= 0.5 + 1e-9
    assert torch.equal(enlarged(small.images[:, 0], 1), small.images[:, 0])
    assert found.digest != small.digest
    with pytest.raises(CorpusError, match="images are 8 x 8, the model takes 1 x 12 x 12"):
        open_image_sets("digits", dataclasses.replace(task, shape=(1, 12, 12)))
