"""Peak memory of every stage on streamed checkpoints of 4 to 32 layers of the same width.

    python benchmarks/memory.py [--hidden 1024] [--intermediate 1024] [--experts 40] [--layers 4 8 16 32]

Anonymous memory (RssAnon, sampled 50 times a second from /proc) of a fresh process for each checkpoint, stage by stage;
mapped file pages (RssFile) apart, since the kernel may drop them. Goals for profile, losses (RTN), assign, quantize,
export and the perplexity of the streamed model: the largest checkpoint takes at most a quarter of a layer more than
the smallest, in each of them; the level is at most the resident parts + 2 layers + 1 GB, of export two layers; a stage
that reads weights asks the disk for at most 1.2 of the checkpoint's bytes. Not in it: what loads the exported
checkpoint whole, eval and, in the process that export verifies with, the target's loader.
Peer column: plain from_pretrained and nothing else, up to --plain-limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import figures

if TYPE_CHECKING:
    from moeq.stages.context import Context

GIGABYTE = 10**9
STAGES = ("profile", "losses", "assign", "quantize", "export", "perplexity")
SHOWN = ("profile", "losses", "quantize", "export", "perplexity")
INDEX, REST = "model.safetensors.index.json", "rest.safetensors"
READING = ("profile", "losses", "quantize", "perplexity")  # quantize makes RTN replicas from the weights
OVERRIDES = [
    "stream=always", "corpus.sequences=16", "corpus.sequence_length=128", "losses.bits=[2]", "losses.methods=[rtn]",
    "losses.per_projection=false", "losses.working_memory=256MiB", "assign.method=uniform", "assign.bits=2",
    "assign.quantizer=rtn", "eval.compare=[]", "eval.perplexity.sequences=8", "eval.perplexity.sequence_length=128",
]  # fmt: skip


def make(folder: Path, layers: int, options: argparse.Namespace) -> Path:
    """A random Mixtral in bfloat16, written a layer at a time so that making it takes no memory either."""
    import torch
    from safetensors.torch import save_file
    from transformers import MixtralConfig

    from moeq.bundled import bundled_path

    hidden, inter = options.hidden, options.intermediate
    config = MixtralConfig(
        vocab_size=2048, hidden_size=hidden, intermediate_size=inter, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, num_local_experts=options.experts, num_experts_per_tok=2,
        max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2, dtype="bfloat16",
        architectures=["MixtralForCausalLM"], tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_path("tiny-mixtral") / name, folder / name)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    where = {}

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file, {"format": "pt"})
        where.update(dict.fromkeys(tensors, file))

    write(
        REST,
        {"model.embed_tokens.weight": random(2048, hidden), "model.norm.weight": torch.ones(hidden).bfloat16()},
    )
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors = {
            f"{prefix}self_attn.q_proj.weight": random(512, hidden),
            f"{prefix}self_attn.k_proj.weight": random(128, hidden),
            f"{prefix}self_attn.v_proj.weight": random(128, hidden),
            f"{prefix}self_attn.o_proj.weight": random(hidden, 512),
            f"{prefix}input_layernorm.weight": torch.ones(hidden).bfloat16(),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden).bfloat16(),
            f"{prefix}block_sparse_moe.gate.weight": random(options.experts, hidden),
        }
        for expert in range(options.experts):
            for name, shape in (("w1", (inter, hidden)), ("w2", (hidden, inter)), ("w3", (inter, hidden))):
                tensors[f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight"] = random(*shape)
        write(f"layer-{layer:03d}.safetensors", tensors)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def first_layers(whole: Path, folder: Path, layers: int) -> Path:
    """The checkpoint cut to its first layers; hard links, so that it takes no disk."""
    folder.mkdir()
    where = json.loads((whole / INDEX).read_text())["weight_map"]
    kept = {key: file for key, file in where.items() if file == REST or int(file[6:9]) < layers}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": kept}))
    config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    for name in {*kept.values(), "tokenizer.json", "tokenizer_config.json"}:
        os.link(whole / name, folder / name)
    return folder


def resident() -> dict[str, int]:
    """RssAnon and RssFile of this process, bytes."""
    rows = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in rows if name in ("RssAnon", "RssFile")}


class Peaks:
    """The highest RssAnon and RssFile above a first level since the last reset, watched from a thread."""

    def __init__(self) -> None:
        self.start = resident()
        self.reset()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            for name, value in resident().items():
                self.highest[name] = max(self.highest[name], value)

    def reset(self) -> None:
        self.highest = dict(self.start)

    def above(self) -> dict[str, int]:
        return {name: self.highest[name] - self.start[name] for name in self.start}

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def measure(folder: Path, how: str) -> dict[str, dict[str, float]]:
    """In this process: the stages on a streamed model, or plain from_pretrained; a row for each."""
    from moeq import pipeline
    from moeq.evaluation.perplexity import perplexity
    from moeq.models import loading
    from moeq.models.source import open_source
    from moeq.progress import Reporter
    from moeq.recipe import load_recipe
    from moeq.stages.context import Context

    source = open_source(str(folder))
    loading.describe(source)
    peaks = Peaks()
    rows: dict[str, dict[str, float]] = {}
    if how == "plain":
        import torch

        model = loading.load_model(source, torch.bfloat16, torch.device("cpu"))
        rows[how] = {**peaks.above(), "parameters": model.num_parameters()}
    else:
        out = folder.with_name(folder.name + "-run")
        recipe = load_recipe(None, OVERRIDES)
        context = Context(recipe=recipe, model_name=str(folder), out=out, reporter=Reporter(quiet=True))
        total = sum(header.bytes for header in source.tensors.values())
        for stage in STAGES:
            peaks.reset()
            read, started = bytes_read(context) if rows else 0, time.monotonic()
            if stage == "perplexity":
                text = context.text.evaluation
                there = context.model
                perplexity(there.module, text, 4, there.device, lambda: None, streamed=there.streamed)
            else:
                pipeline.run(context, (stage,))
            passes = (bytes_read(context) - read) / total
            rows[stage] = {**peaks.above(), "passes": passes, "seconds": time.monotonic() - started}
        shutil.rmtree(out)
    peaks.stop()
    return rows


def bytes_read(context: Context) -> int:
    """What the model's layers and single experts asked of the disk so far."""
    return context.model.streamed.bytes_read + context.model.expert_reader.bytes_read


