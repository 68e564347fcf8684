"""moeq estimate: a run's stage, the figures that a recipe lists, or one model by its sizes; which one is asked for."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeq.errors import EstimateError, RecipeError
from moeq.estimation import files, make, tables
from moeq.estimation.options import AXES, parse_grid, parse_replicas
from moeq.estimator import load_hardware
from moeq.estimator.capacity import REPLICA_BITS, CapacityPlan
from moeq.estimator.document import EstimateDocument
from moeq.estimator.fit import Setting, fit_file, fit_tables, write_hardware
from moeq.estimator.sheets import sheet
from moeq.recipe import Recipe, load_recipe
from moeq.registry import POLICIES

DEFAULT_HARDWARE = "paper-ctxmoe"
DEFAULT_CONTEXT = 1024
RUNS = "moeq-out"  # where runs without --out lie, by name
MOST_ROWS = 24  # of a fit's points on the terminal
STAGE_TOO = {"hardware": "estimate.hardware", "context": "estimate.context"}  # options that a recipe has, too


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command line of `moeq estimate`; words: the recipe's path, and axes that stand behind --grid's first."""

    words: list[str]
    model: str | None = None
    out: Path | None = None
    overrides: list[str]
    hardware: str | None = None
    assignment: Path | None = None
    manifest: Path | None = None
    trace: Path | None = None
    bits: float | None = None
    gpu_experts: int | None = None
    group_size: int = 128
    policies: list[str]
    grid: list[str]
    context: int | None = None
    kv_growth: bool = False
    zipf: float | None = None
    replicas: str | None = None
    capacity: bool = False
    sheet: str | None = None
    fit: Path | None = None
    trust_remote_code: bool = False
    json: bool = False
    quiet: bool = False

    @property
    def axes(self) -> list[str]:
        """Every word of --grid."""
        return [*self.grid, *(word for word in self.words if _is_axis(word))] if self.grid else []

    @property
    def recipe(self) -> Path | None:
        """The one word that is no axis; RecipeError for more of them."""
        others = [word for word in self.words if not (self.grid and _is_axis(word))]
        if len(others) > 1:
            raise RecipeError(f"unexpected argument {others[1]!r}", where="moeq estimate", do="give one recipe")
        return Path(others[0]) if others else None

    @property
    def beyond_a_run(self) -> list[str]:
        """Options that belong to an estimate without a run."""
        given = {
            "--assignment": self.assignment,
            "--manifest": self.manifest,
            "--trace": self.trace,
            "--bits": self.bits,
            "--gpu-experts": self.gpu_experts,
            "--policy": self.policies or None,
            "--kv-growth": self.kv_growth or None,
            "--zipf": self.zipf,
            "--replicas": self.replicas,
            "--capacity": self.capacity or None,
            "--sheet": self.sheet,
            "--fit": self.fit,
        }
        return [name for name, value in given.items() if value is not None]


def _is_axis(word: str) -> bool:
    return word.partition("=")[0] in AXES and "=" in word


def needs_a_run(asked: Asked) -> bool:
    """Whether the command line asks for the stage of a run: by a recipe without figures, or by a run's directory."""
    path = asked.recipe
    if path is not None:
        if asked.beyond_a_run:
            what = f"{asked.beyond_a_run[0]} cannot go with a recipe"
            raise RecipeError(what, where=str(path), do="leave the recipe out and give --model, or use --set")
        return _recipe(asked).estimate.figures is None
    mine = [*asked.beyond_a_run, *(["--hardware"] if asked.hardware else []), *(["--grid"] if asked.grid else [])]
    return not mine and (asked.model is None or (asked.out is not None and files.is_run(asked.out)))


def recipe_overrides(asked: Asked) -> list[str]:
    """What the options change of a recipe's estimate."""
    found = [f"{key}={getattr(asked, name)}" for name, key in STAGE_TOO.items() if getattr(asked, name) is not None]
    if asked.axes:
        grid = parse_grid(asked.axes)
        found += [f"estimate.grid.{axis}={list(getattr(grid, axis))}" for axis in AXES.values()]
    return [*asked.overrides, *found]


def _recipe(asked: Asked) -> Recipe:
    return load_recipe(asked.recipe, recipe_overrides(asked))


