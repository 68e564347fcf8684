"""The effect of single experts: exact, in a fixed order, resumed, filled in, and what assign makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from family_models import save

from moeq import pipeline
from moeq.artifacts import expert_effects as artifact
from moeq.assigners.sensitivity import objective, tables
from moeq.errors import RecipeError
from moeq.models.corpus import Sequences
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import assign, expert_effects
from moeq.stages.context import Context
from moeq.stages.effects import alone, heldout_batches
from moeq.stages.replicas import load_losses

SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "losses.group_size=16", "losses.methods=[gptq]",
    "losses.bits=[1, 2, 3, 4]", "losses.per_projection=false", "eval.compare=[]",
)  # fmt: skip


def context_of(model: Path, out: Path, effects: str, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, f"losses.expert_effects={effects}", *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


def run(context: Context, *stages: str) -> artifact.ExpertEffects:
    pipeline.run(context, stages or ("profile", "losses"))
    found = artifact.read_effects(context.directory("losses"))
    assert found is not None
    return found


def file(context: Context) -> bytes:
    return (context.directory("losses") / artifact.NAME).read_bytes()


@pytest.fixture(scope="module")
def finished(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Context:
    """Every expert measured, on two sequences in batches of one."""
    context = context_of(
        tiny_qwen, tmp_path_factory.mktemp("effects") / "run", "{bits: 2, sequences: 2}",
        "dtype=float32", "losses.working_memory=1MB", "store=" + str(tmp_path_factory.mktemp("store")),
        "assign={method: uniform, bits: 2, loss_weighting: effect}",
    )  # fmt: skip
    run(context, "profile", "losses", "assign")
    return context


def again(finished: Context, out: Path, effects: str, *overrides: str) -> Context:
    """Another run that finds its replicas in the same store."""
    shared = ("dtype=float32", "losses.working_memory=1MB", f"store={finished.store}")
    return context_of(Path(finished.model_name), out, effects, *shared, *overrides)


def test_every_effect_is_the_divergence_of_the_whole_model(finished: Context) -> None:
    """Against full forward passes in which the expert's weights are those of its replica, in float64."""
    found = artifact.read_effects(finished.directory("losses"))
    assert found is not None
    assert found.measured == sum(layer.num_experts for layer in finished.model.layers)
    assert all(all(row) for row in found.is_measured)
    batches: list[Sequences] = heldout_batches(finished, 2)  # type: ignore[assignment]
    model = finished.model.module
    for layer, expert in ((0, 1), (0, 6), (1, 0), (1, 4)):
        here = finished.model.layers[layer]
        replica = alone(finished, here, 2, "gptq").packed(expert, 2)
        total, tokens = 0.0, 0
        experts = model.get_submodule(here.name)
        for batch in batches:
            with torch.no_grad():
                exact = model(input_ids=batch.input_ids).logits.double().log_softmax(-1)
                kept = {name: getattr(experts, name).data.clone() for name in ("gate_up_proj", "down_proj")}
                first = torch.cat([replica["gate_proj"].dequantize(), replica["up_proj"].dequantize()])
                experts.gate_up_proj.data[expert] = first
                experts.down_proj.data[expert] = replica["down_proj"].dequantize()
                changed = model(input_ids=batch.input_ids).logits.double().log_softmax(-1)
                for name, weight in kept.items():
                    getattr(experts, name).data.copy_(weight)
            total += float((exact.exp() * (exact - changed)).sum())
            tokens += batch.input_ids.numel()
        assert found.divergence[layer][expert] == pytest.approx(total / tokens, rel=1e-3, abs=1e-9)
    assert max(map(max, found.divergence)) > 0


