"""How `losses` scales with workers, what the engine costs, and what a simulator makes of clusters.

    python benchmarks/scale.py [--rounds 3] [--pairs 7] [--tasks 1000000] [--experts 16] [--hidden 384]
                               [--intermediate 512] [--layers 4] [--workers 1 2 4] [--only runs|tasks|clusters]

runs: a random Mixtral whose losses, in trellis codes as the default preset makes them, take most of a run, one thread a
process, every run in a process of its own.
Efficiency of 2 workers: half of the time that two runs without an engine take side by side, divided by the time of one
run with 2 workers: what two cores can do of this work is the measure, not what one can do while the other is idle.
Overhead of one worker: the time of its run over that of a run without an engine, less 1, both held to one core, where
neither gains by going on beside the other; of short runs of one layer, in turn in one process whose worker stays, since
this machine's times of the same work differ by more than it. Medians, of the efficiency of so many pairs; the order
within a round is turned.
tasks: the driver's memory after so many empty tasks in windows of 256, over that after a tenth of them.
The simulator (moeq/engine/simulation.py) is fed with what tasks of a recorded run took, one after the other in one
process, beside every measured run of the same round, so that a machine that becomes slower does so for both; for two
workers and more two runs are recorded side by side, as tasks will be. Medians of the rounds' ratios.
clusters: the simulator with DeepSeek-V3's and Kimi-K2's shapes on 1 to 64 GPUs, eight a node, from the rates named in
CLUSTER, which are not this machine's: what binds, and the efficiency from 1 GPU on; once more with experts ten times as
fast.
--quick: one round of a small model, in which processes that load compiled code take much of the time; 20,000 tasks.
Goals: efficiency at least 0.9, overhead at most 3 %, memory that grows by 4 MiB at most, the simulator within 10 %,
efficiency of 64 GPUs at least 0.8.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import figures
from memory import copy_tokenizer

WINDOW = 256
COMPARED = ("pair", "2 workers")  # runs of which there are as many as pairs
LITTLE, SHORT = "little", "short"  # models beside the one that is measured: to load code by, and for the overhead
SHORT_EXPERTS, SHORT_RUNS = 8, 4  # experts of the latter, and runs of it for each of the pairs
SETTINGS = [
    "threads=1", "corpus.sequences=32", "corpus.sequence_length=128", "losses.bits=[2,3,4]",
    "losses.methods=[trellis]", "losses.trellis_states=256", "losses.act_order=true", "losses.clip=mse",
    "losses.group_size=64", "assign={method: uniform, bits: 2}", "eval.compare=[]",
    "eval.perplexity.sequence_length=128",
]  # fmt: skip
CLUSTER = {  # rates of a GPU node that the simulator takes; from publications and data sheets, none measured here
    "expert_seconds": 3.88,  # of one H100 for one expert of DeepSeek-V3: MoE-Quant, 2 h on 8 for 58 x 256, all included
    "flops": 4e14,  # of one H100 in the forward, 40 % of its 989e12 in bfloat16
    "read_bytes": 5e9,  # a second, of the checkpoint from a node's disks
    "copied_bytes": 1e10,  # a second, into shared memory
    "link_bytes": 2.5e10,  # a second, 200 Gbit/s a node
    "stored_bytes": 3e9,  # a second
    "tokens": 128 * 4096,
    "task_seconds": 0.02,
    "start_seconds": 60,
}
GPUS, GPUS_A_NODE = (1, 2, 4, 8, 16, 32, 64), 8
FASTER = 10  # an expert in a tenth of the published time, to see what binds then
FP8, BITS = 1.0, 2.25  # bytes of a stored weight, and bits of a replica's with its scales


def make(folder: Path, options: Any, layers: int, experts: int) -> Path:
    """A random Mixtral of the options' sizes with the bundled tokenizer."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=2048, hidden_size=options.hidden, intermediate_size=options.intermediate,
        num_local_experts=experts, num_experts_per_tok=2, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def begin(
    model: Path, out: Path, workers: int | None, cores: Sequence[int], how: str = "--one"
) -> subprocess.Popen[str]:
    """Start a run of profile and losses in a process of its own, on these cores."""
    more = [] if workers is None else [f"workers={workers}"]
    return measuring(how, [str(model), str(out), ",".join(map(str, cores)), *more])


