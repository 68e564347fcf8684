"""The model `moe_vit`, registered with AutoModelForImageClassification where this module is imported.

On disk every expert is a pair of linears, `blocks.{i}.moe.experts.{e}.fc1` and `.fc2`; in memory the experts of a layer
are stacks, which transformers' own conversion makes of them and takes apart again when the model is saved.

Letters: B images, C channels, S positions (the class token and the patches), T tokens (B*S), D hidden size,
I intermediate size, E experts, k experts a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForImageClassification

from moeq.integers.vit.configuration import MODEL_TYPE, MoeViTConfig


class MoeViTAttention(nn.Module):
    """Attention of every position to every position; q, k and v of all heads come from one linear."""

    def __init__(self, config: MoeViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.qkv_bias)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        batch, positions, size = hidden.shape
        split = self.qkv(hidden).view(batch, positions, 3, self.num_heads, size // self.num_heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, positions, size))
        return output


class MoeViTMLP(nn.Module):
    """The MLP of a block without experts."""

    def __init__(self, config: MoeViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        output: Tensor = self.fc2(self.act_fn(self.fc1(hidden)))
        return output


class MoeViTExperts(nn.Module):
    """All experts of a layer: up_proj [E, I, D] and down_proj [E, D, I] with biases, the activation between them."""

    def __init__(self, config: MoeViTConfig) -> None:
        super().__init__()
        experts, size, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.up_proj = nn.Parameter(torch.empty(experts, inner, size))
        self.up_proj_bias = nn.Parameter(torch.empty(experts, inner))
        self.down_proj = nn.Parameter(torch.empty(experts, size, inner))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, size))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, D], chosen experts [T, k] and their weights [T, k] -> weighted sum of their outputs [T, D]."""
        result = torch.zeros_like(hidden)
        for expert in torch.unique(index).tolist():
            token, place = torch.where(index == expert)
            inner = self.act_fn(functional.linear(hidden[token], self.up_proj[expert], self.up_proj_bias[expert]))
            output = functional.linear(inner, self.down_proj[expert], self.down_proj_bias[expert])
            result.index_add_(0, token, (output * weights[token, place, None]).to(result.dtype))
        return result


class MoeViTMixture(nn.Module):
    """A router, or one a task, and the experts that it chooses from."""

    def __init__(self, config: MoeViTConfig) -> None:
        super().__init__()
        self.top_k, self.gating = config.num_experts_per_tok, config.gating
        made = [nn.Linear(config.hidden_size, config.num_experts, bias=config.router_bias)
                for _ in range(config.num_tasks)]  # fmt: skip
        if config.num_tasks == 1:
            self.router = made[0]
        else:
            self.routers = nn.ModuleList(made)
        self.experts = MoeViTExperts(config)

    def choose(self, hidden: Tensor, task: int) -> tuple[Tensor, Tensor]:
        """hidden [T, D] -> experts [T, k] and routing weights [T, k]; softmax in float32."""
        router = self.router if hasattr(self, "router") else self.routers[task]
        logits = router(hidden).float()
        if self.gating == "softmax_over_topk":
            top, index = logits.topk(self.top_k, -1)
            return index, top.softmax(-1).to(hidden.dtype)
        top, index = logits.softmax(-1).topk(self.top_k, -1)
        return index, top.to(hidden.dtype)

    def forward(self, hidden: Tensor, task: int) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        tokens = hidden.flatten(0, -2)
        index, weights = self.choose(tokens, task)
        output: Tensor = self.experts(tokens, index, weights)
        return output.view_as(hidden)


class MoeViTBlock(nn.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x)), or the mixture of experts in the MLP's place."""

    def __init__(self, config: MoeViTConfig, number: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attn = MoeViTAttention(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        if number in config.moe_layers:
            self.moe = MoeViTMixture(config)
        else:
            self.mlp = MoeViTMLP(config)

    def forward(self, hidden: Tensor, task: int = 0) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        hidden = hidden + self.attn(self.norm1(hidden))
        normed = self.norm2(hidden)
        update: Tensor = self.moe(normed, task) if hasattr(self, "moe") else self.mlp(normed)
        return hidden + update


class MoeViTForImageClassification(PreTrainedModel):  # type: ignore[misc]
    """Patches and a class token through the blocks; a linear on the class token (or the patches' mean) gives logits."""

    config_class = MoeViTConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules = ("MoeViTBlock",)
    _supports_sdpa = True

    def __init__(self, config: MoeViTConfig) -> None:
        super().__init__(config)
        size, patch = config.hidden_size, config.patch_size
        self.cls_token = nn.Parameter(torch.empty(1, 1, size))
        self.pos_embed = nn.Parameter(torch.empty(1, config.num_positions, size))
        self.patch_embed = nn.Conv2d(config.num_channels, size, patch, patch)
        self.blocks = nn.ModuleList(MoeViTBlock(config, number) for number in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        if config.task_labels is None:
            self.head = nn.Linear(size, config.num_labels)
        else:
            self.heads = nn.ModuleList(nn.Linear(size, labels) for labels in config.task_labels)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """What makes hidden states of patches."""
        return self.patch_embed

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        deviation = self.config.initializer_range
        if isinstance(module, MoeViTExperts):
            for matrices, biases in ((module.up_proj, module.up_proj_bias), (module.down_proj, module.down_proj_bias)):
                init.normal_(matrices, std=deviation)
                init.zeros_(biases)
        elif module is self:
            init.normal_(self.cls_token, std=deviation)
            init.normal_(self.pos_embed, std=deviation)

    def forward(self, pixel_values: Tensor, task: int = 0, **_: Any) -> ImageClassifierOutput:
        """pixel_values [B, C, image_size, image_size], as pixel_scale makes them -> logits [B, labels].

        task: whose routers and head are used. Raises ValueError for images of another shape and an unknown task.
        """
        config = self.config
        wanted = (config.num_channels, config.image_size, config.image_size)
        if pixel_values.dim() != 4 or tuple(pixel_values.shape[1:]) != wanted:
            raise ValueError(
                f"pixel_values are {list(pixel_values.shape)}, [images, {', '.join(map(str, wanted))}] are wanted"
            )
        if not 0 <= task < config.num_tasks:
            raise ValueError(f"task {task} of {config.num_tasks}")
        hidden = self.patch_embed(pixel_values).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.cls_token.expand(len(hidden), -1, -1), hidden], 1) + self.pos_embed
        for block in self.blocks:
            hidden = block(hidden, task)
        hidden = self.norm(hidden)
        pooled = hidden[:, 0] if config.pooling == "cls" else hidden[:, 1:].mean(1)
        return ImageClassifierOutput(logits=self.head(pooled) if hasattr(self, "head") else self.heads[task](pooled))


STACKS = {"fc1.weight": "up_proj", "fc1.bias": "up_proj_bias", "fc2.weight": "down_proj", "fc2.bias": "down_proj_bias"}
register_checkpoint_conversion_mapping(
    MODEL_TYPE,
    [
        WeightConverter(f".experts.*.{source}", f".experts.{stack}", operations=[MergeModulelist(dim=0)])
        for source, stack in STACKS.items()
    ],
)
AutoModelForImageClassification.register(MoeViTConfig, MoeViTForImageClassification)
