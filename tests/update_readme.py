"""Rewrites the tables of the README that follow from the code and the tests: `python tests/update_readme.py`."""

from __future__ import annotations

import ast
from pathlib import Path

from moeq.models.support import families, markdown

ROOT = Path(__file__).parents[1]
FILES = "| file of moeq/ | |\n|---|---|\n"
FAMILIES = "<summary>all families</summary>\n\n"


def files_table() -> str:
    """A line for every file of moeq/, from its docstring."""
    lines = []
    for path in sorted((ROOT / "moeq").rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
        assert docstring, path
        summary = " ".join(docstring.split("\n\n")[0].split())
        lines.append(f"| `{path.relative_to(ROOT / 'moeq').as_posix()}` | {summary} |")
    return FILES + "\n".join(lines) + "\n"


def updated(text: str) -> str:
    """The README with both tables as they should be."""
    head, _, _ = text.partition(FILES)
    before, mark, rest = head.partition(FAMILIES)
    after = rest[rest.index("\n\n</details>") :]
    rows = families()
    good = sum(row.quantized for row in rows)
    count = f"{good} of {len(rows)} classes quantize, export and load; {sum(row.streamed for row in rows)} stream"
    line = next(line for line in before.splitlines() if "classes quantize, export and load" in line)
    return before.replace(line, f"{count}.") + mark + markdown(rows) + after + files_table()


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text("utf-8")), "utf-8")