def verdict(found: figures.Figures, rows: dict[int, dict[str, Any]], layer_bytes: int, resident_bytes: int) -> None:
    """The figures: growth of every stage, their level, what export and reading take."""
    few, many = min(rows), max(rows)
    taken = {layers: {stage: row[stage]["RssAnon"] for stage in STAGES} for layers, row in rows.items()}
    for stage in SHOWN:
        grown = (taken[many][stage] - taken[few][stage]) / layer_bytes
        found.add(f"{stage}: growth from {few} to {many} layers", grown, "of a layer", at_most=0.25)
    level, limit = max(max(row.values()) for row in taken.values()), resident_bytes + 2 * layer_bytes + GIGABYTE
    found.add("level: resident parts + 2 layers + 1 GB", level / 1e6, "MB", at_most=limit / 1e6, digits=0)
    exported = max(row["export"] for row in taken.values())
    found.add("export: two layers", exported / 1e6, "MB", at_most=2 * layer_bytes / 1e6, digits=0)
    passes = max(row[stage]["passes"] for row in rows.values() for stage in READING)
    found.add("asked of the disk by a stage, of the checkpoint", passes, at_most=1.2)


def shown(layers: int, layer_bytes: int, row: dict[str, Any], plain: float | None) -> list[str]:
    """A row of the table."""
    mapped = max(row[stage]["RssFile"] for stage in STAGES)
    sizes = [*(row[stage]["RssAnon"] for stage in SHOWN), mapped]
    seconds = sum(one["seconds"] for one in row.values())
    loaded = "not run" if plain is None else f"{plain / 1e6:.0f}"
    return [
        str(layers),
        f"{layers * layer_bytes / 1e6:.0f} MB",
        *(f"{n / 1e6:.0f}" for n in sizes),
        loaded,
        f"{seconds:.0f}",
    ]


def main() -> int:
    parser = figures.parser(
        __doc__, hidden=1024, intermediate=1024, experts=40, layers=([4, 8, 16, 32], [4, 8]),
        plain_limit=(4.5, 0.0),
    )  # fmt: skip
    parser.add_argument("--scratch", type=Path, help="folder for the checkpoints [default: the system's]")
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "HOW"), help="measure in this process")
    options = figures.parsed(parser)
    if options.one:
        print(json.dumps(measure(Path(options.one[0]), options.one[1])))
        return 0
    layer_bytes = 2 * (3 * options.experts * options.hidden * options.intermediate + 1280 * options.hidden)
    print(f"one layer {layer_bytes / 1e6:.0f} MB, bfloat16; peaks of RssAnon in MB above the level after imports")
    columns = ["layers", "checkpoint", *SHOWN, "mapped", "from_pretrained alone", "s"]
    print("  ".join(columns))
    found: dict[int, dict[str, Any]] = {}
    lines = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        make(whole, max(options.layers), options)
        for layers in sorted(options.layers):
            folder = first_layers(whole, Path(scratch) / f"m{layers}", layers)
            found[layers] = figures.in_fresh_process(__file__, "--one", str(folder), "moeq")
            plain = None
            if layers * layer_bytes <= options.plain_limit * GIGABYTE:
                plain = figures.in_fresh_process(__file__, "--one", str(folder), "plain")["plain"]["RssAnon"]
            shutil.rmtree(folder)
            lines.append(shown(layers, layer_bytes, found[layers], plain))
            print("  ".join(f"{cell:>{len(name)}}" for cell, name in zip(lines[-1], columns, strict=True)), flush=True)
    report = figures.Figures(options)
    verdict(report, found, layer_bytes, 2 * 2049 * options.hidden)
    report.table(columns, lines)
    return report.report()


if __name__ == "__main__":
    sys.exit(main())
