"""The documentation says what the code does: tables are generated, links lead somewhere, what can be run is run."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from documents import ALL, FRONT, PAGES, ROOT, Block, anchors, blocks, commands, links, named_files
from fork_server import ForkServer
from recipe_reference import sections, takes
from tiny_models import FULL
from typer.main import get_command
from update_docs import updated

from moeq.cli import app
from moeq.recipe import Recipe, load_recipe
from moeq.registry import EXPORTERS
from moeq.runtimes import runtimes

BLOCKS = [block for page in PAGES for block in blocks(page)]
LINES = [
    pytest.param(line, id=f"{b.place} {line[:40]}") for b in BLOCKS if b.language == "bash" for line in commands(b)
]
LANGUAGES = {"bash", "python", "text", "yaml"}
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
DEMO = "recipes/demo.yaml"
SMALLER = (  # of the demo's recipe where these tests run it
    "corpus.sequences=16", "corpus.sequence_length=64", "losses.methods=[gptq]", "eval.perplexity.sequences=4",
    "eval.perplexity.sequence_length=64", "eval.limit=4", "eval.compare=[]", "export.verify=false",
    "losses.layer_effects=null", "assign.layer_weighting=null", "quantize.refine=null",
    "quantize.refine={iterations: 2}", "quantize.tune={steps: 2}",
)  # fmt: skip
QUICKER = {"plan": ["--no-probe"], "convert": ["--no-verify"]}  # what takes seconds is left to its own tests
SHORTER = {'text="bundled"': 'text="notes.txt"'}  # in Python


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.cases(1)
@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_what_is_generated_is_up_to_date(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text == updated(text), "run `python tests/update_docs.py`"


def test_the_front_page_is_short_and_complete() -> None:
    text = FRONT.read_text("utf-8")
    assert text.count("\n") <= 150
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for command in ("make demo", "make test", "make test-full", "make docs"):
        assert command in text
        assert f"\n{command.removeprefix('make ')}:" in makefile
    for name, one in runtimes().items():
        assert f"`--for {name}`" in text or one.exporter.name not in EXPORTERS.own, "what loads where: every runtime"


def test_every_test_with_another_runtime_is_run_by_make_peers() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    named = [
        ROOT / word for word in re.findall(r"tests/[\w/.]+", makefile.partition("\npeers:")[2].partition("\n\n")[0])
    ]
    using = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"\bpeers\.(run|load|interpreter|server)\(", path.read_text("utf-8"))
    ]
    assert len(using) > 10
    assert not [path for path in using if not any(path == one or one in path.parents for one in named)]


def test_every_page_is_in_the_navigation_and_on_the_front_page() -> None:
    written = {page.name for page in PAGES} - {FRONT.name}
    assert (
        set(re.findall(r"[\w-]+\.md", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))) == written
    )
    linked = {target.partition("#")[0] for target in links(FRONT) if target.startswith("docs/")}
    assert linked == {f"docs/{name}" for name in written - {"index.md"}}


@pytest.mark.parametrize("page", ALL, ids=names(ALL))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        assert path.is_file(), link
        assert not anchor or anchor in anchors(path), link
    for name in named_files(page) if page in PAGES else ():
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("block", BLOCKS, ids=[block.place for block in BLOCKS])
def test_blocks_are_what_they_say(block: Block, tmp_path: Path) -> None:
    assert block.language in LANGUAGES
    if block.language == "python":
        compile(block.text, block.place, "exec")
    if block.language == "yaml" and block.reason is None:
        (tmp_path / "recipe.yaml").write_text(block.text)
        load_recipe(tmp_path / "recipe.yaml")
    if block.language == "bash" and block.reason is None:
        assert all(line.startswith("moeq ") for line in commands(block)), "say why it is not run: <!-- not run: ... -->"


def test_python_blocks_open_what_the_page_has_made() -> None:
    blocks = [block.text for block in BLOCKS if block.place.startswith("docs/python.md") and block.language == "python"]
    made = set[str]()
    for text in blocks:
        made |= set(re.findall(r'out="([^"]+)"', text))
        assert {name.partition("/")[0] for name in re.findall(r'"([^"\s]+/checkpoint)"', text)} <= made, text
    assert len(made) > 2


@pytest.mark.cases(71)
@pytest.mark.parametrize("line", LINES)
def test_command_lines_exist(line: str) -> None:
    """Programs, options, choices and keys of recipes, also of what is not run."""
    program, *rest = shlex.split(line, comments=True)
    if program == "moeq":
        COMMANDS[rest[0]].make_context(rest[0], rest[1:])
        recipe = next((ROOT / word for word in rest if word.startswith("recipes/")), None)
        load_recipe(recipe, [value for option, value in itertools.pairwise(rest) if option == "--set"])
    elif program == "make":
        assert f"\n{rest[0]}:" in (ROOT / "Makefile").read_text("utf-8")
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        assert set(re.findall(r"\.\[(\w+)\]", line)) <= set(extras)
    elif program == "python":
        there = importlib.util.find_spec(rest[1]) is not None if rest[0] == "-m" else (ROOT / rest[0]).is_file()
        assert there
    elif program == "transformers":  # options and all by tests/plugins/test_transformers_serve.py
        assert (rest[0], rest[2:]) == ("serve", ["--trust-remote-code"])
    else:
        assert line == ". .venv/bin/activate"


def test_commands_within_sentences_take_what_they_are_given() -> None:
    """Those of prose and of messages, which may leave out what goes without saying."""
    texts = [re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL) for page in PAGES]
    texts += [path.read_text("utf-8") for path in (ROOT / "moeq").rglob("*.py")]
    found = {line for text in texts for line in re.findall(r"`moeq ([a-z][^`{|>]*)`", text)}
    assert len(found) > 50
    for line in sorted(found):
        name, *rest = shlex.split(line)
        assert COMMANDS[name].make_context(name, rest, resilient_parsing=True).args == [], line


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder in which a page's commands find what the repository has, and a text."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "notes.txt").write_text((ROOT / "README.md").read_text("utf-8")[:1500], "utf-8")
    return tmp_path


def test_what_the_pages_say_runs(moeq: ForkServer, place: Path) -> None:
    """Every block without a reason not to, page after page in one folder, the demo's recipe on less text.

    `make test` runs the first two pages.
    """
    ordered = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8"))
    if not FULL:
        ordered = ordered[:2]
    for block in [block for name in ordered for block in blocks(ROOT / "docs" / name) if block.reason is None]:
        for line in commands(block) if block.language == "bash" else ():
            _, *words = shlex.split(line, comments=True)
            less = [word for key in SMALLER for word in ("--set", key)] if DEMO in words else []
            done = moeq.run(*words, *less, *QUICKER.get(words[0], ()), cwd=place)
            assert done.code == 0, f"{block.place}: {line}\n{done.stderr}"
        if block.language == "python":
            text = re.sub("|".join(SHORTER), lambda found: SHORTER[found[0]], block.text)
            (place / "block.py").write_text(text)
            done = moeq.run(program=place / "block.py", cwd=place)
            assert done.code == 0, f"{block.place}\n{done.stderr}"


def test_the_site_builds(tmp_path: Path) -> None:
    """Links of the site, anchors and navigation, as mkdocs sees them."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install -c constraints.txt -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_key_of_a_recipe_is_described() -> None:
    """Sections have docstrings or descriptions of their keys; a key that is no section says what it is."""
    for path, model in sections(Recipe):
        for name, field in model.every_key().items():
            assert field.description or "section" in takes(field.annotation), f"{path}: {name}"


def test_every_key_that_a_recipe_takes_is_in_its_reference() -> None:
    """Those of single methods, too."""
    page = (ROOT / "docs" / "recipe.md").read_text("utf-8")
    for path, model in sections(Recipe):
        text = page.partition(f"\n## {path}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` ", text, re.MULTILINE)
        assert "Every key of [" in text or rows == list(model.every_key()), path