@pytest.mark.full
def test_workers_measure_what_one_process_does(
    finished: Context, tmp_path: Path, parts: list[list[tuple[str, Any]]]
) -> None:
    """Two at first, of every worker one, then as many as the time asks for."""
    alone = again(finished, tmp_path / "alone", "{bits: 2, sequences: 2, experts: 9}", "threads=1")
    run(alone)
    assert parts == []
    apart = again(finished, tmp_path / "apart", "{bits: 2, sequences: 2, experts: 9}", "threads=1", "workers=2")
    run(apart)
    counts = [sum(len(places) for _, (_, places) in some) for some in parts]
    assert counts == [2, 7]
    assert file(apart) == file(alone)
    more = again(finished, tmp_path / "apart", "{bits: 2, sequences: 2, experts: 5}", "threads=1", "workers=2")
    assert run(more).measured == 5
    assert len(parts) == 2, "what is there is not measured again"


def test_most_is_expected_first_and_every_layer_has_its_turn() -> None:
    expected = [np.array([3.0, 9.0, 1.0]), np.array([0.5, 0.2]), np.array([4.0, 8.0])]
    assert expert_effects.order(expected, 0) == [(0, 1), (2, 1), (1, 0), (2, 0), (0, 0), (0, 2), (1, 1)]
    equal = [np.zeros(4), np.zeros(4)]
    assert expert_effects.order(equal, 1) == expert_effects.order(equal, 1) != expert_effects.order(equal, 2)
    assert sorted(expert_effects.order(equal, 1)) == [(layer, expert) for layer in range(2) for expert in range(4)]


def test_a_number_of_experts_is_measured_and_the_rest_follows_the_fit(finished: Context, tmp_path: Path) -> None:
    whole = artifact.read_effects(finished.directory("losses"))
    found = run(again(finished, tmp_path / "run", "{bits: 2, sequences: 2, experts: 5}"))
    assert whole is not None
    assert (found.measured, sum(map(sum, found.is_measured))) == (5, 5)
    assert all(any(row) for row in found.is_measured)
    rows = load_losses(finished).rows("expert")
    for layer, measured in enumerate(found.is_measured):
        mine = [row for row in rows if (row["layer"], row["bits"]) == (layer, 2)]
        expected = [row["weighted_loss"] * (row["calibration_tokens"] + row["heldout_tokens"]) for row in mine]
        ratio = sum(e for e, m in zip(found.divergence[layer], measured, strict=True) if m) / sum(
            e for e, m in zip(expected, measured, strict=True) if m
        )
        assert found.fit[layer] == pytest.approx(ratio)
        for expert, known in enumerate(measured):
            wanted = whole.divergence[layer][expert] if known else found.fit[layer] * expected[expert]
            assert found.divergence[layer][expert] == pytest.approx(wanted)


def test_a_longer_run_goes_on_and_ends_as_one_that_was_never_interrupted(
    finished: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[int, int]] = []
    measure = expert_effects._Worker.measure

    def counting(self: object, places: list[tuple[int, int]]) -> np.ndarray:
        if len(measured) >= 4:
            raise KeyboardInterrupt
        measured.extend(places)
        return measure(self, places)  # type: ignore[arg-type]

    monkeypatch.setattr(expert_effects, "AT_ONCE", 3)
    monkeypatch.setattr(expert_effects._Worker, "measure", counting)
    with pytest.raises(KeyboardInterrupt):
        run(again(finished, tmp_path / "run", "{bits: 2, sequences: 2}"))
    monkeypatch.setattr(expert_effects._Worker, "measure", measure)
    assert len(measured) == 4
    found = run(again(finished, tmp_path / "run", "{bits: 2, sequences: 2, experts: 2}"))
    assert found.measured == 2
    monkeypatch.setattr(expert_effects._Worker, "measure",
                        lambda self, places: measured.extend(places) or measure(self, places))  # fmt: skip
    last = again(finished, tmp_path / "run", "{bits: 2, sequences: 2}")
    assert run(last).measured == len(measured) == len(set(measured))
    assert file(last) == file(finished)


