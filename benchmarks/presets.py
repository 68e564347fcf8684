"""Which settings keep most at equal stored bits: what the qualities are chosen by.

    python benchmarks/presets.py [--model bundled:tiny-mixtral] [--windows SCRIPT] [--budgets 2.3 2.5 3.1]
        [--variants NAME ...] [--assignments NAME ...] [--effect-sequences 32] [--refine] [--tune SEQUENCES]

Every variant is a way to make replicas (keys of the recipe's section losses), every assignment a way to choose among
them (keys of assign) at the same bits a weight, scales and zero points counted. KL is that of the next token from the
original, in nats, with its standard error over windows; equal: tokens whose likeliest is the same. seconds: processor
time of losses and, with --refine, of training the assigned experts. --tune: also the scales trained on so many
sequences of the calibration text, of what is not refined and, with --refine, of what is. --windows takes calibration
and held-out windows from a training script (`train_tiny.py`) as quality.py does; without it they are the bundled ones
(256 tokens).

Goal: at every number of bits what the preset `fast` does has at most 0.7 of prefix-split's KL (paper 000), over the
same replicas.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import figures  # isort: skip
import torch  # isort: skip
from quality import Windows, sequences  # isort: skip

from moeq import pipeline
from moeq.artifacts.assignment import Assignment
from moeq.errors import BudgetError
from moeq.models.corpus import Sequences
from moeq.recipe import AssignSection
from moeq.stages import assign, evaluate
from moeq.stages.context import Context
from moeq.stages.expert_bytes import expert_weights, total_bytes

WINDOWS = 96  # held-out, evenly thinned
FAST, PAPER, GOAL = "by matrix, mass", "prefix-split", 0.7
MSE = {"clip": "mse"}
ALIKE = {"hessian_weighting": "none"}
PLAIN = ALIKE | {"clip": "minmax"}
LOSSES: dict[str, dict[str, Any]] = {
    "gptq": PLAIN,
    "gptq, mse": MSE,
    "gptq, mse, act order": MSE | {"act_order": True},
    "gptq, mse, 1/16 held out": MSE | {"heldout_fraction": 0.0625},
    "gptq, groups of 128": PLAIN | {"group_size": 128},
    "gptq, mse, symmetric": MSE | {"symmetric": True},
    "gptq, mse, groups of 32": MSE | {"group_size": 32},
    "gptq, mse, groups of 128": MSE | {"group_size": 128},
    "gptq, mse, act order, groups of 128": MSE | {"act_order": True, "group_size": 128},
    "gptq, mse, whole rows": MSE | {"group_size": -1},
    "gptq, mse, all tokens alike, groups of 128": MSE | ALIKE | {"group_size": 128},
    "best of gptq and signround": PLAIN | {"methods": ["gptq", "signround"]},
    "best of gptq and signround, groups of 128": PLAIN | {"methods": ["gptq", "signround"], "group_size": 128},
    "best of gptq and signround, mse, groups of 128": MSE | {"methods": ["gptq", "signround"], "group_size": 128},
    "best, mse, all tokens alike, groups of 128": MSE | ALIKE | {"methods": ["gptq", "signround"], "group_size": 128},
    "trellis, 256 states": {"methods": ["trellis"], "trellis_states": 256},
    "trellis, 1024 states": {"methods": ["trellis"], "trellis_states": 1024},
}
SQUARED = {"method": "optimal", "loss_weighting": "squared"}
MEASURED = {"layer_weighting": "measured"}
MATRICES = {"granularity": "projection"}
ASSIGNMENTS: dict[str, dict[str, Any]] = {
    "prefix-split": {"method": "prefix-split"},
    "by expert": SQUARED,
    "by expert, layers": SQUARED | MEASURED,
    "by matrix": SQUARED | MATRICES,
    "by matrix, mass": SQUARED | MATRICES | {"loss_weighting": "mass"},
    "by matrix, layers": SQUARED | MATRICES | MEASURED,
    "by matrix, layers, mass": SQUARED | MATRICES | MEASURED | {"loss_weighting": "mass"},
    "by expert, effect": {"method": "optimal", "loss_weighting": "effect"},
    "by matrix, effect": {"method": "optimal", "loss_weighting": "effect"} | MATRICES,
    "by matrix, layers, without 1": SQUARED | MATRICES | MEASURED | {"widths": [2, 3, 4, 8]},
    "by matrix, layers, without 8": SQUARED | MATRICES | MEASURED | {"widths": [1, 2, 3, 4]},
    "by matrix, layers, 2 and 4": SQUARED | MATRICES | MEASURED | {"widths": [2, 4]},
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One assignment: stored bits of a weight, KL with its standard error, share of equal top-1."""

    bits: float
    perplexity: float
    kl: float
    stderr: float
    same: float

    def cells(self) -> list[str]:
        """As the table has them."""
        error = f"{self.kl:.4f} ± {self.stderr:.4f}"
        return [f"{self.bits:.3f}", f"{self.perplexity:.2f}", error, f"{100 * self.same:.1f} %"]


