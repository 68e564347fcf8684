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


def mixtral(options: argparse.Namespace, layers: int, **more: Any) -> Any:
    """The configuration of a Mixtral of the options' sizes in bfloat16."""
    from transformers import MixtralConfig

    return MixtralConfig(
        vocab_size=2048, hidden_size=options.hidden, intermediate_size=options.intermediate, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_local_experts=options.experts,
        num_experts_per_tok=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        dtype="bfloat16", architectures=["MixtralForCausalLM"], **more,
    )  # fmt: skip


def copy_tokenizer(folder: Path) -> None:
    """Put the bundled tokenizer, of 2,048 tokens, beside a model."""
    from moeq.bundled import bundled_path

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_path("tiny-mixtral") / name, folder / name)


def bytes_of_layer(options: argparse.Namespace) -> int:
    """What one layer of `make` takes on disk."""
    return 2 * (3 * options.experts * options.hidden * options.intermediate + 1280 * options.hidden)


def make(folder: Path, layers: int, options: argparse.Namespace) -> Path:
    """A random Mixtral in bfloat16, written a layer at a time so that making it takes no memory either."""
    import torch
    from safetensors.torch import save_file

    hidden, inter = options.hidden, options.intermediate
    mixtral(options, layers, tie_word_embeddings=True).save_pretrained(folder)
    copy_tokenizer(folder)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    where = {}

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file, {"format": "pt"})
        where.update(dict.fromkeys(tensors, file))

    norm = torch.ones(hidden).bfloat16()
    write(REST, {"model.embed_tokens.weight": random(2048, hidden), "model.norm.weight": norm})
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors = {
            f"{prefix}self_attn.q_proj.weight": random(512, hidden),
            f"{prefix}self_attn.k_proj.weight": random(128, hidden),
            f"{prefix}self_attn.v_proj.weight": random(128, hidden),
            f"{prefix}self_attn.o_proj.weight": random(hidden, 512),
            f"{prefix}input_layernorm.weight": norm.clone(),
            f"{prefix}post_attention_layernorm.weight": norm.clone(),
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


def measure(folder: Path, how: str) -> dict[str, dict[str, float]]:
    """In this process: the stages on a streamed model, or plain from_pretrained; a row for each."""
    from moeq import pipeline  # before torch, as every command has it: moeq bounds what torch's kernels keep
    from moeq.evaluation.perplexity import perplexity
    from moeq.models import loading
    from moeq.models.source import open_source

    source = open_source(str(folder))
    loading.describe(source)
    out = folder.with_name(folder.name + "-run")
    context = figures.context(folder, out, OVERRIDES)
    start = figures.resident()

    def above(peaks: figures.Peaks) -> dict[str, float]:
        return {name: max(0, peaks.highest[name] - start[name]) for name in start}

    if how == "plain":
        import torch

        with figures.Peaks() as peaks:
            model = loading.load_model(source, torch.bfloat16, torch.device("cpu"))
        return {how: {**above(peaks), "parameters": model.num_parameters()}}
    rows: dict[str, dict[str, float]] = {}
    total = sum(header.bytes for header in source.tensors.values())
    for stage in STAGES:
        with figures.Peaks() as peaks:
            read, started = bytes_read(context) if rows else 0, time.monotonic()
            if stage == "perplexity":
                text = context.text.evaluation
                there = context.model
                perplexity(there.module, text, 4, there.device, lambda: None, streamed=there.streamed)
            else:
                pipeline.run(context, (stage,))
            passes = (bytes_read(context) - read) / total
        rows[stage] = {**above(peaks), "passes": passes, "seconds": time.monotonic() - started}
    shutil.rmtree(out)
    return rows


def bytes_read(context: Context) -> int:
    """What the model's layers and single experts asked of the disk so far."""
    return context.model.streamed.bytes_read + context.model.expert_reader.bytes_read


def verdict(results: figures.Figures, rows: dict[int, dict[str, Any]], layer_bytes: int, resident_bytes: int) -> None:
    """The figures: growth of every stage, their level, what export and reading take."""
    few, many = min(rows), max(rows)
    taken = {layers: {stage: row[stage]["RssAnon"] for stage in STAGES} for layers, row in rows.items()}
    for stage in SHOWN:
        grown = (taken[many][stage] - taken[few][stage]) / layer_bytes
        results.add(f"{stage}: growth from {few} to {many} layers", grown, "of a layer", at_most=0.25)
    level, limit = max(max(row.values()) for row in taken.values()), resident_bytes + 2 * layer_bytes + GIGABYTE
    results.add("level: resident parts + 2 layers + 1 GB", level / 1e6, "MB", at_most=limit / 1e6, digits=0)
    exported = max(row["export"] for row in taken.values())
    results.add("export: two layers", exported / 1e6, "MB", at_most=2 * layer_bytes / 1e6, digits=0)
    passes = max(row[stage]["passes"] for row in rows.values() for stage in READING)
    results.add("asked of the disk by a stage, of the checkpoint", passes, at_most=1.2)


def shown(layers: int, layer_bytes: int, row: dict[str, Any], plain: float | None) -> list[str]:
    """A row of the table."""
    mapped = max(row[stage]["RssFile"] for stage in STAGES)
    sizes = [*(row[stage]["RssAnon"] for stage in SHOWN), mapped]
    seconds = sum(stage["seconds"] for stage in row.values())
    loaded = "not run" if plain is None else f"{plain / 1e6:.0f}"
    checkpoint = f"{layers * layer_bytes / 1e6:.0f} MB"
    return [str(layers), checkpoint, *(f"{size / 1e6:.0f}" for size in sizes), loaded, f"{seconds:.0f}"]


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
    layer_bytes = bytes_of_layer(options)
    print(f"one layer {layer_bytes / 1e6:.0f} MB, bfloat16; peaks of RssAnon in MB above the level after imports")
    results = figures.Figures(options)
    results.table(["layers", "checkpoint", *SHOWN, "mapped", "from_pretrained alone", "s"])
    rows: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        make(whole, max(options.layers), options)
        for layers in sorted(options.layers):
            folder = first_layers(whole, Path(scratch) / f"m{layers}", layers)
            rows[layers] = figures.in_fresh_process(__file__, "--one", str(folder), "moeq")
            plain = None
            if layers * layer_bytes <= options.plain_limit * GIGABYTE:
                plain = figures.in_fresh_process(__file__, "--one", str(folder), "plain")["plain"]["RssAnon"]
            shutil.rmtree(folder)
            results.row(*shown(layers, layer_bytes, rows[layers], plain))
    verdict(results, rows, layer_bytes, 2 * 2049 * options.hidden)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
