"""The papers' tables as recipes: their tasks exist, headers say what they need, twins need the repository alone."""

import re
from pathlib import Path

import lm_eval
import pytest

from moeq.recipe import Recipe, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
TWINS = sorted(RECIPES.glob("paper-*-tiny.yaml"))
PAPERS = sorted(set(RECIPES.glob("paper-*-table*.yaml")) - set(TWINS))


@pytest.fixture(scope="module")
def known_tasks() -> set[str]:
    """Names of lm-eval's tasks and groups, read off its files: its own index takes ten seconds."""
    named = re.compile(r"^(?:task|group): *['\"]?([\w-]+)", re.M)
    files = (Path(lm_eval.__file__).parent / "tasks").rglob("*.yaml")
    return {name for path in files for name in named.findall(path.read_text("utf-8"))}


def header(path: Path) -> str:
    """The comment above a recipe, as one line."""
    lines = path.read_text("utf-8").split("recipe_version")[0].splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines)


@pytest.mark.cases(3)
@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.name)
def test_a_papers_recipe_says_what_it_needs_and_names_tasks_that_exist(path: Path, known_tasks: set[str]) -> None:
    recipe = load_recipe(path)
    text = header(path)
    for part in (f"recipes/{path.name}", "Needs", "Not run by this project", "paper states"):
        assert part in text, part
    assert set(recipe.eval.tasks) <= known_tasks
    assert (recipe.model is None) == ("--model MODEL" in text)
    assert not str(recipe.model).startswith("bundled:")


@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.name)
def test_a_twin_needs_the_repository_alone(path: Path) -> None:
    recipe = load_recipe(path)
    assert re.search(rf"moeq (run|reparam) recipes/{path.name}", header(path))
    assert str(recipe.model).startswith("bundled:")
    assert recipe.corpus.source in ("bundled", "digits")
    assert set(recipe.eval.tasks) <= {"moeq_continuation"}
    assert recipe.eval.include_path is None
    assert (RECIPES / path.name.replace("-tiny", "")).is_file()


@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.name)
def test_a_twin_compares_the_methods_of_its_paper(path: Path) -> None:
    """The same kinds of rows, or the same fold and integer forward; budgets are the twin's own."""
    own, papers = load_recipe(path), load_recipe(RECIPES / path.name.replace("-tiny", ""))
    if papers.reparam is not None:
        assert own.reparam == papers.reparam
        return

    def kinds(recipe: Recipe) -> set[tuple[object, ...]]:
        every = [row.model_dump() for row in (recipe.assign, *recipe.eval.compare)]
        told = ("method", "bits", "metric", "scope", "selector", "loss_weighting")
        return {tuple(row[key] for key in told) for row in every}

    assert kinds(papers) <= kinds(own)
