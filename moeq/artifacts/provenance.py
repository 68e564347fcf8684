"""provenance.json: of what, with what and how a checkpoint was made, as an in-toto statement with SLSA provenance.

https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
https://slsa.dev/spec/v1.0/provenance

The same inputs give the same bytes: there are no times, hosts or paths in it. It is a claim of whoever wrote the
checkpoint, not a proof; a signature (model.sig) says whose claim it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote, unquote

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moeq.artifacts.digests import digests_of_files
from moeq.artifacts.files import digest_of, write_json
from moeq.artifacts.reading import PlainName, read_json_file
from moeq.artifacts.sums import BESIDE, Sums, check_sums
from moeq.artifacts.sums import NAME as SUMS
from moeq.bounded import shortened
from moeq.errors import ArtifactError, missing
from moeq.progress import Reporter
from moeq.recipe.wording import refusal_of

NAME = "provenance.json"
NO_SUBJECTS = BESIDE | {NAME}
MAX_BYTES = 64 << 20  # of a checkpoint of 100,000 files
RUN: Final = "urn:moeq:checkpoint:1"
CONVERSION: Final = "urn:moeq:conversion:1"
MODEL, TEXT, HARDWARE, CHECKPOINT = "model/", "text/", "hardware/", "checkpoint/"  # how names of dependencies begin
CALIBRATION = "calibration"  # the name of one: all that decides the calibration text
PYPI = "pkg:pypi/"
REMEDY = "download the checkpoint, or write it, again"
_PACKAGE = re.compile(rf"{PYPI}([a-z0-9-]+)@([^@]+)")

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Text = Annotated[str, Field(min_length=1, max_length=4096)]


class Part(BaseModel):
    """A part of the statement: it has no other keys, and none of them changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)


class Digests(Part):
    """sha256: of a file's bytes; gitCommit: of a repository on the hub; moeq: its own, of what is no single file."""

    sha256: Sha256 | None = None
    git_commit: Text | None = Field(None, alias="gitCommit")
    own: Sha256 | None = Field(None, alias="moeq")


class Subject(Part):
    """A file of the checkpoint."""

    name: PlainName
    digest: Digests

    @model_validator(mode="after")
    def _has_sha256(self) -> Subject:
        if self.digest.sha256 is None:
            raise ValueError("a subject without sha256")
        return self


class Resource(Part):
    """What went in, or was made on the way: a file by its name and digest, a package by its uri alone."""

    name: Text | None = None
    uri: Text | None = None
    digest: Digests | None = None


class NamedModel(Part):
    """A model, or a checkpoint, by its id on the hub or the last part of its path; revision: the hub's commit."""

    name: Text
    revision: Text | None = None


class Parameters(Part):
    """What the user asked for.

    recipe: the effective one, but for what shapes no byte of a checkpoint (eval, gates, store and others), its model,
    texts and hardware by name; texts: what calibrated, in the recipe's order; runtime: whose format this is, `moeq` of
    the native one. Of a conversion: checkpoint, what was converted, and widen.
    """

    runtime: Text
    model: NamedModel | None = None
    texts: list[Text] = []
    recipe: dict[str, Any] | None = None
    checkpoint: NamedModel | None = None
    widen: bool | None = None


class BuildDefinition(Part):
    build_type: Literal["urn:moeq:checkpoint:1", "urn:moeq:conversion:1"] = Field(alias="buildType")
    parameters: Parameters = Field(alias="externalParameters")
    dependencies: list[Resource] = Field(alias="resolvedDependencies")

    @model_validator(mode="after")
    def _is_whole(self) -> BuildDefinition:
        given, run = self.parameters, self.build_type == RUN
        if run and (given.recipe is None or given.model is None):
            raise ValueError("a run without its recipe or its model")
        if not run and given.checkpoint is None:
            raise ValueError("a conversion without its checkpoint")
        return self