def run(asked: Asked) -> tuple[Any, EstimateError | None]:
    """An estimate without a run, printed unless it is wanted as JSON.

    Returns what --json prints, and the refusal that follows it where --capacity finds that something does not fit.
    Raises MoeqError for input that cannot be read or does not fit together, or a placement that does not fit.
    """
    if asked.sheet is not None:
        _check_uses("--sheet", (), asked)
        return _sheet(asked, asked.sheet), None
    if asked.fit is not None:
        return _fit(asked, asked.fit), None
    if asked.recipe is not None:
        recipe = _recipe(asked)
        assert recipe.estimate.figures is not None
        questions = make.questions_of(recipe)
        found = make.document_of(recipe.name, questions, miss_beyond=recipe.estimate.figures.miss_beyond)
        return _finish(asked, found, questions, asked.out or Path(RUNS) / recipe.name), None
    if asked.overrides:
        raise RecipeError("--set changes a recipe, and there is none", where="moeq estimate", do="give options instead")
    question = make.question_of(_options(asked))
    if asked.capacity:
        return _capacity(asked, question.capacity)
    if asked.out is not None:
        files.check_out(asked.out)
    title = f"{question.subject.geometry.name} on {question.hardware.name}"
    return _finish(asked, make.document_of(title, [question]), [question], asked.out), None


def _options(asked: Asked) -> make.Options:
    if asked.model is None:
        do = "give --model: mixtral-8x7b, a config.json, a model directory, a packed checkpoint or a hub id"
        raise RecipeError("no model", where="moeq estimate", do=do)
    return make.Options(
        model=asked.model,
        hardware=asked.hardware or DEFAULT_HARDWARE,
        assignment=asked.assignment,
        manifest=asked.manifest,
        trace=asked.trace,
        bits=asked.bits,
        gpu_experts=asked.gpu_experts,
        group_size=asked.group_size,
        policies=tuple(asked.policies),
        grid=parse_grid(asked.axes),
        context=asked.context or DEFAULT_CONTEXT,
        kv_growth=asked.kv_growth,
        zipf=asked.zipf,
        replica_bits=REPLICA_BITS if asked.replicas is None else parse_replicas(asked.replicas),
        trust_remote_code=asked.trust_remote_code,
    )


def _finish(asked: Asked, found: EstimateDocument, questions: list[make.Question], out: Path | None) -> Any:
    paths = {} if out is None else files.write_document(out, found, questions)
    if not asked.quiet:
        for line in POLICIES.problems():
            print(f"left out: {line}", file=sys.stderr)
    if not asked.json and not asked.quiet:
        tables.print_document(found, paths)
    return found.model_dump(mode="json") | {"paths": {name: str(path) for name, path in paths.items()}}


def _capacity(asked: Asked, plan: CapacityPlan) -> tuple[Any, EstimateError | None]:
    """What fits where, and the refusal where something does not."""
    if not asked.json and not asked.quiet:
        tables.print_capacity(plan)
    return plan.model_dump(mode="json") | {"fits": plan.fits}, plan.refusal()


def _check_uses(option: str, used: tuple[str, ...], asked: Asked) -> None:
    """RecipeError where an option stands beside others of which it would use nothing."""
    given = [
        *asked.beyond_a_run,
        *(f"--{name}" for name in ("model", "hardware", "grid", "out") if getattr(asked, name)),
    ]
    others = [name for name in given if name not in (option, *used)]
    if others:
        raise RecipeError(f"{option} uses nothing of {others[0]}", where="moeq estimate", do="leave it out")


FITS = ("--model", "--hardware", "--assignment", "--manifest", "--bits", "--gpu-experts", "--out")  # what --fit uses


def _fit(asked: Asked, path: Path) -> Any:
    """Fit a hardware file to measured points; --out, a YAML file or a directory, takes the fitted one."""
    _check_uses("--fit", FITS, asked)
    hardware = load_hardware(asked.hardware or DEFAULT_HARDWARE)
    context = asked.context or DEFAULT_CONTEXT
    setting = Setting(context=context, group_size=asked.group_size)
    if asked.model is not None:
        subject = make.question_of(_options(asked)).subject
        setting = Setting(
            geometry=subject.geometry,
            placement=subject.placement,
            context=context,
            group_size=subject.group_size,
            zero_points=subject.zero_points,
        )
    found = fit_file(path, hardware, setting)
    target = None
    if asked.out is not None:
        is_file = asked.out.suffix in (".yaml", ".yml")
        target = asked.out if is_file else asked.out / f"{hardware.name}-fitted.yaml"
        write_hardware(target, found)
    if not asked.json and not asked.quiet:
        tables.print_sheet(fit_tables(found), MOST_ROWS)
        if target is not None:
            print(f"hardware  {target}")
    figures = {key: value for key, value in asdict(found).items() if key != "hardware"}
    return figures | {"hardware": hardware.name, "hardware_file": None if target is None else str(target)}


def _sheet(asked: Asked, name: str) -> Any:
    """The tables of a paper's sheet; EstimateError with the nearest name for one that there is not."""
    found = sheet(name)
    if not asked.json and not asked.quiet:
        tables.print_sheet(found)
    return [asdict(table) for table in found]
