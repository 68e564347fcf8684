"""The configuration of `moe_vit`, registered with AutoConfig where this module is imported."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

MODEL_TYPE = "moe_vit"
GATINGS = ("softmax_over_topk", "topk_over_softmax")
POOLINGS = ("cls", "mean")


@strict
class MoeViTConfig(PreTrainedConfig):  # type: ignore[misc]
    """Sizes of the model; images are square.

    moe_layers: the blocks whose MLP is a mixture of experts, [] for a plain ViT. gating: `softmax_over_topk` takes the
    softmax of the chosen experts' logits alone, so that routing weights sum to one, `topk_over_softmax` the largest
    values of the softmax over all. num_tasks: with more than one, every mixture has a router a task, and with
    `num_labels` a list there is a head a task too (`task_labels`). pixel_scale: what pixels as files have them are
    multiplied by; the model is given the products. Raises ValueError for sizes that do not go together.
    """

    model_type = MODEL_TYPE

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    hidden_size: int = 384
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    intermediate_size: int = 1536
    moe_layers: list[int] | tuple[int, ...] = ()
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 384
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    pooling: str = "cls"
    gating: str = "softmax_over_topk"
    qkv_bias: bool = True
    router_bias: bool = False
    pixel_scale: float = 1 / 255
    num_tasks: int = 1
    task_labels: list[int] | tuple[int, ...] | None = None
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(kwargs.get("num_labels"), list | tuple):
            self.task_labels = list(kwargs["num_labels"])
            kwargs["num_labels"] = self.task_labels[0] if self.task_labels else 0
        self.moe_layers = list(self.moe_layers)
        super().__post_init__(**kwargs)
        problem = self._problem()
        if problem is not None:
            raise ValueError(problem)

    def _problem(self) -> str | None:
        """What does not go together, None where all does."""
        sizes = ("image_size", "patch_size", "num_channels", "hidden_size", "num_attention_heads", "intermediate_size",
                 "num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_tasks")  # fmt: skip
        wrong = next((name for name in sizes if getattr(self, name) < 1), None)
        problems = {
            f"{wrong} must be at least 1": wrong is not None,
            f"gating is {self.gating!r}, not one of {', '.join(GATINGS)}": self.gating not in GATINGS,
            f"pooling is {self.pooling!r}, not one of {', '.join(POOLINGS)}": self.pooling not in POOLINGS,
            f"moe_layers {self.moe_layers} are not different numbers of the {self.num_hidden_layers} blocks": (
                len(set(self.moe_layers)) != len(self.moe_layers)
                or any(not 0 <= layer < self.num_hidden_layers for layer in self.moe_layers)
            ),
            f"num_experts_per_tok is {self.num_experts_per_tok}, there are {self.num_experts} experts": (
                self.num_experts_per_tok > self.num_experts
            ),
            f"num_labels has {len(self.task_labels or ())} tasks, num_tasks is {self.num_tasks}": (
                self.task_labels is not None and len(self.task_labels) != self.num_tasks
            ),
        }
        divides = {("image_size", "patch_size"), ("hidden_size", "num_attention_heads")} if wrong is None else ()
        for whole, part in divides:
            text = f"{whole} {getattr(self, whole)} is no multiple of {part} {getattr(self, part)}"
            problems[text] = getattr(self, whole) % getattr(self, part) != 0
        return next((text for text, there in problems.items() if there), None)

    @property
    def num_positions(self) -> int:
        """Patches of an image, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


AutoConfig.register(MODEL_TYPE, MoeViTConfig)
