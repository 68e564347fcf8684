"""assign: which expert gets which width and where it lives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.markup import escape

from moeq.artifacts.assignment import (
    DROPPED,
    FULL,
    REMEDY,
    Assignment,
    ExpertChoice,
    count_matrices,
    count_widths,
    matrix_widths,
    read_assignment,
    write_assignment,
)
from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import canonical_json, make_directory
from moeq.artifacts.profile import ExpertProfile
from moeq.artifacts.sensitivities import NAME as SENSITIVITIES
from moeq.artifacts.sensitivities import SensitivityTable, read_sensitivities, write_sensitivities
from moeq.artifacts.stage import RECORD, read_record
from moeq.artifacts.targets import loaded_by, target_of
from moeq.assigners import assign, latency, report, sensitivity
from moeq.assigners.inputs import AssignInputs, Loaded
from moeq.assigners.limits import nothing_kept
from moeq.errors import ArtifactError, AssignmentError, MoeqError
from moeq.estimator import load_hardware, own_hardware
from moeq.estimator.geometry import codebook_of
from moeq.estimator.terms import expert_seconds
from moeq.models.experts import ExpertLayer
from moeq.recipe import AssignSection
from moeq.registry import ALLOCATORS
from moeq.stages import non_experts as others
from moeq.stages import profile, replicas
from moeq.stages.checkpoint_size import CheckpointSize
from moeq.stages.context import Context
from moeq.stages.expert_bytes import bits_per_weight, expert_weights, total_bytes, total_loaded_bytes
from moeq.stages.hessian_traces import traces
from moeq.stages.loading import loaded_matrices, where_it_loads
from moeq.stages.needs import Needs, Rates, Sizes
from moeq.stages.target_sizes import sizes

NAME = "assignment.json"


def run(context: Context) -> dict[str, Any]:
    """Write assignment.json and the table of sensitivities; returns the summary."""
    inputs = inputs_of(context, context.recipe.assign, context.recipe.name)
    assignment, timed = _decided(context, inputs)
    remark = inputs.config.allocator.remark
    if remark is not None and (said := remark(inputs, assignment)) is not None:
        context.reporter.say(escape(f"  {said}"))
    write_assignment(make_directory(context.directory("assign")) / NAME, assignment)
    _write_sensitivities(context, inputs)
    return summary(context, inputs, assignment, timed)


def summary(context: Context, inputs: AssignInputs, assignment: Assignment, timed: dict[str, Any]) -> dict[str, Any]:
    """Sizes, widths, objective beside the optimum, latency and where it loads; timed: of a speed that was asked for."""
    scored = report.score(inputs, assignment).as_json()
    found = summarize(context, assignment) | scored | latency_summary(context, inputs, assignment) | timed
    return found | {"loads_in": where_it_loads(context, assignment, inputs)}


def sensitivities(context: Context) -> SensitivityTable:
    """The table of sensitivities; made again, without the assignment, where it is not there or not this model's."""
    path = context.directory("assign") / SENSITIVITIES
    try:
        current = read_sensitivities(path).model == context.model.stamp.digest
    except ArtifactError:  # of an earlier version of moeq, or lost: it follows from the profile, losses and weights
        current = False
    if not current:
        context.reporter.say(f"  {SENSITIVITIES}: made again")
        _write_sensitivities(context, inputs_of(context, context.recipe.assign, context.recipe.name))
    return read_sensitivities(path)


def is_intact(context: Context) -> bool:
    """Whether the table of sensitivities is as it was written; one that is not there is made by who reads it."""
    path = context.finished("assign") / SENSITIVITIES
    try:
        if path.exists():
            read_sensitivities(path)
    except ArtifactError as error:
        context.reporter.say(f"  [yellow]{path.name}: {escape(error.what)}; made again[/yellow]")
        return False
    return True


def _write_sensitivities(context: Context, inputs: AssignInputs) -> None:
    """The closed form of the traces is always there: one reading of the experts, next to nothing beside `losses`."""
    config = inputs.config
    sampled = traces(context, config) if config.trace not in (None, "closed") else None
    columns = sensitivity.columns(inputs, traces(context, AssignSection()), sampled)
    write_sensitivities(context.directory("assign") / SENSITIVITIES, columns, context.model.stamp.digest)


