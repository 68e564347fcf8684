"""`moeq estimate --speed`: what is searched, from the command line; what is written of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from moeq.artifacts.assignment import FULL
from moeq.artifacts.files import make_directory, write_json, write_text
from moeq.errors import EstimateError, RecipeError
from moeq.estimation import outputs, search_tables
from moeq.estimation.estimate_options import ALL, EstimateOptions
from moeq.estimation.questions import DEFAULT_SAMPLES, Question, check_names, longest, question_of, questions_of
from moeq.estimator import Hardware, chosen_labels, known_hardware, load_hardware
from moeq.estimator.placement import Placement, layer_of_assignment
from moeq.estimator.result import Frozen
from moeq.estimator.search import BITS, GPU_BITS, Search, SearchResult, Setting
from moeq.preflight import check_path
from moeq.recipe import load_recipe
from moeq.recipe.agreement import changes_of
from moeq.recipe.types import Bytes, Speed
from moeq.version import __version__

NAME, SCHEMA, PAGE = "search.json", "search.schema.json", "search.html"
UNUSED = (
    "--assignment",
    "--manifest",
    "--trace",
    "--zipf",
    "--kv-growth",
    "--rate",
    "--replicas",
    "--capacity",
    "--sheet",
    "--fit",
    "--kernels",
    "--design",
)


class SearchDocument(Frozen):
    """search.json: one search a case."""

    schema_version: Literal[1] = 1
    moeq_version: str = __version__
    name: str
    loss_of: str | None
    dollars_per_hour: dict[str, float]
    searches: tuple[SearchResult, ...]
    cases: tuple[str, ...]


def search_answer(asked: EstimateOptions) -> tuple[dict[str, Any], Callable[[], None]]:
    """The search that the command line asks for, written where --out says: as JSON, and how it is printed.

    Raises MoeqError for input that cannot be read or does not fit together.
    """
    unused = [name for name in asked.given("of an estimate without a run") if name in UNUSED]
    if unused:
        raise RecipeError(f"--speed uses nothing of {unused[0]}", where="estimate", do="leave it out")
    speed, asked_dollars = _speed(asked.speed or ""), _dollars(asked.cost)
    memory = None if asked.memory is None else _bytes(asked.memory)
    if asked.out is not None:
        outputs.check_out(asked.out)
    names = [name for given in asked.hardware for name in (known_hardware() if given == ALL else [given])]
    questions = _questions(asked, names)
    systems = [load_hardware(name) for name in names] or [questions[0].hardware]
    check_names(systems)
    dollars = _of_systems(asked_dollars, dict(zip(names, systems, strict=False)), systems)
    found = tuple(_search(question, asked, systems, speed, memory, dollars).run() for question in questions)
    title = f"{', '.join(dict.fromkeys(each.geometry for each in found))} at {speed:g} tokens a second"
    document = SearchDocument(
        name=title,
        loss_of=None if asked.losses is None else asked.losses.name,
        dollars_per_hour=dollars,
        searches=found,
        cases=tuple(question.name for question in questions),
    )
    paths = {} if asked.out is None else _write(asked.out, document)
    figures = document.model_dump(mode="json") | {"paths": {name: str(path) for name, path in paths.items()}}
    return figures, lambda: search_tables.print_searches(document.searches, document.cases, paths)


def _questions(asked: EstimateOptions, names: Sequence[str]) -> list[Question]:
    """The case of the options, or those of a recipe's figures; on the first hardware."""
    path = asked.recipe_path
    if path is not None:
        if asked.model is not None:
            raise RecipeError("a recipe and --model", where="estimate", do="give one of them")
        recipe = load_recipe(path, changes_of(replace(asked, hardware=[])))
        if recipe.estimate.figures is None:
            do = "give --model and --losses RUN, or a recipe with estimate.figures"
            raise RecipeError("--speed needs sizes", where=str(path), do=do)
        return questions_of(recipe)
    return [question_of(replace(asked, hardware=list(names[:1])))]


def _search(
    question: Question,
    asked: EstimateOptions,
    systems: Sequence[Hardware],
    speed: float,
    memory: float | None,
    dollars: Mapping[str, float],
) -> Search:
    subject = question.subject
    losses = None if asked.losses is None else losses_of_run(asked.losses, subject.geometry.num_experts)
    widths = () if losses is None else tuple(map(float, losses.widths))
    placement = subject.placement
    hot, cold, number = placement.bits[placement.hot], placement.bits[~placement.hot], placement.hot.sum(axis=1)
    setting = Setting(
        gpu_experts=round(float(number.mean())),
        gpu_bits=float(hot.mean()) if hot.size else 16.0,
        bits=float(cold.mean()) if cold.size else float(hot.mean()),
    )
    mixed = any(np.ptp(values) > 0 for values in (hot, cold, number) if values.size)
    return Search(
        geometry=subject.geometry,
        hardware=systems,
        speed=speed,
        asked=setting,
        placed=placement if mixed else None,
        placed_loss=losses.of_experts(placement) if mixed and losses is not None else None,
        batches=question.grid.batches if asked.grid or asked.recipe_path else (1,),
        context=longest(question.grid, question.context, kv_growth=False) if asked.grid else question.context,
        group_size=subject.group_size,
        zero_points=subject.zero_points,
        codebook=subject.codebook,
        memory_bytes=memory,
        dollars_per_hour=dollars,
        loss=None if losses is None else losses.of_widths,
        gpu_widths=(16.0, *widths) if widths else GPU_BITS,
        widths=(16.0, *widths) if widths else BITS,
        labels=chosen_labels(asked.policy) if asked.policy else None,
        samples=asked.samples or DEFAULT_SAMPLES,
        seed=question.seed,
    )


