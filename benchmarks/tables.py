"""The papers' accuracy tables on small trained checkpoints: the -tiny recipes' rows on other models, text and tasks.

    python benchmarks/tables.py [--models MODELS] [--data DATA] [--tables 000 001 003] [--gpu-shares 0 1/4 1/2]
                                [--names tiny-mixtral tiny-qwen3-moe] [--sequences 128] [--limit N] [--keep FOLDER]

MODELS is a folder of checkpoints with their training script (`train_tiny.py`: text by domain) beside them, DATA a
folder with `lm_eval_tasks/continuation_4way.yaml` and `word_order_4way.yaml`, which name their data relative to it.
Without them (by default in ../shared) nothing is
measured. Calibration: windows of 256 tokens of the training text, the domains in equal shares;
as many as the recipe says. Perplexity: held-out windows of 256, in equal shares. Accuracy: of four choices, chance is
25 %.

Table 000 has its rows once for every share of a layer's experts that stays in full precision, those with the losses as
printed only for the last share. Every assignment of a table is one run's: the replicas are made once. --keep: where the
runs stay; a second call goes on there.

Table 000 is then measured once more, every text placed anew by its prefill (`moeq eval RUN --context-aware`), beside
the one placement for all texts: perplexity of held-out pieces of 640 characters, each alone. Of a piece the first half
is its context, which placing by context leaves in full precision: compare such rows with one another. Differences with
and without the bit-width selector are paired, item by item.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import bench
import figures
import yaml

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported
from moeq import pipeline
from moeq.artifacts.evaluation import EvalReport, EvalRow
from moeq.comparison.eval_options import EvalOptions
from moeq.comparison.side_by_side import compare
from moeq.evaluation import comparison
from moeq.evaluation import result_file as document
from moeq.recipe import load_recipe
from moeq.stages import evaluate
from moeq.tables import too_few

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
TABLES = {"000": "paper-000-table3-tiny.yaml", "001": "paper-001-table1-tiny.yaml", "003": "paper-003-table2-tiny.yaml"}
TASKS = {"continuation_4way": "continuation", "word_order_4way": "word order"}
MEASURES = {"perplexity": "perplexity", **TASKS}
PIECE = 640  # characters, at most 256 tokens of these models
STAGES = ("profile", "losses", "assign", "quantize", "export", "eval")
NO_SELECTOR = "-no-selector"


def texts(script: ModuleType, folder: Path) -> dict[str, Path]:
    """Training and held-out text as rows of text and domain, {split: file}."""
    files = {}
    for split in ("train", "heldout"):
        rows = [{"text": text, "domain": name} for name in script.DOMAINS for text in script.documents(name, split)]
        files[split] = written(folder / f"{split}.jsonl", rows)
    return files


def written(path: Path, rows: list[dict[str, str]]) -> Path:
    """A file of rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def rows_of(recipe: dict[str, Any], experts: int, shares: list[Fraction]) -> dict[str, Any]:
    """A recipe whose rows with experts in full precision are there once a share of them."""
    rows = [recipe["assign"] | {"name": recipe["name"]}, *recipe["eval"]["compare"]]
    made = []
    for row in rows:
        if "gpu_experts" not in row:
            made.append(row)
            continue
        for share in shares if "loss_weighting" not in row else shares[-1:]:
            count = int(share * experts)
            made.append(row | {"gpu_experts": count, "name": f"{row['name']}-K{count}"})
    first = dict(made[0])
    name = first.pop("name")
    return recipe | {"name": name, "assign": first, "eval": recipe["eval"] | {"compare": made[1:]}}


def measure(table: str, model: Path, text: dict[str, Path], out: Path, options: argparse.Namespace) -> EvalReport:
    """Run a table's recipe on a model up to its evaluation."""
    recipe = yaml.safe_load((RECIPES / TABLES[table]).read_text("utf-8"))
    config = json.loads((model / "config.json").read_text("utf-8"))
    recipe = rows_of(recipe, config.get("num_local_experts") or config["num_experts"], options.gpu_shares)
    recipe["corpus"]["source"] = str(text["train"])
    recipe["eval"]["perplexity"] |= {"source": str(text["heldout"]), "sequences": options.sequences}
    recipe["eval"] |= {"tasks": list(TASKS), "include_path": "lm_eval_tasks", "limit": options.limit}
    out.mkdir(parents=True, exist_ok=True)
    path = out / "asked.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    context = figures.context(model, out / "run", ["export.verify=false"], path)
    pipeline.run(context, STAGES)
    return evaluate.load(context)


def show(report: EvalReport, name: str) -> dict[str, Any]:
    """Print and return a table: perplexity by domain and over all, accuracy by task with its standard error."""
    domains = list(report.rows[0].perplexity_by_domain)
    head = [name, "code bits", "MB", *domains, "all", *TASKS.values()]
    rows = [cells(row, domains) for row in report.rows]
    print(*bench.table(head, rows), sep="\n")
    return {"columns": head, "rows": rows}


def cells(row: EvalRow, domains: list[str]) -> list[str]:
    bits = "16" if row.code_bits is None else f"{row.code_bits:.2f}"
    accuracy = [f"{100 * row.tasks[name]['acc']:.1f} ± {100 * row.tasks[name]['acc_stderr']:.1f}" for name in TASKS]
    perplexities = [*(row.perplexity_by_domain[domain] for domain in domains), row.perplexity or float("nan")]
    return [row.name, bits, f"{row.expert_bytes / 1e6:.2f}", *(f"{value:.2f}" for value in perplexities), *accuracy]


