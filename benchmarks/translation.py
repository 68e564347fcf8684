"""Table 2 of paper 002 on a toy language: what int8 and int4 experts cost in BLEU and chrF, greedy and with two beams.

    python benchmarks/translation.py [--steps 600] [--sentences 500] [--model MODEL --source FILE --target FILE]

Trains a tiny Switch Transformer (`cipher.py`) for about a minute, and runs `recipes/paper-002-table2.yaml` on it:
weights of the experts alone, symmetric, one scale a channel, rounded to nearest; int4 is measured on the exported
checkpoint. --model: a SwitchTransformersForConditionalGeneration of one's own, with parallel text, instead. Brackets
are intervals of 95 %, paired, by resampled sentences.

Goal: int8 loses at most 0.2 BLEU and int4 at most 0.5, beyond what chance does (the end of the interval that is nearer
to 0). The paper's largest losses are 0.084 and 0.180; its averages over ten pairs of languages 0.007 and 0.167.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import cipher  # isort: skip
import figures  # isort: skip

from moeq import pipeline
from moeq.artifacts.evaluation import Score, Translation
from moeq.stages import evaluate

RECIPE = Path(__file__).parents[1] / "recipes" / "paper-002-table2.yaml"
STAGES = ("profile", "losses", "assign", "quantize", "export", "eval")
GOALS = {"int8": 0.2, "int4": 0.5}  # BLEU
PAPER = {  # paper 002, Table 2: differences in BLEU of int8 and int4
    "en-de, beam 1": (-0.028, -0.052), "en-de, beam 2": (0.051, -0.180), "de-en, beam 1": (-0.084, 0.044),
    "de-en, beam 2": (-0.027, -0.031), "average of 10 pairs, beam 2": (-0.007, -0.167),
}  # fmt: skip


def measure(model: Path, source: Path, target: Path, out: Path, toy: bool) -> Translation:
    """The stages of the recipe up to its evaluation."""
    overrides = [f"eval.translation.source={source}", f"eval.translation.target={target}"]
    if toy:
        overrides += [f"corpus.source={source}"]
        overrides += ["corpus.sequences=16", "corpus.sequence_length=16", "eval.translation.max_new_tokens=12"]
        overrides += ["eval.translation.batch_size=64"]
    context = figures.context(model, out, overrides, RECIPE)
    pipeline.run(context, STAGES)
    measured = evaluate.load(context).translation
    assert measured is not None, "the recipe asks for it"
    return measured


def show(measured: Translation) -> None:
    """The table, the paper's figures below it."""
    print(f"{measured.sentences} sentences; {measured.signatures['bleu']}")
    print(f"{'experts':10} {'beam':>4} {'BLEU':>24} {'difference':>26} {'chrF':>24} {'difference':>26}")
    for row in sorted(measured.scores, key=lambda row: (row.beams, GOALS.get(row.name, 0))):
        cells = (f"{_score(score):>24} {_difference(score):>26}" for score in (row.bleu, row.chrf))
        print(f"{row.name:10} {row.beams:>4} {' '.join(cells)}")
    print("\npaper 002, Table 2 (its own models and data), differences in BLEU:")
    for name, (int8, int4) in PAPER.items():
        print(f"  {name:30} int8 {int8:+.3f}   int4 {int4:+.3f}")


def _score(score: Score) -> str:
    return f"{score.score:.2f}" + _interval(score.low, score.high, ".2f")


def _difference(score: Score) -> str:
    if score.difference is None:
        return "-"
    return f"{score.difference:+.3f}" + _interval(score.difference_low, score.difference_high, "+.3f")


def _interval(low: float | None, high: float | None, form: str) -> str:
    """Nothing of too few sentences."""
    return "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"


def main() -> int:
    parser = figures.parser(__doc__, steps=600, sentences=(500, 200))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--target", type=Path)
    given = figures.parsed(parser)
    own = (given.model, given.source, given.target)
    if any(own) and not all(own):
        parser.error("--model, --source and --target go together")
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        toy = given.model is None
        model, source, target = cipher.save(Path(folder), given.steps, given.sentences) if toy else own
        if toy:
            print(f"trained {given.steps} steps in {time.monotonic() - started:.0f} s")
        measured = measure(model, source, target, Path(folder) / "run", toy)
    show(measured)
    report = figures.Figures(given)
    for name, most in GOALS.items():
        losses = [row.bleu for row in measured.scores if row.name == name and row.bleu.difference_high is not None]
        report.add(f"{name}: largest loss in BLEU", max(-(loss.difference or 0.0) for loss in losses), digits=3)
        beyond = max(0.0, *(-(loss.difference_high or 0.0) for loss in losses))
        report.add(f"{name}: beyond chance", beyond, at_most=most, digits=3)
    return report.report()


if __name__ == "__main__":
    sys.exit(main())
