"""Products with packed experts on a CPU, against the CPU kernels of auto-round-lib and of llama.cpp.

    python benchmarks/cpu_peers.py [--threads 1 2] [--bits 2 3 4 8] [--rounds 15] [--peers .peers]

One matrix (2048 -> 768) and a layer of 8 experts a token, gate and activation included, at the shape of Qwen3-30B-A3B.
The kernels with bf16 activations as they are stand beside auto-round-lib's (bf16 rows, zero points, the same width and
group; a layer is a loop over its products); those of the form that rounds activations to int8 beside llama.cpp's,
which does so too (Q2_K, Q3_K, Q4_0, Q4_K, Q8_0, in the fastest of its CPU's buffers, for 16 rows but the one for AMX,
where libggml ends by a segmentation fault; a layer is its own graph of mul_mat_id). Every contender is a process of
its own in the environment that has it, and they take turns of some calls with weights that no cache holds; what is
shown is a ratio of the medians. Peers are looked for in --peers, by default MOEQ_PEERS or .peers, which `make peers`
fills.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
from gptq import Worker

from moeq_kernels.cpu.forms import forms

SHAPE = {"hidden": 2048, "intermediate": 768, "group": 128, "experts": 64, "top_k": 8, "cold_bytes": 192 << 20}
ROWS = (1, 16)
CALLS = {"matrix": 32, "layer": 8}  # of a turn
PAUSE = 0.02  # seconds between turns: threads of the one before have gone to sleep
GOAL = 1.0
MAKE = "it is not installed here: run `make peers`, or name the folder of the peers' environments in MOEQ_PEERS"


@dataclass(frozen=True)
class Peer:
    """A library: its environment's folder, our form that stands beside it, and its kinds of weights by width."""

    name: str
    package: str
    beside: str
    kinds: dict[int, tuple[str, ...]]


PEERS = (
    Peer("auto-round-lib", "auto-round-lib", "exact", {bits: (f"int{bits}",) for bits in (2, 3, 4, 8)}),
    Peer(
        "llama.cpp", "llama-cpp-python", "int8", {2: ("Q2_K",), 3: ("Q3_K",), 4: ("Q4_0", "Q4_K"), 8: ("Q8_0",)}
    ),
)  # fmt: skip


class Contender(Worker):
    """One of them in a process of its own; see `gptq.Worker`."""

    def __init__(self, name: str, python: Path, threads: int, log: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        if name in ("exact", "int8"):
            environment |= {"PYTHONPATH": figures.SOURCES, "OMP_WAIT_POLICY": "PASSIVE"}
        self.name, self.log = name, log
        program = Path(__file__).with_name("cpu_peers_worker.py")
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(python), str(program), name, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True, env=environment,
            )  # fmt: skip


class Comparison:
    """Contenders with one number of threads, and the table of what they take."""

    def __init__(self, results: figures.Figures, threads: int, logs: Path) -> None:
        self.results, self.threads = results, threads
        self.refused: dict[str, str] = {}
        self.workers: dict[str, Contender] = {}
        for name, int8 in (("exact", False), ("int8", True)):
            if forms(int8=int8):
                self._start(name, name, Path(sys.executable), logs)
            else:
                self.refused[name] = "this CPU has no dot products of bytes"
        for peer in PEERS:
            python = results.options.peers / peer.package / "bin" / "python"
            if not python.exists():
                self.refused[peer.name] = MAKE
                continue
            for kind in dict.fromkeys(kind for kinds in peer.kinds.values() for kind in kinds[1:]) or ():
                self._start(f"{peer.name} {kind}", peer.name, python, logs)
            self._start(peer.name, peer.name, python, logs)
        results.table(
            [f"threads {threads}", "moeq, us", "bits a weight", "peer, us", "its bits a weight", "of its speed"]
        )

    def _start(self, key: str, name: str, python: Path, logs: Path) -> None:
        self.workers[key] = Contender(name, python, self.threads, logs / f"{key.replace(' ', '-')}.log")

    def compare(self, shape: str, bits: int) -> None:
        """One row for each number of tokens and kind of a peer's weights at a width."""
        jobs = {
            name: {"shape": shape, "calls": CALLS[shape], "bits": bits, "kind": "", **SHAPE}
            for name in ("exact", "int8")
        }
        beside = {}
        for peer in PEERS:
            for place, kind in enumerate(peer.kinds.get(bits, ())):
                key = f"{peer.name} {kind}" if place else peer.name
                jobs[key] = jobs["exact"] | {"kind": kind}
                beside[key] = (peer, kind)
        for rows in ROWS:
            taken = self._rounds({name: job | {"rows": rows} for name, job in jobs.items() if name in self.workers})
            for key, (peer, kind) in beside.items():
                self._row(f"{shape}, {bits} bits, m = {rows}", peer, kind, taken.get(peer.beside), taken.get(key))

    def _rounds(self, jobs: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """Answers of all, who take turns; the first round, which makes the weights, is not among them. One that ends
        is not asked again."""
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
        for round_ in range(1 + self.results.options.rounds):
            for name, job in jobs.items():
                if name not in self.workers:
                    continue
                time.sleep(PAUSE)
                try:
                    answer = self.workers[name].ask(**job)
                except (RuntimeError, BrokenPipeError):
                    lost = self.workers.pop(name)
                    lost.close()
                    self.refused[name] = f"it failed: {figures.last_line(lost.log.read_text())}"
                    continue
                if round_:
                    answers[name].append(answer)
        return {name: found for name, found in answers.items() if name in self.workers}

    def _row(self, what: str, peer: Peer, kind: str, ours: Any, theirs: Any) -> None:
        def cells(found: Any) -> list[str]:
            if not found:
                return ["not run", ""]
            return [f"{_median(found) * 1e6:.0f}", f"{found[0]['bits']:.2f}"]

        both = bool(ours and theirs)
        speed = _median(theirs) / _median(ours) if both else float("nan")
        self.results.row(
            f"{what}, {peer.name} {kind}", *cells(ours), *cells(theirs), f"{speed:.2f}x" if both else "not run"
        )
        if both:
            name = f"{what}, threads {self.threads}, of the speed of {peer.name}'s {kind}"
            self.results.add(name, speed, "x", at_least=GOAL)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def _median(answers: list[dict[str, Any]]) -> float:
    return statistics.median(answer["seconds"] for answer in answers)


def options() -> argparse.Namespace:
    return figures.arguments(
        __doc__, threads=([1, 2], [2]), bits=([2, 3, 4, 8], [4]), shapes=["matrix", "layer"], rounds=(15, 5),
        peers=figures.PEERS, logs=figures.ROOT / "build" / "cpu_peers",
    )  # fmt: skip


def main() -> int:
    given = options()
    results = figures.Figures(given)
    given.logs.mkdir(parents=True, exist_ok=True)
    refused: dict[str, str] = {}
    for threads in given.threads:
        comparison = Comparison(results, threads, given.logs)
        try:
            for shape in given.shapes:
                for bits in given.bits:
                    comparison.compare(shape, bits)
        finally:
            comparison.close()
            refused |= comparison.refused
    for name, why in refused.items():
        results.left_out(name, why)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
