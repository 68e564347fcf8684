"""Where names go beside their points so that none covers another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moeq.reporting.svg import TEXT_SIZE, text_width

POINT_RADIUS = 9.0
GAPS = (12.0, 24.0, 38.0, 54.0, 72.0)  # distances of a name from its point, in the order tried


@dataclass(frozen=True)
class Box:
    """A rectangle in points."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.bottom < other.top and other.bottom < self.top

    def holds(self, other: Box) -> bool:
        across = self.left <= other.left and other.right <= self.right
        return across and self.bottom <= other.bottom and other.top <= self.top

    def nearest(self, spot: tuple[float, float]) -> tuple[float, float]:
        """The point of the rectangle that is nearest to a spot."""
        return min(max(spot[0], self.left), self.right), min(max(spot[1], self.bottom), self.top)

    def distance(self, spot: tuple[float, float]) -> float:
        return math.dist(self.nearest(spot), spot)


def place(spots: Sequence[tuple[float, float]], names: Sequence[str], bounds: Box) -> list[Box]:
    """A box for the name of every spot, inside `bounds` where it fits, clear of earlier boxes and of all spots."""
    taken = [Box(x - POINT_RADIUS, y - POINT_RADIUS, x + POINT_RADIUS, y + POINT_RADIUS) for x, y in spots]
    boxes: list[Box] = []
    for spot, name in zip(spots, names, strict=True):
        tried = _candidates(spot, text_width(name) + 2)
        free = [box for box in tried if bounds.holds(box) and not any(box.overlaps(other) for other in taken)]
        box = free[0] if free else next((box for box in tried if bounds.holds(box)), tried[0])
        taken.append(box)
        boxes.append(box)
    return boxes


def _candidates(spot: tuple[float, float], width: float) -> list[Box]:
    """Right, left, above, below, then the corners; nearer ones first."""
    half = 0.62 * TEXT_SIZE
    sides = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
    result = []
    for gap in GAPS:
        for across, up in sides:
            reach = gap if not (across and up) else 0.75 * gap
            left = spot[0] + across * reach - (0 if across > 0 else width if across < 0 else width / 2)
            middle = spot[1] + up * (reach + half)
            result.append(Box(left, middle - half, left + width, middle + half))
    return result
