"""The frontier: KL to the original against all stored bits of an expert's weight, for every way to store experts.

    python benchmarks/frontier.py [--models MODELS] [--names tiny-mixtral tiny-qwen3-moe] [--methods NAME ...]
        [--bits 2 3 4] [--budgets 2.1 2.3 2.6 3.0 3.5 4.0] [--tune 512] [--peers gptqmodel auto-round]
        [--out FOLDER] [--seconds 150] --json FILE

MODELS is a folder of checkpoints with their training script (`train_tiny.py`: text and windows) beside them, by default
../shared/models; without it nothing is measured. Calibration: 32 windows of 256 tokens of each domain's training text;
KL (nats a token, from the original) and perplexity: 24 held-out ones of each. Bits count codes, scales, zero points and
states. RTN, GPTQ (columns by activation) and SignRound have groups of 128 with clipped grids; learned codes are GPTQ's
trained with `quantize.refine`. uniform: one width for all; mixed: `optimal` by matrix within the budget, layers
weighted by their measured effects; tuned: mixed, then `quantize.tune` on so many sequences of the training text (0:
none) at 2.3 and 3.0 bits; dropping: experts that are worth nothing have no bits, as the presets `balanced` (256 states,
mixed) and `best` (1024, tuned) do. A method's budgets share one loss table, which --out keeps. The peers quantize the
same experts from the same windows at 2, 3 and 4 bits in groups of --group (gptqmodel with zero points, auto-round
without); for their environments see quality.py.

FILE keeps every point: a further run measures only those that it lacks, and stops before the next one when --seconds
are over. FILE.svg is the plot of them. A point's seconds are the processor's, of making what is measured; the loss
table counts in the point that made it. Goals: at 3.0 bits KL of at most .0125 on tiny-mixtral; at the bits of every
point of a peer moeq's best mixed point, of no more bits, has less KL.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import figures  # isort: skip
import presets  # isort: skip
import quality  # isort: skip
from frontier_plot import DROPPING, Point, plot  # isort: skip

from moeq.recipe import AssignSection
from moeq.stages import assign

GROUPS = {"group_size": 128}
GPTQ = presets.LOSSES["gptq, mse, act order, groups of 128"]
LOSSES: dict[str, dict[str, Any]] = {
    "RTN": {"methods": ["rtn"]} | GROUPS,
    "GPTQ": GPTQ,
    "SignRound": {"methods": ["signround"]} | GROUPS,
    "learned codes": GPTQ,
    "trellis, 256 states": presets.LOSSES["trellis, 256 states"],
    "trellis, 1024 states": presets.LOSSES["trellis, 1024 states"],
}
TRAINED = {"learned codes": {"refine": {}}}
EFFECTS = {"layer_effects": {"bits": 2, "sequences": 32}}
MIXED = presets.ASSIGNMENTS["by matrix, layers, mass"]
TUNED, TUNED_BUDGETS = ("learned codes", "trellis, 1024 states"), ("2.3", "3.0")
PRESETS = (("trellis, 256 states", "mixed"), ("trellis, 1024 states", "tuned"))  # of which experts are dropped, too
PEER_BITS = (2, 3, 4)
SYMMETRIC = {"gptqmodel": False, "auto-round": True}
GOAL_MODEL, GOAL_BITS, GOAL_KL = "tiny-mixtral", 3.0, 0.0125
Key = tuple[str, str, str]  # method, kind, and the bits that were asked for


class Frontier:
    """One model: what is measured of it, and how."""

    def __init__(self, options: argparse.Namespace, name: str, out: Path) -> None:
        self.options, self.name, self.out = options, name, out / name
        self.model, self.script = options.models / name, options.models / "train_tiny.py"
        self._kept: tuple[Path, presets.Settings] | None = None

    def wanted(self) -> list[Key]:
        """The points, in the order in which they are measured."""
        options = self.options
        every = [
            (method, kind, asked)
            for method in options.methods
            for kind, each in (("uniform", options.bits), ("mixed", options.budgets))
            for asked in each
        ]
        every += [(peer, "peer", str(bits)) for bits in PEER_BITS for peer in options.peers]
        every += [
            (method, "tuned", budget)
            for method in reversed(TUNED)
            for budget in TUNED_BUDGETS
            if options.tune and method in options.methods and budget in options.budgets
        ]
        every += [
            (method, f"{kind}{DROPPING}", budget)
            for method, kind in PRESETS
            for budget in TUNED_BUDGETS
            if (method, kind, budget) in every
        ]
        return sorted(every, key=rank)

    def measure(self, key: Key) -> Point:
        method, kind, asked = key
        found, seconds = self._peer(method, int(asked)) if kind == "peer" else self._ours(*key)
        return Point(self.name, method, kind, asked, **asdict(found), seconds=round(seconds, 1))

    def _settings(self, method: str) -> presets.Settings:
        """One run directory for a method's loss table."""
        out = self.out / "-".join(LOSSES[method].get("methods", ["gptq"]) + method.split()[1:2])
        if self._kept is None or self._kept[0] != out:
            self._kept = None
            self._kept = (out, presets.Settings(str(self.model), out, self.script))
        return self._kept[1]

    def _ours(self, method: str, kind: str, asked: str) -> tuple[presets.Measured, float]:
        bench, losses = self._settings(method), LOSSES[method] | EFFECTS
        quantizer = losses.get("methods", ["gptq"])[0]
        section = (
            {"method": "uniform", "bits": int(asked), "quantizer": quantizer}
            if kind == "uniform"
            else MIXED | {"bits_per_weight": asked, "quantizer": quantizer, "drop": kind.endswith(DROPPING)}
        )
        training = TRAINED.get(method, {})
        if kind.startswith("tuned"):
            training = training | {"tune": {"sequences": self.options.tune}}
        context = bench.context(losses, **({"assign": section, "quantize": training} if training else {}))
        seconds = presets.seconds(context, "profile", "losses")
        if not training:
            return bench.measured(context, assign.make(context, AssignSection.of(**section), "bench")), seconds
        seconds += presets.seconds(context, "assign", "quantize")
        return bench.measured(context, assign.load(context), exported=True), seconds

    def _peer(self, peer: str, bits: int) -> tuple[presets.Measured, float]:
        """RuntimeError where it cannot be had."""
        home = self.options.environments / peer
        problem = figures.environment(home, quality.PINS, [quality.PACKAGES[peer], "torch", "transformers"])
        if problem is not None:
            raise RuntimeError(problem)
        bench, group = self._settings("GPTQ"), self.options.group
        assert bench.windows is not None
        windows = quality.write_windows(bench.windows, self.out)
        found = quality.peer_figure(peer, home, bench.model, windows, bits, group, quality.ITERATIONS)
        measured = {name: found[name] for name in ("perplexity", "kl", "stderr", "same")}
        return presets.Measured(bits=peer_bits(peer, bits, group), **measured), found["processor"]


