"""What `moeq estimate --grid` and `--replicas` say."""

from __future__ import annotations

from collections.abc import Sequence

from moeq.bounded import is_number
from moeq.errors import RecipeError, hint
from moeq.estimator import Grid
from moeq.recipe import LARGEST_BATCH, LARGEST_LENGTH, MOST_POINTS

AXES = {"in": "inputs", "out": "outputs", "batch": "batches"}  # and what recipes call them
LARGEST = {"in": LARGEST_LENGTH, "out": LARGEST_LENGTH, "batch": LARGEST_BATCH}
NO_REPLICAS = "none"


def parse_grid(texts: Sequence[str]) -> Grid:
    """`in=128,512 out=512 batch=1,4` (one text or several) as a grid; axes that are left out keep their defaults.

    Raises RecipeError for an unknown or repeated axis, for what is no whole number, and for sizes out of reach.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for word in " ".join(texts).split():
        axis, equals, values = word.partition("=")
        if not equals:
            raise RecipeError(f"{word!r} is no axis", where="--grid", do="write in=128,512 out=512,2048 batch=1,4")
        if axis not in AXES:
            raise RecipeError(f"unknown axis {axis!r}", where="--grid", do=hint(axis, AXES, "axes are "))
        if AXES[axis] in sizes:
            raise RecipeError(f"{axis} is there twice", where="--grid", do="write its sizes with commas")
        sizes[AXES[axis]] = _sizes(axis, values)
    grid = Grid(**sizes)
    points = len(grid.inputs) * len(grid.outputs) * len(grid.batches)
    if points > MOST_POINTS:
        raise RecipeError(f"{points} points", where="--grid", do=f"give at most {MOST_POINTS}")
    return grid


def _sizes(axis: str, text: str) -> tuple[int, ...]:
    """Rising sizes without repetition."""
    words = text.split(",")
    for word in words:
        if not (word.isascii() and word.isdigit()):
            raise RecipeError(f"{word!r} is no whole number", where=f"--grid {axis}", do=f"write {axis}=128,512")
        if not 1 <= int(word[:20]) <= LARGEST[axis]:
            raise RecipeError(f"{word[:20]} is out of reach", where=f"--grid {axis}", do=f"give 1 to {LARGEST[axis]}")
    return tuple(sorted({int(word) for word in words}))


def parse_replicas(text: str) -> tuple[int, ...]:
    """`1,2,3,4`, rising, or `none`; RecipeError for what is no width below 16."""
    if text == NO_REPLICAS:
        return ()
    words = text.split(",")
    for word in words:
        if not (is_number(word, 2) and 1 <= int(word) < 16):
            raise RecipeError(f"{word!r} is no width", where="--replicas", do="write 1,2,3,4, or none")
    return tuple(sorted({int(word) for word in words}))
