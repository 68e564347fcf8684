"""Accuracy and cross-entropy of an image classifier on images with labels, and how far its logits have moved."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeq.errors import EvaluationError
from moeq.models.corpus import ImageSequences
from moeq.models.streaming import StreamedModel
from moeq.models.walk import Batch, run_all
from moeq.progress import Bar, no_bar


@dataclass(frozen=True, kw_only=True)
class Classified:
    """Logits [N, L] float32 of all images; accuracy in 0..1 and its standard error (None: of one image there is none).

    cross_entropy: mean over images, in nats; by_domain: {domain: {acc, acc_stderr}}.
    """

    logits: Tensor
    accuracy: float
    accuracy_stderr: float | None
    cross_entropy: float
    by_domain: dict[str, dict[str, float]]


def classify(
    model: Any,
    images: ImageSequences,
    batch_size: int,
    device: torch.device,
    advance: Callable[[], None],
    streamed: StreamedModel | None = None,
    bar: Bar = no_bar,
) -> Classified:
    """Run all images through the model; `advance` is called once a batch, a streamed model is read once, whose layers
    `bar` counts.

    Raises EvaluationError when the outputs are not finite.
    """
    parts: list[Tensor] = []

    def finish(_: Batch, output: Any) -> None:
        parts.append(output.logits.float().cpu())
        advance()

    run_all(model, images.batches(batch_size), device, finish, streamed, bar)
    logits = torch.cat(parts)
    if not bool(torch.isfinite(logits).all()):
        raise EvaluationError("the model's outputs are not finite", do="use dtype: float32 or check the checkpoint")
    right = logits.argmax(-1) == images.labels
    accuracy, error = share_with_error(right)
    by_domain = {}
    for domain in dict.fromkeys(images.domains):
        share, stderr = share_with_error(right[torch.tensor([of == domain for of in images.domains])])
        by_domain[domain] = {"acc": share} | ({} if stderr is None else {"acc_stderr": stderr})
    return Classified(
        logits=logits,
        accuracy=accuracy,
        accuracy_stderr=error,
        cross_entropy=float(functional.cross_entropy(logits.double(), images.labels)),
        by_domain=by_domain,
    )


def share_with_error(right: Tensor) -> tuple[float, float | None]:
    """The share of True in [N], and its standard error as of a sample; of one alone there is none."""
    count, share = len(right), float(right.double().mean())
    return share, math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None


def logit_error(logits: Tensor, wanted: Tensor) -> float:
    """||logits - wanted|| / ||wanted|| over all images and labels."""
    return float((logits.double() - wanted.double()).norm() / wanted.double().norm())
