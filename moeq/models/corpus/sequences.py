"""Documents to sequences of tokens: packing, padding, equal shares of the domains."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from moeq.artifacts.files import digest_of
from moeq.errors import CorpusError
from moeq.models.corpus.documents import Document, encoded
from moeq.models.corpus.images import ImageRow
from moeq.models.walk import Batch

Extra = dict[str, Tensor]  # what model.forward is given beside the ids, for a batch of one
Row = Sequence[int] | np.ndarray | ImageRow
EncodeImages = Callable[[ImageRow], tuple[list[int], Extra]]


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Token sequences: ids [S, T] int64, mask [S, T] bool (False where padded), the domain of each.

    extra: of every sequence with images, what goes into the model beside its ids (None: no sequence has images).
    """

    ids: Tensor
    mask: Tensor
    domains: tuple[str, ...]
    extra: tuple[Extra, ...] | None = None
    pad: int = 0

    def __len__(self) -> int:
        return self.ids.shape[0]

    def batches(self, size: int) -> list[Batch]:
        """Batches of at most `size` sequences, in order; a sequence with images is a batch of its own, without pads."""
        batches: list[Batch] = []
        extras, stop = self.extra or ({},) * len(self), 0
        while stop < len(self):
            start, stop = stop, min(stop + size, len(self))
            stop = max(start + 1, next((index for index in range(start, stop) if extras[index]), stop))
            width = int(self.mask[start].sum()) if extras[start] else self.ids.shape[1]
            ids, mask = (part[start:stop, :width] for part in (self.ids, self.mask))
            batches.append(Batch(input_ids=ids, mask=mask, sequences=torch.arange(start, stop), extra=extras[start]))
        return batches

    def part(self, start: int, stop: int) -> Self:
        """Those from `start` to before `stop`."""
        every: dict[str, Any] = {name: own for name, own in vars(self).items() if isinstance(own, Tensor | tuple)}
        return replace(self, **{name: own[start:stop] for name, own in every.items()})

    def digest(self) -> str:
        """Digest of tokens, mask, domains and, where there are, images."""
        parts: list[Any] = [self.ids.tolist(), self.mask.sum(1).tolist(), list(self.domains)]
        if self.extra is not None:
            parts.append([{name: tensor_digest(value) for name, value in extra.items()} for extra in self.extra])
        return digest_of(parts)

    def joined(self, others: Sequence[Sequences]) -> Sequences:
        """These and others, one after another, padded to the longest."""
        parts = [self, *others]
        width = max(part.ids.shape[1] for part in parts)
        widen = torch.nn.functional.pad
        extra = tuple(extra for part in parts for extra in part.extra or ({},) * len(part))
        return Sequences(
            ids=torch.cat([widen(part.ids, (0, width - part.ids.shape[1]), value=self.pad) for part in parts]),
            mask=torch.cat([widen(part.mask, (0, width - part.mask.shape[1]), value=False) for part in parts]),
            domains=tuple(domain for part in parts for domain in part.domains),
            extra=extra if any(extra) else None,
            pad=self.pad,
        )