@contextmanager
def naming(context: Context, section: AssignSection) -> Iterator[None]:
    """Let an error say which of the assignments that are compared it is of."""
    try:
        yield
    except MoeqError as error:
        for compared in context.recipe.eval.compare:
            if compared is section:
                error.put_into(f"eval.compare {compared.name}")
        raise


def make(context: Context, config: AssignSection, name: str) -> Assignment:
    """Decide one assignment; AssignmentError when a width it names was not made into replicas."""
    with naming(context, config):
        return _decided(context, inputs_of(context, config, name))[0]


def _decided(context: Context, inputs: AssignInputs) -> tuple[Assignment, dict[str, Any]]:
    """The assignment, and what the summary says of the speed that was asked for."""
    if inputs.config.speed is None:
        return decide(inputs), {}
    from moeq.stages.assign_speed import assign_for_speed

    return assign_for_speed(context, inputs, decide)


def decide(inputs: AssignInputs) -> Assignment:
    """Run the assigner; AssignmentError when it takes a width whose replicas were not made, or none at all."""
    assignment = assign(inputs)
    if not any(assignment.widths()):
        raise nothing_kept(inputs)
    made = {DROPPED, FULL, *(() if inputs.losses is None else inputs.losses.bits())}
    missing = [width for width in assignment.widths() if width not in made]
    if missing:
        raise AssignmentError(
            f"{missing[0]} bits is not among losses.bits {sorted(made - {DROPPED, FULL})}",
            where=inputs.name,
            do="add it to losses.bits",
        )
    return assignment


def inputs_of(context: Context, config: AssignSection, name: str) -> AssignInputs:
    """What an assigner is given of a run, for a section of its recipe."""
    return replace(
        inputs_before(context, config, name, profile.load(context)),
        losses=replicas.load_losses(context),
        traces=partial(traces, context, config),
        effects=replicas.load_effects(context),
        expert_effects=replicas.load_expert_effects(context),
        ndp_seconds=ndp_seconds(context, config, (*context.recipe.losses.bits, FULL)),
    )


def inputs_before(context: Context, config: AssignSection, name: str, statistics: ExpertProfile) -> AssignInputs:
    """What an assigner is given beside what was measured of the experts."""
    return AssignInputs(
        name=name,
        config=config,
        profile=statistics,
        losses=None,
        **vars(context.recipe.losses.encoding),
        weights=tuple(layer.weights_per_expert for layer in context.model.layers),
        droppable=not any(layer.biased for layer in context.model.layers),
        loaded=_loaded(context, config),
        **sizes(context, config),
    )


def _loaded(context: Context, config: AssignSection) -> Loaded:
    """What the section's target loads of every matrix."""
    target = None if config.target is None else loaded_by(config.target)
    return () if target is None else loaded_matrices(context, target, widen=context.recipe.export.widen)


def ndp_seconds(context: Context, config: AssignSection, widths: Sequence[int]) -> tuple[dict[int, float], ...]:
    """What one token of one expert takes on the section's hardware at every width, a layer; empty where it names none.

    Sizes are the model's own, whatever geometry the estimate is of.
    """
    name = context.recipe.hardware_of(config)
    if name is None:
        return ()
    hardware, encoding = load_hardware(name), context.recipe.losses.encoding
    if config.speed is not None and not hardware.ndp.computes:
        return ()  # experts compute on the GPU
    seconds = []
    for layer in context.model.layers:
        group = layer.hidden_size if encoding.group_size == -1 else encoding.group_size
        times = expert_seconds(
            layer.parameters_per_expert,
            widths,
            hardware,
            group_size=group,
            zero_points=not encoding.symmetric,
            codebook=codebook_of(encoding),
        )
        seconds.append({DROPPED: 0.0} | dict(zip(widths, times.tolist(), strict=True)))
    return tuple(seconds)


