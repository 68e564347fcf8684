"""Writes what README.md and docs/ take from the code, between markers: `python tests/update_docs.py`."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import served_pages
from recipe_reference import reference

import moeq
from moeq import errors
from moeq.artifacts.assignment import FULL
from moeq.artifacts.targets import Target
from moeq.bundled.preset_files import preset_names, preset_path
from moeq.estimator import known_hardware, load_hardware
from moeq.estimator.sheets import sheet
from moeq.models.support import families
from moeq.numerics.ggml_types import HOLDS, TYPES
from moeq.papers import PAPERS, TERMS, Paper, named
from moeq.recipe import Recipe
from moeq.registry import EXPORTERS
from moeq.runtimes import Runtime, runtimes
from moeq.suitability import runtimes_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moeq"
KERNELS = ROOT / "moeq-kernels" / "moeq_kernels"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(header: str, rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; header: its titles, between bars."""
    lines = [header, "|" + "---|" * (header.count("|") - 1), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert docstring, f"{path} has no docstring"
    return " ".join(docstring.split("\n\n")[0].split()).replace("|", "\\|")


def rooms() -> str:
    """The layers of import-linter's contract, from the top, each package or module with its docstring."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    rows = []
    for number, layer in enumerate(layers, 1):
        for place, module in enumerate(re.split(r"\s*[|:]\s*", layer)):
            path = KERNELS if module == KERNELS.name else ROOT / module.replace(".", "/")
            text = summary(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
            rows.append((str(number) if place == 0 else "", f"`{module.removeprefix('moeq.')}`", text))
    return table("| | room | |", rows)


def files() -> str:
    """A line for every file of moeq/, from its docstring; a table a room."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for path in (*sorted(PACKAGE.rglob("*.py")), *sorted(KERNELS.rglob("*.py"))):
        package = PACKAGE if path.is_relative_to(PACKAGE) else KERNELS
        inside = path.relative_to(package.parent)
        room = "/".join(inside.parts[:-1][:2])
        found.setdefault(room, []).append((f"`{inside.relative_to(room).as_posix()}`", summary(path)))
    return "\n".join(f"### {room}\n{table('| file | |', rows)}" for room, rows in sorted(found.items()))


def exit_codes() -> str:
    """The table in the docstring of `moeq.errors`."""
    lines = (errors.__doc__ or "").splitlines()
    return "\n".join(line for line in lines if line.startswith("|")) + "\n"


def hardware() -> str:
    """The presets and what they describe."""
    return table("| preset | |", [(f"`{name}`", named(load_hardware(name).description)) for name in known_hardware()])


def papers() -> str:
    """The five papers by moeq's numbers."""
    return table(
        "| paper | title | authors | year |",
        [(paper.number, f"[{paper.title}]({paper.link})", paper.authors, str(paper.year)) for paper in PAPERS.values()],
    )


def compared() -> str:
    """Works that the tables name beside them."""
    called: dict[Paper, str] = {}
    for term in TERMS:
        if term.paper is not None and not term.paper.number:
            called.setdefault(term.paper, term.name)
    return table(
        "| called | title | authors | year |",
        [(name, f"[{paper.title}]({paper.link})", paper.authors, str(paper.year)) for paper, name in called.items()],
    )


def own_runtimes() -> list[Runtime]:
    """Those of moeq's own exporters, the native one first."""
    return [one for one in runtimes().values() if one.exporter.name in EXPORTERS.own]


def called(one: Runtime) -> str:
    """A runtime in words, with the version that was measured."""
    return (one.target and one.target.called) or str(one.exporter.runtime)


def sized(target: Target) -> str:
    """Which groups it takes, where it does not take any."""
    *most, last = target.groups or (None,)
    return "" if last is None else f", in groups of {', '.join(map(str, most))} and {last}"


def formats() -> str:
    """Every runtime, the format that is written for it, what runs it, and what assignments and refusals have of it."""
    rows = []
    for one in own_runtimes():
        target, limits = one.target, ("any", "matrix", "any")
        if target is not None:
            grid = "symmetric" if target.symmetric_only else "symmetric, zero points"
            grid = grid + sized(target) if target.blocks is None else "[below](#gguf)"
            grid = grid if "grid" in target.codes else "none: [codes of its own](#exl3)"
            of = "matrix of a layer" if target.stacks else target.granularity.replace("projection", "matrix")
            limits = (target.listed(), of, grid)
        rows.append((f"`{one.name}`", f"`{one.exporter.name}`", one.exporter.help, called(one), *limits))
    return table(f"| runtime | format | | loaded by | bits ({FULL}: plain) | one width for every | grids |", rows)


def gguf() -> str:
    """The grids that llama.cpp's types hold exactly."""
    return table(
        "| bits | zero points | weights of a block | type |",
        [
            (str(bits), "no" if symmetric else "yes", str(TYPES[name].length), name)
            for (bits, symmetric), name in HOLDS.items()
            if bits > 1 or symmetric
        ],
    )


def count_of_families() -> str:
    """How many families do what."""
    rows = families()
    good, streamed = sum(row.quantized for row in rows), sum(row.streamed for row in rows)
    of = f"{good} of {len(rows)} classes of Mixture-of-Experts models"
    return f"{of} quantize, export and load; {streamed} stream.\n"


def all_families() -> str:
    """The record that `moeq families` prints."""
    mark = {True: "yes", False: "no"}
    rows = []
    for row in families():
        whole = f"{mark[row.quantized]}: {row.told}" if row.told else mark[row.quantized]
        known = ", ".join(name for name in ("llama.cpp", "mlx") if name in runtimes_of(row))
        rows.append((row.model_type, row.model, row.experts, mark[row.streamed], whole, known))
    return table("| model_type | class | experts | streams | quantizes, exports, loads | also for |", rows)


def cell(value: str | float | None) -> str:
    """A number of four digits, or a word."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def published() -> str:
    """The estimator's sheet of published figures."""
    (found,) = sheet("published")
    rows = [tuple(map(cell, row)) for row in found.rows]
    return table(f"| {' | '.join(found.columns)} |", rows) + "\n" + "".join(f"- {note}\n" for note in found.notes)


def python() -> str:
    """What `moeq` offers, with the first paragraph of its documentation."""
    offered = [name for name in moeq.__all__ if not name.startswith("__")]
    first = {name: " ".join((inspect.getdoc(getattr(moeq, name)) or "").split("\n\n")[0].split()) for name in offered}
    return table("| | |", [(f"`moeq.{name}`", text) for name, text in first.items()])


def presets() -> str:
    """What the comment above each of them says."""
    rows = []
    for name in preset_names():
        head = preset_path(name).read_text("utf-8").partition("\nrecipe_version")[0]
        words = " ".join(line.removeprefix("#").strip() for line in head.splitlines())
        rows.append((f"`{name}`", words.removeprefix(f"Preset {name}").lstrip(",: ")))
    return table("| preset | |", rows)


PARTS: dict[str, Callable[[], str]] = {
    "compared works": compared,
    "count of families": count_of_families,
    "exit codes": exit_codes,
    "families": all_families,
    "files": files,
    "formats": formats,
    "gguf": gguf,
    "hardware": hardware,
    "papers": papers,
    "presets": presets,
    "published": published,
    "python": python,
    "recipe": lambda: reference(Recipe),
    "rooms": rooms,
    "served": served_pages.whole,
    "served in short": served_pages.short,
}


def updated(text: str) -> str:
    """A page with every marked part as it should be."""
    return MARKED.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[3]}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page.read_text("utf-8")), "utf-8")
