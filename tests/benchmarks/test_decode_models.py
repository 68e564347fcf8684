"""The models of benchmarks/decode.py: packed checkpoints and a bf16 model of the same values, written without a run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import decode
import decode_models
import pytest
import torch

from moeq.models.loading import load_model
from moeq.models.source import open_source
from moeq.runtime.checkpoint import load_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decode")
    decode_models.make(folder, Namespace(layers=1, experts=8, vocabulary=256, **decode_models.CODES))
    return folder


@pytest.mark.full
def test_packed_and_dense_are_one_model(made: Path) -> None:
    ids = torch.arange(3, 35)[None]
    dense: Any = load_model(open_source(str(made / "model")), torch.float32, CPU)
    with torch.no_grad():
        wanted = dense(input_ids=ids).logits
        for variant in decode_models.VARIANTS:
            packed: Any = load_checkpoint(made / variant, torch.float32, CPU)
            found = packed(input_ids=ids).logits
            assert float((found - wanted).abs().max()) < 0.03 * float(wanted.abs().max())  # bf16 of the values
            assert type(packed.lm_head) is type(dense.lm_head) or variant == "all"


def test_what_a_manifest_states_is_what_lies_in_the_files(made: Path) -> None:
    for variant in decode_models.VARIANTS:
        whole, layer = decode.stated(made / variant)
        files = sum(path.stat().st_size for path in (made / variant).glob("*.safetensors"))
        assert whole == pytest.approx(files, rel=1e-3)
        experts = 8 * 3 * 768 * 2048 * (4 + (16 + 4) / 128) // 8
        attention = (2 * 4096 + 2 * 512) * 2048 * (2 if variant == "experts" else (4 + (16 + 4) / 128) / 8)
        assert layer == pytest.approx(experts + attention, rel=1e-2)  # and norms and the router


def test_a_folder_is_kept_and_not_taken_for_another_model(made: Path) -> None:
    index = made / "model" / "model.safetensors.index.json"
    before = index.stat().st_mtime_ns
    decode_models.make(made, Namespace(layers=1, experts=8, vocabulary=256, **decode_models.CODES))
    with pytest.raises(SystemExit, match="holds another model"):
        decode_models.make(made, Namespace(layers=2, experts=8, vocabulary=256, **decode_models.CODES))
    assert index.stat().st_mtime_ns == before
