"""Packed checkpoints served by transformers' own server, as docs/serve.md starts it, beside their bf16 original.

    python benchmarks/serving_transformers.py [--layers 2] [--experts 128] [--vocabulary 32768] [--at-once 1 4 16]

The model is that of benchmarks/decode.py, in the shape of Qwen3-30B-A3B but for its number of layers and tokens; its
checkpoints have 4 bits, in experts alone, and in attention and head as well. `transformers serve --continuous-batching`
serves each in a process of its own. In turns they are asked for completions, so many at once, over HTTP; what is shown
are medians of the tokens a second that all answers together have, prompts included in their time. Goals: every answer
has as many tokens as were asked for, and no checkpoint is slower than the original. The cache has --blocks blocks of
256 tokens: by itself this server takes a share of the machine's memory on a CPU, whatever the model's size.

Its environment is looked for in --peers, by default MOEQ_PEERS or .peers, which `make peers` fills.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import string
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import decode_models
import figures
from served import Server, by_transformers

GOAL = 1.0
LETTERS = 60  # of a prompt
MODEL = "model"
MAKE = "transformers' server is not installed here: run `make peers`, or name the peers' environments in MOEQ_PEERS"


def environment() -> dict[str, str]:
    """This tree's packages, and threads that leave the cores to others when they wait."""
    return {**os.environ, "PYTHONPATH": figures.SOURCES, "OMP_WAIT_POLICY": "PASSIVE"}


def prompts(count: int, draw: random.Random) -> list[str]:
    """Letters at random, no two beginnings alike."""
    letters = string.ascii_lowercase + " " * 4
    return ["".join(draw.choices(letters, k=LETTERS)) for _ in range(count)]


def answered(server: Server, given: list[str], tokens: int) -> tuple[float, bool]:
    """Tokens a second of all answers to prompts asked at once, and whether all have as many as were asked for."""

    def ask(prompt: str) -> int:
        made: int = server.ask(prompt=prompt, max_tokens=tokens, temperature=0)["usage"]["completion_tokens"]
        return made

    began = time.perf_counter()
    with ThreadPoolExecutor(len(given)) as several:
        made = list(several.map(ask, given))
    return sum(made) / (time.perf_counter() - began), made == [tokens] * len(given)


def measure(options: argparse.Namespace, folder: Path, results: figures.Figures) -> None:
    """All servers, in turns."""
    decode_models.make(folder, options)
    flags = ("--device", "cpu", "--dtype", "bfloat16", "--continuous-batching", "--cb-num-blocks", str(options.blocks))
    draw, whole = random.Random(0), []
    with ExitStack() as up:
        servers = {}
        for name in (*decode_models.VARIANTS, MODEL):
            place = folder / f"{name}.server"
            place.mkdir(exist_ok=True)
            server = Server(
                options.python, folder / name, place, *flags, environment=environment(), start=by_transformers
            )
            servers[name] = up.enter_context(server)
            answered(server, prompts(1, draw), options.tokens)  # the first takes its cache, and measures kernels
            answered(server, prompts(max(options.at_once), draw), options.tokens)
        names = {name: "bf16" if name == MODEL else f"{name} packed" for name in servers}
        results.table(["tokens a second", *names.values()])
        for count in options.at_once:
            found: dict[str, list[float]] = {name: [] for name in servers}
            for _ in range(options.rounds):
                for name, server in servers.items():
                    rate, right = answered(server, prompts(count, draw), options.tokens)
                    found[name].append(rate)
                    whole.append(right)
            rates = {name: statistics.median(several) for name, several in found.items()}
            results.row(f"{count} at once", *(f"{rate:.1f}" for rate in rates.values()))
            for name in decode_models.VARIANTS:
                ratio = rates[name] / rates[MODEL]
                results.add(f"{names[name]}, {count} at once", ratio, "times faster", at_least=GOAL)
        results.add("answers that have all tokens", sum(whole) / len(whole), at_least=1.0)
        for name, server in servers.items():
            results.add(f"memory of the server, {names[name]}", server.resident() / 1e6, "MB", digits=0)


def main() -> int:
    parser = figures.parser(
        __doc__, **decode_models.CODES, layers=(2, 1), experts=(128, 16), vocabulary=(32768, 4096),
        at_once=([1, 4, 16], [1, 4]), tokens=(24, 6), rounds=(7, 2), blocks=64,
        peers=figures.PEERS,
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, help="where checkpoints are made and kept [default: a temporary folder]")
    options = figures.parsed(parser)
    options.python = (options.peers / "transformers-serving" / "bin" / "python").absolute()
    if not options.python.exists():
        return figures.skipped(options, MAKE)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the servers with it
    results = figures.Figures(options)
    with figures.kept_or_temporary(options.folder) as folder:
        measure(options, folder, results)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
