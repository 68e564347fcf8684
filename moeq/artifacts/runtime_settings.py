"""What a recipe has to say so that a runtime loads what comes of it: `--for RUNTIME`.

It follows from what the runtime's target declares, and from the shapes of the model's matrices where they are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import get_args

from moeq.artifacts.loads_in import TABLES
from moeq.artifacts.sized import Sized
from moeq.artifacts.targets import CODES, FINENESS, Grid, Target, may_differ, refuse_matrix
from moeq.errors import RecipeError
from moeq.recipe import BUDGETS, SHARED, Bits, Recipe
from moeq.registry import ALLOCATORS, QUANTIZERS
from moeq.runtimes import NATIVE, runtime
from moeq_kernels.iq_types import SETS, stored_bits
from moeq_kernels.widths import FULL, Codes

ASSUMED = (4096, 4096)  # rows and inputs of a matrix where no model is known
GROUP_SIZES = (128, 64, 32, 256, -1)  # that are tried where the recipe's does not do
SHORT = 32  # the group in which the native checkpoint takes what blocks with scales of their own do
WITHIN = "optimal"  # the method that decides within any target
SCALE_BITS = 16  # of a group
MAKERS: dict[Codes, str] = {  # who makes codes that are read
    "grid": "gptq", "trellis": "trellis", "exl3": "exl3", "nvfp4": "nvfp4", "mxfp4": "mxfp4", "iq": "iq",
}  # fmt: skip
OF_CODES = ("losses.methods", "assign.quantizer")  # which codes are made
CHOICE = 2  # widths that there should be to choose from
WIDTHS: tuple[int, ...] = get_args(Bits)  # that replicas can have


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A key of a recipe that takes another value, and why."""

    key: str
    value: str
    why: str

    @property
    def change(self) -> str:
        """As --set takes it."""
        return f"{self.key}={self.value}"

    def __str__(self) -> str:
        return f"{self.key}: {self.value} ({self.why})"


def settings_for(
    name: str,
    recipe: Recipe,
    layers: Sequence[Sized] = (),
    said: Collection[str] | None = None,
    room: Fraction | None = None,
    fixed: Collection[str] = (),
) -> list[Setting]:
    """What a runtime needs of a recipe that does not say otherwise, and that it is written for it.

    Codes, grids and placements that it loads nowhere give way whatever the recipe says, unless their keys are among
    `fixed`, which were said beside it, and so does the runtime that the recipe was for. RecipeError for such codes that
    are fixed, and for another runtime that is.

    layers: the model's MoE layers, where it is known; said: keys of the recipe that stay as they are, such as
    losses.symmetric; None: all that were given; room: bits a weight of the experts that a budget of bytes leaves. What
    a runtime cannot load in spite of it is refused later. Of two targets of one runtime the one is taken that rounds
    scales, unless the recipe's own target is the other, or codes are no grid's.
    """
    asked, made = runtime(name), recipe.losses.encoding.codes
    fixed = {*fixed, *(said or ())}
    kept = fixed if said is not None else _given(recipe) - ({*_given_way(asked.target, recipe)} - fixed)
    codes = made if asked.target is None else _wanted(asked.target, recipe, layers, kept, room)
    if codes != made:
        _check_free(name, made, fixed)
        kept = kept - {*OF_CODES}
    if codes == "grid" and asked.target is not None and asked.target.rounded and recipe.assign.target != name:
        asked, why = runtime(asked.target.rounded), f"loses less in the same bytes than {name}, which rounds no scale"
    else:
        why = "assigns what it loads"
    if "assign.target" in fixed and recipe.assign.target not in (None, name, asked.name):
        what = f"{recipe.assign.target} says otherwise than --for {name}"
        raise RecipeError(what, where="assign.target", do="give one of them")
    settings = [Setting(key="assign.target", value=asked.name, why=why)]
    others = [one for one in recipe.export.formats if one == asked.name or one != recipe.assign.target]
    formats = [*others, *({asked.name} - {NATIVE, *others})]
    if formats != recipe.export.formats:
        value = f"[{', '.join(formats)}]"
        settings.append(Setting(key="export.formats", value=value, why="beside the native checkpoint"))
    if asked.target is None:
        return settings
    more = (
        *_codes(asked.target, recipe, codes, room),
        *_grid(asked.target, recipe, layers, kept, room, codes),
        *_placed(asked.target, recipe),
    )
    settings += [setting for setting in more if setting.key not in kept]
    if codes != "iq" and not {f"assign.{key}" for key in BUDGETS} & set(kept):
        settings += _budget(asked.target, recipe, layers, {one.key: one.value for one in settings})
    return settings if "assign.method" in kept else [*settings, *_method(asked.target, recipe)]


