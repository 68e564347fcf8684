"""losses by workers: the digests of a run without, however many there are, and whoever is killed meanwhile."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import DEADLINE_SECONDS, ForkServer
from robustness.runs import STAGES, digests, partials, save_short_corpus, tiny_recipe, write_recipe
from tiny_models import FULL

from moeq import pipeline
from moeq.engine import choice
from moeq.engine.processes import ProcessEngine
from moeq.engine.serial import SerialEngine
from moeq.engine.spool import PREFIX, SHARED_MEMORY
from moeq.errors import QuantizationError, RecipeError
from moeq.models import loading
from moeq.models.experts import expert_math
from moeq.models.source import open_source
from moeq.planning.plan import make_plan
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import losses_tasks, needs_losses, workers
from moeq.stages.context import Context
from moeq.stages.needs import Sizes

SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "losses.group_size=16", "losses.bits=[2,3]", "threads=1",
    "assign={method: uniform, bits: 2}", "eval.compare=[]", "eval.perplexity.sequence_length=64",
)  # fmt: skip


def context(model: Path, out: Path, *overrides: str, said: list[str] | None = None) -> Context:
    reporter = Reporter(quiet=True)
    if said is not None:
        reporter.say = said.append  # type: ignore[method-assign]
    return Context(recipe=load_recipe(None, [*SMALL, *overrides]), model_name=str(model), out=out, reporter=reporter)


def losses(model: Path, out: Path, *overrides: str) -> dict[str, bytes]:
    """Bytes of what losses left, and of the store; the profile is made without workers, see test_openers.py."""
    pipeline.run(context(model, out, *(one for one in overrides if not one.startswith("workers="))), ("profile",))
    pipeline.run(context(model, out, *overrides), ("losses",))
    return content(out)


def content(out: Path) -> dict[str, bytes]:
    found = {}
    for folder in ("losses", "store"):
        for path in sorted((out / folder).rglob("*")):
            if path.is_file() and path.name == "stage.json":
                record = json.loads(path.read_text())
                found[path.name] = json.dumps({k: v for k, v in record.items() if k != "volatile"}).encode()
            elif path.is_file() and path.name != ".lock":
                found[path.relative_to(out).as_posix()] = path.read_bytes()
    return found


def left_in_memory(pid: int | None = None) -> list[Path]:
    """What lies in shared memory of a driver, by default of this process."""
    return list(SHARED_MEMORY.glob(f"{PREFIX}{pid or os.getpid()}-*"))


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["mixtral", "qwen"])
def test_one_two_and_four_workers_make_the_same_bytes(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also in bfloat16, streamed, and where experts are fewer than workers."""
    model = request.getfixturevalue(f"tiny_{family}")
    more = (
        ("stream=always", "losses.per_projection=false")
        if family == "qwen"
        else ("losses.methods=[gptq,rtn]", "losses.working_memory=1MiB")
    )
    alone = losses(model, tmp_path / "alone", *more)
    for count in (1, 2, 4) if FULL else (2,):
        assert losses(model, tmp_path / str(count), *more, f"workers={count}") == alone
    assert left_in_memory() == []


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed (pip install 'moeq[ray]')")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_local_ray_cluster_makes_the_same_bytes(tiny_mixtral: Path, tmp_path: Path, count: int) -> None:
    alone = losses(tiny_mixtral, tmp_path / "alone")
    assert losses(tiny_mixtral, tmp_path / "ray", f"workers={count}", "engine=ray") == alone


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "section",
    [
        ("losses.methods=[trellis]", "losses.trellis_states=256"),
        ("losses.methods=[signround]", "losses.bits=[2]", "losses.signround_iterations=4", "seed=3"),
        ("losses.nested=true", "losses.methods=[gptq]", "losses.bits=[2,3,4]"),
        ("losses.tokens=all", "losses.per_projection=false"),
    ],
    ids=["trellis", "signround", "nested", "all-tokens"],
)
def test_every_kind_of_codes_in_tasks(
    tiny_mixtral: Path, tmp_path: Path, section: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, so that it is quick: groups and joins are those of workers."""
    alone = losses(tiny_mixtral, tmp_path / "alone", *section)
    monkeypatch.setattr(workers, "open_engine", lambda *_, **__: SerialEngine())
    monkeypatch.setattr(SerialEngine, "workers", 8)
    assert losses(tiny_mixtral, tmp_path / "tasks", *section, "workers=8") == alone


def test_what_workers_made_is_gone_on_with_by_one_process(tiny_mixtral: Path, tmp_path: Path) -> None:
    losses(tiny_mixtral, tmp_path / "grown", "workers=2", "losses.bits=[2]")
    grown = losses(tiny_mixtral, tmp_path / "grown")
    once = losses(tiny_mixtral, tmp_path / "once", "workers=2")
    assert grown == once


@pytest.mark.full
def test_a_whole_run_differs_in_its_recipe_alone(moeq: ForkServer, tiny_mixtral: Path, tmp_path: Path) -> None:
    corpus = save_short_corpus(tmp_path / "corpus.jsonl")
    recipe = tiny_recipe(tiny_mixtral, corpus, threads=1)
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    for out, more in (("alone", ()), ("workers", ("--workers", "2"))):
        finished = moeq.run("run", path, "--out", tmp_path / out, "--quiet", *more)
        assert (finished.code, finished.stderr) == (0, "")
    assert digests(tmp_path / "workers") == digests(tmp_path / "alone")
    assert len(digests(tmp_path / "alone")) == len(STAGES)


def test_an_error_of_a_worker_names_layer_expert_and_host(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `measured` raises it; the worker's process imports the patched package."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "failing.py").write_text(
        "from moeq.errors import QuantizationError\n"
        "def quantize_group(group, tensors):\n"
        "    where = f'{group.layer.name}, expert {group.experts[0]}, down_proj'\n"
        "    raise QuantizationError('the 2-bit gptq loss is not a number', where=where, do='use float32')\n"
    )
    monkeypatch.syspath_prepend(str(package))
    import failing

    monkeypatch.setattr(losses_tasks, "quantize_group", failing.quantize_group)
    with pytest.raises(QuantizationError) as caught:
        losses(tiny_mixtral, tmp_path / "run", "workers=2")
    where = f"model.layers.0.mlp.experts, expert 0, down_proj, on {os.uname().nodename}"
    assert caught.value.where == where


@contextmanager
def killing(kills: int, seed: int) -> Iterator[list[int]]:
    """Kill random workers of whatever process engine is open, until so many are dead or the block ends."""
    landed: list[int] = []
    opened: list[ProcessEngine] = []
    real, stop, chance = choice.open_engine, threading.Event(), random.Random(seed)

    def opening(*given: Any, **more: Any) -> Any:
        opened[:] = [real(*given, **more)]
        return opened[0]

    def kill() -> None:
        while len(landed) < kills and not stop.wait(chance.uniform(0.01, 0.25)):
            if opened:
                pid = chance.choice(opened[0].pids)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    landed.append(pid)

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(workers, "open_engine", opening)
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            yield landed
        finally:
            stop.set()
            killer.join()


def test_workers_killed_at_random_moments(tiny_mixtral: Path, tmp_path: Path) -> None:
    wanted, landed, run = 100 if FULL else 2, 0, 0
    alone = losses(tiny_mixtral, tmp_path / "alone")
    while landed < wanted:
        run += 1
        assert run <= 4 * wanted, f"kills miss: {landed}"
        with killing(min(8, wanted - landed), run) as pids:
            assert losses(tiny_mixtral, tmp_path / f"run-{run}", "workers=2") == alone
        landed += len(pids)


@pytest.mark.full
def test_a_killed_driver_takes_its_workers_and_its_memory_along(
    moeq: ForkServer, tiny_mixtral: Path, tmp_path: Path
) -> None:
    """Killed alone, its workers tidy up; killed with all of them, the next driver does."""
    alone = losses(tiny_mixtral, tmp_path / "alone", "losses.bits=[2]")
    out, path = tmp_path / "run", tmp_path / "recipe.yaml"
    made = context(tiny_mixtral, out, "workers=2", "losses.bits=[2]").recipe.model_dump(mode="json") | {
        "model": str(tiny_mixtral)
    }
    write_recipe(path, made)
    pipeline.run(context(tiny_mixtral, out), ("profile",))
    chance, drivers = random.Random(7), []
    for number in range(1, 21 if FULL else 2):
        running = moeq.start("losses", path, "--out", out, "--quiet")
        drivers.append(running.pid)
        wait_for(lambda: handed_out(running.pid) or finished(running.pid))  # noqa: B023
        time.sleep(chance.uniform(0, 1) if FULL else 0)
        with suppress(ProcessLookupError):
            (os.kill if number % 2 else os.killpg)(running.pid, signal.SIGKILL)
        running.wait()
        if number % 2:
            wait_for(lambda: not left_in_memory(running.pid))  # noqa: B023
    done = moeq.run("losses", path, "--out", out, "--quiet", *(() if FULL else ("--set", "workers=1")))
    assert (done.code, done.stderr) == (0, "")
    assert [left for pid in drivers for left in left_in_memory(pid)] == []
    assert content(out) == alone
    assert partials(out) == []


def handed_out(pid: int) -> bool:
    """Whether a driver has put something for its workers, who are there by then."""
    return any(path.name.startswith("put-") for folder in left_in_memory(pid) for path in folder.iterdir())


def finished(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.01)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (60 << 30, 80 << 30))


@pytest.mark.usefixtures("two_gpus")
def test_every_gpu_has_a_worker_unless_one_is_named(tiny_mixtral: Path, tmp_path: Path) -> None:
    for asked, device, wanted in (
        ((), "cuda", 2), (("device=cuda",), "cuda", 2), (("device=cuda:1",), "cuda:1", None),
        (("workers=1",), "cuda", 1), ((), "cpu", None), (("workers=3",), "cpu", 3),
    ):  # fmt: skip
        made = context(tiny_mixtral, tmp_path, *asked)
        made.model.__dict__["device"] = torch.device(device)
        assert workers.worker_count(made.recipe, made.model.device) == wanted
        losses_tasks.check(made)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("device", "wanted"), [("cuda", [0, 1]), ("cuda:1", [1, 0]), ("cpu", [])])
def test_the_gpu_of_the_model_is_the_first_workers(
    device: str, wanted: list[int], tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(workers, "open_engine", lambda *_, **more: given.update(more) or SerialEngine())
    made = context(tiny_mixtral, tmp_path, "workers=1")
    made.model.__dict__["device"] = torch.device(device)
    with workers.working(made, 1):
        assert list(given["gpus"]) == wanted


@pytest.mark.usefixtures("two_gpus")
def test_more_workers_than_gpus_are_refused(tiny_mixtral: Path, tmp_path: Path) -> None:
    made = context(tiny_mixtral, tmp_path, "workers=3")
    made.model.__dict__["device"] = torch.device("cuda")
    with pytest.raises(RecipeError, match="3 workers for 2 GPUs"):
        losses_tasks.check(made)


@pytest.mark.usefixtures("two_gpus")
def test_a_plan_on_gpus_counts_one_workers_batch(tiny_mixtral: Path, tmp_path: Path) -> None:
    made = context(tiny_mixtral, tmp_path)
    made.model.__dict__["device"] = torch.device("cuda")
    counted = needs_losses.Workers.of(Sizes(made), 2, 100)
    assert list(counted.held) == ["batch of experts of a worker"]
    assert (counted.at_once, counted.ahead) == (2, 1)


@pytest.mark.cuda
def test_a_worker_on_a_gpu_makes_the_same_bytes(tiny_mixtral: Path, tmp_path: Path) -> None:
    alone = losses(tiny_mixtral, tmp_path / "alone", "device=cuda:0")
    assert losses(tiny_mixtral, tmp_path / "one", "device=cuda:0", "workers=1") == alone


def test_workers_are_refused_without_ray_and_on_unknown_engines(tiny_mixtral: Path, tmp_path: Path) -> None:
    if find_spec("ray") is None:
        with pytest.raises(RecipeError, match="ray is not installed"):
            losses(tiny_mixtral, tmp_path / "run", "workers=2", "engine=ray")
    with pytest.raises(RecipeError, match="engine"):
        context(tiny_mixtral, tmp_path, "engine=threads")


def test_a_cluster_without_workers_is_refused(tiny_mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"engine: ray:auto: there are no workers .*; set workers, or leave engine"):
        losses(tiny_mixtral, tmp_path / "run", "engine=ray:auto")


def test_the_plan_counts_workers(tiny_mixtral: Path, tmp_path: Path) -> None:
    def need(*overrides: str) -> Any:
        plan = make_plan(context(tiny_mixtral, tmp_path, *overrides), probe=False)
        return next(stage for stage in plan.stages if stage.stage == "losses")

    one, four = need("workers=1"), need("workers=4")
    assert four.ram_terms["workers"] - one.ram_terms["workers"] == 3 * needs_losses.WORKER
    assert four.ram_terms["batches of experts of workers"] > one.ram_terms["batches of experts of workers"] / 2
    assert "layers handed to workers" in four.ram_terms
    assert "workers" not in need().ram_terms


def test_a_layer_waits_where_memory_has_no_room_for_two(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = context(tiny_mixtral, tmp_path, "workers=2")
    assert needs_losses.layers_ahead(made) == 1
    monkeypatch.setattr(needs_losses, "memory_bytes", lambda _: 1 << 20)
    assert needs_losses.layers_ahead(made) == 0
    assert needs_losses.layers_ahead(context(tiny_mixtral, tmp_path)) == 0
    alone = losses(tiny_mixtral, tmp_path / "alone")
    assert losses(tiny_mixtral, tmp_path / "waiting", "workers=2") == alone


def test_what_a_family_computes_beside_its_matrices_can_be_handed_over(tmp_path: Path) -> None:
    """Its own gate goes without the experts' matrices, and computes the same."""
    import pickle

    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        num_hidden_layers=1, num_local_experts=4, hidden_size=64, intermediate_size=64, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    model = loading.load_model(open_source(str(tmp_path)), torch.float32, torch.device("cpu"))
    _, (layer,) = loading.describe(open_source(str(tmp_path)))
    math = expert_math(model, layer)
    losses_tasks.check_sendable(math, layer)
    data = pickle.dumps(math)
    assert len(data) < 20_000
    parts = {name: torch.randn(3, 64) for name in ("gate_proj", "up_proj")}
    assert torch.equal(pickle.loads(data).gate(parts), math.gate(parts))
