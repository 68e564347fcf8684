"""No table, name, plot or page shows bits without what is stored beside the codes, unless it says code bits.

Everything that moeq prints and draws of a run is read. Where "bits" stands without "code" before it, the figure under
it or before it is 8 times the stored bytes of the experts' tensors (of all tensors, where it says so) over their
weights, counted here from files and shapes. One width is written 2-bit, an average never.
"""

from __future__ import annotations

import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from rich.console import Console
from rich.table import Table
from robustness.runs import write_recipe
from safetensors import safe_open
from typer.testing import CliRunner

from moeq import cli
from moeq.models.loading import full_precision
from moeq.models.source import open_source
from moeq.recipe import load_recipe
from moeq.recipe.labels import AS_TRAINED, labels

pytestmark = pytest.mark.full

GROUP = 16
NAME = "own-mix"
WIDE, NARROW = "200", "76"
PLAIN_BITS = re.compile(r"(?<!code )\bbits\b", re.IGNORECASE)  # not those of codes
FIGURE = re.compile(r"(\d[\d.,]*)\s+bits\b|\bbits per weight(?: \w+)? (\d[\d.]*)", re.IGNORECASE)  # not 2 code bits
Figures = dict[str, dict[str, set[float]]]  # of an assignment: bits of what


class Made(NamedTuple):
    """A folder with a run and drawings, and all tables and lines that commands printed of it."""

    folder: Path
    tables: list[Table]
    lines: list[str]


