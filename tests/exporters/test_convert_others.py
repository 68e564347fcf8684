"""Checkpoints of other tools in other formats: the same codes, or the same values where codes must move."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exporters import handmade
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeq.conversion import convert
from moeq.errors import ArtifactError, FormatError, ModelError
from moeq.exporters.readers import open_packed
from moeq.verification.reference import values
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import unpack


@pytest.fixture(scope="module")
def gptq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gptq")
    model = handmade.model(folder / "model", "qwen3_moe")
    handmade.write(model, folder / "packed", handmade.gptq_config(), handmade.gptq_parts)
    return folder / "packed"


@pytest.mark.cases(3)
@pytest.mark.parametrize("target", ["auto-round", "gptqmodel", "transformers", "dequantized"])
def test_gptq_to_every_format(gptq: Path, tmp_path: Path, target: str) -> None:
    convert(gptq, target, tmp_path / "out")
    source, found = open_packed(gptq), open_packed(tmp_path / "out")
    for layer, other in zip(source.layers, found.layers, strict=True):
        for expert in range(layer.num_experts):
            mine, theirs = source.expert(layer, expert)[0], found.expert(other, expert)[0]
            for name, matrix in mine.items():
                packed = theirs[name]
                assert isinstance(matrix, PackedWeight)
                assert isinstance(packed, PackedWeight) == (target != "dequantized")
                if isinstance(packed, PackedWeight):
                    assert torch.equal(matrix.codes, packed.codes)
                    assert torch.equal(matrix.scales, packed.scales)
                else:
                    assert torch.equal(values(packed), matrix.dequantize().to(packed.dtype).float())
    plain = load_file(gptq / "model.safetensors")
    for key in found.rest():
        assert torch.equal(plain[key], load_file(found.source.tensors[key].file)[key])


def test_asymmetric_codes_go_where_zero_points_are_read(tmp_path: Path) -> None:
    model = handmade.model(tmp_path / "model", "qwen3_moe")
    config = handmade.gptq_config(sym=False, checkpoint_format="gptq_v2")
    written = handmade.write(
        model, tmp_path / "packed", config, lambda one: handmade.gptq_parts(one, second=True), symmetric=False
    )
    convert(tmp_path / "packed", "auto-round", tmp_path / "out")
    found = open_packed(tmp_path / "out")
    up = found.expert(found.layers[1], 2)[0]["up_proj"]
    assert torch.equal(values(up), written["model.layers.1.mlp.experts.2.up_proj.weight"])
    with pytest.raises(FormatError):
        convert(tmp_path / "packed", "transformers", tmp_path / "refused")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_that_float16_does_not_hold_are_multiplied_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    model = handmade.model(tmp_path / "model", "qwen3_moe")
    wanted: list[Tensor] = []

    def parts(packed: PackedWeight) -> dict[str, Tensor]:
        scales = (packed.scales.float() * 1e-5).to(dtype)
        codes = unpack(packed.codes, packed.bits, packed.inputs).float() - 8
        wanted.append(codes * scales.float().repeat_interleave(handmade.GROUP, -1))
        return handmade.compressed_parts(packed) | {"weight_scale": scales}

    handmade.write(model, tmp_path / "packed", handmade.compressed_config(), parts)
    convert(tmp_path / "packed", "dequantized", tmp_path / "out")
    files = (load_file(file) for file in (tmp_path / "out").glob("*.safetensors"))
    stored = {key: tensor for tensors in files for key, tensor in tensors.items()}
    keys = [key for key in load_file(model / "model.safetensors") if handmade.EXPERT.match(key)]
    assert len(keys) == len(wanted) == 18
    for key, exact in zip(keys, wanted, strict=True):
        assert torch.equal(stored[key], exact), key


def test_groups_in_another_order_become_their_values(tmp_path: Path) -> None:
    """Act order, in experts and beside them: no grid of moeq's is so, and plain weights need none."""
    model = handmade.model(tmp_path / "model", "qwen3_moe")
    wanted: list[Tensor] = []
    order = torch.randperm(96, generator=torch.Generator().manual_seed(3))

    def parts(packed: PackedWeight) -> dict[str, Tensor]:
        index = order[order < packed.inputs] // handmade.GROUP
        codes = unpack(packed.codes, packed.bits, packed.inputs).float() - 8
        wanted.append(codes * packed.scales.float()[:, index])
        return handmade.gptq_parts(packed) | {"g_idx": index.int()}

    handmade.write(model, tmp_path / "packed", handmade.gptq_config(desc_act=True), parts)
    file, beside = tmp_path / "packed" / "model.safetensors", "model.layers.1.self_attn.o_proj"
    tensors = load_file(file)
    ordered = parts(handmade.rounded(tensors.pop(f"{beside}.weight"), 4))
    save_file(tensors | {f"{beside}.{part}": tensor for part, tensor in ordered.items()}, file, {"format": "pt"})
    declared = handmade.gptq_config(desc_act=True) | {"dynamic": {"-:.*mlp.gate$": {}}}
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    convert(tmp_path / "packed", "dequantized", tmp_path / "out")
    files = (load_file(each) for each in (tmp_path / "out").glob("*.safetensors"))
    stored = {key: tensor for tensors in files for key, tensor in tensors.items()}
    keys = [key for key in load_file(model / "model.safetensors") if handmade.EXPERT.match(key)]
    for key, exact in zip([*keys, f"{beside}.weight"], wanted, strict=True):
        assert torch.equal(stored[key], exact), key
    with pytest.raises(ArtifactError, match="not consecutive inputs"):
        convert(tmp_path / "packed", "auto-round", tmp_path / "refused")