def latency_summary(context: Context, inputs: AssignInputs, assignment: Assignment) -> dict[str, Any]:
    """The NDP latency that an assignment has, beside its limit; nothing where no hardware was named."""
    hardware = context.recipe.hardware_of(inputs.config)
    if hardware is None or not inputs.ndp_seconds:
        return {}
    most = inputs.config.ndp_latency_ms
    limit = {} if most is None else {"ndp_latency_limit_ms": most}
    achieved = 1e3 * latency.achieved(inputs, assignment)
    return {"hardware": load_hardware(hardware).name, "ndp_latency_ms": achieved, **limit}


def constants_digest(name: str) -> str:
    """Digest of a hardware's constants: what was made for an edited hardware file is made again.

    A preset's does not hang on where moeq is installed.
    """
    own, constants = own_hardware(name), load_hardware(name)
    return constants.model_dump_json(exclude={"file"}) if own is None else digest_of_file(own)


def own_inputs(context: Context) -> list[str] | None:
    """What decides the recipe's assignment beside its section and the measurements."""
    return deciding(context, [context.recipe.assign])


def deciding(context: Context, sections: Sequence[AssignSection]) -> list[str] | None:
    """What decides assignments by sections beside them and the measurements: digests of the hardware that they name,
    versions of others' packages, what a target stores, the seed of what is drawn, what a size counts beside the
    experts; None for nothing."""
    names = [context.recipe.hardware_of(section) for section in sections]
    estimate = context.recipe.estimate
    packed = [f"others {widths}"] if (widths := context.recipe.others.widths()) else []
    timed = [f"{estimate.geometry}, {estimate.context}", *packed] if any(section.speed for section in sections) else []
    others = [package for section in sections if (package := ALLOCATORS.origin(section.method)) is not None]
    widened = ["widened"] if context.recipe.export.widen and any(section.target for section in sections) else []
    sampled = any(section.trace not in (None, "closed") for section in sections)
    drawn = [f"seed {context.recipe.seed}"] if sampled and context.recipe.seed else []
    sized = any(section.size is not None for section in sections)
    beside = [f"{CheckpointSize(context).other_bytes} other bytes"] if sized else []
    hardware = [constants_digest(name) for name in names if name is not None]
    return [*hardware, *others, *timed, *widened, *drawn, *beside] or None


def summarize(context: Context, assignment: Assignment) -> dict[str, Any]:
    """Bits of a weight, bytes and the number of experts at each width; of mixed ones, of matrices.

    bits_per_weight: all that is stored for the experts; code_bits: the codes' alone; checkpoint_bytes: of the
    directory that `export` writes; other_bytes: of the tensors of all that is no expert, where the recipe packs
    some of it; bits_per_weight_for: where the target stores the experts otherwise, what it takes there, which the
    budget limits.
    """
    flat = [width for layer in assignment.expert_widths() for width in layer]
    size = total_bytes(context, assignment)
    matrices = count_matrices(flat)
    return {
        "method": assignment.method,
        **_bits(context, assignment),
        **_loaded_bits(context, assignment, size),
        "expert_bytes": size,
        **({"other_bytes": others.non_expert_bytes(context)[1]} if context.recipe.others.widths() else {}),
        "checkpoint_bytes": CheckpointSize(context).total(assignment),
        "experts_by_code_bits": count_widths(flat),
        **({"mixed_experts_matrices_by_code_bits": matrices} if matrices else {}),
        "gpu_experts": int(sum(hot.sum() for hot in assignment.hot())),
    }


def _loaded_bits(context: Context, assignment: Assignment, size: int) -> dict[str, Any]:
    """What is stored for a weight of the experts where the recipe's target has blocks of its own."""
    section = context.recipe.assign
    if not target_of(section.target).has_own_bytes:
        return {}
    there = total_loaded_bytes(context, section, assignment)
    if there == size:
        return {}
    return {"bits_per_weight_for": {section.target: 8 * there / expert_weights(context.model.layers)}}


def _bits(context: Context, assignment: Assignment) -> dict[str, float | None]:
    """Bits of a weight of the experts on NDP, None where there are none, and of all experts."""
    ndp, everywhere = assignment.code_bits("ndp"), assignment.code_bits()
    return {
        "bits_per_weight_ndp": bits_per_weight(context, assignment, "ndp"),
        "bits_per_weight_all": bits_per_weight(context, assignment),
        "code_bits_ndp": None if ndp is None else float(ndp),
        "code_bits_all": None if everywhere is None else float(everywhere),
    }


