"""assign: which expert gets which width and where it lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.markup import escape

from moeq.artifacts.assignment import (
    FULL,
    REMEDY,
    Assignment,
    ExpertChoice,
    Width,
    count_matrices,
    count_widths,
    matrix_widths,
    read_assignment,
    width_of,
    write_assignment,
)
from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import make_directory, write_json, write_text
from moeq.artifacts.profile import ExpertProfile
from moeq.artifacts.sensitivities import NAME as SENSITIVITIES
from moeq.artifacts.sensitivities import SensitivityTable, read_sensitivities, write_sensitivities
from moeq.artifacts.targets import Target, grids_of, refuse_stack
from moeq.assigners import assign, latency, report, sensitivity
from moeq.assigners.inputs import AssignInputs
from moeq.assigners.limits import limit_of
from moeq.errors import ArtifactError, AssignmentError, RecipeError
from moeq.estimator import load_hardware
from moeq.estimator.latency import expert_seconds
from moeq.models.experts import ExpertLayer
from moeq.models.loading import source_dtype
from moeq.numerics.packed import packed_bytes
from moeq.numerics.slab import return_memory
from moeq.numerics.traces import closed_form, hutchinson
from moeq.recipe import AssignSection
from moeq.registry import ALLOCATORS
from moeq.reporting.frontier import frontier_svg
from moeq.stages import losses, others, profile
from moeq.stages.checkpoint_size import CheckpointSize
from moeq.stages.context import Context

NAME = "assignment.json"
FRONTIER, FRONTIER_PLOT = "frontier.json", "frontier.svg"
FRONTIER_VERSION = 1
AVERAGES = tuple(str(Fraction(quarter, 4)) for quarter in range(4, 17))  # of a frontier: 1 to 4 bits
TRACE_SAMPLES = 32


def run(context: Context) -> dict[str, Any]:
    """Write assignment.json and the table of sensitivities; returns the summary."""
    inputs = inputs_of(context, context.recipe.assign, context.recipe.name)
    assignment = decide(inputs)
    directory = make_directory(context.directory("assign"))
    write_assignment(directory / NAME, assignment)
    _write_sensitivities(context, inputs)
    scored = report.score(inputs, assignment).as_json()
    return summarize(context, assignment) | scored | latency_summary(context, inputs, assignment)


def sensitivities(context: Context) -> SensitivityTable:
    """The table of sensitivities; made again, without the assignment, where it is not there or not this model's."""
    path = context.directory("assign") / SENSITIVITIES
    try:
        found = read_sensitivities(path)
    except ArtifactError:  # of an earlier version of moeq, or lost: it follows from the profile, losses and weights
        found = None
    if found is None or found.model != context.stamp.digest:
        context.reporter.say(f"  {SENSITIVITIES}: made again")
        _write_sensitivities(context, inputs_of(context, context.recipe.assign, context.recipe.name))
    return read_sensitivities(path)


def _write_sensitivities(context: Context, inputs: AssignInputs) -> None:
    """The closed form of the traces is always there: one reading of the experts, next to nothing beside `losses`."""
    config = inputs.config
    sampled = traces(context, config) if config.trace not in (None, "closed") else None
    columns = sensitivity.columns(inputs, traces(context, AssignSection()), sampled)
    write_sensitivities(context.directory("assign") / SENSITIVITIES, columns, context.stamp.digest)


def check(context: Context) -> None:
    """AssignmentError when a section asks for more GPU experts than a layer has, EstimateError for bad hardware.

    RecipeError for routing of decode steps, which images have none of; AssignmentError too for a budget that no
    statistics could meet.
    """
    own = [(context.recipe.name, context.recipe.assign)]
    for name, section in [*own, *((one.name, one) for one in context.recipe.eval.compare)]:
        if section.statistics == "decode" and context.takes_images:
            raise RecipeError("images have no decode positions", where="assign.statistics: decode", do="use all")
        hardware = hardware_of(context, section)
        if hardware is not None:
            load_hardware(hardware)
        for layer in context.layers:
            if section.gpu_experts > layer.num_experts:
                raise AssignmentError(
                    f"gpu_experts is {section.gpu_experts}, the layer has {layer.num_experts} experts",
                    where=layer.name,
                    do="lower gpu_experts",
                )
        if section.average_bits is not None or section.expert_bytes is not None or section.size is not None:
            widths = sorted(section.named() or context.recipe.losses.bits)
            limit_of(_inputs(context, section, name, _unmeasured(context)), widths)