O_PROJ, HEAD = "model.layers.1.self_attn.o_proj.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(O_PROJ), f"1 missing keys, the first: {O_PROJ}"),
        (lambda tensors: tensors.pop(HEAD), f"1 missing keys, the first: {HEAD}"),
        (lambda tensors: tensors.update({HEAD: tensors[HEAD][:100].clone()}), f"{HEAD} is [100, 64], not [128, 64]"),
        (lambda tensors: tensors.update({"model.more": torch.ones(1)}), "1 unexpected keys, the first: model.more"),
    ],
)
def test_what_is_not_as_the_model_has_it_is_refused_where_nothing_is_loaded(
    gptq: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], said: str
) -> None:
    shutil.copytree(gptq, tmp_path / "packed")
    tensors = load_file(gptq / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "packed" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        convert(tmp_path / "packed", "dequantized", tmp_path / "out")
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_head_that_is_the_embeddings_is_not_missing(gptq: Path, tmp_path: Path) -> None:
    shutil.copytree(gptq, tmp_path / "packed")
    tensors = load_file(gptq / "model.safetensors")
    del tensors[HEAD]
    save_file(tensors, tmp_path / "packed" / "model.safetensors", {"format": "pt"})
    config = json.loads((gptq / "config.json").read_text())
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    convert(tmp_path / "packed", "dequantized", tmp_path / "out")
    assert HEAD not in open_packed(tmp_path / "out").source.tensors


def test_biases_of_zeros_that_the_model_has_not_are_left_out(gptq: Path, tmp_path: Path) -> None:
    """As AutoGPTQ writes them beside every packed matrix; others than zeros are no part of the model."""
    shutil.copytree(gptq, tmp_path / "packed")
    tensors = load_file(gptq / "model.safetensors")
    modules = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
    tensors |= {f"{module}.bias": torch.zeros(tensors[f"{module}.scales"].shape[1]) for module in modules}
    save_file(tensors, tmp_path / "packed" / "model.safetensors", {"format": "pt"})
    convert(tmp_path / "packed", "dequantized", tmp_path / "out")
    assert not [key for key in open_packed(tmp_path / "out").source.tensors if key.endswith("_proj.bias")]
    tensors[f"{modules[3]}.bias"][5] = 1
    save_file(tensors, tmp_path / "packed" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"1 unexpected keys, the first: {modules[3]}.bias"):
        convert(tmp_path / "packed", "dequantized", tmp_path / "no")
