"""Labelled images as files, through the model's own image processor.

Rows (.jsonl, .parquet) hold an image, by its path beside the file or as {bytes, path}, and a label; a folder holds a
folder of image files for each label. Labels are numbers or names that the model's configuration has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq.errors import CorpusError, first_line
from moeq.models.corpus.images import has_processor, image_of, load_processor, opened
from moeq.models.corpus.rows import kind_of, rows

ROW_KINDS = (".jsonl", ".parquet")
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """How files become images and labels: the model's folder, the fields of a row, the names of labels."""

    model: Path
    trust_remote_code: bool
    channels: int
    image_field: str
    label_field: str
    names: Mapping[str, int]

    def holds(self, path: Path) -> bool:
        """Whether a path is of this sort."""
        return path.is_dir() or kind_of(path.name) in ROW_KINDS

    def read(self, path: Path) -> tuple[Tensor, Tensor]:
        """Images [N, C, H, W] float32 as the model takes them, and labels [N].

        Raises CorpusError, naming the file and the row, for what is missing or cannot be read, and where the model has
        no image processor.
        """
        if not has_processor(self.model):
            what = "image files need the model's image processor, and it has no preprocessor_config.json"
            raise CorpusError(what, where=str(path), do="give a .safetensors file with images and labels, or digits")
        processor = load_processor(self.model, self.trust_remote_code, images_alone=True)
        images, labels = [], []
        for where, image, label in self._labelled(path):
            try:
                values = processor(images=[opened(image, where, self.channels)], return_tensors="pt")["pixel_values"]
            except (ValueError, TypeError, RuntimeError) as error:
                what = f"the processor does not take it ({first_line(error)})"
                raise CorpusError(what, where=where, do="drop it") from None
            images.append(values[0].float())
            labels.append(self._label(label, where))
        if not images:
            raise CorpusError("no images in it", where=str(path), do=f"give rows, or LABEL/IMAGE{PICTURES[0]} files")
        return torch.stack(images), torch.tensor(labels)

    def _labelled(self, path: Path) -> Iterator[tuple[str, Path | bytes, Any]]:
        """Where it stands, the image, and its label as written."""
        if path.is_dir():
            for folder in sorted(entry for entry in path.iterdir() if entry.is_dir()):
                pictures = (file for file in sorted(folder.iterdir()) if file.suffix.lower() in PICTURES)
                yield from ((str(file), file, folder.name) for file in pictures)
            return
        for number, row in rows(path):
            where = f"{path}, row {number}"
            for field in (self.image_field, self.label_field):
                if not isinstance(row, dict) or row.get(field) is None:
                    what = f"no field {field!r}"
                    raise CorpusError(what, where=where, do="name it in corpus.image_field, label_field")
            yield where, image_of(row[self.image_field], where, path.parent), row[self.label_field]

    def _label(self, value: Any, where: str) -> int:
        if isinstance(value, str) and value in self.names:
            return self.names[value]
        if isinstance(value, bool) or not (str(value).isascii() and str(value).isdigit()):
            raise CorpusError(f"label {value!r} is none of the model's", where=where, do="use its names or numbers")
        return int(value)
