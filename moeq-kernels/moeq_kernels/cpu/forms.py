"""The instruction sets that the products are compiled for, and which of them this machine has."""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from functools import cache

ARCH_PRCTL = 158  # number of the system call on x86-64
ARCH_REQ_XCOMP_PERM, TILE_DATA = 0x1023, 18  # asm/prctl.h; the state's number in Intel's manual, volume 1, 13.1
BYTES_ROWS = 4  # up to which trellis codes are multiplied faster as bytes than as bf16: 1 to 4 of 2**8 states in .48,
# .61, .88 and .89 of the time on a Zen 4, of 2**10 in .74, .86, .81 and .83, and 5 to 8 in 1.11 and .97


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way to compile the products.

    lanes: 32-bit lanes of a vector, 1 for plain loops; pairs: bf16 activations are multiplied two at a time, exactly,
    by the CPU's bf16 dot product; slices: activations become whole numbers of so many bytes, see `activations`, and are
    multiplied four at a time by its dot product of bytes, each byte apart: 3 lose nothing that sums in float32 keep, 1
    rounds to int8; byte_pairs: its dot products of bytes sum two in 16 bits, not four, see `byte_pairs`; panels: rows
    of activations from which on float32 values are unpacked to memory, see `panels`, 0 for none; tiles: rows of
    activations from which on AMX's tiles multiply, 0 for none: fewer are multiplied by the fastest of the same vectors;
    features: LLVM's names of what the CPU must have; rows: of activations that one pass over the codes is compiled for
    (more need more registers than there are); prefill: rows of an expert from which it is unpacked and multiplied by
    torch instead, unless it has been measured.
    """

    name: str
    lanes: int
    pairs: bool = False
    slices: int = 0
    byte_pairs: bool = False
    panels: int = 0
    tiles: int = 0
    features: tuple[str, ...] = ()
    rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    prefill: int = 64

    @property
    def int8(self) -> bool:
        """Whether activations are rounded, so that results change by more than their last bits."""
        return self.slices == 1

    @property
    def floats(self) -> Form:
        """The form for float32 activations as they are: this one, or that of the same vectors with float32 lanes."""
        if not self.pairs and not self.slices:
            return self
        return next(form for form in FORMS.values() if form.lanes == self.lanes and form.words == WORDS_OF_FLOATS)

    @property
    def unpacking(self) -> Form:
        """The form that unpacks matrices: this one, or that of the same vectors that rounds to bf16 at once."""
        same = (form for form in FORMS.values() if form.lanes == self.lanes and form.pairs and not form.tiles)
        fitting = (form for form in same if form.runs_here())
        return next(fitting, self)

    @property
    def unpacks_bf16(self) -> bool:
        """Whether matrices that torch multiplies with bf16 rows are unpacked to bf16: without AVX-512 its products of
        bf16 take up to 80 times as long as those of float32."""
        return self.lanes != AVX2_LANES

    @property
    def vectors(self) -> Form:
        """The form without tiles: this one, or the fastest of the same vectors for few rows."""
        return self.bytewise if self.tiles else self

    @property
    def bytewise(self) -> Form:
        """The form of the same vectors for activations as whole numbers of three bytes."""
        return next(form for form in FORMS.values() if form.lanes == self.lanes and form.slices == 3)

    def walks_in_bytes(self, rows: int) -> bool:
        """Whether trellis codes that are looked up as bytes are multiplied with so few rows as whole numbers, all
        others as pairs of bf16, which bytes take longer to become."""
        return self.pairs and not self.tiles and rows <= BYTES_ROWS and self.bytewise.runs_here()

    def walks_in_floats(self, rows: int) -> bool:
        """Whether trellis codes are multiplied with so many rows of activations as they are, not as whole numbers: with
        AVX2 one row is, see `row_walks`, and without its dot products of four bytes any number."""
        return self.lanes == AVX2_LANES and self.slices > 1 and (self.byte_pairs or rows == 1)

    def taking(self, pairs: bool, units: bool) -> Form:
        """The form for activations; pairs: whether they, and what they are multiplied with, are pairs of bf16; units:
        whether all groups are of whole units, as tiles need them."""
        if not (self.int8 or (pairs and (self.pairs or self.slices))):
            return self.floats
        return self if units else self.vectors

    def of_rows(self, rows: int) -> Form:
        """The form whose block multiplies that many rows."""
        return self if rows >= self.tiles else self.vectors

    @property
    def words(self) -> int:
        """Words of 32 bits that four activations are laid out as."""
        return self.slices or (2 if self.pairs else WORDS_OF_FLOATS)

    @property
    def layout(self) -> int:
        """How activations are laid out: `words`, and TILED more for tiles."""
        return self.words + (TILED if self.tiles else 0)

    def runs_here(self) -> bool:
        """Whether this CPU has what the form needs."""
        return all(host_features().get(feature, False) for feature in self.features) and (
            not self.tiles or tiles_allowed()
        )


WORDS_OF_FLOATS = 4
AVX2_LANES = 8
TILED = 16  # more than any number of words
FORMS = {  # the fastest first (on Zen: see `forms`), and last those that round activations, which only a name chooses
    form.name: form
    for form in (
        Form(
            name="amx",
            lanes=16,
            pairs=True,
            tiles=4,
            features=("avx512f", "avx512bf16", "avx512vnni", "amx-tile", "amx-bf16"),
            rows=(1, 2, 4, 16, 32),
            prefill=512,
        ),
        Form(
            name="avx512_vnni", lanes=16, slices=3, features=("avx512f", "avx512vnni"), rows=(1, 2, 4, 8), prefill=512
        ),
        Form(name="avx512_bf16", lanes=16, pairs=True, features=("avx512f", "avx512bf16"), prefill=512),
        Form(name="avx512", lanes=16, features=("avx512f",), prefill=512),
        Form(
            name="avx2_vnni",
            lanes=8,
            slices=3,
            features=("avx2", "fma", "f16c", "avxvnni"),
            rows=(1, 2, 4),
            prefill=256,
        ),
        Form(
            name="avx2_madd",
            lanes=8,
            slices=3,
            byte_pairs=True,
            features=("avx2", "fma", "f16c"),
            rows=(1, 2, 4, 8, 16),
            prefill=256,
        ),
        Form(name="avx2", lanes=8, panels=2, features=("avx2", "fma", "f16c"), rows=(1, 2, 4, 8, 16), prefill=256),
        Form(name="neon", lanes=4, features=("neon",), rows=(1, 2, 4)),
        Form(name="plain", lanes=1, rows=(1, 4), prefill=2),
        Form(name="avx512_int8", lanes=16, slices=1, features=("avx512f", "avx512vnni"), prefill=512),
        Form(
            name="avx2_int8",
            lanes=8,
            slices=1,
            features=("avx2", "fma", "f16c", "avxvnni"),
            rows=(1, 2, 4),
            prefill=256,
        ),
        Form(
            name="avx2_madd_int8",
            lanes=8,
            slices=1,
            byte_pairs=True,
            features=("avx2", "fma", "f16c"),
            rows=(1, 2, 4, 8, 16),
            prefill=4096,
        ),
    )
}


@cache
def host_features() -> dict[str, bool]:
    """LLVM's names of what this CPU has; every 64-bit ARM has NEON."""
    from llvmlite import binding  # which a GPU's kernels do without

    found = dict(binding.get_host_cpu_features())
    return found | {"neon": platform.machine() in ("aarch64", "arm64")}


def is_zen() -> bool:
    """Whether this is one of AMD's CPUs with vectors of 512 bits, whose dot products of bf16 are as fast as those of
    bytes; Intel's take four times as long."""
    from llvmlite import binding

    return bool(binding.get_host_cpu_name().startswith("znver"))


def forms(*, int8: bool = False) -> list[str]:
    """Names of the forms that run on this machine, those expected to be fastest first; int8: those that round
    activations instead of those that do not."""
    found = [form for form in FORMS.values() if form.int8 == int8 and form.runs_here()]
    if is_zen():
        found.sort(key=lambda form: (-form.lanes, not form.pairs))
    return [form.name for form in found]


@cache
def tiles_allowed() -> bool:
    """Whether this process, with all of its threads and those forked off, may use AMX's tiles; it is asked for once.

    Linux gives their registers, 8 KiB a thread, only to processes that ask for them.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0)
