"""A run that is killed at any moment, changed, damaged or started twice ends as an unbroken one does."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from fork_server import ForkServer
from robustness.runs import (
    DIRECTORIES,
    STAGES,
    VOCABULARY,
    content,
    digests,
    follow,
    kill_during,
    partials,
    save_model,
    snapshot,
    stage_record,
    tiny_recipe,
    write_recipe,
)

from moeq.artifacts.files import locked
from moeq.artifacts.tensor_files import write_tensors

KILLS = 20
KILLS_A_DIRECTORY = 5
SEED = 2026


@dataclass(frozen=True)
class Reference:
    """An unbroken run and how long each of its stages took."""

    recipe: Path
    out: Path
    seconds: dict[str, float]


def unbroken_run(moeq: ForkServer, model: Path, corpus: Path, folder: Path, text: dict[str, int]) -> Reference:
    """Every stage has something to do: lm-eval, replicas of all widths, other modules, a second assignment."""
    others = {"attention": 4, "embeddings": 8, "head": 8}
    recipe = tiny_recipe(model, corpus, quantize={"replicas": "all"}, others=others)
    recipe["corpus"] |= text
    recipe["eval"] |= {"tasks": ["moeq_continuation"], "limit": 4}
    path = write_recipe(folder / "recipe.yaml", recipe)
    finished = moeq.run("run", path, "--out", folder / "run", "--quiet")
    assert (finished.code, finished.stderr) == (0, "")
    seconds = {stage: stage_record(folder / "run", stage)["volatile"]["seconds"] for stage in STAGES}
    return Reference(path, folder / "run", seconds)


@pytest.fixture(scope="module")
def reference(
    moeq: ForkServer, tiny_model: Path, short_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """Stages take long enough to be hit."""
    return unbroken_run(moeq, tiny_model, short_corpus, tmp_path_factory.mktemp("reference"), {})


@pytest.fixture(scope="module")
def quick_reference(moeq: ForkServer, short_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same files of less: two layers of three experts."""
    folder = tmp_path_factory.mktemp("quick")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 40, "intermediate_size": 56, "max_position_embeddings": 128}
    model = save_model(folder / "model", max_shard="600KB", num_hidden_layers=2, num_local_experts=3, **sizes)
    return unbroken_run(moeq, model, short_corpus, folder, {"sequences": 6, "sequence_length": 32})


def assert_as_unbroken(run: Path, reference: Reference) -> None:
    assert partials(run) == []
    assert digests(run) == digests(reference.out)
    for stage in STAGES:
        record, unbroken = stage_record(run, stage), stage_record(reference.out, stage)
        assert {k: v for k, v in record.items() if k != "volatile"} == {
            k: v for k, v in unbroken.items() if k != "volatile"
        }
    found, wanted = content(run), content(reference.out)
    assert {name for name in wanted if found.get(name) != wanted[name]} == set()
    assert sorted(found.keys() - wanted.keys()) == [], "left behind by a killed run"


