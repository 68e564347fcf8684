"""GPTQ of experts at several widths: against the machine's matrix products, and against gptqmodel and llmcompressor.

    python benchmarks/gptq.py [--experts 16] [--peer-experts 2] [--rounds 3] [--no-peers] [--no-large] [--device cpu]

Experts have the shape of Qwen3-30B-A3B (2048 x 768, gate and up share a Hessian), group 128; then one down projection
of Mixtral-8x7B (4096 x 14336) at 4 bits. Every contender is a process of its own that waits for its turn, so that
rounds alternate; they get the same problems and the same number of threads. gptqmodel 7.6.0 and llmcompressor 0.14.0
are installed into environments of their own under --environments when they are not there; what cannot be installed is
left out with a message. Their time on --peer-experts is scaled to all experts. Operations counted as useful: N K^2 a
matrix and width and K^3 / 3 a Hessian; the limit is a product of [1024, 1024] matrices by torch's library or oneDNN,
whichever is faster in that process. Of it a share is wanted on a CPU; a GPU only tells its own. Beside the ratios of
elapsed times stand those of CPU time, which other work on the same machine moves less.

Last stand trellis codes of one such expert (benchmarks/trellis.py: Viterbi's walks with LDLQ) beside GPTQ's time at the
same widths, and the memory that each takes above its inputs; --only-trellis: nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import figures

HERE = Path(__file__).resolve().parent
BITS, MORE_BITS, LARGE_BITS = (2, 3, 4), (1, 2, 3, 4), (4,)
GOALS = {"gptqmodel": 10.0, "llmcompressor": 6.0}
EFFICIENCY_GOAL, MORE_BITS_GOAL = 0.55, 1.35
TORCH = "torch==2.13.0"
PEERS = {  # requirements, installed in this order
    "gptqmodel": [[TORCH, "setuptools", "wheel", "packaging", "ninja", "numpy"], ["gptqmodel==7.6.0"]],
    "llmcompressor": [[TORCH], ["llmcompressor==0.14.0"]],
}
EXPERT = {"hidden": 2048, "intermediate": 768}
LARGE = {"inputs": 14336, "rows": 4096}
TRELLIS = {"cpu": (10, 30.0), "cuda": (12, 5.0)}  # 2^states, and the goal of the time, of GPTQ's


class Worker:
    """One contender in a process of its own."""

    def __init__(self, name: str, python: Path, options: argparse.Namespace) -> None:
        self.name = name
        environment = os.environ | {
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": str(options.threads),
            "GPTQMODEL_CPU_WORKERS": str(options.threads),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0") if options.device == "cuda" else "",
        }
        if name in ("moeq", "products"):
            environment["PYTHONPATH"] = figures.SOURCES
        command = [str(python), str(HERE / "gptq_worker.py"), name, options.device, str(options.threads)]
        self.log = Path(options.environments) / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )

    def ask(self, **job: Any) -> dict[str, Any]:
        """Run one job and give its answer: {seconds, cpu, peak_bytes}. RuntimeError when the worker ends."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"{self.name} ended, see {self.log}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def expert_operations(bits: tuple[int, ...], experts: int) -> float:
    hidden, inter = EXPERT["hidden"], EXPERT["intermediate"]
    factors = (hidden**3 + inter**3) / 3
    return experts * (factors + len(bits) * (2 * inter * hidden**2 + hidden * inter**2))


def large_operations() -> float:
    return LARGE["inputs"] ** 3 / 3 + len(LARGE_BITS) * LARGE["rows"] * LARGE["inputs"] ** 2


def start(options: argparse.Namespace, figure: figures.Figures) -> dict[str, Worker]:
    """A worker for moeq, one for matrix products, and one for every peer that can be had."""
    pythons = {"products": Path(sys.executable), "moeq": Path(sys.executable)}
    folder = Path(options.environments)
    folder.mkdir(parents=True, exist_ok=True)
    pins = folder / "torch.txt"
    pins.write_text(TORCH + "\n")
    for name in () if options.no_peers or options.only_trellis else sorted(PEERS):
        home, problem = folder / name, "it is not installed"
        if not options.quick or (home / ".installed").exists():
            problem = figures.environment(home, pins, *PEERS[name])
        if problem is None:
            pythons[name] = home / "bin" / "python"
        else:
            figure.left_out(name, problem)
    return {name: Worker(name, python, options) for name, python in pythons.items()}


def rounds(workers: dict[str, Worker], jobs: dict[str, list[dict[str, Any]]], count: int) -> dict[str, list[Any]]:
    """Answers of all jobs, the workers taking turns; {worker or worker+tag: answers}. A peer that fails is left out."""
    answers: dict[str, list[Any]] = {}
    for _ in range(count):
        for name in list(workers):
            for job in jobs.get(name, []):
                try:
                    answer = workers[name].ask(**job)
                except RuntimeError as error:
                    if name not in PEERS:
                        raise
                    print(f"{name} is left out: {error}")
                    workers.pop(name).close()
                    break
                answers.setdefault(name + job.get("tag", ""), []).append(answer)
    return answers


def median(answers: list[Any]) -> float:
    return statistics.median(answer["seconds"] for answer in answers)


def ratio(ones: list[Any], others: list[Any], scale: float = 1.0, clock: str = "seconds") -> float:
    """Median over rounds of one contender's time over the other's."""
    return statistics.median(a[clock] * scale / b[clock] for a, b in zip(ones, others, strict=True))


