"""What a recipe's `source` names: the bundled corpus, files here, datasets on the hub pinned to a commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from moeq.artifacts.digests import BLOCK_BYTES, digest_of_file
from moeq.artifacts.files import digest_of
from moeq.bundled import bundled_path
from moeq.errors import CorpusError, missing
from moeq.models import hub
from moeq.models.corpus.hub_datasets import choose_files
from moeq.models.corpus.rows import kind_of, stem_of
from moeq.models.corpus.streams import COMPRESSED, Advance, Bar, shown
from moeq.recipe import BUNDLED as BUNDLED
from moeq.recipe import DIGITS as DIGITS
from moeq.recipe import HUB, HUB_DATASET

SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """A file on this machine; its domain where its rows name none."""

    path: Path
    name: str

    @property
    def domain(self) -> str:
        return stem_of(self.path.name)

    @property
    def public_name(self) -> str:
        """What artifacts call it: where it lies on this machine is nobody's business."""
        return BUNDLED if self.name == BUNDLED else self.path.name

    def identity(self, advance: Advance) -> list[str]:
        """What decides its documents."""
        left = self.path.stat().st_size

        def step() -> None:
            nonlocal left
            left -= BLOCK_BYTES
            advance(BLOCK_BYTES)

        digest = digest_of_file(self.path, cached=True, advance=step)
        advance(left)  # less than a block, or what was known before
        return [self.domain, digest]


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """Files of one split of a dataset on the hub; `name` is how a recipe writes it, pinned to its commit."""

    name: str
    dataset: str
    commit: str
    files: tuple[str, ...]

    @property
    def domain(self) -> str:
        return self.name.removeprefix(HUB).replace(f"@{self.commit}", "")

    @property
    def public_name(self) -> str:
        """What artifacts call it."""
        return self.name

    def identity(self, advance: Advance) -> list[str]:
        """What decides its documents."""
        return [self.name, *self.files]

    def paths(self, seed: int | None) -> Iterator[tuple[str, Path]]:
        """(name for errors, path) of its files in order, or in one that the seed decides, fetched when asked for."""
        files = list(self.files)
        if seed is not None:
            Random(seed).shuffle(files)
        for file in files:
            yield f"{self.name}: {file}", hub.file(self.dataset, file, self.commit, kind="dataset", error=CorpusError)


Source = LocalFile | HubDataset


def open_sources(source: str | Sequence[str], part: str) -> list[Source]:
    """What a source names; `bundled` means the bundled calibration or evaluation part.

    Raises CorpusError for files that are not there or not text, and for hub datasets that cannot be had.
    """
    names = [source] if isinstance(source, str) else list(source)
    return [_hub_dataset(name, part) if name.startswith(HUB) else _local_file(name, part) for name in names]


def sources_digest(sources: Sequence[Source], bar: Bar | None = None) -> str:
    """Digest of all that decides their documents; files are read as bytes, as they lie on the disk."""
    size = sum(source.path.stat().st_size for source in sources if isinstance(source, LocalFile))
    with shown(bar, "hashing text", size) as advance:
        return digest_of([source.identity(advance) for source in sources])


def pinned(source: str | Sequence[str], opened: Sequence[Source]) -> str | list[str]:
    """The source as a recipe writes it, hub datasets with the commit, configuration and split that they came to."""
    names = [source] if isinstance(source, str) else list(source)
    pins = [part.name if isinstance(part, HubDataset) else name for name, part in zip(names, opened, strict=True)]
    return pins[0] if isinstance(source, str) else pins


def _local_file(name: str, part: str) -> LocalFile:
    if name == DIGITS:
        raise CorpusError("digits are images, the model reads text", where=name, do="give a text file, or bundled")
    path = bundled_path(f"corpus/{part}.jsonl") if name == BUNDLED else Path(name).expanduser()
    known = kind_of(path.name) in SUFFIXES and (path.suffix in SUFFIXES or path.suffix in COMPRESSED)
    if not known or (kind_of(path.name) == ".parquet" and path.suffix != ".parquet"):
        raise CorpusError(f"not a text file (one of {', '.join(SUFFIXES)})", where=name, do="convert it")
    if not path.is_file():
        raise missing(name, "give the path of a text file, or bundled")
    return LocalFile(path=path, name=name)


def _hub_dataset(name: str, part: str) -> HubDataset:
    match = HUB_DATASET.fullmatch(name)
    if match is None:
        raise CorpusError("no hub dataset", where=name, do="write hub:ORG/NAME or hub:ORG/NAME@REVISION:CONFIG:SPLIT")
    dataset = match["name"]
    card = hub.snapshot(dataset, match["revision"], ["README.md"], kind="dataset", error=CorpusError)
    commit = card.name
    files = hub.list_files(dataset, commit, kind="dataset", error=CorpusError)
    readme = (card / "README.md").read_text("utf-8", "replace") if (card / "README.md").is_file() else ""
    chosen = choose_files(files, readme, match["config"] or None, match["split"], part, where=name)
    return HubDataset(
        name=f"{HUB}{dataset}@{commit}:{chosen.config}:{chosen.split}",
        dataset=dataset,
        commit=commit,
        files=chosen.files,
    )
