"""What runtimes can load: the widths, how far they may be mixed, the grid, and the format that is written for them.

Exporters declare theirs (`moeq.registry`), from exports that were loaded and compared with the dequantized model, and
from the runtimes' own sources (see MIXED for what goes wrong).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Unpack

from moeq.artifacts.sized import Sized
from moeq.errors import FormatError
from moeq.runtimes import NATIVE, runtimes
from moeq_kernels.iq_types import SETS
from moeq_kernels.widths import DROPPED, FULL, Codes, Encoding, EncodingKeys, group_count

if TYPE_CHECKING:
    from moeq.artifacts.assignment import Width

Granularity = Literal["projection", "expert", "stack", "layer", "model"]  # stack: a matrix of all of a layer's experts
FINENESS: tuple[Granularity, ...] = ("projection", "expert", "stack", "layer", "model")
OF_MATRICES: tuple[Granularity, ...] = ("projection", "stack")  # where matrices of an expert may differ
MIXED = {
    "expert": "it takes one width for all matrices of an expert",
    "layer": "it takes one width for all experts of a layer",
    "model": "it takes one width for all experts of the model",
}
NESTED = (2, 3)  # widths whose codes can lead wider ones and then stand between the points of a grid
WIDEN = "set export.widen: true (--widen), which stores the same values in a wider symmetric grid"
ONE_WIDTH = "give every layer's experts one width (assign.granularity: layer), or write it for native or auto-round"
CODES: dict[Codes, str] = {  # in messages
    "grid": "grids", "trellis": "trellis codes", "exl3": "EXL3's codes", "nvfp4": "NVFP4", "mxfp4": "MXFP4",
    "iq": "i-quants",
}  # fmt: skip
ANY_GRID = "write it for native or dequantized"


def in_words(encoding: Encoding) -> str:
    """What the codes are, and which weights share a scale."""
    groups = "one group a row" if encoding.group_size == -1 else f"groups of {encoding.group_size} weights"
    if encoding.floats:
        return f"{encoding.codebook.upper()} ({groups}) at 4 bits, FP8 (one scale a row) at 8"
    if encoding.codes == "iq":
        return f"i-quants ({', '.join(SETS[encoding.codebook].values())})"
    if encoding.codebook:
        return f"EXL3's codes ({encoding.codebook}), {groups}"
    if encoding.state_bits:
        return f"trellis codes of {1 << encoding.state_bits:,} states, {groups}"
    return f"{groups}, {'symmetric' if encoding.symmetric else 'with zero points'}"


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a runtime loads of a format.

    granularity: what shares one width; reads: where that comes from; multiple: of what a matrix's rows and inputs must
    be; others: whether modules beside the experts may be packed, tables: embeddings and heads, too; short_groups:
    whether a row's last group may be shorter; groups: sizes of groups that it has kernels for, None: any; nested:
    whether codes may be the leading bits of wider ones; codes: of what kinds; stacks: whether, where the experts of a
    layer share a width, their matrices may differ; blocks: {(bits, symmetric): of what a row and its groups must be
    multiples}, where only these grids have a type at all; block_bytes: what such a block takes, whatever its groups;
    group_bytes: what a group takes beside its codes, where that is not a scale and a zero point as moeq packs them;
    runs: of what groups alone must be multiples, where scales may be rounded to fit; rounded: the name of such a target
    beside one that takes values as they are; proof: the test or source behind the row; called, snippet: in words and in
    Python, where not its exporter's."""

    name: str
    widths: tuple[int, ...]
    granularity: Granularity = "projection"
    symmetric_only: bool = False
    reads: str
    multiple: int = 1
    others: bool = True
    tables: bool = True
    short_groups: bool = False
    groups: tuple[int, ...] | None = None
    nested: bool = False
    codes: tuple[Codes, ...] = ("grid",)
    stacks: bool = False
    blocks: Mapping[tuple[int, bool], int] | None = None
    block_bytes: Mapping[tuple[int, bool], int] | None = None
    group_bytes: int | None = None
    runs: Mapping[tuple[int, bool], int] | None = None
    rounded: str = ""
    proof: str
    called: str = ""
    snippet: str = ""

    def run(self, bits: int, symmetric: bool) -> int | None:
        """Of what the groups of a grid must be multiples where it has blocks; None where no type holds it."""
        return (self.runs or self.blocks or {}).get((bits, symmetric))

    @property
    def has_own_bytes(self) -> bool:
        """Whether a matrix may take other bytes in it than in the native format."""
        return (self.block_bytes, self.group_bytes) != (None, None)

    def matrix_bytes(self, grid: Grid, *, widen: bool = False) -> int | None:
        """What it stores of a matrix; None where that is as the native format has it, or where it does not load it."""
        stored = loadable_grid(self, grid) if widen else grid
        if not self.has_own_bytes or Encoding.of(grid).codes == "iq" or refuse_matrix(self, stored) is not None:
            return None
        if self.blocks is None or self.block_bytes is None:
            groups = stored.rows * group_count(stored.inputs, stored.group_size)
            return stored.rows * stored.inputs * stored.bits // 8 + groups * (self.group_bytes or 0)
        kind = (stored.bits, stored.symmetric)
        return grid.rows * grid.inputs // self.blocks[kind] * self.block_bytes[kind]

    def listed(self) -> str:
        """Its widths as a message has them."""
        return ", ".join(map(str, self.widths))


