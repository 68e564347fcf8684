"""Estimates without a run: of one model as options place it, or of the cases that a recipe lists."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moeq.artifacts.trace import RoutingTrace, read_trace
from moeq.errors import EstimateError, RecipeError
from moeq.estimation.estimate_options import EstimateOptions
from moeq.estimation.grids import parse_grid, parse_replicas
from moeq.estimation.subject import (
    Subject,
    check_known,
    codes_of_run,
    of_assignment,
    of_manifest,
    read_model,
    read_placed,
    with_others_of,
)
from moeq.estimator import (
    Estimate,
    Grid,
    Hardware,
    Interval,
    ModelGeometry,
    Placement,
    chosen_labels,
    estimate,
    load_geometry,
    load_hardware,
    placed_popularity,
    timeline,
    uniform_placement,
)
from moeq.estimator.capacity import REPLICA_BITS, CapacityPlan, largest_gpu_experts, plan_capacity
from moeq.estimator.cases import Case, EstimateDocument, WithoutNdp
from moeq.estimator.confidence import STEPS, IntervalRow, intervals, over_figure
from moeq.estimator.geometry import effective_bits
from moeq.estimator.hit_rates import HitRates, hit_rates
from moeq.estimator.placement import layer_of_assignment
from moeq.estimator.points import SUBJECT
from moeq.estimator.policies import by_label
from moeq.estimator.serving import ServedRow, served
from moeq.estimator.simulation import build_simulation
from moeq.estimator.stated import compare
from moeq.estimator.trace import check_trace
from moeq.preflight import check_path
from moeq.recipe import Recipe, StatedSection
from moeq.recipe.estimate import CaseSection

DEFAULT_BITS, DEFAULT_CONTEXT, DEFAULT_HARDWARE = 3.0, 1024, "paper-ctxmoe"
DEFAULT_SAMPLES, DEFAULT_GROUP = 256, 128
ALL_ON_GPU = "static_mixed"
MOST_RATE = 1e6
INTERVAL_SAMPLES = 64  # Monte Carlo samples of routing in each draw of the assumptions


@dataclass(frozen=True, kw_only=True)
class Question:
    """A placed model on hardware over a grid.

    policies: names or labels to estimate (None: all that can run); trace, or zipf: routing, uniform without either.
    """

    name: str
    subject: Subject
    hardware: Hardware
    grid: Grid
    context: int
    kv_growth: bool = False
    seed: int
    policies: tuple[str, ...] | None = None
    trace: RoutingTrace | None = None
    zipf: float | None = None
    samples: int = DEFAULT_SAMPLES
    rate: float | None = None
    replica_bits: tuple[int, ...] = REPLICA_BITS
    stated: Sequence[StatedSection] = ()

    @property
    def capacity(self) -> CapacityPlan:
        """What lies where at the largest batch and the longest request of the grid."""
        return self.capacity_at(max(self.grid.batches), max(self.grid.inputs) + max(self.grid.outputs))

    @property
    def least(self) -> CapacityPlan:
        """What lies where at the smallest batch and the shortest request of the grid."""
        return self.capacity_at(min(self.grid.batches), min(self.grid.inputs) + min(self.grid.outputs))

    def capacity_at(self, batch: int, request: int) -> CapacityPlan:
        """What lies where with requests of so many tokens, or the context where that is longer."""
        return plan_capacity(
            hardware=self.hardware,
            batch=batch,
            context=request if self.kv_growth else max(request, self.context),
            replica_bits=self.replica_bits,
            **vars(self.subject),
        )

    @property
    def routing(self) -> str:
        """What decides which experts are chosen, in words."""
        if self.trace is not None:
            return f"as recorded, {self.trace.num_sequences} sequences"
        best = "the placement's best experts the most popular"
        return "uniform" if self.zipf is None else f"Zipf {self.zipf:g}, {best}"

    @property
    def _settings(self) -> dict[str, Any]:
        """What an estimate and a timeline have in common."""
        placement = self.subject.placement
        popular = None if self.zipf is None else placed_popularity(placement.hot, placement.bits, self.zipf)
        routing = {"popularity": popular, "trace": self.trace, "seed": self.seed}
        return {"hardware": self.hardware, "context": self.context, **routing, **vars(self.subject)}

    def answer(self) -> Estimate:
        """The estimate of the chosen policies."""
        return estimate(
            policies=self.policies,
            grid=self.grid,
            kv_growth=self.kv_growth,
            monte_carlo_samples=self.samples,
            replica_bits=self.replica_bits,
            **self._settings,
        )

    def timelines(self) -> dict[str, tuple[Interval, ...]]:
        """One decode step at the smallest batch by policy label, of those asked for and those that always are shown."""
        chosen, batch = chosen_labels(self.policies or ()), min(self.grid.batches)
        labels = [label for label in by_label() if label in chosen]
        settings = {**self._settings, **self._read_at(self.grid.inputs[0], self.grid.outputs[0])}
        return {label: timeline(policy=label, batch=batch, **settings) for label in labels}

    def _read_at(self, inputs: int, outputs: int) -> dict[str, int]:
        """The context of a decode step in the middle of a request, and tokens that memory has room for."""
        if self.kv_growth:
            return {"context": inputs + (outputs + 1) // 2, "kv_tokens": inputs + outputs}
        return {"context": self.context, "kv_tokens": max(self.context, inputs + outputs)}

    def intervals(self, answer: Estimate) -> tuple[IntervalRow, ...]:
        """Where the headlines of an answer's first point lie with all assumptions varied together; of a recorded trace
        nothing is said."""
        if self.trace is not None:
            return ()
        first = answer.points[0]
        settings = {**self._settings, "trace": None, **self._read_at(first.input_tokens, first.output_tokens)}
        simulation = build_simulation(labels=chosen_labels(("hobbit",)), samples=INTERVAL_SAMPLES, **settings)
        over = {over_figure(row.baseline): row.decode for row in reversed(answer.speedups) if row.batch == first.batch}
        own = next(point for point in answer.points if point.policy == SUBJECT and point.at == first.at)
        values = {STEPS: own.decode_seconds_per_token, **over}
        return intervals(simulation, first.batch, values=values, seed=self.seed)

    def served(self, policies: Sequence[str]) -> tuple[ServedRow, ...]:
        """What a server sees under the rate; nothing without one, EstimateError where no request fits."""
        if self.rate is None:
            return ()
        first, last = self.grid.inputs[0], self.grid.outputs[0]
        settings = {**self._settings, **self._read_at(first, last)}
        simulation = build_simulation(labels=frozenset(policies), samples=INTERVAL_SAMPLES, **settings)
        if self.trace is not None:  # popularity of its prompts: its steps are of batches that were not recorded
            simulation = simulation.without_trace()
        return tuple(served(simulation, policies, self.rate, first, last, self.seed))

    def hits(self) -> HitRates | None:
        """Hit rates by domain with as many experts of every layer on the GPU as the placement has; None without a
        trace, or with none on the GPU."""
        placed = self.subject.placement.hot.sum(axis=1)
        if self.trace is None or not placed.any():
            return None
        rows = layer_of_assignment(self.subject.geometry.num_layers, len(placed))
        return hit_rates(self.trace, [int(count) for count in placed[rows]])


def longest(grid: Grid, context: int, *, kv_growth: bool) -> int:
    """Tokens of the longest request of a grid, or of the context that every decode step reads where that is longer."""
    request = max(grid.inputs) + max(grid.outputs)
    return request if kv_growth else max(request, context)


def check_names(systems: Sequence[Hardware]) -> None:
    """RecipeError for two that have one name: results tell them apart by it."""
    names = [system.name for system in systems]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RecipeError(f"{twice} is named twice", where="--hardware", do="give each file a `name` of its own")


def questions_asked(asked: EstimateOptions) -> list[Question]:
    """What the command line asks, of every hardware that it names; raises as `question_of` does."""
    names = list(dict.fromkeys(asked.hardware)) or [DEFAULT_HARDWARE]
    found = [question_of(replace(asked, hardware=[name])) for name in names]
    if len(found) == 1:
        return found
    check_names([one.hardware for one in found])
    return [replace(one, name=f"{one.hardware.name}: {one.subject.placement.name}") for one in found]


def question_of(asked: EstimateOptions) -> Question:
    """What the command line asks of one hardware; raises MoeqError for input that cannot be read or is of another
    model."""
    if asked.model is None:
        do = "give --model: mixtral-8x7b, a config.json, a model directory, a packed checkpoint or a hub id"
        raise RecipeError("no model", where="estimate", do=do)
    grid = parse_grid(asked.axes)
    replica_bits = REPLICA_BITS if asked.replicas is None else parse_replicas(asked.replicas)
    chosen_labels(asked.policy)
    if asked.rate is not None and not 0 < asked.rate <= MOST_RATE:
        raise RecipeError(f"{asked.rate:g} requests a second", where="--rate", do=f"give more than 0, to {MOST_RATE:g}")
    if asked.trace is not None and asked.zipf is not None:
        raise RecipeError("--trace and --zipf each say which experts are chosen", do="give one of them")
    if asked.kv_growth and asked.context is not None:
        raise RecipeError("--kv-growth takes the place of --context", where="estimate", do="give one of them")
    check_path(asked.trace, "give a trace.safetensors of `moeq profile` to --trace")
    check_known(asked.model)
    hardware = load_hardware(asked.one_hardware or DEFAULT_HARDWARE)
    context = asked.context or DEFAULT_CONTEXT
    most = longest(grid, context, kv_growth=asked.kv_growth)
    subject = _subject(asked, asked.model, hardware, batch=max(grid.batches), context=most)
    geometry = subject.geometry
    trace = None if asked.trace is None else read_trace(asked.trace)
    if trace is not None:
        check_trace(trace, geometry, where=str(asked.trace))
    return Question(
        name=f"{geometry.name}, {subject.placement.name}",
        subject=subject,
        hardware=hardware,
        grid=grid,
        context=context,
        kv_growth=asked.kv_growth,
        seed=0,
        policies=tuple(asked.policy) or None,
        trace=trace,
        zipf=asked.zipf,
        samples=asked.samples or DEFAULT_SAMPLES,
        rate=asked.rate,
        replica_bits=replica_bits,
    )


def questions_of(recipe: Recipe) -> list[Question]:
    """The cases of `estimate.figures`; nothing of the recipe's model is read."""
    section = recipe.estimate
    assert section.figures is not None
    hardware = load_hardware(section.hardware)
    grid = Grid(**section.grid.model_dump())
    return [
        Question(
            name=case.name,
            subject=_uniform(_sizes(case), case.bits, case.gpu_experts, section.figures.group_size, case.name),
            hardware=hardware,
            grid=grid,
            context=section.context,
            seed=recipe.seed,
            policies=None if section.figures.policies is None else tuple(section.figures.policies),
            stated=case.stated,
        )
        for case in section.figures.cases
    ]


