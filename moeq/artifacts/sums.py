"""SHA256SUMS: digests of the files of a directory, as the tool sha256sum writes and checks them."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moeq.artifacts.files import sha256_file, write_text
from moeq.artifacts.reading import inside
from moeq.errors import ArtifactError

NAME = "SHA256SUMS"
UNLISTED = {NAME, "README.md", ".gitattributes"}  # what people edit once a checkpoint is published
MAX_BYTES = 1 << 24
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_REMEDY = "download it, or write it, again"


def write_sums(directory: Path) -> None:
    """Write the digests of all files."""
    names = sorted(path.name for path in directory.iterdir() if path.is_file() and path.name not in UNLISTED)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = pool.map(sha256_file, [directory / name for name in names])
        write_text(
            directory / NAME, "".join(f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True))
        )


def check_sums(directory: Path) -> int | None:
    """Compare a directory with its SHA256SUMS; the number of files, or None where there are no sums.

    Raises ArtifactError for a line that cannot be read and for the first file that is missing or changed.
    """
    path = directory / NAME
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_BYTES:
        raise ArtifactError(f"larger than {MAX_BYTES} bytes", where=str(path), do=_REMEDY)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ArtifactError("no digest and name", where=f"{path}, line {number}", do=_REMEDY)
        try:
            file = inside(directory, match[2])
        except ValueError as error:
            raise ArtifactError(str(error), where=f"{path}, line {number}", do=_REMEDY) from None
        if not file.is_file():
            raise ArtifactError("missing", where=str(file), do=_REMEDY)
        if sha256_file(file) != match[1]:
            raise ArtifactError(f"changed since {NAME} was written", where=str(file), do=_REMEDY)
    return len(lines)