class Settings:
    """One model with its text, run through the stages in one directory; replicas are shared by all variants."""

    def __init__(self, model: str, out: Path, windows: Path | None) -> None:
        self.model, self.out, self.windows = model, out, None
        context = self.context({})
        self.tokenizer = context.model.tokenizer
        if windows is not None:
            self.script = figures.script(windows)
            self.script.token_stream = functools.cache(self.script.token_stream)
            self.windows = Windows.of(self.script, self.tokenizer)
            held = sequences(self.windows.heldout)
        else:
            held = context.text.evaluation
        self.ids = held.ids[torch.linspace(0, len(held.ids) - 1, min(len(held.ids), WINDOWS)).long()]
        with torch.no_grad(), context.model.overlay() as overlay:
            self.exact = self.logits(overlay.set())
        self.exact_loss = self.losses(self.exact)

    def context(self, losses: dict[str, Any], **sections: dict[str, Any]) -> Context:
        made = {"bits": [1, 2, 3, 4, 8], "methods": ["gptq"], "group_size": 64} | losses
        sections = {"losses": made, "assign": {"method": "uniform", "bits": 4}} | sections
        given = [f"{name}={json.dumps(section)}" for name, section in sections.items()]
        given += ["dtype=float32", "stream=never", f"store={self.out / 'store'}", "eval.compare=[]"]
        given += ["corpus.sequences=256", "corpus.sequence_length=256", "eval.perplexity.sequence_length=256"]
        context = figures.context(self.model, self.out, given)
        if self.windows is not None:
            context.text.__dict__["calibration"] = sequences({"": self.windows.calibration})
            tune = context.recipe.quantize.tune
            if tune is not None:
                context.text.__dict__["tuning"] = self.tuning(tune.sequences or len(self.windows.calibration))
        return context

    def tuning(self, count: int) -> Sequences:
        """Windows of the training text, as many of every domain, the domains by turns."""
        count //= len(self.script.DOMAINS)
        streams = [self.script.token_stream(self.tokenizer, domain, "train") for domain in self.script.DOMAINS]
        cut = torch.stack([self.script.windows(stream, 256, count) for stream in streams], 1)
        return sequences({"": cut.transpose(0, 1).flatten(0, 1)})

    def logits(self, model: Any) -> torch.Tensor:
        return torch.cat([model(input_ids=batch).logits.log_softmax(-1) for batch in self.ids.long().split(16)])

    def losses(self, logits: torch.Tensor) -> float:
        return -float(logits[:, :-1].gather(-1, self.ids[:, 1:, None].long()).mean())

    def measured(self, context: Context, assignment: Assignment, *, exported: bool = False) -> Measured:
        """An assignment over the replicas as they are stored, or (exported) as the recipe's own was refined."""
        with torch.no_grad(), context.model.overlay() as overlay:
            found = self.logits(evaluate.replaced(context, overlay, assignment, exported=exported))
        divergence = (self.exact.exp() * (self.exact - found)).sum(-1).mean(-1)
        return Measured(
            bits=8 * total_bytes(context, assignment) / expert_weights(context.model.layers),
            perplexity=math.exp(self.losses(found)),
            kl=float(divergence.mean()),
            stderr=float(divergence.std()) / math.sqrt(len(divergence)),
            same=float((self.exact.argmax(-1) == found.argmax(-1)).double().mean()),
        )


