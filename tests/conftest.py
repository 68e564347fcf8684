"""Shared fixtures: tiny random models of awkward sizes, and no network."""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.util
import os
import pickle
import tempfile

gc.disable()  # nothing of what is imported until the tests run is garbage
_digests = tempfile.TemporaryDirectory(prefix="moeq-cache-")  # not the user's: tests leave nothing there
for _name, _value in {
    "MOEQ_CACHE": _digests.name,
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",
}.items():
    os.environ.setdefault(_name, _value)

import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import peers
import pytest
import torch
import typer.main
import typer.testing
from cases import left_for_long
from fork_server import LIBRARIES, MOEQ, ForkServer, shared, shared_folder, unsynced
from tiny_models import FULL, save_tiny

from moeq.models.corpus import documents
from moeq.verification import launch, probe
from moeq_kernels import names

LONGEST_FIRST = (  # so that no process is left with one of them at the end
    # the first compiles what nearly all others run; the next ones need none of it, and are done when it is there
    "stages/test_families.py", "kernels/gpu/test_products.py", "estimation/test_estimation_answers.py",
    "robustness/test_early_refusals.py", "test_security.py", "kernels/gpu/test_walks.py",
    "robustness/test_kill_resume.py", "robustness/test_bad_input.py", "test_docs.py", "stages/test_demo.py",
    "planning/test_disk.py", "verification/test_peers.py", "stages/test_end_to_end.py",
    "stages/test_first_run.py", "robustness/test_memory_of_runs.py", "stages/test_non_experts.py",
    "stages/test_formats.py", "planning/test_memory.py", "exporters/test_peers.py", "reporting/test_report_page.py",
    "models/test_every_family.py", "stages/test_store.py", "models/test_non_experts.py", "test_cli.py", "test_api.py",
    "stages/test_refine.py", "runtime/test_hook.py", "numerics/test_gptq.py", "verification/test_tampering.py",
    "verification/test_verify.py",
)  # fmt: skip
GPUS = ("kernels/gpu", "runtime/test_dynamic_on_gpu.py")  # tests of a GPU where there is one, with those marked cuda
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}  # of processes that tests start
PROBE = Path(probe.__file__)
LONG_SEARCH = 0.03  # seconds
shared_folder()  # of fork servers: before pytest-xdist starts the workers, which share them
probes_apart = False  # whether the test that runs is marked fresh_process
searched = 0.0  # seconds of this process when the last search for garbage of everything began
long_search = False  # whether one took long since the last test


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    left = set() if FULL else left_for_long(items)
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device: make gpu, where there is one"))


def pytest_collection_finish() -> None:
    """Garbage is not looked for in what was imported, again and again."""
    gc.freeze()
    gc.enable()
    gc.callbacks.append(_time_searches)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global probes_apart
    probes_apart = item.get_closest_marker("fresh_process") is not None
    with _machine_of(item):
        result = yield
    _freeze_where_it_pays()
    return result


@contextmanager
def _machine_of(item: pytest.Item) -> Iterator[None]:
    """Tests that are not of a GPU see none: `device: auto`, of which most of them are, is the CPU everywhere."""
    place = item.path.relative_to(Path(__file__).parent).as_posix()
    if item.get_closest_marker("cuda") or place.startswith(GPUS) or not torch.cuda.is_available():
        yield
        return
    none = patch.multiple(torch.cuda, is_available=lambda: False, device_count=lambda: 0)
    with none, patch.dict(os.environ, HIDDEN):
        yield


def _time_searches(phase: str, info: dict[str, int]) -> None:
    global searched, long_search
    if info["generation"] == 2:
        if phase == "start":
            searched = time.process_time()
        elif time.process_time() - searched > LONG_SEARCH:
            long_search = True


def _freeze_where_it_pays() -> None:
    """Set apart what is alive after a test that looked long for garbage: lm-eval, a family's modules, fixtures.

    Every stage of a run ends with gc.collect(), which otherwise goes through all that was ever imported.
    """
    global long_search
    if long_search:
        gc.collect()
        gc.freeze()
        long_search = False