def _given_way(target: Target | None, recipe: Recipe) -> Iterator[str]:
    """Keys of a recipe whose values a target loads nowhere."""
    if target is None:
        return
    if _asymmetric(target, recipe):
        yield from ("losses.symmetric", "losses.symmetric_range")
    if _other_groups(target, recipe):
        yield "losses.group_size"
    yield from (setting.key for setting in _placed(target, recipe))


def _asymmetric(target: Target, recipe: Recipe) -> bool:
    """Whether a recipe's grids have zero points that a target never reads."""
    return target.symmetric_only and not recipe.losses.symmetric


def _other_groups(target: Target, recipe: Recipe) -> bool:
    """Whether a recipe's groups are of a size that a target never reads."""
    return target.groups is not None and recipe.losses.group_size not in target.groups


def _check_free(name: str, made: Codes, fixed: Collection[str]) -> None:
    """RecipeError for codes that a runtime does not read and that were asked for beside it."""
    asked = next((key for key in OF_CODES if key in fixed), None)
    if asked is not None:
        raise RecipeError(f"--for {name} reads no {CODES[made]}", where=asked, do="leave one of them out")


def grid_settings(name: str, recipe: Recipe, said: Collection[str] | None = None) -> list[Setting]:
    """The grid of an `assign.target` that loads no other, where the recipe does not say it; said: as `settings_for`."""
    target, section = runtime(name).target, recipe.losses
    kept = _given(recipe) if said is None else said
    found = [] if target is None else list(_codes(target, recipe, _wanted(target, recipe, (), kept, None), None))
    if target is not None and _asymmetric(target, recipe):
        found.append(Setting(key="losses.symmetric", value="true", why=f"{name} reads symmetric grids only"))
    if target is not None and target.groups is not None and _other_groups(target, recipe):
        why = f"{name} has no kernel for groups of {section.group_size}"
        found.append(Setting(key="losses.group_size", value=str(target.groups[0]), why=why))
    return [setting for setting in found if setting.key not in kept and "losses" not in kept]


def _given(recipe: Recipe) -> set[str]:
    """Keys that a recipe was given, of its sections."""
    sections = {name: getattr(recipe, name) for name in ("losses", "others", "assign", "quantize")}
    return {f"{name}.{key}" for name, section in sections.items() for key in section.model_fields_set}


def _wanted(
    target: Target, recipe: Recipe, layers: Sequence[Sized], kept: Collection[str], room: Fraction | None
) -> Codes:
    """The recipe's codes where a target reads them, else the first of its own that suit the model and the budget."""
    made = recipe.losses.encoding.codes
    if made in target.codes:
        return made
    budget = _bits(recipe, room)
    return next((codes for codes in target.codes if _suits(codes, layers, kept, budget)), target.codes[-1])


def _bits(recipe: Recipe, room: Fraction | None) -> Fraction | None:
    """The recipe's budget of bits a weight, or what one of bytes leaves; None where it is in other units."""
    asked = recipe.assign.bits_per_weight
    return room if asked is None else Fraction(asked)


def _codes(target: Target, recipe: Recipe, wanted: Codes, room: Fraction | None) -> Iterator[Setting]:
    """Codes that it reads instead of those that it does not; grids are trained layer by layer first where scales are
    trained."""
    made = recipe.losses.encoding.codes
    if made == wanted:
        return
    yield Setting(key="losses.methods", value=f"[{MAKERS[wanted]}]", why=f"{target.name} reads no {CODES[made]}")
    yield Setting(key="assign.quantizer", value=MAKERS[wanted], why="the same")
    if wanted == "iq" and (fitting := iq_set(_bits(recipe, room))) not in (None, recipe.losses.iq_set):  # type: ignore[attr-defined]
        yield Setting(key="losses.iq_set", value=fitting, why="the finest types of 2 bits that the budget has room for")
    if wanted == "grid" and recipe.quantize.tune is not None and recipe.quantize.refine is None:
        yield Setting(key="quantize.refine", value="{}", why="codes of a grid gain by it what trellis codes begin with")


