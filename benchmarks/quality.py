"""Perplexity of small trained checkpoints by quantizer and width: experts only, groups of 64.

    python benchmarks/quality.py [--models MODELS] [--names tiny-mixtral tiny-qwen3-moe] [--bits 4 3 2 1] [--average 2]
                                        [--methods rtn gptq signround] [--set losses.clip=mse]
                                        [--peers gptqmodel auto-round] [--environments FOLDER]

MODELS is a folder of checkpoints with their training script (`train_tiny.py`: text and windows) beside them, by default
../shared/models; without it nothing is measured. --quick: GPTQ and refining at 2 bits from clipped grids, one model.
Calibration: 32 windows of 256 tokens from each domain of the training text. Perplexity: 24 held-out windows of each,
exp of the mean over domains. 200 iterations.

rtn, gptq, signround and best are uniform assignments over the replicas of `moeq losses`, which keeps a quarter of the
calibration sequences apart; signround+refined is a uniform assignment of GPTQ's replicas with `quantize.refine`. With
--average, prefix-split and optimal (weighted by squared routing weights and by layers' measured effects) at that mean
width over the best replicas, as they are and refined.

--peers: the peers' own output on the same windows, each in an environment of its own below --environments, which is
made at the first use (minutes, gigabytes); what cannot be installed or run is named and left out. Recorded figures of
gptqmodel 7.6.0 (asymmetric) and auto-round 0.16.1 (symmetric), the same windows, stand beside in any case.

Goals: gptq no worse than gptqmodel, signround+refined within 0.5 % of auto-round, in no more time than 90 s a width.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import figures  # isort: skip
import torch  # isort: skip
from safetensors.torch import save_file  # isort: skip
from torch import Tensor  # isort: skip

from moeq import pipeline
from moeq.artifacts.assignment import Assignment
from moeq.models.corpus import Sequences
from moeq.recipe import AssignSection
from moeq.registry import QUANTIZERS
from moeq.stages import assign, evaluate
from moeq.stages.context import Context

GROUP = 64
ITERATIONS = 200
RECORDED = {
    "gptqmodel": {
        "tiny-mixtral": {2: 28.01, 3: 24.87, 4: 24.38},
        "tiny-qwen3-moe": {2: 26.20, 3: 23.49, 4: 23.14},
    },
    "auto-round": {
        "tiny-mixtral": {2: 26.01, 3: 24.63, 4: 24.37},
        "tiny-qwen3-moe": {2: 24.58, 3: 23.31, 4: 23.14},
    },
}
AUTO_ROUND_SECONDS = 90  # a width, two quiet cores
TOLERANCE = {"gptqmodel": 1.0, "auto-round": 1.005}
AGAINST = {"gptq": "gptqmodel", "signround+refined": "auto-round"}
WIDTHS = (1, 2, 3, 4)
METHODS = tuple(quantizer.name for quantizer in QUANTIZERS if set(WIDTHS) <= set(quantizer.widths))
BEST = "best"
REFINED = "signround+refined"
MIXED = {"prefix-split": {}, "optimal": {"loss_weighting": "squared", "layer_weighting": "measured"}}
PACKAGES = {"gptqmodel": "gptqmodel==7.6.0", "auto-round": "auto-round==0.16.1"}
PINS = figures.ROOT / "constraints.txt"
Rows = dict[str, dict[int, float]]


@dataclass(frozen=True)
class Windows:
    """Token windows: calibration [S, 256] and, for every domain, held-out ones."""

    calibration: Tensor
    heldout: dict[str, Tensor]

    @classmethod
    def of(cls, script: ModuleType, tokenizer: Any) -> Windows:
        def cut(split: str, count: int) -> dict[str, Tensor]:
            streams = {domain: script.token_stream(tokenizer, domain, split) for domain in script.DOMAINS}
            return {domain: script.windows(stream, 256, count) for domain, stream in streams.items()}

        return cls(torch.cat(list(cut("train", 32).values())), cut("heldout", 24))


class Bench:
    """One checkpoint, run through the stages in one directory."""

    def __init__(
        self, model: Path, script: ModuleType, out: Path, methods: list[str], iterations: int, settings: Sequence[str]
    ) -> None:
        self.model, self.out, self.methods, self.iterations = model, out, methods, iterations
        self.settings = settings
        self.windows = Windows.of(script, self.context().model.tokenizer)

    def context(self, *overrides: str) -> Context:
        common = [
            f"losses.group_size={GROUP}", f"losses.bits={list(WIDTHS)}", f"losses.methods=[{','.join(self.methods)}]",
            "losses.per_projection=false", "losses.layer_effects={bits: 2, sequences: 32}",
            f"losses.signround_iterations={self.iterations}", "dtype=float32", "stream=never", "eval.compare=[]",
        ]  # fmt: skip
        context = figures.context(self.model, self.out, [*common, *self.settings, *overrides])
        if hasattr(self, "windows"):
            context.text.__dict__["calibration"] = sequences({"": self.windows.calibration})
        return context

    def seconds(self, context: Context, *stages: str) -> float:
        """Run stages; how long they took."""
        return sum(outcome.seconds for outcome in pipeline.run(context, stages))

    @torch.no_grad()
    def perplexity(self, context: Context, assignment: Assignment | None = None, *, exported: bool = False) -> float:
        """Perplexity of the original, or of an assignment; exported: it is the recipe's, and may have been refined."""
        with context.model.overlay() as overlay:
            if assignment is None:
                return self._perplexity(overlay.set())
            return self._perplexity(evaluate.replaced(context, overlay, assignment, exported=exported))

    def _perplexity(self, model: Any) -> float:
        losses = []
        for windows in self.windows.heldout.values():
            batches = windows.long().split(16)
            found = [float(model(input_ids=batch, labels=batch).loss) * len(batch) for batch in batches]
            losses.append(sum(found) / len(windows))
        return math.exp(sum(losses) / len(losses))

    def assigned(self, context: Context, section: AssignSection) -> float:
        """Perplexity of an assignment over the replicas as they are stored."""
        return self.perplexity(context, assign.make(context, section, "bench"))

    def refined(self, section: dict[str, Any]) -> tuple[float, float]:
        """Perplexity of a refined assignment, and the seconds of refining it."""
        refine = f"quantize.refine={{iterations: {self.iterations}}}"
        context = self.context(f"assign={json.dumps(section)}", refine)
        self.seconds(context, "profile", "losses", "assign")
        taken = self.seconds(context, "quantize")
        return self.perplexity(context, assign.load(context), exported=True), taken