def rank(key: Key) -> int:
    """When a point is measured: what takes seconds first, then what the goals and the tuned points need."""
    method, kind, asked = key
    if kind == "peer":
        return 1 if asked != str(PEER_BITS[-1]) else 4
    if kind.startswith("tuned"):
        return 3
    if method not in TRAINED:
        return 0
    return 2 if kind == "mixed" and asked in TUNED_BUDGETS else 5


def peer_bits(peer: str, bits: int, group: int) -> float:
    """The least that a peer's format stores for a weight: codes, a 16-bit scale a group and, with them, zero points."""
    return bits + (16 + (0 if SYMMETRIC[peer] else bits)) / group


def read(path: Path | None) -> tuple[list[Point], float]:
    """The points of an earlier run, and the seconds that they took."""
    if path is None or not path.is_file():
        return [], 0.0
    written = json.loads(path.read_text("utf-8"))
    return [Point(**point) for point in written["points"]], written["seconds"]


def goals(results: figures.Figures, points: list[Point]) -> None:
    """KL at 3.0 bits, and against every point of a peer, as far as they were measured."""

    def best(model: str, bits: float, kinds: tuple[str, ...]) -> float:
        kls = [p.kl for p in points if p.model == model and p.kind in kinds and p.bits <= bits]
        return min(kls, default=float("nan"))

    mixed = ("mixed", f"mixed{DROPPING}")
    for model in dict.fromkeys(point.model for point in points):
        goal = {"at_most": GOAL_KL} if model == GOAL_MODEL else {}
        for kinds, how in ((mixed, "not tuned"), ((*mixed, "tuned", f"tuned{DROPPING}"), "tuned or not")):
            found = best(model, GOAL_BITS, kinds)
            results.add(f"{model}: KL at {GOAL_BITS} bits, {how}", found, digits=4, **goal)
        for peer in dict.fromkeys(point.method for point in points if point.kind == "peer"):
            theirs = [p for p in points if p.model == model and p.method == peer]
            ratios = [best(model, point.bits, ("mixed",)) / point.kl for point in theirs]
            if ratios:
                results.add(f"{model}: KL of moeq's best mixed, of {peer}'s at most", max(ratios), at_most=1.0)


