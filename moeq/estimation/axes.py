"""The axes of a grid of lengths and batches, as command lines say them."""

from __future__ import annotations

AXES = {"in": "inputs", "out": "outputs", "batch": "batches"}  # and what recipes call them


def is_axis(word: str) -> bool:
    """Whether a word is one axis with its sizes, such as in=128,512."""
    axis, equals, _ = word.partition("=")
    return bool(equals) and axis in AXES