def _speed(text: str) -> float:
    try:
        return TypeAdapter(Speed).validate_python(text)
    except ValidationError as error:
        do = "write tokens a second, such as 20tok/s"
        raise RecipeError(f"{text!r} is no speed", where="--speed", do=do) from error


def _bytes(text: str) -> int:
    try:
        return TypeAdapter(Bytes).validate_python(text)
    except ValidationError as error:
        raise RecipeError(f"{text!r} is no size", where="--memory", do="write it as 24GiB") from error


def _dollars(texts: Sequence[str]) -> dict[str, float]:
    """{hardware: dollars an hour}"""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not equals or not 0 <= number < 1e9:
            raise RecipeError(f"{text!r} is no cost", where="--cost", do="write HARDWARE=DOLLARS an hour")
        found[name] = number
    return found


def _of_systems(
    dollars: Mapping[str, float], named: Mapping[str, Hardware], systems: Sequence[Hardware]
) -> dict[str, float]:
    """{name of a hardware: dollars an hour}, of what is named as --hardware has it, or by its own name."""
    known = {system.name: system.name for system in systems}
    for given, system in named.items():
        known |= {given: system.name, Path(given).name: system.name, Path(given).stem: system.name}
    found = {}
    for name, number in dollars.items():
        if name not in known:
            raise RecipeError(f"{name} is none of the hardware", where="--cost", do="name one that --hardware names")
        found[known[name]] = number
    return found


@dataclass(frozen=True, kw_only=True)
class MeasuredLosses:
    """What placements lose by a run's table: {width: losses [E]} of every layer, each expert's times how often it was
    routed to; widths: those that were measured of all."""

    layers: tuple[Mapping[int, NDArray[Any]], ...]
    widths: tuple[int, ...]

    def of_experts(self, placement: Placement) -> float | None:
        """The sum over all experts, each at its own width; None where one was not measured, as of experts whose
        matrices differ."""
        return self._sum(placement, None)

    def of_widths(self, placement: Placement) -> float | None:
        """The same of widths and places that no expert has yet: those on the GPU are the layer's most sensitive ones
        at the narrowest width, and so on."""
        narrowest = self.widths[0]
        return self._sum(placement, [np.argsort(-layer[narrowest], kind="stable") for layer in self.layers])

    def _sum(self, placement: Placement, orders: Sequence[NDArray[Any]] | None) -> float | None:
        """With the experts of every layer in an order, the first of which take the places on the GPU; None: where the
        placement has them."""
        if not set(placement.bits.ravel().tolist()) <= {float(FULL), *map(float, self.widths)}:
            return None
        rows, total = layer_of_assignment(len(self.layers), len(placement.bits)), 0.0
        for number, (layer, row) in enumerate(zip(self.layers, rows, strict=True)):
            placed = np.argsort(~placement.hot[row], kind="stable")
            experts = placed if orders is None else orders[number]
            for expert, bits in zip(experts, placement.bits[row][placed], strict=True):
                total += 0.0 if bits == FULL else float(layer[int(bits)][expert])
        return total


def losses_of_run(run: Path, num_experts: int) -> MeasuredLosses:
    """What a run's table says of placements, by the best method of every expert and width.

    Raises ArtifactError for a run without losses, EstimateError for one of another model.
    """
    from moeq.artifacts.losses import read_losses

    check_path(run, "give the directory of a run to --losses")
    table = read_losses(run / "losses" / "losses.parquet")
    columns = ("weighted_loss", "calibration_tokens", "heldout_tokens")
    losses, *tokens = (table.matrix("best", column) for column in columns)
    layers = tuple(_shared(losses[index], [each[index] for each in tokens]) for index in range(len(losses)))
    counts = sorted({len(next(iter(layer.values()))) for layer in layers})
    if counts != [num_experts]:
        what = f"its layers have {', '.join(map(str, counts))} experts, the model {num_experts}"
        raise EstimateError(what, where=f"--losses {run}", do="give a run of this model")
    return MeasuredLosses(layers=layers, widths=tuple(sorted(set.intersection(*(set(layer) for layer in layers)))))


def _shared(
    losses: Mapping[int, NDArray[Any]], tokens: Sequence[Mapping[int, NDArray[Any]]]
) -> dict[int, NDArray[Any]]:
    """Losses [E] of a layer by width, times the share of its tokens that reach each expert."""
    routed = np.sum([next(iter(each.values())) for each in tokens], axis=0)
    share = routed / max(1.0, float(routed.sum()))
    return {bits: each * share for bits, each in losses.items()}


def _write(out: Path, document: SearchDocument) -> dict[str, Path]:
    from moeq.reporting.search_page import render

    make_directory(out)
    paths = {"page": out / PAGE, "search": out / NAME}
    write_json(out / SCHEMA, SearchDocument.model_json_schema())
    write_json(paths["search"], document.model_dump(mode="json"))
    write_text(paths["page"], render(document.name, document.searches, document.cases))
    return paths
