"""Perplexity, KL and 4-way accuracy of every way to assign bits, at 2.0, 2.5 and 3.0 code bits, with the same replicas.

    python benchmarks/assignment_quality.py [--model bundled:tiny-mixtral] [--calibration FILE ...]
        [--evaluation FILE ...] [--windows SCRIPT] [--tasks NAME ... --data FOLDER]

--windows takes calibration and evaluation from a training script (`train_tiny.py`) instead, as benchmarks/quality.py
does: 32 calibration windows of 256 tokens and 24 held-out ones of each domain. --tasks: lm-eval tasks, those of FOLDER
/lm_eval_tasks among them, whose data lie below FOLDER; accuracy is the mean over tasks.

Expert bytes count scales and zero points. `optimal` has the bytes of uniform at 2 and 3 bits, of prefix-split at 2.5;
under each mopeq row stands `optimal` at the same bytes. optimal-matrices: a width for every matrix, layers weighted by
their measured effects. gap: the objective over the proven optimum of the same budget, both by the row's own weighting.
Perplexity is the geometric mean over domains, KL that from the original in nats a token with its standard error; equal:
tokens whose likeliest is the same. won back: the share of what uniform 2-bit loses that is not lost. --refine: the
run's own assignment is refined; --only: names of the rows beside it. Goals: at 2 bits optimal-matrices wins back at
least --goal, and at 3 bits is within 0.6 % of uniform 4-bit.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import figures
from quality import Windows, sequences

from moeq import pipeline
from moeq.artifacts.evaluation import EvalRow
from moeq.assigners.report import score
from moeq.progress import Reporter
from moeq.recipe import NamedAssignSection, Recipe
from moeq.stages import assign, evaluate
from moeq.stages.context import Context
from moeq.stages.expert_bytes import total_bytes
from moeq.tables import human_bytes

CLOSE = 0.006  # of uniform 4-bit's perplexity, at 3 bits
MATRICES = "optimal-matrices"
AVERAGES = ("2", "2.5", "3")
NEEDED = ("uniform-4", "uniform-2", f"{MATRICES}-2", f"{MATRICES}-3")  # by the goals
Entry = dict[str, Any]


def main() -> int:
    options = arguments()
    if options.quick and options.windows is None:
        return figures.skipped(options, f"no trained checkpoints with their train_tiny.py in {figures.SHARED}")
    if options.data is not None:
        os.chdir(options.data)  # tasks name their data from there
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "run"
        first = context_of(options, out, [])
        pipeline.run(first, ("profile", "losses", "assign"))
        compare = [entry for entry in entries(first, options) if options.only is None or entry["name"] in options.only]
        context = context_of(options, out, compare)
        pipeline.run(context, ("profile", "losses", "assign", "quantize", "export", "eval"))
        rows = {row.name: row for row in evaluate.load(context).rows}
        gaps = {section.name: gap(context, section) for section in context.recipe.eval.compare}
    return show(rows, gaps, options)


def arguments() -> argparse.Namespace:
    parser = figures.parser(__doc__, model="bundled:tiny-mixtral", sequences=128, group_size=64, goal=0.55)
    parser.add_argument("--calibration", nargs="+", default="bundled")
    parser.add_argument("--evaluation", nargs="+", default="bundled")
    parser.add_argument("--windows", type=Path, help="a training script whose text and windows are taken")
    parser.add_argument("--tasks", nargs="*", default=["moeq_continuation"], help="lm-eval tasks")
    parser.add_argument("--data", type=Path, help="folder with the data of the tasks and lm_eval_tasks/")
    parser.add_argument("--methods", nargs="+", default=["gptq"], help="quantizers; of several, the best is taken")
    parser.add_argument("--set", action="append", default=[], help="key=value of the losses section, such as act_order")
    parser.add_argument("--weighting", choices=("mass", "squared", "none"), default="squared")
    parser.add_argument("--layer-weighting", choices=("measured", "none"), default="none")
    parser.add_argument("--only", nargs="*", help="names of the rows that are measured [default: all]")
    parser.add_argument("--refine", action="store_true", help="refine the run's own assignment (quantize.refine)")
    parser.add_argument("--out", type=Path, help="keep the run here")
    options = figures.parsed(parser)
    if options.quick:  # the trained model that the goal was set on, only what the goals need
        options.tasks, options.only, trained = [], NEEDED, figures.SHARED / "models"
        if (trained / "train_tiny.py").is_file():
            options.model, options.windows = str(trained / "tiny-mixtral"), trained / "train_tiny.py"
    for name in ("windows", "out", "data"):
        if getattr(options, name) is not None:
            setattr(options, name, getattr(options, name).resolve())
    if Path(options.model).exists():
        options.model = str(Path(options.model).resolve())
    return options


def context_of(options: argparse.Namespace, out: Path, compare: list[Entry]) -> Context:
    """The run: one recipe, the assignments to compare as entries of eval.compare."""
    import yaml

    shared = shared_of(options)
    recipe = Recipe.model_validate(
        {
            "name": "optimal-2.0",
            "dtype": "float32",
            "corpus": {"source": options.calibration, "sequences": options.sequences, "sequence_length": 256},
            "losses": {
                "methods": options.methods,
                "bits": [1, 2, 3, 4],
                "group_size": options.group_size,
                "layer_effects": {"bits": 2, "sequences": 32},
            }
            | {key: yaml.safe_load(value) for key, _, value in (key.partition("=") for key in options.set)},
            "assign": {"method": "optimal", "code_bits": 2, **shared},
            "quantize": {"refine": {} if options.refine else None},
            "eval": {
                "perplexity": {"source": options.evaluation, "sequence_length": 256},
                "tasks": options.tasks,
                "include_path": None if options.data is None else str(options.data / "lm_eval_tasks"),
                "compare": compare,
            },
        }
    )
    context = Context(recipe=recipe, model_name=options.model, out=out, reporter=Reporter(quiet=True))
    if options.windows is not None:
        windows = Windows.of(figures.script(options.windows), context.model.tokenizer)
        context.text.__dict__["calibration"] = sequences({"": windows.calibration})
        context.text.__dict__["evaluation"] = sequences(windows.heldout)
    return context


def shared_of(options: argparse.Namespace) -> Entry:
    """What every assignment has in common: whose replicas, and the objective that it is measured by."""
    layers = {"layer_weighting": "measured"} if options.layer_weighting == "measured" else {}
    quantizer = "best" if len(options.methods) > 1 else options.methods[0]
    return {"quantizer": quantizer, "loss_weighting": options.weighting, **layers}


def entries(context: Context, options: argparse.Namespace) -> Iterator[Entry]:
    """The assignments to compare; those of `optimal` at the bytes that others take."""
    shared = shared_of(options)
    printed = shared | {"loss_weighting": "none"}
    mass = shared | {"loss_weighting": "mass"}

    def size(entry: Entry) -> int:
        made = assign.make(context, NamedAssignSection(**entry), entry["name"])
        return total_bytes(context, made)

    yield from (shared | {"name": f"uniform-{bits}", "method": "uniform", "bits": bits} for bits in (4, 3, 2))
    for average in AVERAGES:
        budget = {"code_bits": average}
        split = mass | budget | {"name": f"prefix-split-{average}", "method": "prefix-split"}
        yield split
        yield printed | budget | {"name": f"prefix-split-printed-{average}", "method": "prefix-split"}
        yield shared | budget | {"name": f"frequency-{average}", "method": "frequency"}
        if average == "2.5":
            limit = size(split)
        else:
            limit = size(shared | {"name": "u", "method": "uniform", "bits": int(average)})
        yield shared | {"name": f"optimal-{average}", "method": "optimal", "expert_bytes": limit}
        matrices = {"granularity": "projection", "layer_weighting": "measured"}
        yield shared | matrices | {"name": f"{MATRICES}-{average}", "method": "optimal", "expert_bytes": limit}
        if average == "2":
            best = {"method": "optimal", "expert_bytes": limit, "quantizer": shared["quantizer"]}
            for weighting in ("mass", "squared", "none"):
                for layers in (None, "measured"):
                    name = f"optimal-2-{weighting}{'' if layers is None else '-layers'}"
                    yield best | {"name": name, "loss_weighting": weighting, "layer_weighting": layers}
            yield best | {"name": "optimal-2-scope-layer", "scope": "layer", "loss_weighting": options.weighting}
            name = "optimal-2-granularity-layer"
            yield best | {"name": name, "granularity": "layer", "loss_weighting": options.weighting}
    half = context.model.layers[0].num_experts // 2
    for selector in (True, False):
        name = f"hot{half}+prefix-split-2{'' if selector else '-no-selector'}"
        hot = {"name": name, "gpu_experts": half, "selector": selector, "code_bits": 2}
        yield mass | hot | {"method": "prefix-split"}
    for metric in ("frequency", "hessian", "hybrid"):
        for scope in ("layer", "model"):
            name = f"mopeq-{metric}-{scope}"
            entry = shared | {"name": name, "method": "mopeq", "metric": metric, "scope": scope}
            yield entry
            yield shared | {"name": f"optimal-as-{name}", "method": "optimal", "expert_bytes": size(entry)}


def gap(context: Context, section: NamedAssignSection) -> float | None:
    """Objective of an entry over the proven optimum of its budget, less 1."""
    inputs = assign.inputs_of(context, section, section.name)
    return score(inputs, assign.decide(inputs)).gap


def mean(row: EvalRow) -> float:
    """Geometric mean of the domains' perplexities."""
    return math.exp(sum(map(math.log, row.perplexity_by_domain.values())) / len(row.perplexity_by_domain))


