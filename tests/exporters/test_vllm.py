"""compressed-tensors for vLLM: a scheme a layer, layers in full precision, and which loader such a checkpoint has."""

from __future__ import annotations

import re
from pathlib import Path

import peers
import pytest
from made_sources import MadeSource, quantization_of, save_model

from moeq.errors import EvaluationError, FormatError
from moeq.exporters import write
from moeq.exporters.exporter import read_by
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.readers import open_packed
from moeq.progress import Reporter
from moeq.runtimes import of_method
from moeq.verification.launch import NotInstalledError
from moeq.verification.verify import Options, verify

EXPERTS = "model.layers.{}.block_sparse_moe.experts.0.gate_proj"  # as vLLM asks for a fused layer's scheme


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "mixtral", "mixtral", hidden_size=64, intermediate_size=64)


def written(model: Path, out: Path, first: int, second: int, *, widen: bool = False, name: str = "vllm-cuda") -> Path:
    """Two layers, each at a width."""
    source = MadeSource(model, lambda layer, expert, projection: (first, second)[layer], group_size=64)
    write(name, source, out, WriteOptions(widen=widen))
    return out


def schemes(out: Path, name: str) -> list[int]:
    """Widths of the groups that a module's name matches, as vLLM looks them up."""
    declared = quantization_of(out)
    return [
        group["weights"]["num_bits"]
        for group in declared["config_groups"].values()
        if any(re.match(target.removeprefix("re:"), name) for target in group["targets"])
    ]


def ignored(out: Path, name: str) -> bool:
    return any(re.match(pattern.removeprefix("re:"), name) for pattern in quantization_of(out)["ignore"])


def test_every_layer_has_a_scheme_and_the_rest_none(model: Path, tmp_path: Path) -> None:
    out = written(model, tmp_path / "out", 2, 8)
    assert [schemes(out, EXPERTS.format(layer)) for layer in (0, 1)] == [[2], [8]]
    assert not ignored(out, EXPERTS.format(0))
    for beside in ("model.layers.0.self_attn.q_proj", "model.layers.0.block_sparse_moe.gate", "lm_head"):
        assert ignored(out, beside), beside
    assert "vLLM" in (out / "README.md").read_text("utf-8")
    full = written(model, tmp_path / "full", 16, 4)
    assert ignored(full, EXPERTS.format(0))
    assert schemes(full, EXPERTS.format(1)) == [4]
    assert not ignored(full, EXPERTS.format(1))


def test_transformers_fails_where_layers_differ(model: Path, tmp_path: Path) -> None:
    """It takes the first scheme for all layers: of the widest tensors, so that the others are too small for it."""
    peers.module("compressed_tensors")
    for first, second in ((2, 4), (8, 3), (4, 16)):
        out = written(model, tmp_path / f"{first}-{second}", first, second)
        groups = quantization_of(out)["config_groups"].values()
        assert [group["weights"]["num_bits"] for group in groups] == sorted({first, second} - {16}, reverse=True)
        with pytest.raises(EvaluationError, match="cannot be loaded"):
            verify(out, Options(target="transformers"), Reporter(quiet=True))


def test_a_layer_has_one_width(model: Path, tmp_path: Path) -> None:
    mixed = MadeSource(model, lambda layer, expert, projection: 2 if expert == 1 else 4, group_size=64)
    with pytest.raises(
        FormatError, match=r"for vllm-cuda: .*2 bits beside 4 bits of .*; vllm-cuda takes one scheme for all exper"
    ):
        write("vllm-cuda", mixed, tmp_path / "out", WriteOptions())
    half = MadeSource(model, lambda layer, expert, projection: 16 if expert == 1 else 4, group_size=64)
    with pytest.raises(FormatError, match="full precision beside 4 bits of"):
        write("vllm-cuda", half, tmp_path / "out", WriteOptions())
    write("vllm-cuda", mixed, tmp_path / "out", WriteOptions(widen=True))
    assert schemes(tmp_path / "out", EXPERTS.format(0)) == [4]
    odd = MadeSource(model, lambda layer, expert, projection: (3, 2)[layer], group_size=64)
    write("vllm-cuda", odd, tmp_path / "odd", WriteOptions(widen=True))
    assert [schemes(tmp_path / "odd", EXPERTS.format(layer)) for layer in (0, 1)] == [[3], [2]]


def test_transformers_does_not_load_what_only_vllm_reads(model: Path, tmp_path: Path) -> None:
    exporter = of_method("compressed-tensors")
    assert exporter is not None
    readers = {}
    for first, second in ((2, 8), (16, 4), (4, 4)):
        out = written(model, tmp_path / f"{first}-{second}", first, second)
        readers[first, second] = [*read_by(exporter, open_packed(out))]
    assert readers == {(2, 8): ["vllm-cuda"], (16, 4): ["vllm"], (4, 4): ["transformers"]}
    with pytest.raises(NotInstalledError, match="vllm cannot be imported there"):
        verify(tmp_path / "2-8", Options(), Reporter(quiet=True))


def test_one_scheme_for_all_layers_loads_in_transformers_too(model: Path, tmp_path: Path) -> None:
    peers.module("compressed_tensors")
    out = written(model, tmp_path / "out", 4, 4)
    verdict = verify(out, Options(), Reporter(quiet=True))
    assert (verdict.target, verdict.problems) == ("transformers", ())
