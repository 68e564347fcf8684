"""The code that counts as 0 in each block's log softmax, chosen on calibration images by what attention gives."""

from __future__ import annotations

import torch
from torch import Tensor

from moeq.integers.arithmetic.dropped_codes import DropErrors, drop_errors
from moeq.integers.arithmetic.log_sqrt2 import Logarithm, widths
from moeq.integers.artifacts.integer_report import DroppedRow
from moeq.integers.forward.description import ViT
from moeq.integers.forward.reference import forward
from moeq.recipe import IntegerSection

IMAGES = 8  # at once: numerators of all pairs are held in float64
PARTS = ("query", "key", "value")


def dropped_codes(vit: ViT, calibration: Tensor, section: IntegerSection) -> tuple[DroppedRow, ...]:
    """What counts as 0 in every block, with its error and the printed form's; nothing for a uniform softmax.

    calibration: images [B, C, H, W]. The errors are relative, of the outputs of attention before its projection, over
    all heads, queries and images, on the float model's own queries, keys and values. With section.dropping `printed`
    the printed form is taken, and its errors are measured all the same.
    """
    if section.softmax == "uniform":
        return ()
    chooser = _Chooser(vit, section, section.softmax)
    with torch.no_grad():
        for part in calibration.split(IMAGES):
            forward(vit, part, chooser.observe)
    return tuple(
        _row(name, errors, chooser.printed, section.dropping == "printed") for name, errors in chooser.errors.items()
    )


def _row(block: str, errors: DropErrors, printed: int | None, as_printed: bool) -> DroppedRow:
    found = None if as_printed else errors.best()
    return DroppedRow(
        block=block,
        dropped_from=printed if found is None else found,
        error=errors.relative(found),
        printed_dropped_from=printed,
        printed_error=errors.relative(None),
    )


class _Chooser:
    """Collects queries, keys and values of a block, and adds its errors when all three are there."""

    def __init__(self, vit: ViT, section: IntegerSection, kind: Logarithm) -> None:
        self.heads, self.section, self.kind = vit.num_heads, section, kind
        keys = len(vit.prefix) + len(vit.position)
        held = widths(section.attention, kind, keys, section.activations, where="attention")
        self.printed = held.dropped_from
        self.held: dict[str, Tensor] = {}
        self.errors: dict[str, DropErrors] = {}

    def observe(self, name: str, values: Tensor) -> None:
        block, _, part = name.rpartition(".")
        if part not in PARTS:
            return
        self.held[part] = values.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if len(self.held) < len(PARTS):
            return
        query, key, value = (self.held.pop(part) for part in PARTS)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        exact = self.section.denominator == "exact"
        found = drop_errors(scores, value, self.section.attention, self.kind, self.printed, exact=exact)
        self.errors[block] = self.errors[block] + found if block in self.errors else found
