"""Images with labels, for image classifiers: scikit-learn's digits, safetensors files, or files of images.

A safetensors file holds `images`, [N, H, W] or [N, C, H, W], integers or floats, and `labels` [N], and may hold the
row numbers `train` and `test`; calibration reads the one, evaluation the other.

Digits are enlarged where a model takes images of a multiple of their 8 x 8 pixels.

Letters: N images, C channels, H rows, W columns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import digest_of
from moeq.artifacts.reading import read_json_file
from moeq.bundled import bundled_path
from moeq.errors import CorpusError, missing
from moeq.folders import expanded
from moeq.models.corpus.image_files import ImageFiles
from moeq.models.corpus.rows import stem_of
from moeq.models.corpus.sequences import tensor_digest
from moeq.models.corpus.sources import BUNDLED, DIGITS
from moeq.models.forward import image_positions, image_shape

SPLIT = "digits_split.json"
SUFFIX = ".safetensors"
PREPROCESSOR_BYTES = 1 << 20
PREPROCESSOR = "preprocessor_config.json"
DEVIATION = "image_std"
TINIEST, LARGEST = 1e-20, 1e20  # of factors of pixels: beyond, float32 has no room for them
Part = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class ImageTask:
    """What a classifier takes: images' shape (C, H, W), the positions that it sees of one, the number of labels.

    scale, mean and deviation [C, 1, 1]: pixels as files have them are multiplied, then moved and divided; scale is None
    where the model says nothing of it.
    """

    shape: tuple[int, int, int]
    positions: int
    labels: int
    scale: float | None
    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, model: Any, folder: Path) -> ImageTask:
        """What a model, which may lie on the meta device, and the preprocessor file in its folder say.

        Raises CorpusError for a preprocessor file that is damaged.
        """
        shape = image_shape(model.config)
        settings, where = {}, folder / PREPROCESSOR
        if where.is_file():
            try:
                settings = read_json_file(where, most=PREPROCESSOR_BYTES)
                if not isinstance(settings, dict):
                    raise ValueError("no object")
            except (OSError, ValueError) as error:
                raise CorpusError(f"not JSON ({error})", where=str(where), do="copy the file again") from None
        scale = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", bool(settings)) else None
        if scale is not None and not _is_factor(scale):
            raise CorpusError("rescale_factor is no number", where=str(where), do="copy the file again")
        given = settings if settings.get("do_normalize", False) else {}
        return cls(
            shape=shape,
            positions=image_positions(model),
            labels=model.config.num_labels,
            scale=getattr(model.config, "pixel_scale", None if scale is None else float(scale)),
            mean=_channels(given, "image_mean", 0.0, shape[0], where),
            deviation=_channels(given, DEVIATION, 1.0, shape[0], where),
        )

    def pixels(self, images: Tensor) -> Tensor:
        """What the model is given for images [n, C, H, W], float32."""
        scaled = images.float() if self.scale is None else images.float() * self.scale
        return (scaled - self.mean) / self.deviation


def _is_factor(value: Any) -> bool:
    """Whether pixels may be multiplied by a value: a number other than 0 that float32 holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return TINIEST <= abs(value) <= LARGEST


def _channels(settings: dict[str, Any], key: str, default: float, channels: int, where: Path) -> Tensor:
    """A number for each channel, or one for all, of the preprocessor's file, as [C, 1, 1]; CorpusError for others."""
    try:
        values = torch.tensor(settings.get(key, default), dtype=torch.float32).reshape(-1, 1, 1).expand(channels, 1, 1)
        if not bool(torch.isfinite(values).all()) or (key == DEVIATION and bool((values.abs() < TINIEST).any())):
            raise ValueError("not finite, or nothing to divide by")
        return values
    except (TypeError, ValueError, RuntimeError, OverflowError):  # torch's, by what the value is
        what = f"{key} is not a number for each of {channels} channels"
        raise CorpusError(what, where=str(where), do="copy the file again") from None


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """Images [N, C, H, W] as the file has them, labels [N] int64, and the row numbers of its parts, where it has any.

    name: how the recipe writes it; public_name: what artifacts call it; digest: of all that decides it; prepared:
    images are as the model takes them.
    """

    name: str
    public_name: str
    domain: str
    digest: str
    images: Tensor
    labels: Tensor
    rows: dict[str, Tensor]
    prepared: bool = False

    def part(self, part: Part) -> Tensor:
        """Row numbers [n] int64 to calibrate on or to be measured on; all where the file has no parts."""
        return self.rows.get(part, torch.arange(len(self.images)) if not self.rows else torch.arange(0))


def open_image_sets(source: str | Sequence[str], task: ImageTask, files: ImageFiles | None = None) -> list[ImageSet]:
    """Read and check what a source names: `digits` (also `bundled`), files, or a list of them.

    files: how rows and folders of images are read (None: they are not).

    Raises CorpusError, naming file and image, for what is no set of labelled images, for images of another shape than
    the model's, pixels that are not finite, labels that it has not, and rows that are not there or in both parts.
    """
    names = [source] if isinstance(source, str) else list(source)
    sets = [_digits(name, task.shape) if name in (DIGITS, BUNDLED) else _file(name, files) for name in names]
    return [_checked(images, task) for images in sets]