@pytest.mark.full
def test_killed_at_random_moments(moeq: ForkServer, reference: Reference, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    landed: Counter[str] = Counter()
    directories = 0
    while landed.total() < KILLS:
        directories += 1
        assert directories <= 3 * KILLS // KILLS_A_DIRECTORY, f"kills miss: {dict(landed)}"
        run = tmp_path / f"run-{directories}"
        here = 0
        for target in sorted(chance.choices(STAGES, k=KILLS_A_DIRECTORY), key=STAGES.index):
            running = moeq.start("run", reference.recipe, "--out", run)
            died = kill_during(running, target, chance.random() * reference.seconds[target])
            if died is None:
                break
            landed[died] += 1
            here += 1
        if here == 0:
            continue
        finished = moeq.run("run", reference.recipe, "--out", run, "--quiet")
        assert (finished.code, finished.stderr) == (0, "")
        assert_as_unbroken(run, reference)
        shutil.rmtree(run)
    print(f"{landed.total()} kills landed in {dict(landed)}")
    assert len(landed.keys() & set(STAGES)) >= 5, landed


@pytest.mark.full
def test_killed_at_every_write(moeq: ForkServer, quick_reference: Reference, tmp_path: Path) -> None:
    """Dies before each rename of a finished file: one rename later every time, from the start in the next stage."""
    run, attempts, rename, finished_stages = tmp_path / "run", 0, 1, 0
    while True:
        attempts += 1
        finished = moeq.run("run", quick_reference.recipe, "--out", run, "--quiet", die_at_rename=rename)
        if finished.code == 0:
            break
        assert finished.code == -signal.SIGKILL
        before, finished_stages = finished_stages, len(digests(run))
        rename = 2 if finished_stages > before else rename + 1  # the first is that of the recipe's copy
    assert attempts > 2 * len(STAGES), "every stage renames an artifact and its record"
    assert_as_unbroken(run, quick_reference)


@pytest.mark.full
def test_a_finished_run_is_left_alone(moeq: ForkServer, quick_reference: Reference) -> None:
    before = snapshot(quick_reference.out)
    running = moeq.start("run", quick_reference.recipe, "--out", quick_reference.out)
    events = list(follow(running))
    assert running.wait().code == 0
    assert events == [(stage, "skipped") for stage in STAGES]
    after = snapshot(quick_reference.out)
    before.pop("recipe.yaml")
    after.pop("recipe.yaml")
    assert after == before


@pytest.mark.full
def test_a_changed_key_reruns_what_depends_on_it(moeq: ForkServer, recipe: Path, run_copy: Path) -> None:
    before = digests(run_copy)
    running = moeq.start("run", recipe, "--out", run_copy, "--set", "assign.code_bits=3")
    events = dict(follow(running))
    assert running.wait().code == 0
    rerun = ("assign", "quantize", "export", "eval", "estimate", "report")
    assert events == {stage: "done" if stage in rerun else "skipped" for stage in STAGES}
    changed = {stage for stage, digest in digests(run_copy).items() if before[stage] != digest}
    assert changed >= {"assign", "quantize", "checkpoint", "eval", "estimate"}

    running = moeq.start("run", recipe, "--out", run_copy)
    assert set(dict(follow(running)).values()) == {"done", "skipped"}
    assert running.wait().code == 0
    assert digests(run_copy) == before, "back to the first recipe: back to its bytes"


DAMAGED = {
    "profile": "profile/profile.safetensors",
    "losses": "losses/losses.parquet",
    "assign": "assign/assignment.json",
    "quantize": "quantize/experts-layer-001.safetensors",
    "export": "checkpoint/placement.json",
    "eval": "eval/eval.json",
    "estimate": "estimate/estimate.json",
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "damage"),
    [
        (stage, damage)
        for stage in DAMAGED
        for damage in ("truncated", "deleted", "flipped")
        if (stage, damage) not in {("assign", "truncated"), ("assign", "flipped")}  # it may be edited by hand
    ],
)
def test_a_damaged_output_is_remade(
    moeq: ForkServer, recipe: Path, finished_run: Path, run_copy: Path, stage: str, damage: str
) -> None:
    path = run_copy / DAMAGED[stage]
    if damage == "deleted":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        path.unlink()  # a hard link may join it to a file of another stage
        if damage == "flipped":
            data[len(data) // 2] ^= 1
        path.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    running = moeq.start("run", recipe, "--out", run_copy)
    events = dict(follow(running))
    assert running.wait().code == 0
    assert events[stage] == "done"
    assert digests(run_copy) == digests(finished_run)
    for name in DAMAGED.values():
        assert (run_copy / name).read_bytes() == (finished_run / name).read_bytes(), name


@pytest.mark.full
def test_a_damaged_assignment_is_refused_until_made_again(
    moeq: ForkServer, recipe: Path, finished_run: Path, run_copy: Path
) -> None:
    """It may be edited by hand, so it is not thrown away; what the error advises must help."""
    path = run_copy / DAMAGED["assign"]
    path.write_bytes(path.read_bytes()[:100])
    for command in (["assign"], ["run", recipe]):
        refused = moeq.run(*command, "--out", run_copy, "--quiet")
        assert refused.code == 7, refused.stderr
        assert "run `moeq assign --force`" in refused.stderr
        assert path.stat().st_size == 100
    for command in (["assign", "--force"], ["run", recipe]):
        finished = moeq.run(*command, "--out", run_copy, "--quiet")
        assert (finished.code, finished.stderr) == (0, "")
    assert digests(run_copy) == digests(finished_run)


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_a_damaged_record_is_remade(
    moeq: ForkServer, recipe: Path, finished_run: Path, run_copy: Path, stage: str
) -> None:
    path = run_copy / DIRECTORIES.get(stage, stage) / "stage.json"
    path.write_bytes(path.read_bytes()[:50])
    finished = moeq.run("run", recipe, "--out", run_copy, "--quiet")
    assert (finished.code, finished.stderr) == (0, "")
    assert digests(run_copy) == digests(finished_run)


@pytest.mark.full
def test_two_runs_in_one_directory(moeq: ForkServer, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = moeq.start("run", recipe, "--out", run)
    assert first.line().split()[0] in STAGES
    first.signal(signal.SIGSTOP)  # it holds the lock for as long as we like
    for command in (["run", recipe], ["profile", recipe], ["assign"]):
        second = moeq.run(*command, "--out", run, "--quiet")
        assert second.code == 8
        assert second.stderr.splitlines() == [
            f"moeq: {run}: another moeq run is working here; wait for it or choose another --out"
        ]
    first.signal(signal.SIGCONT)
    assert first.wait().code == 0
    assert moeq.run("run", recipe, "--out", run, "--quiet").code == 0


@pytest.mark.full
def test_two_runs_at_once_share_a_store(moeq: ForkServer, recipe: Path, finished_run: Path, tmp_path: Path) -> None:
    """Both fill the same store, one is killed and goes on; a third finds all of it there."""
    store = f"store={tmp_path / 'store'}"
    runs = [tmp_path / "one", tmp_path / "two"]
    first, second = (moeq.start("run", recipe, "--out", run, "--set", store) for run in runs)
    died = kill_during(first, "losses", 0)
    assert second.wait().code == 0
    assert died is not None
    for run in (runs[0], tmp_path / "three"):
        finished = moeq.run("run", recipe, "--out", run, "--set", store, "--quiet")
        assert (finished.code, finished.stderr) == (0, "")
    wanted = {name: data for name, data in content(finished_run).items() if not name.startswith("store/")}
    for run in (*runs, tmp_path / "three"):
        assert content(run) == wanted
        assert digests(run) == digests(finished_run)
    found = content(tmp_path / "store").items()
    shared = {name: data for name, data in found if not name.startswith("runs/") and not name.endswith(".partial")}
    assert shared == content(finished_run / "store")


def test_a_lock_of_a_dead_run_is_free(moeq: ForkServer, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = moeq.start("run", recipe, "--out", run)
    assert kill_during(running, "losses", 0) == "losses"
    assert (run / ".lock").exists()
    with locked(run):
        pass


def test_interrupted(moeq: ForkServer, recipe: Path, finished_run: Path, tmp_path: Path) -> None:
    """Ctrl-C: exit 130, one line, nothing half-written, and the same command goes on."""
    run = tmp_path / "run"
    for target in ("losses", "quantize", "eval"):
        for _ in range(5):  # on a busy machine the signal can come after the run has ended: then once more
            running = moeq.start("run", recipe, "--out", run)
            for stage, event in follow(running):
                if (stage, event) == (target, "begins"):
                    os.kill(running.pid, signal.SIGINT)
            finished = running.wait()
            if finished.code != 0:
                break
            for made in (run / target, *([run / "store"] if target == "losses" else [])):
                shutil.rmtree(made)
        assert finished.code == 130, finished.stderr
        assert "Traceback" not in finished.stderr
        assert finished.stderr.splitlines()[-1] == "interrupted; run the same command to go on"
        assert partials(run) == []
    assert moeq.run("run", recipe, "--out", run, "--quiet").code == 0
    assert digests(run) == digests(finished_run)


def test_tensor_files_are_reproducible(tmp_path: Path) -> None:
    """safetensors' own writer orders several metadata keys by a random hash."""
    import torch

    written = set()
    for number in range(20):
        path = tmp_path / f"{number}.safetensors"
        write_tensors(path, {"a": torch.arange(3), "b": torch.ones(2)}, {"one": "1", "two": "2", "three": "3"})
        written.add(path.read_bytes())
    assert len(written) == 1
