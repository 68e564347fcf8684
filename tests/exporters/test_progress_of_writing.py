"""How far a conversion is: every expert is counted once, however often a format needs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from counted_bars import Bars
from made_sources import MadeSource, save_model

from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.runtimes import NATIVE, written

EXL3 = "exl3"  # for codes of its own


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", [NATIVE, *(one for one in written() if one != EXL3)])
def test_every_expert_is_counted_once(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "mixtral", sliding_window=None, intermediate_size=128)
    source, bars = MadeSource(model, lambda *_: 4, group_size=64), Bars()
    write(name, source, tmp_path / "made", WriteOptions(bar=bars))
    experts = sum(layer.num_experts for layer in source.layers)
    assert bars.found == {f"for {name}": (experts, experts)}