def enlarged(images: Tensor, factor: int) -> Tensor:
    """Images uint8 [N, H, W] `factor` times as high and wide, bilinear between the pixels' centres, halves up.

    In whole numbers, so that every machine makes the same; ends are held, as image libraries do.
    """
    size, unit = images.shape[-1], 2 * factor
    weights = torch.zeros(factor * size, size, dtype=torch.long)
    for row in range(factor * size):
        below, part = divmod(2 * row + 1 - factor, unit)  # where its centre lies, in units of 1/(2*factor) pixels
        weights[row, max(below, 0)] += unit - part
        weights[row, min(below + 1, size - 1)] += part
    sums = weights @ images.long() @ weights.T
    return torch.div(2 * sums + unit**2, 2 * unit**2, rounding_mode="floor").to(torch.uint8)


def _digits(name: str, shape: tuple[int, int, int]) -> ImageSet:
    """scikit-learn's digits, grey levels 0 to 16, under the bundled split; enlarged to a model's square images."""
    from sklearn.datasets import load_digits

    digits, split = load_digits(), bundled_path(SPLIT)
    rows = {part: torch.tensor(numbers) for part, numbers in json.loads(split.read_text("utf-8")).items()}
    images = torch.tensor(digits.images, dtype=torch.uint8)
    factor, rest = divmod(shape[1], images.shape[-1])
    if factor > 1 and rest == 0 and shape[1] == shape[2]:
        images = enlarged(images, factor)
    return ImageSet(
        name=name,
        public_name=DIGITS,
        domain=DIGITS,
        digest=digest_of([DIGITS, images.flatten().tolist(), digest_of_file(split)]),
        images=images,
        labels=torch.tensor(digits.target, dtype=torch.long),
        rows=rows,
    )


def _file(name: str, files: ImageFiles | None) -> ImageSet:
    """A folder, rows or a safetensors file of images."""
    path = expanded(name)
    if path.exists() and files is not None and files.holds(path):
        images, labels = files.read(path)
        return ImageSet(
            name=name,
            public_name=path.name,
            domain=stem_of(path.name),
            digest=digest_of([tensor_digest(images), labels.tolist()]),
            images=images,
            labels=labels,
            rows={},
            prepared=True,
        )
    if path.suffix != SUFFIX:
        what = "the model takes images, this is no set of them"
        raise CorpusError(what, where=name, do=f"write digits, or give a {SUFFIX} file with images and labels")
    if not path.is_file():
        raise missing(name, f"give the path of a {SUFFIX} file, or write digits")
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise missing(name, "write it again") from None
    except Exception as error:  # safetensors raises its own type for damaged files
        raise CorpusError(f"not a safetensors file ({error})", where=name, do="write it again") from None
    for key in ("images", "labels"):
        if key not in tensors:
            there = ", ".join(sorted(tensors)) or "nothing"
            raise CorpusError(f"{key} are missing: it holds {there}", where=name, do=f"store them as {key!r}")
    rows = {part: tensors[part].long() for part in ("train", "test") if part in tensors}
    return ImageSet(
        name=name,
        public_name=path.name,
        domain=path.stem,
        digest=digest_of_file(path),
        images=tensors["images"],
        labels=tensors["labels"],
        rows=rows,
    )


def _checked(given: ImageSet, task: ImageTask) -> ImageSet:
    """The set with images as [N, C, H, W] and labels as int64."""
    images, labels = given.images, given.labels
    if images.dim() == 3:
        images = images.unsqueeze(1)
    if images.dim() != 4 or tuple(images.shape[1:]) != task.shape:
        has, wants = (" x ".join(map(str, shape)) for shape in (given.images.shape[1:], task.shape))
        raise _error(given, f"images are {has or 'no pictures'}, the model takes {wants}", "resize them")
    if labels.shape != (len(images),) or labels.is_floating_point():
        raise _error(
            given,
            f"labels are {list(labels.shape)}, one whole number an image is wanted",
            "store one whole number for every image as 'labels'",
        )
    if images.is_floating_point() and not bool(torch.isfinite(images).all()):
        first = int((~torch.isfinite(images)).flatten(1).any(1).nonzero()[0])
        raise _error(given, f"pixels of image {first} are not finite", "drop the image")
    if task.scale is None and not images.is_floating_point():
        raise _error(given, f"pixels are whole numbers, and the model has no {PREPROCESSOR} to scale them", "copy it")
    wrong = ((labels < 0) | (labels >= task.labels)).nonzero()
    if len(wrong):
        first = int(wrong[0])
        what = f"image {first} has label {int(labels[first])}, the model's are 0 to {task.labels - 1}"
        raise _error(given, what, "store one whole number for every image as 'labels'")
    _check_rows(given)
    return ImageSet(**vars(given) | {"images": images, "labels": labels.long()})


def _check_rows(given: ImageSet) -> None:
    count = len(given.images)
    for part, rows in given.rows.items():
        if rows.dim() != 1 or bool(((rows < 0) | (rows >= count)).any()):
            raise _error(
                given,
                f"{part} has row numbers that are not of its {count} images",
                f"store row numbers of its images in {part}, each once",
            )
        if len(rows.unique()) != len(rows):
            raise _error(given, f"{part} names a row twice", f"store row numbers of its images in {part}, each once")
    if len(given.rows) == 2:
        both = torch.isin(given.rows["test"], given.rows["train"])
        if bool(both.any()):
            raise _error(given, f"{int(both.sum())} rows are in both train and test", "take them out of one")


def _error(given: ImageSet, what: str, do: str) -> CorpusError:
    return CorpusError(what, where=given.name, do=do)
