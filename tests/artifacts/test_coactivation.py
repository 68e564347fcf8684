"""Which experts follow which, as a checkpoint carries it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeq.artifacts.coactivation import NAME, CoactivationTable, most_bytes, read_coactivation, write_coactivation
from moeq.errors import ArtifactError


def made(experts: list[int], seed: int = 0) -> tuple[CoactivationTable, list[np.ndarray]]:
    random = np.random.default_rng(seed)
    shares = [random.dirichlet(np.ones(there), here) for here, there in itertools.pairwise(experts)]
    layers = [(f"layer.{number}", count) for number, count in enumerate(experts)]
    return CoactivationTable.of(layers, shares, 1000, "digest"), shares


@given(experts=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 100))
def test_shares_come_back_to_what_16_bits_hold(experts: list[int], seed: int) -> None:
    table, shares = made(experts, seed)
    found = CoactivationTable.model_validate_json(table.model_dump_json()).follows()
    assert len(found) == len(shares)
    for one, other in zip(found, shares, strict=True):
        np.testing.assert_allclose(one, other, atol=0.5 / 65535)


def test_the_layout_is_that_of_format_md(tmp_path: Path) -> None:
    layers = [("one", 2), ("two", 3)]
    write_coactivation(tmp_path, CoactivationTable.of(layers, [np.array([[0, 1, 0.5], [0, 0, 1]])], 5, "text"))
    written = json.loads((tmp_path / NAME).read_text())
    assert written["layers"] == [{"name": "one", "num_experts": 2}, {"name": "two", "num_experts": 3}]
    assert written["shares"] == ["AAD//wCAAAAAAP//"]
    assert (written["tokens"], written["text"], written["schema_version"]) == (5, "text", 1)
    size = len((tmp_path / NAME).read_bytes())
    assert size <= most_bytes(layers) <= size + 100  # of a longer digest and number of tokens


def test_none_and_damaged(tmp_path: Path) -> None:
    assert read_coactivation(tmp_path) is None
    table, _ = made([3, 4])
    write_coactivation(tmp_path, table)
    assert read_coactivation(tmp_path) == table
    whole = json.loads((tmp_path / NAME).read_text())
    for changed, said in (
        ({"shares": []}, "shares of 0 layers"),
        ({"shares": [whole["shares"][0][:-4]]}, "does not have 3 x 4"),
        ({"shares": ["*" + whole["shares"][0][1:]]}, "is not base64"),
        ({"layers": [{"name": "a", "num_experts": 0}]}, "num_experts"),
        ({"schema_version": 2}, "schema"),
    ):
        (tmp_path / NAME).write_text(json.dumps(whole | changed))
        with pytest.raises(ArtifactError, match=said):
            read_coactivation(tmp_path)
