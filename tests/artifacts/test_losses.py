"""The loss table's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeq.artifacts.losses import WHOLE, read_losses, write_losses


def row(layer: int, expert: int, projection: str) -> dict[str, Any]:
    return {
        "layer": layer, "layer_name": f"layers.{layer}", "expert": expert, "projection": projection, "method": "rtn",
        "bits": 2, "group_size": 8, "symmetric": False, "loss": 0.1 * expert, "relative_loss": 0.5 / (layer + 1),
        "calibration_tokens": 5, "heldout_tokens": 2, "fallback": "none", "measured_on": "heldout", "bytes": 64,
    }  # fmt: skip


def test_parts_are_joined_into_the_same_file(tmp_path: Path) -> None:
    parts = [[row(layer, e, p) for e in range(40) for p in (WHOLE, "up_proj")] for layer in range(30)]
    write_losses(tmp_path / "parts", iter(parts))
    write_losses(tmp_path / "whole", [[one for part in parts for one in part]])
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    table = read_losses(tmp_path / "parts")
    assert table.rows() == [one for part in parts for one in part]
    assert table.rows(WHOLE) == [one for part in parts for one in part if one["projection"] == WHOLE]
