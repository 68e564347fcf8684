"""A bench from beginning to end: load, time in turn, and what stands beside it."""

from __future__ import annotations

import csv
import io
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from moeq.artifacts.bench import NAME, SCHEMA_VERSION
from moeq.artifacts.files import make_directory, write_json, write_text
from moeq.benching import grid as grids
from moeq.benching.asked import Asked
from moeq.benching.bandwidth import read_bandwidth
from moeq.benching.llama_bench import llama_bench
from moeq.benching.one_expert import one_expert
from moeq.benching.requests import Request, check_lengths, generate, point, prompts, routed_bytes, timed
from moeq.benching.subject import Subject, compute_type, load_subject
from moeq.errors import EvaluationError
from moeq.models.loading import resolve_device
from moeq.progress import Reporter
from moeq.version import __version__

POINTS = "measured.csv"
VARIABLE = "MOEQ_KERNEL"  # by which the way in which packed experts compute is chosen
ALL_ON_DEVICE = "static_mixed"  # the estimator's policy of a model whose experts all lie on the device at their widths
DENSE_BITS = 16  # of the only dense weights that the estimator knows
COLUMNS = (
    "policy", "batch", "input_tokens", "output_tokens", "context", "bits", "gpu_experts", "prefill_seconds",
    "decode_seconds_per_token",
)  # fmt: skip


def bench(asked: Asked, reporter: Reporter) -> dict[str, Any]:
    """What bench.json holds. Raises ModelError, ArtifactError or EvaluationError."""
    device = resolve_device(asked.device)
    if asked.dynamic is not None:
        from moeq.benching.dynamic import bench_dynamic  # which loads a compiler

        return _found(asked, device, read_bandwidth(device)) | {"dynamic": bench_dynamic(asked, reporter)}
    dtype = compute_type(asked.checkpoint, asked.dtype, device)
    names = [asked.checkpoint, *([asked.dense] if asked.dense is not None else [])]
    subjects = []
    for name in names:
        reporter.say(f"load {escape(name)}")
        subjects.append(load_subject(name, dtype, device, asked.trust_remote_code, reporter))
        check_lengths(subjects[-1], asked.prompt_tokens, asked.new_tokens)
    _check_alike(subjects)
    bandwidth = read_bandwidth(device)
    found = _found(asked, device, bandwidth) | {"models": [subject.as_json() for subject in subjects]}
    if asked.grid:
        with reporter.bar("grid", len(asked.sizes) * len(asked.beam_counts)) as advance:
            found["grid"] = grids.grid(subjects[0], asked, advance)
        return _with_kernels(found, subjects)
    points = _requests(subjects, asked, bandwidth["bytes_per_second"], reporter)
    for model, of_model in zip(found["models"], points, strict=True):
        model["points"] = of_model
    found["ratios"] = _ratios(points) if len(points) > 1 else []
    if asked.peers:
        reporter.say("one expert at a time, beside other libraries")
        found["one_expert"] = one_expert(subjects[0], subjects[1:], asked.sizes, asked.repeat)
        found["llama_bench"] = llama_bench(
            asked.gguf, prompt_tokens=asked.prompt_tokens, new_tokens=asked.new_tokens, repeat=asked.repeat,
            threads=torch.get_num_threads(),
        )  # fmt: skip
    return _with_kernels(found, subjects)


def _found(asked: Asked, device: torch.device, bandwidth: dict[str, Any]) -> dict[str, Any]:
    """What bench.json says before anything is timed."""
    return {
        "schema_version": SCHEMA_VERSION,
        "moeq_version": __version__,
        "machine": machine(device),
        "kernel": os.environ.get(VARIABLE),
        "bandwidth": bandwidth,
        "settings": {
            "batches": list(asked.sizes), "prompt_tokens": asked.prompt_tokens, "new_tokens": asked.new_tokens,
            "repeat": asked.repeat,
        },
        "models": [],
    }  # fmt: skip


