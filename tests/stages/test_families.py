"""Other families of pattern P0, from random tiny models: the whole run, and the export loads back equal.

The README's table of families lists exactly these.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import family_models
import pytest
import torch
import transformers

from moeq import inspection, pipeline
from moeq.bundled import bundled_path
from moeq.errors import ModelError
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import evaluate
from moeq.stages.context import Context

COMMON: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "num_experts_per_tok": 2,
}  # fmt: skip
SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "OLMoE": ("Olmoe", {"intermediate_size": 24, "num_experts": 6}),
    "Qwen2-MoE": (
        "Qwen2Moe",
        {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 32, "intermediate_size": 48, "num_experts": 6},
    ),
    "DeepSeek-V3": (
        "DeepseekV3",
        SHARED
        | {"intermediate_size": 48, "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4},
    ),
    "GLM-4-MoE": ("Glm4Moe", SHARED | {"intermediate_size": 48, "head_dim": 8}),
    "PhiMoE": ("Phimoe", {"intermediate_size": 24, "num_local_experts": 6}),
    "GraniteMoE": ("GraniteMoe", {"intermediate_size": 24, "num_local_experts": 6}),
}
SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=48", "losses.group_size=16", "eval.perplexity.sequences=4",
    "eval.perplexity.sequence_length=48", "eval.compare=[]", "estimate.grid.inputs=[128]",
)  # fmt: skip


def save(folder: Path, name: str, sizes: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON | sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_path("tiny-mixtral") / file, folder / file)
    return folder


@pytest.mark.parametrize("family", list(FAMILIES))
def test_runs_and_loads_back(family: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", *FAMILIES[family])
    context = Context(
        recipe=load_recipe(None, SMALL), model_name=str(folder), out=tmp_path / "run", reporter=Reporter(quiet=True)
    )
    pipeline.run(context)
    assert evaluate.load(context).export_logit_error < 1e-5
    assert inspection.inspect(context.directory("export"))["check"].startswith("every size")
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    assert family in readme


def test_refused_families_say_why_and_write_nothing(tmp_path: Path) -> None:
    folder = family_models.save("doge", tmp_path / "model")
    context = Context(recipe=load_recipe(None, SMALL), model_name=str(folder), out=tmp_path / "run")
    with pytest.raises(ModelError, match="rows of two embeddings"):
        pipeline.run(context)
    assert not (tmp_path / "run").exists()
