"""What `moeq estimate` answers without a run: a recipe's figures, one model by its sizes, a paper's sheet, a fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moeq.errors import EstimateError, RecipeError, as_named
from moeq.estimation import outputs, questions, tables
from moeq.estimation.estimate_options import APART, EstimateOptions
from moeq.estimation.kernels import forward_of
from moeq.estimation.questions import DEFAULT_CONTEXT, DEFAULT_GROUP, DEFAULT_HARDWARE, Question
from moeq.estimator import load_hardware
from moeq.estimator.cases import EstimateDocument
from moeq.folders import checkpoint_of, is_run
from moeq.options import RECIPES
from moeq.preflight import check_path
from moeq.recipe import load_recipe
from moeq.recipe.agreement import changes_of

RUNS = "moeq-out"  # where runs without --out lie, by name
SEARCHES = ("--speed", "--memory", "--cost", "--losses", "--policy", "--samples")  # what a search takes with a recipe
MOST_ROWS = 24  # of a fit's points on the terminal
PLACED = ("--model", "--hardware", "--assignment", "--manifest", "--bits", "--gpu-experts", "--group-size", "--context")
FITS = (*PLACED, "--out")  # what --fit uses
CAPACITY = (*PLACED, "--gpu-bits", "--cache-bits", "--kv-growth", "--grid", "--replicas")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """As JSON, and how it is printed; refusal: what follows it where --capacity finds that something does not fit."""

    figures: dict[str, Any]
    show: Callable[[], None]
    refusal: EstimateError | None = None


def needs_a_run(asked: EstimateOptions) -> bool:
    """Whether the command line asks for the stage of a run: by a recipe without figures, or by a run's directory."""
    path, apart = asked.recipe_path, asked.given(APART)
    if path is not None:
        if path.suffix not in RECIPES and (path.suffix == ".json" or not path.is_file()):
            named = as_named(path)
            raise RecipeError("no recipe", where=named, do=f"give a YAML recipe, or a model as --model {named}")
        apart = [option for option in apart if asked.speed is None or option not in SEARCHES]
        if apart:
            what = f"{apart[0]} cannot go with a recipe"
            raise RecipeError(what, where=str(path), do="leave the recipe out and give --model, or use --set")
        return asked.speed is None and load_recipe(path, changes_of(asked)).estimate.figures is None
    if apart or asked.hardware or asked.grid:
        return False
    return asked.model is None or (asked.out is not None and outputs.is_run(asked.out))


def _of_checkpoint(asked: EstimateOptions) -> EstimateOptions:
    """With a run's checkpoint as the model, or of --kernels its integer forward, where a run is named."""
    stands_for = checkpoint_of if asked.kernels is None else forward_of
    if asked.model is not None:
        named = Path(asked.model)
        return replace(asked, model=str(stands_for(named))) if is_run(named) else asked
    if asked.recipe_path is None and asked.out is not None and is_run(asked.out):
        return replace(asked, model=str(stands_for(asked.out)), out=None)
    return asked


def answer(asked: EstimateOptions) -> Answer:
    """An estimate without a run, written where --out says; printing it is left to the caller.

    A run that is named stands for its checkpoint, into which nothing is written. Raises MoeqError for input that cannot
    be read or does not fit together, or a placement that does not fit.
    """
    asked = _of_checkpoint(asked)
    if asked.speed is not None:
        from moeq.estimation.searches import search_answer

        figures, show_found = search_answer(asked)
        return Answer(figures=figures, show=show_found)
    for option, value in {"--memory": asked.memory, "--cost": asked.cost, "--losses": asked.losses}.items():
        if value:
            raise RecipeError(f"{option} is of a search", where="estimate", do="give --speed, too, or leave it out")
    if asked.sheet is not None:
        from moeq.estimator.sheets import sheet

        _check_uses("--sheet", (), asked)
        pages = sheet(asked.sheet)
        return Answer(figures={"pages": [asdict(page) for page in pages]}, show=lambda: tables.print_sheet(pages))
    if asked.kernels is not None:
        return _kernels(asked, asked.kernels)
    if asked.design:
        raise RecipeError(
            "--design is of --kernels", where="estimate", do="give --kernels zcu102, too, or leave it out"
        )
    if asked.fit is not None:
        return _fit(asked, asked.fit)
    if asked.recipe_path is not None:
        recipe = load_recipe(asked.recipe_path, changes_of(asked))
        assert recipe.estimate.figures is not None
        cases = questions.questions_of(recipe)
        made = questions.document_of(recipe.name, cases, miss_beyond=recipe.estimate.figures.miss_beyond)
        return _finish(made, cases, asked.out or Path(RUNS) / recipe.name)
    if asked.set_:
        raise RecipeError("--set changes a recipe, and there is none", where="estimate", do="give options instead")
    asks = questions.questions_asked(asked)
    if asked.capacity:
        if asked.out is not None:
            raise RecipeError("--out is of an estimate", where="--capacity", do="leave it out, or use --json")
        _check_uses("--capacity", CAPACITY, asked)
        plan = questions.question_of(replace(asked, hardware=[asked.one_hardware or DEFAULT_HARDWARE])).capacity
        room = plan.model_dump(mode="json") | {"fits": plan.fits}
        return Answer(figures=room, show=lambda: tables.print_capacity(plan), refusal=plan.refusal())
    if asked.out is not None:
        outputs.check_out(asked.out)
    asks, left_out = questions.that_fit(asks)
    title = f"{asks[0].subject.geometry.name} on {', '.join(ask.hardware.name for ask in asks)}"
    return _finish(questions.document_of(title, asks, left_out=left_out), asks, asked.out)


