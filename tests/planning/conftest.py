"""Checkpoints whose weights are not there: right headers, and data that is one hole in a sparse file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moeq.bundled import bundled_path


def save_sparse(folder: Path, *, layers: int, experts: int, hidden: int, inner: int) -> Path:
    """A Qwen3-MoE checkpoint in bfloat16 that takes no room on the disk."""
    from transformers import Qwen3MoeConfig

    vocabulary, heads = 151936, 4096
    config = Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=experts, num_experts_per_tok=8, moe_intermediate_size=inner,
        intermediate_size=4 * inner, max_position_embeddings=40960, architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_path("tiny-mixtral") / name, folder / name)
    where: dict[str, str] = {}

    def write(file: str, shapes: dict[str, tuple[int, ...]]) -> None:
        header, end = {}, 0
        for key, shape in shapes.items():
            size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
            header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
            where[key] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)

    write(
        "rest.safetensors",
        {
            "model.embed_tokens.weight": (vocabulary, hidden),
            "lm_head.weight": (vocabulary, hidden),
            "model.norm.weight": (hidden,),
        },
    )
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}self_attn.q_proj.weight": (heads, hidden),
            f"{prefix}self_attn.k_proj.weight": (512, hidden),
            f"{prefix}self_attn.v_proj.weight": (512, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads),
            f"{prefix}self_attn.q_norm.weight": (128,),
            f"{prefix}self_attn.k_norm.weight": (128,),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}mlp.gate.weight": (experts, hidden),
        }
        for expert in range(experts):
            at = f"{prefix}mlp.experts.{expert}."
            shapes |= {f"{at}{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
            shapes[f"{at}down_proj.weight"] = (hidden, inner)
        write(f"model-{layer:05d}.safetensors", shapes)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.fixture(scope="session")
def sparse_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 GiB: 6 layers of 128 experts 4096 x 1024."""
    return save_sparse(tmp_path_factory.mktemp("sparse") / "small", layers=6, experts=128, hidden=4096, inner=1024)


@pytest.fixture(scope="session")
def sparse_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """217 GiB: 70 layers of 128 experts 4096 x 1024."""
    return save_sparse(tmp_path_factory.mktemp("sparse") / "big", layers=70, experts=128, hidden=4096, inner=1024)
