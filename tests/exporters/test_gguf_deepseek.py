"""DeepSeek-V3 in GGUF, with all that sets it apart: latent attention (MLA) of a low rank, yarn with mscale, a dense
first layer, shared experts, groups of experts chosen by corrected sigmoids, scaled routing weights.

Skipped where gguf, or llama-cpp-python, is not installed.
"""

from __future__ import annotations

import json
from pathlib import Path

import peers
import pytest
import torch
from made_sources import MadeSource, reference, reference_logits, save_model
from safetensors.torch import load_file, save_file

from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.gguf import FILE, REFIT
from moeq.progress import Reporter
from moeq.verification.verify import Options, require, verify

RIGHT = 0.002
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
SETTINGS = {
    "hidden_size": 256, "moe_intermediate_size": 256, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "n_shared_experts": 2,
    "num_hidden_layers": 3, "rope_parameters": YARN, "max_position_embeddings": 128,
}  # fmt: skip
WIDTHS = {"gate_proj": (2, 4), "up_proj": (3, 2), "down_proj": (4, 8)}


def mixed(layer: int, expert: int, projection: str) -> int:
    return WIDTHS[projection][layer % 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32, with corrections of the routing that change which experts are chosen."""
    folder = save_model(tmp_path_factory.mktemp("deepseek") / "model", "deepseek_v3", **SETTINGS)
    tensors = {key: tensor.float() for key, tensor in load_file(folder / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(1)
    for key in [key for key in tensors if key.endswith("e_score_correction_bias")]:
        tensors[key] = torch.randn(tensors[key].shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}), "utf-8")
    return folder


def exported(name: str, source: MadeSource, out: Path) -> Path:
    peers.module("gguf")
    write(name, source, out, WriteOptions())
    return out


def test_its_metadata_and_tensors(model: Path, tmp_path: Path) -> None:
    source = MadeSource(model, lambda *place: 16)
    gguf = peers.module("gguf")
    reader = gguf.GGUFReader(exported("llama.cpp", source, tmp_path / "out") / FILE)
    said = {key: field.contents() for key, field in reader.fields.items() if key.startswith("deepseek2.")}
    wanted = {
        "leading_dense_block_count": 1, "expert_count": 8, "expert_used_count": 3, "expert_shared_count": 2,
        "expert_weights_scale": 2.5, "expert_gating_func": 2, "expert_group_count": 4, "expert_group_used_count": 2,
        "attention.q_lora_rank": 64, "attention.kv_lora_rank": 64, "attention.key_length": 96,
        "attention.value_length": 64, "attention.key_length_mla": 64, "attention.value_length_mla": 32,
        "attention.head_count_kv": 1, "rope.dimension_count": 32, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
    }  # fmt: skip
    assert {key: said[f"deepseek2.{key}"] for key in wanted} == wanted
    assert said["deepseek2.rope.scaling.yarn_log_multiplier"] == pytest.approx(0.1)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    weights = load_file(model / "model.safetensors")
    both = weights["model.layers.1.self_attn.kv_b_proj.weight"].view(4, 32 + 32, 64)
    keys, values = (torch.from_numpy(tensors[f"blk.1.attn_{name}_b.weight"].data.copy()) for name in "kv")
    assert torch.equal(keys, both[:, :32].mT)
    assert torch.equal(values, both[:, 32:])
    bias = torch.from_numpy(tensors["blk.1.exp_probs_b.bias"].data.copy())
    assert torch.equal(bias, weights["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert bool(bias.any())
    assert "blk.0.ffn_gate.weight" in tensors
    assert "blk.0.ffn_gate_exps.weight" not in tensors
    assert "blk.1.ffn_gate_shexp.weight" in tensors


def test_llama_cpp_computes_and_generates_as_transformers_does(model: Path, tmp_path: Path) -> None:
    peers.interpreter("llama-cpp-python")
    source = MadeSource(model, lambda *place: 16)
    out = exported("llama.cpp", source, tmp_path / "out")
    from made_sources import IDS

    save_file({"ids": IDS}, tmp_path / "ids.safetensors")
    logits = peers.load("llama-cpp-python", "llama.cpp", [out], tmp_path / "ids.safetensors")[0]
    assert not isinstance(logits, str), logits
    wanted = reference_logits(source)
    assert float((logits - wanted).norm() / wanted.norm()) < RIGHT
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
    job = {"model": str(out / FILE), "text": "The fox said: naïve café", "tokens": 8}
    (tmp_path / "job.json").write_text(json.dumps(job))
    found = json.loads(peers.run("llama-cpp-python", Path(__file__).parent / "peer_llama.py", tmp_path / "job.json"))
    ids = torch.tensor([found["ids"]])
    generated = reference(source).generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found["generated"] == generated[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(("name", "group", "symmetric"), [("llama.cpp", 256, True), (REFIT, 64, False)])
def test_llama_cpp_computes_packed_experts(name: str, group: int, symmetric: bool, model: Path, tmp_path: Path) -> None:
    """Other widths for every layer and matrix: exact, and with rounded scales, as moeq reads the file."""
    python = peers.interpreter("llama-cpp-python")
    source = MadeSource(model, mixed, group_size=group, symmetric=symmetric)
    out = exported(name, source, tmp_path / "out")
    require(verify(out, Options(target="llama.cpp", python=str(python)), Reporter(quiet=True)))
