"""Speed and memory of writing a packed checkpoint in other formats, against a careful copy in the same run.

    python benchmarks/export.py [--hidden 2048] [--intermediate 1024] [--experts 32] [--layers 24] [--runs 3]

A made-up Mixtral: random codes at 2, 3, 4 and 8 bits (compressed-tensors: 4 bits), nothing is quantized. Every format
is written in a fresh process. Beside it stands what a careful copy takes: every file of the checkpoint that is read is
copied, synced and hashed (SHA-256) as it then lies there, once before and once after, of which the faster counts.
`moeq` is the export itself: experts' files are linked, every replica is hashed for the manifest. The others convert,
write, sync, read back and hash. What is read is in the page cache, and pages to write to are there from a copy just
before: some virtual machines take a second a gigabyte to come by fresh ones, which would be measured instead. Goals: at
least half of its rate (dequantized, bound by the processor, only with --all); anonymous memory (RssAnon, sampled
50 times a second) at most two layers in the written format above what the process has before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import figures
from memory import mixtral

GOAL, LAYERS = 0.5, 2
WIDTHS = {"mixed": (2, 3, 4, 8), "uniform": (4,)}
FORMATS = ("moeq", "auto-round", "gptq", "compressed-tensors")
GROUP = 128
SLACK = 48 * 2**20  # one expert's tensors, the allocator's arenas


def make_model(folder: Path, options: argparse.Namespace) -> None:
    """Everything of a Mixtral but its experts, in bfloat16."""
    import torch
    from transformers import MixtralForCausalLM

    from moeq.artifacts.tensor_files import write_tensors

    config = mixtral(options, options.layers)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    rest = {
        name.replace(".mlp.", ".block_sparse_moe."): torch.randn(parameter.shape).to(torch.bfloat16)
        for name, parameter in model.named_parameters()
        if ".experts." not in name
    }
    write_tensors(folder / "model.safetensors", rest, {"format": "pt"})


def make_experts(folder: Path, model: Path, widths: tuple[int, ...]) -> None:
    """The files of experts that `moeq export` is given, with random codes, expert e at widths[e % len(widths)]."""
    import torch

    from moeq.artifacts.tensor_files import write_tensors
    from moeq.exporters.native_writer import layer_name
    from moeq.models.loading import describe
    from moeq.models.source import open_source
    from moeq.runtime.packed_experts import guard_shapes
    from moeq_kernels.packed import packed_shapes
    from moeq_kernels.widths import Encoding

    for layer in describe(open_source(str(model)))[1]:
        tensors = {f"{layer.name}.{name}": torch.zeros(shape, dtype=torch.float16)
                   for name, shape in guard_shapes(layer).items()}  # fmt: skip
        for expert in range(layer.num_experts):
            bits = widths[expert % len(widths)]
            for projection in layer.projections:
                for part, (shape, dtype) in packed_shapes(
                    *layer.shape(projection), bits, Encoding(group_size=GROUP, symmetric=True)
                ).items():
                    values = torch.rand(shape).to(dtype) if part == "scales" else torch.randint(256, shape, dtype=dtype)
                    tensors[f"{layer.name}.{expert}.{projection}.{part}"] = values
        write_tensors(folder / layer_name(layer.index), tensors, {"format": "pt"})


def export_inputs(files: Path, model: Path, widths: tuple[int, ...]) -> Any:
    """What the native exporter is given for them."""
    from moeq.artifacts.assignment import Assignment, ExpertChoice, LayerAssignment
    from moeq.exporters.native_writer import ExportInputs
    from moeq.models.loading import describe
    from moeq.models.source import open_source

    source = open_source(str(model))
    layers = describe(source)[1]
    of = [widths[expert % len(widths)] for expert in range(layers[0].num_experts)]
    choices = tuple(ExpertChoice(tier="gpu", bits=bits, importance=1.0) for bits in of)
    return ExportInputs(
        source=source,
        layers=layers,
        top_k=(2,) * len(layers),
        assignment=Assignment(
            name="made-up",
            method="uniform",
            group_size=GROUP,
            symmetric=True,
            layers=tuple(LayerAssignment(name=layer.name, experts=choices) for layer in layers),
        ),
        expert_keys=set(),
        expert_files=sorted(files.iterdir()),
        quantizers={layer.name: [{bits: "rtn"} for bits in of] for layer in layers},
        max_shard_bytes=5 * 10**9,
        stamp=source.stamp(),
        digests={},
    )


def kind_of(name: str) -> str:
    """Which checkpoint a format is written of."""
    return "uniform" if name == "compressed-tensors" else "mixed"


def writer(name: str, folder: Path, out: Path) -> Callable[[], object]:
    """What writes a format of the checkpoint below `folder`; everything that needs reading once is read."""
    from moeq.exporters import write
    from moeq.exporters.foreign import WriteOptions
    from moeq.exporters.native_reader import NativeReader
    from moeq.exporters.native_writer import export

    kind = kind_of(name)
    for path in (folder / kind).iterdir():
        path.read_bytes()
    if name == "moeq":
        return partial(export, export_inputs(folder / f"{kind}-experts", folder / "model", WIDTHS[kind]), out)
    source = NativeReader(folder / kind)
    source.expert(source.layers[0], 0)
    return partial(write, name, source, out, WriteOptions())


def write_format(name: str, folder: Path, out: Path) -> None:
    """In a process of its own: write one format, with copies before and after it; print the figures as JSON."""
    write = writer(name, folder, out)
    source = folder / kind_of(name)
    copy_rate(source)
    copying = copy_rate(source)
    before = figures.resident()["RssAnon"]
    with figures.Peaks() as peaks:
        started, worked = time.perf_counter(), time.process_time()
        write()
        seconds, worked = time.perf_counter() - started, time.process_time() - worked
    files = {path.name: path.stat().st_size for path in out.iterdir()}
    layer = max(size for file, size in files.items() if file.startswith(("model-experts", "experts")))
    row = {"seconds": seconds, "processor": worked, "layer": layer, "memory": peaks.highest["RssAnon"] - before}
    shutil.rmtree(out)
    print(json.dumps(row | {"bytes": sum(files.values()), "copying": max(copying, copy_rate(source))}))


def copy_rate(source: Path) -> float:
    """Bytes a second of copying a checkpoint's files one by one, syncing each and hashing it as it lies there."""
    size, started = 0, time.perf_counter()
    copied = source.parent / "copied"
    copied.mkdir()
    for path in sorted(source.iterdir()):
        copy = Path(shutil.copyfile(path, copied / path.name))
        with copy.open("r+b") as stream:
            os.fsync(stream.fileno())
            hashlib.file_digest(stream, "sha256")
        size += copy.stat().st_size
    seconds = time.perf_counter() - started
    shutil.rmtree(copied)
    return size / seconds