def targets() -> dict[str, Target]:
    """Every target by its name, the native format's first."""
    return {name: one.target for name, one in runtimes().items() if one.target is not None}


def target_of(name: str | None) -> Target:
    """What a runtime loads, of assign.target's name; the native one's, any mix, for none and for plain weights."""
    known = targets()
    return known.get(name or NATIVE, known[NATIVE])


def loaded_by(name: str) -> Target | None:
    """What an export for a runtime is checked against; None for one that takes plain weights."""
    return targets().get(name)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How one packed matrix [rows, inputs] is stored; nested: its codes are the leading bits of wider ones;
    state_bits, codebook: of what is no grid, as of an `Encoding`."""

    rows: int
    inputs: int
    bits: int
    group_size: int
    symmetric: bool
    nested: bool = False
    state_bits: int = 0
    codebook: str = ""


def refuse_matrix(target: Target, grid: Grid) -> tuple[str, str] | None:
    """Why a target cannot load one packed matrix, whatever lies beside it, and the nearest thing that works."""
    if (refused := refuse_codes(target, Encoding.of(grid))) is not None:
        return refused
    if (unfit := refuse_shape(target, grid.rows, grid.inputs)) is not None:
        return unfit, ANY_GRID
    if grid.nested and not target.nested:
        return f"{grid.bits} bits that lead wider codes; {target.name} has no such grid", "set losses.nested: false"
    if grid.bits not in target.widths:
        if Encoding.of(grid).codes != "grid":  # of which none is wider with the same values
            do = "convert it to dequantized"
        else:
            do = _widening(target, grid, "leave it in full precision")
        return f"{grid.bits} bits; {target.name} loads {target.listed()}", do
    if target.symmetric_only and not grid.symmetric:
        what = f"zero points; {target.name} reads symmetric grids only"
        return what, f"set losses.symmetric: true, or {_widening(target, grid, ANY_GRID)}"
    if target.groups is not None and not Encoding.of(grid).floats and grid.group_size not in target.groups:
        what = "whole rows as groups" if grid.group_size == -1 else f"groups of {grid.group_size}"
        listed = ", ".join(map(str, target.groups))
        return f"{what}; {target.name} loads groups of {listed}", _whole_groups(target, grid)
    if grid.group_size != -1 and grid.inputs % grid.group_size and not target.short_groups:
        what = f"{grid.inputs} inputs in groups of {grid.group_size}; {target.name} reads whole groups only"
        return what, _whole_groups(target, grid)
    if target.blocks is None or Encoding.of(grid).codes == "iq":
        return None
    return _refuse_blocks(target, target.blocks, grid)


def refuse_shape(target: Target, rows: int, inputs: int) -> str | None:
    """Why a target packs no matrix of a shape, which no setting changes; None where it does."""
    for what, size in (("rows", rows), ("inputs", inputs)):
        if size % target.multiple:
            return f"{size} {what}; {target.name} packs multiples of {target.multiple}"
    return None


def refuse_codes(target: Target, encoding: Encoding) -> tuple[str, str] | None:
    """Why a target reads no codes of a kind at all, and what to do; None where it does."""
    if encoding.codes in target.codes:
        return None
    return f"{CODES[encoding.codes]}; {target.name} has none", make_others(target)


def make_others(target: Target) -> str:
    """What to do where codes are not of a kind that a target reads."""
    return f"`moeq run --for {target.name}` makes {CODES[target.codes[0]]} instead"


def _whole_groups(target: Target, grid: Grid) -> str:
    """The largest size of groups that rows are multiples of, as a setting."""
    fits = [size for size in target.groups or (16, 32, 64, 128) if grid.inputs % size == 0]
    if not fits and target.groups is not None:
        return ANY_GRID
    return f"set losses.group_size: {max(fits, default=-1)}"


def _in_blocks(target: Target, blocks: Mapping[tuple[int, bool], int], grid: Grid) -> bool:
    """Whether a grid has a type whose blocks its rows and groups are multiples of."""
    length, run = blocks.get((grid.bits, grid.symmetric)), target.run(grid.bits, grid.symmetric)
    return length is not None and run is not None and grid.inputs % length == 0 and _group(grid) % run == 0


def _group(grid: Grid) -> int:
    return grid.inputs if grid.group_size == -1 else min(grid.group_size, grid.inputs)


def _refuse_blocks(target: Target, blocks: Mapping[tuple[int, bool], int], grid: Grid) -> tuple[str, str] | None:
    """Why no type of blocks holds a grid, and the nearest thing that works."""
    if _in_blocks(target, blocks, grid):
        return None
    widens = any(_in_blocks(target, blocks, wide) for wide in _wider(target, grid))
    length, least = blocks.get((grid.bits, grid.symmetric)), min(blocks.values())
    kind = f"{grid.bits} bits{'' if grid.symmetric else ' with zero points'}"
    if length is None:
        why = f"{kind}; {target.name} has no type that holds them"
        return why, WIDEN if widens else f"set losses.symmetric: true, or {ANY_GRID}"
    why = f"{kind} of {grid.inputs} inputs in groups of {_group(grid)}; {target.name} has blocks of {length}"
    if grid.inputs % length == 0:
        size = f"set losses.group_size: {target.run(grid.bits, grid.symmetric)} or a multiple"
        rounded = f", or write it for {target.rounded}, which rounds scales" if target.rounded else ""
        return why, f"{size}{rounded}, or {WIDEN}" if widens else f"{size}{rounded}"
    if widens:
        return why, WIDEN
    return why, f"set losses.group_size: {least}, and {WIDEN}" if grid.inputs % least == 0 else ANY_GRID


def refuse_layers(
    name: str,
    layers: Sequence[Sized],
    widths: Sequence[Sequence[Width]],
    *,
    widen: bool = False,
    **encoding: Unpack[EncodingKeys],
) -> tuple[str, str] | None:
    """Why a runtime cannot load widths of every layer's experts, and the nearest thing that works; None where it can.

    widen: whether codes may go into wider symmetric ones of the same values; encoding: `vars` of that of the codes.
    """
    target = loaded_by(name)
    if target is None:
        return None
    return refuse_target(target, layers, widths, widen=widen, **encoding)


def refuse_target(
    target: Target,
    layers: Sequence[Sized],
    widths: Sequence[Sequence[Width]],
    *,
    widen: bool = False,
    **encoding: Unpack[EncodingKeys],
) -> tuple[str, str] | None:
    """As `refuse_layers`, of a target."""
    from moeq.artifacts.assignment import matrix_widths, width_of

    if (refused := refuse_codes(target, Encoding(**encoding))) is not None:
        return refused
    if not widen:
        mixed = refusal(target, widths, [layer.name for layer in layers], symmetric=encoding["symmetric"])
        if mixed is not None:
            used = {bits for experts in widths for width in experts for bits in matrix_widths(width)}
            near = f"assign.target: {target.name} assigns what it loads"
            widens = not used <= set(target.widths) or target.granularity == "model" or target.stacks
            return mixed, f"{near}, or {WIDEN}" if widens else near
    for layer, experts in zip(layers, widths, strict=True):
        for projection in layer.projections:
            of_matrix = sorted({width_of(width, projection) for width in experts})
            grids = grids_of(layer, projection, of_matrix, **encoding)
            refused = refuse_stack(target, grids, full=FULL in of_matrix, widen=widen)
            if refused is not None:
                return f"{layer.name}, {projection}: {refused[0]}", refused[1]
    return None


def grids_of(layer: Sized, projection: str, widths: Sequence[int], **encoding: Unpack[EncodingKeys]) -> list[Grid]:
    """How a matrix of a layer's experts is stored at several widths, but for full precision."""
    rows, inputs = layer.shape(projection)
    own = Encoding(**encoding)
    every = {bits: vars(own.at(bits)) | {"nested": own.nested and bits in NESTED} for bits in widths if bits != FULL}
    return [Grid(rows=rows, inputs=inputs, bits=bits, **one) for bits, one in every.items()]