def seconds(context: Context, *stages: str) -> float:
    """Run stages; processor seconds that they took."""
    began = time.process_time()
    pipeline.run(context, stages)
    return time.process_time() - began


def main() -> int:
    options = _options()
    results = figures.Figures(options)
    with tempfile.TemporaryDirectory() as folder:
        bench = Settings(options.model, options.out or Path(folder), options.windows)
        print(f"perplexity as trained {math.exp(bench.exact_loss):.2f}")
        results.table(["settings", "  bits", "perplexity", "             KL", "  equal", "seconds"])
        for variant in options.variants:
            context = bench.context(_losses(variant, options))
            seconds(context, "profile")
            taken = seconds(context, "losses")
            for budget in options.budgets:
                kl = _rows(bench, results, context, variant, budget, taken)
                if {FAST, PAPER} <= set(kl):
                    name = f"{variant}: KL of fast over prefix-split's, {budget} bits"
                    results.add(name, kl[FAST] / kl[PAPER], at_most=GOAL)
    return results.report()


def _losses(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """The section losses of a variant, with the effects that the assignments need."""
    effects = {}
    if any("layers" in name for name in options.assignments):
        effects["layer_effects"] = {"bits": 2, "sequences": options.effect_sequences}
    if any("effect" in name for name in options.assignments):
        effects["expert_effects"] = {"bits": 2, "sequences": 16}
    return LOSSES[variant] | effects


def _rows(
    bench: Settings, results: figures.Figures, context: Context, variant: str, budget: str, taken: float
) -> dict[str, float]:
    """A row for every assignment within a budget, and one refined; the KL of those that are not."""
    options, kl = results.options, {}
    methods = context.recipe.losses.methods
    quantizer = "best" if len(methods) > 1 else methods[0]
    for name in options.assignments:
        keys = ASSIGNMENTS[name] | {"bits_per_weight": budget, "quantizer": quantizer}
        row = f"{budget} {variant}; {name}"
        try:
            made = assign.make(context, AssignSection.of(**keys), "bench")
        except BudgetError as error:
            results.left_out(row, str(error))
            continue
        found = bench.measured(context, made)
        kl[name] = found.kl
        results.row(row, *found.cells(), f"{taken:.0f}")
        for then, section in _trainings(options).items():
            trained = bench.context(_losses(variant, options), assign=keys, quantize=section)
            seconds(trained, "assign")
            training = seconds(trained, "quantize")
            found = bench.measured(trained, assign.load(trained), exported=True)
            results.row(f"{row}; {then}", *found.cells(), f"{taken + training:.0f}")
    return kl


def _trainings(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The section quantize of everything that is trained after an assignment."""
    tune = {"tune": {"sequences": options.tune}} if options.tune else {}
    every = {"tuned": tune} if tune else {}
    if options.refine:
        every["refined"] = {"refine": {}}
        every |= {"refined, tuned": {"refine": {}} | tune} if tune else {}
    return every


def _options() -> argparse.Namespace:
    parser = figures.parser(__doc__, model="bundled:tiny-mixtral", budgets=(["2.3", "2.5", "3.1"], ["2.3"]))
    every, preset = "gptq, mse", "gptq, mse, groups of 128"
    parser.add_argument("--windows", type=Path, help="a training script whose text and windows are taken")
    parser.add_argument("--variants", nargs="+", choices=list(LOSSES), help=f"[default: {every} and {preset}]")
    parser.add_argument("--assignments", nargs="+", choices=list(ASSIGNMENTS), default=[PAPER, FAST])
    parser.add_argument(
        "--effect-sequences", type=int, default=32, metavar="N", help="that layers' effects are seen on"
    )
    parser.add_argument("--refine", action="store_true", help="also train the assigned experts (quantize.refine)")
    parser.add_argument("--tune", type=int, metavar="SEQUENCES", help="also tune their scales (quantize.tune)")
    parser.add_argument("--out", type=Path, help="keep the run here")
    options = figures.parsed(parser)
    options.variants = options.variants or ([preset] if options.quick else [every, preset])
    return options


if __name__ == "__main__":
    sys.exit(main())
