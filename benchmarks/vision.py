"""Paper 004's Table 1 on vision transformers with 65 and 197 tokens: every scheme, three seeds, with intervals.

    python benchmarks/vision.py MODELS --json FILE [--tokens 65 197] [--kinds dense moe] [--seeds 3]
        [--images 90 32] [--calibration 16] [--seconds 3000]

MODELS is the folder of vision_models.py, which trains what is not there yet (`python benchmarks/vision_models.py
MODELS`). Each seed is a model trained anew; calibration images and the held-out ones that it is measured on are the
same for all schemes of a seed (--images: how many, one number for each of --tokens). Logit error is ||z - z0|| / ||z0||
of the float model's z0 over the images, before the fold. Intervals: 95 %, Student's t of the seeds' logarithms. Of
mixtures both tasks count, each with its router and head (their geometric mean is the seed's value). Rows of `uneven`
are the same models whose norms give channels of uneven ranges, as those of large vision transformers do: channel c of
every norm within a block is multiplied by exp(n_c) and its columns in all that the norm feeds are divided by it, n_c
normal with standard deviation 1 and drawn once a norm; float outputs stay the same, which is checked to 1e-9. The
ratio of the largest range of a channel to the median one is shown.

FILE keeps what is there: a further run measures only what it lacks, and stops when --seconds are over. --quick measures
one scheme against another on the bundled model of 65 tokens. The ratio of log2's logit error to that of
log-sqrt2 with the code that calibration chooses has no goal: it is what the table is made to tell.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import figures  # isort: skip
import vision_models  # isort: skip

import torch
from scipy import stats
from torch import Tensor
from transformers import AutoModelForImageClassification

from moeq.bundled import bundled_path
from moeq.integers.forward.description import Block, Linear, Mixture, Norm, ViT, describe
from moeq.integers.forward.dropping import dropped_codes
from moeq.integers.forward.reference import forward
from moeq.integers.forward.schemes import SCHEMES, float_logits, program_of, quality, simulated_logits
from moeq.recipe import IntegerSection

UNEVEN = (0, 1, 6)  # schemes that are measured on uneven channels, too
FLOAT_ERROR = 1e-9
BUNDLED = "tiny-moe-vit-65"
LOG2, LOG_SQRT2 = 4, 6  # of SCHEMES: both calibrated, 8/8/4


def uneven(vit: ViT, seed: int) -> ViT:
    """The same function with channels of uneven ranges behind every norm of the blocks."""
    generator = torch.Generator().manual_seed(seed)

    def moved(norm: Norm) -> tuple[Norm, Tensor]:
        factor = torch.randn(len(norm.weight), generator=generator).double().exp()
        return replace(norm, weight=norm.weight * factor, bias=norm.bias * factor), factor

    def fed(linear: Linear, factor: Tensor) -> Linear:
        return replace(linear, weight=linear.weight / factor)

    def block(given: Block) -> Block:
        (norm1, first), (norm2, second) = moved(given.norm1), moved(given.norm2)
        update = replace(given.update, up=fed(given.update.up, second))
        if isinstance(update, Mixture):
            update = replace(update, router=fed(update.router, second))
        query, key, value = (fed(linear, first) for linear in (given.query, given.key, given.value))
        return replace(given, norm1=norm1, norm2=norm2, query=query, key=key, value=value, update=update)

    return replace(vit, blocks=tuple(block(one) for one in vit.blocks))


def spread(vit: ViT, images: Tensor) -> float:
    """The largest range of a norm's channel over the median one, median over the blocks' norms."""
    found = []

    def observe(name: str, values: Tensor) -> None:
        if name.endswith((".norm1", ".norm2")):
            rows = values.flatten(0, -2)
            ranges = rows.amax(0) - rows.amin(0)
            found.append(float(ranges.max() / ranges.median()))

    forward(vit, images, observe)
    return statistics.median(found)


def measured(folder: Path, tokens: int, number: int, calibrated: int) -> dict[str, Any]:
    """Of one model every scheme and task: rows {name: [[accuracy, logit error] a task]}, and which codes count as 0.

    number, calibrated: held-out images and those of calibration.
    """
    model = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
    images, labels, rows = vision_models.digits(tokens)
    calibration, taken = images[rows["train"][:calibrated]], rows["test"][:number]
    section = IntegerSection(calibration=calibrated)
    found: dict[str, Any] = {"rows": {}, "dropped": [], "spread": [], "images": len(taken)}
    for task in range(model.config.num_tasks):
        even = describe(model, task)
        other = uneven(even, seed=task)
        reference, answers = float_logits(even, images[taken]), labels[taken, task]
        if float((float_logits(other, images[taken]) - reference).norm() / reference.norm()) > FLOAT_ERROR:
            raise SystemExit("the uneven model computes something else")
        found["rows"].setdefault("float", []).append([float((reference.argmax(-1) == answers).double().mean()), 0.0])
        found["spread"].append([spread(even, calibration), spread(other, calibration)])
        for vit, chosen, mark in ((even, range(len(SCHEMES)), ""), (other, UNEVEN, "uneven: ")):
            for place in chosen:
                name, (weights, activations, attention), softmax, dropping, fold = SCHEMES[place]
                widths = {"weights": weights, "activations": activations, "attention": attention}
                scheme = section.model_copy(update={**widths, "softmax": softmax, "dropping": dropping})
                program = program_of(vit, calibration, scheme, None if fold else {})
                made = quality(simulated_logits(program, images[taken]), reference, answers)
                row = f"{mark}{name} {weights}/{activations}/{attention}"
                found["rows"].setdefault(row, []).append([made.accuracy, made.logit_error])
                if place == LOG_SQRT2 and not mark:
                    found["dropped"].append([row.model_dump() for row in program.dropped])
    return found


def interval(values: list[float]) -> tuple[float, float, float]:
    """Geometric mean and the ends of its 95 % interval, by Student's t of the logarithms; of one value itself."""
    logs = [math.log(value) for value in values]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(middle), math.nan, math.nan
    half = float(stats.t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def error(found: dict[str, Any], row: str) -> float:
    """A seed's logit error of a row: the geometric mean over the model's tasks."""
    return math.exp(statistics.fmean(math.log(each[1]) for each in found["rows"][row]))


def shown(kind: str, tokens: int, seeds: list[dict[str, Any]], results: figures.Figures) -> None:
    """The table of one kind and size, and the ratio of log2's error to log-sqrt2's."""
    results.table([f"{kind}, {tokens} tokens, {len(seeds)} seeds", "accuracy", "logit error", "95 % interval"])
    for row in seeds[0]["rows"]:
        accuracy = statistics.fmean(each[0] for found in seeds for each in found["rows"][row])
        if row == "float":
            results.row(row, f"{accuracy:.2%}", "", "")
            continue
        middle, low, high = interval([error(found, row) for found in seeds])
        results.row(row, f"{accuracy:.2%}", f"{middle:.4f}", f"{low:.4f} to {high:.4f}")
    for chosen, told in ((True, "code chosen"), (False, "as printed")):
        log2, mine = (f"{SCHEMES[place if chosen else place - 1][0]} 8/8/4" for place in (LOG2, LOG_SQRT2))
        middle, low, high = interval([error(found, log2) / error(found, mine) for found in seeds])
        each = [one[1] > other[1] for found in seeds
                for one, other in zip(found["rows"][log2], found["rows"][mine], strict=True)]  # fmt: skip
        what = f"log2's error over log-sqrt2's, {told}, {kind}, {tokens} tokens"
        ends = "" if math.isnan(low) else f"{low:.2f} to {high:.2f}; "
        results.add(what, middle, f"({ends}ahead in {sum(each)} of {len(each)})", digits=3)
    even, other = (statistics.median(pair[end] for found in seeds for pair in found["spread"]) for end in (0, 1))
    results.add(f"largest range of a channel over the median, {kind}, {tokens} tokens", even)
    results.add(f"  the same made uneven, {kind}, {tokens} tokens", other)


def quick(results: figures.Figures) -> int:
    """The two softmaxes on a few images of the bundled model: attention's error in calibration."""
    model = AutoModelForImageClassification.from_pretrained(bundled_path(BUNDLED), dtype=torch.float32).eval()
    images, _, rows = vision_models.digits(65)
    vit, few = describe(model), images[rows["train"][:16]]
    for softmax in ("log-sqrt2", "log2"):
        found = dropped_codes(vit, few, IntegerSection(softmax=softmax))
        results.add(f"attention off, {softmax}", statistics.median(row.error for row in found), digits=4)
        results.add(f"as printed, {softmax}", statistics.median(row.printed_error for row in found), digits=4)
    return results.report()


def main() -> int:
    parser = figures.parser(__doc__, tokens=[65, 197], kinds=["dense", "moe"], seeds=3, images=[90, 32], calibration=16,
                            seconds=3000.0)  # fmt: skip
    parser.add_argument("models", type=Path, nargs="?")
    options = figures.parsed(parser)
    torch.set_num_threads(1)
    results = figures.Figures(options)
    if options.quick:
        return quick(results)
    if options.models is None:
        return figures.skipped(options, "no folder of models was given: train them with vision_models.py")
    there = options.json is not None and options.json.is_file()
    earlier = json.loads(options.json.read_text("utf-8")) if there else {}
    kept, results.before = earlier.get("models", {}), earlier.get("seconds", 0.0)
    results.details["models"] = kept
    for tokens, images in zip(options.tokens, options.images, strict=True):
        for seed in range(options.seeds):
            for kind in options.kinds:
                name = f"{kind}-{tokens}-seed{seed}"
                if name in kept or time.monotonic() - options.started > options.seconds:
                    continue
                kept[name] = measured(
                    vision_models.made(options.models, kind, tokens, seed), tokens, images, options.calibration
                )
                results.keep()
                print(f"{name}: {time.monotonic() - options.started:.0f} s", flush=True)
    for kind in options.kinds:
        for tokens in options.tokens:
            seeds = [kept[name] for seed in range(options.seeds) if (name := f"{kind}-{tokens}-seed{seed}") in kept]
            if seeds:
                shown(kind, tokens, seeds, results)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
