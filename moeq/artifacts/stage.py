"""stage.json: what a stage was given, what it wrote, and the digests of both.

A stage's `key` is the digest of its inputs (the configuration it reads, the model, the text, the digests of the
artifacts before it); its `digest` is that of the bytes it wrote. Dates and timings stand in `volatile`, outside both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from rich.markup import escape

from moeq.artifacts.digests import Spent, digests_of_files, spent
from moeq.artifacts.files import AGAIN, GONE, digest_of, read_json, write_json
from moeq.artifacts.reading import RelativeName
from moeq.artifacts.run import MAKES
from moeq.errors import ArtifactError, StorageError
from moeq.progress import Reporter
from moeq.recipe.wording import refusal_of
from moeq.version import __version__

SCHEMA_VERSION = 1
RECORD = "stage.json"
QUANTIZED = "quantize"  # the stage whose codes checkpoints hold
EARLIER_FIGURES = {  # of summaries, when bits were those of codes alone
    "average_bits_ndp": "code_bits_ndp",
    "average_bits_all": "code_bits_all",
    "experts_by_bits": "experts_by_code_bits",
    "mixed_experts_matrices_by_bits": "mixed_experts_matrices_by_code_bits",
}
Model = TypeVar("Model", bound=BaseModel)


class Frozen(BaseModel):
    """An artifact in JSON, or a part of one: it has no other keys, and none of them changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelStamp(Frozen):
    """Which model an artifact belongs to: name as given, revision (hub commit or None), digest of its files."""

    name: str
    revision: str | None = None
    digest: str


class FileStamp(Frozen):
    bytes: int
    sha256: str


class StageRecord(Frozen):
    """The record of one finished stage."""

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

    @field_validator("summary")
    @classmethod
    def _by_the_names_of_today(cls, summary: dict[str, Any]) -> dict[str, Any]:
        return {EARLIER_FIGURES.get(name, name): value for name, value in summary.items()}


def check_schema_version(version: Any, expected: int | str, path: Path, *, remedy: str) -> None:
    """ArtifactError when an artifact was written under another schema version."""
    if version != expected:
        what = f"schema version {version!r}, this moeq ({__version__}) reads {expected}"
        raise ArtifactError(what, where=str(path), do=remedy)


def read_model(path: Path, model: type[Model], schema_version: int, *, remedy: str) -> Model:
    """Read a JSON artifact into its model; ArtifactError naming the place when it is missing or damaged."""
    data = read_json(path, remedy=remedy)
    version = data.get("schema_version") if isinstance(data, dict) else None
    check_schema_version(version, schema_version, path, remedy=remedy)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ArtifactError(refusal_of(error, data).sentence(), where=str(path), do=remedy) from None


def read_record(directory: Path, stage: str) -> StageRecord:
    """Read a stage's record; ArtifactError when it is missing, damaged or of another schema version."""
    path = directory / RECORD
    remedy = f"run `moeq {stage}` or `moeq run` to make it again"
    if not path.exists():
        raise ArtifactError("this stage has not been run", where=str(directory), do=remedy)
    return read_model(path, StageRecord, SCHEMA_VERSION, remedy=remedy)


def of_earlier_codes(out: Path) -> list[Path]:
    """A run's checkpoints for other runtimes that were written before its codes were made again; one whose record does
    not say of which they are is none."""
    path = out / QUANTIZED / RECORD
    if not path.is_file():
        return []
    made, found = read_record(out / QUANTIZED, QUANTIZED).digest, []
    for directory in sorted(out.glob("checkpoint-*")):
        if (directory / RECORD).is_file():
            of = read_record(directory, "export").inputs.get(QUANTIZED)
            found += [directory] if of not in (None, made) else []
    return found


def missing_files(directory: Path, record: StageRecord) -> list[str]:
    """Files that a stage wrote, or always writes, and that are not there: such a stage is not finished."""
    always = sorted(MAKES.get(record.stage, frozenset()) - record.files.keys())
    return [name for name in (*record.files, *always) if not (directory / name).is_file()]


def is_current(
    directory: Path,
    stage: str,
    key: str,
    editable: frozenset[str] = frozenset(),
    *,
    cached: bool = True,
    reporter: Reporter | None = None,
) -> bool:
    """Whether the stage was finished with this key and all its files hold what it wrote.

    `editable` files may have been changed by hand: they only have to be there. cached: digests that were taken of these
    very files before will do.
    """
    try:
        record = read_record(directory, stage)
    except ArtifactError:
        return False  # not finished, of another schema version or damaged: `moeq run` makes it again
    return record.key == key and not _changes(directory, record, editable, cached=cached, reporter=reporter)


