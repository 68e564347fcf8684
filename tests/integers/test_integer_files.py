"""The integer forward as files: replayed by moeq and by a reader that knows only INTEGER.md; damage is named."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from integer_models import made, pixels
from integer_reader import replay as independent_replay
from robustness.fuzzing.mutations import mutate_json
from safetensors.torch import load_file, save_file

from moeq.artifacts.stage import ModelStamp
from moeq.errors import ArtifactError, InternalError, MoeqError
from moeq.inspection import inspect
from moeq.integers.artifacts.integer import KINDS, IntegerManifest
from moeq.integers.forward.description import describe
from moeq.integers.forward.program import pixel_codes
from moeq.integers.forward.replay import replay
from moeq.integers.forward.run import run
from moeq.integers.forward.saved import read, write
from moeq.integers.forward.schemes import program_of
from moeq.recipe import IntegerSection

TEXT = (files("moeq") / "INTEGER.md").read_text("utf-8")
CASES = {
    "moe": ("moe", IntegerSection()),
    "moe, exact, 8 bits": ("moe", IntegerSection(denominator="exact", attention=8)),
    "tasks, log2": ("tasks", IntegerSection(softmax="log2", weights=4)),
    "vit, uniform": ("vit", IntegerSection(softmax="uniform", attention=8)),
    "deit": ("deit", IntegerSection(activations=6)),
}


def written(folder: Path, kind: str, section: IntegerSection, count: int = 2) -> Path:
    model = made(kind)
    vit = describe(model, 1 if kind == "tasks" else 0)
    program = program_of(vit, pixels(model, 16), section)
    values = run(program, pixel_codes(program, pixels(model, count, seed=1)))
    write(folder, program, values, section.model_dump(), ModelStamp(name=kind, digest="0"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("integer") / "out", *CASES["moe"])


@pytest.mark.parametrize("name", CASES)
def test_both_replays_find_every_value_equal(name: str, tmp_path: Path) -> None:
    out = written(tmp_path / "out", *CASES[name])
    found = replay(out)
    assert (found["images"], found["model"]) == (2, CASES[name][0])
    differing, values = independent_replay(out)
    assert differing == []
    assert len(values) == found["values"] > 50
    assert values["logits"].std() > 0


def test_the_independent_reader_sees_a_difference(folder: Path, tmp_path: Path) -> None:
    changed = damaged(folder, tmp_path, lambda data: data["operations"][5]["attributes"].update(bits=7))
    differing, _ = independent_replay(changed)
    assert differing[0] == json.loads((changed / "manifest.json").read_text())["operations"][5]["outputs"]["out"]


def test_inspect_replays(folder: Path) -> None:
    for path in (folder, folder / "manifest.json"):
        found = inspect(path)
        assert found["kind"] == "integer forward of a vision transformer"
        assert found["check"].endswith("every value equals its vector")


def test_the_same_inputs_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = written(tmp_path / "again", *CASES["moe"])
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["manifest.json", "manifest.schema.json", "vectors.safetensors", "weights.safetensors"]
    for name in names:
        assert (folder / name).read_bytes() == (again / name).read_bytes()


def damaged(folder: Path, target: Path, change: Callable[[Any], Any]) -> Path:
    """A copy of a folder whose manifest was changed."""
    copy = target / "copy"
    shutil.copytree(folder, copy)
    data = json.loads((copy / "manifest.json").read_text())
    change(data)
    (copy / "manifest.json").write_text(json.dumps(data))
    return copy


def refused(folder: Path) -> str:
    with pytest.raises(ArtifactError) as error:
        replay(folder)
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith("write the integer forward again")
    return text


@pytest.mark.parametrize("file", ["weights.safetensors", "vectors.safetensors"])
@pytest.mark.parametrize("place", [0.3, 0.7, 0.999])
def test_a_flipped_byte_is_named(folder: Path, tmp_path: Path, file: str, place: float) -> None:
    copy = damaged(folder, tmp_path, lambda data: None)
    data = bytearray((copy / file).read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header + int((len(data) - header) * place)] ^= 1
    (copy / file).write_bytes(bytes(data))
    text = refused(copy)
    assert file in text
    assert "its SHA-256 differs from the manifest" in text


@pytest.mark.parametrize("file", ["weights.safetensors", "vectors.safetensors"])
def test_missing_tensors_and_wrong_shapes_are_named(folder: Path, tmp_path: Path, file: str) -> None:
    copy = damaged(folder, tmp_path, lambda data: None)
    whole = load_file(copy / file)
    name = "blocks.0.up.weight" if file.startswith("weights") else "blocks.0.query"
    save_file({key: tensor for key, tensor in whole.items() if key != name}, copy / file)
    assert f"{file}: {name}: tensor is missing" in refused(copy)
    save_file(whole | {name: whole[name][..., :-1].clone()}, copy / file)
    assert f"{file}: {name}: tensor is I" in refused(copy)
    save_file(whole | {name: whole[name].to(torch.int16)}, copy / file)
    assert f"{file}: {name}: tensor is I16" in refused(copy)
    (copy / file).write_bytes((copy / file).read_bytes()[:-5])
    assert "not a safetensors file (truncated" in refused(copy)
    (copy / file).unlink()
    assert f"file {file} is missing" in refused(copy)


def operation(data: Any, name: str) -> Any:
    return next(one for one in data["operations"] if one["name"] == name)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another shift": (
        lambda data: operation(data, "blocks.0.attention")["attributes"].update(out_shift=20),
        "value blocks.0.attention",
    ),
    "another number of experts": (
        lambda data: operation(data, "blocks.1.router")["attributes"].update(top_k=1),
        "value blocks.1.router.index is [2, 10, 1], the vectors have [2, 10, 2]",
    ),
    "heads that do not divide": (
        lambda data: operation(data, "blocks.0.attention")["attributes"].update(heads=5),
        "its operations do not go together",
    ),
    "an unknown kind": (
        lambda data: operation(data, "patches").update(kind="exec"),
        "operation patches is of no known kind: 'exec'",
    ),
    "a missing attribute": (
        lambda data: operation(data, "patches")["attributes"].clear(),
        "attributes of patches differ from those of its kind: ['patch_size']",
    ),
    "a shift that cannot be": (
        lambda data: operation(data, "blocks.0.attention")["attributes"].update(code_shift=63),
        "code_shift of blocks.0.attention is 63",
    ),
    "a value from nowhere": (
        lambda data: operation(data, "embedding")["inputs"].update(x="patch"),
        "operation embedding uses value 'patch', which is not there before",
    ),
    "two of one name": (lambda data: data["tensors"].append(data["tensors"][0]), "two tensors have one name"),
    "a value too many": (
        lambda data: data["values"].append(data["values"][0] | {"name": "more"}),
        "values differ from what the operations make: ['more']",
    ),
    "another file": (lambda data: data["tensors"][0].update(file="../weights.safetensors"), "not a plain file name"),
    "another version": (lambda data: data.update(schema_version=2), "schema version 2"),
    "another rounding": (lambda data: data.update(rounding="floor"), "rounding is 'floor'"),
    "no operations": (lambda data: data.update(operations=[]), "operations"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_manifest_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    change, message = CHANGES[name]
    assert message in refused(damaged(folder, tmp_path, change))


def test_the_first_value_that_differs_is_named_with_its_place(folder: Path, tmp_path: Path) -> None:
    changed = damaged(folder, tmp_path, lambda data: operation(data, "blocks.0.middle")["attributes"].update(bits=12))
    text = refused(changed)
    assert "value blocks.0.middle differs from its vector in " in text
    _, _, vectors = read(folder)
    wanted = vectors["blocks.0.middle"]
    first = (wanted != wanted.clamp(-2048, 2047)).nonzero()[0].tolist()
    assert f"first at {first}: " in text
    assert text.split("instead of ")[1].startswith(str(int(wanted[tuple(first)])))


def test_a_value_wider_than_its_register_is_never_written(tmp_path: Path) -> None:
    model = made("plain")
    program = program_of(describe(model), pixels(model, 8), IntegerSection())
    values = run(program, pixel_codes(program, pixels(model, 1)))
    values["blocks.0.query"] = values["blocks.0.query"] + 300
    with pytest.raises(InternalError, match=r"blocks\.0\.query leaves its 8 bits"):
        write(tmp_path / "out", program, values, {}, None)
    assert not (tmp_path / "out").exists()


def test_the_document_names_every_kind_attribute_and_key() -> None:
    assert [kind for kind in KINDS if f"**{kind}**" not in TEXT] == []
    prefixes = ("code_", "power_", "out_")
    attributes = {name for kind in KINDS.values() for name in kind.attributes}
    named = {name for name in attributes if f"`{name}`" not in TEXT and not name.startswith(prefixes)}
    assert named - {"multiplier", "shift"} == set()
    schema = IntegerManifest.model_json_schema()
    keys = {name for part in (schema, *schema["$defs"].values()) for name in part["properties"]}
    assert {name for name in keys - {"revision", "digest"} if f"`{name}`" not in TEXT} == set()


def test_the_schema_beside_the_file_is_the_models_own(folder: Path) -> None:
    assert json.loads((folder / "manifest.schema.json").read_text()) == IntegerManifest.model_json_schema()


@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_a_manifest_with_anything_in_it_is_refused_in_one_line_or_still_right(
    folder: Path, tmp_path: Path, seed: int
) -> None:
    copy = damaged(folder, tmp_path, lambda data: None)
    whole = json.loads((copy / "manifest.json").read_text())
    said: list[str] = []
    for number in range(seed, seed + 10):
        (copy / "manifest.json").write_text(json.dumps(mutate_json(whole, random.Random(number))))
        try:
            replay(copy)
        except MoeqError as error:
            said.append(str(error))
    assert said
    assert not any("\n" in text for text in said)
