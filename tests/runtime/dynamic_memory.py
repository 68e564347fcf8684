"""What a process of a model with changing precision holds: a line of JSON for test_dynamic_checkpoint.py.

    python dynamic_memory.py CHECKPOINT ROUNDS

Anonymous and shared resident memory, page cache apart, before the pools are made, when half of the rounds are done and
at the end; slack: of what a forward pass and one expert that is being read take.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from moeq.exporters.native_replicas import CheckpointReplicas, CopyingReader
from moeq.runtime.checkpoint import load_checkpoint
from moeq.runtime.dynamic.copies import Switch
from moeq.runtime.dynamic.model import DynamicMoE, DynamicSettings
from moeq.runtime.dynamic.pools import HIGH, LOW
from moeq_kernels.freed import return_memory

SLACK = 6 << 20  # activations, what was compiled, one expert that is read, and what malloc keeps


def held() -> int:
    """RssAnon + RssShmem, bytes."""
    gc.collect()
    return_memory()
    rows = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(value.split()[0]) * 1024 for name, _, value in rows if name in ("RssAnon", "RssShmem"))


def opened(path: Path, memory: int, host: int) -> DynamicMoE:
    source = CheckpointReplicas(CopyingReader(path))
    model: Any = load_checkpoint(path, torch.float32, torch.device("cpu"), policy="fixed")
    settings = DynamicSettings(
        high=4, low=2, memory_bytes=memory, host_bytes=host, period=8, background=False, transient=64, planes=False
    )
    return DynamicMoE(model, source.reader.layers, source, settings, policy="fixed")


def turn(dynamic: DynamicMoE, number: int) -> None:
    """Every layer exchanges an expert, and a step is made."""
    wanted = []
    for layer in range(len(dynamic.layers)):
        high = dynamic.high(layer)
        up, down = (high.nonzero()[0] if kept else (~high).nonzero()[0] for kept in (False, True))
        wanted.append(Switch(layer, int(up[number % len(up)]), HIGH))
        wanted.append(Switch(layer, int(down[number % len(down)]), LOW))
    dynamic.copies.request(wanted)
    with torch.no_grad():
        dynamic(input_ids=torch.tensor([[3, 7, 1, 4]]))


def main() -> None:
    path, rounds = Path(sys.argv[1]), int(sys.argv[2])
    probe = opened(path, 1 << 30, 1)
    budget = probe.budget
    for number in range(4):  # what is compiled and loaded once
        with torch.no_grad():
            probe(input_ids=torch.tensor([[3 + number, 7, 1, 4]]))
    probe.close()
    del probe
    memory = budget.least_bytes + 3 * len(budget.layers) * (budget.high_bytes - budget.low_bytes)
    before = held()
    dynamic = opened(path, memory, 1 << 20)
    for number in range(rounds // 2):
        turn(dynamic, number)
    half = held()
    for number in range(rounds // 2, rounds):
        turn(dynamic, number)
    after, counts = held(), dynamic.summary()
    print(
        json.dumps(
            {
                "before": before, "half": half, "after": after, "slack": SLACK,
                "pool_bytes": counts["pool_bytes"], "host_bytes": counts["host_bytes"],
                "switches": counts["promotions"] + counts["demotions"], "failures": counts["failures"],
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