def _unmeasured(context: Context) -> ExpertProfile:
    """A profile that tells no expert from another: what a budget must pay does not follow from statistics."""
    flat = [np.ones((1, 2, layer.num_experts)) for layer in context.layers]
    return ExpertProfile(
        layers=tuple(layer.name for layer in context.layers),
        top_k=(1,) * len(flat),
        counts=tuple(one.astype(np.int64) for one in flat),
        scores=tuple(flat),
        tokens=np.ones((1, 2), np.int64),
    )


def make(context: Context, config: AssignSection, name: str) -> Assignment:
    """Decide one assignment; AssignmentError when a width it names was not made into replicas."""
    return decide(inputs_of(context, config, name))


def decide(inputs: AssignInputs) -> Assignment:
    """Run the assigner; AssignmentError when it takes a width whose replicas were not made."""
    found = assign(inputs)
    made = {FULL} if inputs.losses is None else {FULL, *inputs.losses.bits()}
    missing = [width for width in found.widths() if width not in made]
    if missing:
        raise AssignmentError(
            f"{missing[0]} bits is not among losses.bits {sorted(made - {FULL})}",
            where=inputs.name,
            do="add it to losses.bits",
        )
    return found


def inputs_of(context: Context, config: AssignSection, name: str) -> AssignInputs:
    """What an assigner is given of a run, for a section of its recipe."""
    found = _inputs(context, config, name, profile.load(context))
    return replace(
        found,
        losses=losses.load(context),
        traces=partial(traces, context, config),
        effects=losses.load_effects(context),
        expert_effects=losses.load_expert_effects(context),
        ndp_seconds=ndp_seconds(context, config, (*context.recipe.losses.bits, FULL)),
    )


def _inputs(context: Context, config: AssignSection, name: str, statistics: ExpertProfile) -> AssignInputs:
    """What an assigner is given beside what was measured of the experts."""
    section = context.recipe.losses
    size = source_dtype(context.source).itemsize
    widths = (*section.bits, FULL)
    grid = (section.group_size, section.symmetric)
    return AssignInputs(
        name=name,
        config=config,
        profile=statistics,
        losses=None,
        group_size=section.group_size,
        symmetric=section.symmetric,
        nested=section.nested,
        bytes=tuple(
            {bits: bytes_of(layer, bits, *grid, size, section.nested) for bits in widths} for layer in context.layers
        ),
        matrix_bytes=tuple(
            {
                name: {bits: matrix_bytes(layer, name, bits, *grid, size, section.nested) for bits in widths}
                for name in layer.projections
            }
            for layer in context.layers
        ),
        **_checkpoint_sizes(context, config, widths),
    )


def _checkpoint_sizes(context: Context, config: AssignSection, widths: Sequence[int]) -> dict[str, Any]:
    """What `size` counts beside the experts' own tensors; nothing where a section does not limit it."""
    if config.size is None:
        return {}
    size, full = CheckpointSize(context), source_dtype(context.source).itemsize
    losses = context.recipe.losses
    grid = (losses.group_size, losses.symmetric, full, losses.nested)
    records = tuple(
        {
            name: {
                bits: size.matrix_bytes(layer, name, bits) - matrix_bytes(layer, name, bits, *grid) for bits in widths
            }
            for name in layer.projections
        }
        for layer in context.layers
    )
    return {"other_bytes": size.other_bytes, "record_bytes": records}


def hardware_of(context: Context, config: AssignSection) -> str | None:
    """The hardware whose NDP latency a section asks for: its own, else the estimate's; None where it asks for none."""
    if config.hardware is None and config.ndp_latency_ms is None:
        return None
    return config.hardware or context.recipe.estimate.hardware


def ndp_seconds(context: Context, config: AssignSection, widths: Sequence[int]) -> tuple[dict[int, float], ...]:
    """What one token of one expert takes on the section's hardware at every width, a layer; empty where it names none.

    Sizes are the model's own, whatever geometry the estimate is of.
    """
    name = hardware_of(context, config)
    if name is None:
        return ()
    hardware, section = load_hardware(name), context.recipe.losses
    found = []
    for layer in context.layers:
        group = layer.hidden_size if section.group_size == -1 else section.group_size
        times = expert_seconds(
            layer.parameters_per_expert, widths, hardware, group_size=group, zero_points=not section.symmetric
        )
        found.append(dict(zip(widths, times.tolist(), strict=True)))
    return tuple(found)


def latency_summary(context: Context, inputs: AssignInputs, assignment: Assignment) -> dict[str, Any]:
    """The NDP latency that an assignment has, beside its limit; nothing where no hardware was named."""
    hardware = hardware_of(context, inputs.config)
    if hardware is None:
        return {}
    most = inputs.config.ndp_latency_ms
    found: dict[str, Any] = {"hardware": hardware, "ndp_latency_ms": 1e3 * latency.achieved(inputs, assignment)}
    return found if most is None else found | {"ndp_latency_limit_ms": most}


