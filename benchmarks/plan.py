"""What `moeq plan` foretells against what `moeq run` takes: processor seconds and peak anonymous memory.

    python benchmarks/plan.py [--layers 6] [--experts 64] [--hidden 512] [--intermediate 256] [--only demo|deepseek]

On the bundled model with the demo recipe and on a random DeepSeek-V3 (first layer dense, shared experts, latent
attention) in bfloat16, loaded and streamed; each plan and each run in a fresh process, stage by stage. Processor
seconds (user and system, those of processes that a stage starts included) hold on a machine that others use, too.
--quick: without the demo, which first_minutes.py measures.
Goals, for each model: the peak of the run within 10 % of the foretold one, the processor seconds of all stages within
a factor of 1.5.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import figures
from memory import copy_tokenizer

DEMO = [str(figures.ROOT / "recipes" / "demo.yaml")]
MOST_MEMORY, MOST_SECONDS = 1.1, 1.5  # factors, up or down
SMALL = [
    "corpus.sequences=32", "corpus.sequence_length=128", "losses.bits=[1,2,3,4]", "eval.perplexity.sequences=32",
    "eval.perplexity.sequence_length=128", "eval.compare=[{name: u2, method: uniform, bits: 2}]",
    "estimate.grid.inputs=[128]", "estimate.grid.outputs=[512]",
]  # fmt: skip


def processor_seconds() -> float:
    """User and system time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(model: str, recipe: str | None, overrides: list[str], out: str) -> dict[str, dict[str, float]]:
    """In this process: every stage's processor seconds and highest RssAnon, that of its own processes included."""
    from moeq import pipeline

    context = figures.context(model, Path(out), overrides, Path(recipe) if recipe else None)
    stages = {}
    for stage in pipeline.BY_NAME:
        with figures.Peaks(with_children) as peaks:
            started = processor_seconds()
            pipeline.run(context, (stage,))
            seconds = processor_seconds() - started
        stages[stage] = {"seconds": seconds, "ram_bytes": peaks.highest["RssAnon"]}
    return stages


def with_children() -> dict[str, int]:
    """Anonymous memory of this process and of those that it started, bytes."""
    return {"RssAnon": figures.resident()["RssAnon"] + sum(map(anonymous, children()))}


def children() -> list[str]:
    """Ids of the processes that this one started."""
    ids: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            ids += (task / "children").read_text().split()
    return ids


def anonymous(process: str) -> int:
    """Anonymous memory of a process, 0 when it has ended, or has only just been forked and shares all of ours."""
    with contextlib.suppress(OSError, KeyError):
        if Path(f"/proc/{process}/cmdline").read_bytes() != Path("/proc/self/cmdline").read_bytes():
            return figures.resident(process)["RssAnon"]
    return 0


def make(folder: Path, options: Any) -> Path:
    """A random DeepSeek-V3 of the options' sizes, whose first layer is dense, with the bundled tokenizer."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    hidden = options.hidden
    config = DeepseekV3Config(
        vocab_size=2048, hidden_size=hidden, intermediate_size=4 * hidden, moe_intermediate_size=options.intermediate,
        num_hidden_layers=options.layers, num_attention_heads=8, num_key_value_heads=8, n_shared_experts=1,
        n_routed_experts=options.experts, num_experts_per_tok=4, n_group=4, topk_group=2, first_k_dense_replace=1,
        kv_lora_rank=64, q_lora_rank=128, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
        max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(config).bfloat16().save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def compare(title: str, model: str, recipe: list[str], overrides: list[str]) -> dict[str, float]:
    """Print one table; returns foretold over measured processor seconds, and foretold over measured peak memory."""
    sets = [part for override in overrides for part in ("--set", override)]
    with tempfile.TemporaryDirectory() as out:
        planned = figures.moeq_json("plan", *recipe, "--model", model, "--out", out, *sets)
        arguments = [model, recipe[0] if recipe else "", f"{out}/run", *overrides]
        measured = figures.in_fresh_process(__file__, "--one", *arguments)
    print(f"\n{title}\nstage      foretold  measured  ratio   foretold   measured  ratio")

    def line(name: str, seconds: float, taken: float, ram: float, held: float) -> None:
        print(
            f"{name:9}  {seconds:6.1f} s  {taken:6.1f} s  {seconds / taken:5.2f}  {ram / 1e6:6.0f} MB  "
            f"{held / 1e6:6.0f} MB  {ram / held:5.2f}",
            flush=True,
        )

    for stage in planned["stages"]:
        own = measured[stage["stage"]]
        line(stage["stage"], stage["processor_seconds"], own["seconds"], stage["ram_bytes"], own["ram_bytes"])
    seconds = sum(stage["processor_seconds"] for stage in planned["stages"])
    taken = sum(stage["seconds"] for stage in measured.values())
    ram = max(stage["ram_bytes"] for stage in planned["stages"])
    held = max(stage["ram_bytes"] for stage in measured.values())
    line("run", seconds, taken, ram, held)
    return {"seconds": seconds / taken, "ram": ram / held}


def add_ratios(report: figures.Figures, name: str, ratios: dict[str, float]) -> None:
    """What `compare` returned, as factors by which the plan is off."""
    for what, most in (("ram", MOST_MEMORY), ("seconds", MOST_SECONDS)):
        title = "memory" if what == "ram" else "processor seconds"
        report.add(f"{title} of {name}, off by a factor of", max(ratios[what], 1 / ratios[what]), at_most=most)


def main() -> int:
    parser = figures.parser(__doc__, hidden=512, intermediate=256, experts=64, layers=(6, 3))
    parser.add_argument("--only", choices=("demo", "deepseek"), help="one of the models")
    parser.add_argument("--one", nargs="+", metavar="MODEL RECIPE OUT", help="measure in this process")
    options = figures.parsed(parser)
    if options.one:
        model, recipe, out, *overrides = options.one
        print(json.dumps(measure(model, recipe or None, overrides, out)))
        return 0
    report = figures.Figures(options)
    if options.only == "demo" or (options.only is None and not options.quick):
        add_ratios(report, "the demo", compare("bundled model, demo recipe", "bundled:tiny-mixtral", DEMO, []))
    if options.only != "demo":
        with tempfile.TemporaryDirectory() as scratch:
            folder = make(Path(scratch) / "model", options)
            sizes = f"{options.experts} experts {options.hidden} x {options.intermediate}"
            for how in ("never", "always"):
                title = f"DeepSeek-V3, {options.layers} layers of {sizes}, stream: {how}"
                ratios = compare(title, str(folder), [], [*SMALL, f"stream={how}"])
                add_ratios(report, f"a DeepSeek-V3, stream: {how}", ratios)
    return report.report()


if __name__ == "__main__":
    sys.exit(main())