def sequences(windows: dict[str, Tensor]) -> Sequences:
    """Windows [S, 256] of every domain as one set."""
    ids = torch.cat(list(windows.values())).long()
    domains = tuple(domain for domain, part in windows.items() for _ in range(len(part)))
    return Sequences(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), domains=domains)


def measure(bench: Bench, bits: list[int], averages: list[str]) -> tuple[Rows, float]:
    """Print what losses took; perplexity {row: {bits: ...}}, and the most seconds that refining a width took."""
    gptq = bench.context("losses.methods=[gptq]")
    taken = [bench.seconds(gptq, "profile", "losses")]
    context = bench.context()
    taken.append(bench.seconds(context, "losses"))
    name = bench.model.name
    print(f"\n{name}: perplexity {bench.perplexity(context):.2f} with exact experts; profile and losses with GPTQ")
    print(f"{taken[0]:.0f} s, {bench.methods} {taken[1]:.0f} s more, at 1 to 4 bits", flush=True)
    methods = [*bench.methods, BEST]
    rows: Rows = {method: {} for method in methods}
    for method in methods:
        for width in bits:
            section = AssignSection(method="uniform", bits=width, quantizer=method)  # type: ignore[arg-type]
            rows[method][width] = bench.assigned(context, section)
        print(f"{method}: " + ", ".join(f"{rows[method][width]:.2f} at {width}" for width in bits), flush=True)
    rows[REFINED], slowest = {}, 0.0
    for width in bits:
        section = {"method": "uniform", "bits": width, "quantizer": "gptq"}
        rows[REFINED][width], seconds = bench.refined(section)
        slowest = max(slowest, seconds)
        print(f"refined at {width} bits: {rows[REFINED][width]:.2f}, {seconds:.0f} s", flush=True)
    for average in averages:
        for method, how in MIXED.items():
            section = {"method": method, "code_bits": average, "quantizer": "best", **how}
            plain = bench.assigned(context, AssignSection(**section))  # type: ignore[arg-type]
            refined, seconds = bench.refined(section)
            how = f"{method} at {average} code bits, best"
            print(f"{how}: {plain:.2f}, refined {refined:.2f} in {seconds:.0f} s", flush=True)
    return rows, slowest