@pytest.fixture(scope="module")
def made(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run with every kind of row, and the tables and lines that its commands print, in wide windows and in narrow."""
    folder = tmp_path_factory.mktemp("honest")
    recipe = write_recipe(folder / "recipe.yaml", {
        "name": NAME,
        "model": str(tiny_qwen),
        "corpus": {"sequences": 12, "sequence_length": 48},
        "losses": {"group_size": GROUP, "bits": [1, 2, 3, 4], "methods": ["gptq"]},
        "others": {"attention": 4, "group_size": GROUP},
        "assign": {"method": "optimal", "average_bits": 2.5, "granularity": "projection", "gpu_experts": 1},
        "quantize": {"replicas": "all"},
        "export": {"verify": False},
        "eval": {
            "perplexity": {"sequences": 4, "sequence_length": 48},
            "low_precision": [{"bits": 2, "high_bits": 4, "shares": [0, 1], "seeds": 1, "sequences": 2}],
            "compare": [
                {"name": "even", "method": "uniform", "bits": 3},
                {"name": "hot-cold", "method": "budget", "expert_bytes": "1MB", "hot_bits": 4, "cold_bits": 2},
                {"name": "split", "method": "prefix-split", "average_bits": 2.5, "gpu_experts": 2},
            ],
        },
        "estimate": {"grid": {"inputs": [128], "outputs": [128], "batches": [1]}},
    })  # fmt: skip
    run, drawn, text = folder / "run", folder / "drawn", folder / "notes.txt"
    text.write_text(recipe.read_text("utf-8") * 2, "utf-8")
    others = (
        ("eval", "--out", run),
        ("report", "--out", run, "--maps", drawn),
        ("plan", recipe, "--out", run, "--no-probe"),
        ("inspect", run),
        ("inspect", run / "checkpoint"),
        ("inspect", run / "assign"),
        ("inspect", run / "assign" / "assignment.json"),
        ("inspect", run / "eval"),
        ("inspect", run / "eval" / "eval.json"),
        ("eval", run, "--text", text, "--context-aware", "gpu_experts=1,code_bits=2.5", "--device", "cpu"),
        ("estimate", "--model", "mixtral-8x7b", "--bits", "2.5", "--gpu-experts", "4", "--grid", "in=128",
         "out=128", "batch=1", "--out", drawn),
        ("estimate", "--model", run / "checkpoint", "--grid", "in=64", "out=64", "batch=1"),
        ("estimate", "--model", "mixtral-8x7b", "--bits", "2.5", "--capacity"),
    )  # fmt: skip
    printed: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        shown = Console.print

        def kept(self: Console, *objects: Any, **options: Any) -> None:
            printed.extend(getattr(one, "renderable", one) for one in objects)
            shown(self, *objects, **options)

        patch.setattr(Console, "print", kept)
        for columns, more in ((WIDE, others), (NARROW, ())):
            patch.setenv("COLUMNS", columns)
            for arguments in (("run", recipe, "--out", run), ("assign", "--out", run, "--price", "--frontier"), *more):
                done = CliRunner().invoke(cli.app, [*map(str, arguments)])
                assert done.exit_code == 0, (arguments, done.output, done.exception)
    tables = [one for one in printed if isinstance(one, Table)]
    return Made(folder, tables, [str(one) for one in printed if not isinstance(one, Table)])


def matrices(model: Path) -> dict[str, tuple[int, int]]:
    """{projection: rows and inputs} of an expert of the model, from its configuration."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    return {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}


def matrix_bytes(rows: int, inputs: int, bits: int) -> int:
    """Codes, float16 scales and zero points of the code's width, a row after the other; bfloat16 at 16 bits."""
    if bits == 16:
        return 2 * rows * inputs
    groups = math.ceil(inputs / GROUP)
    zeros = math.ceil(groups * bits / 8) if bits > 1 else 0
    return rows * (math.ceil(inputs * bits / 8) + 2 * groups + zeros)


def stored(assignment: dict[str, Any] | None, model: Path, tier: str | None = None) -> tuple[float, float]:
    """Bits that an assignment stores for a weight of the experts of a tier, or of all, and those of the codes alone."""
    shapes, sizes, codes, weights = matrices(model), 0, 0, 0
    for layer in [] if assignment is None else assignment["layers"]:
        for expert in layer["experts"]:
            for name, (rows, inputs) in shapes.items() if tier in (None, expert["tier"]) else ():
                bits = expert.get("projections", {}).get(name, expert["bits"])
                sizes, codes = sizes + matrix_bytes(rows, inputs, bits), codes + bits * rows * inputs
                weights += rows * inputs
    return (16.0, 16.0) if assignment is None else (8 * sizes / weights, codes / weights)


def tensor_bytes(folder: Path) -> dict[str, int]:
    """{tensor: bytes} of a directory of safetensors."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                found[name] = tensor.numel() * tensor.element_size()
    return found


@pytest.fixture(scope="module")
def figures(made: Made, tiny_qwen: Path) -> Figures:
    """{assignment: stored bits of its experts, of those on NDP, and of all weights}; what there is of each under ''."""
    run = made.folder / "run"
    rows = json.loads((run / "eval" / "eval.json").read_text("utf-8"))["rows"]
    whole = sum(size // 2 for size in tensor_bytes(tiny_qwen).values())
    beside = next(row["other_bytes"] for row in rows if row["assignment"] is None) // 2
    known: Figures = {}
    for row in rows:
        bits, codes = stored(row["assignment"], tiny_qwen)
        assert row["assignment"] is None or bits > codes + 0.3, "a test that cannot tell them apart"
        everything = 8 * (row["expert_bytes"] + row["other_bytes"]) / whole
        cold = stored(row["assignment"], tiny_qwen, "ndp")[0]
        rest = 8 * row["other_bytes"] / beside  # which estimates say
        known[row["name"]] = {"experts": {bits}, "ndp": {cold}, "all": {everything, rest}}
    run_recipe = load_recipe(run / "recipe.yaml")
    called = labels(run_recipe, full_precision(open_source(str(tiny_qwen))))
    known |= {label: known[name] for name, label in called.items()}
    known[""] = {of: set().union(*(one[of] for one in known.values())) for of in ("experts", "ndp", "all")}
    return known


def test_the_checkpoints_files_have_the_bits_that_were_counted(made: Made, tiny_qwen: Path) -> None:
    """Of the placed replicas: others lie in files of their own."""
    run = made.folder / "run"
    weights = sum(size // 2 for name, size in tensor_bytes(tiny_qwen).items() if ".experts." in name)
    manifest = json.loads((run / "checkpoint" / "placement.json").read_text("utf-8"))
    placed = {
        replica["key_prefix"] + tensor["name"]
        for layer in manifest["layers"] for expert in layer["experts"] for replica in expert["replicas"]
        if replica["placed"] for tensor in replica["tensors"]
    }  # fmt: skip
    sizes = tensor_bytes(run / "checkpoint")
    assignment = json.loads((run / "assign" / "assignment.json").read_text("utf-8"))
    assert 8 * sum(sizes[name] for name in placed) / weights == pytest.approx(stored(assignment, tiny_qwen)[0])


def numbers(text: str) -> list[str]:
    return re.findall(r"\d[\d,]*(?:\.\d+)?", text)


def is_one_of(text: str, known: set[float]) -> bool:
    """Whether a printed number is one of some figures, as exactly as it is printed."""
    digits = len(text.partition(".")[2])
    return any(abs(float(text.replace(",", "")) - value) <= 0.5001 * 10**-digits for value in known)


def check_column(head: str, cells: dict[str, str], figures: Figures) -> None:
    """The cells below a heading, by what their row is called: those of an assignment are its own."""
    if not PLAIN_BITS.search(head):
        return
    of = "ndp" if "ndp" in head else "all" if head in ("all bits", "bits of all weights") else "experts"
    for row, cell in cells.items():
        whole = row.removesuffix("*").strip()
        name = whole if whole in figures else next((one for one in figures if one and whole.split()[:1] == [one]), "")
        for number in numbers(cell):
            assert is_one_of(number, figures[name][of]), f"{head}: {cell} of {row} is none of {figures[name][of]}"


def check_words(text: str, figures: Figures) -> None:
    """Every number that is so many bits."""
    for number in map("".join, FIGURE.findall(text)):
        known = set().union(*figures[""].values())
        assert is_one_of(number.rstrip(".,"), known), f"{number} bits in {text!r}"


def test_tables_on_the_terminal(made: Made, figures: Figures) -> None:
    folder, tables, _ = made
    looked = json.loads((folder / "run" / "assign" / "frontier.json").read_text("utf-8"))
    heads = 0
    for table in tables:
        columns = {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}
        first, sizes = next(iter(columns.values())), columns.get("experts")
        for head, cells in columns.items():
            heads += bool(PLAIN_BITS.search(head))
            if sizes is None or {cell.removesuffix(" *") for cell in first} & set(figures):
                check_column(head, dict(zip(first, cells, strict=True)), figures)
            elif PLAIN_BITS.search(head):  # of mixes that no file keeps: of the bytes beside them
                for point in looked["points"]:
                    assert point["bits_per_weight"] == pytest.approx(8 * point["expert_bytes"] / weights_of(folder))
                known = {point["bits_per_weight"] for point in looked["points"]} | prices(folder)
                for cell in cells:
                    assert cell == "-" or is_one_of(cell, known), f"{head}: {cell}"
        for text in [str(table.title or ""), *(cell for cells in columns.values() for cell in cells)]:
            check_words(text, figures)
    assert heads >= 8


def weights_of(folder: Path) -> int:
    """Weights of all experts."""
    model = Path(yaml.safe_load((folder / "recipe.yaml").read_text("utf-8"))["model"])
    return sum(size // 2 for name, size in tensor_bytes(model).items() if ".experts." in name)


def prices(folder: Path) -> set[float]:
    """Bits of the optimum of every target, from the bytes that it takes."""
    done = CliRunner().invoke(cli.app, ["assign", "--out", str(folder / "run"), "--price", "--json", "--quiet"])
    rows = json.loads(done.stdout)["prices"]
    return {8 * row["expert_bytes"] / weights_of(folder) for row in rows if row["expert_bytes"] is not None}


def test_lines_on_the_terminal(made: Made, figures: Figures) -> None:
    _, _, lines = made
    found = 0
    for line in (part for text in lines for part in text.splitlines()):
        check_words(line, figures)
        label, colon, value = line.partition(": ")
        if colon and PLAIN_BITS.search(label) and numbers(value)[:1] == [value.strip()]:
            found += 1
            check_column(label, {"": value}, figures)
    assert found >= 3, "of the stage, of its record, of the checkpoint"


class Page(HTMLParser):
    """Tables as {caption, heads, rows}, and all other text, that of drawings and their labels included; no recipes."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.texts: list[str] = []
        self.inside: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.inside.append(tag)
        self.texts += [value or "" for name, value in attributes if name in ("aria-label", "title", "alt")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if {"pre", "style", "script"} & set(self.inside):
            return
        self.texts.append(data)
        if {"td", "th"} & set(self.inside):
            self.tables[-1][-1][-1] += data


def check_page(text: str, figures: Figures) -> int:
    """Tables and every other text of a page or a drawing; how many headings of bits it has."""
    page, heads = Page(), 0
    page.feed(text)
    for rows in page.tables:
        for place, head in enumerate(rows[0]):
            heads += bool(PLAIN_BITS.search(head))
            check_column(head, {row[0].removesuffix("exported"): row[place] for row in rows[1:]}, figures)
    for words in page.texts:
        check_words(html.unescape(words), figures)
    return heads


def test_pages_and_drawings(made: Made, figures: Figures, tiny_qwen: Path) -> None:
    folder = made.folder
    report = (folder / "run" / "report" / "report.html").read_text("utf-8")
    assert check_page(report, figures) == 2
    kept_in = full_precision(open_source(str(tiny_qwen)))
    named = set(labels(load_recipe(folder / "run" / "recipe.yaml"), kept_in).values()) - {AS_TRAINED}
    titles = {name for name in named if f">{name}: " in report}
    assert titles == named, "every map of widths has its bits in its title"
    drawings = [*(folder / "drawn").glob("*.svg"), folder / "run" / "assign" / "frontier.svg"]
    assert len(drawings) > 10
    for path in [*drawings, *(folder / "drawn").glob("*.html")]:
        check_page(path.read_text("utf-8"), figures)
    for path in [folder / "run" / "report" / "report.html", *drawings]:
        for label in re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text("utf-8")):
            assert not PLAIN_BITS.search(label) or FIGURE.search(label), f"an axis or a legend: {label}"


def test_the_model_card(made: Made, figures: Figures) -> None:
    card = (made.folder / "run" / "checkpoint" / "README.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in card.splitlines() if line.startswith("|")]
    heads: list[str] = []
    lines = 0
    for cells in rows:
        if len(cells) == 2:
            lines += bool(PLAIN_BITS.search(cells[0]))
            check_column(cells[0], {NAME: cells[1]}, figures)
        elif cells[0] == "assignment":
            heads = cells
        elif heads and "---" not in cells[0]:
            for head, cell in zip(heads, cells, strict=True):
                check_column(head, {cells[0]: cell}, figures)
    assert lines == 1
    assert "bits" in heads
    check_words(card, figures)


def test_names_do_not_hide_averages(made: Made) -> None:
    """An average of code bits in a name says so: of evaluations by context, of estimates, and in recipes."""
    folder, tables, lines = made
    texts = [*lines, *(str(cell) for table in tables for column in table.columns for cell in column.cells)]
    assert any("K=1 2.5 code bits" in text for text in texts)
    assert any("2.5 code bits, 4 of 8 experts on the GPU" in text for text in texts)
    texts += [path.read_text("utf-8") for path in (folder / "drawn").glob("*.html")]
    assert not any(re.search(r"\d\.\d+[ -]?bit\b", text) for text in texts)
