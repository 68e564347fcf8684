"""How far a checkpoint is from the model that it was made of, and what must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.errors import EvaluationError
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.packed_source import PackedSource
from moeq.exporters.readers import PLAIN, format_of, open_packed
from moeq.models.declared import is_dequantized
from moeq.models.forward import takes_images, vocabulary
from moeq.models.loading import describe, load_config
from moeq.models.source import ModelSource, open_source
from moeq.models.streaming import StreamedModel
from moeq.numerics.divergence import kl_divergence
from moeq.progress import Reporter
from moeq.verification.reference import relative, streamed
from moeq.verification.settings import compare_settings
from moeq.verification.weights import Weights, compare_packed, compare_weights

BY_WIDTH = "the errors of its matrices are not written down: each was held to its width's alone"
AGAIN = "an older moeq made it"
NATIVE = "compare it with the native checkpoint that it was converted from, where there is one"


@dataclass(frozen=True, kw_only=True)
class Distance:
    """kl: of the next token's probabilities, nats a token; logits_error: relative; weights_error: mean relative error
    of the experts' matrices; equal, changed: tensors that are not packed; recorded: matrices whose error is written
    down and was held against that; files: settings that were compared; notes: what was not, or may well differ;
    problems: what must not be."""

    model: str
    kl: float
    logits_error: float
    weights_error: float
    equal: int
    changed: tuple[str, ...]
    recorded: int
    files: int
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def check_alike(name: str, packed: PackedSource, trust_remote_code: bool) -> None:
    """EvaluationError for a model whose layers, experts or vocabulary are of other sizes than a checkpoint's."""
    theirs, own = (_sizes(source, trust_remote_code) for source in (open_source(name), packed.source))
    wrong = next((what for what in own if theirs.get(what) != own[what]), None)
    if wrong is not None:
        what = f"another model: {wrong} {theirs.get(wrong)}, of the checkpoint {own[wrong]}"
        raise EvaluationError(what, where=name, do="give the model that it was made of")


def _sizes(source: ModelSource, trust_remote_code: bool) -> dict[str, str]:
    model, layers = describe(source, trust_remote_code, packed=True, experts=False)
    shapes = {f"{', '.join(layer.projections)}: {layer.hidden_size} x {layer.intermediate_size}" for layer in layers}
    return {
        "MoE layers": str(len(layers)),
        "experts a layer": "/".join(map(str, sorted({layer.num_experts for layer in layers}))),
        "experts of": "; ".join(sorted(shapes)),
    } | ({} if takes_images(model) else {"words": str(vocabulary(model))})


def compare_with(
    name: str,
    packed: PackedSource,
    inputs: dict[str, Tensor],
    logits: Tensor,
    reporter: Reporter,
    trust_remote_code: bool,
) -> Distance:
    """Compare a checkpoint, and the logits of its runtime, with a model, or with a packed checkpoint of it.

    Of a packed checkpoint every expert's values must be equal (rounded to the type of those that are not packed), of a
    model they must be roundings of its matrices, each with the error that is written down. Settings must be equal.
    """
    source = open_source(name)
    exact = format_of(source) != PLAIN and not is_dequantized(source)
    other = open_packed(source.path, trust_remote_code=trust_remote_code, as_values=True) if exact else None
    settings = compare_settings(packed, source, trust_remote_code)
    if other is None:
        weights = compare_weights(source, packed, reporter, trust_remote_code)
    else:
        weights = compare_packed(other, packed, reporter, trust_remote_code)
    wanted = _logits(source, other, inputs, trust_remote_code)
    return Distance(
        model=source.name,
        kl=float(kl_divergence(*(part.double().log_softmax(-1) for part in (wanted, logits))).mean()),
        logits_error=relative(logits, wanted),
        weights_error=sum(weights.errors) / max(len(weights.errors), 1),
        equal=weights.equal,
        changed=tuple(weights.changed),
        recorded=weights.recorded,
        files=settings.compared,
        notes=(*settings.notes, *_notes(packed, other, weights)),
        problems=(
            *weights.problems,
            *(f"{key} is not as in {source.name}" for key in weights.changed),
            *settings.problems,
        ),
    )


def first_of(problems: Sequence[str]) -> str:
    """The first problem, and how many more there are."""
    return problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def _notes(packed: PackedSource, other: PackedSource | None, weights: Weights) -> list[str]:
    """What the comparison could not know."""
    if other is not None or weights.recorded or not weights.errors:
        return []
    return [f"{BY_WIDTH}; {AGAIN if isinstance(packed, NativeReader) else NATIVE}"]


def _logits(source: ModelSource, other: PackedSource | None, inputs: dict[str, Tensor], trust: bool) -> Tensor:
    """What the original makes of the inputs."""
    if other is not None:
        model = streamed(other, torch.float32, trust)
    else:
        load_config(source, trust)
        model = StreamedModel(source, torch.float32, torch.device("cpu"), trust)
    with torch.no_grad():
        logits: Tensor = model.model(**inputs, use_cache=False).logits.float()
    return logits
