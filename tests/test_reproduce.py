"""moeq reproduce: the same bytes from other places; what was edited, or is not at hand, is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moeq import api, pipeline
from moeq.artifacts.files import locked, write_json
from moeq.artifacts.provenance import NAME, read_provenance
from moeq.artifacts.run import STORE_VARIABLE
from moeq.artifacts.sums import write_sums
from moeq.artifacts.tensor_files import write_tensors
from moeq.cli import app
from moeq.errors import CorpusError, GateError, RecipeError, StorageError
from moeq.models import loading
from moeq.pipeline import run
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.reproduction import again
from moeq.reproduction.differences import _difference, _keys
from moeq.reproduction.matching import _texts
from moeq.stages.context import Context
from moeq.stages.order import Stage
from moeq_kernels.packed import PackedWeight, packed_shapes
from moeq_kernels.packing import pack
from moeq_kernels.widths import Encoding

MAKING = ("reparam", "profile", "losses", "assign", "quantize", "export")
QUIET = Reporter(quiet=True)
LESS = {
    "corpus": {"sequences": 6, "sequence_length": 24, "shuffle": True},
    "losses": {"methods": ["gptq"], "group_size": 16},
    "assign": {"code_bits": 2},
    "eval": {"perplexity": {"sequences": 2, "sequence_length": 24}, "compare": []},
    "export": {"verify": False},
}


def made_of(model: Path | str, out: Path, recipe: dict[str, Any]) -> Path:
    """A checkpoint of a recipe, without what no checkpoint needs."""
    context = Context(recipe=load_recipe(recipe), model_name=str(model), out=out, reporter=QUIET)
    run(context, MAKING)
    return out / "checkpoint"


def rows(path: Path, first: int, last: int) -> Path:
    """A text of numbered documents."""
    documents = (
        f"Number {number} of {last}: {number**5} is {number} to the fifth power. " for number in range(first, last)
    )
    path.write_text("".join(json.dumps({"text": document * 3}) + "\n" for document in documents), "utf-8")
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_mixtral: Path) -> Path:
    """A run on a text of its own, and model and text again under other names."""
    folder = tmp_path_factory.mktemp("reproduce")
    text = rows(folder / "numbers.jsonl", 0, 60)
    made_of(tiny_mixtral, folder / "run", LESS | {"corpus": LESS["corpus"] | {"source": str(text)}})
    shutil.copytree(tiny_mixtral, folder / "downloaded")
    shutil.copyfile(text, folder / "a text.dat")
    return folder


@pytest.fixture
def checkpoint(home: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(home / "run" / "checkpoint", tmp_path / "checkpoint"))


def edit(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the statement as somebody would who then wrote the digests anew; change: is given buildDefinition."""
    statement = json.loads((checkpoint / NAME).read_text("utf-8"))
    change(statement["predicate"]["buildDefinition"])
    write_json(checkpoint / NAME, statement)
    write_sums(checkpoint)


def set_recipe(definition: dict[str, Any], **keys: Any) -> None:
    definition["externalParameters"]["recipe"] |= keys


def reproduce(home: Path, checkpoint: Path, **options: Any) -> again.Reproduction:
    given = {"model": home / "downloaded", "texts": [home / "a text.dat"], "quiet": True} | options
    return api.reproduce(checkpoint, **given)


def test_the_same_bytes_under_other_names(
    home: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "shared"))
    before = {path.name for path in checkpoint.parent.iterdir()}
    found = reproduce(home, checkpoint)
    assert found.is_equal
    assert set(found.equal) == {path.name for path in checkpoint.iterdir()} - {
        NAME, "SHA256SUMS", "README.md", "stage.json",
    }  # fmt: skip
    assert (found.stage, found.notes, found.out) == (None, (), None)
    assert list(found.lines())[-1] == f"the same {len(found.equal)} files, byte by byte"
    assert {path.name for path in checkpoint.parent.iterdir()} == before, "the run went, and no other store was used"
    kept = reproduce(home, checkpoint, out=tmp_path / "kept")
    assert kept.out == tmp_path / "kept"
    assert (kept.remade / NAME).read_bytes() == (checkpoint / NAME).read_bytes()
    assert not (tmp_path / "kept" / "eval").exists()


