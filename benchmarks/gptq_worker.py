"""One contender of benchmarks/gptq.py: reads jobs as lines of JSON, answers each with {seconds, cpu, peak_bytes}.

    python gptq_worker.py moeq|products|gptqmodel|llmcompressor cpu|cuda THREADS

Runs in the contender's own environment, so it imports nothing but torch, the contender and figures.py, which needs
neither. cpu: seconds of all its threads together; peak_bytes: the most memory during the job above what was there when
its inputs were ready.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from typing import Any

GROUP = 128
NAME, DEVICE, THREADS = sys.argv[1], sys.argv[2], int(sys.argv[3])
if NAME == "moeq":
    import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import torch  # noqa: E402  isort: skip

from figures import Peaks  # noqa: E402  isort: skip

Problem = tuple[torch.Tensor, torch.Tensor]  # weights [E, N, K], Hessians [E, K, K]


def problem(experts: int, inputs: int, rows: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(inputs + 512, inputs, generator=generator)
    hidden = hidden + 0.5 * hidden.roll(1, -1)
    hessian = hidden.T @ hidden / len(hidden)
    weight = 0.02 * torch.randn(experts, rows, inputs, generator=generator)
    return weight.to(DEVICE), hessian.expand(experts, -1, -1).contiguous().to(DEVICE)


def problems(job: dict[str, Any]) -> list[Problem]:
    """Gate and up as one matrix of twice the rows, and down; or one matrix alone."""
    if job["problem"] == "matrix":
        return [problem(1, job["inputs"], job["rows"])]
    hidden, inter = job["hidden"], job["intermediate"]
    return [problem(job["experts"], hidden, 2 * inter), problem(job["experts"], inter, hidden)]


def products(job: dict[str, Any]) -> Callable[[], None]:
    """Products of torch's library or of oneDNN, which is faster here."""
    square = torch.randn(1024, 1024, device=DEVICE)
    repeats = max(1, round(job["operations"] / (2 * 1024**3)))

    forms = [lambda: square @ square]
    if DEVICE == "cpu" and torch.backends.mkldnn.is_available():  # faster where MKL has no AVX-512 for the CPU
        forms.append(lambda: torch.ops.mkldnn._linear_pointwise(square, square, None, "none", [], ""))

    def seconds(form: Callable[[], Any], count: int = 4) -> float:
        started = time.perf_counter()
        for _ in range(count):
            form()
        return time.perf_counter() - started

    best = min(forms, key=lambda form: min(seconds(form) for _ in range(3)))

    def run() -> None:
        for _ in range(repeats):
            best()

    return run


def ours(job: dict[str, Any]) -> Callable[[], None]:
    from moeq.numerics import gptq
    from moeq.numerics.factor import factorize

    if job["problem"] == "expert":
        return one_expert(job)
    given = problems(job)

    def run() -> None:
        for weight, hessian in given:
            factor = factorize(hessian)
            gptq.quantize(weight, factor.unit_upper, bits=job["bits"], group_size=GROUP)

    return run


def one_expert(job: dict[str, Any]) -> Callable[[], None]:
    """GPTQ or trellis codes of the expert of benchmarks/trellis.py."""
    import trellis

    work, given = trellis.WORK[job["work"]], trellis.expert(DEVICE)

    def run() -> None:
        for weight, hessian in given:
            work(weight, hessian, job["bits"], job["states"])

    return run


def split(job: dict[str, Any]) -> list[Problem]:
    """Single matrices [N, K] with their Hessians, as the peers want them: gate and up apart."""
    matrices = []
    for index, (weight, hessian) in enumerate(problems(job)):
        parts = weight.chunk(2, 1) if index == 0 and job["problem"] == "experts" else [weight]
        matrices += [(part[expert].contiguous(), hessian[expert]) for part in parts for expert in range(len(weight))]
    return matrices


def gptqmodel(job: dict[str, Any]) -> Callable[[], None]:
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ

    given = split(job)

    def run() -> None:
        for weight, hessian in given:
            for bits in job["bits"]:
                linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=DEVICE)
                linear.weight.data = weight.clone()
                config = QuantizeConfig(bits=bits, group_size=GROUP, sym=False, desc_act=False, act_group_aware=False)
                task = GPTQ(linear, qcfg=config)
                task.quantizer.configure(perchannel=True)
                task.H, task.nsamples = hessian.clone(), 1024
                task.fwd_counter = 1024
                task.quantize()

    return run


def llmcompressor(job: dict[str, Any]) -> Callable[[], None]:
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    by_shape: dict[tuple[int, ...], list[Problem]] = {}
    for weight, hessian in split(job):
        by_shape.setdefault(tuple(weight.shape), []).append((weight, hessian))
    given = [tuple(torch.stack(part) for part in zip(*some, strict=True)) for some in by_shape.values()]

    def run() -> None:
        for weight, hessian in given:
            for bits in job["bits"]:
                groups = weight.unflatten(-1, (-1, GROUP))
                low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
                scale = (high - low) / (2**bits - 1)
                zero = (-low / scale).round() - 2 ** (bits - 1)
                arguments = QuantizationArgs(num_bits=bits, group_size=GROUP, strategy="group", symmetric=False)
                quantize_weight(weight.clone(), hessian.clone(), scale, zero, None, arguments)

    return run


def measured(run: Callable[[], None]) -> dict[str, float]:
    """Seconds and peak memory of one run: the GPU's, or anonymous memory, looked at every 20 ms."""
    gpu = DEVICE == "cuda"
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier run has given back must not hide what this one takes
    with Peaks() as peaks:
        if gpu:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        before = torch.cuda.memory_allocated() if gpu else peaks.highest["RssAnon"]
        started, used = time.perf_counter(), time.process_time()
        run()
        if gpu:
            torch.cuda.synchronize()
        seconds, cpu = time.perf_counter() - started, time.process_time() - used
    peak = torch.cuda.max_memory_allocated() if gpu else peaks.highest["RssAnon"]
    return {"seconds": seconds, "cpu": cpu, "peak_bytes": max(0, peak - before)}


MAKERS = {"products": products, "moeq": ours, "gptqmodel": gptqmodel, "llmcompressor": llmcompressor}


def main() -> None:
    torch.set_num_threads(THREADS)
    answers, sys.stdout = sys.stdout, sys.stderr  # what contenders print must not be taken for an answer
    ready: tuple[str, Callable[[], None]] | None = None
    for line in sys.stdin:
        if ready is None or ready[0] != line:
            ready = None
            ready = (line, MAKERS[NAME](json.loads(line)))
        with torch.no_grad():
            answer = measured(ready[1])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