def show(rows: dict[str, EvalRow], gaps: dict[str, float | None], options: argparse.Namespace) -> int:
    known = ("original", "uniform-2", "uniform-4")
    exact, two, four = (mean(rows[name]) if name in rows else math.nan for name in known)
    head = f"{'assignment':34} {'bits':>5} {'experts':>9} {'ppl':>7} {'KL':>15} {'equal':>6} {'won back':>9} {'gap':>7}"
    head += f" {'accuracy':>9}"
    print(head)
    for name, row in rows.items():
        value = mean(row)
        back = "" if name == "original" or math.isnan(two) else f"{100 * (two - value) / (two - exact):8.1f}%"
        bits = f"{row.bits_per_weight:.2f}"
        over = gaps.get(name)
        shown = "" if over is None else f"{100 * over:6.1f}%"
        correct = "" if row.accuracy is None else f"{100 * row.accuracy:.1f}%"
        size, far = human_bytes(row.expert_bytes), row.divergence
        kl = "" if far is None else f"{far.kl:.4f} ± {far.kl_stderr or 0:.4f}"
        same = "" if far is None else f"{100 * far.same_top:.1f}%"
        print(f"{name:34} {bits:>5} {size:>9} {value:7.2f} {kl:>15} {same:>6} {back:>9} {shown:>7} {correct:>9}")
    stderr = rows["original"].accuracy_stderr
    if stderr is not None:
        print(f"standard error of an accuracy: {100 * stderr:.1f} points")
    if not {f"{MATRICES}-2", f"{MATRICES}-3"} <= set(rows):
        return 0
    won = (two - mean(rows[f"{MATRICES}-2"])) / (two - exact)
    three = mean(rows[f"{MATRICES}-3"]) / four - 1
    results = figures.Figures(options)
    results.add("optimal over matrices at 2 bits wins back", 100 * won, "%", at_least=100 * options.goal, digits=1)
    results.add("at 3 bits, beyond uniform 4-bit's perplexity", 100 * three, "%", at_most=100 * CLOSE)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
