"""A tiny random Qwen3-VL-MoE with its processor: the bundled tokenizer with vision tokens, patches of four pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moeq.bundled import bundled_path

TOKENS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
          "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def vision_tokenizer() -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled_path("tiny-mixtral"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS.values())})
    return tokenizer


def vision_processor(template: str | None = TEMPLATE) -> Any:
    """The family's processor without its part for videos, which needs torchvision."""
    from transformers import Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class ImagesOnly(Qwen3VLProcessor):
        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
            super().__init__(image_processor, tokenizer, None, chat_template)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    return ImagesOnly(images, vision_tokenizer(), template)


def vision_model() -> Any:
    """Two layers of seven experts; hidden 40 and intermediate 24, so that nothing is square."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    tokenizer = vision_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 40, "intermediate_size": 56, "moe_intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 7,
        "num_experts_per_tok": 3, "max_position_embeddings": 256, "rope_parameters": rope, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 40, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    torch.manual_seed(0)
    model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision, **ids))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.normal_(std=0.15)
    return model.eval()


def save_image(path: Path, seed: int, size: tuple[int, int] = (40, 24)) -> Path:
    """Coloured noise, width x height."""
    import numpy as np
    from PIL import Image

    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)).save(path)
    return path
