"""The provenance of what runs and conversions write: the same for the same inputs, nothing of this machine in it."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moeq import pipeline
from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.provenance import CALIBRATION, CHECKPOINT, HARDWARE, MODEL, NAME, TEXT, Statement, read_provenance
from moeq.artifacts.stage import read_record
from moeq.artifacts.sums import write_sums
from moeq.cli import app
from moeq.errors import ArtifactError
from moeq.progress import Reporter
from moeq.recipe import Recipe, load_recipe
from moeq.reproduction.matching import match
from moeq.stages.context import Context

LESS = ("corpus.sequences=4", "corpus.sequence_length=24", "losses.methods=[rtn]", "losses.group_size=16",
        "eval.perplexity.sequences=2", "eval.perplexity.sequence_length=24", "eval.tasks=[]", "eval.compare=[]",
        "assign={method: uniform, bits: 3, quantizer: rtn}", "export.verify=false",
        "export.formats=[dequantized]")  # fmt: skip
BEFORE = ("profile", "losses", "assign", "quantize", "export")


class Said(Reporter):
    """A reporter that remembers."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def run(model: Path, out: Path, *settings: str, reporter: Reporter | None = None) -> Context:
    context = Context(
        recipe=load_recipe(None, (*LESS, *settings)),
        model_name=str(model),
        out=out,
        reporter=reporter or Reporter(quiet=True),
    )
    pipeline.run(context, BEFORE)
    return context


def text_in(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"Line {number} of a small text about experts." for number in range(400))
    (folder / "text.txt").write_text("\n\n".join(lines))
    return folder / "text.txt"


def provenance(directory: Path) -> Statement:
    statement = read_provenance(directory)
    assert statement is not None
    return statement


