"""Sequences of several sources by their weights: each source gives its share of whatever number is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moeq.errors import CorpusError
from moeq.models.corpus.fields import Fields
from moeq.models.corpus.places import Places, open_text
from moeq.models.corpus.sequences import EncodeImages, Sequences, TextRows, join
from moeq.models.corpus.sources import HubDataset, Source, are_weighted
from moeq.models.corpus.streams import Bar


def apportion(
    weights: Sequence[float], count: int, given: Sequence[int] | None = None, left: Sequence[int | None] | None = None
) -> list[int]:
    """How many of the next `count` each source gives: one after another goes to the one furthest behind its weight.

    given: what each has given already; left: what each still has (None: enough). Fewer than `count` in all where no
    more is left. By Sainte-Lague's divisors: shares that come out even are met exactly, and a larger count never takes
    from anyone.
    """
    before = list(given) if given is not None else [0] * len(weights)
    total = list(before)
    most = [None if left is None or left[at] is None else before[at] + (left[at] or 0) for at in range(len(weights))]
    for _ in range(count):
        open_sources = [at for at, cap in enumerate(most) if cap is None or total[at] < cap]
        if not open_sources:
            break
        total[max(open_sources, key=lambda at: weights[at] / (2 * total[at] + 1))] += 1
    return [now - then for now, then in zip(total, before, strict=True)]


class Mixture(TextRows):
    """Rows of several sources, each read on its own; what is taken is divided between them by their weights.

    Where a source has too little for its share, the others give more, and `say` is told.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        fields: Fields,
        tokenizer: Any,
        *,
        length: int,
        first: int,
        most: int,
        packed: bool = True,
        where: str = "corpus",
        seed: int | None = None,
        bar: Bar | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """first: what will be taken at once; most: all that will ever be taken.

        Raises CorpusError for files, rows and datasets that cannot be read, and for a source without text.
        """
        super().__init__(tokenizer, length=length, where=where)
        self.sources, self.say = sources, say
        self.weights = [1.0 if source.weight is None else source.weight for source in sources]
        self._reading: dict[str, Any] = {"length": length, "packed": packed, "seed": seed, "bar": bar}
        self._fields, self._tokenizer, self._first = fields, tokenizer, apportion(self.weights, first)
        self._needs = [0] * len(sources)
        self._pools: list[TextRows] = []
        self._open(most)
        self.given, self._ended, self._told = [0] * len(sources), [False] * len(sources), [False] * len(sources)

    def _open(self, most: int) -> None:
        """Open every source; a hub dataset once more where others leave it a larger share than was read of it."""
        wanted = apportion(self.weights, most)
        while True:
            for at, source in enumerate(self.sources):
                if at == len(self._pools):
                    self._pools.append(self._opened(at, max(1, wanted[at]) if isinstance(source, HubDataset) else most))
                elif isinstance(source, HubDataset) and wanted[at] > self._needs[at]:
                    self._pools[at] = self._opened(at, wanted[at])
            known = [None if self._goes_on(at) else self._left(at) for at in range(len(self.sources))]
            wanted = apportion(self.weights, most, left=known)
            hubs = [at for at, source in enumerate(self.sources) if isinstance(source, HubDataset)]
            if all(wanted[at] <= self._needs[at] for at in hubs):
                return

    def _opened(self, at: int, need: int) -> TextRows:
        self._needs[at] = need
        source, first = self.sources[at], max(1, self._first[at])
        return open_text(
            [source],
            self._fields,
            self._tokenizer,
            first=first,
            most=need,
            where=source.name,
            fewer=True,
            **self._reading,
        )

    def _left(self, at: int) -> int | None:
        """How many sequences are left of what was read of a source; None where that is seen when they are taken."""
        pool = self._pools[at]
        return None if isinstance(pool, Places) and pool.numbered else len(pool)

    def _goes_on(self, at: int) -> bool:
        """Whether more can be read of a source than was: of a hub dataset that did not end before its share."""
        return isinstance(self.sources[at], HubDataset) and len(self._pools[at]) >= self._needs[at]

    def __len__(self) -> int:
        return sum(len(pool) for pool, ended in zip(self._pools, self._ended, strict=True) if not ended)

    def take(self, count: int | None) -> Sequences:
        """`count` sequences, source after source. Raises CorpusError when all of them together have too few."""
        if count is None:
            raise CorpusError("weights are shares of a number of sequences", where=self.where, do="set sequences")
        parts = self._parts(count)
        if sum(map(len, parts)) < count:
            raise self._too_few(sum(map(len, parts)), count)
        return join(parts)

    def _up_to(self, count: int) -> Sequences | None:
        parts = self._parts(count)
        return join(parts) if parts else None

    def _parts(self, count: int) -> list[Sequences]:
        """What the sources give of the next `count`; those that have ended leave theirs to the others."""
        parts: list[list[Sequences]] = [[] for _ in self.sources]
        missing = count
        while missing:
            left = [0 if self._ended[at] else self._left(at) for at in range(len(self.sources))]
            wanted = apportion(self.weights, missing, self.given, left)
            if not any(wanted):
                break
            for at, number in enumerate(wanted):
                found = self._of(at, number) if number else None
                if found is not None:
                    parts[at].append(found)
                    self.given[at] += len(found)
                    missing -= len(found)
                self._ended[at] |= number > (0 if found is None else len(found))
        self._tell()
        return [part for of_source in parts for part in of_source]

    def _of(self, at: int, number: int) -> Sequences | None:
        pool = self._pools[at]
        return pool.more_up_to(number) if self.given[at] else pool.first_up_to(number)

    def _tell(self) -> None:
        """Name the sources, once each, that have less than their share of what was taken, or none of it."""
        total = sum(self.given)
        for at, share in enumerate(apportion(self.weights, total)):
            short = self.given[at] < share
            if (short or not self.given[at]) and not self._told[at]:
                self._told[at] = True
                name = self.sources[at].public_name
                what = f"{name} has {self.given[at]} of the {share} sequences that are its share by weight"
                none = f"{name} has a weight too small for one of {total} sequences"
                self.say(f"{what}; the other sources fill it" if short else none)

    def tokens(self) -> int:
        return sum(pool.tokens() for pool in self._pools)

    def with_images(self) -> bool:
        return any(pool.with_images() for pool in self._pools)

    def encode_with(self, images: EncodeImages) -> None:
        for pool in self._pools:
            pool.encode_with(images)


def open_corpus(
    sources: Sequence[Source],
    fields: Fields,
    tokenizer: Any,
    *,
    length: int,
    first: int | None,
    most: int | None,
    say: Callable[[str], None] = lambda _: None,
    **reading: Any,
) -> TextRows:
    """What sequences are taken from: of sources with weights a mixture, of others all text together.

    first, most: as `open_text` has them, without None where there are weights; reading: packed, where, seed, bar.
    """
    if first is None or most is None or not are_weighted(sources):
        return open_text(sources, fields, tokenizer, length=length, first=first, most=most, **reading)
    return Mixture(sources, fields, tokenizer, length=length, first=first, most=most, say=say, **reading)