def refuse_stack(target: Target, grids: Sequence[Grid], *, full: bool, widen: bool) -> tuple[str, str] | None:
    """Why a target cannot load one matrix of all experts of a layer, in these grids, and the nearest thing that works.

    full: whether some are in full precision. Widths that may not stand side by side are refused before, or widened.
    """
    if full and grids and target.stacks:
        return f"full precision beside {grids[0].bits} bits; {target.name} has one type for all", ONE_WIDTH
    for grid in grids:
        refused = refuse_matrix(target, loadable_grid(target, grid) if widen else grid)
        if refused is not None:
            return refused
    if target.stacks and widen and len(set(grids)) > 1 and widest_of(target, grids) is None:
        listed = ", ".join(map(str, sorted({grid.bits for grid in grids})))
        return f"no width that {target.name} loads holds {listed} bits", ONE_WIDTH
    return None


def loadable_grid(target: Target, grid: Grid) -> Grid:
    """The grid itself or, where a target cannot read it, the least symmetric one of the same values that it can."""
    if grid.nested or refuse_matrix(target, grid) is None:
        return grid
    return next((wide for wide in _wider(target, grid) if refuse_matrix(target, wide) is None), grid)


def _wider(target: Target, grid: Grid) -> list[Grid]:
    """Symmetric grids of a target's widths that hold the values of one, the least first."""
    least = symmetric_width(grid)
    return [replace(grid, bits=width, symmetric=True) for width in target.widths if least <= width < FULL]


