"""What a checkpoint must be like where a runtime takes one grid for all experts of a layer, or of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moeq.artifacts.targets import ANY_GRID, Grid, symmetric_width
from moeq.errors import FormatError
from moeq.exporters.foreign import Draft, grid_of
from moeq.models.experts import ExpertLayer
from moeq_kernels.description import Matrix
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import FULL, Encoding


def refuse_others(draft: Draft) -> None:
    """FormatError for packed modules beside the experts, where the target loads these in full precision only."""
    for name, weight in () if draft.target.others else draft.source.others():
        draft.other(name, weight)


class Scheme:
    """What all experts of a layer, or of the model, share: what the first of their matrices has."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._first: tuple[str, Grid | None] | None = None  # None: full precision

    def check(self, name: str, matrix: Matrix) -> None:
        """FormatError where a matrix differs from the first in what one scheme says."""
        plain = isinstance(matrix, Tensor)
        if plain and FULL not in self._draft.target.widths:
            raise self._mixed(name, "full precision", "packed experts")
        grid = None if plain else self._draft.grids[name]
        first_name, first = self._first = self._first or (name, grid)
        if grid is None:
            if first is not None:
                raise self._mixed(name, "full precision", f"{first.bits} bits of {first_name}")
        elif first is None:
            raise self._mixed(name, f"{grid.bits} bits", f"full precision of {first_name}")
        elif grid.bits != first.bits:
            raise self._mixed(name, f"{grid.bits} bits", f"{first.bits} bits of {first_name}", wider=True)
        elif grid.group_size != first.group_size:
            raise self._mixed(name, f"groups of {grid.group_size}", f"groups of {first.group_size} of {first_name}")

    def tensors(
        self, linear: Callable[[PackedWeight], dict[str, Tensor]], name: str, matrix: Matrix
    ) -> dict[str, Tensor]:
        """The parts of a matrix, `linear` those of a packed one; FormatError where it differs from the others, or has
        values beyond float16."""
        self.check(name, matrix)
        if isinstance(matrix, Tensor):
            return {"weight": matrix}
        refuse_infinite(self._draft, name, matrix)
        return linear(matrix)

    def _mixed(self, name: str, what: str, other: str, *, wider: bool = False) -> FormatError:
        """wider: whether codes in one wider grid would be alike."""
        target = self._draft.target
        of = "all experts of the model" if target.granularity == "model" else "all experts of a layer"
        return FormatError(
            f"{what} beside {other}; {target.name} takes one scheme for {of}",
            where=f"for {target.name}: {name}",
            do=f"assign one width (assign.target: {target.name})"
            + (", or store all codes in one wider grid (export.widen: true, --widen)" if wider else ""),
        )


def common_width(draft: Draft, layers: Sequence[ExpertLayer]) -> int | None:
    """The least width of symmetric codes that holds every expert's of some layers, None where there is none such: each
    is then refused in its own words.

    All of these experts are read for it.
    """
    grids = [
        grid_of(matrix)
        for layer in layers
        for expert in range(layer.num_experts)
        for matrix in draft.source.expert(layer, expert)[0].values()
        if isinstance(matrix, PackedWeight)
    ]
    if any(Encoding.of(grid).codes != "grid" for grid in grids):
        return None
    least = max(map(symmetric_width, grids), default=0)
    return min((width for width in draft.target.widths if least <= width < FULL), default=None)


def grids_by_layer(draft: Draft) -> list[tuple[str, Grid | None]]:
    """(module of a layer's experts as the family has it, their grid, None in full precision) of every written layer.

    FormatError where experts are not below a module called experts, by which runtimes ask for what they share.
    """
    found = []
    for layer in draft.source.layers:
        key = draft.expert_keys(layer)[0, layer.projections[0]]
        if ".experts." not in key:
            raise no_experts(draft)
        stem = key[: key.index(".experts.")] + ".experts"
        found.append((stem, draft.grids.get(f"{layer.name}.0.{layer.projections[0]}")))
    return found


def no_experts(draft: Draft) -> FormatError:
    """For a family whose experts a pattern of a module called experts does not name."""
    what = "experts are not below a module called experts"
    return FormatError(what, where=f"for {draft.runtime.name}", do="write it for another runtime")


def refuse_infinite(draft: Draft, name: str, weight: PackedWeight) -> None:
    """FormatError where codes times float16 scales are infinite in float16, in which kernels multiply them."""
    largest = torch.finfo(torch.float16).max
    if weight.encoding.floats:
        return  # runtimes compute in bfloat16
    near = bool((weight.scales.float() * 2 ** (weight.bits - 1) > largest).any())
    if near and weight.scales.dtype == torch.float16 and bool((weight.dequantize().abs() > largest).any()):
        what = "values beyond float16, in which codes are multiplied by scales"
        raise FormatError(what, where=f"for {draft.runtime.name}: {name}", do=ANY_GRID)
