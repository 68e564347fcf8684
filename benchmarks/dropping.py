"""What it is worth that experts may be dropped (assign.drop), also on text that calibration has not seen.

    python benchmarks/dropping.py [--models MODELS] [--names tiny-mixtral tiny-qwen3-moe] [--budgets 1.8 2.0 2.3 3.0]
        [--calibration every wiki] [--out FOLDER]

MODELS as frontier.py has it, which says too what is calibrated and measured on; the preset balanced's replicas and
objective (trellis codes of 256 states, layers by their effect, a width for every matrix). For every budget the least
objective, with and without dropping experts: KL to the original on held-out windows of every domain.

--calibration: `every` is as many windows of each domain; the name of a domain is its windows alone, so that experts
which only the others choose are not reached, and may be dropped.

Goals: calibrated on every domain, dropping loses no more at any budget; calibrated on one, no more over all domains.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import figures  # isort: skip
import frontier  # isort: skip
import presets  # isort: skip
import torch  # isort: skip

from moeq.artifacts.assignment import Assignment
from moeq.recipe import AssignSection
from moeq.stages import assign, evaluate
from moeq.stages.context import Context

TRELLIS, EVERY = "trellis, 256 states", "every"


class Bench:
    """One model, calibrated on some of the text."""

    def __init__(self, model: Path, calibration: str, out: Path) -> None:
        self.settings = presets.Settings(str(model), out, model.parent / "train_tiny.py")
        windows = self.settings.windows
        assert windows is not None
        self.domains = windows.heldout
        if calibration != EVERY:
            place, each = [*self.domains].index(calibration), len(windows.calibration) // len(self.domains)
            alone = windows.calibration[place * each : (place + 1) * each]
            self.settings.windows = replace(windows, calibration=alone)
        self.context = self.settings.context(frontier.LOSSES[TRELLIS] | frontier.EFFECTS)
        presets.seconds(self.context, "profile", "losses")
        self.exact = self.outputs(self.context, None)

    @torch.no_grad()
    def outputs(self, context: Context, assignment: Assignment | None) -> dict[str, torch.Tensor]:
        """Logarithmic probabilities of every domain's held-out windows."""
        with context.model.overlay() as overlay:
            model = overlay.set() if assignment is None else evaluate.replaced(context, overlay, assignment)
            return {
                domain: torch.cat([model(input_ids=batch).logits.log_softmax(-1) for batch in ids.long().split(8)])
                for domain, ids in self.domains.items()
            }

    def assigned(self, budget: str, *, drop: bool) -> Assignment:
        section = AssignSection.of(**frontier.MIXED, bits_per_weight=budget, quantizer="trellis", drop=drop)
        return assign.make(self.context, section, "bench")

    def divergences(self, assignment: Assignment) -> dict[str, float]:
        """KL to the original by domain, in nats a token."""
        found = self.outputs(self.context, assignment)
        return {
            domain: float((exact.exp() * (exact - found[domain])).sum(-1).mean())
            for domain, exact in self.exact.items()
        }


def rows(bench: Bench, results: figures.Figures, name: str, calibration: str) -> None:
    """A table of every budget, with and without dropping."""
    results.table(
        [f"{name}, calibrated on {calibration}", "  dropped", *(f"{each:>11}" for each in bench.domains), "  mean"]
    )
    for budget in results.options.budgets:
        means = {}
        for drop in (False, True):
            made = bench.assigned(budget, drop=drop)
            every = [choice for layer in made.layers for choice in layer.experts]
            found = bench.divergences(made)
            means[drop] = sum(found.values()) / len(found)
            gone = f"{sum(choice.is_dropped for choice in every)} of {len(every)}" if drop else ""
            label = f"{budget} bits, {'dropping' if drop else 'all kept'}"
            results.row(label, gone, *(f"{kl:.4f}" for kl in found.values()), f"{means[drop]:.4f}")
        what = f"{name}, calibrated on {calibration}: KL with dropping over that without, {budget} bits"
        results.add(what, means[True] / means[False], digits=3, at_most=1.0)


def main() -> int:
    options = _options()
    if not (options.models / "train_tiny.py").is_file():
        return figures.skipped(options, f"no trained checkpoints with their train_tiny.py in {options.models}")
    results = figures.Figures(options)
    with tempfile.TemporaryDirectory() as folder:
        for name, calibration in itertools.product(options.names, options.calibration):
            out = (options.out or Path(folder)) / f"{name}-{calibration}"
            rows(Bench(options.models / name, calibration, out), results, name, calibration)
            results.keep()
    return results.report()


def _options() -> argparse.Namespace:
    parser = figures.parser(
        __doc__, models=figures.SHARED / "models", names=(["tiny-mixtral", "tiny-qwen3-moe"], ["tiny-mixtral"]),
        budgets=(["1.8", "2.0", "2.3", "3.0"], ["2.3"]), calibration=([EVERY, "wiki"], [EVERY]),
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="keep the runs here")
    return figures.parsed(parser)


if __name__ == "__main__":
    sys.exit(main())