def _suits(codes: Codes, layers: Sequence[Sized], kept: Collection[str], budget: Fraction | None) -> bool:
    """Whether codes suit every matrix of a model, what was said of the grid, and a budget."""
    sides = QUANTIZERS.get(MAKERS[codes]).sides
    if any(size % sides for layer in layers for name in layer.projections for size in layer.shape(name)):
        return False
    said = {"losses.symmetric", "losses.symmetric_range", "losses.group_size"} & {*kept}
    return codes != "iq" or (bool(layers) and not said and iq_set(budget) is not None)


def iq_set(budget: Fraction | None) -> str | None:
    """The finest set of i-quants whose 2 bits a budget of bits a weight has room for, the smallest where it has room
    for 1 bit; None where it has not."""
    finest, *_, smallest = SETS
    if budget is None:
        return finest.removeprefix("iq-")
    fitting = [name for name in SETS if stored_bits(2, name) <= budget]
    if not fitting and stored_bits(1, smallest) <= budget:
        fitting = [smallest]
    return fitting[0].removeprefix("iq-") if fitting else None


def _grid(
    target: Target,
    recipe: Recipe,
    layers: Sequence[Sized],
    kept: Collection[str],
    room: Fraction | None,
    codes: Codes,
) -> Iterator[Setting]:
    """The grid in which it loads most of the widths, the recipe's own where that does; widths, where it loads too few.

    Where matrices may differ, each counts by itself. Nested codes are given up first, where it has none.
    """
    section, budget = recipe.losses, _bits(recipe, room)
    if section.nested and not target.nested:
        yield Setting(key="losses.nested", value="false", why=f"{target.name} has no codes that lead wider ones")
    if codes != "grid":
        return
    sizes = [section.group_size, *(() if "losses.group_size" in kept else GROUP_SIZES)]
    kinds = [section.symmetric, *(() if "losses.symmetric" in kept else (not section.symmetric,))]
    more, apart = f"{target.name} reads more widths of it", may_differ(target, recipe.assign.granularity)
    why = more
    if len(sizes) > 1 and target.runs is not None and budget is not None:
        leasts = (_least(target, layers, SHORT, kind, apart=apart)[0] for kind in kinds)
        if any(0 < least <= budget for least in leasts):
            sizes, why = [SHORT], "in the same bytes: its blocks have scales of their own"
    of_shapes = {grid: _loaded(target, layers, *grid) for grid in product(sizes, kinds)}
    own = set(section.bits)
    counted = {grid: widths if apart else [set.intersection(*widths)] for grid, widths in of_shapes.items()}
    size, symmetric = max(  # the first of the best
        counted, key=lambda grid: (sum(len(widths & own) for widths in counted[grid]), sum(map(len, counted[grid])))
    )
    every = set.union(*counted[size, symmetric])
    if symmetric != section.symmetric:
        reason = "it reads symmetric grids only" if target.symmetric_only else more
        yield Setting(key="losses.symmetric", value=str(symmetric).lower(), why=reason)
    if size != section.group_size:
        yield Setting(key="losses.group_size", value=str(size), why=why)
    if len(every & own) < CHOICE:
        widths = sorted(every | own)
        if widths != sorted(section.bits):
            value = f"[{', '.join(map(str, widths))}]"
            yield Setting(key="losses.bits", value=value, why=f"{target.name} loads too few of {section.bits}")


def _budget(target: Target, recipe: Recipe, layers: Sequence[Sized], changed: Mapping[str, str]) -> Iterator[Setting]:
    """The least budget at which the target loads anything, where the recipe's own lies below it.

    changed: values that keys of the recipe have taken.
    """
    asked = recipe.assign.bits_per_weight
    if asked is None:
        return
    size = int(changed.get("losses.group_size", recipe.losses.group_size))
    symmetric = changed.get("losses.symmetric", str(recipe.losses.symmetric).lower()) == "true"
    apart = "assign.granularity" not in changed and may_differ(target, recipe.assign.granularity)
    least, bits = _least(target, layers, size, symmetric, apart=apart)
    if Fraction(asked) < least:
        why = f"{target.name} loads nothing narrower than {bits} bits"
        yield Setting(key="assign.bits_per_weight", value=str(least), why=why)


