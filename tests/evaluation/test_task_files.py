"""Which files tasks of one's own are made of, and what they are named for."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeq.errors import EvaluationError
from moeq.evaluation import task_files
from moeq.evaluation.comparison import table
from moeq.evaluation.task_files import files_of
from moeq.recipe.eval import EvalSection
from moeq.stages.evaluate import _task_digests

TASK = """task: mine
include: ../common.yaml
doc_to_text: !function code.text
dataset_path: json
dataset_kwargs:
  data_files:
    test: data/*.json
    more: [elsewhere.jsonl, none.json]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tasks in a folder, with common YAML and data outside it, seen from the folder around it."""
    monkeypatch.chdir(tmp_path)
    for name in ("tasks", "data", "whole/deep"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tasks/mine.yaml").write_text(TASK)
    (tmp_path / "tasks/code.py").write_text("def text(doc): return ''\n")
    (tmp_path / "common.yaml").write_text("dataset_name: null\ndata_dir: whole\n")
    for name in ("data/one.json", "data/two.json", "data/three.txt", "elsewhere.jsonl", "whole/deep/four.json"):
        (tmp_path / name).write_text("{}\n")
    return tmp_path / "tasks"


def test_data_and_what_is_included_belong_to_tasks(folder: Path) -> None:
    names = {"code.py", "mine.yaml", "../common.yaml", "data/one.json", "data/two.json", "elsewhere.jsonl"}
    assert set(files_of(folder)) == names | {"whole/deep/four.json"}


def test_what_cannot_be_read_names_nothing(folder: Path) -> None:
    (folder / "broken.yaml").write_text("data_files: [elsewhere.jsonl\n")
    (folder / "around.yaml").write_text("include: around.yaml\nlist: &all [*all]\n")
    assert {"broken.yaml", "around.yaml"} < set(files_of(folder))


def test_other_data_are_other_inputs(folder: Path) -> None:
    section = EvalSection(tasks=["mine"], include_path=str(folder))
    before = _task_digests(section)
    assert before == _task_digests(section)
    (folder.parent / "elsewhere.jsonl").write_text('{"other": 1}\n')
    after = _task_digests(section)
    assert before is not None
    assert after is not None
    assert [old.split()[0] for old, new in zip(before, after, strict=True) if old != new] == ["elsewhere.jsonl"]


def row(name: str, shots: int) -> dict[str, object]:
    """A result of lm-eval with two questions, one answered rightly."""
    samples = [{"doc_id": number, "doc_hash": f"{number}", "target_hash": "t", "acc": number} for number in (0, 1)]
    return {
        "name": name,
        "perplexity": None,
        "lm_eval": {
            "results": {"mine": {"acc,none": 0.5, "acc_stderr,none": 0.5}},
            "samples": {"mine": samples},
            "n-shot": {"mine": shots},
        },
    }


def test_questions_behind_other_examples_are_other_items() -> None:
    assert table([row("first", 5), row("second", 5)])[1]["cells"]["mine"].change is not None
    with pytest.raises(EvaluationError, match="made of other items"):
        table([row("first", 5), row("second", 0)])


def test_names_of_whole_disks_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_files, "SEARCHED", 3)
    for name in "abcd":
        (folder / name).touch()
    (folder / "all.yaml").write_text(f"dataset_path: {folder}/**/nowhere.jsonl\n")
    with pytest.raises(EvaluationError, match=r"\*\* would look through more than 3 files and folders"):
        files_of(folder)
    monkeypatch.setattr(task_files, "MOST", 3)
    (folder / "all.yaml").write_text("data_files: '**'\n")
    with pytest.raises(EvaluationError, match=r"\*\*: more than 3 files and folders"):
        files_of(folder)


def test_names_that_no_file_can_have_name_nothing(folder: Path) -> None:
    (folder / "odd.yaml").write_text(f'include: {"x" * 5000}\ndata_files: [{"y" * 5000}, "a\\0b"]\n')
    assert "odd.yaml" in files_of(folder)
