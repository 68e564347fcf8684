"""What every allocator keeps to, moeq's own and another package's: budgets, places, order, errors, documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from cases import examples
from fork_server import ForkServer
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from random_inputs import BITS, inputs_of, least_bytes, table_of
from strangers import on_path, started, write_package

from moeq.artifacts.assignment import FULL, Assignment, write_assignment
from moeq.artifacts.targets import refusal, targets
from moeq.assigners import assign, report
from moeq.assigners.allocator import Allocator
from moeq.assigners.inputs import AssignInputs, importance, ranking
from moeq.errors import AssignmentError, BudgetError, FormatError, MoeqError, RecipeError
from moeq.recipe import BUDGETS, SHARED, AssignSection, Recipe, budget_keys, load_recipe
from moeq.registry import ALLOCATORS

STRANGER = '''
"""strangers: the more important half of every layer's experts at the wider of two widths, where the budget pays."""

from typing import Literal

import numpy as np
from pydantic import Field

from moeq.assigners.allocator import Allocator
from moeq.assigners.frequency import spend
from moeq.assigners.inputs import build, hot_masks, importance, ranking
from moeq.assigners.limits import limit_of
from moeq.recipe import MethodSettings


class Settings(MethodSettings):
    first: Literal["important", "other"] = Field("important", description="which half is served first")

    def named(self):
        return {2, 4}


def assign(inputs):
    hot, bits = hot_masks(inputs), []
    limit = limit_of(inputs, (2, 4), hot)
    for layer, total in enumerate(limit.by_layer()):
        order = [expert for expert in ranking(importance(inputs, layer)) if not hot[layer][expert]]
        order = order if inputs.settings(Settings).first == "important" else order[::-1]
        widths = np.full(len(hot[layer]), 2)
        costs = np.tile(limit.costs[layer], (len(order), 1))
        widths[order] = [(2, 4)[choice] for choice in spend(costs, total)]
        bits.append(widths)
    return build(inputs, bits, hot)


