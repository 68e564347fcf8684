"""Experts whose precision follows the workload (paper 001, DynaExq): what it costs, and what it keeps.

    python benchmarks/dynamic.py [--parts overhead switching quality prefetch memory] [--layers 4] [--experts 128]
        [--folder DIR] [--device cuda]

overhead, switching, memory: a generated Qwen3-MoE in the shape of Qwen3-30B-A3B but for its number of layers, with
experts at 4 and 2 bits in groups of 128 (random codes, the 2 bits being their leading ones). Steps of decoding are
timed in turns, in one process, over the same keys and values: the controller on and nothing to switch against the same
mix in the static kernels; all experts changing all the time against static low and against the static mix of the same
bytes. Memory: a longer run of decoding over successive sequences, anonymous resident memory at its end against that
after its first tenth.

quality: the trained models of ../shared (left out without them): windows of wiki, Python and math, one domain after the
other, at one budget: all low with some experts a layer in high precision, which are the first by hotness of the wiki
text for `static mixed`, and follow the text for `dynamic`. Perplexity a domain, and the KL divergence to the original.
Then Figure 4: perplexity of wiki against the share of low experts, the coldest first and in random order.

prefetch: the same models and windows: how many copies find their version beside the device when versions are read
ahead by which experts follow which, see `dynamic_ahead.py`.

--device cuda: overhead, switching and memory on a GPU, with the Triton kernel and copies on a stream of their own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moeq  # noqa: F401  before torch: it sets OMP_WAIT_POLICY

import dynamic_models  # isort: skip
import dynamic_quality  # isort: skip
import figures  # isort: skip
import torch  # isort: skip

from moeq.models.forward import cache_name
from moeq.runtime.dynamic.copies import Switch
from moeq.runtime.dynamic.model import DynamicMoE
from moeq.runtime.dynamic.pools import HIGH, LOW

PARTS = ["overhead", "switching", "quality", "prefetch", "memory"]
OVERHEAD_GOAL, SWITCHING_GOAL, FLAT_GOAL = 1.03, 0.85, 1.01
SURE = 1000.0  # standard deviations: no expert is so much hotter than another that it takes its place
CONTEXT, SHARE_HIGH = 32, 4  # tokens before the timed steps; one expert in so many is in high precision


def step_of(model: Any, vocabulary: int) -> Callable[[], float]:
    """A decode step of one sequence after a short context, over and over in the same place; its seconds."""
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (1, CONTEXT), generator=generator).to(model.device)
    cache = DynamicCache(config=model.config)
    cached = {cache_name(model): cache, "use_cache": True}
    with torch.no_grad():
        model(input_ids=ids, **cached)

    def step() -> float:
        token = torch.randint(3, vocabulary, (1, 1), generator=generator).to(model.device)
        waited(model.device)
        began = time.perf_counter()
        with torch.no_grad():
            model(input_ids=token, **cached)
        waited(model.device)
        taken = time.perf_counter() - began
        cache.crop(-1)
        return taken

    return step


def waited(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turns(steps: dict[str, Callable[[], float]], rounds: int, between: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds of each, the order of every round being that of the last one turned around."""
    for step in steps.values():
        step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            taken[name].append(steps[name]())
        between()
    return taken


def ratio(of: list[float], to: list[float]) -> float:
    """Median of the ratios of steps that were taken one after the other."""
    return statistics.median(one / other for one, other in zip(of, to, strict=True))


def timed(options: argparse.Namespace, results: figures.Figures) -> None:
    """Overhead with nothing to switch, and speed while experts change all the time."""
    made = dynamic_models.Generated(options, device=options.device)
    experts, vocabulary = options.experts, options.vocabulary
    places = experts // SHARE_HIGH
    low, mixed = made.static(0), made.static(places)
    results.table(["one step", "ms", "of static low", "of static mixed"])
    if "overhead" in options.parts:
        with made.dynamic(places, period=16, certainty=SURE, threshold=0.0) as dynamic:
            steps = {"static mixed": mixed, "controller": dynamic.model}
            taken = in_turns({n: step_of(m, vocabulary) for n, m in steps.items()}, options.rounds, lambda: None)
            counts = dynamic.summary()
        over = ratio(taken["controller"], taken["static mixed"])
        results.row("controller, no switch", f"{1e3 * statistics.median(taken['controller']):.2f}", "", f"{over:.3f}")
        results.add("a step with the controller on", over, "of the static mix's", at_most=OVERHEAD_GOAL, digits=3)
        results.add("switches meanwhile", counts["promotions"] + counts["demotions"], at_most=0, digits=0)
    if "switching" in options.parts:
        with made.dynamic(places, period=1 << 30) as dynamic:
            changes = Changes(dynamic)
            steps = {"static low": low, "static mixed": mixed, "switching": dynamic.model}
            taken = in_turns({n: step_of(m, vocabulary) for n, m in steps.items()}, options.rounds, changes.more)
            counts, seconds = dynamic.summary(), sum(map(sum, taken.values()))
        for name in ("static mixed", "switching"):
            shown = [f"{ratio(taken[name], taken[other]):.3f}" for other in ("static low", "static mixed")]
            results.row(name, f"{1e3 * statistics.median(taken[name]):.2f}", *shown)
        switches = counts["promotions"] + counts["demotions"]
        speed = 1 / ratio(taken["switching"], taken["static low"])
        results.add("decoding while experts change", speed, "of static low's speed", at_least=SWITCHING_GOAL)
        results.add("the same, of the static mix's speed", 1 / ratio(taken["switching"], taken["static mixed"]))
        results.add("changes a second meanwhile", switches / seconds, digits=1)
        results.add("bytes brought for a promotion", counts["copied_bytes"] / max(1, counts["promotions"]) / 1e6, "MB")
        if options.device == "cuda":
            results.add("allocated on the GPU at most", torch.cuda.max_memory_allocated() / 2**30, "GiB")
        figures_of_whole(made, places, results)


