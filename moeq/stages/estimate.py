"""estimate: what the assignment, and those it is compared with, give on GPU + near-data-memory hardware."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.files import make_directory, write_json
from moeq.artifacts.stage import Frozen, read_model
from moeq.artifacts.trace import NAME as TRACE
from moeq.artifacts.trace import read_trace
from moeq.errors import RecipeError
from moeq.estimator import Estimate, Grid, ModelGeometry, estimate, load_hardware
from moeq.estimator.geometry import codebook_of, is_toy
from moeq.estimator.placement import assignment_placement, weights_of_a_scale
from moeq.estimator.points import BASELINES
from moeq.registry import POLICIES
from moeq.stages import assign
from moeq.stages.context import Context
from moeq.stages.estimate_sizes import chosen_geometry, profiled_popularity
from moeq.stages.needs import Needs, Sizes

SCHEMA_VERSION = 2
NAME = "estimate.json"
REMEDY = "run `moeq estimate` again"


class EstimateReport(Frozen):
    """One full Estimate for each assignment, the recipe's own first; geometry: sizes that were assumed."""

    schema_version: int = SCHEMA_VERSION
    geometry: dict[str, Any]
    geometry_is_the_models: bool
    hardware: str
    popularity: str
    estimates: tuple[Estimate, ...]

    @property
    def tells_speed(self) -> bool:
        """Whether speed-ups say anything: not where the model's own experts are so few bytes that none has to wait."""
        return not (self.geometry_is_the_models and is_toy(self.geometry))

    def of(self, name: str) -> Estimate | None:
        return next((estimate for estimate in self.estimates if estimate.placement == name), None)


def run(context: Context) -> dict[str, Any]:
    """Write estimate.json; returns the summary."""
    own = assign.load(context)
    assignments = [own, *(assign.make(context, c, c.name) for c in context.recipe.eval.compare)]
    routing = _routing(context)
    geometry, is_own = chosen_geometry(context)
    for line in POLICIES.problems():
        context.reporter.say(f"  left out: {escape(line)}")
    estimates = []
    with context.reporter.bar("estimate", len(assignments)) as advance:
        for assignment in assignments:
            estimates.append(of_assignment(context, geometry, assignment, routing))
            advance()
    report = report_on(context, geometry, is_own, estimates)
    write_json(make_directory(context.directory("estimate")) / NAME, report.model_dump(mode="json"))
    return summarize(report)


def of_assignment(
    context: Context, geometry: ModelGeometry, assignment: Assignment, routing: Mapping[str, Any]
) -> Estimate:
    """The estimate of one assignment; routing: the popularity of every expert, a trace, or neither: all alike."""
    section = context.recipe.estimate
    group_size = weights_of_a_scale(assignment.group_size, geometry)
    return estimate(
        geometry,
        load_hardware(section.hardware),
        assignment_placement(assignment, group_size),
        group_size=group_size,
        zero_points=not assignment.symmetric,
        codebook=codebook_of(assignment.encoding),
        grid=Grid(**section.grid.model_dump()),
        context=section.context,
        seed=context.recipe.seed,
        **routing,
    )


def report_on(context: Context, geometry: ModelGeometry, is_own: bool, estimates: list[Estimate]) -> EstimateReport:
    """Estimates with what they were made for."""
    section = context.recipe.estimate
    sizes = {name: value for name, value in geometry.sizes().items() if name != "max_positions"}  # decides no time
    return EstimateReport(
        geometry=sizes,
        geometry_is_the_models=is_own,
        hardware=load_hardware(section.hardware).name,
        popularity=section.popularity,
        estimates=tuple(estimates),
    )


def check(context: Context) -> None:
    """EstimateError for unknown or damaged hardware, an unknown geometry, or one with other numbers of experts.

    RecipeError for a recipe of figures, of which a run's stage would use nothing.
    """
    if context.recipe.estimate.figures is not None:
        raise RecipeError(
            "estimate.figures has cases without a checkpoint", do="run `moeq estimate RECIPE`, or leave them out"
        )
    if context.model.takes_images and context.recipe.estimate.popularity == "trace":
        raise RecipeError(
            "images have no decode steps to replay", where="estimate.popularity: trace", do="use uniform or profile"
        )
    load_hardware(context.recipe.estimate.hardware)
    chosen_geometry(context)


def hardware_digest(context: Context) -> str | list[str]:
    """Digest of the hardware's constants, of that which decides the assignments that are compared, others' policies."""
    own = assign.constants_digest(context.recipe.estimate.hardware)
    compared = assign.deciding(context, context.recipe.eval.compare) or []
    others = [f"{name} of {package}" for name in POLICIES.names() if (package := POLICIES.origin(name)) is not None]
    return [own, *compared, *others] if compared or others else own


def _routing(context: Context) -> dict[str, Any]:
    """What the estimator is told of the routing: nothing, each expert's share of activations, or the recorded trace."""
    wanted = context.recipe.estimate.popularity
    if wanted == "uniform":
        return {}
    if wanted == "trace":
        return {"trace": read_trace(context.directory("profile") / TRACE)}
    return {"popularity": profiled_popularity(context)}


def summarize(report: EstimateReport) -> dict[str, Any]:
    """Decode speed-ups of every assignment over both MoNDE baselines and HOBBIT, at the grid's first batch."""
    return {
        "geometry": report.geometry["name"],
        "geometry_is_the_models": report.geometry_is_the_models,
        "hardware": report.hardware,
        "decode_speedups": {each.placement: decode_speedups(each) for each in report.estimates},
    }


def decode_speedups(made: Estimate) -> dict[str, float]:
    """Decode speed-up over each baseline that can run at the first batch of the grid."""
    batch = made.points[0].batch
    there = {row.baseline for row in made.speedups if row.batch == batch}
    return {
        baseline: made.speedups_over(baseline, batch=batch)[0].decode for baseline in BASELINES if baseline in there
    }


def load(context: Context) -> EstimateReport:
    """Read estimate.json; ArtifactError when it is missing, damaged or of another schema version."""
    return read_model(context.directory("estimate") / NAME, EstimateReport, SCHEMA_VERSION, remedy=REMEDY)


MEMORY = 40 << 20  # bytes of the policies' arrays
SECONDS = 0.35  # of one assignment's estimate
JSON, JSON_POINT = 31_000, 12_200  # bytes of one assignment in estimate.json, and of a point of the grid


def needs(sizes: Sizes) -> Needs:
    """Arrays of the policies; an estimate of every assignment."""
    grid, count = sizes.recipe.estimate.grid, len(sizes.checkpoint.sections)
    points = len(grid.inputs) * len(grid.outputs) * len(grid.batches)
    moment = {**(sizes.model() if sizes.streams else {}), **sizes.tables(), "estimator": MEMORY}
    files = {NAME: count * (JSON + JSON_POINT * points)}
    return Needs(moments=[moment], files=files, seconds=lambda rates: count * SECONDS)
