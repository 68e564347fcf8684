"""Decoding with a packed checkpoint against its bf16 original, whole requests through `moeq bench`.

    python benchmarks/decode.py [--layers 4] [--experts 128] [--batches 1 16] [--folder DIR]
    python benchmarks/decode.py --small [--folder DIR]

A generated Qwen3-MoE in the shape of Qwen3-30B-A3B but for its number of layers (2048 x 768, 8 of 128 experts, 32
heads, 151,936 tokens) beside its checkpoints at 4 bits in groups of 128: once the experts alone, once attention and
head as well (--other-bits 8: as the qualities of `moeq run` have them); random codes, and the bf16 model has their
values. Each is timed beside the bf16 original in one process, requests in turns; what is shown are ratios of medians.
Goals: time within the experts of a decode step at batch 1 at most a fourth with experts alone packed; a whole step at
most a third with all at 4 bits; at the largest batch not slower; the loaded model's tensors, and the growth of a
process's resident memory by loading, at most 1.1 times what the manifest states; while it is loaded at most a layer
more.

--small: the trained models of ../shared instead, packed by moeq's own stages: a whole step not slower than in bf16, and
the tokens of kernels those of MOEQ_KERNEL=reference in float32 (in bf16, where rounding decides ties, a share is
shown). --folder keeps what was made, so that the next run begins at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import moeq  # before torch: it sets OMP_WAIT_POLICY, without which torch's waiting threads keep the cores

import decode_models  # isort: skip
import figures  # isort: skip

EXPERTS_GOAL, WHOLE_GOAL, BATCH_GOAL, HELD_GOAL, LAYER_GOAL = 4.0, 3.0, 1.0, 1.1, 1.0
BITS, LAYERS = decode_models.BITS, "model.layers."
COLUMNS = ["packed", "step, ms", "bf16, ms", "ratio", "experts' ratio", "first token's", "of the bandwidth"]
SMALL = ("tiny-mixtral", "tiny-qwen3-moe")
STAGES = ("profile", "losses", "assign", "quantize", "export")
CONTINUED = 32  # tokens that kernels and reference are compared by, of PROMPTS prompts
PROMPTS = 4


def timed(
    checkpoint: Path, model: Path, variant: str, options: argparse.Namespace, results: figures.Figures
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """One checkpoint beside the original, a row for each batch: the checkpoint's own figures, and its ratios."""
    found = moeq.bench(
        checkpoint,
        dense=model,
        batches=options.batches,
        prompt_tokens=32,
        new_tokens=options.new_tokens,
        repeat=options.repeat,
        peers=False,
        dtype="bfloat16",
        quiet=True,
    )
    packed, dense = found["models"]
    for mine, theirs, ratio in zip(packed["points"], dense["points"], found["ratios"], strict=True):
        results.row(
            f"{variant}, batch {mine['batch']}", f"{mine['token_seconds'] * 1e3:.2f}",
            f"{theirs['token_seconds'] * 1e3:.2f}", f"{ratio['token']:.2f}", f"{ratio['experts']:.2f}",
            f"{ratio['first_token']:.2f}", f"{mine['bandwidth_share']:.2f}",
        )  # fmt: skip
    return packed, found["ratios"]


def stated(checkpoint: Path) -> tuple[int, int]:
    """Bytes that a manifest states of what is loaded, and of the largest decoder layer among them."""
    from moeq.artifacts.manifest import read_manifest
    from moeq.models.source import open_source

    layers: Counter[str] = Counter()
    for name, header in open_source(str(checkpoint)).tensors.items():
        if name.startswith(LAYERS):
            layers[name.removeprefix(LAYERS).partition(".")[0]] += header.bytes
    totals = read_manifest(checkpoint).totals
    return totals.placed_expert_bytes + totals.non_expert_bytes + totals.guard_bytes, max(layers.values())


def loaded(checkpoint: Path, variant: str, results: figures.Figures) -> None:
    """What loading takes in a process of its own."""
    worker = Path(__file__).with_name("decode_worker.py")
    found = figures.in_fresh_process(str(worker), str(checkpoint))
    whole, layer = stated(checkpoint)
    grown, more = found["read"] - found["before"], found["highest"] - found["loaded"]
    results.add(f"growth of resident memory, of what is stated, {variant} packed", grown / whole, at_most=HELD_GOAL)
    results.add(f"more while it is loaded, {variant} packed", more / layer, "of a layer's experts", at_most=LAYER_GOAL)


