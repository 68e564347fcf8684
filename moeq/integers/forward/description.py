"""A vision transformer as plain float64 weights: what the integer forward is made of, whatever the model's class.

Letters: C channels of an image, P side of a patch, N patches, S positions (class tokens in front, then the patches),
D hidden size, I intermediate size, E experts, L labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moeq.errors import ModelError

Activation = Callable[[Tensor], Tensor]
KNOWN = "moe_vit, ViTForImageClassification and DeiTForImageClassification"


@dataclass(frozen=True, kw_only=True)
class Linear:
    """weight [out, in] or [E, out, in], bias without the last axis (zeros where the model has none)."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A LayerNorm; path: the module's name in its model."""

    path: str
    weight: Tensor
    bias: Tensor
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """fc2(activation(fc1(x)))."""

    up: Linear
    down: Linear
    activation: Activation


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The top_k experts of a router; over: whether the softmax is over the chosen experts' logits or over all."""

    router: Linear
    up: Linear
    down: Linear
    activation: Activation
    top_k: int
    over: str


@dataclass(frozen=True, kw_only=True)
class Block:
    """x + proj(attention(norm1(x))), then x + update(norm2(x)). query, key, value: [D, D]."""

    norm1: Norm
    query: Linear
    key: Linear
    value: Linear
    proj: Linear
    norm2: Norm
    update: Mlp | Mixture


@dataclass(frozen=True, kw_only=True)
class ViT:
    """patch: weight [D, C*P*P]; prefix: the tokens before the patches with their positions [n, D]; position [N, D].

    pooling: `cls` takes position 0, `mean` the patches' mean. pixel_scale: what whole-numbered pixels were multiplied
    by to give the model's inputs, None where that is not known.
    """

    patch: Linear
    patch_size: int
    image_shape: tuple[int, int, int]
    prefix: Tensor
    position: Tensor
    blocks: tuple[Block, ...]
    norm: Norm
    pooling: str
    head: Linear
    num_heads: int
    pixel_scale: float | None


def is_known(model: nn.Module) -> bool:
    """Whether `describe` knows the model's class."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return kind == "moe_vit" or (kind in {"vit", "deit"} and hasattr(model, "classifier"))


def describe(model: nn.Module, task: int = 0) -> ViT:
    """The description of a model of a known class; ModelError for others and for what the integer forward lacks.

    task: of models with a router, or a head, a task.
    """
    config: Any = getattr(model, "config", None)
    if not is_known(model):
        raise ModelError(f"{type(model).__name__} has no integer forward", do=f"known are {KNOWN}")
    tasks = getattr(config, "num_tasks", 1)
    if not 0 <= task < tasks:
        raise ModelError(f"task {task} of a model with {tasks}", do=f"give 0 to {tasks - 1}")
    if config.model_type == "moe_vit":
        return _moe_vit(model, config, task)
    return _transformers(model, config, config.model_type)


def _double(parameter: Any) -> Tensor:
    tensor: Tensor = parameter.detach().to("cpu", torch.float64)
    return tensor


def _linear(module: Any) -> Linear:
    weight = _double(module.weight)
    return Linear(weight=weight, bias=weight.new_zeros(len(weight)) if module.bias is None else _double(module.bias))


def _norm(module: Any, path: str) -> Norm:
    return Norm(path=path, weight=_double(module.weight), bias=_double(module.bias), epsilon=float(module.eps))


def _patch(module: Any) -> Linear:
    return Linear(weight=_double(module.weight).flatten(1), bias=_double(module.bias))


def _moe_vit(model: Any, config: Any, task: int) -> ViT:
    position = _double(model.pos_embed)[0]
    blocks = tuple(_moe_block(block, config, f"blocks.{i}", task) for i, block in enumerate(model.blocks))
    return ViT(
        patch=_patch(model.patch_embed),
        patch_size=config.patch_size,
        image_shape=(config.num_channels, config.image_size, config.image_size),
        prefix=_double(model.cls_token)[0] + position[:1],
        position=position[1:],
        blocks=blocks,
        norm=_norm(model.norm, "norm"),
        pooling=config.pooling,
        head=_linear(model.heads[task] if hasattr(model, "heads") else model.head),
        num_heads=config.num_attention_heads,
        pixel_scale=float(config.pixel_scale),
    )


def _moe_block(block: Any, config: Any, path: str, task: int) -> Block:
    whole = _linear(block.attn.qkv)
    query, key, value = (
        Linear(weight=weight, bias=bias)
        for weight, bias in zip(whole.weight.chunk(3), whole.bias.chunk(3), strict=True)
    )
    if hasattr(block, "moe"):
        experts = block.moe.experts
        update: Mlp | Mixture = Mixture(
            router=_linear(block.moe.routers[task] if hasattr(block.moe, "routers") else block.moe.router),
            up=Linear(weight=_double(experts.up_proj), bias=_double(experts.up_proj_bias)),
            down=Linear(weight=_double(experts.down_proj), bias=_double(experts.down_proj_bias)),
            activation=experts.act_fn,
            top_k=config.num_experts_per_tok,
            over="chosen" if config.gating == "softmax_over_topk" else "all",
        )
    else:
        update = Mlp(up=_linear(block.mlp.fc1), down=_linear(block.mlp.fc2), activation=block.mlp.act_fn)
    return Block(
        norm1=_norm(block.norm1, f"{path}.norm1"),
        query=query,
        key=key,
        value=value,
        proj=_linear(block.attn.proj),
        norm2=_norm(block.norm2, f"{path}.norm2"),
        update=update,
    )


def _transformers(model: Any, config: Any, kind: str) -> ViT:
    inner = getattr(model, kind)
    position = _double(inner.embeddings.position_embeddings)[0]
    tokens = [inner.embeddings.cls_token]
    if kind == "deit":
        tokens.append(inner.embeddings.distillation_token)
    projection = inner.embeddings.patch_embeddings.projection
    prefix = torch.cat([_double(token)[0] for token in tokens])
    height, width = inner.embeddings.image_size
    if projection.kernel_size[0] != projection.kernel_size[1]:
        raise ModelError(f"patches of {projection.kernel_size} are not square", do="set integer: null for this model")
    return ViT(
        patch=_patch(projection),
        patch_size=projection.kernel_size[0],
        image_shape=(config.num_channels, height, width),
        prefix=prefix + position[: len(prefix)],
        position=position[len(prefix) :],
        blocks=tuple(_layer(layer, f"{kind}.layers.{i}") for i, layer in enumerate(inner.layers)),
        norm=_norm(inner.layernorm, f"{kind}.layernorm"),
        pooling="cls",
        head=_linear(model.classifier),
        num_heads=config.num_attention_heads,
        pixel_scale=None,
    )


def _layer(layer: Any, path: str) -> Block:
    return Block(
        norm1=_norm(layer.layernorm_before, f"{path}.layernorm_before"),
        query=_linear(layer.attention.q_proj),
        key=_linear(layer.attention.k_proj),
        value=_linear(layer.attention.v_proj),
        proj=_linear(layer.attention.o_proj),
        norm2=_norm(layer.layernorm_after, f"{path}.layernorm_after"),
        update=Mlp(up=_linear(layer.mlp.fc1), down=_linear(layer.mlp.fc2), activation=layer.mlp.activation_fn),
    )