def _widening(target: Target, grid: Grid, without: str) -> str:
    """To widen, where a target loads a wider grid, and what such a one needs beside; without: where there is none."""
    refused = [refuse_matrix(target, wide) for wide in _wider(target, grid)]
    if None in refused:
        return WIDEN
    beside = next((one[1] for one in refused if one is not None), without)
    return f"{beside}, and {WIDEN}" if beside.startswith("set losses.") and WIDEN not in beside else beside


def symmetric_width(grid: Grid) -> int:
    """The least width of symmetric codes of the same values."""
    return 2 if grid.bits in (DROPPED, 1) else grid.bits + (not grid.symmetric)


def widest_of(target: Target, grids: Sequence[Grid]) -> int | None:
    """The least width of symmetric codes that holds all grids, none nested, and that a target can read; or None."""
    if any(grid.codebook or grid.state_bits for grid in grids):
        return None
    least = max(map(symmetric_width, grids))
    for width in target.widths:
        wide = [replace(grid, bits=width, symmetric=True) for grid in grids]
        if least <= width < FULL and all(refuse_matrix(target, grid) is None for grid in wide):
            return width
    return None


def loads_width(target: Target, bits: int, *, group_size: int, symmetric: bool) -> bool:
    """Whether a target loads a width of matrices whose rows are whole groups."""
    if bits not in target.widths or bits == FULL or target.blocks is None:
        return bits in target.widths
    run = target.run(bits, symmetric)
    return run is not None and (group_size == -1 or group_size % run == 0)