def windows(script: ModuleType, folder: Path, count: int) -> Path:
    """Held-out pieces of text, each to be read alone: in equal shares of the domains, evenly drawn."""
    rows = []
    for name in script.DOMAINS:
        text = "".join(script.documents(name, "heldout"))
        share = max(1, count // len(script.DOMAINS))
        step = len(text) / share
        rows += [{"text": text[int(n * step) :][:PIECE], "domain": name} for n in range(share)]
    return written(folder / "pieces.jsonl", rows)


def by_context(run: Path, text: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of table 000 of a run, placed once for all texts and anew for every text."""
    recipe = load_recipe(run / "recipe.yaml")
    sections = {recipe.name: recipe.assign} | {section.name: section for section in recipe.eval.compare}
    chosen = {name: section for name, section in sections.items() if section.loss_weighting != "none"}
    asked = EvalOptions(
        recipe=[f"{run}:{name}" for name in ("original", *chosen)],
        context_aware=[
            f"gpu_experts={section.gpu_experts},code_bits={section.code_bits},selector={str(section.selector).lower()}"
            for section in chosen.values()
        ],
        tasks=",".join(TASKS),
        include_path=Path("lm_eval_tasks"),
        limit=options.limit,
        batch_size="64",
        text=str(text),
        window=256,
        quiet=True,
        out=run.parent / "by_context.json",
    )
    compare(asked)
    return document.read_rows(run.parent / "by_context.json")


def show_by_context(rows: list[dict[str, Any]]) -> None:
    """A Markdown table, and the paired differences that the selector makes."""
    domains = list(rows[0]["perplexity"]["by_domain"])
    lines = []
    for row, entry in zip(rows, comparison.table(rows), strict=True):
        text = row["perplexity"]
        values = [*(text["by_domain"][domain] for domain in domains), text["perplexity"]]
        shown = [entry["cells"][name] for name in TASKS]
        accuracy = [f"{100 * cell.value:.1f} ± {100 * (cell.stderr or 0):.1f}" for cell in shown]
        lines.append([row["name"], *(f"{value:.2f}" for value in values), *accuracy])
    print("", *bench.table(["", *domains, "all", *TASKS.values()], lines), sep="\n")
    names = {row["name"]: row for row in rows}
    print("\nwith the selector minus without, 95 % interval and two-sided p:")
    for name, row in names.items():
        other = names.get(name.replace(" no selector", "") if " no selector" in name else name.replace(NO_SELECTOR, ""))
        if other is not None and other is not row:
            cells = comparison.table([row, other])[1]["cells"]
            shown = [difference(label, cells[key].change) for key, label in MEASURES.items()]
            print(f"{other['name']}: {'; '.join(shown)}")


def difference(name: str, change: Any) -> str:
    scale = 1 if name == "perplexity" else 100
    shown = f"{name} {scale * change.difference:+.2f}"
    if change.p is None:
        return f"{shown} ({too_few(change.items, change.fewest_items)})"
    return f"{shown} [{scale * change.low:+.2f}, {scale * change.high:+.2f}] p {change.p:.3f}"


def main() -> int:
    parser = figures.parser(
        __doc__, models=figures.SHARED / "models", data=figures.SHARED / "data",
        names=(["tiny-mixtral", "tiny-qwen3-moe"], ["tiny-mixtral"]),
        gpu_shares=([Fraction(0), Fraction(1, 4), Fraction(1, 2)], [Fraction(1, 2)]), sequences=(128, 16),
    )  # fmt: skip
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), help="[default: all; --quick: 000]")
    parser.add_argument("--limit", type=int, help="items a task [--quick: 16]")
    parser.add_argument("--keep", type=Path, help="folder that the runs stay in")
    options = figures.parsed(parser)
    options.tables = options.tables or (["000"] if options.quick else list(TABLES))
    options.limit = 16 if options.quick and options.limit is None else options.limit
    if not (options.models / "train_tiny.py").is_file() or not (options.data / "lm_eval_tasks").is_dir():
        where = f"{options.models} and {options.data}"
        return figures.skipped(options, f"no trained checkpoints with their train_tiny.py and tasks in {where}")
    results = figures.Figures(options)
    models, keep = options.models.resolve(), options.keep and options.keep.resolve()
    script = figures.script(models / "train_tiny.py")
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        text, pieces = texts(script, folder), windows(script, folder, options.sequences)
        os.chdir(options.data)
        for table in options.tables:
            for name in options.names:
                started = time.monotonic()
                report = measure(table, models / name, text, folder / f"{table}-{name}", options)
                print(f"\n{TABLES[table]}, {name}: {time.monotonic() - started:.0f} s", flush=True)
                results.tables.append(show(report, name))
                worst = max(row.perplexity or math.inf for row in report.rows[1:])
                what = f"{name}, {TABLES[table].removesuffix('.yaml')}: highest perplexity, of the original's"
                results.add(what, worst / (report.rows[0].perplexity or math.nan), digits=3)
                if table == "000":
                    show_by_context(by_context(folder / f"{table}-{name}" / "run", pieces, options))
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
