"""What the fold is worth: perplexity with int8 weights and statically scaled int8 inputs, with it and without; and the
checkpoint in that form, of reparam.w8a8.

Weights are rounded per output row, inputs per tensor by the largest magnitude in calibration; behind a folded norm the
scale is the fold's, and inputs there have reparam.bits in both versions. They differ in nothing else. In the checkpoint
scales are float32, what is not int8 has the type that it is stored in, and experts are as vLLM takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from moeq.errors import RecipeError
from moeq.evaluation.perplexity import perplexity
from moeq.exporters.w8a8 import Int8Parts, expert_names
from moeq.integers.arithmetic.reparam import Fold
from moeq.integers.artifacts.reparam import PerplexityRow
from moeq.integers.folding import FoldedNorm, apply_folds
from moeq.integers.static_int8 import (
    BITS,
    Scale,
    StaticInputs,
    linears,
    round_experts,
    round_rows,
    row_codes,
    scale_of,
)
from moeq.models.experts import ExpertLayer
from moeq.models.streaming import StreamedModel
from moeq.recipe import ReparamSection, W8A8Section
from moeq.stages.context import Context

REVISION = 2  # raised when the same inputs give other scales or perplexities
FOLDER = "w8a8"
WHERE = "reparam.w8a8"
HIGHEST = 2 ** (BITS - 1) - 1
ABSORBED = "kv_b_proj"


def check(context: Context) -> None:
    """RecipeError, FormatError where the recipe wants W8A8 of a model that has no such form, before anything runs."""
    section = None if context.recipe.reparam is None else context.recipe.reparam.w8a8
    if section is None:
        return
    if context.model.takes_images:
        raise RecipeError("it is of language models", where=WHERE, do="of vision transformers: reparam.integer")
    if section.experts == "int8":
        expert_names(*context.model.described, context.model.source.config.get("model_type"))


def wanted(context: Context) -> Context:
    """A run that writes W8A8 beside its folded model: with reparam.w8a8 as it is, or as by default.

    RecipeError for a run whose later stages were made of the model as it was: they would have to be made again.
    """
    section = context.recipe.reparam
    if section is not None and section.w8a8 is not None:
        return context
    if section is None and context.finished("profile").exists():
        what = "this run went on with the model as it was, W8A8 is of the one with folded norms"
        raise RecipeError(what, where=str(context.out), do="give another --out")
    section = section or ReparamSection()
    if section.bits != BITS:
        what = f"norms are folded for {section.bits} bits, W8A8 has inputs of {BITS}"
        raise RecipeError(what, where="reparam.bits", do="give --set reparam.bits=8")
    changed = section.model_copy(update={"w8a8": W8A8Section()})
    return replace(context, recipe=context.recipe.model_copy(update={"reparam": changed}))


def notes(context: Context, section: ReparamSection) -> bool:
    """Whether somebody asks for the largest input of every linear that W8A8 rounds."""
    return section.w8a8 is not None or (section.compare and context.text.perplexity is not None)


def noting(context: Context, section: ReparamSection, streamed: StreamedModel) -> StaticInputs | None:
    """A mode that notes the largest input of every linear that W8A8 rounds; None where nobody asks."""
    if not notes(context, section):
        return None
    return StaticInputs(streamed.model, streamed.blocks, linears(context.model.others, context.model.described[1]))


@dataclass(frozen=True, kw_only=True)
class Form:
    """One version of the model: what is folded, the parameters that are rounded, and the scales of their inputs.

    stored: parameters that folds change and that stay as they are, with the type in which they are stored.
    """

    folds: Sequence[FoldedNorm] = ()
    rounded: frozenset[str] = frozenset()
    scales: dict[str, Scale] = field(default_factory=dict)
    stored: dict[str, torch.dtype] = field(default_factory=dict)


def compare(
    context: Context, folds: Sequence[FoldedNorm], largest: dict[str, float], written: Form | None = None
) -> PerplexityRow | None:
    """Perplexities on the evaluation text, None where there is none; largest: inputs in calibration; written: the
    version that the checkpoint holds."""
    if context.text.perplexity is None:
        return None
    chosen = linears(context.model.others, context.model.described[1])
    behind = _behind(folds, largest)
    bits = {name: behind[name].bits if name in behind else BITS for name in largest}
    scales = {name: scale_of(most, bits[name]) for name, most in largest.items()}
    folded_scales = {name: (fold.scale, fold.bits) for name, fold in behind.items()}
    original = _measure(context, Form())
    rounded = _measure(context, Form(rounded=chosen, scales=scales))
    folded = _measure(context, Form(folds=folds, rounded=chosen, scales=scales | folded_scales))
    return PerplexityRow(
        original=original["perplexity"],
        w8a8=rounded["perplexity"],
        w8a8_folded=folded["perplexity"],
        w8a8_written=None if written is None else _measure(context, written)["perplexity"],
        tokens=original["tokens"],
    )


def _behind(folds: Sequence[FoldedNorm], largest: dict[str, float]) -> dict[str, Fold]:
    """{parameter: the fold} of those that a folded norm feeds."""
    consumers = ((consumer.weight, folded.fold) for folded in folds for consumer in folded.edge.consumers)
    return {weight: fold for weight, fold in consumers if weight in largest}


def parts(context: Context, folds: Sequence[FoldedNorm], largest: dict[str, float]) -> Int8Parts:
    """What becomes int8 in the checkpoint, and by which scales.

    Not latent attention's kv_b_proj, which vLLM multiplies by a matrix of ones at load: no static scale is for that.
    """
    recipe, layers = context.recipe.reparam, context.model.described[1]
    assert recipe is not None
    assert recipe.w8a8 is not None
    behind = _behind(folds, largest)
    exact = {name: behind[name].scale if name in behind else most / HIGHEST for name, most in largest.items()}
    chosen = linears(context.model.others, layers) - _experts(layers)
    return Int8Parts(
        linears=frozenset(name for name in chosen if name.split(".")[-2] != ABSORBED),
        layers=tuple(layers) if recipe.w8a8.experts == "int8" else (),
        scales={name: float(torch.tensor(scale, dtype=torch.float32)) for name, scale in exact.items()},
        rounded=row_codes,
    )


def form_of(parts: Int8Parts, folds: Sequence[FoldedNorm], stored: dict[str, torch.dtype]) -> Form:
    """The version of the model that a checkpoint holds; stored: types of the parameters that folds change."""
    tokens: dict[str, Scale] = dict.fromkeys(_experts(parts.layers), (None, BITS))
    scales: dict[str, Scale] = {name: (parts.scales.get(name, 0.0), BITS) for name in parts.linears}
    rounded = frozenset(scales | tokens)
    kept = {name: dtype for name, dtype in stored.items() if name not in rounded}
    return Form(folds=folds, rounded=rounded, scales=scales | tokens, stored=kept)


def _experts(layers: Sequence[ExpertLayer]) -> frozenset[str]:
    """The stacks of routed experts' matrices."""
    return frozenset(f"{layer.name}.{name}" for layer in layers for name in layer.parameters)


