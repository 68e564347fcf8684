"""Every engine gives the same outcomes in order, keeps what is put, names errors, and outlives its workers."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_tasks as tasks
import pytest
import torch
from tiny_models import FULL

from moeq import scratch
from moeq.cli.ending import _as_moeq_error
from moeq.engine import processes, worker
from moeq.engine.arrays import Encoded, decode, encode
from moeq.engine.processes import ProcessEngine
from moeq.engine.serial import SerialEngine
from moeq.engine.spool import PREFIX, SHARED_MEMORY, Folders, Spool, read
from moeq.engine.task import Failure, Resources, Task, TaskError, bounded, falling_groups, groups
from moeq.engine.worker import VISIBLE
from moeq.errors import PlanError, QuantizationError, StorageError
from moeq.stages.losses_tasks import PRELOAD

NAMES = ("serial", "processes", "ray")


def workers(count: int, beside: Path, **settings: Any) -> ProcessEngine:
    """Processes as forks of the server that all tests of this process share."""
    return ProcessEngine(count, threads=1, beside=beside, preload=PRELOAD, **settings)


def task(function: Callable[..., Any], arguments: Any = None, *shared: Any, **resources: Any) -> Task:
    return Task(
        name=f"layer 3, {function.__name__}",
        function=function,
        arguments=arguments,
        shared=shared,
        resources=Resources(**resources),
    )


@pytest.fixture(scope="module")
def ray_engine() -> Iterator[Any]:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed (pip install 'moeq[ray]')")
    from moeq.engine.ray_cluster import RayEngine

    with RayEngine(2, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def process_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessEngine]:
    with workers(2, tmp_path_factory.mktemp("beside")) as engine:
        yield engine


@pytest.fixture(params=NAMES)
def engine(request: pytest.FixtureRequest) -> Any:
    if request.param == "serial":
        return SerialEngine()
    return request.getfixturevalue({"processes": "process_engine", "ray": "ray_engine"}[request.param])


@pytest.mark.cases(1)
def test_outcomes_come_in_order(engine: Any) -> None:
    found = bounded(engine, (task(tasks.square, number) for number in range(40)), 5)
    assert [outcome.value for outcome in found] == [number * number for number in range(40)]
    tickets = [engine.submit(task(tasks.square, number)) for number in (7, 8, 9)]
    assert [outcome.value for outcome in engine.gather(reversed(tickets))] == [81, 64, 49]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_what_is_put_reaches_workers_and_comes_back(engine: Any, dtype: torch.dtype) -> None:
    given = {"first": torch.arange(24).reshape(2, 3, 4).to(dtype), "empty": torch.empty(0, 5, dtype=dtype)}
    shared = engine.put(given)
    made = next(iter(engine.gather([engine.submit(task(tasks.scaled, 2, shared))])))
    assert set(made.tensors) == set(given)
    for name, tensor in given.items():
        assert made.tensors[name].dtype == dtype
        assert torch.equal(made.tensors[name], tensor * 2)
    engine.drop(shared)


def test_strides_and_addresses_are_those_of_the_caller(engine: Any) -> None:
    """As products of floating-point numbers may depend on them."""
    memory = torch.arange(1000, dtype=torch.float32)
    fused = memory[3:963].view(4, 24, 10)
    gate, up = fused.chunk(2, 1)
    given = {
        "gate": gate,
        "up": up,
        "odd": memory[5:905:3],
        "down": memory[1:901].view(30, 30).mT,
        "all": fused[:, ::2],
    }
    shared = engine.put(given)
    found = next(iter(engine.gather([engine.submit(task(tasks.layout, None, shared))]))).value
    dense = {name: given[name] for name in ("gate", "up", "down")}
    assert {name: found[name] for name in dense} == {
        name: (tensor.stride(), tensor.data_ptr() % 64) for name, tensor in dense.items()
    }


def test_what_lies_scattered_is_not_written_with_its_gaps() -> None:
    sparse = {"few": torch.zeros(1 << 20)[:: 1 << 16]}
    encoded = encode("value", sparse)
    assert encoded.nbytes < 4096
    memory = bytearray(encoded.nbytes)
    encoded.write(memoryview(memory))
    value, found = decode(memory)
    assert value == "value"
    assert torch.equal(found["few"], sparse["few"])


def test_an_error_names_layer_expert_and_host(engine: Any) -> None:
    with pytest.raises(QuantizationError) as caught:
        list(engine.gather([engine.submit(task(tasks.refused, 5))]))
    wanted = "layers.3, expert 5" if engine.name == "serial" else f"layers.3, expert 5, on {os.uname().nodename}"
    assert (caught.value.where, caught.value.do) == (wanted, "use float32")


def test_a_bug_in_a_task_brings_its_traceback(engine: Any) -> None:
    wanted = ZeroDivisionError if engine.name == "serial" else TaskError
    with pytest.raises(wanted, match="by a bug") as caught:
        list(engine.gather([engine.submit(task(tasks.broken))]))
    if engine.name != "serial":
        assert "layer 3, broken, on " in str(caught.value)
        assert "in broken" in str(caught.value.__cause__)


def test_memory_that_runs_out_in_a_task_is_told_as_it_is(engine: Any) -> None:
    with pytest.raises(MemoryError, match="Unable to allocate") as caught:
        list(engine.gather([engine.submit(task(tasks.hungry))]))
    assert str(_as_moeq_error(caught.value)).startswith("out of memory; ")
    if engine.name != "serial":
        assert "layer 3, hungry, on " in str(caught.value)


def test_threads_of_a_worker_are_fixed(process_engine: ProcessEngine) -> None:
    made = process_engine.gather([process_engine.submit(task(tasks.scaled, 1))])
    assert next(made).value == "1 threads"


def test_a_lost_worker_is_replaced_and_its_task_done_again(engine: Any, tmp_path: Path) -> None:
    if engine.name == "serial":
        pytest.skip("it has no workers to lose")
    marker = tmp_path / "deaths"
    marker.touch()
    tickets = [engine.submit(task(tasks.deadly, str(marker))), engine.submit(task(tasks.square, 3))]
    assert [outcome.value for outcome in engine.gather(tickets)] == ["alive", 9]
    assert marker.read_bytes() == b".."


def test_a_task_that_kills_every_worker_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MOST_DEATHS", 2)
    with workers(1, tmp_path) as engine:
        lost, fine = engine.submit(task(tasks.deadly, "")), engine.submit(task(tasks.square, 3))
        with pytest.raises(PlanError, match="layer 3, deadly: 2 workers died at it, the last one of SIGKILL"):
            list(engine.gather([lost]))
        assert next(engine.gather([fine])).value == 9
        assert engine.replaced == 2


def test_workers_killed_at_random_moments_change_nothing(tmp_path: Path) -> None:
    kills, numbers = (100, 400) if FULL else (6, 60)
    with workers(2, tmp_path) as engine:
        shared = engine.put({"x": torch.arange(1000.0)})
        stop, done = threading.Event(), list[torch.Tensor]()

        def kill() -> None:
            for number in range(kills):
                ended = len(done)
                while len(done) < min(numbers, ended + 2):  # so that no task is the one of every kill
                    if stop.wait(0.01):
                        return
                os.kill(engine.pids[number % 2], signal.SIGKILL)
                while engine.replaced <= number and not stop.wait(0.01):
                    pass

        killer = threading.Thread(target=kill)
        killer.start()
        for number in range(numbers):
            tickets = [engine.submit(task(tasks.slow, 0.01)), engine.submit(task(tasks.scaled, number, shared))]
            done.append([outcome.tensors for outcome in engine.gather(tickets)][1]["x"])
        while killer.is_alive() and engine.replaced < kills:
            list(engine.gather([engine.submit(task(tasks.slow, 0.01))]))
        stop.set()
        killer.join()
        assert engine.replaced == kills
    assert all(torch.equal(found, torch.arange(1000.0) * number) for number, found in enumerate(done))
    assert list(tmp_path.iterdir()) == []


def test_memory_of_tasks_bounds_how_many_run(tmp_path: Path) -> None:
    folder = tmp_path / "running"
    folder.mkdir()
    with workers(3, tmp_path, ram_bytes=100) as engine:
        large = [engine.submit(task(tasks.held, str(folder), ram_bytes=60)) for _ in range(4)]
        assert [outcome.value for outcome in engine.gather(large)] == [1, 1, 1, 1]
        alone = [engine.submit(task(tasks.held, str(folder), ram_bytes=1000))]
        assert [outcome.value for outcome in engine.gather(alone)] == [1]


@pytest.mark.parametrize(
    ("asked", "told"),
    [({"ram_bytes": 30 << 30}, r"4 CPUs and 30\.0 GiB of memory"), ({"gpu_bytes": 1}, "4 CPUs and a GPU")],
)
def test_a_task_that_no_node_can_take_is_refused(
    asked: dict[str, int], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a cluster that is made up: nodes that are gone do not count, and one that is busy is waited for."""
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "memory": 20.0 * 2**30}},
        {"Alive": False, "Resources": {"CPU": 8.0, "memory": 60.0 * 2**30, "GPU": 1.0}},
    ]
    function = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: "reference"))
    lost, waited, cancelled = type("RayError", (Exception,), {}), list[float](), list[str]()
    cluster = SimpleNamespace(
        is_initialized=lambda: True, init=None, nodes=lambda: nodes, remote=lambda _: function,
        wait=lambda _, timeout: (waited.append(timeout), ([], ["reference"]))[1],
        cancel=lambda reference, force: cancelled.append(reference), exceptions=SimpleNamespace(RayError=lost),
    )  # fmt: skip
    cluster.get = lambda _: pytest.fail("waits for ever")
    monkeypatch.setitem(sys.modules, "ray", cluster)
    from moeq.engine.ray_cluster import RayEngine

    with RayEngine(2, threads=4) as engine:
        ticket = engine.submit(task(tasks.square, 3, **asked))
        with pytest.raises(PlanError, match=f"layer 3, square: no node of the Ray cluster has {told}; start"):
            list(engine.gather([ticket]))
        nodes[1]["Alive"] = True
        cluster.wait = lambda *_, timeout: ([], []) if len(waited) < 3 and not waited.append(timeout) else (["r"], [])
        cluster.get = lambda _: Failure.of(QuantizationError("came"))
        with pytest.raises(QuantizationError, match="came"):
            list(engine.gather([ticket]))
        assert len(waited) == 3
        engine.submit(task(tasks.square, 3))
    assert cancelled == ["reference"]


