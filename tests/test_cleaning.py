"""moeq gc: drops what nothing refers to, keeps the rest byte for byte, refuses while a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

from moeq import cleaning, pipeline
from moeq.artifacts import replicas
from moeq.artifacts.files import locked
from moeq.artifacts.replica_store import noted_runs
from moeq.artifacts.replicas import LayerReplicas, layer_file, read_rows
from moeq.errors import ArtifactError, RecipeError, StorageError
from moeq.progress import Reporter
from moeq.recipe import LossesSection, load_recipe
from moeq.stages import losses
from moeq.stages.context import Context
from moeq.stages.replicas import entries, load_index

SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=32", "losses.group_size=16", "assign={method: uniform, bits: 2}",
    "eval.compare=[]",
)  # fmt: skip
STAGES = ("profile", "losses", "assign", "quantize", "export")


def run(model: Path, out: Path, *overrides: str, stages: tuple[str, ...] = ("profile", "losses")) -> Context:
    context = Context(
        recipe=load_recipe(None, [*SMALL, *overrides]), model_name=str(model), out=out, reporter=Reporter(quiet=True)
    )
    pipeline.run(context, stages)
    return context


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def size(folder: Path) -> int:
    return sum(map(len, files(folder).values()))


def test_the_run_whose_own_a_store_is_keeps_its_replicas(tiny_mixtral: Path, tmp_path: Path) -> None:
    """It is noted nowhere; runs that use it from elsewhere are."""
    own = run(tiny_mixtral, tmp_path / "own", "losses.bits=[2]")
    other = run(tiny_mixtral, tmp_path / "other", f"store={own.store}", "losses.bits=[2]", "losses.damping=0.02")
    for given in ({"runs": [], "store": own.store}, {"runs": [other.out], "store": None}):
        found = cleaning.collect(**given, dry_run=False)
        assert found["runs"] == [str(other.out), str(own.out)]
        assert losses.is_intact(own)
        assert losses.is_intact(other)
    with locked(own.out), pytest.raises(StorageError):
        cleaning.collect([], own.store, dry_run=True)


@pytest.mark.full
def test_what_the_recipe_no_longer_asks_for_goes(tiny_mixtral: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    wanted = files(run(tiny_mixtral, tmp_path / "narrow", "losses.bits=[2,4]").store)
    run(tiny_mixtral, out, "losses.bits=[1,2,3,4,8]", stages=STAGES)
    run(tiny_mixtral, out, "losses.bits=[2,4]", "losses.group_size=24")
    narrow = run(tiny_mixtral, out, "losses.bits=[2,4]", stages=STAGES)
    before, apart = size(narrow.store), {stage: files(narrow.directory(stage)) for stage in STAGES}
    other = [path for path in narrow.store.iterdir() if path.is_dir() and path.name != load_index(narrow).set]
    assert len(other) == 1

    foretold = cleaning.collect([out], None, dry_run=True)
    assert size(narrow.store) == before
    found = cleaning.collect([out], None, dry_run=False)
    assert found | {"dry_run": True} == foretold
    assert files(narrow.store) == wanted
    assert not other[0].exists()
    assert found["freed_bytes"] == pytest.approx(before - size(narrow.store), rel=0.05)
    assert found["kept_bytes"] == pytest.approx(size(narrow.store), rel=0.15)
    assert {stage: files(narrow.directory(stage)) for stage in STAGES} == apart
    again = cleaning.collect([out], None, dry_run=False)
    assert (again["freed"], again["freed_bytes"]) == ([], 0)
    for stage in STAGES:
        assert pipeline.run_alone(narrow, stage).skipped or stage == "quantize"


def test_runs_that_share_a_store_keep_each_others_replicas(tiny_mixtral: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    one = run(tiny_mixtral, tmp_path / "one", f"store={shared}", "losses.bits=[2]")
    two = run(tiny_mixtral, tmp_path / "two", f"store={shared}", "losses.bits=[2,3]")
    run(tiny_mixtral, tmp_path / "two", f"store={shared}", "losses.bits=[2,4]", "losses.damping=0.02")
    index = load_index(one)
    widths = lambda: sorted({e["bits"] for e in LayerReplicas(shared / index.set, 0).entries.values()})  # noqa: E731
    assert widths() == [2, 3]
    of_others = shared / index.set / "losses" / f"layer-000.my-own.2.{'0' * 16}.json"
    of_others.write_text("{}")
    for given in ({"runs": [tmp_path / "one"], "store": None}, {"runs": [], "store": shared}):
        found = cleaning.collect(**given, dry_run=False)
        assert found["runs"] == [str(tmp_path / "one"), str(tmp_path / "two")]
        assert widths() == [2]
        assert not of_others.exists()
        assert len([path for path in shared.iterdir() if len(path.name) == 64]) == 2
    assert losses.is_intact(one)
    assert read_rows(shared / index.set, 0, index.made[0].rows)
    gone = entries(LossesSection(bits=[3]))
    assert all(read_rows(shared / index.set, 0, made.rows) is None for made in gone)
    for path in sorted(two.out.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    two.out.rmdir()
    found = cleaning.collect([], shared, dry_run=False)
    assert "note of a run that is gone" in {freed["what"] for freed in found["freed"]}
    assert [path.name for path in shared.iterdir() if len(path.name) == 64] == [index.set]
    assert losses.is_intact(one)


def test_runs_whose_stores_are_links_to_one_folder_keep_both(tiny_mixtral: Path, tmp_path: Path) -> None:
    """As on a larger disk: it is the own store of neither."""
    shared = tmp_path / "large" / "store"
    shared.mkdir(parents=True)
    runs = []
    for name, damping in (("first", 0.01), ("second", 0.02)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "store").symlink_to(shared)
        runs.append(run(tiny_mixtral, tmp_path / name, "losses.bits=[2]", f"losses.damping={damping}"))
    for given in ([runs[0].out], [runs[1].out]):
        assert cleaning.collect(given, None, dry_run=False)["freed"] == []
    assert all(map(losses.is_intact, runs))
    assert {load_recipe(one.out / "recipe.yaml").store for one in runs} == {str(shared)}
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "store").symlink_to("nothing")
    run(tiny_mixtral, tmp_path / "third", stages=("profile",))
    assert load_recipe(tmp_path / "third" / "recipe.yaml").store is None


def test_a_run_that_was_moved_keeps_its_replicas_in_a_shared_store(tiny_mixtral: Path, tmp_path: Path) -> None:
    """Its note names where it was, which the next cleaning without it would take for a run that is gone."""
    shared, moved = tmp_path / "shared", tmp_path / "new"
    own = run(tiny_mixtral, tmp_path / "own", "losses.bits=[2]")
    run(tiny_mixtral, tmp_path / "old", f"store={shared}", "losses.bits=[2]").out.rename(moved)
    before = files(shared / load_index(own).set)
    foretold = cleaning.collect([moved, own.out], None, dry_run=True)
    assert [one["what"] for one in foretold["freed"]] == ["note of a run that is gone"]
    assert list(noted_runs(shared).values()) == [tmp_path / "old"]
    cleaning.collect([moved, own.out], None, dry_run=False)
    assert list(noted_runs(shared).values()) == [moved]
    assert list(noted_runs(own.store).values()) == []
    assert cleaning.collect([], shared, dry_run=False)["freed"] == []
    assert files(shared / load_index(own).set) == before


@pytest.mark.full
def test_what_killed_runs_left_goes_and_checkpoints_stay(tiny_mixtral: Path, tmp_path: Path) -> None:
    made = run(tiny_mixtral, tmp_path / "run", "losses.bits=[2]", stages=STAGES)
    folder = made.store / load_index(made).set
    kept = files(made.out)
    left = [
        folder / "layer-000.safetensors.partial",
        folder / "losses" / "layer-000.gptq.2.x.json.partial",
        made.out / "profile" / "profile.json.partial",
        made.out / "losses" / ".parts" / "layer-000.json",
        made.out / "losses" / "replicas" / "layer-000.safetensors",
    ]
    foreign = [
        made.out / "checkpoint" / "mine.partial",
        made.out / "checkpoint.partial" / "config.json",
        made.store / "notes.txt",
        folder / "mine.safetensors",
    ]
    for path in (*left, *foreign):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    cleaning.collect([made.out], None, dry_run=True)
    assert all(path.exists() for path in left)
    cleaning.collect([made.out], None, dry_run=False)
    assert [path for path in left if path.exists()] == []
    assert all(path.exists() for path in foreign)
    assert {name: data for name, data in files(made.out).items() if name in kept} == kept


def test_damaged_replicas_go(tiny_mixtral: Path, tmp_path: Path) -> None:
    made = run(tiny_mixtral, tmp_path / "run", "losses.bits=[2]")
    path = layer_file(made.store / load_index(made).set, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    found = cleaning.collect([made.out], None, dry_run=False)
    assert [(one["path"], one["what"], one["bytes"]) for one in found["freed"]] == [
        (str(path), "damaged replicas", len(whole) - 1)
    ]
    run(tiny_mixtral, tmp_path / "run", "losses.bits=[2]")
    assert path.read_bytes() == whole


def test_a_killed_run_keeps_what_it_has_made(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = replicas.add_rows

    def failing(directory: Path, layer: int, *more: Any) -> None:
        if layer == 1:
            raise KeyboardInterrupt
        add(directory, layer, *more)

    monkeypatch.setattr(replicas, "add_rows", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_mixtral, tmp_path / "run")
    before = files(tmp_path / "run" / "store")
    assert any(name.endswith("layer-000.safetensors") for name in before)
    cleaning.collect([tmp_path / "run"], None, dry_run=False)
    assert files(tmp_path / "run" / "store") == before


@pytest.mark.full
def test_refuses_while_a_run_goes_on(tiny_mixtral: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    for name in ("one", "two"):
        run(tiny_mixtral, tmp_path / name, f"store={shared}", "losses.bits=[2]")
    run(tiny_mixtral, tmp_path / "two", f"store={shared}", "losses.bits=[2]", "losses.damping=0.02")
    run(tiny_mixtral, tmp_path / "two", f"store={shared}", "losses.bits=[2]")
    before = files(shared)
    with locked(tmp_path / "two"):
        for given in ({"runs": [tmp_path / "one"], "store": None}, {"runs": [], "store": shared}):
            with pytest.raises(StorageError, match="two: another moeq run is working here"):
                cleaning.collect(**given, dry_run=False)
    assert files(shared) == before
    assert cleaning.collect([], shared, dry_run=False)["freed_bytes"] > 0


def test_refusals(tiny_mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="nothing to clean; give a RUN or --store DIR"):
        cleaning.collect([], None, dry_run=False)
    with pytest.raises(ArtifactError, match="not a run directory"):
        cleaning.collect([tmp_path], None, dry_run=False)
    (tmp_path / "photographs").mkdir()
    with pytest.raises(ArtifactError, match="not a replica store"):
        cleaning.collect([], tmp_path / "photographs", dry_run=False)
    made = run(tiny_mixtral, tmp_path / "run", "losses.bits=[2]")
    before = files(made.store)
    (made.directory("losses") / "replicas.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"replicas\.json: cannot be read as JSON"):
        cleaning.collect([made.out], None, dry_run=False)
    assert files(made.store) == before


def test_what_a_disk_refuses_advises_no_option_that_is_none(tiny_mixtral: Path, tmp_path: Path) -> None:
    """The same line stands for --out, a store, a mirror and an --html."""
    context = run(tiny_mixtral, tmp_path / "run", stages=("profile",))
    (context.out / ".lock").unlink()
    (context.out / ".lock").mkdir()
    with pytest.raises(StorageError, match=r"lock: cannot write: Is a directory; check the path or choose another pla"):
        cleaning.collect([context.out], None, dry_run=True)


@pytest.mark.full
def test_the_command_prints_what_it_freed(moeq: ForkServer, tiny_mixtral: Path, tmp_path: Path) -> None:
    made = run(tiny_mixtral, tmp_path / "run", "losses.bits=[2,3]")
    run(tiny_mixtral, tmp_path / "run", "losses.bits=[2]")
    dry = moeq.run("gc", "--out", made.out, "--dry-run")
    assert dry.code == 0, dry.stderr
    assert "would free" in dry.stdout
    assert "replicas gptq.3." in dry.stdout
    real = moeq.run("gc", "--out", made.out, "--json")
    assert real.code == 0, real.stderr
    done = json.loads(real.stdout)
    assert done["freed_bytes"] > 0
    assert done["stores"] == [str(made.store)]
    refused = moeq.run("gc")
    assert (refused.code, refused.stderr) == (2, "moeq: nothing to clean; give a RUN or --store DIR\n")
