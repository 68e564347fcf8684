"""Runtimes have one name each, in recipes, options and folders; names of formats stand for them, with a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeq import runtimes as module
from moeq.artifacts.targets import targets
from moeq.errors import RecipeError
from moeq.options import StageOptions
from moeq.preflight import check_loader, check_runtime
from moeq.recipe import load_recipe
from moeq.recipe.earlier import as_in_keys
from moeq.runtimes import formats, named, runtime, runtimes, written
from moeq.stages.export import format_directories, format_directory

RUNTIMES = {
    "native",
    "transformers",
    "auto-round",
    "gptqmodel",
    "llama.cpp",
    "llama.cpp-refit",
    "dequantized",
    "vllm",
    "vllm-cuda",
    "vllm-gptq",
    "humming",
    "mlx",
    "exl3",
}
BEFORE = {"moeq": "native", "gptq": "gptqmodel", "gguf": "llama.cpp", "compressed-tensors": "transformers"}


@pytest.fixture(autouse=True)
def untold() -> None:
    """Words are told once a process."""
    module._tell.cache_clear()


def test_every_runtime_has_one_name_and_its_format() -> None:
    assert set(runtimes()) == RUNTIMES
    assert next(iter(runtimes())) == "native"
    assert set(written()) == RUNTIMES - {"native"}
    assert set(targets()) == RUNTIMES - {"dequantized"}
    assert runtime("vllm").exporter is runtime("transformers").exporter
    assert runtime("vllm").target.granularity != runtime("transformers").target.granularity


@pytest.mark.parametrize(("word", "now"), BEFORE.items())
def test_a_formats_name_stands_for_its_runtime_and_is_told_once(
    word: str, now: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert formats() == BEFORE
    assert [named(word), named(word)] == [now, now]
    told = capsys.readouterr().err
    assert told.startswith(f"{word} is called {now} now")
    assert told.count("\n") == 1
    more = {"transformers": "(also read by vllm, vllm-cuda)", "gptqmodel": "(also read by vllm-gptq)"}
    more["llama.cpp"] = "(also read by llama.cpp-refit)"
    assert told.removeprefix(f"{word} is called {now} now").strip() == more.get(now, "")


@pytest.mark.parametrize(
    ("word", "known", "why"),
    [
        ("llamacpp", None, r"unknown runtime 'llamacpp'; did you mean 'llama\.cpp'\?"),
        ("VLLM", None, r"did you mean 'vllm'\?"),
        ("ggufs", None, r"did you mean 'llama\.cpp'\?"),
        ("zip", None, r"unknown runtime 'zip'; use one of native, "),
        ("native", written(), r"native cannot be named here; use one of auto-round, "),
        ("moeq", written(), r"moeq cannot be named here"),
    ],
)
def test_other_words_are_answered_with_the_name(word: str, known: tuple[str, ...] | None, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        named(word, known)


def test_recipes_and_options_take_the_same_names(capsys: pytest.CaptureFixture[str]) -> None:
    for name in RUNTIMES:
        assert load_recipe(None, [f"assign.target={name}"]).assign.target == name
        check_loader(name)
        check_runtime(name)
        if name != "native":
            assert load_recipe(None, [f"export.formats=[{name}]"]).export.formats == [name]
            assert StageOptions(format=["native", name]).changes() == [f"export.formats=[{name}]"]
    assert capsys.readouterr().err == ""
    assert StageOptions(format=["gptq", "moeq"]).changes() == ["export.formats=[gptqmodel]"]
    with pytest.raises(RecipeError, match=r"assign\.target: unknown runtime 'llamacpp'; did you mean 'llama\.cpp'\?"):
        load_recipe(None, ["assign.target=llamacpp"])
    with pytest.raises(RecipeError, match=r"--for: unknown runtime 'autoround'; did you mean 'auto-round'\?"):
        check_runtime("autoround")


def test_a_recipe_of_before_has_the_keys_that_it_had() -> None:
    """Stages of a run that was made with the names of formats go on; vllm could not be asked for then."""
    before = ["export.formats=[gptq, compressed-tensors, gguf, dequantized]", "assign.target=moeq"]
    recipe = load_recipe(None, [*before, "export.format=moeq"])
    assert recipe.export.formats == ["gptqmodel", "transformers", "llama.cpp", "dequantized"]
    assert (recipe.export.format, recipe.assign.target) == ("native", "native")
    keys = as_in_keys(recipe.model_dump(mode="json"))
    assert keys["export"]["formats"] == ["gptq", "compressed-tensors", "gguf", "dequantized"]
    assert (keys["export"]["format"], keys["assign"]["target"]) == ("moeq", "moeq")
    other = load_recipe(None, ["export.formats=[vllm]"])
    assert as_in_keys(other.model_dump(mode="json"))["export"]["formats"] == ["vllm"]


def test_a_folder_of_before_is_found_by_its_formats_name(tmp_path: Path) -> None:
    assert format_directory(tmp_path, "gptqmodel") == tmp_path / "checkpoint-gptqmodel"
    old = tmp_path / "checkpoint-gptq"
    old.mkdir()
    (old / "stage.json").write_text("{}")
    assert format_directory(tmp_path, "gptqmodel") == old
    assert {"checkpoint-gptq", "checkpoint-gptqmodel", "checkpoint-vllm"} <= {*format_directories()}
    (tmp_path / "checkpoint-gptqmodel").mkdir()
    assert format_directory(tmp_path, "gptqmodel") == tmp_path / "checkpoint-gptqmodel"
