"""FP8-block and MXFP4 checkpoints are dequantized while loading, bit for bit; other quantized ones are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from packed_models import save_fp8, save_mxfp4
from safetensors.torch import load_file, save_file

from moeq.artifacts.tensor_files import write_in_chunks
from moeq.errors import ModelError
from moeq.models import loading
from moeq.models.declared import scale_keys
from moeq.models.experts import find_expert_layers
from moeq.models.source import open_source
from moeq.models.streaming import StreamedModel
from moeq.models.weights import plain_chunks, plain_header

CPU = torch.device("cpu")
IDS = torch.randint(3, 2048, (2, 12), generator=torch.Generator().manual_seed(5))


def twins(folder: Path, kind: str, dtype: torch.dtype) -> tuple[Path, Path]:
    return save_mxfp4(folder, dtype) if kind == "gpt_oss" else save_fp8(folder, kind, dtype)


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["deepseek_v3", "qwen3_moe", "gpt_oss", "llama4_text", "mistral4", "granitemoe", "aria_text"]
)
def test_equal_to_the_dequantized_model(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain, packed = (open_source(str(path)) for path in twins(tmp_path, kind, dtype))
    wanted = loading.load_model(plain, dtype, CPU)
    whole, streamed = loading.load_model(packed, dtype, CPU), StreamedModel(packed, dtype, CPU)
    weights = whole.state_dict()
    for name, weight in wanted.state_dict().items():
        assert weights[name].dtype == weight.dtype
        assert torch.equal(weights[name], weight), name
    for weight in wanted.parameters():  # from a file's pages to memory, as those that are dequantized: products of
        weight.data = weight.data.clone()  # weights that begin elsewhere in a cache line may have other last bits
    with torch.no_grad():
        logits = wanted(input_ids=IDS).logits
        assert torch.equal(whole(input_ids=IDS).logits, logits)
        assert torch.equal(streamed.model(input_ids=IDS).logits, logits)
    assert streamed.bytes_read == sum(header.bytes for header in packed.tensors.values())
    assert loading.source_dtype(packed) == torch.bfloat16
    assert loading.loaded_bytes(packed, dtype) == sum(w.numel() for w in wanted.state_dict().values()) * dtype.itemsize


def test_a_head_that_config_json_ties_is_the_embeddings(tmp_path: Path) -> None:
    plain, packed = (
        open_source(str(path)) for path in save_fp8(tmp_path, "qwen3_moe", torch.bfloat16, tie_word_embeddings=True)
    )
    assert "lm_head.weight" not in packed.tensors
    model = loading.load_model(packed, torch.bfloat16, CPU)
    assert torch.equal(
        model(input_ids=IDS).logits, loading.load_model(plain, torch.bfloat16, CPU)(input_ids=IDS).logits
    )


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "llama4_text"])
def test_expert_keys_hold_codes_and_scales(kind: str, tmp_path: Path) -> None:
    source = open_source(str(twins(tmp_path, kind, torch.bfloat16)[1]))
    model = loading.skeleton(source)
    found = loading.expert_keys(source, model, find_expert_layers(model))
    part = {"deepseek_v3": ".mlp.experts.", "gpt_oss": "_proj_", "llama4_text": ".experts."}[kind]
    assert found == {key for key in source.tensors if part in key}
    assert any("scale" in key for key in found)


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss"])
def test_plain_tensors_are_those_of_the_dequantized_model(kind: str, tmp_path: Path) -> None:
    plain, packed = (open_source(str(path)) for path in twins(tmp_path, kind, torch.bfloat16))
    scales = scale_keys(packed)
    assert scales == {key for key in packed.tensors if "_scale" in key}
    assert scale_keys(plain) == set()
    keys = {key for key in packed.tensors if key in plain.tensors}
    assert keys | scales | {key for key in packed.tensors if key.endswith("_blocks")} == set(packed.tensors)
    headers = {key: plain_header(packed, key) for key in keys}
    write_in_chunks(tmp_path / "found.safetensors", headers, lambda key: plain_chunks(packed, key))
    values, wanted = load_file(tmp_path / "found.safetensors"), load_file(plain.path / "model.safetensors")
    assert all(torch.equal(values[key], wanted[key]) and values[key].dtype == wanted[key].dtype for key in keys)


def test_a_missing_scale_is_not_passed_over(tmp_path: Path) -> None:
    folder = save_fp8(tmp_path, "deepseek_v3", torch.bfloat16)[1]
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"o_proj\.weight has no scales"):
        loading.load_model(open_source(str(folder)), torch.bfloat16, CPU)


@pytest.mark.parametrize("method", ["gptq", "awq", "hqq", "bitsandbytes", "moeq", "compressed-tensors"])
def test_other_quantized_checkpoints_are_refused_in_one_line(method: str, tiny_mixtral: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_mixtral, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    declared = {"quantization_config": {"quant_method": method, "bits": 4}}
    config.write_text(json.dumps(json.loads(config.read_text()) | declared))
    source = open_source(str(tmp_path / "model"))
    for make in (loading.skeleton, lambda it: StreamedModel(it, torch.float32, CPU)):
        with pytest.raises(ModelError, match=rf"already quantized \({method}\)") as caught:
            make(source)
        assert "\n" not in str(caught.value)
        assert ("moeq convert" in str(caught.value)) is (method not in ("hqq", "bitsandbytes"))  # what it would refuse


@pytest.mark.parametrize(("method", "codes"), [("moeq", "codes"), ("gptq", "qweight"), ("pack", "weight_packed")])
def test_the_type_of_a_packed_checkpoint_is_that_of_what_is_not_packed(method: str, codes: str, tmp_path: Path) -> None:
    """However many more bytes its codes have; moeq's also beside float16 scales."""
    save_fp8(tmp_path, "qwen3_moe", torch.bfloat16)
    folder = tmp_path / "other"
    shutil.copytree(next(path.parent for path in tmp_path.rglob("config.json")), folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    parts = {codes: torch.zeros(64, 64, dtype=torch.uint8 if method == "moeq" else torch.int32)}
    if method == "moeq":
        parts["scales"] = torch.ones(64, 8, dtype=torch.float16)
    packed = {f"model.layers.0.mlp.experts.0.up_proj.{name}": part for name, part in parts.items()}
    save_file(packed | {"model.norm.weight": torch.ones(32, dtype=torch.bfloat16)}, folder / "model.safetensors")
    source = open_source(str(folder))
    assert loading.source_dtype(source) == torch.bfloat16
    assert loading.compute_dtype(source, "auto", CPU) == torch.bfloat16
