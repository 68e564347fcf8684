"""Where what quantizers make becomes packed weights, which are measured and stored as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from moeq.errors import QuantizationError
from moeq.models.experts import ExpertLayer
from moeq.numerics import storing
from moeq.recipe import LossesSection
from moeq_kernels.packed import PackedWeight

Packed = dict[str, dict[int, PackedWeight]]  # {projection: {bits: stack over some experts}}


@contextmanager
def stored_as(method: str, place: Callable[[int], str]) -> Iterator[None]:
    """Raise what cannot be stored as a QuantizationError that names the method and, by `place`, which weight it is."""
    try:
        yield
    except storing.NotStorable as error:
        raise QuantizationError(
            f"{method} gave {error}, which cannot be stored",
            where=place(error.index),
            do="use dtype: float32 or, where the quantizer is your own, have it give what it stores",
        ) from None


def packed_batch(
    made: dict[str, Any],
    config: LossesSection,
    bits: Sequence[int],
    *,
    method: str,
    layer: ExpertLayer,
    experts: Sequence[int],
) -> Packed:
    """What a method made of some experts, packed at some widths; its codes are given up as it goes.

    made: {projection: codes [e, B, N, K], or {bits: packed}}, emptied; experts: their numbers. Raises QuantizationError
    naming method, layer, expert, matrix and width where a packed weight would not stand for exactly what was made.
    """
    packed: Packed = {}
    for projection in list(made):
        quantized = made.pop(projection)
        if isinstance(quantized, Mapping):  # packed by the method itself
            packed[projection] = {width: quantized[width] for width in bits}
            continue
        packed[projection] = {}
        for width in bits:
            places = [
                f"{layer.name}, expert {expert}, {projection}, {width} bit{'s' * (width > 1)}" for expert in experts
            ]
            with stored_as(method, places.__getitem__):
                packed[projection][width] = storing.packed_of(quantized, width, config.symmetric, config.nested)
    return packed
