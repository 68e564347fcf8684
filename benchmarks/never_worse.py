"""Never worse: what the qualities fast, balanced and best lose on ten small models that nothing was tuned on.

    python benchmarks/never_worse.py [--shared FOLDER] [--families NAME ...] [--bits 2.3] [--steps 400]
        [--out FOLDER] [--seconds 1000] --json FILE

Ten families of transformers, sizes and seeds fixed in this file before the first run: each is trained for --steps
steps of 4,096 tokens (a minute or two on two cores) on the text of FOLDER (models/train_tiny.py and data, by default
../shared; without it nothing is measured) and stored in float16. Then each quality's preset, as it is but for the
budget, --bits stored for a weight of the experts, on its own calibration text (bundled), up to the weights that would
be exported. KL is that of the next token from the trained model, in nats, over the bundled evaluation text, which
neither training nor calibration has seen; a quality against the one before it by pairs: sequence for sequence, the
mean of the differences with its 95 % interval (1.96 standard errors over 167 sequences of 512 tokens).

Goal: on every model KL falls from fast to balanced and from balanced to best, the whole interval below zero.

FILE keeps every model and quality: a further run measures only those that it lacks, and stops before the next one
when --seconds are over. --out keeps the models and the runs. Seconds are the processor's.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import figures  # isort: skip
import torch  # isort: skip
from torch import Tensor  # isort: skip

from moeq import pipeline
from moeq.bundled.preset_files import QUALITIES, preset_path
from moeq.stages import assign, evaluate
from moeq.stages.context import Context
from moeq.stages.expert_bytes import expert_weights, total_bytes

COMMON: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
FEW = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128}
MANY = {"num_experts_per_tok": 4, "moe_intermediate_size": 64, "intermediate_size": 256}
FAMILIES: dict[str, dict[str, Any]] = {  # model type: what differs from COMMON; None: it has none
    "olmoe": MANY | {"num_experts": 16, "intermediate_size": 64, "moe_intermediate_size": None},
    "qwen2_moe": MANY | {"num_experts": 16, "shared_expert_intermediate_size": 64},
    "deepseek_v3": MANY | {
        "n_routed_experts": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 32,
    },
    "glm4_moe": MANY | {
        "n_routed_experts": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "head_dim": 32,
    },
    "granitemoe": FEW,
    "phimoe": FEW,
    "gpt_oss": FEW | {"head_dim": 32, "sliding_window": 128, "rope_parameters": {"rope_type": "default"}},
    "ernie4_5_moe": MANY | {
        "num_experts_per_tok": None, "moe_num_experts": 16, "moe_k": 4, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "minimax_m2": FEW | {"head_dim": 32, "num_experts_per_tok": 3},
    "lfm2_moe": MANY | {
        "num_experts": 16, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
}  # fmt: skip
SEED, BATCH, LENGTH, RATE, WARMUP = 20261124, 16, 256, 2e-3, 50
MIX = (0.40, 0.15, 0.20, 0.25)  # of the domains of train_tiny.py
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
Z = 1.96
Key = tuple[str, str]  # family and quality


@dataclass(frozen=True)
class Point:
    """A model in one quality: stored bits of an expert's weight, KL of every sequence, processor's seconds."""

    family: str
    quality: str
    perplexity: float  # of the model as it was trained
    bits: float
    seconds: float
    kl: list[float]

    @property
    def mean(self) -> float:
        return sum(self.kl) / len(self.kl)


def difference(before: list[float], after: list[float]) -> tuple[float, float]:
    """Mean of what the second has more, sequence for sequence, and the half of its 95 % interval."""
    more = torch.tensor(after, dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
    return float(more.mean()), Z * float(more.std()) / math.sqrt(len(more))


def built(family: str) -> Any:
    """The model before training, of COMMON's sizes."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    settings = {name: value for name, value in (COMMON | FAMILIES[family]).items() if value is not None}
    torch.manual_seed(SEED)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings), dtype=torch.float32)


def train(family: str, script: Any, steps: int, out: Path) -> None:
    """Train a model and store it in float16 with the bundled tokenizer; next-token loss alone, Adam, one cosine."""
    from transformers import AutoTokenizer

    from moeq.bundled import bundled_path

    tokenizer = AutoTokenizer.from_pretrained(bundled_path("tiny-mixtral"))
    streams = [script.token_stream(tokenizer, domain, "train") for domain in script.DOMAINS]
    model = built(family).train()
    steepest = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    drawn = torch.Generator().manual_seed(SEED)
    for step in range(steps):
        rate = min(1, (step + 1) / WARMUP) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))
        for group in steepest.param_groups:
            group["lr"] = RATE * rate
        rows = []
        for domain in torch.multinomial(torch.tensor(MIX), BATCH, True, generator=drawn).tolist():
            first = int(torch.randint(len(streams[domain]) - LENGTH, (1,), generator=drawn))
            rows.append(streams[domain][first : first + LENGTH].long())
        batch = torch.stack(rows)
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steepest.step()
        steepest.zero_grad()
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(input_ids=batch).logits.float().log_softmax(-1) for batch in ids.long().split(8)])


