"""Documents to sequences of tokens: packing, padding, equal shares of the domains."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
        found = []
        for start, stop in self._spans(size):
            extra = self.extra[start] if self.extra is not None else {}
            width = int(self.mask[start].sum()) if extra else self.ids.shape[1]
            found.append(
                Batch(
                    input_ids=self.ids[start:stop, :width],
                    mask=self.mask[start:stop, :width],
                    sequences=torch.arange(start, stop),
                    extra=extra,
                )
            )
        return found

    def _spans(self, size: int) -> Iterator[tuple[int, int]]:
        start = 0
        while start < len(self):
            stop = min(start + size, len(self))
            if self.extra is not None:
                with_images = next((index for index in range(start, stop) if self.extra[index]), stop)
                stop = max(with_images, start + 1)
            yield start, stop
            start = stop

    def digest(self) -> str:
        """Digest of tokens, mask, domains and, where there are, images."""
        found: list[Any] = [self.ids.tolist(), self.mask.sum(1).tolist(), list(self.domains)]
        if self.extra is not None:
            found.append([{name: tensor_digest(value) for name, value in extra.items()} for extra in self.extra])
        return digest_of(found)

    def joined(self, others: Sequence[Sequences]) -> Sequences:
        """These and others, one after another, padded to the longest."""
        return _padded([self, *others])


def tensor_digest(value: Tensor) -> str:
    data = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{value.dtype} {list(value.shape)}".encode() + data.tobytes()).hexdigest()


def join(parts: Sequence[Sequences]) -> Sequences:
    """Sequences one after another, padded to the longest."""
    return parts[0] if len(parts) == 1 else parts[0].joined(parts[1:])


def _padded(parts: Sequence[Sequences]) -> Sequences:
    width = max(part.ids.shape[1] for part in parts)
    pad = parts[0].pad
    widen = torch.nn.functional.pad
    extra = tuple(extra for part in parts for extra in part.extra or ({},) * len(part))
    return Sequences(
        ids=torch.cat([widen(part.ids, (0, width - part.ids.shape[1]), value=pad) for part in parts]),
        mask=torch.cat([widen(part.mask, (0, width - part.mask.shape[1]), value=False) for part in parts]),
        domains=tuple(domain for part in parts for domain in part.domains),
        extra=extra if any(extra) else None,
        pad=pad,
    )


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
        shares = _shares({domain: len(mine) for domain, mine in self.rows.items()}, count)
        chosen: list[tuple[str, Any]] = []
        for domain, mine in self.rows.items():
            picked = [index * len(mine) // shares[domain] for index in range(shares[domain])]
            chosen += [(domain, mine[index]) for index in picked]
            gone = set(picked)
            self.rows[domain] = [row for index, row in enumerate(mine) if index not in gone]
        return chosen

    def chunks(self, first: int, limit: int) -> Iterator[Sequences]:
        """`first` sequences, then each time as many as there are already, up to `limit` or the end of the text."""
        yield self.take(first)
        total = first
        while count := min(total, limit - total, len(self)):
            found = self._up_to(count)
            if found is None:
                return
            yield found
            total += len(found)

    def _up_to(self, count: int) -> Sequences | None:
        """So many sequences, or the last that there are."""
        return self.take(count)

    @abstractmethod
    def _sequences(self, chosen: Sequence[tuple[str, Any]]) -> Sequences:
        """What some rows, each with its domain, give."""

    @abstractmethod
    def _too_few(self, available: int, count: int | None) -> CorpusError:
        """What is said where there are fewer rows than are wanted (None: none at all)."""


class TextRows(Rows):
    """Rows that are token sequences of `length`, or images, encoded by `images` when they are taken."""

    def __init__(self, tokenizer: Any, *, length: int, where: str, images: EncodeImages | None = None) -> None:
        super().__init__({}, where)
        self.length, self.images = length, images
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)

    def tokens(self) -> int:
        """About how many tokens of text there are."""
        return len(self) * self.length

    def with_images(self) -> bool:
        """Whether there are rows with images, which are a domain's last."""
        return any(isinstance(row, ImageRow) for mine in self.rows.values() for row in mine[-1:])

    def _too_few(self, available: int, count: int | None) -> CorpusError:
        if count is None:
            return CorpusError(
                f"too short: not one sequence of {self.length} tokens",
                where=self.where,
                do="give more text or lower sequence_length",
            )
        return CorpusError(
            f"too short: {available} sequences of {self.length} tokens, {count} are wanted",
            where=self.where,
            do="give more text, or lower sequences or sequence_length",
        )

    def _sequences(self, chosen: Sequence[tuple[str, Row]]) -> Sequences:
        encoded = [self._encode(row) for _, row in chosen]
        width = max(len(ids) for ids, _ in encoded)
        ids_tensor = torch.full((len(chosen), width), self.pad, dtype=torch.long)
        mask = torch.zeros((len(chosen), width), dtype=torch.bool)
        for index, (ids, _) in enumerate(encoded):
            ids_tensor[index, : len(ids)] = torch.as_tensor(np.array(ids, np.int64))
            mask[index, : len(ids)] = True
        extra = tuple(extra for _, extra in encoded)
        return Sequences(
            ids=ids_tensor,
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
        images: EncodeImages | None = None,
    ) -> None:
        """Tokenize and cut into sequences of `length` tokens.

        packed: each domain's documents are joined and cut without pads; otherwise every document is one sequence, cut
        or padded on the right. Rows with images stand alone. Of the documents as many are held as are tokenized
        together. Raises CorpusError when there is no text.
        """
        super().__init__(tokenizer, length=length, where=where, images=images)
        streams: dict[str, array[int]] = {}
        pictures: dict[str, list[ImageRow]] = {}
        for one, ids in encoded(documents, tokenizer):
            rows = self.rows.setdefault(one.domain, [])
            if one.image is not None:
                pictures.setdefault(one.domain, []).append(one.image)
            elif packed:
                streams.setdefault(one.domain, array("i")).extend(ids)
            elif len(ids) >= 2 and one.begins:
                rows.append(ids[:length])
        if not self.rows:
            raise CorpusError("no text in it", where=where, do="give files with text")
        for domain, stream in streams.items():
            whole = len(stream) // length * length
            self.rows[domain].extend(np.frombuffer(stream, np.int32)[:whole].reshape(-1, length))
        for domain, mine in pictures.items():
            self.rows[domain] += mine


def make_sequences(
    documents: Sequence[Document],
    tokenizer: Any,
    *,
    length: int,
    count: int | None,
    packed: bool = True,
    where: str = "corpus",
) -> Sequences:
    """Tokenize and cut into `count` sequences of `length` tokens (None: all of the text), as `Pool` does.

    Raises CorpusError when there is no text or too little of it.
    """
    return Pool(documents, tokenizer, length=length, packed=packed, where=where).take(count)


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
