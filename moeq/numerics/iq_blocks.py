"""Blocks of i-quants from what stands in them, and the tables of what their codes stand for.

Of every block, in the order of its weights: the entries of the table that eights or fours of weights take, the signs of
eights, and the steps, whole numbers that runs of weights share as their scale. See moeq_kernels/iq_types.py.

Letters: M blocks, L bytes of one without its float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from moeq_kernels.iq import decoded
from moeq_kernels.iq_types import BLOCK, BLOCKS, SCALE_BYTES

Signs = Literal["free", "even", "shifted", "levels"]
HALF_ONE = 0x3C00  # the bits of a float16 of 1
SHIFTED = 8  # in a step of IQ1_S: 1/8 down
MIDDLE = 32  # what a step of IQ4_XS is stored with


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a type is made. length: weights of an entry; entries: of the table; run: weights that share a step; steps:
    how many there are, the first of which has the factor `least`, each next one `each` more; signs: free, of an even
    number in eight, none but a shift of 1/8 up or down of all of a run, or none, single levels; usual: the scale that
    loses least, beside that by which weights and entries are equally large."""

    length: int
    entries: int
    run: int
    steps: int
    least: float
    each: float
    signs: Signs
    usual: float = 1.0

    @property
    def factors(self) -> Tensor:
        """What a scale is multiplied by at every step, float32 [steps]."""
        return self.least + self.each * torch.arange(self.steps, dtype=torch.float32)


KINDS = {
    "IQ1_S": Kind(length=8, entries=2048, run=32, steps=8, least=1, each=2, signs="shifted", usual=0.97),
    "IQ2_XXS": Kind(length=8, entries=256, run=32, steps=16, least=0.125, each=0.25, signs="even", usual=1.03),
    "IQ2_XS": Kind(length=8, entries=512, run=16, steps=16, least=0.125, each=0.25, signs="even", usual=1.06),
    "IQ2_S": Kind(length=8, entries=1024, run=16, steps=16, least=0.125, each=0.25, signs="free", usual=1.07),
    "IQ3_XXS": Kind(length=4, entries=256, run=32, steps=16, least=0.25, each=0.5, signs="even", usual=1.13),
    "IQ3_S": Kind(length=4, entries=512, run=32, steps=16, least=1, each=2, signs="free", usual=1.17),
    "IQ4_XS": Kind(length=1, entries=16, run=32, steps=64, least=-32, each=1, signs="levels"),
}


def blocks(name: str, entries: Tensor, signs: Tensor, steps: Tensor) -> Tensor:
    """Bytes uint8 [M, L] of blocks, without their float16.

    entries: int [M, 256 / length]; signs: uint8 [M, 32], bit i set where the i-th of eight weights is negative, not
    looked at where the type has none; steps: uint8 [M, 256 / run], SHIFTED among them.
    """
    parts = _PACKERS[name](entries.int(), signs.int(), steps.int())
    return torch.cat([part.to(torch.uint8) for part in parts], -1)


def _low(words: Tensor, count: int) -> Tensor:
    """The lowest bytes of whole numbers [M, n], in order: [M, count * n]."""
    split: Tensor = ((words.long().unsqueeze(-1) >> (8 * torch.arange(count))) & 255).flatten(-2)
    return split


def _fields(values: Tensor, size: int, bits: int) -> Tensor:
    """Every `size` whole numbers [M, n] of some bits in one, the first lowest: [M, n / size]."""
    shifts = bits * torch.arange(size)
    joined: Tensor = (values.long().unflatten(-1, (-1, size)) << shifts).sum(-1)
    return joined


def _pairs(steps: Tensor) -> Tensor:
    """Two steps of 4 bits a byte."""
    return _fields(steps, 2, 4)


def _four_signs(signs: Tensor, steps: Tensor) -> Tensor:
    """The signs of four eights, 7 bits each, since the eighth follows, and a step above them, as 4 bytes."""
    return _low(_fields(signs & 127, 4, 7) | steps.long() << 28, 4)


def _iq1_s(entries: Tensor, signs: Tensor, steps: Tensor) -> list[Tensor]:
    words = _fields(entries >> 8, 4, 3) | (steps.long() & 7) << 12 | (steps.long() >> 3) << 15
    return [entries & 255, _low(words, 2)]


def _iq2_xxs(entries: Tensor, signs: Tensor, steps: Tensor) -> list[Tensor]:
    low, high = entries.unflatten(-1, (-1, 4)), _four_signs(signs, steps).unflatten(-1, (-1, 4))
    return [torch.cat([low, high], -1).flatten(-2)]


def _iq4_xs(entries: Tensor, signs: Tensor, steps: Tensor) -> list[Tensor]:
    first, second = entries.unflatten(-1, (-1, 2, 16)).unbind(-2)
    return [_low(_fields(steps >> 4, 8, 2), 2), _pairs(steps & 15), (first | second << 4).flatten(-2)]


_PACKERS = {
    "IQ1_S": _iq1_s,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": lambda entries, signs, steps: [_low(entries | (signs & 127) << 9, 2), _pairs(steps)],
    "IQ2_S": lambda entries, signs, steps: [entries & 255, signs, _fields(entries >> 8, 4, 2), _pairs(steps)],
    "IQ3_XXS": lambda entries, signs, steps: [entries, _four_signs(signs, steps)],
    "IQ3_S": lambda entries, signs, steps: [entries & 255, _fields(entries >> 8, 8, 1), signs, _pairs(steps)],
    "IQ4_XS": _iq4_xs,
}


@cache
def table(name: str) -> Tensor:
    """What the entries of a type stand for, at a scale and a factor of 1: float32 [length, entries]."""
    kind = KINDS[name]
    per_block = BLOCK // kind.length
    every = torch.arange(kind.entries).repeat(-(-per_block // kind.entries)).view(-1, per_block)
    step = MIDDLE + 1 if kind.signs == "levels" else 0
    steps = torch.full((len(every), BLOCK // kind.run), step, dtype=torch.uint8)
    data = blocks(name, every, torch.zeros(len(every), BLOCK // 8, dtype=torch.uint8), steps)
    one = torch.tensor([HALF_ONE & 255, HALF_ONE >> 8], dtype=torch.uint8).expand(len(data), -1)
    assert data.shape[-1] + SCALE_BYTES == BLOCKS[name][1], name
    values = decoded(torch.cat([one, data], -1), name) / float(kind.factors[step])
    found = values.view(-1, kind.length)[: kind.entries].T.contiguous()
    return found - 1 / SHIFTED if kind.signs == "shifted" else found
