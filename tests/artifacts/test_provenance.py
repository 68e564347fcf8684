"""provenance.json: what it refuses, and what it says of the files beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeq.artifacts.provenance import (
    CHECKPOINT,
    CONVERSION,
    MODEL,
    NAME,
    RUN,
    TEXT,
    BuildDefinition,
    Builder,
    Digests,
    Making,
    NamedModel,
    Parameters,
    Resource,
    RunDetails,
    check_provenance,
    files_as,
    packages_as,
    read_provenance,
    words,
)
from moeq.artifacts.sums import check_sums, write_sums
from moeq.errors import ArtifactError

MAKING = Making(
    definition=BuildDefinition(
        build_type=RUN,
        parameters=Parameters(
            runtime="native", model=NamedModel(name="org/model", revision="abc"), texts=["a.txt"], recipe={"seed": None}
        ),
        dependencies=[
            *files_as(MODEL, {"model.safetensors": "1" * 64, "config.json": "2" * 64}),
            Resource(name=f"{TEXT}a.txt", digest=Digests(sha256="3" * 64)),
            Resource(name=f"{TEXT}a.txt", digest=Digests(sha256="4" * 64)),
            *packages_as([("torch", "2.13.0+cpu"), ("Some_Package", "1")]),
        ],
    ),
    details=RunDetails(
        builder=Builder(version={"moeq": "0.1.0"}), byproducts=[Resource(name="profile", digest=Digests(own="5" * 64))]
    ),
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / name).write_text(name)
    MAKING.write(tmp_path)
    write_sums(tmp_path)
    return tmp_path


def test_what_was_written_is_read(checkpoint: Path) -> None:
    statement = check_provenance(checkpoint, check_sums(checkpoint))
    assert statement == read_provenance(checkpoint)
    assert statement is not None
    assert set(statement.files) == {"config.json", "model.safetensors"}, "not the card, which people edit, nor itself"
    assert statement.sha256_of(MODEL) == {"config.json": "2" * 64, "model.safetensors": "1" * 64}
    assert [digests.sha256 for _, digests in statement.dependencies(TEXT)] == ["3" * 64, "4" * 64]
    assert statement.packages == {"torch": "2.13.0+cpu", "some-package": "1"}
    assert statement.byproducts == {"profile": "5" * 64}
    assert statement.parameters.recipe == {"seed": None}
    assert words(statement).startswith("from org/model@abc by moeq 0.1.0, recipe ")
    data = json.loads((checkpoint / NAME).read_text("utf-8"))
    assert data["_type"] == "https://in-toto.io/Statement/v1"
    assert data["predicateType"] == "https://slsa.dev/provenance/v1"
    assert {"uri": "pkg:pypi/torch@2.13.0%2Bcpu"} in data["predicate"]["buildDefinition"]["resolvedDependencies"]
    before = (checkpoint / NAME).read_bytes()
    (checkpoint / NAME).unlink()
    MAKING.write(checkpoint)
    assert (checkpoint / NAME).read_bytes() == before


def test_none_is_none(tmp_path: Path) -> None:
    assert check_provenance(tmp_path, None) is None
    assert (
        words(None) == "not said by a provenance.json that SHA256SUMS covers: an older moeq, or another tool, made it"
    )
    (tmp_path / NAME).write_text('{"made": "by another tool"}')
    assert check_provenance(tmp_path, None) is None


def put(data: dict[str, Any], value: Any, *path: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


PARTS = ("predicate", "buildDefinition")
GIVEN = (*PARTS, "externalParameters")
HOSTILE: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "another type": ("_type", lambda data: put(data, "https://in-toto.io/Statement/v2", "_type")),
    "another predicate": ("predicateType", lambda data: put(data, "x", "predicateType")),
    "another key": ("more", lambda data: put(data, 1, "more")),
    "no subjects": ("subject", lambda data: put(data, [], "subject")),
    "a path": ("not a plain file name", lambda data: put(data, "../x", "subject", 0, "name")),
    "a subject twice": ("there twice", lambda data: put(data, data["subject"][0], "subject", 1)),
    "no sha256": ("without sha256", lambda data: put(data, {"gitCommit": "x"}, "subject", 0, "digest")),
    "no digest": ("digest", lambda data: put(data, {"sha256": "X" * 64}, "subject", 0, "digest")),
    "another algorithm": ("md5", lambda data: put(data, {"md5": "x"}, "subject", 0, "digest")),
    "another build": ("buildType", lambda data: put(data, "urn:other", *PARTS, "buildType")),
    "a run without recipe": (
        "without its recipe",
        lambda data: put(data, None, *GIVEN, "recipe"),
    ),
    "a conversion of nothing": ("without its checkpoint", lambda data: put(data, CONVERSION, *PARTS, "buildType")),
    "a number as a name": ("name", lambda data: put(data, 1, *PARTS, "resolvedDependencies", 0, "name")),
    "a long name": ("name", lambda data: put(data, "x" * 5000, *PARTS, "resolvedDependencies", 0, "name")),
    "another builder": ("builder", lambda data: put(data, "urn:x", "predicate", "runDetails", "builder", "id")),
    "a list": ("version", lambda data: put(data, [], "predicate", "runDetails", "builder", "version")),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_statement_is_refused_in_one_line(checkpoint: Path, case: str) -> None:
    word, change = HOSTILE[case]
    data = json.loads((checkpoint / NAME).read_text("utf-8"))
    change(data)
    (checkpoint / NAME).write_text(json.dumps(data))
    write_sums(checkpoint)
    with pytest.raises(ArtifactError) as caught:
        check_provenance(checkpoint, check_sums(checkpoint))
    assert str(checkpoint / NAME) in str(caught.value)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", "[" * 100_000, '{"a": 1, "a": 2}', "\udcff", "NaN"])
def test_what_is_no_json_is_refused_in_one_line(checkpoint: Path, text: str) -> None:
    (checkpoint / NAME).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ArtifactError, match=NAME) as caught:
        read_provenance(checkpoint)
    assert "\n" not in str(caught.value)


def test_a_statement_that_does_not_agree_with_the_files_is_refused(checkpoint: Path) -> None:
    def refusal() -> str:
        write_sums(checkpoint)
        with pytest.raises(ArtifactError) as caught:
            check_provenance(checkpoint, check_sums(checkpoint))
        return str(caught.value)

    (checkpoint / "model.safetensors").write_text("other")
    assert refusal().startswith(f"{checkpoint / 'model.safetensors'}: provenance.json has another digest of it; ")
    (checkpoint / "model.safetensors").unlink()
    line = f"{checkpoint / 'model.safetensors'}: provenance.json names it, and it is not among the files; "
    assert refusal().startswith(line)
    (checkpoint / "model.safetensors").write_text("model.safetensors")
    (checkpoint / "more.json").write_text("{}")
    assert refusal().startswith(f"{checkpoint / 'more.json'}: provenance.json does not list it; ")
    (checkpoint / "more.json").unlink()
    sums = (checkpoint / "SHA256SUMS").read_text("utf-8").splitlines(keepends=True)
    (checkpoint / "SHA256SUMS").write_text("".join(line for line in sums if NAME not in line and "more" not in line))
    with pytest.raises(ArtifactError, match=rf"{NAME}: SHA256SUMS does not list it"):
        check_provenance(checkpoint, check_sums(checkpoint))
    (checkpoint / "SHA256SUMS").unlink()
    assert check_provenance(checkpoint, check_sums(checkpoint)) is None, "nothing was compared"


def test_a_conversion_names_its_checkpoint() -> None:
    given = Parameters(runtime="vllm", checkpoint=NamedModel(name="checkpoint"), widen=False)
    files = files_as(CHECKPOINT, {"a": "1" * 64})
    definition = BuildDefinition(build_type=CONVERSION, parameters=given, dependencies=files)
    made = Making(definition=definition, details=RunDetails(builder=Builder(version={"moeq": "0.1.0"})))
    assert words(made.statement({"b": "2" * 64})) == "converted for vllm from checkpoint by moeq 0.1.0"