def test_the_time_is_that_of_all_runs(finished: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**6, 10))  # every measurement takes ten seconds
    monkeypatch.setattr(expert_effects.time, "monotonic", lambda: next(clock))
    first = run(again(finished, tmp_path / "run", "{bits: 2, sequences: 2, seconds: 0.001}"))
    assert first.measured == 1
    more = again(finished, tmp_path / "run", "{bits: 2, sequences: 2, seconds: 30}")
    assert run(more).measured > 1
    known = artifact.read_measured(more.directory("losses"), artifact.Measured.model_validate_json(
        (more.directory("losses") / artifact.MEASURED).read_bytes()).inputs)  # fmt: skip
    assert known.seconds >= 30
    fewer = again(finished, tmp_path / "run", "{bits: 2, sequences: 2, seconds: 20}")
    assert run(fewer).divergence == run(more).divergence  # what is there stays
    other = run(again(finished, tmp_path / "run", "{bits: 3, sequences: 2, seconds: 0.001}"))
    assert (other.bits, other.measured) == (3, 1)


def test_streamed_equals_loaded(finished: Context, tmp_path: Path) -> None:
    found = run(again(finished, tmp_path / "run", "{bits: 2, sequences: 2, experts: 4}", "stream=always"))
    whole = run(again(finished, tmp_path / "other", "{bits: 2, sequences: 2, experts: 4}", "stream=never"))
    assert found == whole


@pytest.mark.full
def test_families_whose_layers_read_more_run_whole(tmp_path: Path) -> None:
    """Each decoder layer that cannot be begun at is named, once, by one process and by several; the effects are those
    of whole passes."""
    model = save("switch_transformers", tmp_path / "model")
    told, effects = [], []
    for number in (1, 2):
        said: list[str] = []

        class Ears(Reporter):
            def say(self, text: str, into: list[str] = said) -> None:
                into.append(text)

        workers = ("threads=1", f"workers={number}") if number > 1 else ("threads=1",)
        folder = tmp_path / str(number)
        context = context_of(model, folder, "{bits: 2, sequences: 2, experts: 6}", "dtype=float32", *workers)
        context.reporter = Ears(quiet=True)
        effects.append(run(context))
        told.append([line for line in said if "needs more than the layer before it" in line])
    assert told[0]
    assert sorted(told[1]) == sorted(told[0])
    assert len(set(told[0])) == len(told[0])
    assert effects[1] == effects[0]
    assert max(map(max, effects[0].divergence)) > 0


def test_assign_by_effects(finished: Context) -> None:
    effects = artifact.read_effects(finished.directory("losses"))
    inputs = assign.inputs_of(finished, finished.recipe.assign, "x")
    uniform = assign.load(finished)
    assert effects is not None
    assert objective(inputs, uniform) == pytest.approx(sum(max(0, e) for row in effects.divergence for e in row))
    table = load_losses(finished).matrix("gptq", "weighted_loss")
    for layer, mine in enumerate(tables(inputs)):
        rows = zip(effects.divergence[layer], table[layer][3], table[layer][2], strict=True)
        ratio = [max(0, e) * three / two if two > 0 else 0 for e, three, two in rows]
        assert mine.losses[3].tolist() == pytest.approx(ratio)
    columns = pq.read_table(finished.directory("assign") / assign.SENSITIVITIES).to_pydict()
    assert columns["effect"] == [effect for row in effects.divergence for effect in row]
    assert set(columns["effect_measured"]) == {True}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["assign={method: uniform, bits: 2, loss_weighting: effect}"], "loss_weighting effect needs losses.expert"),
        (["losses.expert_effects={bits: 8}", "losses.bits=[1, 2, 3, 4]"], "expert_effects: 8 bits is not among"),
        (["losses.expert_effects={seconds: 0}"], "a number above 0"),
        (
            ["losses.expert_effects={}", "losses.layer_effects={}",
             "assign={method: uniform, bits: 2, loss_weighting: effect, layer_weighting: measured}"],
            "goes without layer_weighting",
        ),
    ],
)  # fmt: skip
def test_recipes_that_make_no_sense(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(None, overrides)
