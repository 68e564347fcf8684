"""SHA256SUMS: digests of the files of a directory, as the tool sha256sum writes and checks them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moeq.artifacts.digests import digests_of_files
from moeq.artifacts.files import write_text
from moeq.artifacts.reading import inside
from moeq.errors import ArtifactError
from moeq.progress import Reporter

NAME = "SHA256SUMS"
SIGNATURE = "model.sig"
UNLISTED = {NAME, SIGNATURE, "README.md", ".gitattributes"}  # what changes once a checkpoint is published
BESIDE = UNLISTED | {"stage.json"}  # what may lie beside the files that are listed
ACTIVE = {".py", ".safetensors", ".bin", ".pt", ".pth", ".gguf"}  # files that loaders run or take weights from
MAX_BYTES = 1 << 24
LINE_BYTES = 67  # beside the name
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_REMEDY = "download it, or write it, again"


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What was checked: {file: SHA-256} that SHA256SUMS lists, and the names of files that it does not."""

    files: dict[str, str]
    unlisted: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line for people."""
        more = f"; not listed: {', '.join(self.unlisted)}" if self.unlisted else ""
        return f"SHA-256 of {len(self.files)} files as in {NAME}{more}"

    def require_inactive(self, directory: Path) -> None:
        """ArtifactError for a file that is not listed and that a loader might run or take weights from."""
        for name in self.unlisted:
            if Path(name).suffix in ACTIVE:
                raise ArtifactError(f"{NAME} does not list it", where=str(directory / name), do="remove it, " + _REMEDY)


def write_sums(directory: Path) -> None:
    """Write the digests of all files; those that their writers took are not taken again."""
    paths = sorted(path for path in directory.iterdir() if path.is_file() and path.name not in UNLISTED)
    digests = digests_of_files(paths, cached=True)
    write_text(directory / NAME, "".join(f"{digests[path]}  {path.name}\n" for path in paths))


def check_sums(
    directory: Path,
    *,
    only: Callable[[str], bool] = lambda name: True,
    cached: bool = False,
    known: Mapping[str, str] | None = None,
    reporter: Reporter | None = None,
) -> Sums | None:
    """Compare a directory with its SHA256SUMS, reading every file; None where there are no sums.

    only: whose bytes are compared; all must be there. cached: digests that were taken of these very files before will
    do. known: digests that were taken just now; these files are not read. Raises ArtifactError for a line that cannot
    be read and for the first file that is missing or changed.
    """
    if not (directory / NAME).is_file():
        return None
    stated = _read_sums(directory)
    files = {name: inside(directory, name) for name in stated}
    wanted = [name for name in stated if only(name)]
    there = {name: known[name] for name in wanted if name in known} if known is not None else {}
    rest = [files[name] for name in wanted if name not in there]
    digests = digests_of_files(rest, cached=cached, reporter=reporter, title=f"checking {NAME}")
    for name in wanted:
        if (there[name] if name in there else digests[files[name]]) != stated[name]:
            raise ArtifactError(f"changed since {NAME} was written", where=str(files[name]), do=_REMEDY)
    return Sums(files=stated, unlisted=tuple(name for name in _visible(directory) if name not in stated))


def _visible(directory: Path) -> list[str]:
    """Files of a directory and those below it, but what is hidden and what may lie beside listed files."""
    names = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in names if name not in BESIDE and not re.match(r"\.|.*/\.", name))


def _read_sums(directory: Path) -> dict[str, str]:
    """{file: digest} as SHA256SUMS states it; ArtifactError for a line that is none, and for a file that is missing."""
    path = directory / NAME
    if path.stat().st_size > MAX_BYTES:
        raise ArtifactError(f"larger than {MAX_BYTES} bytes", where=str(path), do=_REMEDY)
    stated: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n"), 1):
        where = f"{path}, line {number}"
        match = _LINE.fullmatch(line)
        if match is None:
            raise ArtifactError("no digest and name", where=where, do=_REMEDY)
        try:
            file = inside(directory, match[2])
        except ValueError as error:
            raise ArtifactError(str(error), where=where, do=_REMEDY) from None
        if match[2] in stated:
            raise ArtifactError(f"{match[2]} is there twice", where=where, do=_REMEDY)
        if not file.is_file():
            raise ArtifactError("missing", where=str(file), do=_REMEDY)
        stated[match[2]] = match[1]
    return stated
