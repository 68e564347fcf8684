"""Writes the bundled vision transformer of 65 tokens, tiny-moe-vit-65: one task of a trained mixture.

  python tests/bundled/build_vit_65.py MODELS    -> tiny-moe-vit-65/{config.json, model.safetensors}

MODELS is the folder of benchmarks/vision_models.py, which trains moe-65-seed0 there if it is not there yet. Its task 0,
the digit, is kept with its routers and its head, as one deploys an M3ViT task by task; the other task's are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageClassification

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import vision_models

HERE = Path(__file__).resolve().parents[2] / "moeq" / "bundled"
MODEL, TOKENS = "tiny-moe-vit-65", 65


def of_task(model: Any, task: int) -> Any:
    """The model of one task: its routers and its head, and all that tasks share."""
    settings = {"moe_layers": model.config.moe_layers, "num_labels": model.config.task_labels[task]}
    sizes = {"image_size": model.config.image_size, **vision_models.SIZES, **settings}
    alone = AutoModelForImageClassification.from_config(AutoConfig.for_model("moe_vit", **sizes))
    given = {}
    for name, tensor in model.state_dict().items():
        for several, one in (("heads", "head"), ("routers", "router")):
            name = name.replace(f"{several}.{task}.", f"{one}.")
        if not any(f"{several}." in name for several in ("heads", "routers")):
            given[name] = tensor
    alone.load_state_dict(given)
    return alone


def main() -> None:
    """Write, and say how many of the held-out digits what is stored is right of."""
    torch.set_num_threads(1)
    source = vision_models.made(Path(sys.argv[1]), "moe", TOKENS, 0)
    model = AutoModelForImageClassification.from_pretrained(source, dtype=torch.float32)
    of_task(model, 0).half().save_pretrained(HERE / MODEL)
    again = AutoModelForImageClassification.from_pretrained(HERE / MODEL, dtype=torch.float32).eval()
    images, labels, rows = vision_models.digits(TOKENS)
    test = rows["test"]
    (share,) = vision_models.accuracies(again, images[test], labels[test])
    print(f"held-out accuracy {share:.4f} ({round(share * len(test))} of {len(test)})")


if __name__ == "__main__":
    main()