class Builder(Part):
    """version: of moeq and Python, and the machine's instructions, device and threads, which decide last digits."""

    id: Literal["urn:moeq:builder"] = "urn:moeq:builder"
    version: dict[Text, Text]


class RunDetails(Part):
    """byproducts: what the stages before the export wrote: each by its name and the digest in its record."""

    builder: Builder
    byproducts: list[Resource] = []


class Predicate(Part):
    definition: BuildDefinition = Field(alias="buildDefinition")
    details: RunDetails = Field(alias="runDetails")


class Statement(Part):
    """The whole of provenance.json."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field("https://in-toto.io/Statement/v1", alias="_type")
    predicate_type: Literal["https://slsa.dev/provenance/v1"] = Field(
        "https://slsa.dev/provenance/v1", alias="predicateType"
    )
    subject: list[Subject] = Field(min_length=1)
    predicate: Predicate

    @model_validator(mode="after")
    def _names_once(self) -> Statement:
        names = [subject.name for subject in self.subject]
        if names != sorted(set(names)):
            raise ValueError("subjects that are not in the order of their names, or are there twice")
        return self

    @property
    def parameters(self) -> Parameters:
        return self.predicate.definition.parameters

    @property
    def files(self) -> dict[str, str]:
        """{file of the checkpoint: SHA-256}."""
        return {subject.name: str(subject.digest.sha256) for subject in self.subject}

    def dependencies(self, kind: str) -> list[tuple[str, Digests]]:
        """(name, digests) of what went in: MODEL, TEXT, HARDWARE or CHECKPOINT; two texts may have the same name."""
        each = ((one.name or "", one.digest or Digests()) for one in self.predicate.definition.dependencies)
        return [(name.removeprefix(kind), digests) for name, digests in each if name.startswith(kind)]

    def sha256_of(self, kind: str) -> dict[str, str]:
        """{file: SHA-256} of `dependencies` whose names are unique: of the model, or of a checkpoint."""
        return {name: digests.sha256 for name, digests in self.dependencies(kind) if digests.sha256 is not None}

    @property
    def packages(self) -> dict[str, str]:
        """{package: version}."""
        matches = (_PACKAGE.fullmatch(resource.uri or "") for resource in self.predicate.definition.dependencies)
        return {match[1]: unquote(match[2]) for match in matches if match is not None}

    @property
    def byproducts(self) -> dict[str, str]:
        """{stage: digest of what it wrote}."""
        made = self.predicate.details.byproducts
        return {str(one.name): str(one.digest.own) for one in made if one.digest is not None}

    def as_json(self) -> dict[str, Any]:
        """As it stands in the file: what is not there is left out, but for the recipe's own nulls."""
        data = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        if self.parameters.recipe is not None:
            data["predicate"]["buildDefinition"]["externalParameters"]["recipe"] = self.parameters.recipe
        return data


def read_provenance(directory: Path) -> Statement | None:
    """The statement of a checkpoint, None where it has none; ArtifactError where it cannot be read.

    The files are not looked at: `check_subjects` compares their digests.
    """
    path = directory / NAME
    try:
        data = read_json_file(path, most=MAX_BYTES)
        return Statement.model_validate(data)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ArtifactError(refusal_of(error, data).sentence(), where=str(path), do=REMEDY) from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot be read as JSON ({error})", where=str(path), do=REMEDY) from None


@dataclass(frozen=True, kw_only=True)
class Making:
    """How a checkpoint was made: the statement without the files that came of it."""

    definition: BuildDefinition
    details: RunDetails

    def statement(self, digests: Mapping[str, str]) -> Statement:
        """The statement about files of which these are the digests."""
        subjects = [Subject(name=name, digest=Digests(sha256=digests[name])) for name in sorted(digests)]
        return Statement(subject=subjects, predicate=Predicate(definition=self.definition, details=self.details))

    def write(self, directory: Path) -> None:
        """Write the statement of a checkpoint that is complete but for its sums and its card."""
        paths = sorted(path for path in directory.iterdir() if path.is_file() and path.name not in NO_SUBJECTS)
        digests = digests_of_files(paths, cached=True)
        write_json(directory / NAME, self.statement({path.name: digests[path] for path in paths}).as_json())


