"""What a bench is asked for; light, so that it can be refused before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moeq.errors import RecipeError

if TYPE_CHECKING:
    from moeq.runtime.dynamic.options import DynamicOptions

BATCHES = (1, 4, 16, 32)
GRID_BATCHES, GRID_BEAMS = (1, 8, 20, 32, 64, 96), (1, 2)  # paper 002, Table 3
DYNAMIC_BATCHES = (1, 32)
LARGEST = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A bench: checkpoint, packed or dense, and what stands beside it.

    batches: sequences at once; None: BATCHES, or with `grid` GRID_BATCHES; repeat: requests that are timed of each;
    grid: batches and beams (None: GRID_BEAMS) with and without batch pruning instead; dynamic: precision that follows
    the workload beside static high, low and mixed instead, at batch sizes DYNAMIC_BATCHES; gguf: a file for llama.cpp's
    own bench.
    """

    checkpoint: str
    dense: str | None = None
    batches: tuple[int, ...] | None = None
    prompt_tokens: int = 64
    new_tokens: int = 16
    repeat: int = 3
    grid: bool = False
    beams: tuple[int, ...] | None = None
    peers: bool = True
    dynamic: DynamicOptions | None = None
    gguf: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """RecipeError for a number that cannot be."""
        for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("repeat", 1), ("batches", 1), ("beams", 1)):
            given = getattr(self, name)
            for number in (given if isinstance(given, tuple) else (given,)) if given is not None else ():
                if not isinstance(number, int) or not least <= number <= LARGEST:
                    do = f"give whole numbers from {least} to {LARGEST}"
                    raise RecipeError(f"cannot be {number!r}", where=name, do=do)
        if () in (self.batches, self.beams):
            raise RecipeError("none is named", where="batches" if self.batches == () else "beams", do="name some")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batches that are measured."""
        return self.batches or (GRID_BATCHES if self.grid else BATCHES if self.dynamic is None else DYNAMIC_BATCHES)

    @property
    def beam_counts(self) -> tuple[int, ...]:
        """The numbers of beams of a grid."""
        return self.beams or GRID_BEAMS


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers from 1 that commas part, each once, in order; RecipeError for anything else."""
    words = [word.strip() for word in text.split(",")]
    good = all(word.isascii() and word.isdigit() and 0 < int(word[:9]) <= LARGEST for word in words)
    if not good or any(len(word) > 9 for word in words):
        raise RecipeError(f"{option} {text!r}", do=f"give whole numbers from 1 to {LARGEST}, such as 1,4,16")
    return tuple(dict.fromkeys(map(int, words)))