@pytest.fixture(scope="session", autouse=True)
def probe_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Exports are verified in this process, which takes a fraction of a second, but in tests marked fresh_process.

    Peers, which change transformers for the rest of a process, are forked from one that has imported them. This comes
    before every other fixture, so that it holds for runs made once for many tests too.
    """
    fresh = launch.started

    @contextmanager
    def started(wanted: launch.Request, python: str | None) -> Iterator[Any]:
        package = wanted.method if wanted.target == "transformers" and wanted.method in peers.FORKED else wanted.target
        server = None if probes_apart else peers.server(package, python or sys.executable)
        folder = tmp_path_factory.mktemp("probe")
        launch.write_request(folder, wanted)
        if server is not None:
            running = server.start(folder, program=PROBE, cwd=folder)
            yield SimpleNamespace(args=["python", "probe.py", str(folder)], wait=lambda timeout: running.wait().code)
        elif not probes_apart and package in ("native", "transformers"):
            with patch.dict(os.environ, {names.VARIABLE: names.REFERENCE}):
                probe.main(folder)
            yield SimpleNamespace(args=["python", "probe.py", str(folder)], wait=lambda timeout: 0)
        else:
            with fresh(wanted, python) as process:
                yield process

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(launch, "started", started)
        yield


@pytest.fixture(autouse=True)
def threads_stay() -> Iterator[None]:
    """Torch has as many threads after a test as before: whoever calls from Python keeps his."""
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


@pytest.fixture(scope="session", autouse=True)
def no_sync() -> Iterator[None]:
    """Nothing waits for the disk: no test can tell, whoever reads or is killed sees what the system holds."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(os, "fsync", unsynced)
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_once() -> Iterator[None]:
    """What typer makes of an application's functions is made once, not for every command line."""
    once = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(typer.main, "get_command", once)
        changed.setattr(typer.testing, "_get_command", once)
        yield


@pytest.fixture(scope="session", autouse=True)
def encoded_once() -> Iterator[None]:
    """The same texts are tokenized once for each tokenizer: the bundled corpus is that of hundreds of runs."""
    encode, known = documents.encode, {}

    def remembered(rows: Sequence[documents.Document], tokenizer: Any) -> list[list[int]]:
        whole = getattr(tokenizer, "backend_tokenizer", None)
        if whole is None:
            return encode(rows, tokenizer)
        marks = tokenizer.bos_token_id, tokenizer.eos_token_id
        key = whole.to_str(), marks, tuple((row.text, row.rendered, row.begins, row.ends) for row in rows)
        digest = hashlib.sha256(repr(key).encode()).digest()
        if digest not in known:
            known[digest] = [array("i", ids) for ids in encode(rows, tokenizer)]
        return [ids.tolist() for ids in known[digest]]

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(documents, "encode", remembered)
        yield


@pytest.fixture(scope="session", autouse=True)
def maps_once() -> Iterator[None]:
    """The same map is drawn once: reports of the same profile have a dozen, which take most of their time."""
    if importlib.util.find_spec("pyarrow") is None:  # as on the machine of `make gpu`, where nothing draws a map
        yield
        return
    from moeq.reporting import atlas, maps

    draw, known = atlas.ExpertMap.draw, {}

    def remembered(self: atlas.ExpertMap, room: int = maps.WHOLE) -> Any:
        key = hashlib.sha256(pickle.dumps((self, room))).digest()
        if key not in known:
            known[key] = draw(self, room)
        return known[key]

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(atlas.ExpertMap, "draw", remembered)
        yield


@pytest.fixture(scope="session")
def moeq() -> ForkServer:
    """Runs moeq commands in processes of their own."""
    return shared(*MOEQ)


@pytest.fixture(scope="session")
def moeq_anew() -> ForkServer:
    """Runs moeq commands in processes that import moeq themselves, and so find other packages."""
    return shared(*LIBRARIES)


@pytest.fixture(scope="session")
def tiny_mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "mixtral", "mixtral")


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bfloat16, a dense layer before the sparse one, odd numbers of experts."""
    folder = tmp_path_factory.mktemp("models") / "qwen3_moe"
    return save_tiny(folder, "qwen3_moe", torch.bfloat16, num_hidden_layers=3, mlp_only_layers=[0])


@pytest.fixture
def modules_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this test's own for the code that checkpoints bring along, and none that another test used."""
    folder = tmp_path / "modules"
    monkeypatch.setenv("HF_MODULES_CACHE", str(folder))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
    elsewhere = [one for one in sys.path if not (Path(one) / "transformers_modules").exists()]
    monkeypatch.setattr(sys, "path", elsewhere)  # transformers adds its folder for good, behind others
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
    return folder


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, Any]]]:
    """Names and arguments of what workers that opened a run were asked for, one time after the other."""
    from moeq.stages.workers import Crew

    asked: list[list[tuple[str, Any]]] = []
    real = Crew.did

    def counted(crew: Crew, function: Any, given: Any, *more: Any) -> Any:
        asked.append([*given])
        return real(crew, function, given, *more)

    monkeypatch.setattr(Crew, "did", counted)
    return asked