def _sizes(case: CaseSection) -> ModelGeometry:
    """The known geometry that a case names, or the one whose sizes it has."""
    if isinstance(case.geometry, str):
        return load_geometry(case.geometry)
    return ModelGeometry(name=case.name, **case.geometry.model_dump())


def that_fit(questions: Sequence[Question]) -> tuple[list[Question], tuple[str, ...]]:
    """Of questions to several hardware those whose placement fits, and why the others do not; of one question that one,
    and the first where none fits."""
    fit, left_out = [], []
    for question in questions:
        refusal = question.least.refusal()
        if refusal is None:
            fit.append(question)
        else:
            left_out.append(f"{question.hardware.name}: {refusal.what}")
    return (fit, tuple(left_out)) if fit else (list(questions[:1]), ())


def document_of(
    title: str, questions: Sequence[Question], *, miss_beyond: float = 0.0, left_out: tuple[str, ...] = ()
) -> EstimateDocument:
    """The answers; EstimateError with the sum where a placement does not fit even at the smallest point.

    miss_beyond: share of a stated figure beyond which its estimate counts as missed; left_out: as `that_fit` has it.
    """
    for question in questions:
        question.least.require()
    return EstimateDocument(
        name=title,
        hardware=", ".join(dict.fromkeys(question.hardware.name for question in questions)),
        routing=questions[0].routing,
        cases=tuple(_answered(question, miss_beyond) for question in questions),
        left_out=left_out,
    )