def peer_rows(bench: Bench, peers: list[str], environments: Path, bits: list[int]) -> Rows:
    """The peers' own figures; a line for what could not be had."""
    windows = write_windows(bench.windows, bench.out)
    rows: Rows = {}
    for peer in peers:
        home = environments / peer
        problem = figures.environment(home, PINS, [PACKAGES[peer], "torch", "transformers"])
        for width in [] if problem else [width for width in bits if width > 1]:
            try:
                figure = peer_figure(peer, home, bench.model, windows, width, GROUP, bench.iterations)
            except RuntimeError as error:
                problem = str(error)
                break
            rows.setdefault(f"{peer}, here", {})[width] = figure["perplexity"]
            print(f"{peer} at {width} bits: {figure['perplexity']:.2f}, {figure['seconds']:.0f} s", flush=True)
        if problem is not None:
            print(f"{peer} left out: {problem}", flush=True)
    return rows


def write_windows(windows: Windows, folder: Path) -> Path:
    """The file of windows that quality_peer.py reads."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "windows.safetensors"
    held = {f"heldout.{domain}": rows.int() for domain, rows in windows.heldout.items()}
    save_file({"calibration": windows.calibration.int()} | held, path)
    return path


def peer_figure(
    peer: str, home: Path, model: str | Path, windows: Path, width: int, group: int, iterations: int
) -> dict[str, float]:
    """What quality_peer.py prints, run in the environment `home`; RuntimeError with the last line of one that fails."""
    script = Path(__file__).with_name("quality_peer.py")
    command = [home / "bin" / "python", script, peer, model, windows, str(width), str(group), str(iterations)]
    environment = os.environ | {"GPTQMODEL_CPU_WORKERS": "2", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)  # it knows nothing of moeq
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(figures.last_line(done.stderr))
    figure: dict[str, float] = json.loads(figures.last_line(done.stdout))
    return figure


def main() -> int:
    parser = figures.parser(
        __doc__, models=figures.SHARED / "models", names=(["tiny-mixtral", "tiny-qwen3-moe"], ["tiny-mixtral"]),
        bits=([4, 3, 2, 1], [2]), iterations=ITERATIONS,
        environments=Path.home() / ".cache" / "moeq" / "benchmarks",
    )  # fmt: skip
    always = "gptq is always there [default: all; --quick: it]"
    parser.add_argument("--methods", nargs="+", choices=METHODS, help=always)
    parser.add_argument("--set", action="append", help="key=value of the recipe [--quick: losses.clip=mse]")
    parser.add_argument("--average", nargs="*", default=[], help="mean widths of mixed assignments")
    parser.add_argument("--peers", nargs="*", default=[], choices=list(PACKAGES))
    options = figures.parsed(parser)
    options.methods = options.methods or (["gptq"] if options.quick else list(METHODS))
    options.set = options.set or (["losses.clip=mse"] if options.quick else [])
    if not (options.models / "train_tiny.py").is_file():
        return figures.skipped(options, f"no trained checkpoints with their train_tiny.py in {options.models}")
    script = figures.script(options.models / "train_tiny.py")
    worst = dict.fromkeys(AGAINST, 0.0)
    slowest, lines = 0.0, {}
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            methods = [method for method in METHODS if method in (*options.methods, "gptq")]
            bench = Bench(options.models / name, script, Path(folder), methods, options.iterations, options.set)
            started = time.monotonic()
            rows, seconds = measure(bench, options.bits, options.average)
            rows |= peer_rows(bench, options.peers, options.environments, options.bits)
        slowest = max(slowest, seconds)
        rows |= {f"{peer}, recorded": known.get(name, {}) for peer, known in RECORDED.items()}
        print(f"{name}, {time.monotonic() - started:.0f} s" + "".join(f"{bits:>8}-bit" for bits in options.bits))
        for row, values in rows.items():
            cells = [f"{values[bits]:.2f}" if bits in values else "" for bits in options.bits]
            print(f"{row:<22}" + "".join(f"{cell:>12}" for cell in cells), flush=True)
            lines.setdefault(row, [row]).extend(cells)
        for ours, peer in AGAINST.items():
            goals = RECORDED[peer].get(name, {})
            ratios = [rows[ours][bits] / goals[bits] for bits in options.bits if bits in goals]
            worst[ours] = max([worst[ours], *ratios])
    results = figures.Figures(options)
    for ours, peer in AGAINST.items():
        results.add(f"{ours}: perplexity, of {peer}'s at most", worst[ours], at_most=TOLERANCE[peer], digits=4)
    results.add("refining a width", slowest, "s", at_most=AUTO_ROUND_SECONDS, digits=0)
    columns = ["", *(f"{name}, {bits}-bit" for name in options.names for bits in options.bits)]
    results.table(columns, list(lines.values()))
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