def check_provenance(directory: Path, sums: Sums | None) -> Statement | None:
    """The statement of a checkpoint, compared with the digests that were just checked; None where it has none.

    sums: None where there are none; then nothing was taken that could be compared, and a file of this name may be
    another tool's. Raises ArtifactError for a statement that cannot be read, that SHA256SUMS does not list, or that
    says other of a file.
    """
    statement = None if sums is None else read_provenance(directory)
    if sums is None or statement is None:
        return None
    if NAME not in sums.files:
        raise ArtifactError(f"{SUMS} does not list it", where=str(directory / NAME), do=REMEDY)
    check_subjects(statement, sums.files, directory)
    return statement


def check_listed(directory: Path, reporter: Reporter | None = None) -> tuple[Sums | None, Statement | None]:
    """Compare a checkpoint with its sums and its provenance, reading every file; None for each that it has not.

    ArtifactError as `check_sums` and `check_provenance` raise it, and for code and weights that the sums do not list.
    """
    sums = check_sums(directory, reporter=reporter)
    if sums is not None:
        sums.require_inactive(directory)
    return sums, check_provenance(directory, sums)


def words(statement: Statement | None) -> str:
    """What a provenance names, on one line: model, recipe and version, or what was converted."""
    if statement is None:
        return f"not said by a {NAME} that {SUMS} covers: an older moeq, or another tool, made it"
    given, version = statement.parameters, statement.predicate.details.builder.version.get("moeq", "of no version")
    if given.checkpoint is not None:
        return f"converted for {given.runtime} from {_called(given.checkpoint)} by moeq {version}"
    recipe = digest_of(given.recipe)
    return f"from {_called(given.model)} by moeq {version}, recipe {recipe[:16]}"


def described(path: Path) -> dict[str, Any]:
    """What a provenance names; ArtifactError where it is none. The checkpoint's files are not read."""
    statement = read_provenance(path.parent)
    if statement is None:
        raise missing(path, REMEDY)
    return {
        "kind": "provenance",
        "made": words(statement),
        "packages": statement.packages,
        "files": len(statement.files),
        "check": f"no file that it names was read; moeq inspect {path.parent} reads them",
    }


def _called(model: NamedModel | None) -> str:
    """A model's name with its revision, on one line however it is written."""
    if model is None:
        return "no model"
    return shortened(model.name if model.revision is None else f"{model.name}@{model.revision}")


def check_subjects(statement: Statement, digests: Mapping[str, str], directory: Path) -> None:
    """ArtifactError for the first file of which the statement says other than its digest, taken by the caller.

    digests: of the checkpoint's files, those that are never subjects among them or not.
    """
    stated = statement.files
    for name in sorted({*stated, *digests} - NO_SUBJECTS):
        if stated.get(name) != digests.get(name):
            what = "does not list it" if name not in stated else "has another digest of it"
            what = f"{NAME} names it, and it is not among the files" if name not in digests else f"{NAME} {what}"
            raise ArtifactError(what, where=str(directory / name), do=REMEDY)


def files_as(kind: str, digests: Mapping[str, str]) -> list[Resource]:
    """Dependencies from {file: SHA-256}; kind: what their names begin with."""
    return [Resource(name=f"{kind}{name}", digest=Digests(sha256=digests[name])) for name in sorted(digests)]


def packages_as(versions: Iterable[tuple[str, str]]) -> list[Resource]:
    """Dependencies from (package, version)."""
    named = ((name.replace("_", "-").lower(), quote(version)) for name, version in sorted(versions))
    return [Resource(uri=f"{PYPI}{name}@{version}") for name, version in named]
