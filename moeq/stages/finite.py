"""What the stages say of activations and weights that are not finite, too large, or all 0."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from rich.markup import escape

from moeq.errors import AllZeroError, NotFiniteError
from moeq.models.corpus import Sequences
from moeq.models.experts import ExpertLayer, stacked_weights
from moeq.models.forward import ahead, takes_images
from moeq.models.walk import Batch, LayerInputs
from moeq.models.weights import first_all_zero, first_not_finite, largest
from moeq.stages.context import Context

LARGE = 1e4  # no trained weight is as large; one that is can be what activations overflow with
TRIED_TOKENS = 32
MOST_NLL = math.log(sys.float_info.max)  # a token, above which there is no perplexity


@contextmanager
def naming_the_file(context: Context) -> Iterator[None]:
    """Raise a NotFiniteError or AllZeroError anew with the file and the tensor at fault, where the checkpoint itself
    is: one that is not finite, or all 0, or whose weights are so large that activations overflow."""
    try:
        yield
    except (AllZeroError, NotFiniteError) as error:
        zero = isinstance(error, AllZeroError)
        key = (first_all_zero if zero else first_not_finite)(context.model.source)
        if key is None:
            _name_the_largest(context, error)
            raise
        raise type(error)(
            f"{'every weight is 0' if zero else 'weights are not finite'}, as seen in {error.where}",
            where=f"{context.model.source.tensors[key].file}: {key}",
            do="download the checkpoint again",
        ) from None


def _name_the_largest(context: Context, error: AllZeroError | NotFiniteError) -> None:
    """Raise an error anew with the tensor that has the largest weight, where that is beyond what is trained."""
    key, size = largest(context.model.source)
    if size >= LARGE:
        raise NotFiniteError(
            f"weights of up to {size:.3g}, with which activations overflow, as seen in {error.where}",
            where=f"{context.model.source.tensors[key].file}: {key}",
            do="download the checkpoint again, or use dtype: float32 where it was another",
        ) from None


def say_left_out(context: Context, inputs: LayerInputs) -> None:
    """Warn of the tokens of a layer that were left out."""
    say_left_out_of(context, inputs.layer, inputs.left_out, inputs.left_out + len(inputs.hidden))


def say_left_out_of(context: Context, layer: ExpertLayer, left_out: int, total: int) -> None:
    """The same of so many tokens in all."""
    if left_out:
        what = "tokens" if layer.visits == 1 else f"tokens at {layer.visits} visits"
        context.reporter.say(
            f"  [yellow]{escape(layer.name)}: {left_out:,} of {total:,} {what} left out, their "
            "activations are not finite (dtype: float32 may help)[/yellow]"
        )


def may_overflow(context: Context, last: ExpertLayer) -> bool:
    """Whether what follows the inputs of the last layer's experts is to be tried, while its weights are there.

    A model in memory always is; a streamed one, which would be read once more for it, only where these experts or what
    stays resident (norm and head) have weights above LARGE.
    """
    if context.model.streamed is None:
        return True
    model = context.model.module
    weights: list[torch.Tensor] = [weight for weight in model.parameters() if weight.device.type != "meta"]
    weights += stacked_weights(model, last, slice(None)).values()
    return any(_beyond(weight) for weight in weights if weight.numel())


def _beyond(weight: torch.Tensor) -> bool:
    """Whether some weights are above LARGE, or are no numbers; nothing as large as they are is made for it."""
    least, most = weight.detach().aminmax()
    return not -LARGE <= float(least) <= float(most) <= LARGE


def check_output(context: Context, sequences: Sequences) -> None:
    """NotFiniteError when the model's output on a few tokens is not finite, or so far off that it has no perplexity.

    What the layers' inputs do not show: the last experts, the norm and the head after them.
    """

    def finish(batch: Batch, output: Any) -> None:
        wrong = output_overflows(output.logits, batch, context.model.module)
        if wrong is not None:
            raise NotFiniteError(wrong, where="the model's output", do="use dtype: float32, or check the checkpoint")

    for _ in context.model.walk([_few(sequences)], (), finish=finish):
        pass


def output_overflows(logits: torch.Tensor, batch: Batch, model: Any) -> str | None:
    """What is wrong with logits [B, S, V] of tokens, or [B, C] of images; None: nothing."""
    if not bool(torch.isfinite(logits[batch.mask.bool().to(logits.device)] if logits.dim() == 3 else logits).all()):
        return "the output is not finite"
    if takes_images(model) or logits.shape[-1] <= int(batch.input_ids.max()):
        return None
    lead = ahead(model)
    predicted = logits[:, 1 - lead : logits.shape[1] - lead].float().transpose(1, 2)
    nll = torch.nn.functional.cross_entropy(predicted, batch.input_ids[:, 1:].to(logits.device), reduction="none")
    counted = batch.mask[:, 1:].bool().to(logits.device)
    mean = float(nll.double()[counted].mean()) if bool(counted.any()) else 0.0
    return None if mean <= MOST_NLL else f"a loss of {mean:.3g} a token, of which there is no perplexity"


def _few(sequences: Sequences) -> Batch:
    """The beginning of the first sequence; with images, all of it."""
    first: Batch = sequences.batches(1)[0]
    if first.extra or not bool(first.mask[:, :TRIED_TOKENS].any()):
        return first
    return replace(first, input_ids=first.input_ids[:, :TRIED_TOKENS], mask=first.mask[:, :TRIED_TOKENS])
