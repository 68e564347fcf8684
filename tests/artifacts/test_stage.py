"""Records of stages and the folders that they lie in: what was deleted while it was written, or since."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moeq.artifacts import files
from moeq.artifacts.files import building, locked, write_json
from moeq.artifacts.run import MAKES
from moeq.artifacts.stage import (
    RECORD,
    ModelStamp,
    StageRecord,
    current_digest,
    damage,
    is_current,
    of_earlier_codes,
    read_record,
    write_record,
)
from moeq.errors import ArtifactError, MissingError, StorageError
from moeq.models.source import read_header
from moeq.progress import Reporter
from moeq.recipe import Recipe
from moeq.stages.model import RunModel
from moeq.stages.order import BY_NAME

STAMP = ModelStamp(name="m", digest="d")


def record(directory: Path, stage: str) -> StageRecord:
    return write_record(directory, stage=stage, model=STAMP, seed=0, key="k", inputs={}, summary={}, volatile={})


def finished(directory: Path, stage: str) -> Path:
    for name in MAKES[stage]:
        write_json(directory / name, {"of": name})
    record(directory, stage)
    return directory


def test_every_stage_is_known_by_what_it_makes() -> None:
    assert MAKES.keys() == BY_NAME.keys()


@pytest.mark.parametrize("progress", [(), ("*.parquet",)])
def test_a_folder_that_was_deleted_while_it_was_written_takes_no_place(tmp_path: Path, progress: tuple[str]) -> None:
    """What is written afterwards makes the folder anew, without what was in it."""
    out = tmp_path / "out"

    def write(*after: str) -> None:
        with building(out / "stage", progress=progress) as unfinished:
            write_json(unfinished / "first.json", 1)
            shutil.rmtree(out)
            for name in after:
                write_json(unfinished / name, 2)

    for after in ((), ("second.json",)):
        with pytest.raises(StorageError, match=r"out/stage: deleted while moeq was writing it; run the same"):
            write(*after)
        assert not (out / "stage").exists()


@pytest.mark.parametrize("progress", [(), ("*.json",)])
def test_an_interruption_before_anything_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: tuple[str]
) -> None:
    out, listed, interrupted = tmp_path / "out", files._inodes, [KeyboardInterrupt]
    write_json(out / "stage" / "old.json", 1)

    def inodes(directory: Path) -> dict[str, int]:
        if interrupted:
            raise interrupted.pop()
        return listed(directory)

    monkeypatch.setattr(files, "_inodes", inodes)
    with pytest.raises(KeyboardInterrupt), building(out / "stage", progress=progress):
        raise AssertionError("it has been interrupted")
    assert not interrupted
    assert sorted(path.name for path in out.rglob("*")) == ["old.json", "stage"]


def test_a_run_directory_that_was_deleted_between_two_stages_is_told(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def run() -> None:
        with locked(out):
            shutil.rmtree(out)
            write_json(out / "later" / "b.json", 2)

    with pytest.raises(StorageError, match=r"out: deleted while moeq was writing it"):
        run()


@pytest.mark.parametrize("stage", MAKES)
def test_no_record_of_a_stage_whose_files_are_gone(tmp_path: Path, stage: str) -> None:
    for gone in sorted(MAKES[stage]):
        directory = finished(tmp_path / gone.replace("/", "-"), stage)
        for path in (directory / RECORD, directory / gone):
            path.unlink()
        with pytest.raises(StorageError, match=rf"{gone}: deleted while moeq was writing it"):
            record(directory, stage)
        assert not (directory / RECORD).exists()


@pytest.mark.parametrize("stage", MAKES)
def test_a_stage_without_what_it_always_makes_is_made_again(tmp_path: Path, stage: str) -> None:
    """Also where its record, as an older moeq wrote it in a folder that was deleted meanwhile, names none of it."""
    directory = finished(tmp_path, stage)
    assert is_current(directory, stage, "k")
    assert not damage(directory, stage)
    gone = sorted(MAKES[stage])[0]
    (directory / gone).unlink()
    for recorded in (read_record(directory, stage).files, {}):
        broken = read_record(directory, stage).model_copy(update={"files": recorded})
        write_json(directory / RECORD, broken.model_dump(mode="json"))
        assert not is_current(directory, stage, "k", BY_NAME[stage].editable)
        assert f"{gone} is missing" in damage(directory, stage)
        with pytest.raises(ArtifactError, match=r"file is missing; run `moeq"):
            current_digest(directory, stage)


def test_a_folded_model_that_is_gone_is_told_as_what_reparam_made(tmp_path: Path) -> None:
    directory = finished(tmp_path / "reparam", "reparam")
    shutil.rmtree(directory / "checkpoint")
    model = RunModel(name="m", recipe=Recipe(), out=tmp_path, reporter=Reporter(), check=False, folded=directory)
    with pytest.raises(ArtifactError, match=r"checkpoint/config\.json: file is missing; run `moeq reparam`"):
        _ = model.source


def test_a_tensor_file_that_is_gone_is_missing_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"a\.safetensors: no such file or directory; download or make it again"):
        read_header(tmp_path / "a.safetensors")


def test_checkpoints_of_earlier_codes_are_told(tmp_path: Path) -> None:
    """By the digest of the stage that made them; one whose record does not say it is not judged."""
    assert of_earlier_codes(tmp_path) == []
    digest = record(finished(tmp_path / "quantize", "quantize"), "quantize").digest
    for name, inputs in {"now": {"quantize": digest}, "before": {"quantize": "0" * 64}, "unsaid": {}}.items():
        folder = tmp_path / f"checkpoint-{name}"
        folder.mkdir()
        more = {"key": "k", "summary": {}, "volatile": {}}
        write_record(folder, stage=f"export-{name}", model=STAMP, seed=0, inputs=inputs, **more)
    assert [path.name for path in of_earlier_codes(tmp_path)] == ["checkpoint-before"]
