"""What `moeq estimate --grid` and `--replicas` say."""

from __future__ import annotations

from collections.abc import Sequence

from moeq.errors import RecipeError, hint
from moeq.estimation.axes import AXES
from moeq.estimator import Grid
from moeq.recipe import LARGEST_BATCH, LARGEST_LENGTH, MOST_POINTS

LARGEST = {"in": LARGEST_LENGTH, "out": LARGEST_LENGTH, "batch": LARGEST_BATCH}
NO_REPLICAS = "none"


def parse_grid(texts: Sequence[str]) -> Grid:
    """`in=128,512 out=512 batch=1,4` (one text or several) as a grid; axes that are left out keep their defaults.

    Raises RecipeError for an unknown or repeated axis, for what is no whole number, and for sizes out of reach.
    """
    found: dict[str, tuple[int, ...]] = {}
    for word in " ".join(texts).split():
        axis, equals, values = word.partition("=")
        if not equals:
            raise RecipeError(f"{word!r} is no axis", where="--grid", do="write in=128,512 out=512,2048 batch=1,4")
        if axis not in AXES:
            raise RecipeError(f"unknown axis {axis!r}", where="--grid", do=hint(axis, AXES, "axes are "))
        if AXES[axis] in found:
            raise RecipeError(f"{axis} is there twice", where="--grid", do="write its sizes with commas")
        found[AXES[axis]] = _sizes(axis, values)
    grid = Grid(**found)
    points = len(grid.inputs) * len(grid.outputs) * len(grid.batches)
    if points > MOST_POINTS:
        raise RecipeError(f"{points} points", where="--grid", do=f"give at most {MOST_POINTS}")
    return grid


def _sizes(axis: str, text: str) -> tuple[int, ...]:
    """Rising sizes without repetition."""
    sizes = set()
    for one in text.split(","):
        if not (one.isascii() and one.isdigit()):
            raise RecipeError(f"{one!r} is no whole number", where=f"--grid {axis}", do=f"write {axis}=128,512")
        if not 1 <= int(one[:20]) <= LARGEST[axis]:
            raise RecipeError(f"{one[:20]} is out of reach", where=f"--grid {axis}", do=f"give 1 to {LARGEST[axis]}")
        sizes.add(int(one))
    return tuple(sorted(sizes))


def parse_replicas(text: str) -> tuple[int, ...]:
    """`1,2,3,4`, rising, or `none`; RecipeError for what is no width below 16."""
    if text == NO_REPLICAS:
        return ()
    widths = text.split(",")
    for one in widths:
        if not (one.isascii() and one.isdigit() and len(one) < 3 and 1 <= int(one) < 16):
            raise RecipeError(f"{one!r} is no width", where="--replicas", do="write 1,2,3,4, or none")
    return tuple(sorted({int(one) for one in widths}))
