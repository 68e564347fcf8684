"""Trains the bundled vision transformer, tiny-moe-vit, on scikit-learn's digits.

  python tests/bundled/build_vit.py      -> tiny-moe-vit/{config.json, model.safetensors}, digits_split.json

The digits are 1,797 grey images of 8 x 8 pixels; four fifths, drawn with a fixed seed, train. On one thread the same
versions of torch and scikit-learn on the same kind of machine give the same weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForImageClassification

HERE = Path(__file__).resolve().parents[2] / "moeq" / "bundled"
MODEL, SPLIT = "tiny-moe-vit", "digits_split.json"
STEPS, BATCH, RATE, SMOOTHING, BALANCE = 1800, 128, 2e-3, 0.05, 0.005
SIZES: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "moe_layers": [1, 3],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "num_labels": 10,
    "pixel_scale": 0.0625,
    "initializer_range": 0.07,
}


def digits() -> tuple[Tensor, Tensor]:
    """All images [1797, 1, 8, 8], their values between 0 and 1, and labels [1797]."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] * SIZES["pixel_scale"], torch.tensor(data.target)


def split(count: int) -> dict[str, list[int]]:
    """Row numbers, {train, test}."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    cut = int(count * 0.8)
    return {"train": order[:cut], "test": order[cut:]}


def routers(model: Any) -> list[Any]:
    """The routers of all mixtures of experts."""
    return [block.moe.router for block in model.blocks if hasattr(block, "moe")]


def unbalance(logits: Tensor) -> Tensor:
    """Share of the tokens times mean probability, summed over experts: 1 where all are chosen alike; logits [T, E]."""
    experts, top_k = logits.shape[1], SIZES["num_experts_per_tok"]
    load = functional.one_hot(logits.topk(top_k, -1).indices, experts).float().sum(1).mean(0)
    ratio: Tensor = experts / top_k * (load * logits.softmax(-1).mean(0)).sum()
    return ratio


def shifted(images: Tensor) -> Tensor:
    """A batch moved by up to one pixel, empty pixels moved in."""
    down, right = torch.randint(-1, 2, (2,)).tolist()
    size = images.shape[-1]
    return functional.pad(images, (1, 1, 1, 1))[:, :, 1 + down : 1 + down + size, 1 + right : 1 + right + size]


def train(model: Any, images: Tensor, labels: Tensor) -> None:
    """Cross-entropy with smoothed labels and a balanced load of the experts, under a one-cycle learning rate."""
    seen: list[Tensor] = []
    for router in routers(model):
        router.register_forward_hook(lambda _, __, logits: seen.append(logits))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE / 2, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=0.1)
    for step in range(STEPS):
        pick = torch.randint(len(images), (BATCH,))
        seen.clear()
        logits = model(shifted(images[pick])).logits
        loss = functional.cross_entropy(logits, labels[pick], label_smoothing=SMOOTHING)
        loss = loss + BALANCE * torch.stack([unbalance(logits) for logits in seen]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 300 == 299:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    """Train and write; the weights are stored as float16, and the accuracy is that of what is stored."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = digits()
    rows = split(len(images))
    config = AutoConfig.for_model("moe_vit", **SIZES)
    model = AutoModelForImageClassification.from_config(config)
    train(model, images[rows["train"]], labels[rows["train"]])
    folder = HERE / MODEL
    model.half().save_pretrained(folder)
    again = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        right = again(images[rows["test"]]).logits.argmax(-1) == labels[rows["test"]]
    print(f"test accuracy {right.float().mean().item():.4f} ({int(right.sum())} of {len(right)})")
    (HERE / SPLIT).write_text(json.dumps(rows, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