def refuse_grid(target: Target, *, symmetric: bool) -> str | None:
    """Why a target cannot read the grid, or None."""
    if target.symmetric_only and not symmetric:
        return f"{target.name} reads symmetric grids only; set losses.symmetric: true"
    return None


def may_differ(target: Target, wanted: Granularity | None) -> bool:
    """Whether matrices of an expert may have widths of their own, where that is asked for (`granularity_within`)."""
    return wanted == "projection" and (target.stacks or target.granularity == "projection")


def granularity_within(target: Target, wanted: Granularity | None) -> Granularity:
    """What has one width: what was asked for, or the finest that a target takes (none asked: experts or coarser).

    Projections that were asked for are those of all of a layer's experts where a target has one type for them.

    Raises FormatError where a target cannot take what was asked for.
    """
    if wanted is None:
        return max("expert", target.granularity, key=FINENESS.index)
    if wanted == "projection" and target.stacks:
        return "stack"
    if FINENESS.index(wanted) < FINENESS.index(target.granularity):
        raise FormatError(
            f"granularity {wanted} cannot be loaded: {MIXED[target.granularity]}",
            where=f"target {target.name}",
            do=f"set assign.granularity: {target.granularity if target.granularity != 'model' else 'null'}, or "
            "target: native",
        )
    return wanted


def refusal(
    target: Target,
    widths: Sequence[Sequence[Width]],
    names: Sequence[str],
    *,
    symmetric: bool,
    group_size: int | None = None,
) -> str | None:
    """Why a target cannot load widths of every layer's experts, naming the first layer and expert in the way.

    group_size: where what a target loads depends on it; None: it is looked at later.
    """
    refused = refuse_grid(target, symmetric=symmetric)
    if refused is not None:
        return refused
    loaded = [
        bits
        for bits in target.widths
        if group_size is None or loads_width(target, bits, group_size=group_size, symmetric=symmetric)
    ]
    for name, experts in zip(names, widths, strict=True):
        for expert, width in enumerate(experts):
            first = experts[0] if target.granularity == "layer" else widths[0][0]
            reason = _refuse_expert(target, width, first, loaded)
            if reason is not None:
                return f"{name}, expert {expert}: {reason}"
    return None


def _refuse_expert(target: Target, width: Width, first: Width, loaded: Sequence[int]) -> str | None:
    """Why a target cannot load one expert beside the first of its layer or model; loaded: the widths that it can."""
    from moeq.artifacts.assignment import matrix_widths

    foreign = sorted(set(matrix_widths(width)) - set(loaded))
    if foreign:
        grid = "" if len(loaded) == len(target.widths) else " of this grid"
        return f"{foreign[0]} bits; {target.name} loads {', '.join(map(str, loaded))}{grid}"
    if target.granularity == "projection" or (target.stacks and width == first):
        return None
    if not isinstance(width, int) and not target.stacks:
        return f"{_listed(width)} bits; {MIXED[target.granularity]}"
    if target.granularity != "expert" and width != first:
        return f"{_listed(width)} bits beside {_listed(first)}; {MIXED[target.granularity]}"
    return None


def _listed(width: Width) -> str:
    """A width as a message has it."""
    return str(width) if isinstance(width, int) else ", ".join(f"{name} {bits}" for name, bits in width.items())


def check(
    target: Target, widths: Sequence[Sequence[Width]], names: Sequence[str], *, symmetric: bool, group_size: int
) -> None:
    """FormatError when a target cannot load what was assigned."""
    reason = refusal(target, widths, names, symmetric=symmetric, group_size=group_size)
    if reason is not None:
        raise FormatError(
            reason,
            where=f"target {target.name}",
            do="use method optimal, which decides within a target, or target: native",
        )