def test_another_seed_in_the_statement_is_told_with_how_far_it_leads(home: Path, checkpoint: Path) -> None:
    edit(checkpoint, lambda definition: set_recipe(definition, seed=5))
    found = reproduce(home, checkpoint)
    assert not found.is_equal
    assert found.stage == "profile"
    assert "another calibration text" in found.notes[0]
    assert {"experts-layer-000.safetensors", "placement.json"} <= {one.file for one in found.files}
    assert not {one.file for one in found.files} & set(found.equal)
    packed = [one for one in found.matrices if one.codes is not None]
    assert all(one.layer and one.expert is not None and one.projection for one in packed)
    assert any(0 < one.codes[0] < one.codes[1] for one in packed if one.codes)
    assert all(one.relative is not None and one.max_abs for one in packed)
    errors = [one.relative for one in found.matrices if one.relative is not None]
    assert errors == sorted(errors, reverse=True)
    text = "\n".join(found.lines())
    assert "first to differ: profile" in text
    assert "codes differ, values by up to" in text
    first = found.out / "profile" / "stage.json" if found.out else Path()
    written = first.stat().st_mtime_ns
    words = ["reproduce", str(checkpoint), "--model", str(home / "downloaded"), "--text", str(home / "a text.dat")]
    result = CliRunner().invoke(app, [*words, "--json", "--quiet"])
    assert result.exit_code == GateError.exit_code
    shown = json.loads(result.stdout)
    assert shown["stage"] == "profile"
    assert len(shown["matrices"]) == len(found.matrices)
    assert first.stat().st_mtime_ns == written, "what was made is not made again"


def test_a_statement_whose_recipe_gives_the_same_files_by_other_results_is_told(home: Path, checkpoint: Path) -> None:
    def change(definition: dict[str, Any]) -> None:
        own = next(one for one in definition["resolvedDependencies"] if one.get("name") == "calibration")
        own["digest"]["moeq"] = "0" * 64

    edit(checkpoint, change)
    found = reproduce(home, checkpoint)
    assert found.is_equal
    assert found.notes == ("its recipe and texts give another calibration text than the provenance states",)


def test_an_assignment_that_was_edited_by_hand_is_in_no_recipe(home: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "run", tmp_path / "run")
    path = tmp_path / "run" / "assign" / "assignment.json"
    assignment = json.loads(path.read_text("utf-8"))
    expert = assignment["layers"][0]["experts"][0]
    expert["bits"], expert["projections"] = 8 if expert["bits"] != 8 else 4, None
    path.write_text(json.dumps(assignment), "utf-8")
    text = LESS["corpus"] | {"source": str(home / "numbers.jsonl")}
    edited = made_of(tiny_mixtral, tmp_path / "run", LESS | {"corpus": text})
    found = reproduce(home, edited)
    assert found.stage == "assign"
    assert {(one.layer, one.expert) for one in found.matrices} == {("model.layers.0.mlp.experts", 0)}
    assert all("8 bits" in str(one.what) for one in found.matrices)


def test_other_versions_are_named(home: Path, checkpoint: Path) -> None:
    def change(definition: dict[str, Any]) -> None:
        torch = next(one for one in definition["resolvedDependencies"] if "torch@" in one.get("uri", ""))
        torch["uri"] = "pkg:pypi/torch@1.0"
        definition["resolvedDependencies"].append({"uri": "pkg:pypi/no-such-package@2%1B"})

    edit(checkpoint, change)
    found = reproduce(home, checkpoint)
    assert found.is_equal
    assert f"torch 1.0, here {version('torch')}; no-such-package 2\\u001b, here not installed" in found.notes[0]


@pytest.mark.parametrize(("stated", "more"), [("4", True), ("5000", False), ("many", False)])
def test_as_many_threads_compute_as_the_statement_has(
    home: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stated: str, more: bool
) -> None:
    """Sums are divided by them: a machine with another number of cores gave other bytes, and nothing said why."""
    before, seen, said = torch.get_num_threads(), [], []

    def stop(*_: object, **__: object) -> None:
        seen.append(torch.get_num_threads())
        raise RecipeError("enough")

    monkeypatch.setattr("moeq.reproduction.again.pipeline.run", stop)
    monkeypatch.setattr(Reporter, "say", lambda _, text: said.append(text))
    statement = json.loads((checkpoint / NAME).read_text("utf-8"))
    builder = statement["predicate"]["runDetails"]["builder"]
    assert builder["version"]["threads"] == str(before)
    builder["version"]["threads"] = stated
    write_json(checkpoint / NAME, statement)
    write_sums(checkpoint)
    with pytest.raises(RecipeError, match="enough"):
        reproduce(home, checkpoint)
    assert (seen, torch.get_num_threads()) == ([4 if more else before], before)
    assert any(f"threads {stated}, here {before}" in text for text in said) != more