def _answered(question: Question, miss_beyond: float) -> Case:
    answer = question.answer()
    most = max(answer.points, key=lambda point: point.batch * (point.input_tokens + point.output_tokens))
    return Case(
        name=question.name,
        geometry=question.subject.geometry.sizes(),
        estimate=answer,
        capacity=question.capacity_at(most.batch, most.input_tokens + most.output_tokens),
        stated=tuple(compare(question.name, question.stated, answer, miss_beyond=miss_beyond)),
        hit_rates=question.hits(),
        without_ndp=_without_ndp(question, answer),
        intervals=question.intervals(answer),
        served=question.served(answer.policies),
    )


def _without_ndp(question: Question, answer: Estimate) -> WithoutNdp | None:
    """The best that the same hardware does without its near-data processor, whatever policies are asked about."""
    if not question.hardware.ndp.computes:
        return None
    first = answer.points[0]
    at = Grid(inputs=(first.input_tokens,), outputs=(first.output_tokens,), batches=(first.batch,))
    asked = replace(question, policies=None, grid=at)
    every = asked.answer().points
    ours = next(point for point in every if point.policy == SUBJECT)
    found = [(False, point) for point in every if not by_label()[point.policy][0].near_data]
    with suppress(EstimateError):  # it does not fit
        narrow = replace(asked, subject=_narrowed(question.subject), policies=(ALL_ON_GPU,)).answer().points
        found += [(True, point) for point in narrow if point.policy == ALL_ON_GPU]
    if any(point.policy == ALL_ON_GPU and not narrowed for narrowed, point in found):
        found = [each for each in found if not each[0]]  # more bits fit, too
    if not found:
        return None
    narrowed, best = min(found, key=lambda each: (each[1].decode_seconds_per_token, each[1].end_to_end_seconds))
    return WithoutNdp(
        policy=best.policy,
        narrowed=narrowed,
        decode_tokens_per_second=best.decode_tokens_per_second,
        decode=ours.decode_seconds_per_token / best.decode_seconds_per_token,
        end_to_end=ours.end_to_end_seconds / best.end_to_end_seconds,
    )