def measuring(how: str, given: Sequence[str]) -> subprocess.Popen[str]:
    """This program in a process of its own that measures."""
    command = [sys.executable, __file__, how, *given]
    environment = os.environ | {"PYTHONPATH": figures.SOURCES, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def one(model: str, out: str, cores: str, more: list[str], *, recorded: bool) -> None:
    """In this process: profile, then losses by the clock, from which the start of workers is told apart; recorded:
    what the simulator makes of them instead."""
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    from moeq import pipeline
    from moeq.stages import workers

    warm(model, {})
    gc.freeze()  # what was imported, as the program does
    context = figures.context(model, Path(out), [*SETTINGS, *more], None)
    pipeline.run(context, ("profile",))
    if recorded:
        print(json.dumps({"seconds": simulated_here(*record(context), context.recipe.workers)}))
        return
    started: list[float] = []
    real = workers.open_engine

    def opened(*given: Any, **settings: Any) -> Any:
        """An engine whose workers are ready."""
        begun = time.perf_counter()
        engine = real(*given, **settings)
        for function, what in ((rest, 0.3), (warm, model)):
            list(engine.gather([engine.submit(task(function, what)) for _ in range(engine.workers)]))
        started.append(time.perf_counter() - begun)
        return engine

    workers.open_engine = opened
    begun = time.perf_counter()
    pipeline.run(context, ("losses",))
    print(json.dumps({"seconds": time.perf_counter() - begun - sum(started), "start": sum(started)}))


def task(function: Any, arguments: Any) -> Any:
    from moeq.engine.task import Task

    return Task(name=function.__name__, function=function, arguments=arguments)


def rest(seconds: float, tensors: Mapping[str, Any]) -> tuple[None, dict[str, Any]]:
    time.sleep(seconds)
    return None, {}


def warm(model: str, tensors: Mapping[str, Any]) -> tuple[None, dict[str, Any]]:
    """Have this process load what losses need, by those of a little model of the same sizes beside the model."""
    from moeq import pipeline

    with tempfile.TemporaryDirectory() as out:
        settings = [*SETTINGS, "corpus.sequences=4"]
        pipeline.run(figures.context(f"{model}-{LITTLE}", Path(out) / "run", settings, None), ("profile", "losses"))
    return None, {}


def overhead(model: str, out: str, core: str, pairs: str) -> None:
    """In this process, held to a core: losses of the short model with a worker that stays over losses without, less 1,
    of so many pairs of runs."""
    os.sched_setaffinity(0, {int(core)})
    from moeq import pipeline
    from moeq.stages import losses_tasks, workers

    short, first = f"{model}-{SHORT}", Path(out) / "first"
    warm(model, {})
    gc.freeze()
    pipeline.run(figures.context(short, first, SETTINGS, None), ("profile",))
    with workers.open_engine("processes", 1, threads=1, beside=Path(out), preload=losses_tasks.PRELOAD) as engine:
        list(engine.gather([engine.submit(task(warm, model))]))
        end, engine.close = engine.close, lambda: None
        workers.open_engine = lambda *_, **__: engine
        ratios = []
        for number in range(int(pairs)):
            seconds = {}
            for kind in ([], ["workers=1"]) if number % 2 else (["workers=1"], []):
                folder = Path(out) / f"{number}-{len(kind)}"
                shutil.copytree(first, folder)
                context = figures.context(short, folder, [*SETTINGS, *kind], None)
                begun = time.perf_counter()
                pipeline.run(context, ("losses",))
                seconds[len(kind)] = time.perf_counter() - begun
                shutil.rmtree(folder)
            ratios.append(seconds[1] / seconds[0] - 1)
        end()
    print(json.dumps({"seconds": ratios}))


def taken(running: Sequence[subprocess.Popen[str]]) -> list[Any]:
    """Seconds of losses, measured or simulated, or ratios, of processes that were begun."""
    found = []
    for process in running:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"a run ended with {process.returncode}")
        found.append(json.loads(output.splitlines()[-1])["seconds"])
    return found


