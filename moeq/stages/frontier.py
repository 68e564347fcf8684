"""What is told of a run's measurements on demand: objectives against bytes of other methods, prices of targets, and
what an assignment comes to that was edited by hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

from rich.markup import escape

from moeq.artifacts.files import make_directory, write_json, write_text
from moeq.artifacts.targets import Target, refuse_codes, targets
from moeq.assigners import report
from moeq.errors import FormatError
from moeq.recipe import BUDGETS
from moeq.registry import ALLOCATORS
from moeq.reporting.frontier import frontier_svg
from moeq.stages import loading
from moeq.stages.assign import decide, inputs_of, load, summary
from moeq.stages.context import Context

NAME, PLOT = "frontier.json", "frontier.svg"  # beside the assignment
VERSION = 2
AVERAGES = tuple(str(Fraction(quarter, 4)) for quarter in range(4, 17))  # of a frontier: 1 to 4 code bits


def frontier(context: Context) -> dict[str, Any]:
    """Objective against bytes of every method, written as frontier.json and frontier.svg beside the assignment."""
    inputs = inputs_of(context, context.recipe.assign, context.recipe.name)
    for line in ALLOCATORS.problems():
        context.reporter.say(f"  left out: {escape(line)}")
    number = len(report.sections(inputs, AVERAGES))
    with context.reporter.bar("frontier", number) as advance:
        points = report.frontier(inputs, AVERAGES, decide, advance)
    directory = make_directory(context.directory("assign"))
    document = {
        "schema_version": VERSION,
        "loss_weighting": inputs.config.loss_weighting,
        "layer_weighting": inputs.config.layer_weighting,
        "points": [asdict(point) for point in points],
    }
    write_json(directory / NAME, document)
    write_text(directory / PLOT, frontier_svg(points))
    return document


def prices(context: Context) -> list[dict[str, Any]]:
    """What every target's restriction costs in objective, on the budget of the recipe's assignment; nothing is known of
    one that does not load the model at any widths, or reads no codes of the kind that was measured. beside: why a
    target that loads the experts, of which alone the price is, does not load what the recipe packs beside them."""
    inputs = inputs_of(context, context.recipe.assign, context.recipe.name)
    refused = {name: _never(context, target) for name, target in targets().items()}
    read = [name for name, why in refused.items() if why is None]
    found = {price.target: price for price in report.prices(inputs, load(context), read, loading.seen_by(context))}
    found |= {name: report.Price(target=name, refusal=why) for name, why in refused.items() if why}
    return [asdict(price) | {"beside": _beside(context, price)} for price in map(found.__getitem__, refused)]


def _beside(context: Context, price: report.Price) -> str | None:
    refused = None if price.refusal else loading.refuse_beside(context, targets()[price.target])
    return None if refused is None else "; ".join(refused)


def _never(context: Context, target: Target) -> str | None:
    """Why a target loads nothing of what was measured, whatever its widths; None where it may."""
    try:
        loading.check_family(context, target.name)
    except FormatError as error:
        return str(error)
    codes = refuse_codes(target, context.recipe.losses.encoding)
    return None if codes is None else "; ".join(codes)


def edited(context: Context) -> dict[str, Any]:
    """The summary of an assignment that was edited by hand, which no budget limits: the optimum is of its bytes."""
    inputs = inputs_of(context, context.recipe.assign, context.recipe.name)
    free = inputs.config.model_copy(update=dict.fromkeys(BUDGETS))
    return summary(context, replace(inputs, config=free), load(context), {})