def measure(family: str, quality: str, bits: str, model: Path, out: Path) -> Point:
    """Run a preset and compare what would be exported with the trained model."""
    context = figures.context(model, out, [f"assign.bits_per_weight={bits}"], preset_path(quality))
    began = time.process_time()
    pipeline.run(context, ("profile", "losses", "assign", "quantize"))
    taken = time.process_time() - began
    assignment, ids = assign.load(context), context.text.evaluation.ids
    with context.model.overlay() as overlay:
        exact = logits(overlay.set(), ids)
        found = logits(evaluate.replaced(context, overlay, assignment, exported=True), ids)
    loss = -float(exact[:, :-1].gather(-1, ids[:, 1:, None].long()).mean())
    kl = (exact.exp() * (exact - found)).sum(-1).mean(-1).tolist()
    return Point(family, quality, math.exp(loss), stored_bits(context), round(taken, 1), [round(one, 6) for one in kl])


def stored_bits(context: Context) -> float:
    """Of an expert's weight, scales, zero points and states counted."""
    return 8 * total_bytes(context, assign.load(context)) / expert_weights(context.model.layers)


def measured(options: argparse.Namespace, points: list[Point], out: Path, keep: Callable[[], None]) -> int:
    """Measure what the points lack, model by model; how many are left when the time is over."""
    script = figures.script(options.shared / "models" / "train_tiny.py")
    have = {(point.family, point.quality) for point in points}
    wanted: list[Key] = [(family, quality) for family in options.families for quality in QUALITIES]
    wanted = [key for key in wanted if key not in have]
    for done, (family, quality) in enumerate(wanted):
        if time.monotonic() - options.started > options.seconds:
            return len(wanted) - done
        model = out / family / "model"
        if not (model / "config.json").is_file():
            train(family, script, options.steps, model)
        points.append(measure(family, quality, options.bits, model, out / family / quality))
        print(family, quality, f"{points[-1].bits:.3f} bits  KL {points[-1].mean:.4f}", flush=True)
        keep()
    return 0


def findings(results: figures.Figures, points: list[Point]) -> None:
    """A table of the models, and on how many of them each quality is better than the one before it."""
    by = {(point.family, point.quality): point for point in points}
    steps = list(pairwise(QUALITIES))
    results.table(["model", "perplexity", "bits", *QUALITIES, *(f"{a} to {b}" for a, b in steps), "seconds"])
    better = dict.fromkeys(steps, 0)
    families = [one for one in dict.fromkeys(point.family for point in points) if (one, QUALITIES[-1]) in by]
    for family in families:
        own = [by[family, quality] for quality in QUALITIES]
        shown = []
        for step in steps:
            mean, half = difference(*(by[family, quality].kl for quality in step))
            better[step] += mean + half < 0
            shown.append(f"{mean:+.4f} ± {half:.4f}")
        results.row(
            family, f"{own[0].perplexity:.1f}", " ".join(f"{one.bits:.3f}" for one in own),
            *(f"{one.mean:.4f}" for one in own), *shown, " ".join(f"{one.seconds:.0f}" for one in own),
        )  # fmt: skip
    for (before, after), count in better.items():
        goal = {"at_least": len(FAMILIES)} if not results.options.quick else {}
        results.add(f"models on which {after} loses less than {before}", count, f"of {len(families)}", digits=0, **goal)
        ratios = [by[family, after].mean / by[family, before].mean for family in families]
        if ratios:
            results.add(f"KL of {after} over that of {before}, median of the models", statistics.median(ratios))


def read(path: Path | None) -> tuple[list[Point], float]:
    """The points of an earlier run, and the seconds that they took."""
    if path is None or not path.is_file():
        return [], 0.0
    written = json.loads(path.read_text("utf-8"))
    return [Point(**point) for point in written["points"]], written["seconds"]


def main() -> int:
    options = _options()
    if not (options.shared / "models" / "train_tiny.py").is_file():
        return figures.skipped(options, f"no text with its train_tiny.py in {options.shared}")
    results = figures.Figures(options)
    points, results.before = read(options.json)

    def keep() -> None:
        results.details["points"] = [asdict(point) for point in points]
        results.keep()

    with tempfile.TemporaryDirectory() as folder:
        lacking = measured(options, points, options.out or Path(folder), keep)
    keep()
    if lacking:
        results.left_out(f"{lacking} runs", "the time was over; run the same command again")
    findings(results, points)
    return results.report()


def _options() -> argparse.Namespace:
    every = list(FAMILIES)
    parser = figures.parser(
        __doc__, shared=figures.SHARED, families=(every, ["granitemoe"]), bits="2.3", steps=(400, 20), seconds=1e9
    )
    parser.add_argument("--out", type=Path, help="keep models and runs here")
    options = figures.parsed(parser)
    if unknown := [name for name in options.families if name not in every]:
        parser.error(f"no family {unknown[0]!r}; there are {', '.join(every)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
