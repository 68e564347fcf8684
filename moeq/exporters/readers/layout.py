"""What a reader must know of one on-disk layout of packed matrices.

N output rows, K inputs, G groups of inputs, b bits.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import regex

from moeq.artifacts.reading import is_count
from moeq.bounded import shown
from moeq.errors import ArtifactError, first_line
from moeq.models.source import ModelSource, TensorHeader
from moeq_kernels.widths import WORD, group_count, resolved_group_size

if TYPE_CHECKING:  # torch is imported where tensors are read: headers are looked at without it
    from torch import Tensor

    from moeq_kernels.packed import PackedWeight

Parts = Mapping[str, "Tensor"]
SECONDS = 1.0  # that a pattern may take for a name
PATTERN_CHARACTERS = 10_000
CHECKED = "every packed matrix has the parts, shapes and types that config.json says; `moeq verify` compares all"
WHOLE, PACKED = "weight", "weight_packed"  # tensors of a module that is not packed, and of one that is
FLOATS = ("F16", "BF16", "F32")  # types of scales
_OF_EXPERT, _BIASES = re.compile(r"(.+)\.\d+\.[^.]+"), "_proj_bias"  # one's matrix; a stack of all experts' biases


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What config.json declares of one module; bits: 0 where that says its own tensors; codebook: of codes that are
    floating-point numbers, as of an `Encoding`."""

    bits: int
    group_size: int
    symmetric: bool
    codebook: str = ""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A matrix as it was read; groups: the group of every input [K], None where they are consecutive; of: its values
    float32 [N, K], where no packed weight holds it."""

    weight: PackedWeight | None
    groups: Tensor | None = None
    of: Tensor | None = None

    def values(self) -> Tensor:
        """Values float32 [N, K]."""
        from moeq_kernels.packing import unpack

        if self.weight is None:
            assert self.of is not None
            return self.of
        if self.groups is None:
            return self.weight.dequantize()
        packed, spread = self.weight, self.groups.long()
        zero: Tensor | float = 2.0 ** (packed.bits - 1)
        if packed.zeros is not None:
            zero = unpack(packed.zeros, packed.bits, packed.scales.shape[-1]).float()[:, spread]
        codes = unpack(packed.codes, packed.bits, packed.inputs).float()
        return (codes - zero) * packed.scales.float()[:, spread]


class Layout(Protocol):
    """One layout. anchor: the tensor that every packed module has; parts: all that it may have."""

    anchor: str
    parts: tuple[str, ...]

    def grid(self, names: Sequence[str]) -> Grid | None:
        """What config.json declares of a module, by its names in memory and on disk; None: not packed."""

    def shape(self, headers: Mapping[str, TensorHeader], grid: Grid) -> tuple[int, int]:
        """Rows and inputs of the matrix that the parts stand for; ValueError where they do not say."""

    def check(self, headers: Mapping[str, TensorHeader], grid: Grid, rows: int, inputs: int) -> None:
        """ValueError when a part of a matrix [rows, inputs] is absent, or of another type or shape than its grid's."""

    def read(self, parts: Parts, grid: Grid, rows: int, inputs: int) -> Stored:
        """The matrix from its parts; ValueError saying what is wrong with them."""


def packed_modules(source: ModelSource, layout: Layout | None) -> dict[str, dict[str, TensorHeader]]:
    """{packed module on disk: {part: header}}; ArtifactError for one whose weight is there as it was, too, and for an
    expert whose biases lie in a stack of all experts'."""
    if layout is None:
        return {}
    anchor, there = f".{layout.anchor}", source.tensors
    modules = {
        name: {part: there[f"{name}.{part}"] for part in layout.parts if f"{name}.{part}" in there}
        for name in (key.removesuffix(anchor) for key in there if key.endswith(anchor))
    }
    for name, parts in modules.items():
        beside, whole = PACKED if PACKED in parts else layout.anchor, there.get(f"{name}.{WHOLE}")
        if whole is not None and (WHOLE not in parts or beside == PACKED):  # FP8's own part is called so, too
            what = f"{name}.{WHOLE} lies beside {name}.{beside}: nothing says which of the two counts"
            do = "remove one of them, or make or download the checkpoint again"
            raise ArtifactError(what, where=str(whole.file), do=do)
    apart = {found[1] for name in modules if (found := _OF_EXPERT.fullmatch(name)) is not None}
    stack = next((key for key in there if key.endswith(_BIASES) and key.rpartition(".")[0] in apart), None)
    if stack is not None:
        what = f"{stack} holds the biases of all experts, whose matrices are packed one by one"
        raise ArtifactError(what, where=str(there[stack].file), do="give the original model to quantize it")
    return modules