@pytest.fixture(scope="module")
def made(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder = tmp_path_factory.mktemp("provenance")
    return run(tiny_mixtral, folder / "run", f"corpus.source={text_in(folder / 'texts')}")


def test_it_says_of_what_and_how(made: Context, tiny_mixtral: Path) -> None:
    checkpoint = made.out / "checkpoint"
    statement = provenance(checkpoint)
    beside = {"README.md", "SHA256SUMS", "stage.json", NAME}
    files = {path.name: digest_of_file(path) for path in checkpoint.iterdir() if path.name not in beside}
    assert statement.files == files
    of_model = statement.sha256_of(MODEL)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(of_model)
    assert of_model == {name: digest_of_file(tiny_mixtral / name) for name in of_model}
    text = Path(str(made.recipe.corpus.source))
    assert statement.sha256_of(TEXT) == {"text.txt": digest_of_file(text)}
    assert statement.dependencies(CALIBRATION)[0][1].own == made.text.digest("calibration")
    assert statement.byproducts == {
        stage: read_record(made.directory(stage), stage).digest for stage in ("profile", "losses", "assign", "quantize")
    }
    assert statement.parameters.texts == ["text.txt"]
    recipe = Recipe.model_validate(statement.parameters.recipe)
    assert recipe.model == "mixtral"
    for section in ("losses", "assign", "quantize", "profile", "seed"):
        assert getattr(recipe, section) == getattr(made.recipe, section), section
    assert recipe.export.formats == [], "what else was written is no part of it"
    assert {"moeq", "torch", "transformers", "numpy", "safetensors", "tokenizers"} <= set(statement.packages)
    other = provenance(made.out / "checkpoint-dequantized")
    written = statement.parameters.recipe | {
        "export": statement.parameters.recipe["export"] | {"formats": ["dequantized"]}
    }
    assert other.parameters == statement.parameters.model_copy(update={"runtime": "dequantized", "recipe": written})
    assert other.files != statement.files


def test_nothing_of_this_machine_is_in_it(made: Context) -> None:
    text = (made.out / "checkpoint" / NAME).read_text("utf-8")
    for word in (str(made.out.parent), str(Path.home()), platform.node(), "/tmp"):
        assert not word.strip("/") or word not in text, word


def test_the_same_inputs_elsewhere_give_the_same_bytes(made: Context, tiny_mixtral: Path, tmp_path: Path) -> None:
    """Of a model and a text that lie in other folders, with other figures measured of it, and in another store."""
    model = Path(shutil.copytree(tiny_mixtral, tmp_path / "moved" / "mixtral"))
    text = text_in(tmp_path / "other" / "texts")
    again = run(model, tmp_path / "run", f"corpus.source={text}", f"store={tmp_path / 'store'}", "eval.limit=3")
    for directory in ("checkpoint", "checkpoint-dequantized"):
        assert (again.out / directory / NAME).read_bytes() == (made.out / directory / NAME).read_bytes()
        assert (again.out / directory / "SHA256SUMS").read_bytes() == (made.out / directory / "SHA256SUMS").read_bytes()


def test_other_inputs_are_seen_in_it(made: Context, tiny_mixtral: Path, tmp_path: Path) -> None:
    before = provenance(made.out / "checkpoint")
    changed = provenance(run(tiny_mixtral, tmp_path / "run", "seed=7", "export.formats=[]").out / "checkpoint")
    assert changed.parameters.recipe != before.parameters.recipe
    assert changed.sha256_of(TEXT) != before.sha256_of(TEXT)
    assert changed.byproducts["profile"] != before.byproducts["profile"]


def test_an_assignment_edited_by_hand_is_seen_in_it(made: Context, tmp_path: Path) -> None:
    out = Path(shutil.copytree(made.out, tmp_path / "run"))
    path = out / "assign" / "assignment.json"
    path.write_text(path.read_text("utf-8") + "\n")
    again = Context(recipe=made.recipe, model_name=made.model_name, out=out, reporter=Reporter(quiet=True))
    pipeline.run(again, BEFORE)
    before, after = (provenance(folder / "checkpoint").byproducts["assign"] for folder in (made.out, out))
    assert before != after


def test_an_export_of_what_its_recipe_would_not_make_is_refused(made: Context, tmp_path: Path) -> None:
    """By itself, behind stages that were run by themselves: it would say that all was made by the recipe as it is."""
    out = Path(shutil.copytree(made.out, tmp_path / "run"))
    before = (out / "checkpoint" / NAME).read_bytes()

    def alone(stage: str, sequences: int, **keys: Any) -> pipeline.Outcome:
        corpus = made.recipe.corpus.model_copy(update={"sequences": sequences})
        recipe = made.recipe.model_copy(update={"corpus": corpus, **keys})
        again = Context(recipe=recipe, model_name=made.model_name, out=out, reporter=Reporter(quiet=True))
        return pipeline.run_alone(again, stage)

    sequences = made.recipe.corpus.sequences
    with pytest.raises(ArtifactError, match="profile: made by other settings than the recipe's: the provenance"):
        alone("export", sequences - 1)
    drops = made.recipe.assign.model_copy(update={"method": "optimal", "drop": True})  # of which losses say more
    with pytest.raises(ArtifactError, match="losses: made by other settings"):
        alone("export", sequences, assign=drops)
    alone("profile", sequences - 1)
    with pytest.raises(ArtifactError, match=r"losses: made by other settings than the recipe's.*moeq run"):
        alone("export", sequences - 1)
    with pytest.raises(ArtifactError, match="profile: made by other settings"):
        alone("export", sequences)
    assert (out / "checkpoint" / NAME).read_bytes() == before
    alone("profile", sequences)
    assert alone("export", sequences).skipped


def test_text_that_has_gone_is_named_all_the_same(made: Context, tmp_path: Path) -> None:
    """By what the profile's record says; a record of an older moeq says nothing, and a line tells so."""
    out = Path(shutil.copytree(made.out, tmp_path / "run"))
    before = (out / "checkpoint" / NAME).read_bytes()
    text = Path(str(made.recipe.corpus.source))
    whole = text.read_bytes()
    text.unlink()
    try:
        for noted in (True, False):
            shutil.rmtree(out / "checkpoint")
            if not noted:
                record = json.loads((out / "profile" / "stage.json").read_text("utf-8"))
                del record["volatile"]["text_files"]
                (out / "profile" / "stage.json").write_text(json.dumps(record))
            said = Said()
            context = Context(recipe=made.recipe, model_name=made.model_name, out=out, reporter=said)
            pipeline.run_alone(context, "export")
            assert ((out / "checkpoint" / NAME).read_bytes() == before) == noted
            assert any("the provenance names no calibration text" in line for line in said.lines) != noted
    finally:
        text.write_bytes(whole)


def test_a_text_that_was_given_another_name_is_found_by_it(made: Context, tiny_mixtral: Path, tmp_path: Path) -> None:
    """What was made of it stands, and what is made from then on can be made again."""
    text = text_in(tmp_path / "texts")
    for name in ("text.txt", "other.txt"):
        text = text.rename(text.with_name(name))
        source, bits = f"corpus.source=[{{path: {text}, name: web}}]", len(name) - 6
        made = run(tiny_mixtral, tmp_path / "run", source, f"assign.bits={bits}", "export.formats=[]")
    checkpoint = made.out / "checkpoint"
    assert provenance(checkpoint).sha256_of(TEXT) == {"other.txt": digest_of_file(text)}
    assert provenance(checkpoint).parameters.texts == ["other.txt"]
    found = match(checkpoint, str(tiny_mixtral), [str(text)], trust_remote_code=False)
    assert found.texts == (text,)


def test_hardware_that_decides_is_named(made: Context, tiny_mixtral: Path, tmp_path: Path) -> None:
    from moeq.estimator.hardware import __file__ as place

    preset = Path(place).parent / "hardware" / "h100-ndp-pcie4.yaml"
    hardware = Path(shutil.copy(preset, tmp_path / "own.yaml"))
    context = run(tiny_mixtral, tmp_path / "run", f"assign.hardware={hardware}", "export.formats=[]")
    statement = provenance(context.out / "checkpoint")
    assert statement.sha256_of(HARDWARE) == {"own.yaml": digest_of_file(hardware)}
    assert statement.parameters.recipe is not None
    assert statement.parameters.recipe["assign"]["hardware"] == "own.yaml"


def test_where_hardware_lies_is_in_no_checkpoint_and_makes_nothing_anew(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's copy of its recipe has the whole path of a file, and the name of a preset, whatever is called so."""
    from moeq.estimator.hardware import __file__ as place

    shutil.copy(Path(place).parent / "hardware" / "h100-ndp-pcie4.yaml", tmp_path / "own.yaml")
    (tmp_path / "paper-ctxmoe").mkdir()
    monkeypatch.chdir(tmp_path)
    compared = "eval.compare=[{name: u, method: uniform, bits: 3, hardware: own.yaml}]"
    settings = ("assign.hardware=own.yaml", compared, "estimate.hardware=paper-ctxmoe", "estimate.geometry=model")
    before = run(tiny_mixtral, tmp_path / "run", *settings)
    pipeline.run(before, ("estimate",))
    monkeypatch.chdir("/")
    copy = load_recipe(before.out / "recipe.yaml")
    assert copy.assign.hardware == str(tmp_path / "own.yaml")
    assert copy.estimate.hardware == "paper-ctxmoe"
    again = Context(recipe=copy, model_name=str(tiny_mixtral), out=before.out, reporter=Reporter(quiet=True))
    assert all(outcome.skipped for outcome in pipeline.run(again, (*BEFORE, "estimate")))
    elsewhere = Context(recipe=copy, model_name=str(tiny_mixtral), out=tmp_path / "2", reporter=Reporter(quiet=True))
    pipeline.run(elsewhere, BEFORE)
    for directory in (before.out, elsewhere.out):
        manifest = (directory / "checkpoint" / "placement.json").read_text("utf-8")
        assert json.loads(manifest)["assignment"]["parameters"]["hardware"] == "own.yaml"
        assert str(tmp_path) not in manifest
    assert provenance(before.out / "checkpoint").files == provenance(elsewhere.out / "checkpoint").files


def told(*arguments: object) -> Any:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    if done.exception is not None and done.exit_code != 0:
        raise done.exception
    return json.loads(done.stdout)


def test_conversions_name_the_checkpoint(made: Context, tmp_path: Path) -> None:
    source, out = made.out / "checkpoint", tmp_path / "converted"
    told("convert", source, "--to", "dequantized", "--out", out, "--no-verify")
    statement = provenance(out)
    of_source = statement.sha256_of(CHECKPOINT)
    assert of_source[NAME] == digest_of_file(source / NAME), "by which its own provenance is found"
    assert set(of_source) == set(provenance(source).files) | {NAME}
    assert statement.parameters.checkpoint is not None
    assert statement.parameters.checkpoint.name == "checkpoint"
    told("convert", source, "--to", "dequantized", "--out", tmp_path / "again", "--no-verify")
    assert (tmp_path / "again" / NAME).read_bytes() == (out / NAME).read_bytes()
    assert told("inspect", out)["provenance"].startswith("converted for dequantized from checkpoint by moeq ")


def test_inspect_and_verify_say_it_and_refuse_one_that_does_not_agree(made: Context, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(made.out / "checkpoint", tmp_path / "copy"))
    (checkpoint / "stage.json").unlink()
    line = told("inspect", checkpoint)["provenance"]
    assert line.startswith("from mixtral by moeq ")
    verdict = told("verify", checkpoint)
    assert (verdict["provenance"], verdict["signature"]) == (line, None)
    (checkpoint / "generation_config.json").write_text("{}")
    write_sums(checkpoint)
    for command in ("inspect", "verify"):
        with pytest.raises(ArtifactError, match=r"generation_config.json: provenance.json has another digest of it"):
            told(command, checkpoint)
    said = "not said by a provenance.json that SHA256SUMS covers: an older moeq, or another tool, made it"
    for name in ("SHA256SUMS", NAME):
        (checkpoint / name).unlink()
    assert told("verify", checkpoint)["provenance"] == said