def load(context: Context) -> Assignment:
    """Read the assignment and check it against the model."""
    path = context.directory("assign") / NAME
    if not path.exists():
        read_record(path.parent, "assign")  # a stage that has not been run is not told to correct its file
    assignment = read_assignment(path)
    _check_shape(context, assignment, path)
    for described, layer in zip(context.model.layers, assignment.layers, strict=True):
        for expert, choice in enumerate(layer.experts):
            _check_choice(context, described, choice, f"{path}: {layer.name}, expert {expert}")
    return assignment


def is_edited(context: Context, path: Path | None = None) -> bool:
    """Whether an assignment, the run's own or that of a file, is another than what was decided."""
    directory = context.directory("assign")
    decided = read_record(directory, "assign").files if (directory / RECORD).is_file() else {}
    return NAME not in decided or digest_of_file(path or directory / NAME) != decided[NAME].sha256


def _check_choice(context: Context, layer: ExpertLayer, choice: ExpertChoice, where: str) -> None:
    """AssignmentError for matrices that the model's experts do not have, and for widths without replicas."""
    if choice.projections is not None and set(choice.projections) != set(layer.projections):
        raise AssignmentError(
            f"projections are {', '.join(choice.projections)}; the model's are {', '.join(layer.projections)}",
            where=where,
            do="name each of them once",
        )
    if choice.is_dropped and layer.biased:
        raise AssignmentError("an expert with biases cannot be dropped", where=where, do="give it a width")
    made = {DROPPED, FULL, *context.recipe.losses.bits}
    for bits in matrix_widths(choice.widths):
        if bits not in made:
            raise AssignmentError(
                f"{bits} bits is not among losses.bits {list(context.recipe.losses.bits)}",
                where=where,
                do="choose another width, or add it to losses.bits and run `moeq losses`",
            )


def _check_shape(context: Context, assignment: Assignment, path: Path) -> None:
    """AssignmentError naming the first layer that the model does not have so."""
    for index, (layer, placed) in enumerate(zip_longest(context.model.layers, assignment.layers)):
        problem = None
        if layer is None or placed is None:
            problem = f"{len(assignment.layers)} layers, the model has {len(context.model.layers)}"
        elif layer.name != placed.name:
            problem = f"layer {index} is called {placed.name}, in the model {layer.name}"
        elif layer.num_experts != len(placed.experts):
            problem = f"{placed.name} has {len(placed.experts)} experts, in the model {layer.num_experts}"
        if problem is not None:
            raise AssignmentError(problem, where=str(path), do=REMEDY)
    if not any(assignment.widths()):
        raise AssignmentError("every expert is dropped", where=str(path), do="give some of them a width")


COLUMN, VALUE = 342, 5  # bytes of a column of the sensitivities and of a value
TRACE_PASSES = 4  # passes over an expert's weights that its Hessian trace takes
ROW_SECONDS = 3e-6  # a row of the loss table


def assignment_bytes(sizes: Sizes) -> int:
    """Bytes of an assignment as JSON."""
    return 350 + 90 * len(sizes.layers) + 112 * sizes.experts


def needs(sizes: Sizes) -> Needs:
    """The tables, and one expert after the other for its Hessian trace."""
    section, losses, width = sizes.recipe.assign, sizes.recipe.losses, sizes.source_dtype.itemsize
    columns = 10 + 3 * len(losses.bits) + (section.trace not in (None, "closed"))
    schema = len(canonical_json(Assignment.model_json_schema()).encode())
    files = {NAME: assignment_bytes(sizes), "assignment.schema.json": schema}
    files[SENSITIVITIES] = columns * (COLUMN + VALUE * sizes.experts)
    expert = 2 * max(layer.parameters_per_expert for layer in sizes.layers) * width

    def seconds(rates: Rates) -> float:
        traces = sizes.reading(rates, sizes.experts_disk) + TRACE_PASSES * sizes.experts_disk / rates.elementwise_bytes
        return sizes.loss_rows() * ROW_SECONDS + traces

    moments = [{**sizes.model(), **sizes.tables(), "one expert": expert}]
    return Needs(moments=moments, files=files, read=sizes.experts_disk, seconds=seconds)