def constants_digest(name: str) -> str:
    """Digest of a hardware's constants: what was made for an edited hardware file is made again."""
    return digest_of_file(Path(name)) if Path(name).is_file() else load_hardware(name).model_dump_json()


def own_hardware(context: Context) -> list[str] | None:
    """Digests of the constants that decide the recipe's assignment, and another package's version; None for neither."""
    return _digests(context, [context.recipe.assign])


def compared_hardware(context: Context) -> list[str] | None:
    """As `own_hardware`, of the assignments that it is compared with."""
    return _digests(context, context.recipe.eval.compare)


def _digests(context: Context, sections: Sequence[AssignSection]) -> list[str] | None:
    names = [hardware_of(context, section) for section in sections]
    others = [package for section in sections if (package := ALLOCATORS.origin(section.method)) is not None]
    return [*(constants_digest(name) for name in names if name is not None), *others] or None


def frontier(context: Context) -> dict[str, Any]:
    """Objective against bytes of every method, written as frontier.json and frontier.svg beside the assignment."""
    inputs = inputs_of(context, context.recipe.assign, context.recipe.name)
    for line in ALLOCATORS.problems():
        context.reporter.say(f"  left out: {escape(line)}")
    number = len(report.sections(inputs, AVERAGES))
    with context.reporter.bar("frontier", number) as advance:
        points = report.frontier(inputs, AVERAGES, decide, advance)
    directory = make_directory(context.directory("assign"))
    found = {
        "schema_version": FRONTIER_VERSION,
        "loss_weighting": inputs.config.loss_weighting,
        "layer_weighting": inputs.config.layer_weighting,
        "points": [asdict(point) for point in points],
    }
    write_json(directory / FRONTIER, found)
    write_text(directory / FRONTIER_PLOT, frontier_svg(points))
    return found


def prices(context: Context) -> list[dict[str, Any]]:
    """What every target's restriction costs in objective, on the budget of the recipe's assignment."""
    inputs = inputs_of(context, context.recipe.assign, context.recipe.name)
    return [asdict(price) for price in report.prices(inputs, load(context), partial(_refuse_width, context))]


def _refuse_width(context: Context, target: Target, bits: int) -> AssignmentError | None:
    """Why a target cannot load a width of this model's matrices in the recipe's grid; None where it can.

    A target of symmetric grids alone is asked about those: its price is that of the same widths.
    """
    section = context.recipe.losses
    for layer in context.layers:
        for projection in layer.projections:
            grids = grids_of(
                layer,
                projection,
                [bits],
                group_size=section.group_size,
                symmetric=section.symmetric or target.symmetric_only,
                nested=section.nested,
            )
            found = refuse_stack(target, grids, full=False, widen=False)
            if found is not None:
                return AssignmentError(found[0], where=f"{layer.name}, {projection}", do=found[1])
    return None


def traces(context: Context, config: AssignSection) -> list[np.ndarray]:
    """The Hessian trace of the Frobenius norm, summed over every expert's matrices, [E] a layer (paper 003).

    Experts are read from the checkpoint one by one; the same traces are not computed twice in a run, and the closed
    form not again where the run's table of sensitivities has it.
    """
    how = config.trace or "closed"
    key = (how, None if how == "closed" else config.trace_samples or TRACE_SAMPLES)
    if key not in context.traces:
        known = _known_traces(context) if how == "closed" else None
        context.traces[key] = _computed_traces(context, key) if known is None else known
    return context.traces[key]


def _known_traces(context: Context) -> list[np.ndarray] | None:
    """The closed form as an earlier command found it for this model; None where none did."""
    try:
        table = read_sensitivities(context.finished("assign") / SENSITIVITIES)
    except ArtifactError:
        return None
    same = table.model == context.stamp.digest and table.experts() == [layer.num_experts for layer in context.layers]
    return table.column("frobenius_hessian_trace") if same else None


def _computed_traces(context: Context, how: tuple[str, int | None]) -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(context.recipe.seed)
    found = []
    with context.reporter.bar("traces", len(context.layers)) as advance:
        for layer in context.layers:
            found.append(np.array([_trace(context, layer, e, how, generator) for e in range(layer.num_experts)]))
            return_memory()
            advance()
    return found


def _trace(
    context: Context, layer: ExpertLayer, expert: int, how: tuple[str, int | None], generator: torch.Generator
) -> float:
    weights, _ = context.expert_reader.read(layer, expert)
    name, samples = how
    if samples is None:
        return sum(closed_form(weight) for weight in weights.values())
    distribution: Any = name
    return sum(hutchinson(weight, samples, distribution, generator).mean for weight in weights.values())