def tables(results: figures.Figures, points: list[Point]) -> None:
    """A table of every model, a row for each point, by method and bits."""
    for model in dict.fromkeys(point.model for point in points):
        columns = [model, "kind", "bits", "KL", "standard error", "perplexity", "equal top-1", "processor seconds"]
        shown = sorted((p for p in points if p.model == model), key=lambda p: (p.order, p.bits))
        results.table(columns, [point.cells() for point in shown])


def measured(
    options: argparse.Namespace, points: list[Point], out: Path, keep: Callable[[], None]
) -> Iterator[tuple[str, str]]:
    """Measure what lacks, as long as there is time; what was left out, and why."""
    models = [Frontier(options, name, out) for name in options.names]
    there, lacking = {point.key for point in points}, 0
    by_turns = zip(*([(bench, key) for key in bench.wanted()] for bench in models), strict=True)
    wanted = [(bench, key) for turn in by_turns for bench, key in turn if (bench.name, *key) not in there]
    for bench, key in wanted:
        if time.monotonic() - options.started > options.seconds:
            lacking += 1
            continue
        try:
            points.append(bench.measure(key))
        except RuntimeError as error:
            yield f"{bench.name}: {', '.join(key)} bits", str(error)
            continue
        print(points[-1].model, *points[-1].cells(), sep="  ", flush=True)
        keep()
    if lacking:
        yield f"{lacking} points", "the time was over; run the same command again"


def main() -> int:
    options = _options()
    if not (options.models / "train_tiny.py").is_file():
        return figures.skipped(options, f"no trained checkpoints with their train_tiny.py in {options.models}")
    results = figures.Figures(options)
    points, earlier = read(options.json)
    results.details["points"] = []

    def keep() -> None:
        results.details["points"] = [asdict(point) for point in points]
        results.before = earlier
        results.keep()

    with tempfile.TemporaryDirectory() as folder:
        for what, why in measured(options, points, options.out or Path(folder), keep):
            results.left_out(what, why)
    keep()
    tables(results, points)
    goals(results, points)
    if options.json is not None:
        drawing = options.json.with_suffix(".svg")
        drawing.write_text(plot(points), "utf-8")
        results.details["plot"] = [drawing.name, "KL to the original against stored bits of an expert's weight"]
    return results.report()


def _options() -> argparse.Namespace:
    every = list(LOSSES)
    parser = figures.parser(
        __doc__, models=figures.SHARED / "models", names=(["tiny-mixtral", "tiny-qwen3-moe"], ["tiny-mixtral"]),
        methods=(every, ["GPTQ", "trellis, 1024 states"]), bits=(["2", "3", "4"], ["2", "3"]),
        budgets=(["2.1", "2.3", "2.6", "3.0", "3.5", "4.0"], ["2.3", "3.0"]), tune=(512, 0), group=64, seconds=1e9,
        environments=Path.home() / ".cache" / "moeq" / "benchmarks",
    )  # fmt: skip
    parser.add_argument("--peers", nargs="*", default=[], choices=list(SYMMETRIC))
    parser.add_argument("--out", type=Path, help="keep the runs here")
    options = figures.parsed(parser)
    if unknown := [name for name in options.methods if name not in every]:
        parser.error(f"no method {unknown[0]!r}; there are {', '.join(every)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
