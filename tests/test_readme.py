"""The README's list of files is the code's own: one line a file of moeq/, from its docstring."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_file_has_its_line() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for path in sorted((ROOT / "moeq").rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
        assert docstring, path
        summary = " ".join(docstring.split("\n\n")[0].split())
        assert f"| `{path.relative_to(ROOT / 'moeq').as_posix()}` | {summary} |" in text, path


def test_it_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for command in ("make demo", "make test", "make test-full"):
        assert command in text
        assert f"\n{command.removeprefix('make ')}:" in makefile