def _finish(made: EstimateDocument, asked: list[Question], out: Path | None) -> Answer:
    paths = {} if out is None else outputs.write_document(out, made, asked)
    figures = made.model_dump(mode="json") | {"paths": {name: str(path) for name, path in paths.items()}}
    return Answer(figures=figures, show=lambda: tables.print_document(made, paths))


def _kernels(asked: EstimateOptions, name: str) -> Answer:
    """Paper 004's two kernels on an FPGA, or beside what the paper prints."""
    from moeq.estimation import kernel_tables, kernels
    from moeq.integers.hardware.design import device

    if name == kernels.PAPER:
        _check_uses("--kernels paper-004", ("--kernels",), asked)
        runs = kernels.paper_runs()
        page = kernel_tables.of_paper(runs)
        made = [{"row": run.row.name} | kernels.figures(design) for run, design in runs]
        return Answer(figures={"pages": [asdict(page)], "runs": made}, show=lambda: tables.print_sheet([page]))
    _check_uses("--kernels", ("--model", "--design"), asked)
    fpga = device(name)
    axes = kernels.parse_design(asked.design_axes)
    subject = kernels.read_vision(asked.model, trust_remote_code=asked.trust_remote_code)
    found = kernels.designs(subject, fpga, axes)
    own = None if subject.known is None else subject.known.registers
    pages = [kernel_tables.side_by_side(found.designs, found.refused)]
    pages += kernel_tables.of_one(found.designs[0], own) if len(found.designs) == 1 else []
    figures = {"designs": [kernels.figures(design, own) for design in found.designs], "left_out": list(found.refused)}
    return Answer(figures=figures, show=lambda: tables.print_sheet(pages), refusal=found.refusal)


def _check_uses(option: str, used: tuple[str, ...], asked: EstimateOptions) -> None:
    """RecipeError where an option stands beside others of which it would use nothing."""
    shared = [f"--{name}" for name in ("model", "hardware", "grid", "context", "out") if getattr(asked, name)]
    others = [name for name in (*asked.given(APART), *shared) if name not in (option, *used)]
    if others:
        raise RecipeError(f"{option} uses nothing of {others[0]}", where="estimate", do="leave it out")


def _fit(asked: EstimateOptions, path: Path) -> Answer:
    """Fit a hardware file to measured points; --out, a YAML file or a directory, takes the fitted one."""
    from moeq.estimator.fit import fit_file, fit_tables, write_hardware
    from moeq.estimator.fitting import Setting

    _check_uses("--fit", FITS, asked)
    check_path(path, "give a CSV file of measured points")
    hardware = load_hardware(asked.one_hardware or DEFAULT_HARDWARE)
    setting = Setting(context=asked.context or DEFAULT_CONTEXT, group_size=asked.group_size or DEFAULT_GROUP)
    if asked.model is not None:  # its sizes, placement, group size and zero points
        setting = replace(setting, **vars(questions.question_of(asked).subject))
    fitted = fit_file(path, hardware, setting)
    target = None
    if asked.out is not None:
        is_file = asked.out.suffix in (".yaml", ".yml")
        target = asked.out if is_file else asked.out / f"{hardware.name}-fitted.yaml"
        write_hardware(target, fitted)

    def show() -> None:
        tables.print_sheet(fit_tables(fitted), MOST_ROWS)
        if target is not None:
            print(f"hardware  {target}")

    figures = {key: value for key, value in asdict(fitted).items() if key != "hardware"}
    files = {"hardware": hardware.name, "hardware_file": None if target is None else str(target)}
    return Answer(figures=figures | files, show=show)
