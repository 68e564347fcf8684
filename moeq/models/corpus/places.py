"""Sequences out of text of any size: places are chosen first, and only what lies around them is tokenized.

Text of up to a MiB is tokenized whole (`sequences.Pool`). Of more, one pass counts each domain's characters (a plain
.txt is not even read: its size is enough); then a domain is divided into places of equal width, of which those that are
taken are read and tokenized. A place gives one sequence, begun at a line or a word, or, where documents are not packed,
one document. What is in memory follows from the sequences that are wanted, not from the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, TypeGuard

import numpy as np

from moeq.errors import CorpusError
from moeq.models.corpus.documents import Document, Need, Unread, documents_of, encode, of_local
from moeq.models.corpus.fields import Fields
from moeq.models.corpus.rows import held_bytes, kind_of
from moeq.models.corpus.sequences import Pool, Row, Sequences, TextRows
from moeq.models.corpus.sources import LocalFile, Source
from moeq.models.corpus.streams import MARK, Advance, Bar, shown, size_up_to

RULE = 1  # raised when the same large text gives other sequences
WHOLE_BYTES = 1 << 20  # of all files together, decompressed
SAMPLE = 1 << 13  # characters of a domain that tell how many make a token
SAMPLED_DOMAINS = 32
SPARE, ROOMY = 1.25, 4.0  # width of a place, as a multiple of what a sequence takes: least, and where there is plenty
PLENTY = 1.5  # places for each sequence that is wanted; with fewer the text is tokenized whole
MOST_PLACES = 1 << 17  # of a domain, unless more sequences are wanted
CHARACTERS = 4.0  # a token, where a sample tells nothing
MOST_PER_TOKEN = 4  # tokens of a character: what is shorter than this needs no tokenizer to be too short


def is_small(sources: Sequence[Source]) -> bool:
    """Whether the files are small enough to be tokenized whole; of datasets only what is needed is read anyway."""
    left = WHOLE_BYTES
    for source in sources:
        if isinstance(source, LocalFile):
            plain = kind_of(source.path.name) != ".parquet"
            left -= size_up_to(source.path, left) if plain else held_bytes(source.path)
            if left < 0:
                return False
    return True


@dataclass(frozen=True, kw_only=True)
class PlainText(Unread):
    """A text that is read where it lies: its size is its bytes, and so are places in it."""

    path: Path

    def cut(self, low: int, high: int) -> Document:
        text = _cut(self.path, low, high - low)
        return replace(self.document, text=text, begins=low == 0, ends=high >= self.size)


@dataclass(kw_only=True)
class _Extent:
    """What there is of one domain: characters and documents of text, rows with images; a sample of its text."""

    characters: int = 0
    texts: int = 0
    images: int = 0
    sample: list[str] = field(default_factory=list)
    sampled: float = 0.0  # characters, as `characters` counts them
    per_token: float = CHARACTERS

    def add(self, unread: Unread, sampling: bool) -> None:
        """Count a document (or a piece of one), and take of its text for the sample."""
        if unread.document.image is not None:
            self.images += 1
            return
        self.characters += unread.size
        self.texts += unread.document.begins
        if isinstance(unread, PlainText):
            starts = [unread.size * part // 8 for part in range(8)]
            sample = [unread.cut(start, start + SAMPLE // 8).text for start in starts]
            self.sample += sample
            self.sampled += sum(len(text.encode()) for text in sample)
        elif sampling and self.sampled < SAMPLE:
            text = unread.made().text
            self.sample.append(text[:SAMPLE])
            self.sampled += unread.size * len(self.sample[-1]) / max(1, len(text))


@dataclass(kw_only=True)
class _Wanted:
    """What is read of one domain: {place: span of characters}, {number of a document: place}, and of images."""

    spans: list[tuple[int, int, int]] = field(default_factory=list)  # start, stop, place; in order
    texts: dict[int, int] = field(default_factory=dict)
    images: dict[int, int] = field(default_factory=dict)
    at: _Extent = field(default_factory=_Extent)
    pieces: list[Document] = field(default_factory=list)  # of the first span, as far as it was read

    def left(self) -> int:
        return len(self.spans) + len(self.texts) + len(self.images)


class Places(TextRows):
    """Places by domain, from which some are taken, none twice; a row is a place's number until it is read."""

    def __init__(
        self,
        sources: Sequence[Source],
        fields: Fields,
        tokenizer: Any,
        *,
        need: Need,
        first: int,
        where: str,
        seed: int | None = None,
        bar: Bar | None = None,
        fewer: bool = False,
    ) -> None:
        """need: the most that will ever be taken; first: what will be taken at once, or fewer, where there are no more.

        seed: draws the places.

        Raises CorpusError for files and rows that cannot be read, and when there is no text.
        """
        super().__init__(tokenizer, length=need.length, where=where)
        self.sources, self.fields, self.tokenizer, self.need = sources, fields, tokenizer, need
        self.seed, self.bar = seed, bar
        self._datasets: dict[Source, list[Document]] = {}
        self._extents = self._survey()
        if not any(extent.texts or extent.images for extent in self._extents.values()):
            raise CorpusError("no text in it", where=where, do="give files with text")
        for domain, extent in self._extents.items():
            self.rows[domain] = list(range(sum(self._places(extent))))
            if seed is not None:
                Random(seed).shuffle(self.rows[domain])
        if len(self) < (PLENTY if need.packed else 1) * first:
            if not fewer:
                self._check_enough(first)
            self._become_whole()

    def take(self, count: int | None) -> Sequences:
        """As `Rows.take`; a place without enough tokens is replaced by another, at last by tokenizing everything."""
        if self.numbered and count is not None:
            taken = self._taken(count)
            if len(taken) == count:
                return self._sequences(taken)
            self._become_whole()
        return super().take(count)

    def _up_to(self, count: int) -> Sequences | None:
        taken = self._taken(count)
        return self._sequences(taken) if taken else None

    def first_up_to(self, count: int) -> Sequences | None:
        """As `Rows.first_up_to`; where places hold too few, by tokenizing everything."""
        if not self.numbered:
            return super().first_up_to(count)
        taken = self._taken(count)
        if len(taken) == count:
            return self._sequences(taken)
        self._become_whole()
        return super().first_up_to(count)

    @property
    def numbered(self) -> bool:
        """Whether rows are numbers of places, of which some may give no sequence."""
        return any(isinstance(row, int) for rows in self.rows.values() for row in rows[:1])

    def _taken(self, count: int) -> list[tuple[str, Row]]:
        """Up to `count` rows, read; fewer where there are no more."""
        taken: list[tuple[str, Row]] = []
        while missing := min(count - len(taken), len(self)):
            taken += self._read(self._pick(missing))
        return taken

    def tokens(self) -> int:
        known = (extent.characters / extent.per_token for extent in self._extents.values())
        return int(sum(known)) if self.numbered else super().tokens()

    def with_images(self) -> bool:
        return any(extent.images for extent in self._extents.values())

    def _places(self, extent: _Extent) -> tuple[int, int]:
        """A domain's places of text, of equal width in characters or one a document, and of images."""
        most, takes = max(MOST_PLACES, 2 * self.need.sequences), self.length * extent.per_token
        width = max(SPARE * takes, min(ROOMY * takes, extent.characters / (4 * self.need.sequences)))
        there = int(extent.characters / width) if self.need.packed else extent.texts
        return min(most, there), min(most, extent.images)

    def _reach(self, domain: str, widths: float) -> int:
        """Characters of a domain that hold `widths` times the tokens of a sequence."""
        return int(widths * self.length * self._extents[domain].per_token) + 1

    def _check_enough(self, count: int) -> None:
        """CorpusError where no tokenizer could make enough of the text."""
        extents = self._extents.values()
        tokens = sum(MOST_PER_TOKEN * extent.characters + 2 * extent.texts for extent in extents)
        plain = all(isinstance(source, LocalFile) and kind_of(source.path.name) == ".txt" for source in self.sources)
        texts = all(self.fields.of(source.own).chat is False for source in self.sources)
        known = self.need.packed and (plain or texts)  # a chat template may add any number
        if known and not self.with_images() and tokens // self.length < count:
            raise self._too_few(tokens // self.length, count)

    def _become_whole(self) -> None:
        """Tokenize all of the text: as much is wanted of it."""
        self.rows = open_text(
            self.sources,
            self.fields,
            self.tokenizer,
            length=self.length,
            first=None,
            most=self.need.sequences,
            packed=self.need.packed,
            where=self.where,
            seed=self.seed,
            bar=self.bar,
        ).rows

    # --- reading -------------------------------------------------------------------------------------------------

    def _documents(self, source: Source, advance: Advance) -> Iterable[Unread]:
        if _seekable(source):
            size = source.path.stat().st_size
            document = Document(text="", domain=source.domain, begins=size > 0)
            return [PlainText(document=document, size=size, path=source.path)]
        if isinstance(source, LocalFile):
            return of_local(source, self.fields, self.tokenizer, advance)
        if source not in self._datasets:
            self._datasets[source] = list(documents_of(source, self.fields, self.tokenizer, self.need, self.seed))
        return (Unread(document=document, size=len(document.text)) for document in self._datasets[source])

    def _streamed_bytes(self) -> int:
        files = (source for source in self.sources if isinstance(source, LocalFile) and not _seekable(source))
        return sum(source.path.stat().st_size for source in files)

    def _survey(self) -> dict[str, _Extent]:
        """The extent of every domain, in the order of their first documents."""
        extents: dict[str, _Extent] = {}
        with shown(self.bar, "counting text", self._streamed_bytes()) as advance:
            for source in self.sources:
                for unread in self._documents(source, advance):
                    extent = extents.setdefault(unread.document.domain, _Extent())
                    extent.add(unread, len(extents) <= SAMPLED_DOMAINS)
        for extent in extents.values():
            if extent.sample:
                ids = self.tokenizer(extent.sample, add_special_tokens=False, verbose=False)["input_ids"]
                tokens = sum(map(len, ids))
                extent.per_token = max(0.25, extent.sampled / tokens) if tokens and extent.sampled else CHARACTERS
                extent.sample.clear()
        return extents

    def _read(self, chosen: Sequence[tuple[str, Any]]) -> list[tuple[str, Row]]:
        """The rows of chosen places in their order, without those that hold too little; what is a row already stays."""
        numbers = [(domain, row) for domain, row in chosen if isinstance(row, int)]
        read = dict(self._passed(self._wanted(numbers)) if numbers else ())
        rows = ((domain, read.get((domain, row)) if isinstance(row, int) else row) for domain, row in chosen)
        return [(domain, row) for domain, row in rows if row is not None]

    def _wanted(self, numbers: list[tuple[str, int]]) -> dict[str, _Wanted]:
        parts: dict[str, _Wanted] = {}
        for domain, place in numbers:
            wanted, extent = parts.setdefault(domain, _Wanted()), self._extents[domain]
            count, images = self._places(extent)
            if place >= count:
                wanted.images[(place - count) * extent.images // images] = place
            elif self.need.packed:
                start, stop = (number * extent.characters // count for number in (place, place + 1))
                wanted.spans.append((start, min(stop, start + self._reach(domain, ROOMY)), place))
            else:
                wanted.texts[place * extent.texts // count] = place
        for wanted in parts.values():
            wanted.spans.sort()
        return parts

    def _passed(self, wanted: dict[str, _Wanted]) -> Iterator[tuple[tuple[str, int], Row]]:
        """Pass over the sources, as far as something is wanted of them, and give what the places hold."""
        with shown(self.bar, "reading text", self._streamed_bytes()) as advance:
            for source in self.sources:
                if not any(part.left() for part in wanted.values()):
                    return
                for unread in self._documents(source, advance):
                    domain = unread.document.domain
                    if domain in wanted:
                        yield from self._of_document(unread, wanted[domain])
                        if not wanted[domain].left() and not any(part.left() for part in wanted.values()):
                            return

    def _of_document(self, unread: Unread, wanted: _Wanted) -> Iterator[tuple[tuple[str, int], Row]]:
        """What of a document (or a piece of one) is wanted."""
        domain, at = unread.document.domain, wanted.at
        if unread.document.image is not None:
            if at.images in wanted.images:
                yield (domain, wanted.images.pop(at.images)), unread.document.image
            at.images += 1
            return
        begin, end = at.characters, at.characters + unread.size
        if unread.document.begins and at.texts in wanted.texts:
            whole = unread.cut(0, self._reach(domain, ROOMY)) if isinstance(unread, PlainText) else unread.made()
            yield from self._row(domain, wanted.texts.pop(at.texts), [whole])
        while wanted.spans and wanted.spans[0][0] < end:
            start, stop, place = wanted.spans[0]
            wanted.pieces.append(unread.cut(max(start - begin, 0), min(stop - begin, unread.size)))
            if stop > end:
                break
            wanted.spans.pop(0)
            yield from self._row(domain, place, wanted.pieces)
            wanted.pieces = []
        at.characters, at.texts = end, at.texts + unread.document.begins

    def _row(self, domain: str, place: int, pieces: list[Document]) -> Iterator[tuple[tuple[str, int], Row]]:
        """The sequence that a place's text gives; nothing where it is too short."""
        if not pieces[0].begins:
            pieces[0] = replace(pieces[0], text=_from_a_word(pieces[0].text))
        least = self.length if self.need.packed else 2
        for most in (self._reach(domain, SPARE), 1 << 62):
            some, whole = _first(pieces, most)
            ids = [token for tokens in encode(some, self.tokenizer) for token in tokens]
            if len(ids) >= self.length or whole:
                break
        if len(ids) >= least:
            yield (domain, place), np.array(ids[: self.length], np.int32)


def _first(pieces: list[Document], most: int) -> tuple[list[Document], bool]:
    """Pieces up to a number of characters, and whether that is all of them."""
    some: list[Document] = []
    left = most
    for piece in pieces:
        if len(piece.text) > left:
            return [*some, replace(piece, text=piece.text[:left], ends=False)], False
        some.append(piece)
        left -= len(piece.text)
    return some, True


def _seekable(source: Source) -> TypeGuard[LocalFile]:
    return isinstance(source, LocalFile) and source.path.suffix == ".txt"


def _cut(path: Path, start: int, size: int) -> str:
    """Some bytes of a plain text as characters, those that are cut at either end left out."""
    try:
        with path.open("rb", buffering=0) as stream:
            stream.seek(start)
            raw = stream.read(size) or b""
        first = next((place for place, byte in enumerate(raw[:4]) if byte & 0xC0 != 0x80), 0) if start else 0
        text = raw[first:].decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(raw) - first - 3 or error.reason != "unexpected end of data":
            where = f"byte {start + first + error.start}: {error.reason}"
            raise CorpusError(f"cannot be read as UTF-8 ({where})", where=str(path), do="convert it") from None
        text = raw[first : first + error.start].decode("utf-8")
    except OSError as error:
        raise CorpusError(f"cannot be read ({error})", where=str(path), do="check the file") from None
    text = text if start else text.removeprefix(MARK)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _from_a_word(text: str) -> str:
    """Text from its first line or word on, where one begins soon enough."""
    line = text.find("\n", 0, len(text) // 8)
    if line >= 0:
        return text[line + 1 :]
    word = next((place for place, character in enumerate(text[: len(text) // 4]) if character.isspace()), 0)
    return text[word:]


def open_text(
    sources: Sequence[Source],
    fields: Fields,
    tokenizer: Any,
    *,
    length: int,
    first: int | None,
    most: int | None,
    packed: bool = True,
    where: str = "corpus",
    seed: int | None = None,
    bar: Bar | None = None,
    fewer: bool = False,
) -> TextRows:
    """What sequences are taken from: `first` of them at once, up to `most` later; None: all of the text.

    fewer: whether it may have less than `first`.

    Raises CorpusError for files, rows and datasets that cannot be read, and where there is no text.
    """
    need = None if most is None else Need(sequences=most, length=length, packed=packed)
    if need is not None and first is not None and not is_small(sources):
        return Places(sources, fields, tokenizer, need=need, first=first, where=where, seed=seed, bar=bar, fewer=fewer)
    size = sum(source.path.stat().st_size for source in sources if isinstance(source, LocalFile))
    with shown(bar, "tokenizing text", size) as advance:
        documents = chain.from_iterable(
            documents_of(source, fields, tokenizer, need, seed, advance) for source in sources
        )
        return Pool(documents, tokenizer, length=length, packed=packed, where=where)
