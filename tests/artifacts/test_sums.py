"""SHA256SUMS: what sha256sum itself checks, and what must not pass."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moeq.artifacts.sums import NAME, check_sums, write_sums
from moeq.errors import ArtifactError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("words")
    write_sums(tmp_path)
    return tmp_path


def test_sha256sum_reads_them(directory: Path) -> None:
    checked = subprocess.run(["sha256sum", "-c", NAME], cwd=directory, capture_output=True, text=True, check=False)
    assert checked.returncode == 0
    assert checked.stdout.splitlines() == ["a.safetensors: OK", "config.json: OK"]


def test_the_card_may_change(directory: Path) -> None:
    (directory / "README.md").write_text("other words")
    sums = check_sums(directory)
    assert sums is not None
    assert (sorted(sums.files), sums.unlisted) == (["a.safetensors", "config.json"], ())


def test_files_that_are_not_listed_are_named(directory: Path) -> None:
    (directory / "modeling.py").write_text("import os")
    (directory / "LICENSE").write_text("words")
    (directory / "more").mkdir()
    (directory / "more" / "b.safetensors").write_bytes(b"other weights")
    sums = check_sums(directory)
    assert sums is not None
    assert sums.unlisted == ("LICENSE", "modeling.py", "more/b.safetensors")
    assert sums.text == "SHA-256 of 2 files as in SHA256SUMS; not listed: LICENSE, modeling.py, more/b.safetensors"
    with pytest.raises(ArtifactError, match=r"modeling\.py.*does not list it"):
        sums.require_inactive(directory)


def test_only_some_files_may_be_compared(directory: Path) -> None:
    (directory / "a.safetensors").write_bytes(b"Weights")
    assert check_sums(directory, only=lambda name: name != "a.safetensors") is not None


def test_no_sums_are_no_error(tmp_path: Path) -> None:
    assert check_sums(tmp_path) is None


def _changed(directory: Path) -> None:
    (directory / "a.safetensors").write_bytes(b"Weights")


def _missing(directory: Path) -> None:
    (directory / "a.safetensors").unlink()


def _outside(directory: Path) -> None:
    (directory / NAME).write_text(f"{'0' * 64}  ../secret\n")


def _torn(directory: Path) -> None:
    (directory / NAME).write_bytes(b"\xff\xfe no line of digests")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_changed, r"changed since SHA256SUMS was written"),
        (_missing, r"a\.safetensors.*missing"),
        (_outside, r"not a plain file name.*line 1|line 1.*not a plain file name"),
        (_torn, r"no digest and name"),
    ],
)
def test_what_differs_is_named(directory: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(directory)
    with pytest.raises(ArtifactError, match=message):
        check_sums(directory)
