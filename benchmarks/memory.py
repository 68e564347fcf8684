"""Peak memory of profile, losses (RTN) and export on streamed checkpoints of 4 to 32 layers of the same width.

    python benchmarks/memory.py [--hidden 512] [--intermediate 512] [--experts 32] [--layers 4 8 16 32]

Anonymous memory (RssAnon, sampled 50 times a second from /proc) of a fresh process for each checkpoint; mapped file
pages (RssFile) apart, since the kernel may drop them. Goals: 32 layers take at most a quarter of a layer more than 4;
the level is at most the resident parts + 2 layers + 1 GB; bytes asked of the disk <= 1.2 of the checkpoint a stage.
Peer column: plain from_pretrained and nothing else.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

GIGABYTE = 10**9
STAGES = ("profile", "losses", "assign", "quantize", "export")
READING_STAGES = 3  # profile, losses and, for RTN replicas, quantize; export copies what is not an expert


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
        "rest.safetensors",
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
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def resident() -> dict[str, int]:
    """RssAnon and RssFile of this process, bytes."""
    rows = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in rows if name in ("RssAnon", "RssFile")}


def watch(peaks: dict[str, int], stop: threading.Event) -> None:
    while not stop.wait(0.02):
        for name, value in resident().items():
            peaks[name] = max(peaks.get(name, 0), value)


def measure(folder: Path, how: str) -> dict[str, float]:
    """In this process: the stages on a streamed model, or plain from_pretrained; peaks above the level before."""
    from moeq import pipeline
    from moeq.models import loading
    from moeq.models.source import open_source
    from moeq.progress import Reporter
    from moeq.recipe import load_recipe
    from moeq.stages.context import Context

    source = open_source(str(folder))
    loading.describe(source)
    start, peaks, stop = resident(), {}, threading.Event()
    thread = threading.Thread(target=watch, args=(peaks, stop))
    thread.start()
    found: dict[str, float] = {}
    if how == "moeq":
        overrides = [
            "stream=always", "corpus.sequences=16", "corpus.sequence_length=128", "losses.methods=[rtn]",
            "losses.per_projection=false", "losses.working_memory=256MiB", "assign.quantizer=rtn", "eval.compare=[]",
        ]  # fmt: skip
        recipe = load_recipe(None, overrides)
        out = folder.with_name(folder.name + "-run")
        context = Context(recipe=recipe, model_name=str(folder), out=out, reporter=Reporter(quiet=True))
        pipeline.run(context, STAGES)
        assert context.streamed is not None
        total = sum(header.bytes for header in source.tensors.values())
        found["passes"] = context.streamed.bytes_read / total / READING_STAGES
        shutil.rmtree(out)
    else:
        import torch

        model = loading.load_model(source, torch.bfloat16, torch.device("cpu"))
        found["passes"] = float(model is not None)
    stop.set()
    thread.join()
    return found | {name: float(peaks[name] - start[name]) for name in start}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("intermediate", 512), ("experts", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "HOW"), help="measure in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(Path(options.one[0]), options.one[1])))
        return 0
    layer_bytes = 2 * (3 * options.experts * options.hidden * options.intermediate + 1280 * options.hidden)
    print(f"one layer {layer_bytes / 1e6:.0f} MB, bfloat16; MB above the level after imports")
    print("layers  checkpoint   moeq anon  mapped  passes   from_pretrained anon  mapped")
    peaks = {}
    passes = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        for layers in options.layers:
            folder = make(Path(scratch) / f"m{layers}", layers, options)
            row = {}
            for how in ("moeq", "plain"):
                command = [sys.executable, __file__, "--one", str(folder), how]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                row[how] = json.loads(done.stdout.splitlines()[-1])
            shutil.rmtree(folder)
            ours, plain = row["moeq"], row["plain"]
            peaks[layers] = ours["RssAnon"]
            passes = max(passes, ours["passes"])
            print(
                f"{layers:6}  {layers * layer_bytes / 1e6:8.0f} MB  {ours['RssAnon'] / 1e6:9.0f}  "
                f"{ours['RssFile'] / 1e6:6.0f}  {ours['passes']:6.2f}  {plain['RssAnon'] / 1e6:20.0f}  "
                f"{plain['RssFile'] / 1e6:6.0f}",
                flush=True,
            )
    grown = (peaks[max(peaks)] - peaks[min(peaks)]) / layer_bytes
    level = max(peaks.values())
    limit = 2 * layer_bytes + GIGABYTE
    print(f"growth {grown:.2f} of a layer (goal 0.25); level {level / 1e6:.0f} MB (goal {limit / 1e6:.0f} + resident)")
    print(f"bytes asked of the disk, of the checkpoint, a reading stage: {passes:.2f} (goal 1.2)")
    return 0 if grown <= 0.25 and level <= limit and passes <= 1.2 else 1


if __name__ == "__main__":
    sys.exit(main())
