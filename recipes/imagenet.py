"""Folders of images, one a class (as ImageNet is laid out), to the one file that image classifiers of moeq read.

    python recipes/imagenet.py TRAIN VALIDATION OUT.safetensors [--calibration 32] [--test N] [--size 224]
                               [--resize 256] [--seed 0]

Classes are numbered by the sorted names of their folders, as ImageNet's are; both folders have the same. Calibration
images are drawn from all of TRAIN; test images are all of VALIDATION, or N drawn from it. Each is resized until its
shorter side is --resize (bicubic), cut to the middle --size x --size, and kept as bytes, 150 KB an image of 224 x 224:
ImageNet's 50,000 take 7.5 GB of memory and of disk. Scales and means are the model's own (preprocessor_config.json).
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

Item = tuple[Path, int]  # an image and its class
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


def classes(folder: Path) -> list[str]:
    """Names of a folder's class folders, sorted."""
    return sorted(one.name for one in folder.iterdir() if one.is_dir())


def items(folder: Path, names: list[str]) -> list[Item]:
    """Images below a folder's class folders; ValueError when there are none, or classes that are not these."""
    other = sorted(set(names) ^ set(classes(folder)))
    if other:
        raise ValueError(f"{folder}: {other[0]} is a class of one folder alone; give both the same class folders")
    found = [
        (path, label)
        for label, name in enumerate(names)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise ValueError(f"{folder}: no folders of images; give one a class, with .jpg, .png or .webp files")
    return found


def pixels(path: Path, resize: int, size: int) -> Tensor:
    """The middle of an image, [3, size, size] bytes; ValueError, with its path, for one that cannot be read."""
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    share = resize / min(image.size)
    wide, high = (max(size, round(side * share)) for side in image.size)
    left, top = (wide - size) // 2, (high - size) // 2
    image = image.resize((wide, high), Image.Resampling.BICUBIC).crop((left, top, left + size, top + size))
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)


def write(calibration: list[Item], test: list[Item], out: Path, resize: int, size: int) -> None:
    """Write images [N, 3, size, size], labels [N], and the row numbers train and test."""
    every = [*calibration, *test]
    images = torch.empty((len(every), 3, size, size), dtype=torch.uint8)
    for number, (path, _) in enumerate(every):
        images[number] = pixels(path, resize, size)
    labels = torch.tensor([label for _, label in every])
    rows = torch.arange(len(every))
    split = len(calibration)
    save_file({"images": images, "labels": labels, "train": rows[:split].clone(), "test": rows[split:].clone()}, out)


def positive(text: str) -> int:
    """A whole number of at least 1, of the command line."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("validation", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--calibration", type=positive, default=32)
    parser.add_argument("--test", type=positive)
    parser.add_argument("--size", type=positive, default=224)
    parser.add_argument("--resize", type=positive, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    try:
        if not options.out.absolute().parent.is_dir():
            raise ValueError(f"{options.out}: no folder for it")
        names = classes(options.train)
        train, test = items(options.train, names), items(options.validation, names)
        calibration = draw.sample(train, min(options.calibration, len(train)))
        test = test if options.test is None else draw.sample(test, min(options.test, len(test)))
        write(calibration, test, options.out, options.resize, options.size)
    except (OSError, ValueError, SafetensorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    print(f"{options.out}: {len(calibration)} images to calibrate on, {len(test)} to measure on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