def generated(options: argparse.Namespace, folder: Path, results: figures.Figures) -> None:
    """The generated model and both of its checkpoints."""
    decode_models.make(folder, options)
    for variant in decode_models.VARIANTS:
        checkpoint = folder / variant
        loaded(checkpoint, variant, results)
        packed, ratios = timed(checkpoint, folder / "model", variant, options, results)
        for ratio in ratios:
            batch = ratio["batch"]
            if batch > 1:
                results.add(
                    f"a step at batch {batch}, {variant} packed", ratio["token"], "times faster", at_least=BATCH_GOAL
                )
            elif variant == "experts":
                results.add(
                    "experts of a step at batch 1, experts packed", ratio["experts"], "times faster",
                    at_least=EXPERTS_GOAL,
                )  # fmt: skip
            else:
                goal = {"at_least": WHOLE_GOAL} if options.other_bits == BITS else {}
                results.add("a step at batch 1, all packed", ratio["token"], "times faster", **goal)
        held = packed["tensor_bytes"] / stated(checkpoint)[0]
        results.add(f"tensors held, of what is stated, {variant} packed", held, at_most=HELD_GOAL)


def recipe(variant: str, tied: bool) -> dict[str, Any]:
    """Rounded to the nearest, so that little text does; tied: embeddings and head are one tensor."""
    whole = {"attention": BITS, "head": BITS, "method": "rtn"} | ({"embeddings": BITS} if tied else {})
    return {
        "name": variant,
        "corpus": {"sequences": 8, "sequence_length": 64},
        "losses": {"methods": ["rtn"], "bits": [BITS], "group_size": decode_models.GROUP},
        "others": whole if variant == "all" else {},
        "assign": {"method": "uniform", "bits": BITS, "quantizer": "rtn"},
        "eval": {"compare": []},
        "export": {"verify": False},
    }


def pack(model: Path, out: Path, variant: str) -> Path:
    """The packed checkpoint, made by moeq's stages unless it is there."""
    from moeq.models.source import open_source

    checkpoint = out / "checkpoint"
    if not checkpoint.exists():
        asked = moeq.Recipe.model_validate(recipe(variant, bool(open_source(str(model)).config["tie_word_embeddings"])))
        for stage in STAGES:
            moeq.stage(stage, asked, out=out, model=model, quiet=True)
    return checkpoint


def continuations(checkpoint: Path, kernel: str | None, dtype: str) -> list[list[int]]:
    """Likeliest tokens after some prompts, with a kernel that MOEQ_KERNEL names, None: the one that is chosen."""
    import torch

    from moeq.models.messages import quiet_transformers
    from moeq.runtime.checkpoint import load_checkpoint
    from moeq_kernels.names import VARIABLE

    before = os.environ.pop(VARIABLE, None)
    try:
        os.environ.update({} if kernel is None else {VARIABLE: kernel})
        model: Any = load_checkpoint(checkpoint, getattr(torch, dtype), torch.device("cpu"))
    finally:
        os.environ.pop(VARIABLE, None)
        os.environ.update({} if before is None else {VARIABLE: before})
    ids = torch.randint(3, model.config.vocab_size, (PROMPTS, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), quiet_transformers():
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=CONTINUED,
            min_new_tokens=CONTINUED, pad_token_id=0,
        )  # fmt: skip
    return made[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def small(options: argparse.Namespace, folder: Path, results: figures.Figures) -> None:
    """The trained models: whole steps, and the tokens of kernels and reference."""
    for name in SMALL:
        model = figures.SHARED / "models" / name
        if not model.is_dir():
            results.left_out(name, f"it is not at {model}")
            continue
        for variant in decode_models.VARIANTS:
            checkpoint = pack(model, folder / f"{name}-{variant}", variant)
            _, ratios = timed(checkpoint, model, f"{name}, {variant}", options, results)
            for ratio in ratios:
                what = f"{name}, a step at batch {ratio['batch']}, {variant} packed"
                results.add(what, ratio["token"], "times faster", at_least=BATCH_GOAL)
            for dtype, goal in (("float32", {"at_least": 1.0}), ("bfloat16", {})):
                ways = [continuations(checkpoint, kernel, dtype) for kernel in (None, "reference")]
                same = sum(one == other for one, other in zip(*ways, strict=True)) / PROMPTS
                results.add(f"{name}, {variant} packed, {dtype}: prompts continued as the reference does", same, **goal)


def run(options: argparse.Namespace, folder: Path) -> int:
    """What is asked for; the exit code."""
    results = figures.Figures(options)
    results.table(COLUMNS)
    (small if options.small else generated)(options, folder, results)
    return results.report()


def main() -> None:
    parser = figures.parser(
        __doc__,
        **decode_models.CODES,
        layers=(4, 1),
        experts=(128, 16),
        vocabulary=(151936, 4096),
        batches=[1, 16],
        new_tokens=(24, 6),
        repeat=(3, 1),
        small=False,
    )
    parser.add_argument("--folder", type=Path, help="where checkpoints are made and kept [default: a temporary folder]")
    options = figures.parsed(parser)
    with figures.kept_or_temporary(options.folder) as folder:
        sys.exit(run(options, folder))


if __name__ == "__main__":
    main()