def measure_runs(model: Path, options: Any, scratch: Path) -> dict[str, list[float]]:
    """Seconds of every kind of run, one a round: alone, beside another one, by workers, simulated."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    seconds: dict[str, list[float]] = {}
    by_workers = {f"{count} workers": count for count in options.workers}
    kinds = ["alone", "pair", *(name for kind in by_workers for name in (kind, f"{kind}, simulated"))]
    for number in range(max(options.rounds, options.pairs)):
        now = [kind for kind in kinds if number < (options.pairs if kind in COMPARED else options.rounds)]
        for kind in now if number % 2 == 0 else reversed(now):
            workers = by_workers.get(kind.partition(",")[0])
            recorded = kind.endswith("simulated")
            beside = 2 if kind == "pair" or (recorded and workers != 1) else 1
            runs = [
                begin(
                    model, scratch / f"{number}-{kind.replace(' ', '-')}-{place}", workers,
                    cores, "--record" if recorded else "--one",
                )
                for place in range(beside)
            ]  # fmt: skip
            seconds.setdefault(kind, []).append(statistics.fmean(taken(runs)))
        print(f"round {number}", {kind: round(found[-1], 1) for kind, found in seconds.items()}, flush=True)
    return seconds


def record(context: Any) -> tuple[list[Any], float]:
    """The task graph of a run by its recipe's workers, and what its tasks and the rest take one after the other in
    this process; and its seconds."""
    from moeq import pipeline
    from moeq.engine.serial import SerialEngine
    from moeq.engine.simulation import LayerWork
    from moeq.stages import losses_tasks, workers

    layers: list[LayerWork] = []
    marks: dict[str, Any] = {"since": 0.0, "seconds": [], "own": 0, "common": 0}

    class Recorder(SerialEngine):
        def put(self, tensors: Any) -> Any:
            shared = super().put(tensors)
            marks["common" if any(name.startswith("tokens.") for name in tensors) else "own"] += shared.bytes
            return shared

        def submit(self, task: Any) -> int:
            begun = time.perf_counter()
            ticket = super().submit(task)
            marks["seconds"].append(time.perf_counter() - begun)
            return ticket

    Recorder.workers = context.recipe.workers
    real = losses_tasks.Ahead.add

    def add(self: Any, *given: Any) -> None:
        forward = time.perf_counter() - marks["since"]
        marks.update(seconds=[], own=0, common=0)
        begun = time.perf_counter()
        real(self, *given)
        rest = time.perf_counter() - begun - sum(marks["seconds"])
        layers.append(
            LayerWork(
                forward_seconds=forward + rest,
                tasks=marks["seconds"],
                common_bytes=marks["common"],
                own_bytes=marks["own"],
            )
        )
        marks["since"] = time.perf_counter()

    workers.open_engine, losses_tasks.Ahead.add = lambda *_, **__: Recorder(), add
    begun = marks["since"] = time.perf_counter()
    pipeline.run(context, ("losses",))
    return layers, time.perf_counter() - begun


def simulated_here(layers: list[Any], whole: float, workers: int) -> float:
    """The simulator's seconds of a recorded run on two cores; what is none of the layers' comes after them."""
    from moeq.engine.simulation import Cluster, simulate

    tail = whole - sum(layer.forward_seconds + sum(layer.tasks) for layer in layers)
    cluster = Cluster(workers=workers, cores=min(2, len(os.sched_getaffinity(0))), copied_bytes_per_second=2e9)
    return simulate(layers, cluster).seconds + tail


def of_cluster(geometry: Any, gpus: int, **changed: float) -> Any:
    """The simulated quantization of a published model at one width by so many GPUs; changed: rates of CLUSTER."""
    from moeq.engine.simulation import Cluster, LayerWork, simulate
    from moeq.stages.losses_tasks import expert_groups

    rates = CLUSTER | changed
    expert = 3 * geometry.hidden_size * geometry.intermediate_size
    scale = expert / (3 * 7168 * 2048)  # of the expert that `expert_seconds` is of
    rest = geometry.non_expert_parameters / geometry.num_layers
    active = geometry.top_k * expert + rest
    forward = 2 * active * rates["tokens"] / rates["flops"]
    forward += (geometry.num_experts * expert * FP8 + rest * FP8) / rates["read_bytes"]
    parts = expert_groups(geometry.num_experts, gpus)
    layer = LayerWork(
        forward_seconds=forward,
        tasks=[len(part) * scale * rates["expert_seconds"] for part in parts],
        common_bytes=2 * rates["tokens"] * geometry.hidden_size,
        own_bytes=2 * geometry.num_experts * expert,
        made_bytes=geometry.num_experts * expert * BITS / 8,
    )
    cluster = Cluster(
        workers=gpus,
        nodes=max(1, gpus // GPUS_A_NODE),
        task_seconds=rates["task_seconds"],
        start_seconds=rates["start_seconds"],
        copied_bytes_per_second=rates["copied_bytes"],
        link_bytes_per_second=rates["link_bytes"],
        stored_bytes_per_second=rates["stored_bytes"],
    )
    return simulate([layer] * geometry.num_layers, cluster)


def add_clusters(report: figures.Figures) -> None:
    """Simulated hours, efficiency and what binds, of two published models."""
    from moeq.estimator.geometry import load_geometry

    report.table(["simulated", "GPUs", "hours", "efficiency", "binds", "workers busy", "driver busy", "link busy"])
    for name, faster in (("deepseek-v3", 1), ("kimi-k2", 1), ("deepseek-v3", FASTER)):
        geometry, changed = load_geometry(name), {"expert_seconds": CLUSTER["expert_seconds"] / faster}
        title = name if faster == 1 else f"{name}, {faster} times the speed"
        first = of_cluster(geometry, 1, **changed).seconds
        for gpus in GPUS:
            found = of_cluster(geometry, gpus, **changed)
            efficiency = first / gpus / found.seconds
            shares = [f"{found.busy[part]:.2f}" for part in ("workers", "driver", "link")]
            report.row(title, str(gpus), f"{found.seconds / 3600:.2f}", f"{efficiency:.2f}", found.binds, *shares)
        goal = {"at_least": 0.8} if title == "deepseek-v3" else {}
        report.add(f"simulated efficiency of {gpus} GPUs, {title}", efficiency, **goal)


def add_tasks(report: figures.Figures, count: int) -> None:
    """The driver's memory in the number of tasks, and what one takes."""
    from moeq.engine.processes import ProcessEngine
    from moeq.engine.task import bounded

    with tempfile.TemporaryDirectory() as folder, ProcessEngine(1, threads=1, beside=Path(folder)) as engine:

        def memory(tasks: int) -> int:
            for _ in bounded(engine, (task(rest, 0.0) for _ in range(tasks)), WINDOW):
                pass
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

        before, started = memory(count // 10), time.perf_counter()
        grown = memory(count) - before
        each = (time.perf_counter() - started) / count
    report.add(f"growth of the driver from {count // 10:,} to {count:,} tasks", grown / 2**20, "MiB", at_most=4)
    report.add("an empty task", each * 1e3, "ms", digits=3)


def add_runs(report: figures.Figures, model: Path, options: Any, scratch: Path) -> None:
    """Efficiency, overhead, and the simulator beside what was measured."""
    seconds = measure_runs(model, options, scratch)
    middle = {kind: statistics.median(found) for kind, found in seconds.items()}
    if "2 workers" in middle:
        pairs = zip(seconds["pair"], seconds["2 workers"], strict=True)
        ratios = [pair / 2 / workers for pair, workers in pairs]
        report.add("efficiency of 2 workers", statistics.median(ratios), at_least=0.9, digits=3)
    core = sorted(os.sched_getaffinity(0))[0]
    asked = [str(model), str(scratch / "overhead"), str(core), str(SHORT_RUNS * options.pairs)]
    (ratios,) = taken([measuring("--overhead", asked)])
    report.add("overhead of one worker on one core", 100 * statistics.median(ratios), "%", at_most=3, digits=1)
    spread = statistics.quantiles(ratios, n=4)
    report.add("its quarters, lower", 100 * spread[0], "%", digits=1)
    report.add("its quarters, upper", 100 * spread[2], "%", digits=1)
    report.table(["losses", "seconds", "simulated"])
    for kind in ("alone", "pair"):
        report.row(kind, f"{middle[kind]:.1f}", "")
    for count in options.workers:
        kind = f"{count} workers"
        simulated = seconds[f"{kind}, simulated"]
        report.row(kind, f"{middle[kind]:.1f}", f"{statistics.median(simulated):.1f}")
        off = statistics.median(found / took for found, took in zip(simulated, seconds[kind], strict=False)) - 1
        report.add(f"simulator off, {count} workers", 100 * abs(off), "%", at_most=10, digits=1)


def main() -> int:
    parser = figures.parser(
        __doc__,
        rounds=(3, 1),
        pairs=(7, 1),
        tasks=(1_000_000, 20_000),
        experts=(16, 8),
        hidden=(384, 192),
        intermediate=512,
        layers=(4, 2),
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", choices=("runs", "tasks", "clusters"))
    parser.add_argument("--one", nargs="+", metavar="MODEL OUT CORES", help="measure in this process")
    parser.add_argument("--record", nargs="+", metavar="MODEL OUT CORES", help="simulate what is recorded in it")
    parser.add_argument(
        "--overhead", nargs=4, metavar=("MODEL", "OUT", "CORE", "PAIRS"), help="compare in this process"
    )
    options = figures.parsed(parser)
    if options.one or options.record:
        model, out, cores, *more = options.one or options.record
        one(model, out, cores, more, recorded=bool(options.record))
        return 0
    if options.overhead:
        overhead(*options.overhead)
        return 0
    report = figures.Figures(options)
    if options.only in (None, "runs"):
        if len(os.sched_getaffinity(0)) < 2:
            report.left_out("runs", "there is one core")
        else:
            with tempfile.TemporaryDirectory() as scratch:
                model = make(Path(scratch) / "model", options, options.layers, options.experts)
                make(Path(scratch) / f"model-{LITTLE}", options, 1, 2)
                make(Path(scratch) / f"model-{SHORT}", options, 1, SHORT_EXPERTS)
                add_runs(report, model, options, Path(scratch))
    if options.only in (None, "tasks"):
        add_tasks(report, options.tasks)
    if options.only in (None, "clusters"):
        add_clusters(report)
    return report.report()


if __name__ == "__main__":
    sys.exit(main())