def test_driver_memory_is_flat_in_the_number_of_tasks(process_engine: ProcessEngine) -> None:
    count = 100_000 if FULL else 3000

    def run() -> int:
        for _ in bounded(process_engine, (task(tasks.square, number) for number in range(count)), 64):
            pass
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    first, second = run(), run()
    assert second - first <= 4 << 10  # KiB
    state = process_engine._state
    assert (state.pending, list(state.queue), state.done) == ({}, [], {})


def open_files() -> list[str]:
    """Of this process."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def test_what_shared_memory_does_not_take_goes_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool, filled = Spool(tmp_path), {str(SHARED_MEMORY)}

    def pieces(encoded: Encoded) -> Iterator[tuple[int, Any]]:
        """As many as there is room for."""
        yield from list(given(encoded))[:1]
        if any(path.startswith(f"{folder}/{PREFIX}") and "/put-" in path for path in open_files() for folder in filled):
            raise OSError(28, "No space left on device")
        yield from list(given(encoded))[1:]

    given = Encoded.pieces
    monkeypatch.setattr(Encoded, "pieces", pieces)
    path = spool.write("put", encode(1, {"a": torch.arange(5)}))
    assert path.is_relative_to(tmp_path)
    assert torch.equal(read(path)[1]["a"], torch.arange(5))
    path.unlink()
    filled.add(str(tmp_path))
    with pytest.raises(StorageError, match="no room for"):
        spool.write("put", encode(1, {}))
    assert not any(path.name.startswith("put") for folder in spool.folders for path in folder.iterdir())
    spool.remove()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_drivers_that_are_gone_are_removed(tmp_path: Path) -> None:
    alive, left = Spool(tmp_path), Spool(tmp_path)
    path = left.write("put", encode(1, {}))
    for one in left._scratch:
        one._lock.close()  # as when the process is killed
    another = Spool(tmp_path)
    assert not path.exists()
    assert all(folder.is_dir() for folder in (*alive.folders, *another.folders))
    for spool in (alive, another):
        spool.remove()
    assert not [folder for folder in tmp_path.iterdir() if folder.name.startswith(PREFIX)]


@pytest.mark.parametrize("begun", [False, True])
def test_a_folder_of_a_process_that_was_killed_before_it_had_a_lock_is_removed(begun: bool, tmp_path: Path) -> None:
    left, own = tmp_path / f"{PREFIX}1-left", tmp_path / f"{PREFIX}1-own"
    for folder in (left, own):
        folder.mkdir()
    (own / "notes.txt").touch()
    if begun:
        (left / ".lock.new").touch()
    Spool(tmp_path).remove()
    assert [*tmp_path.iterdir()] == [own]


@pytest.mark.parametrize("moment", ["open", "flock"])
def test_one_that_is_taken_for_such_a_folder_while_it_is_made_is_made_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, taken = {"open": Path.open, "flock": scratch.fcntl.flock}, list[str]()

    def late(*args: Any, **more: Any) -> Any:
        if not taken:
            taken.append(moment)
            scratch.remove_stale(tmp_path, PREFIX)
            assert list(tmp_path.iterdir()) == []
        return given[moment](*args, **more)

    monkeypatch.setattr(*((Path, "open") if moment == "open" else (scratch.fcntl, "flock")), late)
    made = scratch.Scratch(tmp_path, PREFIX)
    scratch.remove_stale(tmp_path, PREFIX)
    assert [*tmp_path.iterdir()] == [made.path]
    assert taken
    made.remove()


def test_groups_cover_all_experts_once() -> None:
    assert groups(7, 3) == [range(2), range(2, 4), range(4, 7)]
    assert groups(2, 5) == [range(1), range(1, 2)]
    assert [len(group) for group in groups(10, 2, most=3)] == [2, 3, 2, 3]
    assert groups(0, 3) == []


@pytest.mark.parametrize("most", [None, 1, 3, 50])
def test_falling_groups_cover_all_experts_once_and_end_with_small_ones(most: int | None) -> None:
    for experts, parts in product((0, 1, 7, 16, 128, 256), (1, 2, 8, 32)):
        found = falling_groups(experts, parts, most)
        assert [number for group in found for number in group] == list(range(experts))
        sizes = [len(group) for group in found]
        assert all(0 < size <= (most or experts) for size in sizes)
        if experts >= 4 * parts >= 32 and most is None:
            assert len(found) == parts
            assert 2 * sizes[-1] <= sizes[0] <= 4 * sizes[-1]
    with pytest.raises(ValueError, match="window"):
        next(bounded(SerialEngine(), [], 0))


def test_workers_go_with_their_engine(tmp_path: Path) -> None:
    engine = workers(2, tmp_path)
    engine.submit(task(tasks.slow, 60))
    pids = engine.pids
    started = time.monotonic()
    engine.close()
    engine.close()
    assert time.monotonic() - started < 10
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(("visible", "names"), [(None, ["0", "1"]), ("4, GPU-7", ["4", "GPU-7"])])
def test_workers_divide_gpus_among_each_other(
    visible: str | None, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the one that replaces another."""
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    with workers(3, tmp_path, gpus=[1, 0]) as engine:
        for killed in (False, True):
            if killed:
                os.kill(engine.pids[1], signal.SIGKILL)
            while engine.replaced < killed or not all(one.ready for one in engine._crew):
                time.sleep(0.01)
            tickets = [engine.submit(task(tasks.gpus_seen, 0.3)) for _ in range(3)]  # one for each, as none is busy
            seen = dict(outcome.value for outcome in engine.gather(tickets))
            assert [seen[pid] for pid in engine.pids] == [names[1], names[0], names[1]]


def test_a_worker_whose_pipe_ended_waits_for_what_removes_the_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would end in the midst of removing them."""
    removed = threading.Event()
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker, "_end_with_driver", lambda _: (time.sleep(0.3), removed.set()))
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    worker.main(theirs, Folders([]), torch.get_num_threads())
    assert removed.is_set()


def test_folders_that_are_written_to_are_removed_whole(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    written = threading.Event()

    def write() -> None:
        with suppress(FileNotFoundError):
            for number in count():
                (folder / str(number)).touch()
                written.set()

    writer = threading.Thread(target=write)
    writer.start()
    written.wait()
    Folders([folder]).remove()
    assert not folder.exists()
    writer.join()
