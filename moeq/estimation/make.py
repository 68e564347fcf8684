"""Estimates without a run: of one model as options place it, or of the cases that a recipe lists."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from moeq.errors import RecipeError
from moeq.estimation.options import chosen_policies
from moeq.estimation.subject import Model, Subject, of_assignment, of_manifest, read_model, read_placed
from moeq.estimator import Estimate, Grid, Hardware, estimate, load_geometry, load_hardware, uniform_placement
from moeq.estimator.capacity import CapacityPlan, largest_gpu_experts, plan_capacity
from moeq.estimator.document import Case, EstimateDocument
from moeq.estimator.stated import compare
from moeq.recipe import CaseSection, EstimateSection, Recipe

DEFAULT_BITS = 3.0
UNIFORM = "uniform"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says of one model.

    bits, gpu_experts: None where not given; then `DEFAULT_BITS`, and as many FP16 experts a layer as fit. manifest and
    assignment say instead how every expert is kept. policies: names or labels, none for all.
    """

    model: str
    hardware: str
    assignment: Path | None = None
    manifest: Path | None = None
    bits: float | None = None
    gpu_experts: int | None = None
    group_size: int = 128
    policies: tuple[str, ...] = ()
    grid: Grid
    context: int = 1024
    seed: int = 0
    trust_remote_code: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest request of the grid."""
        return max(self.grid.inputs) + max(self.grid.outputs)


def what_if(options: Options) -> EstimateDocument:
    """The estimate of one model; EstimateError with the sum where its placement does not fit."""
    policies = chosen_policies(options.policies)
    hardware = load_hardware(options.hardware)
    subject = _subject(options, hardware)
    plan = _capacity(subject, hardware, options.grid, options.longest)
    plan.require()
    found = estimate(
        subject.geometry,
        hardware,
        subject.placement,
        group_size=subject.group_size,
        zero_points=subject.zero_points,
        grid=options.grid,
        context=options.context,
        seed=options.seed,
    )
    case = Case(
        name=f"{subject.geometry.name}, {subject.placement.name}",
        geometry=asdict(subject.geometry),
        estimate=shown(found, policies),
        capacity=plan,
    )
    title = f"{subject.geometry.name} on {hardware.name}"
    return EstimateDocument(name=title, hardware=hardware.name, routing=UNIFORM, cases=(case,))


def capacity_of(options: Options) -> CapacityPlan:
    """What the model needs where, at the grid's largest batch and its longest request; nothing is refused here."""
    hardware = load_hardware(options.hardware)
    return _capacity(_subject(options, hardware), hardware, options.grid, options.longest)


def figures(recipe: Recipe) -> EstimateDocument:
    """The cases of `estimate.figures`, beside what is stated of them; nothing of the recipe's model is read."""
    section = recipe.estimate
    assert section.figures is not None
    hardware = load_hardware(section.hardware)
    grid = Grid(
        inputs=tuple(section.grid.inputs), outputs=tuple(section.grid.outputs), batches=tuple(section.grid.batches)
    )
    cases = tuple(_case(one, section, hardware, grid, recipe.seed) for one in section.figures.cases)
    return EstimateDocument(name=recipe.name, hardware=hardware.name, routing=UNIFORM, cases=cases)


def _case(case: CaseSection, section: EstimateSection, hardware: Hardware, grid: Grid, seed: int) -> Case:
    assert section.figures is not None
    geometry, group_size = load_geometry(case.geometry), section.figures.group_size
    placement = uniform_placement(geometry, bits=case.bits, hot_experts=case.gpu_experts, name=case.name)
    subject = Subject(geometry=geometry, placement=placement, group_size=group_size, zero_points=False)
    plan = _capacity(subject, hardware, grid, max(grid.inputs) + max(grid.outputs))
    plan.require()
    found = estimate(
        geometry, hardware, placement, group_size=group_size, grid=grid, context=section.context, seed=seed
    )
    return Case(
        name=case.name,
        geometry=asdict(geometry),
        estimate=found,
        capacity=plan,
        stated=tuple(compare(case, found, miss_beyond=section.figures.miss_beyond)),
    )


def shown(found: Estimate, policies: tuple[str, ...]) -> Estimate:
    """An estimate with the figures of some policies only."""
    return found.model_copy(
        update={
            "points": tuple(one for one in found.points if one.policy in policies),
            "speedups": tuple(one for one in found.speedups if one.baseline in policies),
            "terms": tuple(one for one in found.terms if one.policy in policies),
        }
    )


def _subject(options: Options, hardware: Hardware) -> Subject:
    """The model's sizes and its placement: an assignment's, a manifest's, or uniform widths."""
    own = {"--assignment": options.assignment, "--manifest": options.manifest}
    given = [name for name, value in own.items() if value is not None]
    uniform = options.bits is not None or options.gpu_experts is not None
    if len(given) > 1 or (given and uniform):
        both = " and ".join([*given, *(["--bits or --gpu-experts"] if uniform else [])])
        raise RecipeError(f"{both} each say how experts are kept", where="moeq estimate", do="give one of them")
    model = read_model(options.model, trust_remote_code=options.trust_remote_code)
    if options.assignment is not None:
        return of_assignment(options.assignment, model.geometry)
    if options.manifest is not None:
        manifest, where = read_placed(options.manifest)
        return of_manifest(manifest, model.geometry, where)
    if model.manifest is not None and not uniform:
        return of_manifest(model.manifest, model.geometry, options.model)
    return _uniform(model, options, hardware)


def _uniform(model: Model, options: Options, hardware: Hardware) -> Subject:
    """Uniform widths; where --gpu-experts is not given, as many FP16 experts as fit at the grid's largest request."""
    geometry, bits = model.geometry, DEFAULT_BITS if options.bits is None else options.bits
    if not 1 <= bits <= 16:
        raise RecipeError(f"{bits:g} bits", where="--bits", do="give 1 to 16")
    hot = options.gpu_experts
    if hot is None:
        hot = largest_gpu_experts(geometry, hardware, batch=max(options.grid.batches), context=options.longest) or 0
    placement = uniform_placement(geometry, bits=bits, hot_experts=hot, name=f"{bits:g} bits, {hot} on the GPU")
    return Subject(geometry=geometry, placement=placement, group_size=options.group_size, zero_points=False)


def _capacity(subject: Subject, hardware: Hardware, grid: Grid, longest: int) -> CapacityPlan:
    return plan_capacity(
        subject.geometry,
        hardware,
        subject.placement,
        batch=max(grid.batches),
        context=longest,
        group_size=subject.group_size,
        zero_points=subject.zero_points,
    )
