"""The time of effects: more with more passes, never more than the recipe allows, and that of the run itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from moeq.models.walk import LayerInputs
from moeq.planning import probe
from moeq.recipe import LossesSection, load_recipe
from moeq.stages.context import Context
from moeq.stages.needs import Rates, Sizes
from moeq.stages.order import BY_NAME

RATES = Rates(
    matrix_flops=1e10, expert_seconds=1e-4, elementwise_bytes=1e9, losses_flops=1e10,
    dequantized_weights=1e8, read_bytes=1e9, cached_bytes=2e9, write_bytes=1e9, hash_bytes=1e9,
)  # fmt: skip


def seconds_of(stage: str, model: Path, *overrides: str, streams: bool = False) -> float:
    """Seconds of a stage, without those of writing its files."""
    recipe = load_recipe(None, ["corpus.sequences=64", "corpus.sequence_length=64", "eval.compare=[]", *overrides])
    sizes = Sizes(Context(recipe=recipe, model_name=str(model), out=model / "run"))
    sizes.streams = streams
    return BY_NAME[stage].needs(sizes).seconds(RATES)


def losses_seconds(model: Path, *overrides: str, streams: bool = False) -> float:
    """Seconds of losses beyond those of the recipe without effects."""
    with_effects, without = (
        seconds_of("losses", model, "eval.perplexity=null", *more, streams=streams) for more in (overrides, ())
    )
    return with_effects - without


def test_compiling_is_not_measured(tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a fresh installation compiles for half a minute; here it takes fifty times as long."""
    recipe = load_recipe(None, ["corpus.sequences=64", "corpus.sequence_length=64", "eval.perplexity=null"])
    sizes = Sizes(Context(recipe=recipe, model_name=str(tiny_mixtral), out=tiny_mixtral / "run"))

    def rate(first: float) -> float:
        waits = iter([first])
        monkeypatch.setattr(probe, "quantize_layer", lambda *_: time.sleep(next(waits, 0.02)))
        return float(probe.losses_flops(sizes)[0])

    assert rate(1.0) > 0.2 * rate(0.02)


def test_matrices_of_the_probe_are_such_as_the_method_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Multiples of 128 for exl3, at one width, since even the least takes long."""
    recipe = load_recipe(None, ["losses.methods=[exl3]", "assign.quantizer=exl3", "eval.compare=[]"])
    sizes = Sizes(Context(recipe=recipe, model_name="bundled:tiny-mixtral", out=tmp_path / "run"))
    seen: list[tuple[int, int, int]] = []

    def quantized(inputs: LayerInputs, weights: object, math: object, section: LossesSection) -> None:
        seen.append((inputs.layer.hidden_size, inputs.layer.intermediate_size, len(section.bits)))

    monkeypatch.setattr(probe, "quantize_layer", quantized)
    assert float(probe.losses_flops(sizes)[0]) > 0
    assert set(seen) == {(128, 128, 1)}


def test_layer_effects_take_one_run_that_carries_the_layers(tiny_mixtral: Path) -> None:
    def seconds(count: int | str, *more: str, streams: bool = False) -> float:
        return losses_seconds(tiny_mixtral, f"losses.layer_effects={{sequences: {count}}}", *more, streams=streams)

    few, many = seconds(4), seconds(16)
    assert 0 < few < many < 5 * few
    assert seconds(99) == pytest.approx(many)  # 16 held out
    assert seconds("null") == pytest.approx(many)  # 16 take no more than a pass over the text
    read, read_in_groups = seconds(16, streams=True), seconds(16, "losses.working_memory=50kB", streams=True)
    assert many < read < read_in_groups


def test_expert_effects_take_what_they_need_and_at_most_what_they_may(tiny_mixtral: Path) -> None:
    def seconds(section: str) -> float:
        return losses_seconds(tiny_mixtral, f"losses.expert_effects={section}")

    whole, five, one = (seconds(s) for s in ("{}", "{experts: 5}", "{experts: 1}"))
    assert 0 < one < five < whole
    assert seconds("{experts: 99}") == pytest.approx(whole)
    assert seconds(f"{{seconds: {whole / 2}}}") == pytest.approx(whole / 2)
    assert seconds(f"{{seconds: {2 * whole}}}") == pytest.approx(whole)
    assert 0 < seconds("{seconds: 1.e-9}") <= one  # the first expert is measured whatever it takes


def test_an_expert_takes_less_than_a_whole_pass(tiny_mixtral: Path) -> None:
    """5 experts in each of 2 layers, from their layer on: less than as many passes of the whole model."""
    layers = losses_seconds(tiny_mixtral, "losses.layer_effects={sequences: 16}")  # 3.5 whole passes
    assert losses_seconds(tiny_mixtral, "losses.expert_effects={sequences: 16}") < 10 / 3.5 * layers * 1.2


def test_curves_of_low_precision_take_a_pass_for_each_point(tiny_mixtral: Path) -> None:
    def seconds(section: str, streams: bool = False) -> float:
        text = "eval.perplexity={sequences: 16, sequence_length: 64, batch_size: 4}"
        with_curves, without = (
            seconds_of("eval", tiny_mixtral, text, f"eval.low_precision={sections}", streams=streams)
            for sections in (f"[{section}]", "[]")
        )
        return float(with_curves - without)

    few, many = (seconds(f"{{shares: {shares}}}") for shares in ([0, 1], [0, 0.25, 0.5, 1]))
    assert 0 < few < many < 2 * few
    assert seconds("{shares: [0, 1], seeds: 8}") == pytest.approx(2 * few, rel=0.05)
    assert seconds("{shares: [0, 1], sequences: 4}") < few
    assert seconds("{shares: [0, 1]}", streams=True) > few
