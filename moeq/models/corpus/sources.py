"""What a recipe's `source` names: the bundled corpus, files here, datasets on the hub pinned to a commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from moeq.artifacts.digests import BLOCK_BYTES, digest_of_file
from moeq.artifacts.files import digest_of
from moeq.bundled import bundled_path
from moeq.errors import CorpusError, missing
from moeq.folders import expanded
from moeq.models import hub
from moeq.models.corpus.hub_datasets import choose_files
from moeq.models.corpus.rows import kind_of, stem_of
from moeq.models.corpus.streams import COMPRESSED, Advance, Bar, shown
from moeq.recipe import BUNDLED as BUNDLED
from moeq.recipe import DIGITS as DIGITS
from moeq.recipe import HUB, HUB_DATASET, SourceSection, TextSource, source_name

PLAIN = ".txt"
SUFFIXES = (PLAIN, ".jsonl", ".parquet")


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """A file on this machine; its domain where its rows name none; own: what the recipe says of it alone."""

    path: Path
    name: str
    own: SourceSection | None = None

    @property
    def domain(self) -> str:
        if self.own is None:
            return stem_of(self.path.name)
        return self.own.name or source_name(self.name)

    @property
    def public_name(self) -> str:
        """What artifacts call it: where it lies on this machine is nobody's business."""
        if self.own is not None and self.own.name is not None:
            return self.own.name
        return BUNDLED if self.name == BUNDLED else self.path.name

    @property
    def weight(self) -> float | None:
        return None if self.own is None else self.own.weight

    def identity(self, advance: Advance) -> list[Any]:
        """What decides its documents."""
        left = self.path.stat().st_size

        def step() -> None:
            nonlocal left
            left -= BLOCK_BYTES
            advance(BLOCK_BYTES)

        digest = digest_of_file(self.path, cached=True, advance=step)
        advance(left)  # less than a block, or what was known before
        plain = [PLAIN] if kind_of(self.path.name) == PLAIN else []
        return [self.domain, digest, *plain, *settings_of(self.own, "path", "name")]


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """Files of one split of a dataset on the hub; `name` is how a recipe writes it, pinned to its commit.

    own: what the recipe says of it alone.
    """

    name: str
    dataset: str
    commit: str
    files: tuple[str, ...]
    own: SourceSection | None = None

    @property
    def domain(self) -> str:
        if self.own is not None and self.own.name is not None:
            return self.own.name
        return self.name.removeprefix(HUB).replace(f"@{self.commit}", "")

    @property
    def public_name(self) -> str:
        """What artifacts call it."""
        return self.name

    @property
    def weight(self) -> float | None:
        return None if self.own is None else self.own.weight

    def identity(self, advance: Advance) -> list[Any]:
        """What decides its documents."""
        return [self.name, *self.files, *settings_of(self.own, "path")]

    def paths(self, seed: int | None) -> Iterator[tuple[str, Path]]:
        """(name for errors, path) of its files in order, or in one that the seed decides, fetched when asked for."""
        files = list(self.files)
        if seed is not None:
            Random(seed).shuffle(files)
        for file in files:
            yield f"{self.name}: {file}", hub.file(self.dataset, file, self.commit, kind="dataset", error=CorpusError)


Source = LocalFile | HubDataset


def settings_of(own: SourceSection | None, *apart: str) -> list[dict[str, Any]]:
    """What a source says of itself beside some keys, where it says anything."""
    said = {} if own is None else own.model_dump(mode="json")
    left = {name: value for name, value in said.items() if name not in apart}
    return [left] if left else []


def open_sources(source: TextSource, part: str) -> list[Source]:
    """What a source names; `bundled` means the bundled calibration or evaluation part.

    Raises CorpusError for files that are not there or not text, and for hub datasets that cannot be had.
    """
    listed = source if isinstance(source, list) else [source]
    return [
        _opened(one.path, one, part) if isinstance(one, SourceSection) else _opened(one, None, part) for one in listed
    ]


def are_weighted(sources: Sequence[Source]) -> bool:
    """Whether sequences are divided between sources by their weights, not evenly between domains."""
    return any(source.weight is not None for source in sources)


def image_names(source: TextSource) -> str | list[str]:
    """The names of images, of which a recipe can say nothing more; CorpusError where it does."""
    for one in source if isinstance(source, list) else [source]:
        if isinstance(one, SourceSection):
            raise CorpusError("images have no fields, weights or names", where=one.path, do="give the path alone")
    return source  # type: ignore[return-value]


def _opened(name: str, own: SourceSection | None, part: str) -> Source:
    return _hub_dataset(name, own, part) if name.startswith(HUB) else _local_file(name, own, part)


def sources_digest(sources: Sequence[Source], bar: Bar | None = None) -> str:
    """Digest of all that decides their documents; files are read as bytes, as they lie on the disk."""
    size = sum(source.path.stat().st_size for source in sources if isinstance(source, LocalFile))
    with shown(bar, "hashing text", size) as advance:
        return digest_of([source.identity(advance) for source in sources])


def pinned(source: Any, opened: Sequence[Source]) -> Any:
    """The source as a recipe's data has it, hub datasets with the commit, configuration and split they came to."""
    listed = source if isinstance(source, list) else [source]
    pins = [_pinned(one, of) if isinstance(of, HubDataset) else one for one, of in zip(listed, opened, strict=True)]
    return pins if isinstance(source, list) else pins[0]


def _pinned(source: Any, opened: HubDataset) -> Any:
    return source | {"path": opened.name} if isinstance(source, dict) else opened.name


def _local_file(name: str, own: SourceSection | None, part: str) -> LocalFile:
    if name == DIGITS:
        raise CorpusError("digits are images, the model reads text", where=name, do="give a text file, or bundled")
    path = bundled_path(f"corpus/{part}.jsonl") if name == BUNDLED else expanded(name)
    if path.is_dir():
        raise CorpusError(
            "is a directory", where=name, do=f"name its files (of {', '.join(SUFFIXES)}), one after another"
        )
    known = kind_of(path.name) in SUFFIXES and (path.suffix in SUFFIXES or path.suffix in COMPRESSED)
    if not known or (kind_of(path.name) == ".parquet" and path.suffix != ".parquet"):
        raise CorpusError(f"not a text file (one of {', '.join(SUFFIXES)})", where=name, do="convert it")
    if not path.is_file():
        raise missing(name, "give the path of a text file, or bundled")
    return LocalFile(path=path, name=name, own=own)


def _hub_dataset(name: str, own: SourceSection | None, part: str) -> HubDataset:
    match = HUB_DATASET.fullmatch(name)
    if match is None:
        raise CorpusError("no hub dataset", where=name, do="write hub:ORG/NAME or hub:ORG/NAME@REVISION:CONFIG:SPLIT")
    dataset = match["name"]
    card = hub.snapshot(dataset, match["revision"], ["README.md"], kind="dataset", error=CorpusError)
    commit = card.name
    files = hub.list_files(dataset, commit, error=CorpusError)
    readme = (card / "README.md").read_text("utf-8", "replace") if (card / "README.md").is_file() else ""
    chosen = choose_files(files, readme, match["config"] or None, match["split"], part, where=name)
    if own is not None and own.names_fields and any(kind_of(file) == PLAIN for file in chosen.files):
        raise CorpusError("its files are plain text, which has no fields", where=name, do="leave them out")
    return HubDataset(
        name=f"{HUB}{dataset}@{commit}:{chosen.config}:{chosen.split}",
        dataset=dataset,
        commit=commit,
        files=chosen.files,
        own=own,
    )
