"""A model and one line: `moeq run MODEL --bits 2.5 --text FILE` in an empty directory, and the commands it prints."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import family_models
import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from moeq.bundled import bundled_path
from moeq.bundled.preset_files import preset_names
from moeq.cli import app
from moeq.errors import ModelError, MoeqError

SHARED = Path(__file__).parents[3] / "shared" / "models"
ALONE = "eval.compare=[]"
QUICK = ("corpus.sequences=8", "corpus.sequence_length=32")
EVALUATED = ("eval.perplexity.sequences=4", "eval.perplexity.sequence_length=32")
FAMILIES = [
    "qwen3_moe",
    "deepseek_v3",
    *(
        pytest.param(family, marks=pytest.mark.full)
        for family in ("mixtral", "qwen2_moe", "olmoe", "glm4_moe", "gpt_oss", "phimoe", "granitemoe", "jamba")
    ),
]
LEAST = {"gpt_oss": "3.5"}  # its biases alone are half a bit for each of so few weights


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory beside a text of one's own, where commands run."""
    shutil.copy(bundled_path("LICENSE.PSF-2.0.txt"), tmp_path / "my text.txt")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def run(*words: str) -> Any:
    """What a command prints as JSON; an error is raised."""
    done = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def first_run(model: str, bits: str = "2.5", settings: tuple[str, ...] = (*QUICK, *EVALUATED)) -> Any:
    changes = [word for setting in settings for word in ("--set", setting)]
    return run("run", model, "--bits", bits, "--group-size", "16", "--text", "../my text.txt", *changes)


def follow(steps: dict[str, str], *, but: tuple[str, ...] = ()) -> dict[str, str]:
    """Run every command that a run printed, as it stands; what each printed."""
    found = {}
    for what, command in steps.items():
        if what == "from Python":
            names: dict[str, Any] = {}
            exec(command, names)
            found[what] = type(names["model"]).__name__
        elif what == "serve it":  # tests/plugins/test_transformers_serve.py does
            checkpoint = shlex.split(steps["check it"])[2]
            assert shlex.split(command) == ["transformers", "serve", checkpoint, "--trust-remote-code"]
        elif what not in but:
            name, *words = shlex.split(command)
            assert name == "moeq"
            done = CliRunner().invoke(app, words, catch_exceptions=False)
            assert done.exit_code == 0, (command, done.output)
            found[what] = done.stdout
    return found


def check(finished: Any, out: str, bits: str = "2.5") -> None:
    """The export keeps the budget of stored bits, and lies where the model's name says."""
    (row,) = (row for row in finished["table"] if row["exported"])
    assert float(bits) - 0.3 < row["bits_per_weight"] <= float(bits)
    assert finished["paths"]["checkpoint"] == f"{out}/checkpoint"
    assert (Path(out) / "report" / "report.html").is_file()


@pytest.mark.full
def test_the_bundled_model_in_one_line_and_what_it_says_to_do_next(empty: Path) -> None:
    finished = first_run("bundled:tiny-mixtral")
    check(finished, "moeq-out/tiny-mixtral")
    recipe = run("recipe", "moeq-out/tiny-mixtral/recipe.yaml")
    assert recipe["corpus"]["source"] == [str((empty / "../my text.txt").resolve())]
    assert recipe["eval"]["perplexity"]["source"] == "bundled"
    steps = finished["next"]
    assert list(steps) == [
        "measure again", "try it", "serve it", "check it", "elsewhere", "from Python", "another size",
    ]  # fmt: skip
    steps["measure again"] += " --text '../my text.txt' --window 64"  # the bundled text takes a minute
    found = follow(steps)
    assert "perplexity" in found["measure again"]
    assert found["try it"].startswith("Once upon a time")
    assert "loads right" in found["check it"]
    assert "dequantized" in found["elsewhere"]
    assert found["from Python"] == "MixtralForCausalLM"
    again = run("run", "bundled:tiny-mixtral", "--bits", "3")
    assert [stage["stage"] for stage in again["stages"] if stage["skipped"]][:4] == [
        "profile", "losses", "assign", "quantize",
    ]  # fmt: skip
    assert run("recipe", "moeq-out/tiny-mixtral/recipe.yaml")["corpus"] == recipe["corpus"]


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_model_of_any_family(family: str, empty: Path) -> None:
    family_models.save(family, empty / family)
    bits = LEAST.get(family, "2.5")
    finished = first_run(family, bits, settings=("corpus.sequences=8", "eval.perplexity.sequences=4", ALONE))
    check(finished, f"moeq-out/{family}", bits)
    lengths = run("recipe", f"moeq-out/{family}/recipe.yaml")
    positions = json.loads((empty / family / "config.json").read_text("utf-8")).get("max_position_embeddings", 512)
    assert lengths["corpus"]["sequence_length"] == min(positions, 512)
    finished["next"]["measure again"] += " --text '../my text.txt' --window 64"
    follow(finished["next"], but=("another size",))