def figures_of_whole(made: dynamic_models.Generated, places: int, results: figures.Figures) -> None:
    """The same changes with every version brought whole."""
    brought = {}
    for planes in (True, False):
        with made.dynamic(places, background=False, period=1 << 30, planes=planes) as dynamic:
            changes = Changes(dynamic)
            for _ in range(8):
                changes.more()
            counts = dynamic.summary()
            brought[planes] = counts["copied_bytes"] / max(1, counts["promotions"])
    shown = f"{brought[False] / 1e6:.2f} MB"
    results.add(f"planes' bytes for a promotion and its demotion, of {shown}", brought[True] / brought[False])


class Changes:
    """Asks for as many changes as the buffer takes: experts of a layer change places, one pair after the other."""

    def __init__(self, dynamic: DynamicMoE) -> None:
        self.dynamic, self.turn = dynamic, 0

    def more(self) -> None:
        dynamic, wanted = self.dynamic, []
        for number in range(len(dynamic.layers)):
            high = dynamic.high(number)
            up, down = ([e for e, is_high in enumerate(high) if is_high == held] for held in (False, True))
            place = self.turn
            wanted.append(Switch(number, up[place % len(up)], HIGH))
            wanted.append(Switch(number, down[place % len(down)], LOW))
        self.turn += 1
        dynamic.copies.request(wanted)
        dynamic.copies.register()


def memory(options: argparse.Namespace, results: figures.Figures) -> None:
    """Resident memory over many decode steps of successive sequences, whose experts change all the time."""
    small = argparse.Namespace(**{**vars(options), "layers": 2, "experts": 16, "vocabulary": 4096})
    with dynamic_models.Generated(small, 256, 128, options.device).dynamic(4, period=8) as dynamic:
        changes, generator = Changes(dynamic), torch.Generator().manual_seed(0)
        levels, done, each = [], 0, 50
        while done < options.steps:
            ids = torch.randint(3, 4096, (1, 8), generator=generator).to(options.device)
            dynamic.generate(ids, max_new_tokens=each, min_new_tokens=each, do_sample=False, pad_token_id=0)
            changes.more()
            done += each
            levels.append(figures.resident()["RssAnon"])
        counts = dynamic.summary()
    tenth = max(1, len(levels) // 10)
    grown, what = max(levels[-tenth:]) / max(levels[:tenth]), f"resident memory after {done} decode steps"
    results.add(what, grown, "of after a tenth", at_most=FLAT_GOAL, digits=3)
    results.add("changes meanwhile", counts["promotions"] + counts["demotions"], digits=0)


def run(options: argparse.Namespace, folder: Path) -> int:
    """What is asked for; the exit code."""
    results = figures.Figures(options)
    if set(options.parts) & {"overhead", "switching"}:
        timed(options, results)
    if "memory" in options.parts:
        memory(options, results)
    if set(options.parts) & {"quality", "prefetch"}:
        dynamic_quality.run(options, folder, results)
    return results.report()


def main() -> None:
    parser = figures.parser(
        __doc__,
        parts=PARTS,
        layers=(4, 1),
        experts=(128, 16),
        vocabulary=(151936, 4096),
        rounds=(96, 12),
        steps=(100_000, 1_000),
        device="cpu",
        windows=(24, 4),
        names=(["tiny-qwen3-moe", "tiny-mixtral"], ["tiny-qwen3-moe"]),
    )
    parser.add_argument("--folder", type=Path, help="where models are made and kept [default: a temporary folder]")
    options = figures.parsed(parser)
    with figures.kept_or_temporary(options.folder) as folder:
        sys.exit(run(options, folder))


if __name__ == "__main__":
    main()
