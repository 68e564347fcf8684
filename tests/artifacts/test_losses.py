"""The loss table's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from moeq.artifacts.losses import WHOLE, read_losses, write_losses
from moeq.errors import ArtifactError


def row(layer: int, expert: int, projection: str) -> dict[str, Any]:
    return {
        "layer": layer, "layer_name": f"layers.{layer}", "expert": expert, "projection": projection, "method": "rtn",
        "bits": 2, "group_size": 8, "symmetric": False, "loss": 0.1 * expert, "relative_loss": 0.5 / (layer + 1),
        "calibration_tokens": 5, "heldout_tokens": 2, "fallback": "none", "measured_on": "heldout", "bytes": 64,
        "weighted_loss": 0.01 * expert, "hessian_trace": None, "energy": 0.2, "weighted_energy": 0.1 + expert,
    }  # fmt: skip


def test_parts_are_joined_into_the_same_file(tmp_path: Path) -> None:
    parts = [[row(layer, e, p) for e in range(40) for p in (WHOLE, "up_proj")] for layer in range(30)]
    write_losses(tmp_path / "parts", iter(parts))
    write_losses(tmp_path / "whole", [[one for part in parts for one in part]])
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    table = read_losses(tmp_path / "parts")
    assert table.rows() == [one for part in parts for one in part]
    assert table.rows(WHOLE) == [one for part in parts for one in part if one["projection"] == WHOLE]


def test_a_relative_path_with_a_colon_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To pyarrow it is an address, and no file system is called `run`."""
    monkeypatch.chdir(tmp_path)
    write_losses(Path("run:1/losses"), [[row(0, 0, WHOLE)]])
    assert read_losses(Path("run:1/losses")).rows() == [row(0, 0, WHOLE)]


def test_best_is_the_lowest_loss_of_the_whole_expert_and_the_first_of_equals(tmp_path: Path) -> None:
    losses = {("b", 0): 0.5, ("a", 0): 0.2, ("b", 1): 0.3, ("a", 1): 0.3, ("b", 2): 0.1, ("a", 2): 0.4}
    rows = [
        row(0, expert, projection) | {"method": method, "loss": losses[method, expert] + (projection == "up_proj")}
        for expert in range(3)
        for method in ("b", "a")
        for projection in (WHOLE, "up_proj")
    ]
    write_losses(tmp_path / "losses", [rows])
    table = read_losses(tmp_path / "losses")
    assert table.listed_methods() == ["b", "a"]
    assert table.best()[0][2].tolist() == ["a", "b", "b"]
    assert table.matrix("best")[0][2].tolist() == [0.2, 0.3, 0.1]
    assert table.matrix("best", projection="up_proj")[0][2].tolist() == [1.2, 1.3, 1.1]


LATER = {"1": ["weighted_loss", "hessian_trace", "energy", "weighted_energy"], "2": ["energy", "weighted_energy"]}


@pytest.mark.parametrize("version", LATER)
def test_tables_of_earlier_versions_are_read(tmp_path: Path, version: str) -> None:
    write_losses(tmp_path / "new", [[row(0, 0, WHOLE)]])
    assert read_losses(tmp_path / "new").energies("weighted_loss") == [[0.1]]
    table = pq.read_table(tmp_path / "new").drop_columns(LATER[version])
    pq.write_table(table.replace_schema_metadata({"moeq_schema_version": version}), tmp_path / "old")
    before = read_losses(tmp_path / "old")
    assert before.rows() == [row(0, 0, WHOLE) | dict.fromkeys(LATER[version])]
    assert before.energies("loss") is None, "what experts answer was not written down"
    pq.write_table(table.replace_schema_metadata({"moeq_schema_version": "4"}), tmp_path / "newer")
    with pytest.raises(ArtifactError, match="schema version '4'"):
        read_losses(tmp_path / "newer")