def measure(name: str, folder: Path) -> dict[str, float]:
    """One format: its figures, and the rate of copies around it."""
    row: dict[str, float] = figures.in_fresh_process(__file__, "--format", name, "--folder", str(folder))
    rate = row["bytes"] / row["seconds"]
    return row | {"rate": rate, "ratio": rate / row["copying"]}


def run(options: argparse.Namespace, folder: Path) -> int:
    """Measure every format and report; the exit code."""
    from moeq.exporters.native_writer import export

    make_model(folder / "model", options)
    for kind, widths in WIDTHS.items():
        make_experts(folder / f"{kind}-experts", folder / "model", widths)
        export(export_inputs(folder / f"{kind}-experts", folder / "model", widths), folder / kind)
    size = sum(path.stat().st_size for path in (folder / "mixed").iterdir())
    print(f"{size / 1e6:.0f} MB packed, {options.layers} layers of {options.experts} experts")
    results = figures.Figures(options)
    results.table(["format", "MB", "s", "CPU s", "MB/s", "copy MB/s", "ratio", "MB held", "two layers"])
    for name in (*FORMATS, *(["dequantized"] if options.all else [])):
        rows = [measure(name, folder) for _ in range(options.runs)]
        row = sorted(rows, key=lambda row: row["ratio"])[len(rows) // 2]
        allowed = LAYERS * row["layer"] + SLACK
        size, rate, copied, held, most = (
            f"{number / 1e6:.0f}" for number in (row["bytes"], row["rate"], row["copying"], row["memory"], allowed)
        )
        seconds = [f"{row[key]:.2f}" for key in ("seconds", "processor")]
        results.row(name, size, *seconds, rate, copied, f"{row['ratio']:.2f}", held, most)
        results.add(f"{name}: of a copy's rate", row["ratio"], at_least=GOAL)
        results.add(f"{name}: held, of two layers", row["memory"] / allowed, at_most=1)
    return results.report()


def main() -> None:
    parser = figures.parser(__doc__, hidden=2048, intermediate=1024, experts=32, layers=(24, 8), runs=3, all=False)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure [default: a temporary one]")
    parser.add_argument("--format", help=argparse.SUPPRESS)
    options = figures.parsed(parser)
    if options.format:
        write_format(options.format, options.folder, options.folder / f"written-{options.format}")
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sys.exit(run(options, Path(folder)))


if __name__ == "__main__":
    main()
