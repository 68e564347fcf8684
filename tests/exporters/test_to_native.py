"""Checkpoints of other formats in the native one: the same codes, scales and zero points, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exporters import handmade
from made_sources import MadeSource, save_model

from moeq.conversion import convert
from moeq.errors import ArtifactError, FormatError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.packed_source import PackedSource
from moeq.exporters.readers import open_packed
from moeq.numerics.packed import PackedWeight
from moeq.verification.manifest_files import check_native

FORMATS = {"gptqmodel": 4, "auto-round": 3, "transformers": 4, "vllm": 4, "llama.cpp": 4}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("mixtral") / "model", "mixtral", sliding_window=None)


def same(source: PackedSource, found: PackedSource) -> None:
    """The same matrices bit for bit, packed or not, of experts and beside them."""
    for layer, other in zip(source.layers, found.layers, strict=True):
        for expert in range(layer.num_experts):
            mine, theirs = source.expert(layer, expert)[0], found.expert(other, expert)[0]
            assert set(mine) == set(theirs)
            for name, matrix in mine.items():
                equal(matrix, theirs[name])
    others = dict(found.others())
    for name, weight in source.others():
        equal(weight, others.pop(name))
    assert not others


def equal(first: PackedWeight | torch.Tensor, second: PackedWeight | torch.Tensor) -> None:
    assert isinstance(first, PackedWeight) == isinstance(second, PackedWeight)
    if isinstance(first, PackedWeight) and isinstance(second, PackedWeight):
        assert (first.bits, first.symmetric) == (second.bits, second.symmetric)
        assert set(first.parts()) == set(second.parts())
        for part, tensor in first.parts().items():
            assert torch.equal(tensor, second.parts()[part]), part
    else:
        assert torch.equal(first, second)


@pytest.mark.parametrize("runtime", FORMATS)
def test_what_moeq_wrote_for_others_comes_back(runtime: str, mixtral: Path, tmp_path: Path) -> None:
    """Codes, scales and zero points are those that were exported, and the manifest has their digests."""
    source = MadeSource(mixtral, lambda *_: FORMATS[runtime])
    write(runtime, source, tmp_path / "theirs", WriteOptions())
    convert(tmp_path / "theirs", "native", tmp_path / "native")
    found = NativeReader(tmp_path / "native")
    same(source, found)
    assert set(found.rest()) == set(source.rest())
    manifest = check_native(tmp_path / "native").manifest
    assert manifest.assignment["name"] == "carried over"
    assert {layer.top_k for layer in manifest.layers} == {2}
    assert {expert.tier for layer in manifest.layers for expert in layer.experts} == {"gpu"}