ALLOCATOR = Allocator(
    name="strangers",
    label="the strangers' halves",
    help="the more important experts of every layer at 4 bits, the others at 2",
    assign=assign,
    settings=Settings,
    budgets=("expert_bytes", "code_bits", "bits_per_weight"),
)
'''
MODULES = {"strangers_allocator": STRANGER, "strangers_wrong": "ALLOCATOR = dict(name='wrong')\n"}
ENTRIES = {"strangers": "strangers_allocator:ALLOCATOR", "wrong": "strangers_wrong:ALLOCATOR"}
NAMES = [*ALLOCATORS.names(), "strangers"]
AVERAGES = ("2", "7/3", "3", "4")
SHAPES = [(5, 5), (7, 3, 1), (1,), (9,), (4, 2)]  # experts of every layer


@pytest.fixture(autouse=True, scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("strangers")
    write_package(folder, ALLOCATORS.group, ENTRIES, MODULES)
    with on_path(folder, ALLOCATORS, MODULES):
        yield


@pytest.fixture(params=NAMES)
def allocator(request: pytest.FixtureRequest) -> Allocator:
    found: Allocator = ALLOCATORS.get(request.param)
    return found


def configs(inputs: AssignInputs, allocator: Allocator, *, gpu_experts: int = 0) -> list[AssignSection]:
    """Sections of an allocator: what a frontier shows of it, and every budget that it takes."""
    shown = [
        {key: value for key, value in section.model_dump(exclude_none=True).items() if key in keys}
        for _, section in report.sections(inputs, AVERAGES)
        if section.method == allocator.name
        for keys in [{*allocator.settings.model_fields, *SHARED}]
    ]
    least = least_bytes(inputs)
    whole = {"expert_bytes": 5 * least, "size": 5 * least + inputs.other_bytes, "code_bits": "5/2"}
    whole["bits_per_weight"] = str(Fraction(5 * 8 * least, sum(weights_of(inputs))))
    given = [{budget: whole[budget]} for budget in allocator.budgets if budget in whole]
    every = [json.loads(text) for text in dict.fromkeys(json.dumps(one, sort_keys=True) for one in [*shown, *given])]
    return [AssignSection(method=allocator.name, gpu_experts=gpu_experts, **keys) for keys in every or [{}]]


def weights_of(inputs: AssignInputs) -> list[int]:
    """Weights of every layer's experts."""
    return [one * counts.shape[-1] for one, counts in zip(inputs.weights, inputs.profile.counts, strict=True)]


def stored(inputs: AssignInputs, assignment: Assignment) -> int:
    """Bytes of all experts, as the inputs count them."""
    return sum(inputs.stored(layer, one) for layer, widths in enumerate(assignment.expert_widths()) for one in widths)


def check_kept(inputs: AssignInputs, assignment: Assignment) -> None:
    """The section's budget, in whole numbers and fractions."""
    config = inputs.config
    if config.expert_bytes is not None:
        assert stored(inputs, assignment) <= config.expert_bytes
    if config.size is not None:
        assert stored(inputs.in_the_checkpoint(), assignment) + inputs.other_bytes <= config.size
    if config.bits_per_weight is not None:
        cold = [(layer, one) for layer, mask in enumerate(assignment.hot()) for one in np.flatnonzero(~mask)]
        widths = assignment.expert_widths()
        size = sum(inputs.stored(layer, widths[layer][expert]) for layer, expert in cold)
        assert 8 * size <= Fraction(config.bits_per_weight) * sum(inputs.weights[layer] for layer, _ in cold)
    average = assignment.code_bits("ndp")
    if config.code_bits is not None and average is not None:
        assert average <= Fraction(config.code_bits)


def check_one_line(error: MoeqError) -> None:
    assert "\n" not in str(error)
    assert error.do


def outcome(inputs: AssignInputs) -> Assignment | AssignmentError | FormatError:
    """What an allocator makes of inputs, or how it refuses them."""
    try:
        return assign(replace(inputs, memo={}))
    except (AssignmentError, FormatError) as error:
        check_one_line(error)
        return error


@pytest.mark.cases(3)
def test_it_says_what_it_is(allocator: Allocator) -> None:
    assert allocator.help
    assert "\n" not in allocator.help
    assert not allocator.help.endswith(".")
    told = AssignSection.every_key()
    properties = Recipe.model_json_schema()["$defs"]["AssignSection"]["properties"]
    assert allocator.name in properties["method"]["enum"]
    for key, field in allocator.settings.model_fields.items():
        assert field.description, key
        assert told[key].description == f"{allocator.name}: {field.description}"
        assert properties[key]["description"] == told[key].description
    for key in (*allocator.budgets, *allocator.reads):
        methods, _, text = (told[key].description or "").partition(": ")
        assert allocator.name in methods.split(", ")
        assert text
    assert set(allocator.implied) <= set(allocator.reads)


def test_a_section_is_written_as_it_is_read(allocator: Allocator) -> None:
    inputs = inputs_of(0, 2, 5)
    own = {key for name in ALLOCATORS.own for key in ALLOCATORS.get(name).settings.model_fields}
    for config in configs(inputs, allocator):
        data = config.model_dump(mode="json")
        assert data.keys() == {*AssignSection.model_fields, *own, *allocator.settings.model_fields}
        again = AssignSection.model_validate(data)
        assert again == config
        assert again.model_dump(mode="json") == data
        short = config.model_dump(mode="json", exclude_none=True)
        assert None not in short.values()
        assert AssignSection.model_validate(short) == config


def test_keys_of_others_are_refused_by_name(allocator: Allocator) -> None:
    values: dict[str, object] = {
        "bits_per_weight": 3, "code_bits": 3, "expert_bytes": 10**6, "size": 10**7, "bits": 3, "widths": [2, 3],
        "scope": "layer",
        "granularity": "expert", "ndp_latency_ms": 1.0, "trace": "closed", "trace_samples": 3, "metric": "hybrid",
        "hot_bits": 4, "first": "other",
    }  # fmt: skip
    first = {key: values[key] for key in allocator.budgets[:1]}
    mine = {*allocator.budgets, *allocator.reads, *allocator.settings.model_fields}
    for key in values.keys() - mine:
        with pytest.raises(ValueError, match=rf"{key} belongs to [\w, -]+") as caught:
            AssignSection(method=allocator.name, **first, **{key: values[key]})
        takes = f"; {allocator.name} takes " if allocator.budgets and key in budget_keys() else "belongs to"
        assert takes in str(caught.value)
        assert AssignSection(method=allocator.name, **first, **{key: None}).method == allocator.name
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        AssignSection(method=allocator.name, **first, no_such_key=None)
    if allocator.budgets:
        with pytest.raises(ValueError, match=f"method {allocator.name} needs "):
            AssignSection(method=allocator.name, **dict.fromkeys(allocator.budgets))


@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.floats(0, 1), st.sampled_from([0, 1]))
@settings(max_examples=examples(25), deadline=None)
def test_budgets_are_kept_or_refused_with_what_is_possible(
    seed: int, shape: tuple[int, ...], share: float, gpu_experts: int
) -> None:
    inputs = inputs_of(seed, len(shape), shape)
    full = sum(one[FULL] * size for one, size in zip(inputs.bytes, shape, strict=True))
    least = least_bytes(inputs)
    whole = int(least + share * (full - least))
    average = Fraction(4 + int(8 * share), 4)
    values = {"expert_bytes": whole, "size": whole + inputs.other_bytes, "code_bits": str(average)}
    values["bits_per_weight"] = str(Fraction(8 * whole, sum(weights_of(inputs))))
    for name in NAMES:
        allocator = ALLOCATORS.get(name)
        for budget in (key for key in allocator.budgets if key in BUDGETS):
            with suppress(ValidationError):  # an average that the widths cannot have
                config = AssignSection(method=name, gpu_experts=gpu_experts, **{budget: values[budget]})
                found = outcome(mine := replace(inputs, config=config))
                if isinstance(found, Assignment):
                    check_kept(mine, found)
                else:
                    assert isinstance(found, BudgetError)
                    assert share < 1


def test_a_budget_of_nothing_names_the_least(allocator: Allocator) -> None:
    inputs = inputs_of(1, 2, 5)
    for budget in (key for key in allocator.budgets if key in ("expert_bytes", "size")):
        with pytest.raises(BudgetError, match=rf"{budget}: 1 bytes .* the least possible is (\d+)") as caught:
            assign(replace(inputs, config=AssignSection(method=allocator.name, **{budget: 1})))
        check_one_line(caught.value)
        least = int(str(caught.value).partition("ask for at least ")[2].split(",")[0])
        mine = replace(inputs, config=AssignSection(method=allocator.name, **{budget: least}))
        with suppress(BudgetError):  # its share of a layer may not pay
            check_kept(mine, assign(mine))


@pytest.mark.cases(10)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("alike", [False, True], ids=["different", "alike"])
def test_layers_of_any_size_ties_and_dead_experts(allocator: Allocator, shape: tuple[int, ...], alike: bool) -> None:
    inputs = inputs_of(3, len(shape), shape)
    if alike:  # counts, scores, losses and traces of every expert are the same
        counts = tuple(np.full_like(one, 7) for one in inputs.profile.counts)
        profile = replace(inputs.profile, counts=counts, scores=tuple(one / 2 for one in counts))
        rows = [row | {"loss": 1 / row["bits"], "weighted_loss": 1 / row["bits"]} for row in inputs.losses.rows()]
        inputs = replace(inputs, profile=profile, losses=table_of(rows), traces=lambda: [np.ones(n) for n in shape])
    else:  # nothing was routed to the first layer
        dead = [np.zeros_like(one) if layer == 0 else one for layer, one in enumerate(inputs.profile.counts)]
        scores = [np.zeros_like(one) if layer == 0 else one for layer, one in enumerate(inputs.profile.scores)]
        inputs = replace(inputs, profile=replace(inputs.profile, counts=tuple(dead), scores=tuple(scores)))
    for config in configs(inputs, allocator):
        mine = replace(inputs, config=config, memo={})
        with suppress(BudgetError):
            found = assign(mine)
            assert [len(widths) for widths in found.expert_widths()] == list(shape)
            assert set(found.widths()) <= {*BITS, FULL}
            check_kept(mine, found)


@pytest.mark.parametrize("gpu_experts", [0, 2, 5])
def test_the_most_important_experts_are_on_the_gpu_in_full(allocator: Allocator, gpu_experts: int) -> None:
    inputs = inputs_of(4, 3, 5)
    for config in configs(inputs, allocator, gpu_experts=gpu_experts):
        room = {key: 10**6 for key in ("expert_bytes", "size") if getattr(config, key) is not None}
        mine = replace(inputs, config=config.model_copy(update=room), memo={})
        found = assign(mine)
        for layer, (hot, bits) in enumerate(zip(found.hot(), found.bits(), strict=True)):
            assert set(np.flatnonzero(hot)) == set(ranking(importance(mine, layer))[:gpu_experts].tolist())
            assert (bits[hot] == FULL).all()
            assert {choice.tier for choice in found.layers[layer].experts} <= {"gpu", "ndp"}
    config = configs(inputs, allocator, gpu_experts=6)[0]
    with pytest.raises(AssignmentError, match=r"layer\.0: gpu_experts is 6, the layer has 5 experts"):
        assign(replace(inputs, config=config, memo={}))


@pytest.mark.cases(3)
def test_bytes_do_not_depend_on_when_or_in_what_order(allocator: Allocator, tmp_path: Path) -> None:
    """The same file twice; experts in another order have the same widths, where no two are alike."""
    inputs = inputs_of(5, 2, 9)
    rng = np.random.default_rng(5)
    counts = tuple(rng.permutation(np.arange(1, 10) * 5)[None, None].repeat(2, 1) for _ in range(2))
    scores = tuple(one * rng.random(one.shape[-1]) for one in counts)
    inputs = replace(inputs, profile=replace(inputs.profile, counts=counts, scores=scores))
    order = rng.permutation(9)
    place = {int(expert): new for new, expert in enumerate(order)}
    traces = inputs.traces() if inputs.traces is not None else []
    moved = replace(
        inputs,
        profile=replace(inputs.profile, counts=tuple(one[..., order] for one in counts),
                        scores=tuple(one[..., order] for one in scores)),
        losses=table_of([row | {"expert": place[row["expert"]]} for row in inputs.losses.rows()]),
        traces=lambda: [one[order] for one in traces],
    )  # fmt: skip
    for number, config in enumerate(configs(inputs, allocator)):
        files = [tmp_path / f"{number}-{time}.json" for time in range(2)]
        for file in files:
            write_assignment(file, assign(replace(inputs, config=config, memo={})))
        assert files[0].read_bytes() == files[1].read_bytes()
        there, here = (assign(replace(one, config=config, memo={})).bits() for one in (moved, inputs))
        assert [one.tolist() for one in there] == [one[order].tolist() for one in here], config


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_losses_and_traces_that_are_no_numbers(allocator: Allocator, value: float) -> None:
    """Refused in one line that names layer and expert, or of no importance to the method."""
    inputs = inputs_of(6, 2, 5)
    rows = inputs.losses.rows()
    next(row for row in rows if (row["layer"], row["expert"], row["bits"]) == (1, 2, 3))["loss"] = value
    bad = np.ones(5)
    bad[2] = value
    broken = replace(inputs, losses=table_of(rows), traces=lambda: [np.arange(5.0), bad])
    for config in configs(inputs, allocator):
        found = outcome(replace(broken, config=config))
        if isinstance(found, AssignmentError | FormatError):
            assert "layer.1, expert 2" in str(found)
        elif not np.isfinite(value):  # a trace may be below another
            assert found == assign(replace(inputs, config=config, memo={})), config


def test_losses_of_nothing_are_losses(allocator: Allocator) -> None:
    inputs = inputs_of(7, 2, 5)
    rows = [row | {"loss": 0.0, "weighted_loss": 0.0} for row in inputs.losses.rows()]
    for config in configs(inputs, allocator):
        mine = replace(inputs, config=config, losses=table_of(rows), traces=lambda: [np.zeros(5)] * 2, memo={})
        with suppress(BudgetError):
            check_kept(mine, assign(mine))


@pytest.mark.cases(44)
@pytest.mark.parametrize("target", list(targets()))
def test_a_target_loads_it_or_refuses_it_in_a_line(allocator: Allocator, target: str) -> None:
    inputs = inputs_of(8, 2, 6, symmetric=True)
    for config in configs(inputs, allocator):
        mine = replace(inputs, config=config.model_copy(update={"target": target}), memo={})
        found = outcome(mine)
        if isinstance(found, Assignment):
            grid = {"symmetric": True, "group_size": inputs.group_size}
            assert refusal(targets()[target], found.expert_widths(), inputs.profile.layers, **grid) is None


@pytest.mark.cases(5)
def test_a_frontier_shows_it(allocator: Allocator) -> None:
    inputs = inputs_of(9, 2, 8, method="uniform", bits=2)
    points = report.frontier(inputs, AVERAGES, assign)
    mine = [point for point in points if point.method.split(",")[0].split()[0] == allocator.name]
    assert mine
    assert all(np.isfinite([point.objective, point.bits_per_weight]).all() for point in mine)
    labels = {label for label, section in report.sections(inputs, AVERAGES) if section.method == allocator.name}
    assert labels <= {point.method for point in mine}


def test_a_frontier_leaves_out_what_was_not_measured_or_cannot_be_met() -> None:
    inputs = inputs_of(10, 2, 6, method="uniform", bits=2)
    rows = [row for row in inputs.losses.rows() if row["bits"] in (2, 3)]
    points = report.frontier(replace(inputs, losses=table_of(rows)), ("1", "2", "5/2", "3"), assign)
    assert {point.method for point in points} == {"uniform", "frequency", "optimal", "optimal within layers"}
    least = sum(6 * one[2] for one in inputs.bytes)
    assert min(point.expert_bytes for point in points) == least
    assert min(point.bits_per_weight for point in points) == 8 * least / sum(weights_of(inputs))


@pytest.mark.full
def test_another_packages_allocator_runs_from_recipe_to_report_and_frontier(
    moeq_anew: ForkServer, tmp_path: Path
) -> None:
    package, recipe, out = tmp_path / "there", tmp_path / "r.yaml", tmp_path / "run"
    write_package(package, ALLOCATORS.group, ENTRIES, MODULES)
    recipe.write_text(
        "name: halves\nmodel: bundled:tiny-mixtral\ncorpus: {sequences: 8, sequence_length: 32}\n"
        "losses: {bits: [1, 2, 3, 4], methods: [rtn], group_size: 16, per_projection: false}\n"
        "assign: {method: strangers, code_bits: 3, first: other, quantizer: rtn}\n"
        "eval: {tasks: [], perplexity: {sequences: 2, sequence_length: 32}, compare: [\n"
        "  {name: bytes, method: strangers, expert_bytes: 3MB, quantizer: rtn}]}\n"
        "estimate: {grid: {inputs: [64], outputs: [16]}}\n"
    )
    planned = started(package, "plan", str(recipe), "--out", str(out), "--no-probe", "--json")
    assert planned.returncode == 0, planned.stderr
    done = moeq_anew.run("run", recipe, "--out", out, "--json", "--quiet", package=package)
    assert done.code == 0, done.stderr
    made = json.loads((out / "assign" / "assignment.json").read_text("utf-8"))
    assert (made["method"], made["parameters"]["first"]) == ("strangers", "other")
    page = (out / "report" / "report.html").read_text("utf-8")
    assert "the strangers&#x27; halves (first important, expert bytes 3000000)" in page
    looked = moeq_anew.run("assign", "--out", out, "--frontier", "--json", package=package)
    assert looked.code == 0, looked.stderr
    assert "strangers" in {point["method"] for point in json.loads(looked.stdout)["frontier"]["points"]}
    assert looked.stderr.count("left out: strangers 1.0: entry point wrong = strangers_wrong:ALLOCATOR") == 1
    refused = moeq_anew.run("run", recipe, "--out", out, "--set", "assign.method=wrong", package=package)
    assert refused.code == 2
    assert len(refused.stderr.splitlines()) == 1
    assert "a dict is no moeq.assigners.allocator:Allocator" in refused.stderr
    without = moeq_anew.run("report", "--out", out)
    assert without.code == 2
    assert "unknown allocator 'strangers'; known: budget, " in without.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("assign:\n  method: strangers\n  code_bits: 3\n  first: second\n", "line 4: assign.first is 'second'; give"),
        ("assign:\n  method: strangers\n  code_bits: 3\n  fist: other\n", "line 4: unknown key .* mean 'first'"),
        ("assign: {method: uniform, bits: 3, first: other}\n", "first belongs to strangers"),
        (
            "losses: {bits: [1, 2, 3]}\nassign: {method: strangers, code_bits: 3}\n",
            "4 bits is not among losses.bits",
        ),
    ],
)
def test_own_keys_are_checked_as_any_other(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)