def damage(directory: Path, stage: str, editable: frozenset[str] = frozenset()) -> list[str]:
    """What is wrong with the files of a finished stage, a phrase each; nothing where it was not finished."""
    if not (directory / RECORD).exists():
        return []
    try:
        record = read_record(directory, stage)
    except ArtifactError as error:
        return [f"{RECORD}: {error.what}"]
    return [
        f"{name} changed since it was written" if (directory / name).is_file() else f"{name} is missing"
        for name in _changes(directory, record, editable, cached=True)
    ]


def edited_files(directory: Path, stage: str, editable: frozenset[str]) -> list[str]:
    """Files of a finished stage that were changed by hand, as they may be."""
    record = read_record(directory, stage)
    there = {name: stamp for name, stamp in record.files.items() if name in editable and (directory / name).is_file()}
    digests = digests_of(directory, there)
    return [name for name, stamp in there.items() if digests[name] != stamp.sha256]


def digests_of(
    directory: Path, names: Iterable[str], *, cached: bool = True, reporter: Reporter | None = None
) -> dict[str, str]:
    """SHA-256 of files of a directory."""
    paths = {name: directory / name for name in names}
    digests = digests_of_files(
        paths.values(), cached=cached, reporter=reporter, title=f"checking {escape(directory.name)}"
    )
    return {name: digests[path] for name, path in paths.items()}


def _changes(
    directory: Path,
    record: StageRecord,
    editable: frozenset[str],
    *,
    cached: bool,
    reporter: Reporter | None = None,
) -> list[str]:
    """Files that are missing, or have another size or digest; those that may be edited only have to be there."""
    changed: list[str] = missing_files(directory, record)
    same_size: list[str] = []
    for name in [name for name in record.files if name not in {*changed, *editable}]:
        same = (directory / name).stat().st_size == record.files[name].bytes
        (same_size if same else changed).append(name)
    now = digests_of(directory, same_size, cached=cached, reporter=reporter)
    return changed + [name for name in same_size if now[name] != record.files[name].sha256]


def current_digest(
    directory: Path,
    stage: str,
    editable: frozenset[str] = frozenset(),
    *,
    cached: bool = True,
    reporter: Reporter | None = None,
) -> str:
    """Digest of what a stage's files hold now: hand edits of those that may be edited reach later stages.

    cached: where nothing of them is read, digests that were taken of these very files before will do. Raises
    ArtifactError naming the first file that is missing, or is not editable and not what the stage wrote.
    """
    record = read_record(directory, stage)
    again = f"run `moeq {stage}` again"
    for name in missing_files(directory, record):
        raise ArtifactError("file is missing", where=str(directory / name), do=again)
    for name, stamp in record.files.items():
        path = directory / name
        if name not in editable and path.stat().st_size != stamp.bytes:
            raise ArtifactError("changed since the stage wrote it", where=str(path), do=again)
    digests = digests_of(directory, record.files, cached=cached, reporter=reporter)
    for name, digest in digests.items():
        if name not in editable and digest != record.files[name].sha256:
            raise ArtifactError("changed since the stage wrote it", where=str(directory / name), do=again)
    return digest_of(digests)


def check_files(
    directory: Path,
    record: StageRecord,
    known: Mapping[str, str] | None = None,
    reporter: Reporter | None = None,
    editable: frozenset[str] = frozenset(),
) -> None:
    """Compare a directory with the record of its stage; ArtifactError at the first file that is missing or changed.

    known: digests of files that were just read; editable: files that only have to be there.
    """
    stage = record.stage.partition("-")[0]  # export-gguf is of export
    again = f"run `moeq {stage}` again"
    for name in missing_files(directory, record):
        raise ArtifactError("missing since the stage wrote it", where=str(directory / name), do=again)
    rest = [name for name in record.files if name not in {*(known or {}), *editable}]
    digests = {**(known or {}), **digests_of(directory, rest, cached=False, reporter=reporter)}
    for name, stamp in record.files.items():
        if name not in editable and digests[name] != stamp.sha256:
            raise ArtifactError("changed since the stage wrote it", where=str(directory / name), do=again)


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
    before: Spent | None = None,
) -> StageRecord:
    """Write the record of a stage with the digests of all its files: the last act of a stage.

    `apart` names files that later stages may rewrite and that are therefore left out of the record. before: what
    hashing had taken when the stage began, for `volatile`. Raises StorageError where a file that the stage always
    writes is gone.
    """
    for name in sorted(MAKES.get(stage, frozenset())):
        if not (directory / name).is_file():
            raise StorageError(GONE, where=str(directory / name), do=AGAIN)
    names = sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in {RECORD, *apart} and not _hidden(path.relative_to(directory))
    )
    digests = digests_of(directory, names)
    files = {name: FileStamp(bytes=(directory / name).stat().st_size, sha256=digests[name]) for name in names}
    if before is not None:
        took = spent().since(before)
        volatile = volatile | {"hashed_bytes": took.bytes, "hashing_seconds": round(took.seconds, 3)}
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