def bytes_of(
    layer: ExpertLayer,
    widths: Width,
    group_size: int,
    symmetric: bool,
    full_bytes_per_weight: int,
    nested: bool = False,
) -> int:
    """Stored bytes of one expert at a width, or its matrices at theirs."""
    grid = (group_size, symmetric, full_bytes_per_weight, nested)
    return sum(matrix_bytes(layer, name, width_of(widths, name), *grid) for name in layer.projections)


def matrix_bytes(
    layer: ExpertLayer,
    projection: str,
    bits: int,
    group_size: int,
    symmetric: bool,
    full_bytes_per_weight: int,
    nested: bool = False,
) -> int:
    """Stored bytes of one matrix of an expert: codes, scales and zero points, or the checkpoint's own weights at 16.

    Its bias stays in the checkpoint's type at every width.
    """
    rows, inputs = layer.shape(projection)
    bias = rows * full_bytes_per_weight if layer.biased else 0
    if bits == FULL:
        return rows * inputs * full_bytes_per_weight + bias
    return packed_bytes(rows, inputs, bits, group_size, symmetric, nested) + bias


def total_bytes(context: Context, assignment: Assignment) -> int:
    """Bytes of all experts at their placed widths."""
    size = source_dtype(context.source).itemsize
    return sum(
        bytes_of(layer, one, assignment.group_size, assignment.symmetric, size, assignment.nested)
        for layer, widths in zip(context.layers, assignment.expert_widths(), strict=True)
        for one in widths
    )


def summarize(context: Context, assignment: Assignment) -> dict[str, Any]:
    """Average bits, bytes and the number of experts at each width; of mixed ones, of matrices.

    checkpoint_bytes: of the directory that `export` writes; other_bytes: of the tensors of all that is no expert, where
    the recipe packs some of it.
    """
    ndp, everywhere = assignment.average_bits("ndp"), assignment.average_bits()
    flat = [one for layer in assignment.expert_widths() for one in layer]
    size = total_bytes(context, assignment)
    matrices = count_matrices(flat)
    return {
        "method": assignment.method,
        "average_bits_ndp": None if ndp is None else float(ndp),
        "average_bits_all": None if everywhere is None else float(everywhere),
        "expert_bytes": size,
        **({"other_bytes": others.non_expert_bytes(context)[1]} if context.recipe.others.widths() else {}),
        "checkpoint_bytes": CheckpointSize(context).total(assignment),
        "experts_by_bits": count_widths(flat),
        **({"mixed_experts_matrices_by_bits": matrices} if matrices else {}),
        "gpu_experts": int(sum(hot.sum() for hot in assignment.hot())),
    }


def load(context: Context) -> Assignment:
    """Read the assignment and check it against the model."""
    path = context.directory("assign") / NAME
    assignment = read_assignment(path)
    _check_shape(context, assignment, path)
    for described, layer in zip(context.layers, assignment.layers, strict=True):
        for expert, choice in enumerate(layer.experts):
            _check_choice(context, described, choice, f"{path}: {layer.name}, expert {expert}")
    return assignment


def _check_choice(context: Context, layer: ExpertLayer, choice: ExpertChoice, where: str) -> None:
    """AssignmentError for matrices that the model's experts do not have, and for widths without replicas."""
    if choice.projections is not None and set(choice.projections) != set(layer.projections):
        raise AssignmentError(
            f"projections are {', '.join(choice.projections)}; the model's are {', '.join(layer.projections)}",
            where=where,
            do="name each of them once",
        )
    made = {FULL, *context.recipe.losses.bits}
    for bits in matrix_widths(choice.widths):
        if bits not in made:
            raise AssignmentError(
                f"{bits} bits is not among losses.bits {list(context.recipe.losses.bits)}",
                where=where,
                do="choose another width, or add it to losses.bits and run `moeq losses`",
            )


def _check_shape(context: Context, assignment: Assignment, path: Path) -> None:
    """AssignmentError naming the first layer that the model does not have so."""
    for index, (wanted, found) in enumerate(zip_longest(context.layers, assignment.layers)):
        problem = None
        if wanted is None or found is None:
            problem = f"{len(assignment.layers)} layers, the model has {len(context.layers)}"
        elif wanted.name != found.name:
            problem = f"layer {index} is called {found.name}, in the model {wanted.name}"
        elif wanted.num_experts != len(found.experts):
            problem = f"{found.name} has {len(found.experts)} experts, in the model {wanted.num_experts}"
        if problem is not None:
            raise AssignmentError(problem, where=str(path), do=REMEDY)