def show(
    figure: figures.Figures, answers: dict[str, list[Any]], operations: float, label: str, scale: float = 1.0
) -> None:
    """Print one table and add its figures; scale: of the peers' times."""
    ours, limit = answers["moeq"], answers["products"]
    efficiency = ratio(limit, ours)
    peak = operations / median(limit) / 1e9
    print(f"\n{label}")
    print(f"  {'matrix products':16} {median(limit):9.2f} s  {peak:7.0f} GFLOP/s, the limit")
    print(
        f"  {'moeq':16} {median(ours):9.2f} s  {efficiency * peak:7.0f} useful GFLOP/s = {efficiency:.0%} of the limit"
        f" ({ratio(limit, ours, clock='cpu'):.0%} by CPU time),"
        f" {ours[0]['peak_bytes'] / 1e9:.2f} GB above its inputs"
    )
    share = {"at_least": EFFICIENCY_GOAL} if figure.options.device == "cpu" else {}
    figure.add(f"{label}: of the limit of matrix products", efficiency, **share)
    for name, goal in GOALS.items():
        if name in answers:
            times = ratio(answers[name], ours, scale)
            wanted = {"at_least": goal} if scale != 1 else {}  # of one width, the limit itself is not as far
            figure.add(f"{label}: {name}'s time, of moeq's", times, digits=1, **wanted)
            print(
                f"  {name:16} {median(answers[name]) * scale:9.2f} s  {times:7.1f} times moeq's"
                f" ({ratio(answers[name], ours, scale, 'cpu'):.1f} by CPU time),"
                f" {answers[name][0]['peak_bytes'] / 1e9:.2f} GB above its inputs"
            )


def main() -> int:
    parser = figures.parser(
        __doc__, experts=(16, 4), peer_experts=2, rounds=3, threads=os.cpu_count(), no_peers=False, no_large=False,
        only_trellis=False,
        environments=str(HERE.parent / "build" / "peers"),
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = figures.parsed(parser)
    figure = figures.Figures(options)
    workers = start(options, figure)
    try:
        return compare(workers, options, figure)
    finally:
        for worker in workers.values():
            worker.close()


def trellis_codes(moeq: Worker, options: argparse.Namespace, figure: figures.Figures) -> None:
    """Rows of one expert, best of the rounds: GPTQ at all widths, trellis codes at each and at all."""
    states, goal = TRELLIS[options.device]
    works = [("gptq", BITS), *(("trellis", (bits,)) for bits in BITS), ("trellis", BITS)]
    jobs = [{"problem": "expert", "work": work, "bits": bits, "states": states} for work, bits in works]
    for job in jobs[:2]:
        moeq.ask(**job)  # warm
    every = [[moeq.ask(**job) for job in jobs] for _ in range(1 if options.quick else options.rounds)]
    seconds = [min(answer["seconds"] for answer in answers) for answers in zip(*every, strict=True)]
    peaks = [max(answer["peak_bytes"] for answer in answers) / 1e6 for answers in zip(*every, strict=True)]
    figure.table(["one expert", "seconds", "of GPTQ's", "MB above its inputs"])
    for (work, bits), taken, peak in zip(works, seconds, peaks, strict=True):
        name = "GPTQ" if work == "gptq" else f"trellis codes of 2^{states} states"
        widths = ", ".join(map(str, bits))
        figure.row(f"{name} at {widths} bits", f"{taken:.2f}", f"{taken / seconds[0]:.1f}", f"{peak:.0f}")
    title = f"trellis codes of 2^{states} states at 2, 3, 4 bits"
    figure.add(f"{title}, of GPTQ's time", seconds[-1] / seconds[0], digits=1, at_most=goal)
    figure.add(f"{title}, memory above its inputs", peaks[-1], "MB", digits=0)


def compare(workers: dict[str, Worker], options: argparse.Namespace, figure: figures.Figures) -> int:
    if options.only_trellis:
        trellis_codes(workers["moeq"], options, figure)
        return figure.report()
    operations = expert_operations(BITS, options.experts)
    experts = {"problem": "experts", "experts": options.experts, **EXPERT}
    jobs: dict[str, list[dict[str, Any]]] = {
        "products": [{"problem": "products", "operations": operations}],
        "moeq": [experts | {"bits": BITS}, experts | {"bits": MORE_BITS, "tag": " more"}],
    }
    jobs |= {name: [experts | {"experts": options.peer_experts, "bits": BITS}] for name in PEERS}
    short = {name: [job | {"experts": 1, "operations": 1e9} for job in own] for name, own in jobs.items()}
    rounds(workers, short, 1)  # warm
    answers = rounds(workers, jobs, options.rounds)
    label = f"{options.experts} experts {EXPERT['hidden']} x {EXPERT['intermediate']}, bits {BITS}, group 128,"
    print(f"{label} {options.device}, {options.threads} threads")
    show(figure, answers, operations, f"{options.experts} experts", options.experts / options.peer_experts)
    title = f"bits {MORE_BITS[0]} to {MORE_BITS[-1]}, of the time of {BITS[0]} to {BITS[-1]}"
    figure.add(title, ratio(answers["moeq more"], answers["moeq"]), at_most=MORE_BITS_GOAL)
    if not (options.no_large or options.quick):
        job = {"problem": "matrix", "bits": LARGE_BITS, **LARGE}
        jobs = {name: [job] for name in workers if name != "products"}
        jobs["products"] = [{"problem": "products", "operations": large_operations()}]
        label = f"one matrix {LARGE['rows']} x {LARGE['inputs']} at {LARGE_BITS[0]} bits"
        show(figure, rounds(workers, jobs, 1), large_operations(), label)
    trellis_codes(workers["moeq"], options, figure)
    return figure.report()


if __name__ == "__main__":
    sys.exit(main())
