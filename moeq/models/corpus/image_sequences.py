"""Images with labels as sequences: the positions that a classifier sees of an image stand where tokens of a text do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.artifacts.files import digest_of
from moeq.errors import CorpusError
from moeq.models.corpus.labelled import ImageSet, ImageTask, Part
from moeq.models.corpus.sequences import Rows, Sequences, tensor_digest
from moeq.models.forward import PIXELS
from moeq.models.walk import Batch

_VERB = {"train": "calibrate on", "test": "be measured on"}


@dataclass(frozen=True, kw_only=True)
class ImageSequences(Sequences):
    """Images [S, C, H, W] as the model takes them, and labels [S]; ids [S, T] are zeros, one a position."""

    pixels: Tensor
    labels: Tensor

    def batches(self, size: int) -> list[Batch]:
        """Batches of at most `size` images, in order."""
        parts = (part.split(size) for part in (self.ids, self.mask, torch.arange(len(self)), self.pixels))
        return [
            Batch(input_ids=ids, mask=mask, sequences=sequences, extra={PIXELS: pixels})
            for ids, mask, sequences, pixels in zip(*parts, strict=True)
        ]

    def digest(self) -> str:
        """Digest of pixels, labels and domains."""
        return digest_of([tensor_digest(self.pixels), self.labels.tolist(), list(self.domains), self.ids.shape[1]])

    def joined(self, others: Sequence[Sequences]) -> Sequences:
        """These images and others."""
        parts = [self, *(other for other in others if isinstance(other, ImageSequences))]
        return ImageSequences(
            ids=torch.cat([part.ids for part in parts]),
            mask=torch.cat([part.mask for part in parts]),
            domains=tuple(domain for part in parts for domain in part.domains),
            pixels=torch.cat([part.pixels for part in parts]),
            labels=torch.cat([part.labels for part in parts]),
        )


class ImagePool(Rows):
    """One part of some sets of images, by domain, from which some are taken, none twice."""

    def __init__(self, sets: Sequence[ImageSet], part: Part, task: ImageTask, where: str) -> None:
        """Sets of the same domain are joined."""
        rows: dict[str, list[tuple[ImageSet, int]]] = {}
        for images in sets:
            rows.setdefault(images.domain, []).extend((images, number) for number in images.part(part).tolist())
        super().__init__(rows, where)
        self.task, self.part = task, part

    def _too_few(self, available: int, count: int | None) -> CorpusError:
        wanted, do = "at least one is wanted", "give more images"
        if count is not None:
            wanted, do = f"{count} are wanted", "give more images, or ask for fewer"
        return CorpusError(f"too few: {available} images to {_VERB[self.part]}, {wanted}", where=self.where, do=do)

    def _sequences(self, chosen: Sequence[tuple[str, tuple[ImageSet, int]]]) -> ImageSequences:
        shape = (len(chosen), self.task.positions)
        rows = [row for _, row in chosen]
        pixels = torch.empty((len(rows), *self.task.shape))  # filled one by one: there may be tens of thousands
        for place, (given, number) in enumerate(rows):
            image = given.images[number][None]
            pixels[place] = (image if given.prepared else self.task.pixels(image))[0]
        return ImageSequences(
            ids=torch.zeros(shape, dtype=torch.long),
            mask=torch.ones(shape, dtype=torch.bool),
            domains=tuple(domain for domain, _ in chosen),
            pixels=pixels,
            labels=torch.stack([given.labels[number] for given, number in rows]),
        )
