"""Where a run's assignment loads, as summaries end with it, and what the restriction of a target costs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from moeq.artifacts.assignment import FULL, Assignment
from moeq.artifacts.loads_in import LoadsIn, Packed, by_widths, in_the_way, loads_in
from moeq.artifacts.manifest import PlacedModule
from moeq.artifacts.targets import Target, grids_of, refuse_stack
from moeq.assigners import report
from moeq.assigners.inputs import AssignInputs, Loaded
from moeq.errors import FormatError, RecipeError
from moeq.models.disk_names import DiskNames
from moeq.models.experts import ExpertLayer
from moeq.runtimes import runtimes
from moeq.stages import non_experts as others
from moeq.stages.context import Context
from moeq.stages.target_sizes import sizes_of_target

PRICED = 4096  # most experts for which what other runtimes cost is worked out: it takes as long as to score


def where_it_loads(context: Context, assignment: Assignment, inputs: AssignInputs | None = None) -> LoadsIn:
    """Every runtime, or what is in its way; inputs: with them, of a model that is not too large, what it costs there.

    price: by how much the least objective within the target lies above that of any mix on the same budget.
    """
    found = loads_in(
        assignment.expert_widths(),
        **vars(assignment.encoding),
        layers=context.model.layers,
        others=_packed_beside(context),
        check=partial(check_family, context),
        refuse_other=partial(_refuse_other, DiskNames(context.model.skeleton)),
    )
    experts = sum(layer.num_experts for layer in context.model.layers)
    refused = [name for name, why in found.items() if why is not None and by_widths(why)]
    if inputs is None or experts > PRICED or not refused:
        return found
    for price in report.prices(inputs, assignment, refused, seen_by(context)):
        why = found[price.target]
        if why is not None and price.refusal is None and price.ratio is not None:
            why["price"] = price.ratio - 1
    return found


def refuse_beside(context: Context, target: Target) -> tuple[str, str] | None:
    """Why a target does not load what the recipe packs beside the experts, and what to do; None where it does."""
    refuse = partial(_refuse_other, DiskNames(context.model.skeleton), target.name)
    reason, do = in_the_way(target, _packed_beside(context), refuse)
    return None if reason is None else (reason, do)


def _packed_beside(context: Context) -> list[Packed]:
    """What the recipe packs beside the experts."""
    hows = ((module, others.grid(context.recipe, module.kind)) for module in others.chosen(context))
    return [
        Packed(
            kind=module.kind, rows=module.rows, inputs=module.inputs, bits=how.bits, encoding=how.encoding,
            name=module.name,
        )
        for module, how in hows
    ]  # fmt: skip


def _refuse_other(names: DiskNames, runtime: str, one: Packed | PlacedModule) -> str | None:
    """Why a runtime's format has no place for a packed module; a runtime that knows the model is asked."""
    refuse = runtimes()[runtime].exporter.refuse_other
    try:
        refused = None if refuse is None else refuse(names, one.name, (one.rows, one.inputs))
    except FormatError as error:
        return error.what
    return None if refused is None else refused[0]


def seen_by(context: Context) -> report.SeenBy:
    """What targets make of a run's model."""
    return report.SeenBy(
        refuse=partial(refuse_width, context),
        loaded=partial(loaded_matrices, context),
        sizes=partial(sizes_of_target, context),
    )


def check_family(context: Context, name: str) -> None:
    """FormatError for a model that a runtime does not know; what is not installed here is not asked."""
    check = runtimes()[name].exporter.check
    if check is not None:
        try:
            check(context.model.source, context.model.skeleton)
        except RecipeError:
            return


def refuse_width(context: Context, target: Target, bits: int) -> FormatError | None:
    """Why a target cannot load a width of this model's matrices in the recipe's grid; None where it can."""
    for layer in context.model.layers:
        for projection in layer.projections:
            refusal = _refuse_matrix(context, target, layer, projection, bits, widen=False)
            if refusal is not None:
                return FormatError(refusal[0], where=f"{layer.name}, {projection}", do=refusal[1])
    return None


def loaded_matrices(context: Context, target: Target, *, widen: bool = False) -> Loaded:
    """At which widths a target loads every matrix, as `AssignInputs.loaded`; a matrix that it loads at none counts as
    loaded at all, since what is in the way there no width decides.

    widen: whether what it does not load may be stored in a wider grid.
    """
    widths = [width for width in sorted(context.recipe.losses.bits) if width in target.widths]

    def of(layer: ExpertLayer, projection: str) -> tuple[int, ...]:
        refuse = partial(_refuse_matrix, context, target, layer, projection, widen=widen)
        return (*([width for width in widths if refuse(width) is None] or widths), FULL)

    every = tuple(tuple(of(layer, name) for name in layer.projections) for layer in context.model.layers)
    return every if any(own != (*widths, FULL) for matrices in every for own in matrices) else ()


def _refuse_matrix(
    context: Context, target: Target, layer: ExpertLayer, projection: str, bits: int, *, widen: bool
) -> tuple[str, str] | None:
    """Why a target cannot load a matrix at a width, and what to do. A target of symmetric grids alone is asked about
    those: its price is that of the same widths."""
    own = context.recipe.losses.encoding
    encoding = vars(replace(own, symmetric=own.symmetric or target.symmetric_only))
    return refuse_stack(target, grids_of(layer, projection, [bits], **encoding), full=False, widen=widen)
