"""Ten assignments of one model in one `moeq eval`, against ten runs of it.

    python benchmarks/evaluate.py [--model DIR] [--tasks moeq_continuation] [--include-path DIR] [--limit 40]
                                  [--sequences 32] [--by-context]

Makes a run of the model with ten assignments, then measures them one after the other, each by a `moeq eval` of its own,
and all by one that loads the model once and swaps replicas in place. --by-context: instead, ten ways of placing experts
by context, whose prefills are shared. The rows must have the same values. Goal: at most a third of the time.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import figures

from moeq import pipeline
from moeq.bundled import bundled_path

GOAL = 1 / 3
ASSIGNMENTS = [
    *({"method": "uniform", "bits": bits} for bits in (2, 3, 4)),
    *({"method": "prefix-split", "code_bits": bits, "gpu_experts": k} for bits in ("2", "5/2") for k in (0, 2)),
    *({"method": "optimal", "code_bits": bits} for bits in ("2", "5/2", "3")),
]
BY_CONTEXT = [
    f"gpu_experts={k},code_bits={bits},selector={selector}"
    for bits, counts in ((2, (0, 1, 2)), (3, (1, 2)))
    for k in counts
    for selector in ("true", "false")
]


def make_run(model: Path, out: Path, sequences: int) -> list[str]:
    """A run with its replicas; returns the names of its assignments."""
    compare = [{"name": f"a{number}", **section} for number, section in enumerate(ASSIGNMENTS)]
    overrides = [
        f"corpus.sequences={sequences}", "corpus.sequence_length=256", "losses.bits=[1,2,3,4]", "losses.methods=[gptq]",
        "losses.group_size=64", "losses.per_projection=false", f"eval.compare={json.dumps(compare)}", "dtype=float32",
    ]  # fmt: skip
    pipeline.run(figures.context(model, out, overrides), ("profile", "losses", "assign"))
    return [f"{out}:{section['name']}" for section in compare]


def evaluate(words: list[str], options: list[str]) -> tuple[dict[str, dict[str, Any]], float]:
    """{row: {measure: value}} of one `moeq eval`, and the seconds that it took."""
    started = time.perf_counter()
    table = figures.moeq_json("eval", *words, *options)["table"]
    seconds = time.perf_counter() - started
    return {row["name"]: {name: cell["value"] for name, cell in row["cells"].items()} for row in table}, seconds


def main() -> int:
    parser = figures.parser(
        __doc__, model=bundled_path("tiny-mixtral"), tasks="moeq_continuation", limit=(40, 8), sequences=(32, 8),
        by_context=False,
    )  # fmt: skip
    parser.add_argument("--include-path", type=Path)
    asked = figures.parsed(parser)
    results = figures.Figures(asked)
    options = ["--tasks", asked.tasks, "--limit", str(asked.limit)]
    options += ["--include-path", str(asked.include_path)] if asked.include_path is not None else []
    with tempfile.TemporaryDirectory(prefix="moeq-evaluate-") as folder:
        out = Path(folder) / "run"
        names = make_run(asked.model, out, asked.sequences)
        several = [[name] for name in names]
        whole = names
        if asked.by_context:
            several = [[str(out), "--context-aware", way] for way in BY_CONTEXT]
            whole = [str(out), *(part for way in BY_CONTEXT for part in ("--context-aware", way))]
        apart: dict[str, dict[str, Any]] = {}
        total = 0.0
        for words in several:
            row, seconds = evaluate(words, options)
            apart |= row
            total += seconds
            print(f"  {list(row)[-1]:40} {seconds:6.1f} s  {list(row.values())[-1]}", flush=True)
        together, seconds = evaluate(whole, options)
    different = {name: (row, apart.get(name)) for name, row in together.items() if row != apart.get(name)}
    print(f"{len(several)} at once {seconds:.1f} s, one by one {total:.1f} s", *different.items(), sep="\n")
    results.add("rows with other values", len(different) + abs(len(apart) - len(together)), at_most=0, digits=0)
    how = "ways of placing by context" if asked.by_context else "assignments"
    results.add(f"{len(several)} {how} at once, of the time one by one", seconds / total, at_most=GOAL)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
