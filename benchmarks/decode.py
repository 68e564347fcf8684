"""Decoding with a packed checkpoint against its bf16 original, whole requests through `moeq bench`.

    python benchmarks/decode.py [--layers 4] [--experts 128] [--batches 1 16] [--folder DIR]

A generated Qwen3-MoE in the shape of Qwen3-30B-A3B but for its number of layers (2048 x 768, 8 of 128 experts, 32
heads, 151,936 tokens; random weights) is made into checkpoints by moeq's own stages, rounded to 4 bits in groups of
128: once the experts alone, once attention and head as well. Each is timed beside the bf16 original in one process,
requests in turns; what is shown are ratios of medians. Goals: time within the experts of a decode step at batch 1 at
most a fourth with experts alone packed; a whole step at most a third with all at 4 bits; at the largest batch not
slower; the loaded model's tensors at most 1.1 times the checkpoint's files.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import figures

EXPERTS_GOAL, WHOLE_GOAL, BATCH_GOAL, HELD_GOAL = 4.0, 3.0, 1.0, 1.1
GROUP, BITS = 128, 4
VARIANTS: dict[str, dict[str, Any]] = {
    "experts": {},
    "all": {"attention": BITS, "head": BITS, "method": "rtn"},
}
STAGES = ("profile", "losses", "assign", "quantize", "export")


def make_model(folder: Path, options: argparse.Namespace) -> None:
    """The original, in bf16, with the bundled model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from moeq.bundled import bundled_path

    config = Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=options.layers,
        num_experts=options.experts, num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        vocab_size=options.vocabulary, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        tie_word_embeddings=False, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    AutoTokenizer.from_pretrained(bundled_path("tiny-mixtral")).save_pretrained(folder)


def recipe(variant: str) -> dict[str, Any]:
    """Rounded to the nearest, so that little text does."""
    return {
        "name": variant,
        "corpus": {"sequences": 8, "sequence_length": 64},
        "losses": {"methods": ["rtn"], "bits": [BITS], "group_size": GROUP},
        "others": VARIANTS[variant],
        "assign": {"method": "uniform", "bits": BITS, "quantizer": "rtn"},
        "eval": {"compare": []},
        "export": {"verify": False},
    }


def pack(model: Path, out: Path, variant: str) -> Path:
    """The packed checkpoint, made by moeq's stages."""
    import moeq

    for stage in STAGES:
        moeq.stage(stage, moeq.Recipe.model_validate(recipe(variant)), out=out, model=model, quiet=True)
    return out / "checkpoint"


def measure(model: Path, folder: Path, variant: str, options: argparse.Namespace, results: figures.Figures) -> None:
    """One checkpoint beside the original, a row for each batch."""
    import moeq

    checkpoint = pack(model, folder / variant, variant)
    files = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    found = moeq.bench(
        checkpoint,
        dense=model,
        batches=options.batches,
        prompt_tokens=32,
        new_tokens=options.new_tokens,
        repeat=options.repeat,
        peers=False,
        quiet=True,
    )
    packed, dense = found["models"]
    for mine, theirs in zip(packed["points"], dense["points"], strict=True):
        whole = theirs["token_seconds"] / mine["token_seconds"]
        experts = whole * theirs["expert_share_of_step"] / mine["expert_share_of_step"]
        first = theirs["first_token_seconds"] / mine["first_token_seconds"]
        batch = mine["batch"]
        results.row(
            f"{variant}, batch {batch}", f"{mine['token_seconds'] * 1e3:.1f}", f"{theirs['token_seconds'] * 1e3:.1f}",
            f"{whole:.2f}", f"{experts:.2f}", f"{first:.2f}", f"{mine['bandwidth_share']:.2f}",
        )  # fmt: skip
        if batch == 1 and variant == "experts":
            results.add("experts of a step at batch 1, experts packed", experts, "times faster", at_least=EXPERTS_GOAL)
        elif batch == 1:
            results.add("a step at batch 1, all packed", whole, "times faster", at_least=WHOLE_GOAL)
        else:
            results.add(f"a step at batch {batch}, {variant} packed", whole, "times faster", at_least=BATCH_GOAL)
    held = packed["tensor_bytes"] / files
    results.add(f"tensors held, of the files, {variant} packed", held, at_most=HELD_GOAL)
    shutil.rmtree(folder / variant)


def run(options: argparse.Namespace, folder: Path) -> int:
    """Both checkpoints; the exit code."""
    make_model(folder / "model", options)
    results = figures.Figures(options)
    results.table(["packed", "step, ms", "bf16, ms", "ratio", "experts' ratio", "first token's", "of the bandwidth"])
    for variant in VARIANTS:
        measure(folder / "model", folder, variant, options, results)
    return results.report()


def main() -> None:
    parser = figures.parser(
        __doc__,
        layers=(4, 1),
        experts=(128, 16),
        vocabulary=(151936, 4096),
        batches=[1, 16],
        new_tokens=(24, 6),
        repeat=(3, 1),
    )
    parser.add_argument("--folder", type=Path, help="where the checkpoints are made [default: a temporary folder]")
    options = figures.parsed(parser)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sys.exit(run(options, Path(folder)))


if __name__ == "__main__":
    main()