def _measure(context: Context, form: Form) -> dict[str, Any]:
    """Perplexity of one version in float32."""
    streamed = context.model.in_float32()
    section, sequences = context.text.perplexity, context.text.evaluation
    assert section is not None
    assert sequences is not None
    others: dict[str, list[str]] = {}
    for name in sorted(form.rounded - _experts(context.model.described[1])):
        others.setdefault(streamed.block_of(name), []).append(name)

    def change(model: nn.Module, block: str) -> None:
        apply_folds(model, form.folds, lambda name: streamed.block_of(name) == block)
        for name, dtype in form.stored.items():
            if streamed.block_of(name) == block:
                parameter = model.get_parameter(name)
                parameter.data = parameter.data.to(dtype).to(parameter.dtype)
        for name in others.get(block, ()):
            weight = model.get_parameter(name)
            weight.data = round_rows(weight.detach())

    def round_layer(model: nn.Module, layer: ExpertLayer) -> None:
        if form.rounded & _experts([layer]):
            with torch.no_grad():
                round_experts(model, layer)

    change(streamed.model, "")
    streamed.block_overlay = change
    rounding: AbstractContextManager[Any] = nullcontext()
    if form.rounded:
        streamed.overlay = round_layer
        rounding = StaticInputs(streamed.model, streamed.blocks, form.rounded, form.scales)
    with rounding:
        return perplexity(
            streamed.model,
            sequences,
            section.batch_size,
            context.model.device,
            lambda: None,
            streamed=streamed,
            bar=context.reporter.bar,
        )


def saved_bytes(context: Context, stored: int) -> int:
    """Bytes that int8 saves of parameters stored in so many, scales counted."""
    section = context.recipe.reparam
    assert section is not None
    assert section.w8a8 is not None
    model, layers = context.model.described
    names = linears(context.model.others, layers) - (_experts(layers) if section.w8a8.experts == "plain" else set())
    shapes = [model.get_parameter(name).shape for name in names if name.split(".")[-2] != ABSORBED]
    return sum(shape.numel() * (stored - 1) - 4 * (shape.numel() // shape[-1] + 1) for shape in shapes)
