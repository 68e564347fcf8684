"""stage.json: what a stage was given, what it wrote, and the digests of both.

A stage's `key` is the digest of its inputs (the configuration it reads, the model, the text, the digests of the
artifacts before it); its `digest` is that of the bytes it wrote. Dates and timings stand in `volatile`, outside both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from moeq.artifacts.files import digest_of, read_json, sha256_file, write_json
from moeq.artifacts.reading import RelativeName
from moeq.errors import ArtifactError
from moeq.version import __version__

SCHEMA_VERSION = 1
RECORD = "stage.json"
Model = TypeVar("Model", bound=BaseModel)


class ModelStamp(BaseModel):
    """Which model an artifact belongs to: name as given, revision (hub commit or None), digest of its files."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    revision: str | None = None
    digest: str


class FileStamp(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    bytes: int
    sha256: str


class StageRecord(BaseModel):
    """The record of one finished stage."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: int = SCHEMA_VERSION
    stage: str
    moeq_version: str = __version__
    model: ModelStamp
    seed: int
    key: str
    inputs: dict[str, str]
    files: dict[RelativeName, FileStamp]
    digest: str
    summary: dict[str, Any] = {}
    volatile: dict[str, Any] = {}


def check_schema_version(found: Any, expected: int | str, path: Path, *, remedy: str) -> None:
    """ArtifactError when an artifact was written under another schema version."""
    if found != expected:
        raise ArtifactError(
            f"schema version {found!r}, this moeq ({__version__}) reads {expected}", where=str(path), do=remedy
        )


def read_model(path: Path, model: type[Model], schema_version: int, *, remedy: str) -> Model:
    """Read a JSON artifact into its model; ArtifactError naming the place when it is missing or damaged."""
    data = read_json(path, remedy=remedy)
    found = data.get("schema_version") if isinstance(data, dict) else None
    check_schema_version(found, schema_version, path, remedy=remedy)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = f"{path}: {'.'.join(map(str, first['loc']))}"
        raise ArtifactError(first["msg"].removeprefix("Value error, "), where=where, do=remedy) from None


def read_record(directory: Path, stage: str) -> StageRecord:
    """Read a stage's record; ArtifactError when it is missing, damaged or of another schema version."""
    path = directory / RECORD
    remedy = f"run `moeq {stage}` or `moeq run` to make it again"
    if not path.exists():
        raise ArtifactError("this stage has not been run", where=str(directory), do=remedy)
    return read_model(path, StageRecord, SCHEMA_VERSION, remedy=remedy)


HASHED_BYTES = 16 << 20  # files up to this size are hashed again when a later stage reads them


def is_current(directory: Path, stage: str, key: str, editable: frozenset[str] = frozenset()) -> bool:
    """Whether the stage was finished with this key and all its files are still there at their size.

    `editable` files may have been changed by hand: they only have to be there.
    """
    if not (directory / RECORD).exists():
        return False
    try:
        record = read_record(directory, stage)
    except ArtifactError:
        return False  # of another schema version or damaged: `moeq run` makes it again
    return record.key == key and all(
        (directory / name).is_file() and (name in editable or _unchanged(directory / name, stamp))
        for name, stamp in record.files.items()
    )


def _unchanged(path: Path, stamp: FileStamp) -> bool:
    size = path.stat().st_size
    return size == stamp.bytes and (size > HASHED_BYTES or sha256_file(path) == stamp.sha256)


def current_digest(directory: Path, stage: str) -> str:
    """Digest of what a stage's files hold now: small files are hashed again, so that hand edits reach later stages."""
    record = read_record(directory, stage)
    found = {}
    for name, stamp in record.files.items():
        path = directory / name
        if not path.is_file():
            raise ArtifactError("file is missing", where=str(path), do=f"run `moeq {stage}` again")
        found[name] = sha256_file(path) if path.stat().st_size <= HASHED_BYTES else stamp.sha256
    return digest_of(found)


def write_record(
    directory: Path,
    *,
    stage: str,
    model: ModelStamp,
    seed: int,
    key: str,
    inputs: dict[str, str],
    summary: dict[str, Any],
    volatile: dict[str, Any],
    apart: frozenset[str] = frozenset(),
) -> StageRecord:
    """Hash every file of the stage's directory and write its record: the last act of a stage.

    `apart` names files that later stages may rewrite and that are therefore left out of the record.
    """
    names = sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in {RECORD, *apart} and not _hidden(path.relative_to(directory))
    )
    files = {
        name: FileStamp(bytes=(directory / name).stat().st_size, sha256=sha256_file(directory / name)) for name in names
    }
    record = StageRecord(
        stage=stage,
        model=model,
        seed=seed,
        key=key,
        inputs=inputs,
        files=files,
        digest=digest_of({name: stamp.sha256 for name, stamp in files.items()}),
        summary=summary,
        volatile=volatile,
    )
    write_json(directory / RECORD, record.model_dump(mode="json"))
    return record


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