@pytest.mark.full
def test_an_image_classifier(empty: Path) -> None:
    images = ("corpus.sequences=16", "eval.images.images=16", "corpus.source=digits", ALONE)
    changes = [word for setting in images for word in ("--set", setting)]
    finished = run("run", "bundled:tiny-moe-vit", "--bits", "3", "--group-size", "16", *changes)
    assert list(finished["next"]) == ["check it", "elsewhere", "from Python", "another size"]
    assert set(follow(finished["next"], but=("another size", "check it"))) == {"elsewhere", "from Python"}


@pytest.mark.full
def test_an_encoder_decoder(empty: Path) -> None:
    family_models.save("switch_transformers", empty / "switch")
    finished = first_run("switch", settings=(*QUICK, *EVALUATED, ALONE))
    check(finished, "moeq-out/switch")
    assert list(finished["next"]) == ["check it", "elsewhere", "from Python", "another size"]
    assert set(follow(finished["next"], but=("another size", "check it"))) == {"elsewhere", "from Python"}


@pytest.mark.full
@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-qwen3-moe"])
def test_the_trained_models_beside_the_repository(name: str, empty: Path) -> None:
    if not (SHARED / name).is_dir():
        pytest.skip(f"no {SHARED / name}")
    finished = first_run(str(SHARED / name))
    check(finished, f"moeq-out/{name}")
    finished["next"]["measure again"] += " --text '../my text.txt' --window 64"
    follow(finished["next"])


@pytest.mark.cases(1)
@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_fits_language_models_or_image_classifiers(preset: str, empty: Path) -> None:
    """As far as the plan of a run looks: keys that the model cannot have, budgets, text, positions."""
    for model in ("bundled:tiny-mixtral", "bundled:tiny-moe-vit"):
        done = CliRunner().invoke(app, ["plan", model, "--preset", preset, "--no-probe", "--json"])
        if preset == "paper-004" and model == "bundled:tiny-mixtral":
            assert isinstance(done.exception, MoeqError)
        else:
            assert done.exit_code == 0, (model, done.exception)


def test_a_dense_model_has_nothing_to_do(empty: Path) -> None:
    config = LlamaConfig(
        vocab_size=2048, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained("dense")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_path("tiny-mixtral") / name, Path("dense") / name)
    for command in ("run", "plan"):
        refused = CliRunner().invoke(app, [command, "dense", "--bits", "2.5"]).exception
        assert isinstance(refused, ModelError)
        assert "dense" in str(refused)
        assert "\n" not in str(refused)
    assert not Path("moeq-out").exists()


@pytest.mark.full
def test_words_at_the_end_and_on_the_way(empty: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes = [word for setting in (*QUICK, *EVALUATED, ALONE) for word in ("--set", setting)]
    words = ["run", "bundled:tiny-mixtral", "--text", "../my text.txt", "--preset", "paper-002", *changes]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "preset paper-002, into moeq-out/tiny-mixtral" in done.stderr
    assert "measured on bundled text" in done.stderr
    steps = [" ".join(line.split()) for line in done.stdout.partition("\nnext\n")[2].splitlines()]
    assert 'try it moeq generate moeq-out/tiny-mixtral/checkpoint "Once upon a time"' in steps
    assert "serve it transformers serve moeq-out/tiny-mixtral/checkpoint --trust-remote-code" in steps
    assert not any("--bits" in step for step in steps), "uniform widths have no budget to raise"
    again = CliRunner().invoke(app, ["run", "--out", "moeq-out/tiny-mixtral", "--quiet"], catch_exceptions=False)
    assert (again.stdout, again.stderr) == ("", "")
