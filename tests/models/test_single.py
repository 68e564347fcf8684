"""One expert read alone equals its part of the loaded model, and only its own bytes are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, build, save
from packed_models import save_fp8, save_mxfp4

from moeq.errors import ModelError
from moeq.models import loading
from moeq.models.experts import find_expert_layers, stacked_biases, stacked_weights
from moeq.models.single import ExpertReader
from moeq.models.source import open_source

CPU = torch.device("cpu")
UNSTACKED = {"dbrx", "doge", "nllb-moe", "switch_transformers"}  # rows, embeddings, one parameter an expert


def stacked(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that stack routed experts, biases included."""
    named = dict(model.named_parameters())
    holders = {name.rpartition(".")[0] for name, weight in named.items() if weight.dim() == 3 and "expert" in name}
    holders -= {holder for holder in holders if holder.endswith("shared_experts")}
    return {name: weight for name, weight in named.items() if name.rpartition(".")[0] in holders and weight.dim() > 1}


def check(folder: Path, dtype: torch.dtype = torch.float32, scheme: str = "") -> int:
    """Compare every expert; returns how many were compared. scheme: of the object store that experts are read from."""
    source = open_source(f"{scheme}{folder}")
    whole = loading.load_model(open_source(str(folder)), dtype, CPU)
    reader = ExpertReader(source, loading.skeleton(source, dtype))
    count = 0
    for name, weight in stacked(whole).items():
        for expert in range(weight.shape[0]):
            before = reader.bytes_read
            assert torch.equal(reader.read_expert(name, expert), weight[expert]), (name, expert)
            mine = reader.bytes_read - before
            assert mine == reader.bytes_of(name, expert)
            assert mine <= weight[expert].numel() * weight.element_size()
            count += 1
    return count


@pytest.mark.cases(4)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in UNSTACKED])
def test_every_expert_of_a_family(family: str, tmp_path: Path) -> None:
    assert check(save(family, tmp_path / "model", with_tokenizer=False)) >= 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "llama4_text", "granitemoe"])
def test_packed_experts_with_their_scales(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_mxfp4(tmp_path, dtype)[1] if kind == "gpt_oss" else save_fp8(tmp_path, kind, dtype)[1]
    assert check(folder, dtype) >= 12


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_fp8_experts_with_one_scale_a_matrix(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEQ_CACHE", str(tmp_path / "cache"))
    folder = save_fp8(tmp_path, "deepseek_v3", torch.bfloat16, blocks=False)[1]
    assert check(folder, torch.bfloat16, scheme) >= 12


def test_rows_of_families_that_stack_experts_along_them(tmp_path: Path) -> None:
    source = open_source(str(save("dbrx", tmp_path / "model")))
    whole = loading.load_model(source, torch.float32, CPU)
    reader = ExpertReader(source, loading.skeleton(source, torch.float32))
    name = "transformer.blocks.1.ffn.experts.mlp.w1"
    assert torch.equal(reader.read_rows(name, 24, 48), whole.get_parameter(name)[24:48])
    assert reader.bytes_read == 24 * 40 * 4


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    source = open_source(str(save("mixtral", tmp_path / "model")))
    reader = ExpertReader(source, loading.skeleton(source))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(ModelError, match="has 6 experts, no number 6"):
        reader.read_expert(name, 6)
    with pytest.raises(ModelError, match="is not on disk as it is in memory"):
        reader.read_rows(name, 0, 1)


@pytest.mark.parametrize("family", sorted(UNSTACKED))
def test_the_families_left_out_stack_nothing(family: str) -> None:
    assert not stacked(build(family))


@pytest.mark.cases(4)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "aria", "llama4", "jetmoe", "dbrx", "switch_transformers",
    "nemotron_h", "longcat_flash", "qwen3_vl_moe", "muse_spark"])  # fmt: skip
def test_matrices_and_biases_of_one_expert(family: str, tmp_path: Path) -> None:
    source = open_source(str(save(family, tmp_path / "model", with_tokenizer=False)))
    whole = loading.load_model(source, torch.float32, CPU)
    reader = ExpertReader(source, loading.skeleton(source, torch.float32))
    for layer in find_expert_layers(whole):
        weights, biases = (of(whole, layer, slice(None)) for of in (stacked_weights, stacked_biases))
        for expert in range(layer.num_experts):
            before = reader.bytes_read
            found = reader.read(layer, expert)
            assert reader.bytes_read - before == 4 * (layer.parameters_per_expert + layer.biases_per_expert)
            for mine, all_of_them in zip(found, (weights, biases), strict=True):
                assert set(mine) == set(all_of_them)
                assert all(torch.equal(mine[name], all_of_them[name][expert]) for name in mine)
