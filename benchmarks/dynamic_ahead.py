"""What is read ahead by which experts follow which, and what of it is used, for benchmarks/dynamic.py.

Windows of wiki, Python and math, one domain after the other or mixed, in pieces: a decision after every one of 256
tokens, or after four of 32. Beside the device there is room for a part of all experts' versions; what is not there is
read from the disk, while the decision is carried out or, ahead, before it. Counted are versions that a copy found
there, of all that were copied, with and without reading ahead, and versions read from the disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import figures
import torch
from dynamic_quality import DOMAINS, HIGH, LOW, SHARE_HIGH, Subject

from moeq.artifacts.coactivation import read_coactivation
from moeq_kernels.cpu.versions import Block

PIECES: dict[int, dict[str, Any]] = {256: {"period": 1}, 32: {"period": 4, "ema": 0.9}}  # tokens of a step
ROOM, AHEAD = (8, 4, 2), (0, 2, 4, 8)  # one version in so many has room beside; versions read ahead of a decision
SEED = 0


@torch.no_grad()
def followed(subject: Subject, windows: list[torch.Tensor], tokens: int, ahead: int, **given: Any) -> dict[str, Any]:
    """What happened over the windows, in pieces of so many tokens."""
    places = subject.source.reader.layers[0].num_experts // SHARE_HIGH
    with subject.dynamic(places, subject.masses(DOMAINS), prefetch=ahead, **given) as dynamic:
        for window in windows:
            for first in range(0, len(window), tokens):
                dynamic(input_ids=window[None, first : first + tokens])
        return dynamic.summary()


def table(subject: Subject, name: str, checkpoint: Path, results: figures.Figures) -> None:
    """Shares of copies that found their version beside the device."""
    known = read_coactivation(checkpoint)
    assert known is not None, "it is exported with all replicas and a trace"
    subject.follows = known.follows()
    layers = subject.source.reader.layers
    versions = sum(Block(subject.source.expert(layers[0], 0, width)[0]).nbytes for width in (LOW, HIGH))
    in_turn = [window for domain in DOMAINS for window in subject.windows[domain]]
    order = torch.randperm(len(in_turn), generator=torch.Generator().manual_seed(SEED)).tolist()
    orders = {"one domain after the other": in_turn, "mixed": [in_turn[place] for place in order]}
    columns = ["copies", *(f"{ahead} ahead, found" for ahead in AHEAD), *(f"{ahead} ahead, read" for ahead in AHEAD)]
    results.table([f"{name}: room beside for", *columns])
    gains, used = [], []
    for which, windows in orders.items():
        for tokens, given in PIECES.items():
            for part in ROOM:
                host = sum(layer.num_experts for layer in layers) // part * versions
                found = [followed(subject, windows, tokens, ahead, host_bytes=host, **given) for ahead in AHEAD]
                copies = [one["host_hits"] + one["host_misses"] for one in found]
                shares = [one["host_hits"] / max(1, all_) for one, all_ in zip(found, copies, strict=True)]
                read = [one["host_misses"] + one["prefetched"] for one in found]
                label = f"1/{part}, {which}, {tokens} tokens a step"
                results.row(label, f"{copies[0]}", *(f"{share:.1%}" for share in shares), *map(str, read))
                usual = AHEAD.index(4)
                gains.append(shares[usual] - shares[0])
                used.append(found[usual]["prefetch_hits"] / max(1, found[usual]["prefetched"]))
    what = f"{name}: copies that found their version, 4 read ahead"
    results.add(what, 100 * sum(gains) / len(gains), "points more than without", digits=1)
    results.add(f"{name}: of versions read ahead, used, 4 ahead", sum(used) / len(used), digits=3)
