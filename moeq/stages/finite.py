"""What the stages say of activations and weights that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.markup import escape

from moeq.errors import NotFiniteError
from moeq.models.walk import LayerInputs
from moeq.models.weights import first_not_finite
from moeq.stages.context import Context


@contextmanager
def naming_the_file(context: Context) -> Iterator[None]:
    """Raise a NotFiniteError anew with the file and the tensor at fault, where the checkpoint itself is."""
    try:
        yield
    except NotFiniteError as error:
        key = first_not_finite(context.source)
        if key is None:
            raise
        raise NotFiniteError(
            f"weights are not finite, as seen in {error.where}",
            where=f"{context.source.tensors[key].file}: {key}",
            do="download the checkpoint again",
        ) from None


def say_left_out(context: Context, inputs: LayerInputs) -> None:
    """Warn of the tokens of a layer that were left out."""
    if inputs.left_out:
        total = inputs.left_out + len(inputs.hidden)
        context.reporter.say(
            f"  [yellow]{escape(inputs.layer.name)}: {inputs.left_out:,} of {total:,} tokens left out, their "
            "activations are not finite (dtype: float32 may help)[/yellow]"
        )
