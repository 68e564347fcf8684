"""The papers' accuracy tables on small trained checkpoints: the -tiny recipes' rows on other models, text and tasks.

    python benchmarks/tables.py MODELS DATA [--tables 000 001 003] [--names tiny-mixtral tiny-qwen3-moe]
                                [--gpu-shares 0 1/4 1/2] [--sequences 128] [--limit N] [--keep FOLDER]

MODELS is a folder of checkpoints with their training script (`train_tiny.py`: text by domain) beside them, DATA a
folder with `lm_eval_tasks/continuation_4way.yaml` and `word_order_4way.yaml`, which name their data relative to it.
Without them nothing is measured. Calibration: windows of 256 tokens of the training text, the domains in equal shares;
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
import importlib.util
import json
import os
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported
from moeq import pipeline
from moeq.artifacts.evaluation import EvalReport, EvalRow
from moeq.comparison import command
from moeq.comparison.command import Asked
from moeq.evaluation import comparison, document
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import evaluate
from moeq.stages.context import Context

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
TABLES = {"000": "paper-000-table3-tiny.yaml", "001": "paper-001-table1-tiny.yaml", "003": "paper-003-table2-tiny.yaml"}
TASKS = {"continuation_4way": "continuation", "word_order_4way": "word order"}
MEASURES = {"perplexity": "perplexity", **TASKS}
PIECE = 640  # characters, at most 256 tokens of these models
STAGES = ("profile", "losses", "assign", "quantize", "export", "eval")
NO_SELECTOR = "-no-selector"


def texts(script: ModuleType, folder: Path) -> dict[str, Path]:
    """Training and held-out text as rows of text and domain, {split: file}."""
    found = {}
    for split in ("train", "heldout"):
        rows = [{"text": text, "domain": name} for name in script.DOMAINS for text in script.documents(name, split)]
        found[split] = folder / f"{split}.jsonl"
        found[split].write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return found


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
    loaded = load_recipe(path, ["export.verify=false"])
    context = Context(recipe=loaded, model_name=str(model), out=out / "run", reporter=Reporter(quiet=True))
    pipeline.run(context, STAGES)
    return evaluate.load(context)


def show(report: EvalReport) -> None:
    """A Markdown table: perplexity by domain and over all, accuracy by task with its standard error in points."""
    domains = list(report.rows[0].perplexity_by_domain)
    head = ["", "bits", "MB", *domains, "all", *TASKS.values()]
    print(f"| {' | '.join(head)} |")
    print(f"|---|{'---:|' * (len(head) - 1)}")
    for row in report.rows:
        print(f"| {' | '.join(cells(row, domains))} |")


def cells(row: EvalRow, domains: list[str]) -> list[str]:
    bits = "16" if row.average_bits is None else f"{row.average_bits:.2f}"
    accuracy = [f"{100 * row.tasks[name]['acc']:.1f} ± {100 * row.tasks[name]['acc_stderr']:.1f}" for name in TASKS]
    perplexities = [*(row.perplexity_by_domain[domain] for domain in domains), row.perplexity or float("nan")]
    return [row.name, bits, f"{row.expert_bytes / 1e6:.2f}", *(f"{one:.2f}" for one in perplexities), *accuracy]


def windows(script: ModuleType, folder: Path, count: int) -> Path:
    """Held-out pieces of text, each to be read alone: in equal shares of the domains, evenly drawn."""
    rows = []
    for name in script.DOMAINS:
        text = "".join(script.documents(name, "heldout"))
        share = max(1, count // len(script.DOMAINS))
        step = len(text) / share
        rows += [{"text": text[int(n * step) :][:PIECE], "domain": name} for n in range(share)]
    path = folder / "pieces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def by_context(run: Path, text: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of table 000 of a run, placed once for all texts and anew for every text."""
    recipe = load_recipe(run / "recipe.yaml")
    sections = {recipe.name: recipe.assign} | {one.name: one for one in recipe.eval.compare}
    chosen = {name: one for name, one in sections.items() if one.loss_weighting != "none"}
    asked = Asked(
        words=[f"{run}:{name}" for name in ("original", *chosen)],
        overrides=[],
        context_aware=[
            f"gpu_experts={one.gpu_experts},average_bits={one.average_bits},selector={str(one.selector).lower()}"
            for one in chosen.values()
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
    command.run(asked)
    return document.read_rows(run.parent / "by_context.json")


def show_by_context(rows: list[dict[str, Any]]) -> None:
    """A Markdown table, and the paired differences that the selector makes."""
    domains = list(rows[0]["perplexity"]["by_domain"])
    head = ["", *domains, "all", *TASKS.values()]
    print(f"\n| {' | '.join(head)} |")
    print(f"|---|{'---:|' * (len(head) - 1)}")
    for row, entry in zip(rows, comparison.table(rows), strict=True):
        found = row["perplexity"]
        values = [*(found["by_domain"][domain] for domain in domains), found["perplexity"]]
        shown = [entry["cells"][name] for name in TASKS]
        accuracy = [f"{100 * cell.value:.1f} ± {100 * (cell.stderr or 0):.1f}" for cell in shown]
        print(f"| {' | '.join([row['name'], *(f'{one:.2f}' for one in values), *accuracy])} |")
    names = {row["name"]: row for row in rows}
    print("\nwith the selector minus without, 95 % interval and p of a paired bootstrap:")
    for name, row in names.items():
        other = names.get(name.replace(" no selector", "") if " no selector" in name else name.replace(NO_SELECTOR, ""))
        if other is not None and other is not row:
            cells = comparison.table([row, other])[1]["cells"]
            shown = [difference(label, cells[key].change) for key, label in MEASURES.items()]
            print(f"{other['name']}: {'; '.join(shown)}")


def difference(name: str, change: Any) -> str:
    scale = 1 if name == "perplexity" else 100
    values = [scale * one for one in (change.difference, change.low, change.high)]
    return f"{name} {values[0]:+.2f} [{values[1]:+.2f}, {values[2]:+.2f}] p {change.p:.3f}"


def load_script(path: Path) -> ModuleType:
    """The training script as a module."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="?", type=Path, help="folder of the checkpoints")
    parser.add_argument("data", nargs="?", type=Path, help="folder of lm_eval_tasks and what they read")
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--names", nargs="+", default=["tiny-mixtral", "tiny-qwen3-moe"])
    parser.add_argument("--gpu-shares", nargs="+", type=Fraction, default=[Fraction(0), Fraction(1, 4), Fraction(1, 2)])
    parser.add_argument("--sequences", type=int, default=128, help="held-out windows, of all domains together")
    parser.add_argument("--limit", type=int, help="items a task")
    parser.add_argument("--keep", type=Path, help="folder that the runs stay in")
    return parser.parse_args()


def main() -> int:
    options = parse()
    there = options.models and options.data and (options.models / "train_tiny.py").is_file()
    if not there or not (options.data / "lm_eval_tasks").is_dir():
        print("skipped: give the folder of the trained checkpoints and that of the tasks, which are not moeq's")
        return 0
    models, keep = options.models.resolve(), options.keep and options.keep.resolve()
    script = load_script(models / "train_tiny.py")
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
                show(report)
                if table == "000":
                    show_by_context(by_context(folder / f"{table}-{name}" / "run", pieces, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