def _least(
    target: Target, layers: Sequence[Sized], size: int, symmetric: bool, *, apart: bool = False
) -> tuple[Fraction, int]:
    """The fewest bits a weight at which it loads every matrix, and the widest width that takes; (0, 0) where it loads
    none. apart: whether matrices may differ."""

    def stored(shape: tuple[int, int], bits: int) -> Fraction | None:
        """None of a width that it has blocks for, and loads not."""
        if not target.has_own_bytes:
            return bits + Fraction(SCALE_BITS + (not symmetric) * bits, size if size != -1 else shape[1])
        grid = Grid(rows=shape[0], inputs=shape[1], bits=bits, group_size=size, symmetric=symmetric)
        there = target.matrix_bytes(grid)
        return None if there is None else Fraction(8 * there, shape[0] * shape[1])

    def least(shape: tuple[int, int]) -> tuple[Fraction, int]:
        known = ((one, bits) for bits in target.widths if (one := stored(shape, bits)) is not None)
        return min(known, default=(Fraction(0), 0))

    every = [layer.shape(name) for layer in layers for name in layer.projections] or [ASSUMED]
    found = {shape: least(shape) for shape in {*every}}
    if not apart:
        return max(found.values())
    weights = sum(rows * inputs for rows, inputs in every)
    mean = sum((rows * inputs * found[rows, inputs][0] for rows, inputs in every), Fraction(0)) / weights
    return mean, max(bits for _, bits in found.values())


def _shapes(layers: Sequence[Sized]) -> list[tuple[int, int]]:
    """Rows and inputs of the model's matrices, each once."""
    return sorted({layer.shape(name) for layer in layers for name in layer.projections} or {ASSUMED})


def _loaded(target: Target, layers: Sequence[Sized], group_size: int, symmetric: bool) -> list[set[int]]:
    """The widths at which it loads every shape of the model's matrices."""

    def fits(rows: int, inputs: int, bits: int) -> bool:
        grid = Grid(rows=rows, inputs=inputs, bits=bits, group_size=group_size, symmetric=symmetric)
        return refuse_matrix(target, grid) is None

    return [{bits for bits in WIDTHS if fits(*shape, bits)} for shape in _shapes(layers)]


def _placed(target: Target, recipe: Recipe) -> Iterator[Setting]:
    """What may not stand beside the experts' one width: full precision, matrices apart, other modules."""
    section = recipe.assign
    if section.gpu_experts and (_coarse(target) or FULL not in target.widths):
        yield Setting(key="assign.gpu_experts", value="0", why=f"{target.name} loads no full precision beside others")
    wanted = target.granularity if section.granularity is None or target.stacks else section.granularity
    if FINENESS.index(wanted) < FINENESS.index(target.granularity):
        yield Setting(key="assign.granularity", value="null", why=f"one width for a whole {target.granularity}")
    for kind in recipe.others.widths():
        if target.others and (target.tables or kind not in TABLES):
            continue
        yield Setting(key=f"others.{kind}", value="null", why=f"{target.name} loads it in full precision only")


def _coarse(target: Target) -> bool:
    """Whether experts of a layer share a width."""
    return FINENESS.index(target.granularity) > FINENESS.index("expert")


def _method(target: Target, recipe: Recipe) -> Iterator[Setting]:
    """A method that decides within the target, and what it takes of the section's keys.

    A method that takes no budget gives what it is asked for, which is refused later where it cannot be loaded.
    """
    section, allocator = recipe.assign, recipe.assign.allocator
    fixed = {*section.named(), *allocator.widths} - {*target.widths}
    within = ALLOCATORS.get(WITHIN)
    if (
        allocator.name == WITHIN
        or not (_coarse(target) or fixed)
        or all(getattr(section, key) is None for key in BUDGETS)
    ):
        return
    yield Setting(key="assign.method", value=WITHIN, why=f"{section.method} does not decide within {target.name}")
    taken = {*within.budgets, *within.reads}
    foreign = [key for key in SHARED if getattr(section, key) is not None and key not in taken]
    for key in (*sorted(section.settings.model_fields_set), *foreign):
        yield Setting(key=f"assign.{key}", value="null", why=f"belongs to {section.method}")