def tensor_digest(value: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes."""
    data = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{value.dtype} {list(value.shape)}".encode() + data.tobytes()).hexdigest()


def join(parts: Sequence[Sequences]) -> Sequences:
    """Sequences one after another, padded to the longest."""
    return parts[0] if len(parts) == 1 else parts[0].joined(parts[1:])


class Rows(ABC):
    """Rows by domain, from which sequences are taken, none twice."""

    def __init__(self, rows: dict[str, list[Any]], where: str) -> None:
        self.rows, self.where = rows, where

    def __len__(self) -> int:
        return sum(map(len, self.rows.values()))

    def take(self, count: int | None) -> Sequences:
        """`count` sequences (None: all) in equal shares a domain, evenly spaced in each; they leave the pool.

        Raises CorpusError when there are too few.
        """
        available = len(self)
        if available < (1 if count is None else count):
            raise self._too_few(available, count)
        return self._sequences(self._pick(available if count is None else count))

    def _pick(self, count: int) -> list[tuple[str, Any]]:
        """(domain, row) of that many rows, which leave the pool."""
        shares = _shares({domain: len(rows) for domain, rows in self.rows.items()}, count)
        chosen: list[tuple[str, Any]] = []
        for domain, rows in self.rows.items():
            picked = [index * len(rows) // shares[domain] for index in range(shares[domain])]
            chosen += [(domain, rows[index]) for index in picked]
            gone = set(picked)
            self.rows[domain] = [row for index, row in enumerate(rows) if index not in gone]
        return chosen

    def chunks(self, first: int, limit: int) -> Iterator[Sequences]:
        """`first` sequences, then each time as many as there are already, up to `limit` or the end of the text."""
        yield self.take(first)
        total = first
        while count := min(total, limit - total, len(self)):
            more = self._up_to(count)
            if more is None:
                return
            yield more
            total += len(more)

    def _up_to(self, count: int) -> Sequences | None:
        """So many sequences, or the last that there are."""
        return self.take(count)

    def first_up_to(self, count: int) -> Sequences | None:
        """So many sequences before any others were taken, or all that there are; None where there are none."""
        count = min(count, len(self))
        return self.take(count) if count else None

    def more_up_to(self, count: int) -> Sequences | None:
        """So many further sequences, or the last that there are; None where there are none."""
        count = min(count, len(self))
        return self._up_to(count) if count else None

    @abstractmethod
    def _sequences(self, chosen: Sequence[tuple[str, Any]]) -> Sequences:
        """What some rows, each with its domain, give."""

    @abstractmethod
    def _too_few(self, available: int, count: int | None) -> CorpusError:
        """What is said where there are fewer rows than are wanted (None: none at all)."""


class TextRows(Rows):
    """Rows that are token sequences of `length`, or images, encoded by `images` when they are taken."""

    def __init__(self, tokenizer: Any, *, length: int, where: str) -> None:
        super().__init__({}, where)
        self.length = length
        self.images: EncodeImages | None = None
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)

    def tokens(self) -> int:
        """About how many tokens of text there are."""
        return len(self) * self.length

    def encode_with(self, images: EncodeImages) -> None:
        """Have rows with images be encoded so when they are taken."""
        self.images = images

    def with_images(self) -> bool:
        """Whether there are rows with images, which are a domain's last."""
        return any(isinstance(row, ImageRow) for rows in self.rows.values() for row in rows[-1:])

    def _too_few(self, available: int, count: int | None) -> CorpusError:
        what, do = f"not one sequence of {self.length} tokens", "give more text or lower sequence_length"
        if count is not None:
            what = f"{available} sequences of {self.length} tokens, {count} are wanted"
            do = "give more text, or lower sequences or sequence_length"
            if available:
                do += f": --set {self.where.partition(' ')[0]}.sequences={available}"
        return CorpusError(f"too short: {what}", where=self.where, do=do)

    def _sequences(self, chosen: Sequence[tuple[str, Row]]) -> Sequences:
        encoded = [self._encode(row) for _, row in chosen]
        width = max(len(ids) for ids, _ in encoded)
        padded = torch.full((len(chosen), width), self.pad, dtype=torch.long)
        mask = torch.zeros((len(chosen), width), dtype=torch.bool)
        for index, (ids, _) in enumerate(encoded):
            padded[index, : len(ids)] = torch.as_tensor(np.array(ids, np.int64))
            mask[index, : len(ids)] = True
        extra = tuple(extra for _, extra in encoded)
        return Sequences(
            ids=padded,
            mask=mask,
            domains=tuple(domain for domain, _ in chosen),
            extra=extra if any(extra) else None,
            pad=self.pad,
        )

    def _encode(self, row: Row) -> tuple[Sequence[int] | np.ndarray, Extra]:
        if not isinstance(row, ImageRow):
            return row, {}
        if self.images is None:
            raise CorpusError("a row with an image where only text can be read", where=row.where, do="give text")
        return self.images(row)


class Pool(TextRows):
    """All sequences that documents give, by domain, from which some are taken, none twice."""

    def __init__(
        self,
        documents: Iterable[Document],
        tokenizer: Any,
        *,
        length: int,
        packed: bool = True,
        where: str = "corpus",
    ) -> None:
        """Tokenize and cut into sequences of `length` tokens.

        packed: each domain's documents are joined and cut without pads; otherwise every document is one sequence, cut
        or padded on the right. Rows with images stand alone. Of the documents as many are held as are tokenized
        together. Raises CorpusError when there is no text.
        """
        super().__init__(tokenizer, length=length, where=where)
        streams: dict[str, array[int]] = {}
        pictures: dict[str, list[ImageRow]] = {}
        for document, ids in encoded(documents, tokenizer):
            rows = self.rows.setdefault(document.domain, [])
            if document.image is not None:
                pictures.setdefault(document.domain, []).append(document.image)
            elif packed:
                streams.setdefault(document.domain, array("i")).extend(ids)
            elif len(ids) >= 2 and document.begins:
                rows.append(ids[:length])
        if not self.rows:
            raise CorpusError("no text in it", where=where, do="give files with text")
        for domain, stream in streams.items():
            whole = len(stream) // length * length
            self.rows[domain].extend(np.frombuffer(stream, np.int32)[:whole].reshape(-1, length))
        for domain, images_of_domain in pictures.items():
            self.rows[domain] += images_of_domain


def _shares(available: dict[str, int], count: int) -> dict[str, int]:
    """Equal shares of `count`, none above what is available; what is left goes to the domains that have more."""
    shares = dict.fromkeys(available, 0)
    left = count
    while left:
        open_domains = [domain for domain in available if shares[domain] < available[domain]]
        for index, domain in enumerate(open_domains):
            step = min(-(-left // (len(open_domains) - index)), available[domain] - shares[domain])
            shares[domain] += step
            left -= step
    return shares