def test_stages_compute_with_as_many_threads_as_each_of_them_had(
    home: Path, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that went on with another number of cores the provenance knew the export's alone."""
    text = LESS["corpus"] | {"source": str(home / "numbers.jsonl")}
    for threads, last in ((2, "profile"), (3, "losses"), (1, "quantize")):
        recipe = load_recipe(LESS | {"corpus": text, "threads": threads})
        context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=tmp_path / "run", reporter=QUIET)
        run(context, MAKING[: MAKING.index(last) + 1])
    noted = json.loads((tmp_path / "run" / "quantize" / "stage.json").read_text("utf-8"))
    assert noted["volatile"].pop("threads") == 1
    write_json(tmp_path / "run" / "quantize" / "stage.json", noted)  # as an older version leaves it
    made = made_of(tiny_mixtral, tmp_path / "run", LESS | {"corpus": text, "threads": 1})
    version = json.loads((made / NAME).read_text("utf-8"))["predicate"]["runDetails"]["builder"]["version"]
    stated = {name: count for name, count in version.items() if name.startswith("threads")}
    assert stated == {"threads": "1", "threads of profile": "2", "threads of losses": "3"}
    seen, stage = {}, pipeline.run_stage

    def counted(context: Context, asked: Stage, **how: Any) -> pipeline.Outcome:
        seen[asked.name] = torch.get_num_threads()
        return stage(context, asked, **how)

    monkeypatch.setattr(pipeline, "run_stage", counted)
    found = reproduce(home, made, out=tmp_path / "kept")
    assert seen == {"profile": 2, "losses": 3, "assign": 1, "quantize": 1, "export": 1}
    assert (found.is_equal, found.notes) == (True, ())
    assert (found.remade / NAME).read_bytes() == (made / NAME).read_bytes()


def test_a_file_that_was_changed_with_all_its_digests(home: Path, checkpoint: Path) -> None:
    """As somebody would who passes other weights off for what the recipe gives."""
    from safetensors.torch import load_file, save_file

    name = "model-00001-of-00001.safetensors"
    tensors = load_file(checkpoint / name)
    tensors["lm_head.weight"][3, 4] += 0.5
    save_file(tensors, checkpoint / name, {"format": "pt"})
    statement = json.loads((checkpoint / NAME).read_text("utf-8"))
    (checkpoint / NAME).unlink()
    write_sums(checkpoint)
    sums = dict(line.split("  ")[::-1] for line in (checkpoint / "SHA256SUMS").read_text().splitlines())
    for subject in statement["subject"]:
        subject["digest"]["sha256"] = sums[subject["name"]]
    write_json(checkpoint / NAME, statement)
    write_sums(checkpoint)
    found = reproduce(home, checkpoint)
    assert [(one.file, one.what) for one in found.files] == [(name, ("lm_head.weight",))]
    assert found.stage == "export", "all stages wrote what the statement says"
    (matrix,) = found.matrices
    assert (matrix.name, matrix.codes, matrix.max_abs) == ("lm_head.weight", None, pytest.approx(0.5))
    assert found.error().exit_code == GateError.exit_code
    assert "made again, 1 of 11 files differ, from export on" in str(found.error())


