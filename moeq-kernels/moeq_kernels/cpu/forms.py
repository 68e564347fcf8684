"""The instruction sets that the products are compiled for, and which of them this machine has."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache

from moeq_kernels.cpu.permission import tiles_allowed


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way to compile the products.

    lanes: 32-bit lanes of a vector, 1 for plain loops; pairs: bf16 activations are multiplied two at a time, exactly,
    by the CPU's bf16 dot product; int8: activations are rounded to int8, see `schedule`, and multiplied four at a time
    by its dot product of bytes; tiles: rows of activations from which on AMX's tiles multiply, 0 for none: fewer are
    multiplied as by the same vectors alone; features: LLVM's names of what the CPU must have; rows: of activations that
    one pass over the codes is compiled for (more need more registers than there are); prefill: rows of an expert from
    which it is unpacked and multiplied by torch instead, unless it has been measured.
    """

    name: str
    lanes: int
    pairs: bool = False
    int8: bool = False
    tiles: int = 0
    features: tuple[str, ...] = ()
    rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    prefill: int = 64

    @property
    def floats(self) -> Form:
        """The form for float32 activations as they are: this one, or that of the same vectors with float32 lanes."""
        if not self.pairs and not self.int8:
            return self
        return next(form for form in FORMS.values() if form.lanes == self.lanes and form.per_word == 1)

    @property
    def vectors(self) -> Form:
        """The form without tiles: this one, or that of the same vectors."""
        if not self.tiles:
            return self
        same = self.lanes, self.pairs, self.int8
        return next(form for form in FORMS.values() if (form.lanes, form.pairs, form.int8) == same and not form.tiles)

    def taking(self, pairs: bool, units: bool) -> Form:
        """The form for activations; pairs: whether they, and what they are multiplied with, are pairs of bf16; units:
        whether all groups are of whole units, as tiles need them."""
        if not (self.int8 or (self.pairs and pairs)):
            return self.floats
        return self if units else self.vectors

    def of_rows(self, rows: int) -> Form:
        """The form whose block multiplies that many rows."""
        return self if rows >= self.tiles else self.vectors

    @property
    def per_word(self) -> int:
        """Activations of a word of 32 bits."""
        return 4 if self.int8 else 2 if self.pairs else 1

    def runs_here(self) -> bool:
        """Whether this CPU has what the form needs."""
        return all(host_features().get(feature, False) for feature in self.features) and (
            not self.tiles or tiles_allowed()
        )


FORMS = {  # the fastest first, and last those that round activations, which nothing but a name chooses
    form.name: form
    for form in (
        Form(
            name="amx",
            lanes=16,
            pairs=True,
            tiles=4,
            features=("avx512f", "avx512bf16", "amx-tile", "amx-bf16"),
            rows=(1, 2, 4, 16, 32),
            prefill=512,
        ),
        Form(name="avx512_bf16", lanes=16, pairs=True, features=("avx512f", "avx512bf16"), prefill=512),
        Form(name="avx512", lanes=16, features=("avx512f",), prefill=512),
        Form(name="avx2", lanes=8, features=("avx2", "fma", "f16c"), rows=(1, 2, 4), prefill=256),
        Form(name="neon", lanes=4, features=("neon",), rows=(1, 2, 4)),
        Form(name="plain", lanes=1, rows=(1, 4), prefill=2),
        Form(name="avx512_int8", lanes=16, int8=True, features=("avx512f", "avx512vnni"), prefill=512),
        Form(
            name="avx2_int8",
            lanes=8,
            int8=True,
            features=("avx2", "fma", "f16c", "avxvnni"),
            rows=(1, 2, 4),
            prefill=256,
        ),
    )
}


@cache
def host_features() -> dict[str, bool]:
    """LLVM's names of what this CPU has; every 64-bit ARM has NEON."""
    from llvmlite import binding  # which a GPU's kernels do without

    found = dict(binding.get_host_cpu_features())
    return found | {"neon": platform.machine() in ("aarch64", "arm64")}


def forms(*, int8: bool = False) -> list[str]:
    """Names of the forms that run on this machine, those expected to be fastest first; int8: those that round
    activations instead of those that do not."""
    return [name for name, form in FORMS.items() if form.int8 == int8 and form.runs_here()]
