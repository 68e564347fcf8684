"""The float64 forward of a description, and what calibration takes from it.

Letters: B images, S positions, T tokens (B*S), h heads, d head size, k chosen experts; others as in description.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from moeq.errors import ModelError, NotFiniteError, QuantizationError
from moeq.integers.arithmetic.reparam import asymmetric_quantizer, channel_range, fold_of, folded_linear, folded_norm
from moeq.integers.forward.description import Block, Linear, Mixture, Mlp, Norm, ViT

Observe = Callable[[str, Tensor], None]
BATCH = 64  # images at once where only the largest magnitude counts
WHOLE = ("pixels", "residual", "logits", ".router", ".attention_weights")  # never clipped by a percentile
AGREEMENT = 1e-4  # relative, of the description's logits with the model's, which are float32


def patches_of(pixels: Tensor, patch_size: int) -> Tensor:
    """[B, C, H, W] -> [B, N, C*P*P], patches row by row, inside of one channels, rows, columns."""
    channels = pixels.shape[1]
    cut = pixels.unfold(2, patch_size, patch_size).unfold(3, patch_size, patch_size)  # [B, C, H/P, W/P, P, P]
    return cut.permute(0, 2, 3, 1, 4, 5).reshape(len(pixels), -1, channels * patch_size**2)


def forward(vit: ViT, pixels: Tensor, observe: Observe) -> Tensor:
    """Logits [B, L] of pixels [B, C, H, W], float64; observe is told the tensors that quantizers stand at."""
    pixels = pixels.double()
    observe("pixels", pixels)
    hidden = _apply(vit.patch, patches_of(pixels, vit.patch_size)) + vit.position
    hidden = torch.cat([vit.prefix.expand(len(hidden), -1, -1), hidden], 1)
    observe("residual", hidden)
    for number, block in enumerate(vit.blocks):
        hidden = _block(block, hidden, vit.num_heads, f"blocks.{number}", observe)
    normed = _norm(vit.norm, hidden)
    observe("norm", normed)
    pooled = normed[:, 0] if vit.pooling == "cls" else normed[:, len(vit.prefix) :].mean(1)
    observe("pooled", pooled)
    logits = _apply(vit.head, pooled)
    observe("logits", logits)
    return logits


def _apply(linear: Linear, values: Tensor) -> Tensor:
    return values @ linear.weight.mT + linear.bias


def _norm(norm: Norm, values: Tensor) -> Tensor:
    return functional.layer_norm(values, values.shape[-1:], norm.weight, norm.bias, norm.epsilon)


def _block(block: Block, hidden: Tensor, num_heads: int, name: str, observe: Observe) -> Tensor:
    normed = _norm(block.norm1, hidden)
    observe(f"{name}.norm1", normed)
    parts = {"query": block.query, "key": block.key, "value": block.value}
    made = {part: _apply(linear, normed) for part, linear in parts.items()}
    for part, values in made.items():
        observe(f"{name}.{part}", values)
    query, key, value = (values.unflatten(-1, (num_heads, -1)).transpose(1, 2) for values in made.values())
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    observe(f"{name}.attention_weights", weights)
    mixed = (weights @ value).transpose(1, 2).flatten(2)
    observe(f"{name}.attention", mixed)
    hidden = hidden + _apply(block.proj, mixed)
    observe("residual", hidden)
    normed = _norm(block.norm2, hidden)
    observe(f"{name}.norm2", normed)
    update = block.update
    changed = _mlp(update, normed, name, observe) if isinstance(update, Mlp) else _mix(update, normed, name, observe)
    hidden = hidden + changed
    observe("residual", hidden)
    return hidden


def _mlp(mlp: Mlp, normed: Tensor, name: str, observe: Observe) -> Tensor:
    inner = _apply(mlp.up, normed)
    observe(f"{name}.up", inner)
    active = mlp.activation(inner)
    observe(f"{name}.active", active)
    return _apply(mlp.down, active)


def _mix(mixture: Mixture, normed: Tensor, name: str, observe: Observe) -> Tensor:
    tokens = normed.flatten(0, -2)
    logits = _apply(mixture.router, tokens)
    observe(f"{name}.router", logits)
    top, index = logits.topk(mixture.top_k, -1)
    weights = top.softmax(-1) if mixture.over == "chosen" else logits.softmax(-1).gather(-1, index)
    result = torch.zeros_like(tokens)
    inner, outputs = [], []
    for expert in index.unique().tolist():
        token, place = torch.where(index == expert)
        inner.append(tokens[token] @ mixture.up.weight[expert].T + mixture.up.bias[expert])
        active = mixture.activation(inner[-1])
        outputs.append(active @ mixture.down.weight[expert].T + mixture.down.bias[expert])
        result.index_add_(0, token, outputs[-1] * weights[token, place, None])
    observe(f"{name}.up", torch.cat(inner))
    observe(f"{name}.active", mixture.activation(torch.cat(inner)))
    observe("residual", torch.cat(outputs))
    return result.view_as(normed)


def measured(vit: ViT, pixels: Tensor, percentile: float | None) -> dict[str, float]:
    """The magnitude of every observed tensor: the largest, or the percentile of magnitudes over all of its numbers.

    pixels: calibration images [B, C, H, W]; names: as `forward` tells them.
    Residual stream, logits and softmax keep the largest. Raises QuantizationError naming a tensor that is always zero
    or not finite.
    """
    sizes: dict[str, float] = {}

    def observe(name: str, values: Tensor) -> None:
        magnitudes = values.abs().flatten()
        if percentile is None or name.endswith(WHOLE):
            size = float(magnitudes.max())
        else:
            size = float(magnitudes.kthvalue(max(1, round(percentile / 100 * len(magnitudes)))).values)
        sizes[name] = max(size, sizes.get(name, 0.0))

    with torch.no_grad():
        for part in [pixels] if percentile is not None else pixels.split(BATCH):
            forward(vit, part, observe)
    for name, size in sizes.items():
        if not 0 < size < float("inf"):
            problem = "always zero" if size == 0 else "not finite"
            raise QuantizationError(
                f"{name} is {problem} in calibration",
                where="integer",
                do="check images and weights, or set integer: null",
            )
    return sizes


def check_description(vit: ViT, pixels: Tensor, logits: Tensor) -> float:
    """The relative difference of the description's logits from the model's; ModelError where they are not the same.

    pixels: [B, C, H, W]; logits: the model's of them, [B, L]. Raises NotFiniteError where the description's are not.
    Images whose routing hangs on a tie may differ, so the median image counts.
    """
    described = forward(vit, pixels, lambda _name, _values: None)
    if not bool(torch.isfinite(described).all()):
        raise NotFiniteError("the model's logits are not finite", do="check the checkpoint's weights and the images")
    apart = (described - logits.double()).norm(dim=-1) / logits.double().norm(dim=-1).clamp(min=1e-12)
    error = float(apart.median())
    if error > AGREEMENT:
        raise ModelError(
            f"the model computes something else than its description (logits differ by {error:.2g})",
            do="set integer: null for this model",
        )
    return error


def folded(vit: ViT, pixels: Tensor, bits: int, percentile: float | None) -> tuple[ViT, dict[str, float]]:
    """The same function with the norms of the blocks reparameterized (paper 004, 3.1), and s~ of each by name.

    Names are as "blocks.0.norm1". pixels: calibration images [B, C, H, W]; percentile: of the channels' ranges, None
    for min-max.
    """
    ranges: dict[str, tuple[Tensor, Tensor]] = {}

    def observe(name: str, values: Tensor) -> None:
        if name.endswith((".norm1", ".norm2")):
            ranges[name] = channel_range(values.flatten(0, -2), percentile)

    forward(vit, pixels, observe)
    scales: dict[str, float] = {}
    blocks = []
    for number, block in enumerate(vit.blocks):
        for side in ("norm1", "norm2"):
            name = f"blocks.{number}.{side}"
            block, scales[name] = _folded_side(block, side, ranges[name], bits)
        blocks.append(block)
    return replace(vit, blocks=tuple(blocks)), scales


def _folded_side(block: Block, side: str, ranges: tuple[Tensor, Tensor], bits: int) -> tuple[Block, float]:
    norm: Norm = getattr(block, side)
    fold = fold_of(asymmetric_quantizer(*ranges, bits, where=norm.path))

    def consumer(linear: Linear) -> Linear:
        weight, bias = folded_linear(linear.weight, linear.bias, fold)
        assert bias is not None
        return Linear(weight=weight, bias=bias)

    weight, bias = folded_norm(norm.weight, norm.bias, fold)
    assert bias is not None
    new_norm = replace(norm, weight=weight, bias=bias)
    if side == "norm1":
        query, key, value = consumer(block.query), consumer(block.key), consumer(block.value)
        return replace(block, norm1=new_norm, query=query, key=key, value=value), fold.scale
    update = replace(block.update, up=consumer(block.update.up))
    if isinstance(update, Mixture):
        update = replace(update, router=consumer(update.router))
    return replace(block, norm2=new_norm, update=update), fold.scale
