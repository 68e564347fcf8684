"""Forward passes in bfloat16 on a CPU without instructions for it: torch's products, and moeq's in single precision.

    python benchmarks/half_products.py [--rounds 7] [--tokens 16 128 512 2048] [--experts 32]

One layer in the shape of Qwen3-30B-A3B but for its number of experts, random, in one thread, the passes one after the
other in turns in one process: as torch makes them, with moeq's products (moeq/models/half_products.py), and a copy of
the model in float32, which takes twice the memory. On a CPU that has such instructions nothing is replaced, and nothing
measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import moeq  # noqa: F401  before torch: it sets OMP_WAIT_POLICY

import decode_models  # isort: skip
import figures  # isort: skip
import torch  # isort: skip

from moeq.models.half_products import slow_types, using

GOAL = 2.0  # times torch's speed, of many tokens
MANY = 128


def model_of(options: argparse.Namespace) -> Any:
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(decode_models.configuration(options)).bfloat16().eval()


def seconds(model: Any, ids: torch.Tensor, products: AbstractContextManager[None]) -> float:
    with torch.no_grad(), products:
        began = time.thread_time()
        model(ids)
        return time.thread_time() - began


def main() -> int:
    options = figures.arguments(
        __doc__, rounds=(7, 2), tokens=([16, 128, 512, 2048], [16, 128]), experts=(32, 8), layers=1, vocabulary=1024
    )
    if torch.bfloat16 not in slow_types():
        return figures.skipped(options, "this CPU multiplies bfloat16 itself")
    torch.set_num_threads(1)
    results, halves = figures.Figures(options), frozenset({torch.bfloat16})
    model, single = model_of(options), model_of(options).float()
    results.table(["tokens", "torch, ms", "moeq, ms", "float32, ms", "of torch's speed", "of float32's time"])
    for tokens in options.tokens:
        ids = torch.randint(0, options.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens))
        forms: dict[str, tuple[Any, Callable[[], AbstractContextManager[None]]]] = {
            "torch": (model, nullcontext), "moeq": (model, lambda: using(halves)), "float32": (single, nullcontext),
        }  # fmt: skip
        taken: dict[str, list[float]] = {name: [] for name in forms}
        for turn in range(options.rounds + 1):
            for name, (one, products) in forms.items():
                found = seconds(one, ids, products())
                if turn:
                    taken[name].append(found)
        middle = {name: statistics.median(times) for name, times in taken.items()}
        faster, slower = middle["torch"] / middle["moeq"], middle["moeq"] / middle["float32"]
        results.row(str(tokens), *(f"{1e3 * value:.0f}" for value in middle.values()), f"{faster:.2f}", f"{slower:.2f}")
        goal = {"at_least": GOAL} if tokens >= MANY else {}
        results.add(f"a layer on {tokens} tokens in bfloat16", faster, "of torch's speed", **goal)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