def _with_kernels(found: dict[str, Any], subjects: Sequence[Subject]) -> dict[str, Any]:
    """What was measured, with how every model's experts were computed."""
    for model, subject in zip(found["models"], subjects, strict=True):
        model["kernels"] = subject.kernels()
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """The device in words, threads and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {"device": device.type, "name": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _check_alike(subjects: Sequence[Subject]) -> None:
    """EvaluationError where the dense model has other experts than the checkpoint."""
    sizes = [[(layer.num_experts, layer.projections, layer.shape(layer.projections[0])) for layer in one.layers]
             for one in subjects]  # fmt: skip
    if any(other != sizes[0] for other in sizes[1:]):
        do = "give the model that the checkpoint was made of"
        raise EvaluationError("its experts are not the checkpoint's", where=f"--dense {subjects[1].name}", do=do)


def _requests(
    subjects: Sequence[Subject], asked: Asked, bandwidth: float, reporter: Reporter
) -> list[list[dict[str, Any]]]:
    """The points of every subject; requests of one batch size alternate among them."""
    points: list[list[dict[str, Any]]] = [[] for _ in subjects]
    with reporter.bar("requests", len(asked.sizes) * asked.repeat) as advance:
        for batch in asked.sizes:
            ids = [prompts(subject, batch, asked.prompt_tokens) for subject in subjects]
            taken: list[list[Request]] = [[] for _ in subjects]
            for subject, tokens in zip(subjects, ids, strict=True):
                generate(subject, tokens, 2)
            for _ in range(asked.repeat):
                for subject, tokens, requests in zip(subjects, ids, taken, strict=True):
                    requests.append(timed(subject, tokens, asked.new_tokens))
                advance()
            for subject, tokens, requests, of_model in zip(subjects, ids, taken, points, strict=True):
                moved = routed_bytes(subject, tokens, asked.new_tokens)
                of_model.append(_with_shares(point(subject, requests, batch, asked.prompt_tokens, moved), bandwidth))
    return points


def _with_shares(found: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """A point with its shares of the bandwidth that was measured."""
    experts = found["expert_bytes_per_second"]
    return found | {
        "bandwidth_share": found["bytes_per_second"] / bandwidth,
        "expert_bandwidth_share": None if experts is None else experts / bandwidth,
    }


def _ratios(points: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """How many times the dense model's medians are the checkpoint's, above 1: faster."""
    measures = {
        "first_token": "first_token_seconds", "token": "token_seconds", "experts": "expert_seconds_per_step",
        "experts_prefill": "expert_seconds_prefill",
    }  # fmt: skip
    return [
        {"batch": own["batch"], **{name: dense[key] / own[key] for name, key in measures.items()}}
        for own, dense in zip(*points, strict=True)
    ]


def write(folder: Path, found: dict[str, Any]) -> None:
    """bench.json, and its points as `moeq estimate --fit` reads them; those of an earlier bench go."""
    make_directory(folder)
    (folder / POINTS).unlink(missing_ok=True)
    write_json(folder / NAME, found)
    if found["models"] and "grid" not in found:
        write_text(folder / POINTS, measured_csv(found))


def measured_csv(found: dict[str, Any]) -> str:
    """One row a model and batch. Of a packed one `bits` is empty: they are those of the placement that --model names;
    a dense one's are 16, and one of wider weights, which the estimator does not know, has no rows. The prefill is what
    comes before the first token."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for model in found["models"]:
        for one in model["points"] if model["packed"] or model["bits_per_weight"] == DENSE_BITS else ():
            context = one["prompt_tokens"] + one["new_tokens"] // 2
            placed = ("", "") if model["packed"] else (DENSE_BITS, 0)
            seconds = one["first_token_seconds"], one["token_seconds"]
            writer.writerow(
                [ALL_ON_DEVICE, one["batch"], one["prompt_tokens"], one["new_tokens"], context, *placed, *seconds]
            )
    return text.getvalue()