@pytest.mark.full
def test_sizes_weights_of_sources_stores_and_other_formats(
    home: Path, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of one name, one of them called after its folder; a size, which names in the card are part of."""
    for folder, first in (("questions", 0), ("code", 30)):
        (tmp_path / folder).mkdir()
        rows(tmp_path / folder / "train.jsonl", first, first + 30)
    monkeypatch.chdir(tmp_path)
    sources = [{"path": "questions/train.jsonl", "weight": 2}, {"path": "code/train.jsonl", "weight": 1}, "bundled"]
    compared = [{"name": "all-of-eight-bits", "method": "uniform", "bits": 8}]
    recipe = LESS | {
        "store": str(tmp_path / "shared"),
        "corpus": LESS["corpus"] | {"source": sources},
        "losses": {"methods": ["rtn"], "group_size": 16, "bits": [4, 8]},
        "assign": {"method": "optimal", "size": "990KB", "quantizer": "rtn"},
        "eval": {"perplexity": None, "compare": [one | {"quantizer": "rtn"} for one in compared]},
        "export": {"verify": False, "formats": ["dequantized"]},
    }
    native = made_of(tiny_mixtral, tmp_path / "run", recipe)
    texts = [tmp_path / "two.txt", tmp_path / "one.txt"]
    for text, folder in zip(texts, ("code", "questions"), strict=True):
        (tmp_path / folder / "train.jsonl").rename(text)
    for checkpoint in (native, tmp_path / "run" / "checkpoint-dequantized"):
        found = reproduce(home, checkpoint, texts=texts)
        assert found.is_equal, list(found.lines())
        assert found.notes == (), "domains are called as they were"


@pytest.mark.cases(1)
@pytest.mark.parametrize("streamed", [True, False])
def test_scales_are_trained_layer_by_layer_or_not_again_whatever_the_memory(
    streamed: bool, home: Path, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What older versions made does not say which it was: that is told."""
    recipe = LESS | {"corpus": LESS["corpus"] | {"sequences": 8}, "quantize": {"tune": {"steps": 2}}}
    sizes = (1 << 60, loading.loaded_bytes) if streamed else (0, lambda *_: 1 << 60)
    with monkeypatch.context() as there:
        there.setattr(loading, "loaded_bytes", lambda *_: sizes[0])
        made = made_of(tiny_mixtral, tmp_path / "run", recipe)
    monkeypatch.setattr(loading, "loaded_bytes", sizes[1])
    found = reproduce(home, made, texts=[])
    assert found.is_equal, list(found.lines())
    assert found.notes == ()
    edit(made, lambda definition: definition["externalParameters"]["recipe"].pop("stream"))
    found = reproduce(home, made, texts=[])
    assert found.notes[0].endswith(f"is not stated; here {'it is not' if streamed else 'it is'}")
    assert not found.is_equal


def test_a_directory_that_holds_something_else_is_refused(home: Path, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(RecipeError, match="mine: is there already; remove it, or choose another --out"):
        reproduce(home, checkpoint, out=tmp_path / "mine")
    with pytest.raises(RecipeError, match="lies in what is read; choose another --out"):
        reproduce(home, checkpoint, out=checkpoint / "again")
    write_json(tmp_path / "mine" / again.MARKER, {"statement": "0"})
    with pytest.raises(RecipeError, match="mine: another checkpoint was made again in it, or with other versions"):
        reproduce(home, checkpoint, out=tmp_path / "mine")
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"notes.txt", again.MARKER}


def test_a_reproduction_that_was_stopped_goes_on(
    home: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(context: Context, names: tuple[str, ...], **_: Any) -> None:
        run(context, names[:2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(again.pipeline, "run", stopped)
        with pytest.raises(KeyboardInterrupt):
            reproduce(home, checkpoint)
    (beside,) = set(checkpoint.parent.iterdir()) - {checkpoint}
    record = beside / "profile" / "stage.json"
    before = record.read_bytes()
    monkeypatch.setattr(again, "_compared", lambda *_: again.Reproduction(
        checkpoint=checkpoint, remade=beside / "checkpoint", out=beside, equal=(), unread=record.read_text("utf-8")
    ))  # fmt: skip
    assert reproduce(home, checkpoint).unread == before.decode(), "the profile was not made again"
    assert not beside.exists()


def test_a_reproduction_that_was_killed_as_it_began_or_ended_goes_on(
    home: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = checkpoint.with_name(f"{checkpoint.name}{again.BESIDE}")
    beside.mkdir()
    (beside / f"{again.MARKER}.partial").write_text("{")

    def killed(path: Path, **options: Any) -> None:
        rmtree(path, **options)
        if path == beside / "profile":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        rmtree = shutil.rmtree
        patched.setattr(again.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            reproduce(home, checkpoint)
    assert beside.exists()
    assert reproduce(home, checkpoint).is_equal
    assert not beside.exists()


def test_a_second_reproduction_leaves_the_first_its_directory(
    home: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(context: Context, names: tuple[str, ...], **how: Any) -> None:
        monkeypatch.setattr(again.pipeline, "run", run)
        with locked(context.out), pytest.raises(StorageError, match="another moeq run is working here"):
            reproduce(home, checkpoint)
        assert (context.out / again.MARKER).is_file()
        run(context, names, **how)

    monkeypatch.setattr(again.pipeline, "run", first)
    assert reproduce(home, checkpoint).is_equal


def test_a_checkpoint_of_another_model_with_a_statement_of_this_one(
    home: Path, checkpoint: Path, tiny_mixtral: Path, tmp_path: Path
) -> None:
    """Files whose values cannot be compared are told with that."""
    from tiny_models import save_tiny

    other = save_tiny(tmp_path / "other", "mixtral", num_local_experts=3)
    made = made_of(other, tmp_path / "run", LESS | {"corpus": LESS["corpus"] | {"source": str(home / "numbers.jsonl")}})
    statement = json.loads((checkpoint / NAME).read_text("utf-8"))
    statement["subject"] = json.loads((made / NAME).read_text("utf-8"))["subject"]
    write_json(made / NAME, statement)
    write_sums(made)
    found = reproduce(home, made)
    assert not found.is_equal
    assert found.unread is not None
    assert "other layers or experts than in what was made again" in found.unread
    assert found.matrices == ()


def test_a_run_that_refuses_leaves_nothing_beside(home: Path, checkpoint: Path) -> None:
    edit(checkpoint, lambda definition: definition["externalParameters"]["recipe"]["corpus"].update(sequences=10**6))
    with pytest.raises(CorpusError):
        reproduce(home, checkpoint)
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint"]


def write_images(path: Path, first: int) -> None:
    """Labelled digits from the one of a number on, for the bundled image classifier."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    some = slice(first, first + 24)
    tensors = {
        "images": torch.tensor(digits.images[some], dtype=torch.uint8)[:, None],
        "labels": torch.tensor(digits.target[some]),
    }
    write_tensors(path, tensors | {"train": torch.arange(16), "test": torch.arange(16, 24)})


@pytest.mark.full
def test_images_and_a_model_whose_norms_are_folded(home: Path, tmp_path: Path) -> None:
    """Sets of images, which have no digest of a file, are known by their name and compared when they are read."""
    for folder, first in (("a", 0), ("b", 24)):
        (tmp_path / folder).mkdir()
        write_images(tmp_path / folder / "some.safetensors", first)
    recipe = {
        "corpus": {"sequences": 8, "source": [str(tmp_path / "a" / "some.safetensors"), "bundled"]},
        "reparam": {},
        "losses": {"methods": ["rtn"], "group_size": 16, "bits": [3], "layer_effects": None},
        "assign": {"method": "uniform", "bits": 3, "quantizer": "rtn"},
        "eval": {"compare": []},
        "export": {"verify": False},
    }
    made = made_of("bundled:tiny-moe-vit", tmp_path / "run", recipe)
    (tmp_path / "moved").mkdir()
    moved = (tmp_path / "a" / "some.safetensors").rename(tmp_path / "moved" / "some.safetensors")
    found = reproduce(home, made, model="bundled:tiny-moe-vit", texts=[moved])
    assert found.is_equal, list(found.lines())
    assert found.notes == ()
    with pytest.raises(CorpusError, match=r"b/some.safetensors: other images: their digest is \w{64}, the provenance"):
        reproduce(home, made, model="bundled:tiny-moe-vit", texts=[tmp_path / "b" / "some.safetensors"])
    with pytest.raises(CorpusError, match=r"'some.safetensors': missing: it was calibrated on it; give it by --text"):
        reproduce(home, made, model="bundled:tiny-moe-vit", texts=[])


def test_a_dataset_of_the_hub_is_allowed_by_its_name_and_commit(checkpoint: Path) -> None:
    pinned = "hub:org/data@0123:a:train"

    def change(definition: dict[str, Any]) -> None:
        set_recipe(definition, corpus={"source": ["hub:org/data", {"path": "hub:org/data", "weight": 2}, "bundled"]})
        others = [one for one in definition["resolvedDependencies"] if not one.get("name", "").startswith("text/")]
        dataset = {"name": f"text/{pinned}", "digest": {"gitCommit": "0123"}}
        bundled = {"name": "text/bundled", "digest": {"sha256": "0" * 64}}
        definition["resolvedDependencies"] = [*others, dataset, dataset, bundled]

    edit(checkpoint, change)
    statement = read_provenance(checkpoint)
    assert statement is not None
    recipe = load_recipe({"corpus": statement.parameters.recipe["corpus"]})  # type: ignore[index]
    assert _texts(statement, recipe, [pinned], checkpoint) == (pinned, pinned, None)
    with pytest.raises(CorpusError, match="it was calibrated on this dataset; allow it by --text and this name"):
        _texts(statement, recipe, ["hub:org/data"], checkpoint)


def packed(codes: torch.Tensor, bits: int = 4) -> PackedWeight:
    """Codes [2, 16] as they stand: a scale of a half and a zero point of 8 (or 4, 2)."""
    scales = torch.full((2, 1), 0.5, dtype=torch.float16)
    return PackedWeight(
        codes=pack(codes, bits), scales=scales, zeros=None, bits=bits, group_size=-1, inputs=16, symmetric=True
    )


def test_how_far_two_matrices_are() -> None:
    codes = torch.arange(32, dtype=torch.uint8).reshape(2, 16) % 8
    other = codes.clone()
    other[0, 0], other[1, 5] = 3, 0
    assert list(_difference("m", packed(codes), packed(codes.clone()))) == []
    (found,) = _difference("m", packed(codes), packed(other), layer="l", expert=2, projection="p")
    values = (codes.double() - 8) / 2
    assert (found.codes, found.max_abs, found.what) == ((2, 32), 2.5, None)
    assert found.relative == pytest.approx(float(((other - codes.double()) / 2).norm() / values.norm()))
    assert str(found) == f"m: 2 of 32 codes differ, values by up to 2.5, {found.relative:.2g} relative"
    (found,) = _difference("m", packed(codes), packed(codes, 3))
    assert (found.codes, found.max_abs) == (None, 2.0)
    assert found.what == "4 bits in groups of -1, symmetric, 3 bits in groups of -1, symmetric when made again"
    (found,) = _difference("m", packed(codes), values.half())
    assert (found.max_abs, found.relative) == (0.0, 0.0)
    assert "float16 when made again" in str(found)
    (found,) = _difference("m", torch.zeros(2), torch.zeros(3))
    assert (found.what, found.max_abs) == ("[2], [3] when made again", None)
    assert list(_difference("m", torch.tensor([float("nan")]), torch.tensor([float("nan")]))) == []


@pytest.mark.parametrize("encoding", [Encoding.trellis(8), Encoding.exl3(), Encoding.iq("iq-s")])
def test_codes_that_stand_for_several_weights_are_compared_by_values(encoding: Encoding) -> None:
    draw = torch.Generator().manual_seed(0)
    parts = {
        part: torch.randint(1, 99, size, generator=draw).to(dtype)
        for part, (size, dtype) in packed_shapes(256, 256, 2, encoding).items()
    }
    here = PackedWeight.of(parts, 2, 256, encoding)
    again = PackedWeight.of(parts | {"codes": parts["codes"].flip(0)}, 2, 256, encoding)
    (found,) = _difference("m", here, again)
    assert (found.codes, found.what) == (None, None)
    assert found.max_abs is not None
    assert list(_difference("m", here, here)) == []


def test_which_keys_of_json_differ() -> None:
    here = {"a": {"b": [1, {"c": True}]}, "same": None, "gone": 2}
    again = {"a": {"b": [1, {"c": 1}]}, "same": None, "new": None}
    assert list(_keys(here, again)) == ["a.b[1].c True -> 1", "gone 2 -> absent", "new absent -> None"]
    assert next(_keys({"long": "x" * 99}, {"long": []})).startswith("long 'xxx")
    assert list(_keys([1, 2], [1])) == [" [1, 2] -> [1]"]