def expect(headers: Mapping[str, TensorHeader], part: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """ValueError when a part is absent, or of another type or shape."""
    if part not in headers:
        raise ValueError(f"{part} is missing")
    header = headers[part]
    if header.dtype not in dtypes or header.shape != shape:
        wanted = f"{' or '.join(dtypes)} {list(shape)}"
        raise ValueError(f"{part} is {header.dtype} {list(header.shape)}, not {wanted} as config.json has it")


def shape_of_words(headers: Mapping[str, TensorHeader], grid: Grid) -> tuple[int, int]:
    """Rows and inputs of `weight` [N, K*b/32], words of rows of codes; ValueError where they do not say."""
    packed = headers["weight"].shape if "weight" in headers else ()
    if len(packed) != 2 or packed[1] * WORD % grid.bits:
        raise ValueError(f"weight {list(packed)} is no matrix of {grid.bits} bits")
    return packed[0], packed[1] * WORD // grid.bits


def read_back(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, grid: Grid, inputs: int, index: Tensor | None
) -> Stored:
    """A matrix of its parts. codes: bit streams [N, B]; scales [N, G]; zeros uint8 [N, G], None: all in the middle;
    index: the group of every input [K], None: as they follow each other.

    Scales are kept as float16 where each has exactly that value, else in their own type. ValueError for groups that
    there are not.
    """
    import torch

    from moeq_kernels.grids import SCALE_DTYPE
    from moeq_kernels.packed import PackedWeight
    from moeq_kernels.packing import pack

    size, half = group_length(grid, inputs), scales.to(SCALE_DTYPE)
    middle = zeros is None or bool((zeros == 2 ** (grid.bits - 1)).all())
    weight = PackedWeight(
        codes=codes.contiguous(),
        scales=half if torch.equal(half.double(), scales.double()) else scales,
        zeros=None if middle or zeros is None else pack(zeros, grid.bits),
        bits=grid.bits,
        group_size=size,
        inputs=inputs,
        symmetric=middle,
    )
    return Stored(weight=weight, groups=_ordered(index, inputs, size))


def _ordered(index: Tensor | None, inputs: int, size: int) -> Tensor | None:
    """The group of every input where activations were ordered; None where groups are consecutive inputs."""
    if index is None:
        return None
    import torch

    groups = index.long()
    if torch.equal(groups, torch.arange(inputs) // resolved_group_size(inputs, size)):
        return None
    if int(groups.min()) < 0 or int(groups.max()) >= group_count(inputs, size):
        raise ValueError("g_idx names groups that there are not")
    return groups


class Pattern:
    """A pattern of names out of a configuration. Whoever wrote it decides how long it takes: at most SECONDS a name."""

    def __init__(self, text: Any) -> None:
        """ValueError for what is no pattern."""
        try:
            if not isinstance(text, str) or len(text) > PATTERN_CHARACTERS:
                raise ValueError(f"no text of at most {PATTERN_CHARACTERS} characters")
            with warnings.catch_warnings(action="ignore"):  # of what will be read otherwise some day
                self._compiled = regex.compile(text)
        except (regex.error, ValueError, RecursionError, OverflowError) as error:
            raise ValueError(f"the pattern {shown(text)} ({first_line(error)})") from None

    def match(self, name: str) -> bool:
        """Whether a name begins with it; ArtifactError where that takes too long."""
        return self._found(self._compiled.match, name)

    def search(self, name: str) -> bool:
        """Whether it is in a name; ArtifactError where that takes too long."""
        return self._found(self._compiled.search, name)

    def _found(self, look: Callable[..., Any], name: str) -> bool:
        try:
            return look(name, timeout=SECONDS) is not None
        except TimeoutError:
            what = f"the pattern {shown(self._compiled.pattern)} takes more than {SECONDS} s for {shown(name)}"
            raise ArtifactError(what, where="config.json", do="correct its quantization_config") from None


def checked_grid(bits: Any, group_size: Any, symmetric: Any) -> Grid:
    """The grid of these settings; ValueError for what is none."""
    if not is_count(bits) or not 1 <= bits <= WORD:
        raise ValueError(f"{shown(bits)} bits")
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise ValueError(f"groups of {shown(group_size)}")
    return Grid(bits=bits, group_size=group_size, symmetric=bool(symmetric))


def group_length(grid: Grid, inputs: int) -> int:
    """Group size as `PackedWeight` takes it: -1 where one group is the whole row."""
    return -1 if grid.group_size <= 0 or grid.group_size >= inputs else grid.group_size