def _narrowed(subject: Subject) -> Subject:
    """With FP16 experts at the most bits that another one has, which is not dropped."""
    bits = subject.placement.bits
    narrow = bits[bits < 16].max(initial=0.0) or 16.0
    placement = Placement(name=subject.placement.name, bits=np.minimum(bits, narrow), hot=subject.placement.hot)
    return replace(subject, placement=placement)


def _subject(asked: EstimateOptions, name: str, hardware: Hardware, *, batch: int, context: int) -> Subject:
    """The model's sizes and its placement: an assignment's, a manifest's, or uniform widths.

    With those, where --gpu-experts is not given, as many FP16 experts as fit beside `batch` requests of `context`
    tokens.
    """
    own = {"--assignment": asked.assignment, "--manifest": asked.manifest}
    given = [option for option, value in own.items() if value is not None]
    uniform = asked.bits is not None or asked.gpu_experts is not None or asked.gpu_bits != 16
    grouped = asked.group_size is not None
    if len(given) > 1 or (given and (uniform or grouped)):
        both = " and ".join([*given, "--bits or --gpu-experts" if uniform else "--group-size"][:2])
        raise RecipeError(f"{both} each say how experts are kept", where="estimate", do="give one of them")
    if grouped and asked.losses is not None:
        raise RecipeError("the run of --losses says how codes are stored", where="--group-size", do="leave it out")
    check_path(asked.assignment, "give an assignment.json to --assignment")
    check_path(asked.manifest, "give a placement.json to --manifest, or its directory")
    model = read_model(name, trust_remote_code=asked.trust_remote_code)
    for option, width in (("--cache-bits", asked.cache_bits), ("--other-bits", asked.other_bits)):
        if width is not None and not 1 <= width <= 32:
            raise RecipeError(f"{width:g} bits", where=option, do="give 1 to 32")
    placed = None if asked.manifest is None else read_placed(asked.manifest)
    manifest = model.manifest if placed is None else placed[0]
    geometry = replace(model.geometry, cache_bits=asked.cache_bits)
    if asked.other_bits is not None:
        geometry = replace(geometry, other_bits=asked.other_bits)
    elif manifest is not None:
        geometry = with_others_of(manifest, geometry)
    if asked.assignment is not None:
        return of_assignment(asked.assignment, geometry)
    if placed is not None:
        return of_manifest(placed[0], geometry, placed[1])
    if model.manifest is not None and not uniform:
        if grouped:
            do = "give --bits, too, or leave it out"
            raise RecipeError(f"{name} says how its codes are stored", where="--group-size", do=do)
        return of_manifest(model.manifest, geometry, name)
    bits = DEFAULT_BITS if asked.bits is None else asked.bits
    for option, width in (("--bits", bits), ("--gpu-bits", asked.gpu_bits)):
        if not 1 <= width <= 16:
            raise RecipeError(f"{width:g} bits", where=option, do="give 1 to 16")
    group_size = asked.group_size or DEFAULT_GROUP
    codes: dict[str, Any] = {"group_size": group_size}
    if asked.losses is not None:
        codes = codes_of_run(asked.losses, geometry)
    hot = asked.gpu_experts
    if hot is None:
        stored = float(effective_bits(asked.gpu_bits, **codes))
        hot = largest_gpu_experts(geometry, hardware, batch=batch, context=context, stored_bits=stored) or 0
    return replace(_uniform(geometry, bits, hot, group_size, hot_bits=asked.gpu_bits), **codes)


def _uniform(
    geometry: ModelGeometry,
    bits: float,
    hot: int,
    group_size: int,
    name: str | None = None,
    *,
    hot_bits: float = 16,
) -> Subject:
    """One width, and some experts of every layer on the GPU."""
    at = "" if hot == 0 else " in FP16" if hot_bits == 16 else f" at {hot_bits:g}"
    name = name or f"{bits:g} code bits, {hot} of {geometry.num_experts} experts on the GPU{at}"
    placement = uniform_placement(geometry, bits=bits, hot_experts=hot, name=name, hot_bits=hot_bits)
    return Subject(geometry=geometry, placement=placement, group_size=group_size, zero_points=False)
