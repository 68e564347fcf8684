"""Vision transformers with the token counts that people use, trained on scikit-learn's digits in minutes on one thread.

  python benchmarks/vision_models.py OUT [--seeds 3] [--kinds dense moe] [--tokens 65 197]

The digits are enlarged to 32 x 32 and 56 x 56 pixels; with patches of 4 pixels and the class token those are 65 and 197
tokens. `dense` is a plain ViT; `moe` has mixtures of experts with a router a task, as M3ViT has: task 0 tells the
digit, task 1 whether it is odd, each with its head, all else shared; two of three steps are of task 0.
A mixture goes on from the dense model of its seed and size, every expert a copy of the MLP with a little noise; a dense
model of 197 tokens from that of 65, its positions interpolated. Held-out images are those of the bundled split. A model
that is there already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForImageClassification

import moeq  # noqa: F401  registers moe_vit
from moeq.bundled import bundled_path
from moeq.models.corpus.labelled import SPLIT, enlarged

KINDS, TOKENS = ("dense", "moe"), (65, 197)
IMAGE = {65: 32, 197: 56}  # pixels a side
PATCH, TOP = 4, 16  # pixels a side of a patch; the largest grey level
BATCH, SMOOTHING, BALANCE, DECAY = 32, 0.05, 0.005, 0.05
STEPS = {"dense": {65: 900, 197: 150}, "moe": {65: 300, 197: 75}}
RATE = {"dense": {65: 4e-3, 197: 2e-3}, "moe": {65: 2e-3, 197: 1e-3}}
NOISE = 0.02  # of copied experts, standard deviation
SIZES: dict[str, Any] = {
    "patch_size": PATCH,
    "num_channels": 1,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "pixel_scale": 1 / TOP,
    "pooling": "mean",
    "initializer_range": 0.07,
}
OWN: dict[str, dict[str, Any]] = {
    "dense": {"moe_layers": [], "num_labels": 10},
    "moe": {"moe_layers": [1, 3], "num_tasks": 2, "num_labels": [10, 2]},
}


def digits(tokens: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Images [1797, 1, H, H] between 0 and 1, labels [1797, 2] of both tasks, and row numbers {train, test}."""
    data = load_digits()
    grey = torch.tensor(data.images, dtype=torch.uint8)
    split = json.loads(bundled_path(SPLIT).read_text("utf-8"))
    rows = {part: torch.tensor(numbers) for part, numbers in split.items()}
    labels = torch.stack([torch.tensor(data.target), torch.tensor(data.target % 2)], 1)
    images = enlarged(grey, IMAGE[tokens] // grey.shape[-1])
    return images[:, None].float() / TOP, labels, rows


def unbalance(logits: Tensor) -> Tensor:
    """Share of the tokens times mean probability, summed over experts: 1 where all are chosen alike; logits [T, E]."""
    experts, top_k = logits.shape[1], SIZES["num_experts_per_tok"]
    load = functional.one_hot(logits.topk(top_k, -1).indices, experts).float().sum(1).mean(0)
    ratio: Tensor = experts / top_k * (load * logits.softmax(-1).mean(0)).sum()
    return ratio


def shifted(images: Tensor) -> Tensor:
    """A batch moved by up to half of one of the digits' own pixels, empty pixels moved in."""
    size = images.shape[-1]
    most = size // 16
    down, right = torch.randint(-most, most + 1, (2,)).tolist()
    wide = functional.pad(images, (most,) * 4)
    return wide[:, :, most + down : most + down + size, most + right : most + right + size]


def train(model: Any, images: Tensor, labels: Tensor, steps: int, rate: float) -> None:
    """Cross-entropy with smoothed labels, the tasks by turns, a balanced load of the experts, a one-cycle rate."""
    seen: list[Tensor] = []
    for block in model.blocks:
        for router in block.moe.routers if hasattr(block, "moe") else ():
            router.register_forward_hook(lambda _, __, logits: seen.append(logits))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate / 2, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.15)
    for step in range(steps):
        task = int(model.config.num_tasks > 1 and step % 3 == 2)
        pick = torch.randint(len(images), (BATCH,))
        seen.clear()
        logits = model(shifted(images[pick]), task=task).logits
        loss = functional.cross_entropy(logits, labels[pick, task], label_smoothing=SMOOTHING)
        loss = loss + sum(BALANCE * unbalance(logits) for logits in seen)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def grown(model: Any, small: Any) -> None:
    """Start a model from one of fewer tokens: everything as there, positions of patches interpolated."""
    given = small.state_dict()
    front, patches = given["pos_embed"][:, :1], given["pos_embed"][:, 1:]
    side, wide = (int(config.image_size) // PATCH for config in (small.config, model.config))
    grid = patches.unflatten(1, (side, side)).permute(0, 3, 1, 2)
    bicubic = functional.interpolate(grid, size=(wide, wide), mode="bicubic").permute(0, 2, 3, 1).flatten(1, 2)
    model.load_state_dict(given | {"pos_embed": torch.cat([front, bicubic], 1)})


def mixed(model: Any, dense: Any) -> None:
    """Start a mixture from a dense model: experts are copies of its MLPs with noise, the second head is new."""
    own = model.state_dict()
    given = {name: tensor for name, tensor in dense.state_dict().items() if name in own}
    given |= {f"heads.0.{part}": dense.state_dict()[f"head.{part}"] for part in ("weight", "bias")}
    for number in OWN["moe"]["moe_layers"]:
        experts, mlp = model.blocks[number].moe.experts, dense.blocks[number].mlp
        for name, linear in (("up_proj", mlp.fc1), ("down_proj", mlp.fc2)):
            stack = getattr(experts, name)
            given[f"blocks.{number}.moe.experts.{name}"] = linear.weight + NOISE * torch.randn_like(stack)
            biases = getattr(experts, f"{name}_bias")
            given[f"blocks.{number}.moe.experts.{name}_bias"] = linear.bias.expand_as(biases)
    model.load_state_dict(own | given)


def accuracies(model: Any, images: Tensor, labels: Tensor) -> list[float]:
    """Of every task on images."""
    with torch.no_grad():
        found = [torch.cat([model(part, task=task).logits for part in images.split(64)]).argmax(-1) == labels[:, task]
                 for task in range(model.config.num_tasks)]  # fmt: skip
    return [float(right.float().mean()) for right in found]


def _first(out: Path, kind: str, tokens: int, seed: int) -> Path | None:
    """The model that one goes on from."""
    if kind == "moe":
        return made(out, "dense", tokens, seed)
    return None if tokens == TOKENS[0] else made(out, kind, TOKENS[0], seed)


def made(out: Path, kind: str, tokens: int, seed: int) -> Path:
    """The folder of a trained model, trained where it is not there yet; weights are stored as float16."""
    folder = out / f"{kind}-{tokens}-seed{seed}"
    if (folder / "model.safetensors").is_file():
        return folder
    first = _first(out, kind, tokens, seed)
    torch.manual_seed(1000 * seed + tokens)
    started = time.process_time()
    images, labels, rows = digits(tokens)
    model = AutoModelForImageClassification.from_config(
        AutoConfig.for_model("moe_vit", image_size=IMAGE[tokens], **SIZES, **OWN[kind])
    )
    if first is not None:
        start = mixed if kind == "moe" else grown
        start(model, AutoModelForImageClassification.from_pretrained(first, dtype=torch.float32))
    train(model, images[rows["train"]], labels[rows["train"]], STEPS[kind][tokens], RATE[kind][tokens])
    model.half().save_pretrained(folder)
    again = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
    right = ", ".join(f"{share:.4f}" for share in accuracies(again, images[rows["test"]], labels[rows["test"]]))
    seconds = time.process_time() - started
    print(f"{folder.name}: held-out accuracy {right}; {seconds:.0f} processor seconds", flush=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tokens", nargs="+", type=int, choices=TOKENS, default=list(TOKENS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        for kind in options.kinds:
            for tokens in options.tokens:
                made(options.out, kind, tokens, seed)


if __name__ == "__main__":
    main()
